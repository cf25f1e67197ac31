//! The guard: a stale holder cannot commit.
//!
//! A check at the start of a transaction leaves a hole: a process that is paused after it commits
//! beside its successor. So a guarded transaction is checked twice: at the begin by *verify*, and at
//! the commit by the *fence*, which locks the lease row just long enough that no claim can come
//! between the check and the COMMIT.
//!
//! Invariant: what a guarded transaction has written is committed under a term that no other had
//! followed. No lock is held while the work runs, and none outlives the COMMIT.
//!
//! Hazard: the local check alone proves nothing. A process can be paused after it; only the row
//! lock, which the server keeps, closes the gap.
//!
//! # The two entrances
//!
//! - [`Tenure::transaction`] on any connection of Diesel's; [`Tenure::fence`] as the last statement
//!   of a transaction that was opened by other means, such as PostgreSQL's transaction builder.
//! - `GuardedConnection`, alone or in a pool with `LeaseGuard`: every `transaction` on it is guarded
//!   by the tenures that are entered on the thread, which [`HeldLease::run`](crate::HeldLease::run)
//!   does. Needs the feature `guarded-connection`.
//!
//! # What is guaranteed, and by which statement
//!
//! At the begin the row is read by name, holder and term where it has not expired. If it is not
//! there, not one statement of the work runs. At the commit:
//!
//! | engine | isolation | fence, in the transaction | a claim meanwhile |
//! |---|---|---|---|
//! | PostgreSQL | READ COMMITTED | `SELECT … FOR KEY SHARE` by name, holder and term | waits for the COMMIT, at most the lock limit of 1 s, and then says "held" |
//! | PostgreSQL | REPEATABLE READ, SERIALIZABLE | the same; after a claim it fails with 40001 instead of finding no row, and the answer is [`Lost`] all the same | the same |
//! | MySQL | all four | `SELECT … FOR UPDATE`, which reads the newest row at every level | the same |
//! | MariaDB | all four | the same, with `innodb_snapshot_isolation` off for this statement where that setting exists | the same |
//! | SQLite | its only one | none: a guarded transaction takes the write lock when it begins, by an update of no rows, and looks under that lock | waits for the write lock |
//! | any, the lease in another database | | `BEGIN` and the same fence on a session of the library's, in the lease's database, ended after the COMMIT | the same |
//!
//! `FOR KEY SHARE` does not hold up renewals, which change no key ([row locks]); `FOR UPDATE` holds
//! them up from the fence to the COMMIT; SQLite's write lock holds them up while the transaction
//! lasts. So a guarded transaction on SQLite must end before the local deadline, and one that does
//! not is rolled back.
//!
//! At which level the work runs is the application's choice: by `GuardedConnection::build_transaction`
//! or Diesel's own builder and [`Tenure::fence`] on PostgreSQL; by `SET SESSION TRANSACTION` on MySQL
//! and MariaDB. A one-shot `SET TRANSACTION` there keeps its effect on a `GuardedConnection`, which
//! verifies on a session of the library's after such a statement; with [`Tenure::transaction`] on
//! another connection the verify uses it up.
//!
//! A transaction that only reads has nothing to fence: one that is read only by the session's default,
//! or opened by `GuardedConnection::build_transaction().read_only()`. One that makes itself read only
//! on the way (`SET TRANSACTION READ ONLY`, on PostgreSQL) may have written before, and cannot be fenced
//! any more: it is rolled back and fails with the server's error, 25006.
//!
//! A panic in the work rolls back on the way out, with [`Tenure::transaction`] and on a
//! `GuardedConnection`. The `transaction` of a pooled connection is Diesel's own, which leaves it open:
//! nothing of it is committed, and the pool throws the connection away.
//!
//! A host that vanishes between the fence and the COMMIT keeps the row locked for one lease duration
//! on PostgreSQL, where the fence sets the transaction's
//! [`idle_in_transaction_session_timeout`], and beside. On MySQL and MariaDB it does until the server
//! notices, by TCP or [`wait_timeout`]: set that below your patience.
//!
//! # What it costs
//!
//! Round trips beyond those of the plain transaction:
//!
//! | | begin | commit |
//! |---|---|---|
//! | PostgreSQL, MySQL, MariaDB | 1 | 1 |
//! | SQLite (no network, but two statements) | 2 | 0 |
//! | the lease in another database | 1 there | 2 or 3 there, and a connection the first time |
//! | no tenure entered | 0 | 0 |
//!
//! On MySQL and MariaDB a guarded connection saves two again: its COMMIT under a tenure is kept prepared,
//! where Diesel's is three round trips, since it allows several statements in one before it and forbids
//! that after it. The events of Diesel's instrumentation are the same.
//!
//! # What the role of the application needs
//!
//! `SELECT` on `diesel_leases`, and the right to lock its rows: `UPDATE` on PostgreSQL
//! ([`SELECT`](https://www.postgresql.org/docs/current/sql-select.html#SQL-FOR-UPDATE-SHARE)), MySQL
//! and MariaDB. A role that cannot even read it is refused with the server's error. Where the table is
//! not in sight the lease counts as one of another database.
//!
//! # What lies outside
//!
//! - Statements outside a transaction, and on connections that are not guarded.
//! - Statements that commit by themselves, such as DDL on MySQL and MariaDB ([implicit commit]), and
//!   a `COMMIT` or `BEGIN` sent as raw SQL.
//! - On MySQL and MariaDB, on a connection that is not a `GuardedConnection`: what follows an error
//!   that ended the transaction (1213; 1020 on MariaDB) and that the work swallowed. It is committed
//!   statement by statement. Do not swallow such errors.
//! - Calls to the outside world. Send the [term](Tenure::term) along, and let the other side refuse a
//!   term below the highest it has seen:
//!
//!   ```
//!   # struct Store { highest: u64, value: u64 }
//!   impl Store {
//!       fn put(&mut self, value: u64, term: u64) -> bool {
//!           if term < self.highest {
//!               return false; // from a holder that has lost
//!           }
//!           self.highest = term;
//!           self.value = value;
//!           true
//!       }
//!   }
//!   # let mut store = Store { highest: 0, value: 0 };
//!   assert!(store.put(1, 7) && store.put(2, 8) && !store.put(3, 7));
//!   ```
//!
//! # Errors
//!
//! A loss is [`QueryBuilderError`](DieselError::QueryBuilderError) with a [`Lost`] in it, found by
//! [`Lost::from_diesel`]. Whether an error of the fence is a loss is asked of the database, on another
//! session, after a ROLLBACK: a serialization failure of the work's own stays one. An error at COMMIT
//! that leaves it open whether the server committed is [`CommitUnknown`].
//!
//! [row locks]: https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS
//! [`idle_in_transaction_session_timeout`]: https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-IDLE-IN-TRANSACTION-SESSION-TIMEOUT
//! [`wait_timeout`]: https://dev.mysql.com/doc/refman/9.4/en/server-system-variables.html#sysvar_wait_timeout
//! [implicit commit]: https://dev.mysql.com/doc/refman/9.4/en/implicit-commit.html

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

