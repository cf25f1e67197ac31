//! The protocol as a model, of which a checker visits every state.
//!
//! [`row`] has the statements of the row one by one; three models send them:
//!
//! | model | what is asked | what moves |
//! |---|---|---|
//! | [`lease`] | who believes in a lease, and for how long | claims, renewals and releases that are late, lost, or carried out with the answer lost; expiry; local clocks; kills |
//! | [`guard`] | what is committed under which term | verify, fence, COMMIT and the sessions they are on; expiry and pauses at any moment |
//! | [`slots`] | which instant is run when, and how often | slot claims, finish, rerun, sweep and undo, each late or lost; expiry and pauses at any moment |
//!
//! Every step of a process is its own, and nothing says when it comes: a process that does not step is
//! paused. One that is killed forgets all; what it had sent may land later.
//!
//! # What is assumed
//!
//! A statement is atomic, and its clock is the database's, which does not jump. Of the ticks of one lease
//! a local clock misses no more than lies between deadline and lease; only [`lease`] needs that. Rows are
//! not deleted and not restored. Sessions last as long as [`guard`] says.
//!
//! # What is left out
//!
//! One name only, since no statement touches two. Isolation levels and what the guard does after an
//! error, which the tests on real servers show. Forced release in [`lease`], after which two holders
//! can be healthy until the next answer: [`guard`] has it, and lets nobody out of order commit. What is
//! beyond the bounds: numbers of processes, terms, instants, and statements under way that nobody waits
//! for, of which one too many counts as lost. Time has no bound.
//!
//! "Nothing stays blocked" is asked of every state, as a thing that is always so: if all others stand
//! still from here on, then a claim passes, in [`lease`] after one lease at the most. The checker's own
//! `eventually` does not see what goes in circles.
//!
//! # That it bites
//!
//! Each [`Fault`] changes one statement or rule, and the checker must find what that breaks, in a model no
//! larger than one in which nothing is found without the fault. What is not found is a gap of the
//! model. Three variations do less harm than might be thought, and are pinned down too: a server's
//! fence needs no verify before it; a rerun that compares the instant and not the term still runs none
//! too often; a session beside that is ended too early lets a commit through, but not one that is told as
//! done.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::hash::Hash;

use stateright::{Checker, HasDiscoveries, Model};

mod guard;
mod lease;
mod row;
mod slots;

use guard::{Engine, Guard};
use lease::Leases;
use slots::Slots;

/// A property's name.
type Named = &'static str;

/// What is wrong with the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    // Of a statement.
    ClaimWithoutExpiry,
    RenewByNameOnly,
    RenewWithoutExpiry,
    ReleaseByNameOnly,
    ReleaseDeletesTheRow,
    FenceByNameOnly,
    SlotClaimWithoutSlot,
    /// It does not compare `unfinished`.
    SlotClaimWithoutMark,
    RerunWithoutTerm,
    RerunWithoutSlot,
    RerunWithoutEither,
    RerunNotMarked,
    FinishByNameOnly,
    /// It sets the slot to the passed one, whatever they are.
    FinishDoesNotCompare,
    FinishLeavesTheMark,
    SettleDoesNotCompare,
    UndoByNameOnly,
    /// As `now()` does in a transaction of PostgreSQL.
    DatabaseClockStandsStill,
    // Of what a process does.
    DeadlineFromReply,
    /// The deadline is as long as the lease.
    NoMargin,
    /// It misses more than the margin allows.
    ClockTooSlow,
    LateSuccessRevives,
    HolderSentAgain,
    // Of the guard.
    NoVerify,
    VerifyOnlyAtBegin,
    FenceWithoutLock,
    FenceBeforeTheWork,
    /// As without the unique index on `holder`.
    ClaimPassesTheLock,
    VerifyBeforeWriteLock,
    SessionsHaveNoLimit,
    /// The session beside is not looked at after the COMMIT.
    EndOfBesideIgnored,
}

/// Visits every state, and asserts how many there are and that every property holds.
fn holds<M>(model: M, states: usize)
where
    M: Model<State: Clone + Debug + PartialEq + Hash + Send + Sync> + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let checker = model.checker().spawn_bfs().join();
    checker.assert_properties();
    assert_eq!(checker.unique_state_count(), states);
}

