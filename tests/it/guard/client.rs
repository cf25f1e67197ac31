//! The ways into the guard, behind one face: a plain connection and a guarded one, alone and from a
//! pool, and the fence by hand.

use std::fmt;
use std::sync::Arc;

use diesel::connection::{Instrumentation, InstrumentationEvent, LoadConnection};
use diesel::dsl::sql;
use diesel::expression::SqlLiteral;
use diesel::prelude::*;
use diesel::query_builder::{QueryFragment, SqlQuery};
use diesel::query_dsl::methods::LoadQuery;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Pool, R2D2Connection};
use diesel::sql_types::BigInt;
use diesel_lease::{GuardedConnection, LeaseBackend, LeaseGuard, Tenure};
use parking_lot::Mutex;
use r2d2::NopConnectionCustomizer;

use crate::support::{Engine, LONG};

/// What runs in a transaction.
pub(crate) type Work<'a> = dyn FnMut(&mut dyn Sql) -> QueryResult<()> + 'a;

/// A connection of any type.
pub(crate) trait Sql {
    /// Runs one statement.
    fn run(&mut self, statement: &str) -> QueryResult<()>;

    /// Runs statements as plain text.
    fn batch(&mut self, statements: &str) -> QueryResult<()>;

    /// The one number that a query gives.
    fn number(&mut self, query: &str) -> QueryResult<i64>;

    /// Runs `work` as Diesel's `transaction` does.
    fn transact(&mut self, work: &mut Work<'_>) -> QueryResult<()>;

    fn fence(&mut self, tenure: &Tenure) -> QueryResult<()>;

    fn begin_test_transaction(&mut self) -> QueryResult<()>;

    /// Notes in `sent` what is sent from here on.
    fn note(&mut self, sent: &Sent);
}

impl<C> Sql for C
where
    C: LoadConnection + 'static,
    C::Backend: LeaseBackend,
    SqlQuery: QueryFragment<C::Backend>,
    for<'query> SqlLiteral<BigInt>: LoadQuery<'query, C, i64>,
{
    fn run(&mut self, statement: &str) -> QueryResult<()> {
        let statement = diesel::sql_query(statement);
        self.execute_returning_count(&statement).map(drop)
    }

    fn batch(&mut self, statements: &str) -> QueryResult<()> {
        self.batch_execute(statements)
    }

    fn number(&mut self, query: &str) -> QueryResult<i64> {
        sql::<BigInt>(query).get_result(self)
    }

    fn transact(&mut self, work: &mut Work<'_>) -> QueryResult<()> {
        Connection::transaction(self, |conn| work(conn))
    }

    fn fence(&mut self, tenure: &Tenure) -> QueryResult<()> {
        tenure.fence(self)
    }

    fn begin_test_transaction(&mut self) -> QueryResult<()> {
        Connection::begin_test_transaction(self)
    }

    fn note(&mut self, sent: &Sent) {
        let noted = Arc::clone(&sent.0);
        self.set_instrumentation(Events(Box::new(move |event| {
            if let InstrumentationEvent::StartQuery { query, .. } = event {
                noted.lock().push(query.to_string());
            }
        })));
    }
}

/// A way into the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entrance {
    /// [`Tenure::transaction`] on a connection of Diesel's.
    Plain,
    /// The same on one from a pool.
    Pooled,
    /// [`Tenure::fence`] as the last statement of a transaction of Diesel's.
    ByHand,
    /// The tenure entered, and `transaction` on a [`GuardedConnection`].
    Guarded,
    /// The same on one from a pool with [`LeaseGuard`].
    GuardedPool,
    /// [`Tenure::transaction`] on one from such a pool.
    Both,
}

impl Entrance {
    pub(crate) const ALL: [Entrance; 6] = [
        Entrance::Plain,
        Entrance::Pooled,
        Entrance::ByHand,
        Entrance::Guarded,
        Entrance::GuardedPool,
        Entrance::Both,
    ];

    /// Those that check at the begin too.
    pub(crate) const WHOLE: [Entrance; 5] = [
        Entrance::Plain,
        Entrance::Pooled,
        Entrance::Guarded,
        Entrance::GuardedPool,
        Entrance::Both,
    ];

    /// Those whose every statement is checked.
    pub(crate) const GUARDED: [Entrance; 2] = [Entrance::Guarded, Entrance::GuardedPool];
}

