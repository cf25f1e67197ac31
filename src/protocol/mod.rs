//! The questions asked of a database.
//!
//! A [`Session`] is one connection of the library's own, and each of its questions is one act of
//! the protocol: what must be atomic in it is one statement, in autocommit. What follows from the
//! answer is decided by those who ask, in plain values.
//!
//! Invariant: an `Ok` is the database's own answer. An error says nothing about whether the
//! statement was carried out.
//!
//! Hazard: a call into Diesel cannot be cut short. Nothing here is called but by a worker of the
//! [`store`](crate::store).
#![cfg_attr(not(all(feature = "mysql", feature = "postgres")), allow(dead_code))]

use std::time::Duration;

use diesel::backend::Backend;
use diesel::connection::{AnsiTransactionManager, LoadConnection, TransactionManager};
use diesel::prelude::*;
use diesel::query_builder::QueryId;

use crate::error::BoxError;
use crate::unsupported::Unsupported;

pub(crate) mod checks;
pub(crate) mod statements;

#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;

pub(crate) use checks::Verdict;

/// What a claim writes.
#[derive(Debug, Clone)]
pub(crate) struct NewClaim {
    pub(crate) name: String,
    pub(crate) holder: String,
    pub(crate) instance: String,
    pub(crate) lease_ms: i64,
}

/// What identifies a lease in statements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key<'a> {
    pub(crate) name: &'a str,
    pub(crate) holder: &'a str,
    pub(crate) term: i64,
}

/// A row as it was read.
#[derive(Debug, Clone, Queryable)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) holder: String,
    pub(crate) instance: String,
    pub(crate) term: i64,
    /// Above zero: held for so long.
    pub(crate) expires_in_ms: i64,
    pub(crate) slot_ms: i64,
    pub(crate) unfinished_slot_ms: i64,
    pub(crate) rerun_slot_ms: i64,
}

impl Row {
    pub(crate) fn is_free(&self) -> bool {
        self.expires_in_ms <= 0
    }
}

/// What a session allows each of its statements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// To wait for a row or a table that somebody has locked.
    pub(crate) lock: Duration,
    /// To take altogether.
    pub(crate) statement: Duration,
}

/// How a row is fenced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fencing {
    /// How long a session may be silent while it has the row locked, before the server ends it.
    pub(crate) idle: Duration,
    /// Whether the server has the setting that makes a locking read fail after a renewal.
    pub(crate) has_snapshot_isolation: bool,
}

/// What guarding asks of an engine, on any connection to it.
pub(crate) trait Engine: Backend {
    /// Whether a transaction that writes keeps every other writer out until it ends.
    const ONE_WRITER: bool;

    /// Whether the server may have ended the whole transaction behind an error, so that the
    /// statements after it would commit one by one.
    const ENDS_BEHIND_ERRORS: bool;

    /// Whether a COMMIT that is kept prepared is fewer round trips than that of Diesel's manager.
    const PREPARES_COMMIT: bool;