use diesel::connection::{Connection, LoadConnection, TransactionManager};
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};

use crate::error::{CommitUnknown, Error, Lost};
use crate::protocol::Engine;
use crate::store::beside::Beside;
use crate::store::connect::LOCK;
use crate::tenure::{Tenure, with_entered};

#[cfg_attr(not(feature = "guarded-connection"), path = "no_connection.rs")]
pub(crate) mod connection;
#[cfg(feature = "guarded-connection")]
pub(crate) mod customizer;
#[cfg(all(feature = "guarded-connection", feature = "postgres"))]
pub(crate) mod postgres;

/// A backend of Diesel's whose connections can be guarded: `Pg`, `Mysql` and `Sqlite`, each with its
/// feature. It is sealed.
#[expect(private_bounds, reason = "this is what seals it")]
pub trait LeaseBackend: Engine {}

/// Where the row of a lease is, seen from the connection of the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In its database: the fence is one of its own statements.
    Inside,
    /// In another database: the fence is a transaction of the library's around the COMMIT.
    Beside,
}

/// A tenure in an open transaction.
#[derive(Debug, Clone)]
pub(crate) struct Guarded {
    pub(crate) tenure: Tenure,
    /// Where its row is, as far as that is known.
    pub(crate) place: Option<Place>,
    /// Whether the transaction as it is already keeps claims out.
    fenced: bool,
    /// Whether the transaction may be one that only reads.
    read_only: bool,
    /// Whether it was entered after the begin, and so has not been checked in this transaction.
    late: bool,
}

