//! Where the locks are: a database URL, of which no password gets out.

use std::sync::Arc;
use std::time::Duration;

use diesel::result::{ConnectionError, ConnectionResult};

use super::LockScope;
use super::error::LockError;
use super::session::LockSession;
use super::{mysql, postgres, sqlite};
use crate::error::Error;
use crate::store::connect::{postgres_url, secrets, sqlite_path, without};
use crate::unsupported::Unsupported;

pub(super) struct Target {
    /// What a connection is made from: a URL, or the path of a SQLite file.
    url: String,
    secrets: Vec<String>,
    engine: Engine,
    #[allow(dead_code, reason = "for MySQL")]
    scope: LockScope,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    Postgres,
    Mysql,
    Sqlite,
}

impl Target {
    pub(super) fn parse(url: &str, scope: LockScope, step: Duration) -> Result<Target, LockError> {
        let (engine, to) = match url.split_once("://") {
            Some(("postgres" | "postgresql", _)) => (Engine::Postgres, postgres_url(url, step)),
            Some(("mysql", _)) => (Engine::Mysql, url.to_owned()),
            Some(("sqlite", path)) => (Engine::Sqlite, sqlite_path(path).map_err(refused)?),
            Some(_) => {
                let why = "the scheme is none of postgres, mysql and sqlite".to_owned();
                let error = ConnectionError::InvalidConnectionUrl(why);
                return Err(LockError::Connect(Arc::new(error)));
            }
            None => (Engine::Sqlite, sqlite_path(url).map_err(refused)?),
        };
        if scope == LockScope::Server && engine != Engine::Mysql {
            return Err(LockError::Unsupported(Arc::new(Unsupported::Scope)));
        }
        Ok(Target {
            url: to,
            secrets: secrets(url),
            engine,
            scope,
        })
    }

    /// A new connection for the lock of `key`, on which nothing is locked yet.
    pub(super) fn open(&self, key: &str) -> Result<Box<dyn LockSession>, LockError> {
        match self.engine {
            Engine::Postgres => postgres::open(self, key),
            Engine::Mysql => mysql::open(self, key),
            Engine::Sqlite => sqlite::open(self, key),
        }
    }

    pub(super) fn establish<C>(
        &self,
        connect: impl FnOnce(&str) -> ConnectionResult<C>,
    ) -> Result<C, LockError> {
        connect(&self.url)
            .map_err(|error| LockError::Connect(Arc::new(without(&self.secrets, error))))
    }

    #[allow(dead_code, reason = "for SQLite")]
    pub(super) fn path(&self) -> &str {
        &self.url
    }

    #[allow(dead_code, reason = "for MySQL")]
    pub(super) fn scope(&self) -> LockScope {
        self.scope
    }
}

fn refused(error: Error) -> LockError {
    match error {
        Error::Unsupported(why) => LockError::Unsupported(Arc::new(why)),
        Error::Connect(error) => LockError::Connect(Arc::new(error)),
        other => LockError::Connect(Arc::new(ConnectionError::InvalidConnectionUrl(
            other.to_string(),
        ))),
    }
}
