//! Diesel's own connection types, for what cannot be asked of just any connection, and the statements
//! that a connection of them sends.

use std::sync::Arc;

use diesel::connection::{Connection, Instrumentation, InstrumentationEvent};
use diesel::r2d2::{ConnectionManager, Error as PoolError, R2D2Connection};
use parking_lot::Mutex;
use r2d2::ManageConnection;

use super::Engine;
use super::database::Database;

/// Evaluates an expression in which `$C` is the type of the engine's connections.
///
/// ```text
/// on_engine!(engine, C => transfer(GuardedConnection::new(connect::<C>(&database))))
/// ```
macro_rules! on_engine {
    ($engine:expr, $C:ident => $body:expr) => {
        match $engine {
            #[cfg(feature = "sqlite")]
            $crate::support::Engine::Sqlite => {
                type $C = diesel::SqliteConnection;
                $body
            }
            #[cfg(feature = "postgres")]
            $crate::support::Engine::Postgres => {
                type $C = diesel::PgConnection;
                $body
            }
            #[cfg(feature = "mysql")]
            $crate::support::Engine::Mysql | $crate::support::Engine::Mariadb => {
                type $C = diesel::MysqlConnection;
                $body
            }
            #[allow(unreachable_patterns, reason = "a build may have every engine")]
            engine => panic!("this build of the tests has no {engine}"),
        }
    };
}
pub(crate) use on_engine;

/// A connection of the work's to the database.
#[track_caller]
pub(crate) fn connect<C: Connection>(engine: Engine, url: &str) -> C {
    let mut connection = C::establish(url).unwrap_or_else(|error| panic!("{engine}: {error}"));
    if engine == Engine::Sqlite {
        connection
            .batch_execute("PRAGMA busy_timeout = 10000")
            .expect("a setting");
    }
    connection
}

/// What was sent, in order.
#[derive(Clone, Default)]
pub(crate) struct Statements(Arc<Mutex<Vec<String>>>);

impl Statements {
    /// What was sent since the last call of this.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock())
    }
}

impl Instrumentation for Statements {
    fn on_connection_event(&mut self, event: InstrumentationEvent<'_>) {
        if let InstrumentationEvent::StartQuery { query, .. } = event {
            self.0.lock().push(query.to_string());
        }
    }
}

/// Makes connections that keep what they send.
pub(crate) struct Watched<C: R2D2Connection + 'static> {
    manager: ConnectionManager<C>,
    statements: Statements,
}

impl<C: R2D2Connection + 'static> Watched<C> {
    pub(crate) fn new(database: &Database, statements: &Statements) -> Watched<C> {
        Watched {
            manager: ConnectionManager::new(database.url()),
            statements: statements.clone(),
        }
    }
}

impl<C: R2D2Connection + 'static> ManageConnection for Watched<C> {
    type Connection = C;
    type Error = PoolError;

    fn connect(&self) -> Result<C, PoolError> {
        let mut connection = self.manager.connect()?;
        connection.set_instrumentation(self.statements.clone());
        Ok(connection)
    }

    fn is_valid(&self, connection: &mut C) -> Result<(), PoolError> {
        self.manager.is_valid(connection)
    }

    fn has_broken(&self, connection: &mut C) -> bool {
        self.manager.has_broken(connection)
    }
}