impl Guarded {
    pub(crate) fn new(tenure: Tenure, place: Option<Place>) -> Guarded {
        Guarded {
            tenure,
            place,
            fenced: false,
            read_only: false,
            late: false,
        }
    }
}

/// Those that the calling thread has entered, each once.
pub(crate) fn entered(place_of: impl Fn(&Tenure) -> Option<Place>) -> Vec<Guarded> {
    with_entered(|entered| {
        let mut tenures: Vec<Guarded> = Vec::with_capacity(entered.len());
        for tenure in entered {
            if !tenures.iter().any(|guarded| guarded.tenure.is(tenure)) {
                tenures.push(Guarded::new(tenure.clone(), place_of(tenure)));
            }
        }
        tenures
    })
}

/// How the begin is to be checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verify {
    /// On the connection of the work.
    Here,
    /// On a session of the library's, because the connection of the work has something pending
    /// that a statement would use up.
    Beside,
}

/// Opens a transaction with `open`, checked for `tenures`.
///
/// On an error no transaction is open, and no statement of the work has run.
pub(crate) fn begin<C>(
    conn: &mut C,
    tenures: &mut [Guarded],
    verify: Verify,
    open: impl Fn(&mut C) -> QueryResult<()>,
) -> QueryResult<()>
where
    C: LoadConnection,
    C::Backend: Engine,
{
    for guarded in tenures.iter() {
        guarded.tenure.check()?;
    }
    if !C::Backend::ONE_WRITER {
        for guarded in tenures.iter_mut() {
            verify_first(conn, guarded, verify)?;
        }
        return open(conn);
    }
    let Some(first) = tenures.first() else {
        return open(conn);
    };
    let clock = first.tenure.store().clock().clone();
    let until = clock.now().after(LOCK);
    loop {
        open(conn)?;
        let Err(error) = tenures
            .iter_mut()
            .try_for_each(|guarded| enter_file(conn, guarded))
        else {
            return Ok(());
        };
        roll_back(conn);
        tenures
            .iter_mut()
            .for_each(|guarded| guarded.fenced = false);
        // The file is busy, with one of our own renewals maybe. The transaction is begun anew, because
        // one that has read before that writer committed could not become the next.
        if !matches!(error, DieselError::DatabaseError(..)) {
            return Err(error);
        }
        if clock.now() >= until {
            for guarded in tenures.iter() {
                verify_beside(&guarded.tenure)?;
            }
            return Err(error);
        }
        clock.sleep(Duration::from_millis(2));
    }
}

/// Before BEGIN, in autocommit.
fn verify_first<C>(conn: &mut C, guarded: &mut Guarded, verify: Verify) -> QueryResult<()>
where
    C: LoadConnection,
    C::Backend: Engine,
{
    if verify == Verify::Beside || guarded.place == Some(Place::Beside) {
        return verify_beside(&guarded.tenure);
    }
    let found = match C::Backend::verify_first(conn, guarded.tenure.key()) {
        Ok(Some(read_only)) => {
            guarded.place = Some(Place::Inside);
            guarded.read_only = read_only;
            return Ok(());
        }
        Ok(None) => Ok(()),
        // Without a table the lease is elsewhere.
        Err(error) => match C::Backend::has_table(conn) {
            Ok(false) => Ok(()),
            _ => Err(error),
        },
    };
    verify_beside(&guarded.tenure)?;
    found?;
    guarded.place = Some(Place::Beside);
    Ok(())
}