impl fmt::Display for Entrance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A connection, with a way into the guard.
pub(crate) trait Client: Send {
    /// Runs `work` in one transaction under `tenure`.
    fn transact(&mut self, tenure: &Tenure, work: &mut Work<'_>) -> QueryResult<()>;

    /// [`Tenure::transaction`] in a transaction of Diesel's.
    fn transact_within(&mut self, tenure: &Tenure, work: &mut Work<'_>) -> QueryResult<()>;

    fn sql(&mut self) -> &mut dyn Sql;

    fn ping(&mut self) -> QueryResult<()>;

    fn instrument(&mut self, instrumentation: Box<dyn FnMut(InstrumentationEvent<'_>) + Send>);
}

impl dyn Client + '_ {
    /// Runs `hook` once, between the fence and the COMMIT that comes next.
    pub(crate) fn before_commit(&mut self, hook: impl FnOnce() + Send + 'static) {
        let mut hook = Some(hook);
        self.instrument(Box::new(move |event| match event {
            InstrumentationEvent::CommitTransaction { depth, .. } if depth.get() == 1 => {
                if let Some(hook) = hook.take() {
                    hook();
                }
            }
            _ => {}
        }));
    }

    /// Notes what is sent from here on.
    pub(crate) fn sent(&mut self) -> Sent {
        let sent = Sent::default();
        self.sql().note(&sent);
        sent
    }
}

/// The statements that a connection has sent.
#[derive(Clone, Default)]
pub(crate) struct Sent(Arc<Mutex<Vec<String>>>);

impl Sent {
    /// Those since the last time this was asked.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock())
    }
}

/// Opens a client.
pub(crate) fn connect(engine: Engine, url: &str, entrance: Entrance) -> Box<dyn Client> {
    match engine {
        #[cfg(feature = "sqlite")]
        Engine::Sqlite => open::<diesel::SqliteConnection>(url, entrance),
        #[cfg(feature = "postgres")]
        Engine::Postgres => open::<diesel::PgConnection>(url, entrance),
        #[cfg(feature = "mysql")]
        Engine::Mysql | Engine::Mariadb => open::<diesel::MysqlConnection>(url, entrance),
        #[allow(unreachable_patterns, reason = "none with all engines")]
        _ => panic!("this build of the tests has no {engine}"),
    }
}

fn open<C>(url: &str, entrance: Entrance) -> Box<dyn Client>
where
    C: LoadConnection + R2D2Connection + Sql + Send + 'static,
    C::Backend: LeaseBackend,
    GuardedConnection<C>: Sql,
    Pooled<C>: Sql,
    Pooled<GuardedConnection<C>>: Sql,
{
    let connect = || C::establish(url).expect("a connection");
    match entrance {
        Entrance::Plain | Entrance::ByHand => Box::new(Connected {
            conn: connect(),
            entrance,
            ping: C::ping,
        }),
        Entrance::Guarded => Box::new(Connected {
            conn: GuardedConnection::new(connect()),
            entrance,
            ping: R2D2Connection::ping,
        }),
        Entrance::Pooled => Box::new(Connected {
            conn: pooled::<C>(url, Box::new(NopConnectionCustomizer)),
            entrance,
            ping: |conn| (**conn).ping(),
        }),
        Entrance::GuardedPool | Entrance::Both => Box::new(Connected {
            conn: pooled::<GuardedConnection<C>>(url, Box::new(LeaseGuard::new())),
            entrance,
            ping: |conn| (**conn).ping(),
        }),
    }
}

fn pooled<C>(
    url: &str,
    customizer: Box<dyn CustomizeConnection<C, diesel::r2d2::Error>>,
) -> Pooled<C>
where
    C: R2D2Connection + Send + 'static,
{
    let pool = Pool::builder()
        .max_size(1)
        .connection_timeout(LONG)
        .connection_customizer(customizer)
        .build(ConnectionManager::new(url))
        .expect("a pool");
    pool.get().expect("its one connection")
}

type Pooled<C> = diesel::r2d2::PooledConnection<ConnectionManager<C>>;

struct Connected<C> {
    conn: C,
    entrance: Entrance,
    ping: fn(&mut C) -> QueryResult<()>,
}

impl<C> Client for Connected<C>
where
    C: LoadConnection + Sql + Send + 'static,
    C::Backend: LeaseBackend,
{
    fn transact(&mut self, tenure: &Tenure, work: &mut Work<'_>) -> QueryResult<()> {
        match self.entrance {
            Entrance::Plain | Entrance::Pooled | Entrance::Both => {
                tenure.transaction(&mut self.conn, |conn| work(conn))
            }
            Entrance::ByHand => Sql::transact(&mut self.conn, &mut |conn| {
                work(conn)?;
                conn.fence(tenure)
            }),
            Entrance::Guarded | Entrance::GuardedPool => {
                let _entered = tenure.enter();
                Sql::transact(&mut self.conn, work)
            }
        }
    }

    fn transact_within(&mut self, tenure: &Tenure, work: &mut Work<'_>) -> QueryResult<()> {
        Connection::transaction(&mut self.conn, |conn| {
            tenure.transaction(conn, |conn| work(conn))
        })
    }

    fn sql(&mut self) -> &mut dyn Sql {
        &mut self.conn
    }

    fn ping(&mut self) -> QueryResult<()> {
        (self.ping)(&mut self.conn)
    }

    fn instrument(&mut self, instrumentation: Box<dyn FnMut(InstrumentationEvent<'_>) + Send>) {
        self.conn.set_instrumentation(Events(instrumentation));
    }
}

struct Events(Box<dyn FnMut(InstrumentationEvent<'_>) + Send>);

impl Instrumentation for Events {
    fn on_connection_event(&mut self, event: InstrumentationEvent<'_>) {
        (self.0)(event);
    }
}
