//! The connection on which every transaction is guarded.
//!
//! It wraps one of Diesel's connections and delegates; what it adds is its transaction manager, which
//! asks the [guard](super) at the outermost BEGIN and COMMIT, and a local check in front of every
//! statement. Without a tenure neither costs more than a look at a thread local.
//!
//! Invariant: a transaction is fenced for every tenure under which any statement of it ran, whatever
//! has been left meanwhile.
//!
//! Hazard: InnoDB can end a whole transaction behind an error, and what follows would commit
//! statement by statement. So under a tenure an error there that may have done that makes the
//! transaction refuse everything but a rollback, as PostgreSQL does.

use std::cell::Cell;
use std::fmt;

use diesel::backend::Backend;
use diesel::connection::{
    CacheSize, Connection, ConnectionSealed, Instrumentation, InstrumentationEvent, LoadConnection,
    SimpleConnection, TransactionDepthChange, TransactionManager, TransactionManagerStatus,
};
use diesel::migration::MigrationConnection;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::query_dsl::UpdateAndFetchResults;
use diesel::r2d2::R2D2Connection;
use diesel::result::{ConnectionResult, DatabaseErrorKind, Error as DieselError, QueryResult};

use super::{Guarded, LeaseBackend, Open, Place, Verify, depth};
use crate::protocol::Engine;
use crate::tenure::{Tenure, with_entered};

/// A Diesel connection on which every transaction is guarded by the tenures that are entered.
///
/// Use it like the connection it wraps: `transaction`, queries, migrations, savepoints, test
/// transactions and pools work as they do there. What is added:
///
/// - The outermost transaction of it is checked when it begins and fenced when it commits, for every
///   [`Tenure`] that is [entered](Tenure::enter) on the thread when it begins or when a statement of
///   it runs. A nested one is a plain savepoint.
/// - Once one of these is lost, every statement is refused with [`Lost`](crate::Lost), before it is
///   sent, and the transaction can only roll back.
/// - A panic in [`transaction`](Connection::transaction) rolls back on its way.
/// - On MySQL and MariaDB, under a tenure, an error that may have ended the transaction (a deadlock,
///   or one of a kind that Diesel does not know) makes every further statement and the COMMIT fail,
///   until a ROLLBACK, or a ROLLBACK TO SAVEPOINT that the server accepts.
///
/// Without a tenure it is a plain connection, and sends nothing more.
///
/// # Examples
///
/// ```
/// use diesel::prelude::*;
/// use diesel::r2d2::{ConnectionManager, Pool};
/// use diesel_lease::{GuardedConnection, LeaseGuard, Leases};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("app.db");
/// # let url = path.to_str().unwrap();
/// let leases = Leases::connect(url)?;
/// leases.migrate()?;
/// let pool = Pool::builder()
///     .connection_customizer(Box::new(LeaseGuard::new()))
///     .max_size(2)
///     .build(ConnectionManager::<GuardedConnection<SqliteConnection>>::new(url))?;
///
/// let held = leases.claim("payments")?.hold()?;
/// held.run(|_| {
///     let conn = &mut pool.get()?;
///     conn.transaction(|conn| {
///         diesel::sql_query("CREATE TABLE paid (id INTEGER PRIMARY KEY)").execute(conn)
///     })?;
///     Ok::<_, Box<dyn std::error::Error>>(())
/// })?;
/// held.release()?;
/// # Ok(())
/// # }
/// ```
pub struct GuardedConnection<C> {
    inner: C,
    guard: Guard,
}

/// What a guarded connection knows.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct Guard {
    /// The open transaction.
    open: Option<Open>,
    /// Its tenures.
    tenures: Vec<Guarded>,
    /// Where the rows of a store are, as the last transaction found out.
    place: Option<(u64, Place)>,
    pub(super) require_tenure: bool,
    /// Whether it was opened as one that only reads.
    read_only: bool,
    /// An error may have ended the transaction behind our back.
    aborted: bool,
    /// There was an error, and the engine can be asked whether it has.
    unsure: bool,
    /// A statement of the application's own ran since the last transaction, such as one that sets
    /// how the next one begins.
    pending: bool,
}

impl<C> GuardedConnection<C> {
    /// Guards `connection`, which must have no transaction open.
    pub fn new(connection: C) -> GuardedConnection<C> {
        GuardedConnection {
            inner: connection,
            guard: Guard::default(),
        }
    }

    /// The connection itself, for what only it has. Nothing done with it is guarded.
    pub fn unguarded(&mut self) -> &mut C {
        self.guard.pending = true;
        &mut self.inner
    }