/// In an open transaction on an engine with one writer: becomes that writer, then looks.
fn enter_file<C>(conn: &mut C, guarded: &mut Guarded) -> QueryResult<()>
where
    C: LoadConnection,
    C::Backend: Engine,
{
    if guarded.place != Some(Place::Beside) {
        match fence(conn, &guarded.tenure) {
            Ok(true) => {
                guarded.place = Some(Place::Inside);
                guarded.fenced = true;
                return Ok(());
            }
            Ok(false) => {}
            Err(error) if !matches!(C::Backend::has_table(conn), Ok(false)) => return Err(error),
            Err(_) => {}
        }
    }
    verify_beside(&guarded.tenure)?;
    guarded.place = Some(Place::Beside);
    Ok(())
}

/// Commits with `close`, fenced for `tenures`. On an error the transaction is rolled back, unless the
/// error is [`CommitUnknown`].
pub(crate) fn commit<C>(
    conn: &mut C,
    tenures: &mut [Guarded],
    read_only: bool,
    close: impl FnOnce(&mut C) -> QueryResult<()>,
) -> QueryResult<()>
where
    C: LoadConnection,
    C::Backend: Engine,
{
    // One order for everybody, so that two commits cannot wait for each other.
    tenures.sort_by(|a, b| a.tenure.order().cmp(&b.tenure.order()));
    let read_only = read_only || tenures.iter().any(|guarded| guarded.read_only);
    let fences = if read_only && matches!(C::Backend::is_read_only(conn), Ok(true)) {
        check_all(tenures).map(|()| Vec::new())
    } else {
        fence_all(conn, tenures)
    };
    let fences = match fences {
        Ok(fences) => fences,
        Err(NotFenced::Refused(error)) => {
            roll_back(conn);
            return Err(error);
        }
        Err(NotFenced::Ask(tenure, error)) => {
            // On InnoDB a fence that did not pass holds a lock on the successor's row.
            roll_back(conn);
            verify_beside(&tenure)?;
            return Err(error);
        }
    };
    let committed = close(conn).map_err(|error| committed_or_not(conn, error));
    let ended = fences
        .into_iter()
        .map(Beside::end)
        .fold(Ok(()), Result::and);
    committed?;
    // The row was locked until the server forgot the session, which may have been before the COMMIT.
    ended.map_err(|error| CommitUnknown::new(error).into())
}

thread_local! {
    /// The guarded transactions that were begun on this thread, wherever they are ended.
    static OPEN: RefCell<Vec<Weak<()>>> = const { RefCell::new(Vec::new()) };
}

