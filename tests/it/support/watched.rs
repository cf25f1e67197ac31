//! Leases whose statements are recorded, as Diesel tells of them.

use std::marker::PhantomData;
use std::sync::Arc;

use diesel::connection::{Connection, InstrumentationEvent};
use diesel::r2d2::ManageConnection;
use diesel::result::ConnectionError;
use diesel_lease::{Builder, Error, Leases};
use parking_lot::Mutex;

use super::Engine;
use super::database::Database;

/// What was sent, in the order it was sent.
#[derive(Clone, Default)]
pub(crate) struct Watch(Arc<Mutex<Vec<Sent>>>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// A statement, without the values bound to it.
    Ran(String),
    /// It was prepared for this, and is kept prepared.
    Kept(String),
}

impl Watch {
    /// Leases in the database that are watched.
    pub(crate) fn build(&self, builder: Builder, database: &Database) -> Leases {
        self.build_after(builder, database, "")
    }

    /// The same, where every session first runs a statement of the test's.
    pub(crate) fn build_after(
        &self,
        builder: Builder,
        database: &Database,
        first: &'static str,
    ) -> Leases {
        managed(builder, database.engine(), database.url(), first, self).expect("leases")
    }

    /// What was sent since the last time this was asked.
    pub(crate) fn take(&self) -> Vec<Sent> {
        std::mem::take(&mut self.0.lock())
    }

    /// The same, without what says that a statement is kept.
    pub(crate) fn take_ran(&self) -> Vec<String> {
        let ran = |sent| match sent {
            Sent::Ran(sql) => Some(sql),
            Sent::Kept(_) => None,
        };
        self.take().into_iter().filter_map(ran).collect()
    }

    fn record(&self, event: &InstrumentationEvent<'_>) {
        let sent = match event {
            InstrumentationEvent::StartQuery { query, .. } => {
                let query = query.to_string();
                let sql = query.split(" -- binds: ").next().unwrap_or_default();
                Sent::Ran(sql.trim().to_owned())
            }
            InstrumentationEvent::CacheQuery { sql, .. } => Sent::Kept(sql.trim().to_owned()),
            _ => return,
        };
        self.0.lock().push(sent);
    }
}

/// Leases over a connection manager of the test's own.
pub(crate) fn managed(
    builder: Builder,
    engine: Engine,
    url: &str,
    first: &'static str,
    watch: &Watch,
) -> Result<Leases, Error> {
    match engine {
        #[cfg(feature = "sqlite")]
        Engine::Sqlite => {
            builder.build_with(Manager::<diesel::SqliteConnection>::new(url, first, watch))
        }
        #[cfg(feature = "postgres")]
        Engine::Postgres => {
            builder.build_with(Manager::<diesel::PgConnection>::new(url, first, watch))
        }
        #[cfg(feature = "mysql")]
        Engine::Mysql | Engine::Mariadb => {
            builder.build_with(Manager::<diesel::MysqlConnection>::new(url, first, watch))
        }
        #[allow(
            unreachable_patterns,
            reason = "reached where an engine is not built in"
        )]
        _ => panic!("this build of the tests has no {engine}"),
    }
}

struct Manager<C> {
    url: String,
    first: &'static str,
    watch: Watch,
    connection: PhantomData<fn() -> C>,
}

impl<C> Manager<C> {
    fn new(url: &str, first: &'static str, watch: &Watch) -> Manager<C> {
        Manager {
            url: url.to_owned(),
            first,
            watch: watch.clone(),
            connection: PhantomData,
        }
    }
}

impl<C: Connection + Send + 'static> ManageConnection for Manager<C> {
    type Connection = C;
    type Error = ConnectionError;

    fn connect(&self) -> Result<C, ConnectionError> {
        let mut connection = C::establish(&self.url)?;
        if !self.first.is_empty() {
            connection
                .batch_execute(self.first)
                .map_err(ConnectionError::CouldntSetupConfiguration)?;
        }
        let watch = self.watch.clone();
        connection.set_instrumentation(move |event: InstrumentationEvent<'_>| watch.record(&event));
        Ok(connection)
    }

    fn is_valid(&self, _: &mut C) -> Result<(), ConnectionError> {
        Ok(())
    }

    fn has_broken(&self, _: &mut C) -> bool {
        false
    }
}
