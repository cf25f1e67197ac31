//! MySQL and MariaDB for the tests.

use diesel::connection::SimpleConnection;
use diesel::prelude::*;

use super::raw::{AnyConnection, Dialect};

pub(crate) const DIALECT: Option<Dialect> = Some(Dialect {
    connect: |url| {
        let mut connection = MysqlConnection::establish(url)?;
        // whatever a test has made the server's default
        connection
            .batch_execute("SET autocommit = 1")
            .map_err(ConnectionError::CouldntSetupConfiguration)?;
        Ok(AnyConnection::Mysql(connection))
    },
    create: |database, user| {
        vec![
            format!("DROP DATABASE IF EXISTS {database}"),
            format!("CREATE DATABASE {database}"),
            format!("GRANT ALL ON {database}.* TO '{user}'@'%'"),
        ]
    },
    drop: |database, user| {
        vec![
            "SET lock_wait_timeout = 10".to_owned(),
            format!("DROP DATABASE IF EXISTS {database}"),
            format!("REVOKE ALL ON {database}.* FROM '{user}'@'%'"),
        ]
    },
    sessions: |database| {
        format!(
            "SELECT CAST(id AS SIGNED) FROM information_schema.processlist WHERE db = '{database}'"
        )
    },
    kill: |session| format!("KILL {session}"),
    session: "SELECT CAST(connection_id() AS SIGNED)",
    now_ms: "(UNIX_TIMESTAMP() * 1000 + MICROSECOND(NOW(3)) DIV 1000)",
});
