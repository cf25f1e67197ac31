//! SQLite for the tests.

use diesel::connection::SimpleConnection;
use diesel::prelude::*;

use super::raw::{AnyConnection, Dialect};

pub(crate) const DIALECT: Option<Dialect> = Some(Dialect {
    connect: |url| {
        let mut connection = SqliteConnection::establish(url)?;
        connection
            .batch_execute("PRAGMA busy_timeout = 10000")
            .map_err(ConnectionError::CouldntSetupConfiguration)?;
        Ok(AnyConnection::Sqlite(connection))
    },
    create: |_database, _user| Vec::new(),
    drop: |_database, _user| Vec::new(),
    sessions: |_database| panic!("SQLite has no server to ask"),
    kill: |_session| panic!("SQLite has no sessions to kill"),
    session: "SELECT 0",
    now_ms: "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)",
});