/// Asserts that a counterexample to `property` is found.
fn bites<M>(model: M, property: Named)
where
    M: Model<State: Clone + Debug + PartialEq + Hash + Send + Sync> + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let found = HasDiscoveries::AnyOf(BTreeSet::from([property]));
    let checker = model.checker().finish_when(found).spawn_bfs().join();
    checker.assert_any_discovery(property);
}

/// Visits every state, and asserts that a counterexample is found to `property` and to no other.
fn breaks_only<M>(model: M, property: Named, states: usize)
where
    M: Model<State: Clone + Debug + PartialEq + Hash + Send + Sync> + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let checker = model.checker().spawn_bfs().join();
    for asked in checker.model().properties() {
        let is_found = checker.discovery(asked.name).is_some();
        let is_failure = asked.expectation.discovery_is_failure();
        assert_eq!(
            is_found,
            !is_failure || asked.name == property,
            "{}",
            asked.name
        );
    }
    assert_eq!(checker.unique_state_count(), states);
}

macro_rules! bites {
    ($($fault:ident: $model:expr => $property:expr;)*) => { $(
        #[test]
        fn $fault() {
            bites($model, $property);
        }
    )* };
}

fn leases(fault: Fault) -> Leases {
    Leases {
        processes: 2,
        terms: 3,
        lease: 3,
        adrift: 1,
        fault,
    }
}

#[test]
fn two_processes_share_a_lease() {
    holds(
        Leases {
            adrift: 2,
            ..leases(Fault::None)
        },
        172_417,
    );
}

#[test]
fn three_processes_share_a_lease() {
    holds(
        Leases {
            processes: 3,
            terms: 2,
            lease: 2,
            ..leases(Fault::None)
        },
        86_938,
    );
}

bites! {
    claim_without_the_expiry_condition: leases(Fault::ClaimWithoutExpiry) => lease::ONE_HEALTHY;
    release_by_name_only: leases(Fault::ReleaseByNameOnly) => lease::ONE_HEALTHY;
    deadline_counted_from_the_reply: leases(Fault::DeadlineFromReply) => lease::ONE_HEALTHY;
    deadline_as_long_as_the_lease: leases(Fault::NoMargin) => lease::ONE_HEALTHY;
    local_clock_too_slow: leases(Fault::ClockTooSlow) => lease::ONE_HEALTHY;
    late_success_revives: leases(Fault::LateSuccessRevives) => lease::LOST_STAYS_LOST;
    renew_by_name_only: leases(Fault::RenewByNameOnly) => lease::OWN_RENEWAL;
    renew_without_the_expiry_condition: leases(Fault::RenewWithoutExpiry) => lease::FREE_UNTIL_CLAIMED;
    holder_sent_again: leases(Fault::HolderSentAgain) => lease::HOLDER_ONCE;
    release_deletes_the_row: leases(Fault::ReleaseDeletesTheRow) => lease::TERMS_RISE;
    database_clock_stands_still: leases(Fault::DatabaseClockStandsStill) => lease::CLAIMABLE;
}

fn guard(engine: Engine, fault: Fault) -> Guard {
    Guard {
        engine,
        // Beside, it is strict as long as they do not.
        sessions_end: engine != Engine::Beside,
        processes: 3,
        terms: 4,
        fault,
    }
}

#[test]
fn transactions_commit_in_order_on_postgres() {
    holds(guard(Engine::Postgres, Fault::None), 68_445);
}

#[test]
fn transactions_commit_in_order_on_innodb() {
    holds(guard(Engine::InnoDb, Fault::None), 68_445);
}

#[test]
fn transactions_commit_in_order_on_sqlite() {
    holds(guard(Engine::OneWriter, Fault::None), 15_869);
}

#[test]
fn transactions_commit_in_order_beside() {
    holds(guard(Engine::Beside, Fault::None), 33_747);
}

fn beside_with_ends(fault: Fault) -> Guard {
    Guard {
        sessions_end: true,
        processes: 2,
        ..guard(Engine::Beside, fault)
    }
}