    pub(super) fn parts(&mut self) -> (&mut C, &mut Guard) {
        (&mut self.inner, &mut self.guard)
    }
}

impl Guard {
    /// Where the rows of the store of `tenure` are likely to be.
    fn place_of(&self, tenure: &Tenure) -> Option<Place> {
        match self.place {
            Some((store, place)) if store == tenure.store().id() => Some(place),
            _ => None,
        }
    }

    fn remember_places(&mut self) {
        if let Some(guarded) = self.tenures.last() {
            self.place = guarded
                .place
                .map(|place| (guarded.tenure.store().id(), place));
        }
    }

    /// Adds to the open transaction the tenures that are entered now.
    fn note_entered(&mut self) {
        with_entered(|entered| {
            for tenure in entered {
                if !self.tenures.iter().any(|guarded| guarded.tenure.is(tenure)) {
                    let place = self.place_of(tenure);
                    self.tenures.push(Guarded {
                        late: true,
                        ..Guarded::new(tenure.clone(), place)
                    });
                }
            }
        });
    }

    fn note_error<B: Engine>(&mut self, error: &DieselError) {
        self.unsure = B::ONE_WRITER;
        if !B::ENDS_BEHIND_ERRORS {
            return;
        }
        let may_have_ended = matches!(
            error,
            DieselError::DatabaseError(
                DatabaseErrorKind::SerializationFailure | DatabaseErrorKind::Unknown,
                _
            )
        );
        self.aborted |= may_have_ended;
    }

    fn end(&mut self) {
        self.open = None;
        self.tenures.clear();
        self.aborted = false;
        self.unsure = false;
        self.read_only = false;
    }
}

impl<C> GuardedConnection<C>
where
    C: LoadConnection,
    C::Backend: LeaseBackend,
{
    /// Lets a statement pass, or not. `is_own`: it may be one that prepares the next transaction.
    fn admit(&mut self, is_own: bool) -> QueryResult<()> {
        if depth(&mut self.inner)?.is_some() {
            self.guard.note_entered();
            if !self.guard.tenures.is_empty() && std::mem::take(&mut self.guard.unsure) {
                self.guard.aborted |= C::Backend::has_ended(&mut self.inner);
            }
        } else {
            self.guard.pending |= is_own;
            // Diesel has noticed that the transaction has ended behind an error.
            self.guard.aborted = self.guard.open.is_some();
        }
        self.guard
            .tenures
            .iter()
            .try_for_each(|guarded| guarded.tenure.check())?;
        with_entered(|entered| entered.iter().find_map(|tenure| tenure.check().err()))
            .map_or(Ok(()), Err)?;
        if self.guard.aborted && !self.guard.tenures.is_empty() {
            return Err(aborted());
        }
        Ok(())
    }

    pub(super) fn begin(
        &mut self,
        read_only: bool,
        open: impl Fn(&mut C) -> QueryResult<()>,
    ) -> QueryResult<()> {
        if depth(&mut self.inner)?.is_some() {
            self.admit(false)?;
            return open(&mut self.inner);
        }
        self.guard.end();
        let guard = &self.guard;
        let mut tenures = super::entered(|tenure| guard.place_of(tenure));
        if tenures.is_empty() {
            if self.guard.require_tenure {
                return Err(DieselError::QueryBuilderError(Box::new(TenureRequired)));
            }
            open(&mut self.inner)?;
            self.guard.open = Some(Open::note());
            self.guard.pending = false;
            return Ok(());
        }
        let uses_up = C::Backend::ENDS_BEHIND_ERRORS && self.guard.pending;
        let verify = if uses_up {
            Verify::Beside
        } else {
            Verify::Here
        };
        super::begin(&mut self.inner, &mut tenures, verify, open)?;
        self.guard.open = Some(Open::note());
        self.guard.pending = false;
        self.guard.tenures = tenures;
        self.guard.read_only = read_only;
        self.guard.remember_places();
        Ok(())
    }

    fn rollback(&mut self) -> QueryResult<()> {
        let before = depth(&mut self.inner)?;
        // Diesel then takes the failure of a ROLLBACK TO SAVEPOINT for a success.
        let is_tolerant = C::TransactionManager::transaction_manager_status_mut(&mut self.inner)
            .transaction_state()?
            .in_transaction
            .as_ref()
            .is_some_and(|open| open.requires_rollback_maybe_up_to_top_level);
        let rolled_back = C::TransactionManager::rollback_transaction(&mut self.inner);
        if before.is_none_or(|depth| depth.get() == 1) {
            self.guard.end();
        } else if rolled_back.is_ok() && !is_tolerant {
            self.guard.aborted = false;
        }
        rolled_back
    }

    fn commit(&mut self) -> QueryResult<()> {
        let outermost = depth(&mut self.inner)?.is_some_and(|depth| depth.get() == 1);
        if let Err(error) = self.admit(false) {
            // Diesel ends a level with its COMMIT, whether that succeeds or not.
            let _ = self.rollback();
            return Err(error);
        }
        if !outermost {
            return C::TransactionManager::commit_transaction(&mut self.inner);
        }
        if self.guard.tenures.is_empty() {
            self.guard.end();
            return C::TransactionManager::commit_transaction(&mut self.inner);
        }
        let read_only = self.guard.read_only;
        let tenures = &mut self.guard.tenures;
        let committed = super::commit(&mut self.inner, tenures, read_only, commit);
        self.guard.remember_places();
        self.guard.end();
        committed
    }
}