    /// Whether the lease is still held.
    fn verify<C>(conn: &mut C, key: Key<'_>) -> QueryResult<bool>
    where
        C: LoadConnection<Backend = Self>;

    /// As `verify`, before a transaction: whether that may be one that only reads, if the row is there.
    fn verify_first<C>(conn: &mut C, key: Key<'_>) -> QueryResult<Option<bool>>
    where
        C: LoadConnection<Backend = Self>,
    {
        Ok(Self::verify(conn, key)?.then_some(false))
    }

    /// In a transaction: whether nobody has claimed since, nor can until it ends.
    fn fence<C>(conn: &mut C, key: Key<'_>, how: Fencing) -> QueryResult<bool>
    where
        C: LoadConnection<Backend = Self>;

    /// Whether the open transaction cannot write, where a locking read in such a one would end it.
    fn is_read_only<C>(conn: &mut C) -> QueryResult<bool>
    where
        C: LoadConnection<Backend = Self>;

    /// Whether the open transaction has ended behind an error. Then an empty one is open in its place.
    fn has_ended<C>(_: &mut C) -> bool
    where
        C: LoadConnection<Backend = Self>,
    {
        false
    }

    /// Whether there is a lease table in sight.
    fn has_table<C>(conn: &mut C) -> QueryResult<bool>
    where
        C: LoadConnection<Backend = Self>;

    /// Why rows of the table in sight cannot be fenced, if so. An error of its own when this role may
    /// not lock them.
    fn refuses_fence<C>(conn: &mut C) -> QueryResult<Option<Unsupported>>
    where
        C: LoadConnection<Backend = Self>;
}

/// The questions.
pub(crate) trait Session: Send {
    /// Sets whatever the questions rely on, whatever the server's defaults are. Says whether the
    /// server has [`Fencing::has_snapshot_isolation`].
    fn prepare(&mut self, limits: Limits) -> QueryResult<bool>;

    /// The term, if the name was free and now is this holder's.
    fn claim(&mut self, claim: &NewClaim) -> QueryResult<Option<i64>>;

    /// The same for a slot, if the row still is what was `read`.
    fn claim_slot(
        &mut self,
        claim: &NewClaim,
        slot_ms: i64,
        read: Option<&Row>,
    ) -> QueryResult<Option<i64>>;

    /// The same for a second round, if the row still is what was found.
    fn claim_rerun(
        &mut self,
        claim: &NewClaim,
        slot_ms: i64,
        term: i64,
    ) -> QueryResult<Option<i64>>;

    /// Name, term and slot of those of `names` whose last round was cut short and can be run again.
    fn cut_short(&mut self, names: &[&str]) -> QueryResult<Vec<(String, i64, i64)>>;

    /// Whether the name was still this holder's, and now is free with its round at its end.
    fn finish(&mut self, key: Key<'_>, passed_ms: i64) -> QueryResult<bool>;

    /// The round of this instant has come to its end, whoever holds the name.
    fn settle(&mut self, name: &str, slot_ms: i64) -> QueryResult<()>;

    /// Gives back a claim for a slot as if it had not been made.
    fn undo_slot(
        &mut self,
        key: Key<'_>,
        slot_ms: i64,
        unfinished_slot_ms: i64,
    ) -> QueryResult<bool>;

    /// Gives back a claim for a rerun as if it had not been made.
    fn undo_rerun(&mut self, key: Key<'_>) -> QueryResult<bool>;

    /// Whether the lease was still held, and now is for another lease duration.
    fn renew(&mut self, key: Key<'_>, lease_ms: i64) -> QueryResult<bool>;

    /// The names of those that were still held and now are for another lease duration. Rows that
    /// somebody has locked are left out, not waited for.
    fn renew_all(&mut self, keys: &[Key<'_>], lease_ms: i64) -> QueryResult<Vec<String>>;

    /// Whether the lease is still held.
    fn verify(&mut self, key: Key<'_>) -> QueryResult<bool>;

    /// Whether the name was still this holder's, and now is free. `tells`: those who listen are told.
    fn release(&mut self, key: Key<'_>, tells: bool) -> QueryResult<bool>;

    /// Whether the name was held, and now is free with a higher term.
    fn force_release(&mut self, name: &str) -> QueryResult<bool>;

    fn read(&mut self, name: &str) -> QueryResult<Option<Row>>;

    /// The names of those that are still held.
    fn verify_all(&mut self, keys: &[Key<'_>]) -> QueryResult<Vec<String>>;

    /// Every row, by name.
    fn list(&mut self) -> QueryResult<Vec<Row>>;

    /// Whether such a session can [`listen`](Session::listen).
    fn tells_of_releases() -> bool
    where
        Self: Sized,
    {
        false
    }

    /// Asks to be told of names that are given back from now on.
    fn listen(&mut self) -> QueryResult<()> {
        Ok(())
    }

    /// The names of which it was told since. Does not wait, and sends nothing.
    fn heard(&mut self) -> QueryResult<Vec<String>> {
        Ok(Vec::new())
    }

    /// Whether somebody has the row of this name locked, which must exist.
    fn is_locked(&mut self, name: &str) -> QueryResult<bool>;

    /// Opens a transaction in which the row is fenced, or none. Whether it was still this holder's.
    fn lock(&mut self, key: Key<'_>, how: Fencing) -> QueryResult<bool>;

    /// Ends that transaction.
    fn unlock(&mut self) -> QueryResult<()>;

    /// Whether there is a lease table in sight.
    fn has_table(&mut self) -> QueryResult<bool>;

    /// Whether this database and this table can carry leases, as far as its catalogue tells.
    fn check(&mut self) -> QueryResult<Verdict>;

    /// Makes a first claim, reads it, and takes it all back.
    fn rehearse(&mut self, claim: &NewClaim) -> QueryResult<(Option<i64>, Option<Row>)>;

    /// Creates or updates the table, alone among all sessions that do, within `limit`.
    fn migrate(&mut self, limit: Duration) -> Result<(), BoxError>;
}

/// A connection type of Diesel's that library sessions can be made of: `PgConnection`,
/// `MysqlConnection` and `SqliteConnection`, each with its feature.
///
/// It is sealed: only this crate implements it.
#[expect(private_bounds, reason = "this is what seals it")]
pub trait LeaseConnection: Session + 'static {}

/// Opens a transaction by `begin`, and keeps it open if the fence passes.
fn lock<C>(conn: &mut C, key: Key<'_>, how: Fencing, begin: &str) -> QueryResult<bool>
where
    C: LoadConnection<TransactionManager = AnsiTransactionManager>,
    C::Backend: Engine,
{
    AnsiTransactionManager::begin_transaction_sql(conn, begin)?;
    let fenced = C::Backend::fence(conn, key, how);
    if !matches!(fenced, Ok(true)) {
        AnsiTransactionManager::rollback_transaction(conn)?;
    }
    fenced
}

/// Ids of the statements that are kept prepared.
#[derive(Debug, QueryId)]
pub(crate) struct Claim;
#[derive(Debug, QueryId)]
pub(crate) struct Renew;
#[derive(Debug, QueryId)]
pub(crate) struct RenewAll;
#[derive(Debug, QueryId)]
pub(crate) struct Release;
#[derive(Debug, QueryId)]
pub(crate) struct ForceRelease;
#[derive(Debug, QueryId)]
pub(crate) struct ClaimSlot;
#[derive(Debug, QueryId)]
pub(crate) struct ClaimRerun;
#[derive(Debug, QueryId)]
pub(crate) struct Finish;
#[derive(Debug, QueryId)]
pub(crate) struct Settle;
#[derive(Debug, QueryId)]
pub(crate) struct UndoSlot;
#[derive(Debug, QueryId)]
pub(crate) struct UndoRerun;

/// The questions that every engine is asked in the same words.
macro_rules! common_questions {
    () => {
        fn renew(&mut self, key: Key<'_>, lease_ms: i64) -> QueryResult<bool> {
            let mine = statements::held_live(key.name, key.holder, key.term);
            let rows =
                Write::update(super::Renew, statements::extended(lease_ms), mine).execute(self)?;
            Ok(rows == 1)
        }

        fn verify(&mut self, key: Key<'_>) -> QueryResult<bool> {
            <Self as Connection>::Backend::verify(self, key)
        }

        fn verify_all(&mut self, keys: &[Key<'_>]) -> QueryResult<Vec<String>> {
            leases::table
                .select(leases::name)
                .filter(statements::any_held_live(keys))
                .load(self)
        }

        fn release(&mut self, key: Key<'_>, tells: bool) -> QueryResult<bool> {
            let mine = statements::held_by(key.name, key.holder);
            if !tells {
                let rows =
                    Write::update(super::Release, statements::given_back(), mine).execute(self)?;
                return Ok(rows == 1);
            }
            free(
                self,
                Write::update(super::Release, statements::given_back(), mine),
            )
        }

        fn unlock(&mut self) -> QueryResult<()> {
            <Self as Connection>::TransactionManager::commit_transaction(self)
        }

        fn has_table(&mut self) -> QueryResult<bool> {
            <Self as Connection>::Backend::has_table(self)
        }

        fn claim_slot(
            &mut self,
            claim: &NewClaim,
            slot_ms: i64,
            read: Option<&Row>,
        ) -> QueryResult<Option<i64>> {
            let NewClaim {
                name,
                holder,
                instance,
                lease_ms,
            } = claim;
            let Some(row) = read else {
                let first = statements::first_for_slot(name, holder, instance, *lease_ms, slot_ms);
                diesel::insert_into(leases::table)
                    .values(first)
                    .on_conflict_do_nothing()
                    .execute(self)?;
                let row = self.read(name)?;
                return Ok(row.filter(|row| row.holder == *holder).map(|row| row.term));
            };
            let next = statements::next_for_slot(holder, instance, *lease_ms, slot_ms);
            let as_read =
                statements::free_as_read(name, row.term, row.slot_ms, row.unfinished_slot_ms);
            let rows = Write::update(super::ClaimSlot, next, as_read).execute(self)?;
            Ok((rows == 1).then_some(row.term + 1))
        }

        fn claim_rerun(
            &mut self,
            claim: &NewClaim,
            slot_ms: i64,
            term: i64,
        ) -> QueryResult<Option<i64>> {
            let NewClaim {
                name,
                holder,
                instance,
                lease_ms,
            } = claim;
            let next = statements::next_for_rerun(holder, instance, *lease_ms);
            let as_found = statements::cut_short_as_found(name, term, slot_ms);
            let rows = Write::update(super::ClaimRerun, next, as_found).execute(self)?;
            Ok((rows == 1).then_some(term + 1))
        }

        fn cut_short(&mut self, names: &[&str]) -> QueryResult<Vec<(String, i64, i64)>> {
            leases::table
                .select((leases::name, leases::term, leases::slot_ms))
                .filter(leases::name.eq_any(names).and(statements::cut_short()))
                .load(self)
        }

        fn finish(&mut self, key: Key<'_>, passed_ms: i64) -> QueryResult<bool> {
            let mine = statements::held_by(key.name, key.holder);
            let finished = statements::finished(passed_ms);
            free(self, Write::update(super::Finish, finished, mine))
        }

        fn settle(&mut self, name: &str, slot_ms: i64) -> QueryResult<()> {
            let unfinished = statements::unfinished_at(name, slot_ms);
            Write::update(super::Settle, statements::settled(), unfinished).execute(self)?;
            Ok(())
        }

        fn undo_slot(
            &mut self,
            key: Key<'_>,
            slot_ms: i64,
            unfinished_slot_ms: i64,
        ) -> QueryResult<bool> {
            let mine = statements::held_by(key.name, key.holder);
            let undone = statements::slot_undone(slot_ms, unfinished_slot_ms);
            Ok(Write::update(super::UndoSlot, undone, mine).execute(self)? == 1)
        }

        fn undo_rerun(&mut self, key: Key<'_>) -> QueryResult<bool> {
            let mine = statements::held_by(key.name, key.holder);
            Ok(
                Write::update(super::UndoRerun, statements::rerun_undone(), mine).execute(self)?
                    == 1,
            )
        }

        fn force_release(&mut self, name: &str) -> QueryResult<bool> {
            let held = statements::named_and_live(name);
            free(
                self,
                Write::update(super::ForceRelease, statements::forced(), held),
            )
        }

        fn read(&mut self, name: &str) -> QueryResult<Option<Row>> {
            let row = leases::table
                .select(statements::row())
                .filter(statements::named(name));
            row.get_result(self).optional()
        }

        fn list(&mut self) -> QueryResult<Vec<Row>> {
            leases::table
                .select(statements::row())
                .order(leases::name)
                .load(self)
        }

        fn rehearse(&mut self, claim: &NewClaim) -> QueryResult<(Option<i64>, Option<Row>)> {
            self.begin_test_transaction()?;
            let answer = self
                .claim(claim)
                .and_then(|term| Ok((term, self.read(&claim.name)?)));
            let undone = <Self as Connection>::TransactionManager::rollback_transaction(self);
            let answer = answer?;
            undone?;
            Ok(answer)
        }
    };
}
pub(crate) use common_questions;

/// The part of an [`Engine`] that is the same words everywhere.
macro_rules! common_engine {
    ($checks:ident) => {
        fn verify<C>(conn: &mut C, key: Key<'_>) -> QueryResult<bool>
        where
            C: LoadConnection<Backend = Self>,
        {
            let mine = leases::table
                .select(leases::term)
                .filter(statements::held_live(key.name, key.holder, key.term));
            Ok(mine.get_result::<i64>(conn).optional()?.is_some())
        }

        fn has_table<C>(conn: &mut C) -> QueryResult<bool>
        where
            C: LoadConnection<Backend = Self>,
        {
            checks::$checks::has_table(conn)
        }
    };
}
pub(crate) use common_engine;