#[test]
fn a_session_beside_that_ends_too_early_is_never_told_as_done() {
    breaks_only(beside_with_ends(Fault::None), guard::IN_ORDER, 51_352);
}

#[test]
fn the_fence_of_a_server_needs_no_verify_at_the_begin() {
    holds(guard(Engine::Postgres, Fault::NoVerify), 68_445);
}

bites! {
    verify_only_at_begin: guard(Engine::Postgres, Fault::VerifyOnlyAtBegin) => guard::IN_ORDER;
    verify_only_at_begin_beside: guard(Engine::Beside, Fault::VerifyOnlyAtBegin) => guard::IN_ORDER;
    fence_without_the_lock: guard(Engine::Postgres, Fault::FenceWithoutLock) => guard::IN_ORDER;
    fence_without_the_lock_on_innodb: guard(Engine::InnoDb, Fault::FenceWithoutLock) => guard::IN_ORDER;
    fence_without_the_lock_beside: guard(Engine::Beside, Fault::FenceWithoutLock) => guard::IN_ORDER;
    fence_by_name_only: guard(Engine::Postgres, Fault::FenceByNameOnly) => guard::IN_ORDER;
    fence_before_the_work: guard(Engine::Postgres, Fault::FenceBeforeTheWork) => guard::NO_LOCK_AT_WORK;
    claim_passes_the_lock: guard(Engine::Postgres, Fault::ClaimPassesTheLock) => guard::IN_ORDER;
    terms_start_again: guard(Engine::Postgres, Fault::ReleaseDeletesTheRow) => guard::IN_ORDER;
    sqlite_verifies_before_the_write_lock: guard(Engine::OneWriter, Fault::VerifyBeforeWriteLock) => guard::IN_ORDER;
    sqlite_does_not_verify: guard(Engine::OneWriter, Fault::NoVerify) => guard::IN_ORDER;
    sessions_have_no_limit: guard(Engine::Postgres, Fault::SessionsHaveNoLimit) => guard::NOT_BLOCKED;
    end_of_beside_ignored: beside_with_ends(Fault::EndOfBesideIgnored) => guard::TOLD_IN_ORDER;
}

fn slots(fault: Fault) -> Slots {
    Slots {
        processes: 2,
        terms: 4,
        instants: 2,
        adrift: 1,
        fault,
    }
}

#[test]
fn two_instants_run_at_most_twice() {
    holds(slots(Fault::None), 85_839);
}

#[test]
fn three_instants_run_at_most_twice() {
    holds(
        Slots {
            terms: 3,
            instants: 3,
            ..slots(Fault::None)
        },
        117_022,
    );
}

#[test]
fn rerun_without_the_term_is_found_and_does_nothing_else() {
    breaks_only(
        slots(Fault::RerunWithoutTerm),
        slots::RERUN_NOT_HELD_SINCE,
        98_426,
    );
}

bites! {
    slot_claim_that_does_not_compare_the_slot: slots(Fault::SlotClaimWithoutSlot) => slots::NEVER_BACK;
    slot_claim_that_does_not_compare_the_mark: slots(Fault::SlotClaimWithoutMark) => slots::SUPERSEDED;
    rerun_without_the_slot: slots(Fault::RerunWithoutSlot) => slots::FORWARD;
    rerun_without_either: slots(Fault::RerunWithoutEither) => slots::RERUN_OF_LAST;
    rerun_that_is_not_marked: slots(Fault::RerunNotMarked) => slots::RERUN_ONCE;
    finish_by_name_only: slots(Fault::FinishByNameOnly) => slots::STAYS_MARKED;
    finish_that_does_not_compare: slots(Fault::FinishDoesNotCompare) => slots::NEVER_BACK;
    finish_that_runs_an_instant_again: slots(Fault::FinishDoesNotCompare) => slots::ONCE;
    finish_that_leaves_the_mark: slots(Fault::FinishLeavesTheMark) => slots::RERUN_OF_CUT_SHORT;
    settle_that_does_not_compare: slots(Fault::SettleDoesNotCompare) => slots::STAYS_MARKED;
    undo_by_name_only: slots(Fault::UndoByNameOnly) => slots::NEVER_BACK;
}