/// A guarded transaction is open as long as this lives.
#[derive(Debug)]
pub(crate) struct Open(#[expect(dead_code, reason = "it is counted")] Arc<()>);

impl Open {
    fn note() -> Open {
        let open = Arc::new(());
        let noted = Arc::downgrade(&open);
        // Not while the thread's values are being destroyed, when no work of its own runs any more.
        let _ = OPEN.try_with(|all| {
            let mut all = all.borrow_mut();
            all.retain(|other| other.strong_count() > 0);
            all.push(noted);
        });
        Open(open)
    }
}

/// Whether this thread has begun a guarded transaction that is still open.
pub(crate) fn is_in_transaction() -> bool {
    let is_open = |open: &Weak<()>| open.strong_count() > 0;
    OPEN.try_with(|all| all.borrow().iter().any(is_open))
        .unwrap_or(false)
}

enum NotFenced {
    Refused(DieselError),
    /// Whether it is a loss is to be asked; it is this error otherwise.
    Ask(Tenure, DieselError),
}

impl From<Lost> for NotFenced {
    fn from(lost: Lost) -> NotFenced {
        NotFenced::Refused(lost.into())
    }
}

fn check_all(tenures: &[Guarded]) -> Result<(), NotFenced> {
    tenures
        .iter()
        .try_for_each(|guarded| Ok(guarded.tenure.check()?))
}

fn fence_all<C>(conn: &mut C, tenures: &mut [Guarded]) -> Result<Vec<Beside>, NotFenced>
where
    C: LoadConnection,
    C::Backend: Engine,
{
    check_all(tenures)?;
    for guarded in tenures.iter_mut() {
        if guarded.fenced || guarded.place == Some(Place::Beside) {
            continue;
        }
        if C::Backend::ONE_WRITER {
            enter_file(conn, guarded)
                .map_err(|error| NotFenced::Ask(guarded.tenure.clone(), error))?;
        } else {
            fence_here(conn, guarded)?;
        }
    }
    let beside = tenures.iter().filter(|guarded| !guarded.fenced);
    if let Some(guarded) = beside.clone().next() {
        // PostgreSQL takes a COMMIT for a ROLLBACK after an error, and says nothing.
        C::Backend::is_read_only(conn)
            .map_err(|error| NotFenced::Ask(guarded.tenure.clone(), error))?;
    }
    beside
        .map(|guarded| lock_beside(&guarded.tenure).map_err(NotFenced::Refused))
        .collect()
}

/// Fences one whose row is, or may be, in this database. Leaves the others for beside.
fn fence_here<C>(conn: &mut C, guarded: &mut Guarded) -> Result<(), NotFenced>
where
    C: LoadConnection,
    C::Backend: Engine,
{
    let is_seen = guarded.place == Some(Place::Inside) && !guarded.late;
    if !is_seen {
        // What the library's session says, before anything is locked here, tells a loss from another
        // database below.
        verify_beside(&guarded.tenure).map_err(NotFenced::Refused)?;
        match is_in_sight(conn, &guarded.tenure) {
            Ok(true) => {}
            Ok(false) => {
                guarded.place = Some(Place::Beside);
                return Ok(());
            }
            Err(error) => return Err(NotFenced::Ask(guarded.tenure.clone(), error)),
        }
    }
    let error = match fence(conn, &guarded.tenure) {
        Ok(true) => {
            guarded.place = Some(Place::Inside);
            guarded.fenced = true;
            return Ok(());
        }
        // A transaction that cannot write has nothing to fence. But PostgreSQL has aborted it by now, and
        // it may have written before it was made read only.
        Err(error @ DieselError::DatabaseError(DatabaseErrorKind::ReadOnlyTransaction, _)) => {
            if C::Backend::is_read_only(conn).is_err() {
                return Err(NotFenced::Refused(error));
            }
            guarded.fenced = true;
            return Ok(());
        }
        // Lost, which the library's session knows; or `USE`, or another search path, which a statement
        // that was prepared before may not know of.
        Ok(false) => {
            verify_beside(&guarded.tenure).map_err(NotFenced::Refused)?;
            guarded.place = Some(Place::Beside);
            return Ok(());
        }
        Err(error) => error,
    };
    guarded.place = None;
    Err(NotFenced::Ask(guarded.tenure.clone(), error))
}

/// Whether the row is in this database. In an open transaction, where a table that is not there would
/// be an error that ends it.
fn is_in_sight<C>(conn: &mut C, tenure: &Tenure) -> QueryResult<bool>
where
    C: LoadConnection,
    C::Backend: Engine,
{
    Ok(C::Backend::has_table(conn)? && C::Backend::verify(conn, tenure.key())?)
}

fn fence<C>(conn: &mut C, tenure: &Tenure) -> QueryResult<bool>
where
    C: LoadConnection,
    C::Backend: Engine,
{
    C::Backend::fence(conn, tenure.key(), tenure.store().fencing())
}

/// What an error at COMMIT says: that it failed, or nothing.
fn committed_or_not<C: Connection>(conn: &mut C, error: DieselError) -> DieselError {
    let is_definite = match &error {
        DieselError::DatabaseError(kind, _) => !matches!(
            kind,
            DatabaseErrorKind::Unknown
                | DatabaseErrorKind::ClosedConnection
                | DatabaseErrorKind::UnableToSendCommand
        ),
        DieselError::NotInTransaction | DieselError::AlreadyInTransaction => true,
        // Both the COMMIT and the ROLLBACK failed.
        _ => false,
    };
    // With no error of its own the manager's ROLLBACK succeeded, on the same session.
    let is_rolled_back = !matches!(
        error,
        DieselError::RollbackErrorOnCommit { .. } | DieselError::BrokenTransactionManager
    ) && matches!(depth(conn), Ok(None));
    if is_definite || is_rolled_back {
        error
    } else {
        CommitUnknown::new(error).into()
    }
}

fn lock_beside(tenure: &Tenure) -> QueryResult<Beside> {
    match tenure.store().lock_beside(tenure) {
        Ok(Some(lock)) => Ok(lock),
        Ok(None) => {
            verify_beside(tenure)?;
            // Ours, and locked by somebody.
            Err(DieselError::RollbackTransaction)
        }
        Err(error) => Err(handed_on(error)),
    }
}

/// Asks on a library session. `Ok` is proof that the lease was ours.
fn verify_beside(tenure: &Tenure) -> QueryResult<()> {
    tenure.verify().map_err(handed_on)
}

fn handed_on(error: Error) -> DieselError {
    match error {
        Error::Lost(lost) => lost.into(),
        Error::Database { source, .. } => source,
        other => DieselError::QueryBuilderError(Box::new(other)),
    }
}

/// The depth of the open transaction.
pub(crate) fn depth<C: Connection>(conn: &mut C) -> QueryResult<Option<std::num::NonZeroU32>> {
    C::TransactionManager::transaction_manager_status_mut(conn).transaction_depth()
}

fn roll_back<C: Connection>(conn: &mut C) {
    // A connection that cannot even do this is broken, which its manager knows.
    let _ = C::TransactionManager::rollback_transaction(conn);
}

/// Runs `work` in the transaction that was just begun, and ends it, be it by a panic.
fn run<C, T, E>(
    conn: &mut C,
    work: impl FnOnce(&mut C) -> Result<T, E>,
    commit: impl FnOnce(&mut C) -> QueryResult<()>,
) -> Result<T, E>
where
    C: Connection,
    E: From<DieselError>,
{
    let begun = depth(conn)?;
    match catch_unwind(AssertUnwindSafe(|| work(conn))) {
        Ok(Ok(output)) => {
            commit(conn)?;
            Ok(output)
        }
        Ok(Err(error)) => match C::TransactionManager::rollback_transaction(conn) {
            Ok(()) | Err(DieselError::BrokenTransactionManager) => Err(error),
            Err(rollback) => Err(rollback.into()),
        },
        Err(panic) => {
            // Diesel leaves nested ones open.
            while matches!(depth(conn), Ok(Some(depth)) if Some(depth) >= begun) {
                roll_back(conn);
            }
            resume_unwind(panic)
        }
    }
}

impl Tenure {
    /// Runs `work` in a transaction that commits only if nobody else has held the name since.
    ///
    /// It is entered while the work runs. On a `GuardedConnection` it is a `transaction` of that one,
    /// nested in one that is open already. See [`guard`](self) for what it does on each engine.
    ///
    /// # Blocking
    ///
    /// One round trip more at the begin and one at the commit, on the connection that is given; see
    /// [what it costs](self#what-it-costs). These are the connection's own calls and as long as it
    /// lets them be.
    ///
    /// # Errors
    ///
    /// What `work` returns, after a ROLLBACK. Of its own, as errors of Diesel's:
    ///
    /// - [`Lost`], with nothing committed; if it was lost at the begin, `work` has not run.
    /// - [`CommitUnknown`].
    /// - [`AlreadyInTransaction`](DieselError::AlreadyInTransaction) when `conn` has a transaction
    ///   open and is not guarded: a savepoint would end unfenced. `work` has not run.
    /// - [`RollbackTransaction`](DieselError::RollbackTransaction) when somebody else had the row of a
    ///   lease in another database locked. It was rolled back, and can be tried again.
    /// - Whatever the database says at the begin, the fence or the COMMIT.
    ///
    /// # Panics
    ///
    /// A panic of `work` rolls back on its way.
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel::prelude::*;
    /// use diesel_lease::Lost;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("app.db");
    /// # let url = path.to_str().unwrap();
    /// # let leases = diesel_lease::Leases::connect(url)?;
    /// # leases.migrate()?;
    /// let conn = &mut SqliteConnection::establish(url)?;
    /// diesel::sql_query("CREATE TABLE done (id INTEGER)").execute(conn)?;
    /// let lease = leases.claim("import")?;
    /// let tenure = lease.tenure();
    ///
    /// tenure.transaction(conn, |conn| {
    ///     diesel::sql_query("INSERT INTO done VALUES (1)").execute(conn)
    /// })?;
    ///
    /// leases.force_release("import")?;
    /// let refused = tenure.transaction(conn, |conn| {
    ///     diesel::sql_query("INSERT INTO done VALUES (2)").execute(conn)
    /// });
    /// assert!(Lost::from_diesel(&refused.unwrap_err()).is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn transaction<C, T, E>(
        &self,
        conn: &mut C,
        work: impl FnOnce(&mut C) -> Result<T, E>,
    ) -> Result<T, E>
    where
        C: LoadConnection,
        C::Backend: LeaseBackend,
        E: From<DieselError>,
    {
        let _entered = self.enter();
        if connection::is_guarded(conn) {
            // Diesel's `transaction` of a pooled connection would leave it open behind a panic.
            C::TransactionManager::begin_transaction(conn)?;
            return run(conn, work, C::TransactionManager::commit_transaction);
        }
        if depth(conn)?.is_some() {
            return Err(DieselError::AlreadyInTransaction.into());
        }
        let mut tenures = entered(|_| None);
        begin(
            conn,
            &mut tenures,
            Verify::Here,
            C::TransactionManager::begin_transaction,
        )?;
        let _open = Open::note();
        run(conn, work, |conn| {
            let close = C::TransactionManager::commit_transaction;
            commit(conn, &mut tenures, false, close)
        })
    }

    /// Fences the transaction that is open on `conn`: make it the last statement before its COMMIT.
    ///
    /// For transactions that were opened by other means, such as PostgreSQL's transaction builder. The
    /// COMMIT must follow at once: from here on the row is locked, and claims of the name wait.
    ///
    /// # Blocking
    ///
    /// One round trip on `conn`, two on PostgreSQL.
    ///
    /// # Errors
    ///
    /// On any error do not commit; Diesel's `transaction` rolls back when it is handed on.
    ///
    /// - [`Lost`].
    /// - [`NotInTransaction`](DieselError::NotInTransaction) when none is open.
    /// - A [`QueryBuilderError`](DieselError::QueryBuilderError) when the lease is in another database,
    ///   because this cannot see the COMMIT: use [`transaction`](Tenure::transaction).
    /// - Whatever the database says.
    pub fn fence<C>(&self, conn: &mut C) -> QueryResult<()>
    where
        C: LoadConnection,
        C::Backend: LeaseBackend,
    {
        if depth(conn)?.is_none() {
            return Err(DieselError::NotInTransaction);
        }
        self.check()?;
        if matches!(C::Backend::is_read_only(conn), Ok(true)) {
            return Ok(());
        }
        match fence(conn, self) {
            Ok(true) => Ok(()),
            Err(DieselError::DatabaseError(DatabaseErrorKind::ReadOnlyTransaction, _)) => Ok(()),
            Ok(false) => {
                verify_beside(self)?;
                Err(DieselError::QueryBuilderError(Box::new(OtherDatabase)))
            }
            Err(error) => {
                verify_beside(self)?;
                Err(error)
            }
        }
    }
}

/// The lease is in another database than the transaction, whose COMMIT a fence cannot see.
#[derive(Debug, thiserror::Error)]
#[error("the lease is in another database than this transaction: use `Tenure::transaction`")]
struct OtherDatabase;
