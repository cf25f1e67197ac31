//! PostgreSQL for the tests.

use diesel::prelude::*;

use super::raw::{AnyConnection, Dialect};

pub(crate) const DIALECT: Option<Dialect> = Some(Dialect {
    connect: |url| PgConnection::establish(url).map(AnyConnection::Pg),
    create: |database, user| {
        vec![
            format!("DROP DATABASE IF EXISTS {database} WITH (FORCE)"),
            format!("CREATE DATABASE {database} OWNER {user} TEMPLATE template0"),
        ]
    },
    drop: |database, _user| vec![format!("DROP DATABASE IF EXISTS {database} WITH (FORCE)")],
    sessions: |database| {
        // an autovacuum worker has a database too
        format!(
            "SELECT pid::bigint FROM pg_stat_activity \
             WHERE datname = '{database}' AND backend_type = 'client backend'"
        )
    },
    kill: |session| format!("SELECT pg_terminate_backend({session})"),
    session: "SELECT pg_backend_pid()::bigint",
    now_ms: "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint",
});
