//! The databases: a new SQLite file, and the servers whose URLs are in the environment.

use std::env;

use diesel::prelude::*;
use diesel_lease::BoxError;
use tempfile::TempDir;

use super::bare::Bare;

pub(crate) struct Engine {
    pub(crate) name: &'static str,
    pub(crate) url: String,
    open: fn(&str) -> Result<Box<dyn Bare>, BoxError>,
    /// Its version, and what a commit means to it.
    facts: &'static str,
    /// How many sessions there are in the database.
    sessions: &'static str,
    _directory: Option<TempDir>,
}

/// Name, variable, how to connect, the questions for facts and sessions.
type Server = (
    &'static str,
    &'static str,
    fn(&str) -> Result<Box<dyn Bare>, BoxError>,
    &'static str,
    &'static str,
);

const SERVERS: &[Server] = &[
    #[cfg(feature = "postgres")]
    (
        "postgres",
        "DIESEL_LEASE_PG_URL",
        |url| Ok(Box::new(PgConnection::establish(url)?)),
        "SELECT 'PostgreSQL ' || current_setting('server_version')
            || ', fsync=' || current_setting('fsync')
            || ', synchronous_commit=' || current_setting('synchronous_commit') AS answer",
        "SELECT COUNT(*)::text AS answer FROM pg_stat_activity WHERE datname = current_database()",
    ),
    #[cfg(feature = "mysql")]
    (
        "mariadb",
        "DIESEL_LEASE_MARIADB_URL",
        open_mysql,
        MYSQL_FACTS,
        MYSQL_SESSIONS,
    ),
    #[cfg(feature = "mysql")]
    (
        "mysql",
        "DIESEL_LEASE_MYSQL_URL",
        open_mysql,
        MYSQL_FACTS,
        MYSQL_SESSIONS,
    ),
];

#[cfg(feature = "mysql")]
const MYSQL_FACTS: &str =
    "SELECT CAST(CONCAT(IF(VERSION() LIKE '%MariaDB%', '', 'MySQL '), VERSION(),
    ', innodb_flush_log_at_trx_commit=', @@innodb_flush_log_at_trx_commit,
    IF(@@log_bin, CONCAT(', sync_binlog=', @@sync_binlog), ', log_bin=OFF')) AS CHAR) AS answer";

#[cfg(feature = "mysql")]
const MYSQL_SESSIONS: &str = "SELECT CAST(COUNT(*) AS CHAR) AS answer
    FROM information_schema.processlist WHERE db = DATABASE()";

#[cfg(feature = "mysql")]
fn open_mysql(url: &str) -> Result<Box<dyn Bare>, BoxError> {
    Ok(Box::new(MysqlConnection::establish(url)?))
}

impl Engine {
    /// Those that are asked for by name, or all there are.
    pub(crate) fn all(asked: &[String]) -> Result<Vec<Engine>, BoxError> {
        let is_asked = |name: &str| asked.is_empty() || asked.iter().any(|asked| asked == name);
        let mut engines = Vec::new();
        #[cfg(feature = "sqlite")]
        if is_asked("sqlite") {
            engines.push(sqlite()?);
        }
        for &(name, variable, open, facts, sessions) in
            SERVERS.iter().filter(|server| is_asked(server.0))
        {
            match env::var(variable) {
                Ok(url) => engines.push(Engine {
                    name,
                    url,
                    open,
                    facts,
                    sessions,
                    _directory: None,
                }),
                Err(_) if asked.is_empty() => eprintln!("{name}: {variable} is not set"),
                Err(_) => return Err(format!("{variable} is not set").into()),
            }
        }
        Ok(engines)
    }

    pub(crate) fn connect(&self) -> Result<Box<dyn Bare>, BoxError> {
        (self.open)(&self.url)
    }

    /// To the database of another process of this bench.
    pub(crate) fn connect_to(&self, url: &str) -> Result<Box<dyn Bare>, BoxError> {
        (self.open)(url)
    }

    pub(crate) fn sessions(&self, connection: &mut dyn Bare) -> Result<f64, BoxError> {
        Ok(connection.ask(self.sessions)?.parse()?)
    }

    pub(crate) fn facts(&self) -> Result<String, BoxError> {
        Ok(self.connect()?.ask(self.facts)?)
    }
}

/// Set up as the library does it: a file in WAL mode, `synchronous` at FULL.
#[cfg(feature = "sqlite")]
fn sqlite() -> Result<Engine, BoxError> {
    let directory = tempfile::tempdir()?;
    let url = directory
        .path()
        .join("bench.db")
        .to_string_lossy()
        .into_owned();
    let open = |url: &str| {
        let mut connection = SqliteConnection::establish(url)?;
        for pragma in ["PRAGMA busy_timeout = 5000", "PRAGMA synchronous = FULL"] {
            diesel::sql_query(pragma).execute(&mut connection)?;
        }
        Ok(Box::new(connection) as Box<dyn Bare>)
    };
    let facts = "SELECT 'SQLite ' || sqlite_version() || ', journal_mode='
        || (SELECT journal_mode FROM pragma_journal_mode)
        || ', synchronous=' || (SELECT synchronous FROM pragma_synchronous) AS answer";
    Ok(Engine {
        name: "sqlite",
        url,
        open,
        facts,
        sessions: "SELECT '0' AS answer",
        _directory: Some(directory),
    })
}