fn aborted() -> DieselError {
    DieselError::QueryBuilderError(Box::new(TransactionAborted))
}

/// A guarded transaction cannot go on: an error before this may have ended it.
#[derive(Debug, thiserror::Error)]
#[error("an earlier error may have ended this transaction: it can only be rolled back")]
struct TransactionAborted;

/// A transaction was begun without a tenure on a connection of a pool that
/// [requires one](crate::LeaseGuard::require_tenure).
///
/// It is in a [`QueryBuilderError`](diesel::result::Error::QueryBuilderError) of Diesel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a transaction on this connection needs a tenure: enter one first")]
#[non_exhaustive]
pub struct TenureRequired;

thread_local! {
    /// Set by a guarded connection that is asked for its transaction's status.
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

/// Whether `conn` is a [`GuardedConnection`], be it in a pooled one.
pub(crate) fn is_guarded<C: Connection>(conn: &mut C) -> bool {
    ASKED.set(false);
    let _ = depth(conn);
    ASKED.replace(false)
}

/// Commits the outermost transaction of one of Diesel's connections as its manager does, events and
/// errors included, in fewer round trips where a prepared COMMIT saves some.
fn commit<C>(conn: &mut C) -> QueryResult<()>
where
    C: LoadConnection,
    C::Backend: Engine,
{
    let (true, Some(depth)) = (C::Backend::PREPARES_COMMIT, depth(conn)?) else {
        return C::TransactionManager::commit_transaction(conn);
    };
    conn.instrumentation()
        .on_connection_event(InstrumentationEvent::commit_transaction(depth));
    let committed = conn.execute_returning_count(&Commit);
    let status = C::TransactionManager::transaction_manager_status_mut(conn);
    let Err(commit_error) = committed else {
        return status
            .transaction_state()?
            .change_transaction_depth(TransactionDepthChange::DecreaseDepth);
    };
    // What the error has told Diesel of the connection is in the status by now.
    if !matches!(status.transaction_depth(), Ok(Some(_))) {
        return Err(commit_error);
    }
    let Err(rollback_error) = C::TransactionManager::rollback_transaction(conn) else {
        return Err(commit_error);
    };
    C::TransactionManager::transaction_manager_status_mut(conn).set_in_error();
    Err(DieselError::RollbackErrorOnCommit {
        rollback_error: Box::new(rollback_error),
        commit_error: Box::new(commit_error),
    })
}

/// `COMMIT`, which a connection keeps prepared.
#[derive(QueryId)]
struct Commit;

impl<DB: Backend> QueryFragment<DB> for Commit {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        out.push_sql("COMMIT");
        Ok(())
    }
}

/// The transaction manager of [`GuardedConnection`].
#[doc(hidden)]
#[derive(Debug)]
pub struct GuardedTransactions;

impl<C> TransactionManager<GuardedConnection<C>> for GuardedTransactions
where
    C: LoadConnection,
    C::Backend: LeaseBackend,
{
    type TransactionStateData = Guard;

    fn begin_transaction(conn: &mut GuardedConnection<C>) -> QueryResult<()> {
        conn.begin(false, C::TransactionManager::begin_transaction)
    }

    fn rollback_transaction(conn: &mut GuardedConnection<C>) -> QueryResult<()> {
        conn.rollback()
    }

    fn commit_transaction(conn: &mut GuardedConnection<C>) -> QueryResult<()> {
        conn.commit()
    }

    fn transaction_manager_status_mut(
        conn: &mut GuardedConnection<C>,
    ) -> &mut TransactionManagerStatus {
        ASKED.set(true);
        C::TransactionManager::transaction_manager_status_mut(&mut conn.inner)
    }

    fn transaction<F, R, E>(conn: &mut GuardedConnection<C>, callback: F) -> Result<R, E>
    where
        F: FnOnce(&mut GuardedConnection<C>) -> Result<R, E>,
        E: From<DieselError>,
    {
        Self::begin_transaction(conn)?;
        super::run(conn, callback, Self::commit_transaction)
    }
}

impl<C> SimpleConnection for GuardedConnection<C>
where
    C: LoadConnection,
    C::Backend: LeaseBackend,
{
    fn batch_execute(&mut self, query: &str) -> QueryResult<()> {
        self.admit(true)?;
        let done = self.inner.batch_execute(query);
        self.noted(done)
    }
}

impl<C> GuardedConnection<C>
where
    C: LoadConnection,
    C::Backend: LeaseBackend,
{
    fn noted<T>(&mut self, result: QueryResult<T>) -> QueryResult<T> {
        if let Err(error) = &result {
            self.guard.note_error::<C::Backend>(error);
        }
        result
    }
}

impl<C> ConnectionSealed for GuardedConnection<C> {}

impl<C> Connection for GuardedConnection<C>
where
    C: LoadConnection,
    C::Backend: LeaseBackend,
{
    type Backend = C::Backend;
    type TransactionManager = GuardedTransactions;

    fn establish(database_url: &str) -> ConnectionResult<Self> {
        C::establish(database_url).map(GuardedConnection::new)
    }

    fn execute_returning_count<T>(&mut self, source: &T) -> QueryResult<usize>
    where
        T: QueryFragment<Self::Backend> + QueryId,
    {
        self.admit(T::query_id().is_none())?;
        let count = self.inner.execute_returning_count(source);
        self.noted(count)
    }

    fn transaction_state(&mut self) -> &mut Guard {
        &mut self.guard
    }

    fn instrumentation(&mut self) -> &mut dyn Instrumentation {
        self.inner.instrumentation()
    }

    fn set_instrumentation(&mut self, instrumentation: impl Instrumentation) {
        self.inner.set_instrumentation(instrumentation);
    }

    fn set_prepared_statement_cache_size(&mut self, size: CacheSize) {
        self.inner.set_prepared_statement_cache_size(size);
    }
}

impl<C, Mode> LoadConnection<Mode> for GuardedConnection<C>
where
    C: LoadConnection + LoadConnection<Mode>,
    C::Backend: LeaseBackend,
{
    type Cursor<'conn, 'query>
        = <C as LoadConnection<Mode>>::Cursor<'conn, 'query>
    where
        Self: 'conn;
    type Row<'conn, 'query>
        = <C as LoadConnection<Mode>>::Row<'conn, 'query>
    where
        Self: 'conn;

    fn load<'conn, 'query, T>(
        &'conn mut self,
        source: T,
    ) -> QueryResult<Self::Cursor<'conn, 'query>>
    where
        T: Query + QueryFragment<Self::Backend> + QueryId + 'query,
        Self::Backend: diesel::expression::QueryMetadata<T::SqlType>,
    {
        self.admit(T::query_id().is_none())?;
        let GuardedConnection { inner, guard } = self;
        // Where rows are fetched one by one, their errors are not seen here.
        guard.unsure |= C::Backend::ONE_WRITER;
        let rows = LoadConnection::<Mode>::load(inner, source);
        if let Err(error) = &rows {
            guard.note_error::<C::Backend>(error);
        }
        rows
    }
}

impl<C> MigrationConnection for GuardedConnection<C>
where
    C: LoadConnection + MigrationConnection,
    C::Backend: LeaseBackend,
{
    fn setup(&mut self) -> QueryResult<usize> {
        self.admit(true)?;
        let set_up = self.inner.setup();
        self.noted(set_up)
    }
}

impl<C, Changes, Output> UpdateAndFetchResults<Changes, Output> for GuardedConnection<C>
where
    C: LoadConnection + UpdateAndFetchResults<Changes, Output>,
    C::Backend: LeaseBackend,
{
    fn update_and_fetch(&mut self, changeset: Changes) -> QueryResult<Output> {
        self.admit(false)?;
        let output = self.inner.update_and_fetch(changeset);
        self.noted(output)
    }
}

impl<C> R2D2Connection for GuardedConnection<C>
where
    C: LoadConnection + R2D2Connection,
    C::Backend: LeaseBackend,
{
    /// Not checked, so that a pool works under a lost tenure.
    fn ping(&mut self) -> QueryResult<()> {
        self.inner.ping()
    }

    fn is_broken(&mut self) -> bool {
        self.inner.is_broken()
    }
}

impl<C> fmt::Debug for GuardedConnection<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuardedConnection")
            .field("guard", &self.guard)
            .finish_non_exhaustive()
    }
}
