//! What each act on an instant leaves behind.

use std::mem;
use std::sync::Barrier;
use std::thread;

use chrono::{DateTime, TimeDelta, Utc};
use diesel_lease::{Error, Lease, Leases, Unfinished};

use super::hooked::hooked;
use super::{
    found, is_lost, marks, migrated, minute, minute_ms, nothing_found, refused, soon_free, won,
};
use crate::support::database::Database;
use crate::support::{Engine, LONG, TIMINGS, engines, eventually};

engines! {
    fn an_instant_is_claimed_once_and_none_before_it,
    fn of_many_that_claim_an_instant_of_a_new_name_one_gets_it,
    fn of_many_that_claim_the_next_instant_one_gets_it,
    fn a_node_that_is_behind_or_set_back_runs_no_instant_again,
    fn a_finished_round_leaves_nothing_behind,
    fn a_held_lease_finishes_too,
    fn instants_that_passed_during_a_round_are_claimed_by_nobody,
    fn an_instant_passed_before_moves_nothing,
    fn an_instant_still_to_come_is_not_passed,
    fn a_round_that_ran_out_and_was_not_taken_finishes,
    fn a_late_finish_settles_the_instant_beside_its_second_round,
    fn a_late_finish_changes_nothing_of_a_later_instant,
    fn a_lost_round_that_finishes_is_settled_and_said_to_be_lost,
    fn of_many_that_claim_a_second_round_one_gets_it,
    fn a_second_round_that_finishes_leaves_nothing_behind,
    fn a_dropped_round_is_found,
    fn a_round_whose_process_died_is_found_once_its_lease_ran_out,
    fn a_later_instant_gives_up_what_was_cut_short,
    fn a_row_without_marks_is_not_unfinished,
    fn a_mark_left_behind_is_not_unfinished,
    fn a_plain_claim_leaves_the_instant_unfinished_and_what_was_found_stale,
    fn a_name_forced_free_leaves_the_instant_unfinished_and_what_was_found_stale,
    fn no_instant_is_last_where_none_was_claimed,
    fn instants_are_whole_milliseconds,
    fn the_last_instant_of_all_can_be_claimed,
    fn what_cannot_be_an_instant_is_refused_unsent,
    fn an_invalid_name_is_refused_unsent,
    fn any_number_of_names_is_searched,
    fn names_are_their_bytes,
    fn a_lease_for_no_instant_cannot_finish_and_is_given_back,
    fn a_finish_that_passed_an_impossible_instant_gives_back_as_a_drop_does,
}

const JOB: &str = "job";

/// Has many processes claim at the same moment; what those got that got something.
fn at_once(
    database: &Database,
    claim: impl Fn(&Leases) -> Result<Option<Lease>, Error> + Sync,
) -> Vec<Lease> {
    const MANY: usize = 16;
    let barrier = Barrier::new(MANY);
    thread::scope(|scope| {
        let claims: Vec<_> = (0..MANY)
            .map(|_| {
                scope.spawn(|| {
                    let builder = Leases::builder().connections(1);
                    let leases = builder.build(database.url()).unwrap();
                    leases.last_slot(JOB).unwrap();
                    barrier.wait();
                    claim(&leases).unwrap()
                })
            })
            .collect();
        claims
            .into_iter()
            .filter_map(|claim| claim.join().unwrap())
            .collect()
    })
}

fn the_only(mut leases: Vec<Lease>) -> Lease {
    assert_eq!(leases.len(), 1, "{leases:?}");
    leases.remove(0)
}

fn an_instant_is_claimed_once_and_none_before_it(engine: Engine) {
    let (database, leases) = migrated(engine);
    let other = Leases::connect(database.url()).unwrap();
    assert_eq!(leases.last_slot(JOB).unwrap(), None);

    let first = won(leases.try_claim_slot(JOB, minute(1)));
    assert_eq!((first.name(), first.term()), (JOB, 1));
    assert_eq!(first.slot(), Some(minute(1)));
    assert_eq!(first.tenure().slot(), Some(minute(1)));
    assert_eq!(first.superseded(), None);
    first.verify().unwrap();
    first.renew().unwrap();
    refused(other.try_claim_slot(JOB, minute(2)));
    refused(leases.try_claim(JOB));
    first.release().unwrap();

    assert_eq!(leases.last_slot(JOB).unwrap(), Some(minute(1)));
    refused(leases.try_claim_slot(JOB, minute(1)));
    refused(other.try_claim_slot(JOB, minute(1)));
    refused(other.try_claim_slot(JOB, minute(0)));
    let second = won(other.try_claim_slot(JOB, minute(2)));
    assert_eq!(second.term(), 2);
    let record = leases.inspect(JOB).unwrap().expect("a record");
    assert_eq!(record.last_slot(), Some(minute(2)));
    assert_eq!(record.unfinished_slot(), Some(minute(2)));
    second.finish(None).unwrap();
    let record = leases.inspect(JOB).unwrap().expect("a record");
    assert_eq!(record.last_slot(), Some(minute(2)));
    assert_eq!(record.unfinished_slot(), None);
}

fn of_many_that_claim_an_instant_of_a_new_name_one_gets_it(engine: Engine) {
    let (database, leases) = migrated(engine);
    let lease = the_only(at_once(&database, |leases| {
        leases.try_claim_slot(JOB, minute(1))
    }));
    assert_eq!((lease.term(), lease.slot()), (1, Some(minute(1))));
    lease.verify().unwrap();
    assert_eq!(leases.last_slot(JOB).unwrap(), Some(minute(1)));
}

fn of_many_that_claim_the_next_instant_one_gets_it(engine: Engine) {
    let (database, leases) = migrated(engine);
    won(leases.try_claim_slot(JOB, minute(1)))
        .finish(None)
        .unwrap();
    let lease = the_only(at_once(&database, |leases| {
        leases.try_claim_slot(JOB, minute(2))
    }));
    assert_eq!((lease.term(), lease.slot()), (2, Some(minute(2))));
    lease.verify().unwrap();
    assert_eq!(database.connect().row(JOB).unwrap().term, 2);
}

fn a_node_that_is_behind_or_set_back_runs_no_instant_again(engine: Engine) {
    let (database, leases) = migrated(engine);
    let behind = Leases::connect(database.url()).unwrap();
    for at in 0..20 {
        let lease = won(leases.try_claim_slot(JOB, minute(at)));
        refused(behind.try_claim_slot(JOB, minute(at - 3)));
        refused(behind.try_claim_slot(JOB, minute(at)));
        lease.finish(None).unwrap();
        refused(behind.try_claim_slot(JOB, minute(at)));
    }
    for at in 10..20 {
        refused(leases.try_claim_slot(JOB, minute(at)));
        refused(behind.try_claim_slot(JOB, minute(at)));
    }
    assert_eq!(won(behind.try_claim_slot(JOB, minute(20))).term(), 21);
}

fn a_finished_round_leaves_nothing_behind(engine: Engine) {
    let (database, leases) = migrated(engine);
    let lease = won(leases.try_claim_slot(JOB, minute(1)));
    let tenure = lease.tenure();
    lease.finish(None).unwrap();
    assert!(tenure.is_lost());
    let mut raw = database.connect();
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), 0, 0));
    assert_eq!(raw.row(JOB).unwrap().expires_at_ms, 0);
    nothing_found(&leases, JOB);
    let next = won(leases.try_claim_slot(JOB, minute(2)));
    assert_eq!((next.term(), next.superseded()), (2, None));
}

fn a_held_lease_finishes_too(engine: Engine) {
    let (database, leases) = migrated(engine);
    let held = won(leases.try_claim_slot(JOB, minute(1))).hold().unwrap();
    assert_eq!(held.tenure().slot(), Some(minute(1)));
    held.finish(Some(minute(3))).unwrap();
    let mut raw = database.connect();
    assert_eq!(marks(&mut raw, JOB), (minute_ms(3), 0, 0));
    assert_eq!(raw.row(JOB).unwrap().expires_at_ms, 0);
}

fn instants_that_passed_during_a_round_are_claimed_by_nobody(engine: Engine) {
    let (_database, leases) = migrated(engine);
    won(leases.try_claim_slot(JOB, minute(1)))
        .finish(Some(minute(3)))
        .unwrap();
    assert_eq!(leases.last_slot(JOB).unwrap(), Some(minute(3)));
    nothing_found(&leases, JOB);
    refused(leases.try_claim_slot(JOB, minute(2)));
    refused(leases.try_claim_slot(JOB, minute(3)));
    let next = won(leases.try_claim_slot(JOB, minute(4)));
    assert_eq!((next.term(), next.superseded()), (2, None));
}

fn an_instant_passed_before_moves_nothing(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    for (at, passed) in [(5, 4), (6, 6)] {
        won(leases.try_claim_slot(JOB, minute(at)))
            .finish(Some(minute(passed)))
            .unwrap();
        assert_eq!(marks(&mut raw, JOB), (minute_ms(at), 0, 0));
    }
}

fn an_instant_still_to_come_is_not_passed(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let from_now = |raw: &mut crate::support::raw::Raw, ms: i64| {
        DateTime::from_timestamp_millis(raw.now_ms() + ms).unwrap()
    };
    let lease = won(leases.try_claim_slot(JOB, minute(1)));
    let in_an_hour = from_now(&mut raw, 3_600_000);
    lease.finish(Some(in_an_hour)).unwrap();
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), 0, 0));

    // One that has just come is.
    let lease = won(leases.try_claim_slot(JOB, minute(2)));
    let now = from_now(&mut raw, 0);
    lease.finish(Some(now)).unwrap();
    assert_eq!(marks(&mut raw, JOB), (now.timestamp_millis(), 0, 0));
}

/// The process stood still, and nobody has noticed.
fn a_round_that_ran_out_and_was_not_taken_finishes(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let lease = won(leases.try_claim_slot(JOB, minute(1)));
    raw.expire(JOB);
    lease.finish(Some(minute(2))).unwrap();
    assert_eq!(marks(&mut raw, JOB), (minute_ms(2), 0, 0));
}

fn a_late_finish_settles_the_instant_beside_its_second_round(engine: Engine) {
    let (database, leases) = migrated(engine);
    let other = Leases::connect(database.url()).unwrap();
    let mut raw = database.connect();
    let first = won(leases.try_claim_slot(JOB, minute(1)));
    raw.expire(JOB);
    let second = won(other.try_claim_rerun(&found(&other, JOB)));
    assert_eq!((second.term(), second.slot()), (2, Some(minute(1))));

    is_lost(first.finish(Some(minute(5))));
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), 0, minute_ms(1)));
    second.verify().unwrap();
    second.finish(Some(minute(2))).unwrap();
    assert_eq!(marks(&mut raw, JOB), (minute_ms(2), 0, minute_ms(1)));
}

fn a_late_finish_changes_nothing_of_a_later_instant(engine: Engine) {
    let (database, leases) = migrated(engine);
    let other = Leases::connect(database.url()).unwrap();
    let mut raw = database.connect();
    let first = won(leases.try_claim_slot(JOB, minute(1)));
    raw.expire(JOB);
    let second = won(other.try_claim_slot(JOB, minute(2)));
    let given_up = second.superseded().expect("the first");
    assert_eq!(given_up.slot(), minute(1));

    let before = raw.row(JOB);
    is_lost(first.finish(Some(minute(5))));
    assert_eq!(raw.row(JOB), before);
    assert_eq!(marks(&mut raw, JOB), (minute_ms(2), minute_ms(2), 0));
    second.finish(None).unwrap();
}

fn a_lost_round_that_finishes_is_settled_and_said_to_be_lost(engine: Engine) {
    let database = Database::create(engine);
    let builder = Leases::builder().timings(TIMINGS);
    let leases = builder.build(database.url()).unwrap();
    leases.migrate().unwrap();
    let mut raw = database.connect();

    let held = won(leases.try_claim_slot(JOB, minute(1))).hold().unwrap();
    let taken = raw.take_over(JOB);
    eventually(LONG, "the loss is noticed", || held.is_lost());
    is_lost(held.finish(Some(minute(5))));
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), 0, 0));
    let row = raw.row(JOB).unwrap();
    assert_eq!(
        (row.holder, row.expires_at_ms),
        (taken.holder, taken.expires_at_ms)
    );

    // Given up by its own clock, while the row is still its own.
    let name = "other job";
    let lease = won(leases.try_claim_slot(name, minute(1)));
    eventually(LONG, "the deadline passes", || lease.is_lost());
    let before = raw.row(name).unwrap();
    is_lost(lease.finish(Some(minute(5))));
    let after = raw.row(name).unwrap();
    assert_eq!(marks(&mut raw, name), (minute_ms(1), 0, 0));
    assert_eq!(after.expires_at_ms, before.expires_at_ms);
}

fn of_many_that_claim_a_second_round_one_gets_it(engine: Engine) {
    let (database, leases) = migrated(engine);
    won(leases.try_claim_slot(JOB, minute(1)))
        .release()
        .unwrap();
    let cut_short = found(&leases, JOB);
    assert_eq!(
        (cut_short.name(), cut_short.slot(), cut_short.is_rerun()),
        (JOB, minute(1), false)
    );

    let second = the_only(at_once(&database, |leases| {
        leases.try_claim_rerun(&cut_short)
    }));
    assert_eq!((second.term(), second.slot()), (2, Some(minute(1))));
    assert_eq!(second.superseded(), None);
    second.verify().unwrap();
    nothing_found(&leases, JOB);
    second.release().unwrap();

    nothing_found(&leases, JOB);
    refused(leases.try_claim_rerun(&cut_short));
    let next = won(leases.try_claim_slot(JOB, minute(2)));
    let given_up = next.superseded().expect("the second round");
    assert_eq!(
        (given_up.name(), given_up.slot(), given_up.is_rerun()),
        (JOB, minute(1), true)
    );
    // It says which round was given up, and is good for nothing else.
    let given_up = given_up.clone();
    next.release().unwrap();
    refused(leases.try_claim_rerun(&given_up));
    // Its mark is of another instant.
    assert_eq!(found(&leases, JOB).slot(), minute(2));
}

fn a_second_round_that_finishes_leaves_nothing_behind(engine: Engine) {
    let (database, leases) = migrated(engine);
    won(leases.try_claim_slot(JOB, minute(1)))
        .release()
        .unwrap();
    let cut_short = found(&leases, JOB);
    won(leases.try_claim_rerun(&cut_short))
        .finish(Some(minute(2)))
        .unwrap();
    let mut raw = database.connect();
    assert_eq!(marks(&mut raw, JOB), (minute_ms(2), 0, minute_ms(1)));
    nothing_found(&leases, JOB);
    refused(leases.try_claim_rerun(&cut_short));
    refused(leases.try_claim_slot(JOB, minute(2)));
    let next = won(leases.try_claim_slot(JOB, minute(3)));
    assert_eq!((next.term(), next.superseded()), (3, None));
}

fn a_dropped_round_is_found(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    drop(won(leases.try_claim_slot(JOB, minute(1))));
    soon_free(&mut raw, JOB);
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), minute_ms(1), 0));
    let second = won(leases.try_claim_rerun(&found(&leases, JOB)));
    drop(second.hold().unwrap());
    soon_free(&mut raw, JOB);
    assert_eq!(
        marks(&mut raw, JOB),
        (minute_ms(1), minute_ms(1), minute_ms(1))
    );
    nothing_found(&leases, JOB);
}

fn a_round_whose_process_died_is_found_once_its_lease_ran_out(engine: Engine) {
    let (database, leases) = migrated(engine);
    mem::forget(won(leases.try_claim_slot(JOB, minute(1))));
    nothing_found(&leases, JOB);
    database.connect().expire(JOB);
    assert_eq!(found(&leases, JOB).slot(), minute(1));

    // The same by the clock.
    let builder = Leases::builder().timings(TIMINGS);
    let short = builder.build(database.url()).unwrap();
    mem::forget(won(short.try_claim_slot("other job", minute(1))));
    eventually(LONG, "it is found", || {
        !leases.unfinished_slots(&["other job"]).unwrap().is_empty()
    });
}

fn a_later_instant_gives_up_what_was_cut_short(engine: Engine) {
    let (database, leases) = migrated(engine);
    let other = Leases::connect(database.url()).unwrap();
    won(leases.try_claim_slot(JOB, minute(1)))
        .release()
        .unwrap();
    let cut_short = found(&other, JOB);

    let later = won(leases.try_claim_slot(JOB, minute(2)));
    let given_up = later.superseded().expect("the first");
    assert_eq!(
        (given_up.name(), given_up.slot(), given_up.is_rerun()),
        (JOB, minute(1), false)
    );
    refused(other.try_claim_rerun(&cut_short));
    later.release().unwrap();
    refused(other.try_claim_rerun(&cut_short));
    assert_eq!(found(&other, JOB).slot(), minute(2));
}

/// As a plain insert, or a program that knows only the first of the columns, writes it.
fn a_row_without_marks_is_not_unfinished(engine: Engine) {
    let (database, leases) = migrated(engine);
    database.connect().execute(&format!(
        "INSERT INTO diesel_leases (name, holder, instance, term, slot_ms) \
         VALUES ('{JOB}', 'h', 'i', 1, {})",
        minute_ms(1)
    ));
    nothing_found(&leases, JOB);
    assert_eq!(leases.last_slot(JOB).unwrap(), Some(minute(1)));
    refused(leases.try_claim_slot(JOB, minute(1)));
    let next = won(leases.try_claim_slot(JOB, minute(2)));
    assert_eq!((next.term(), next.superseded()), (2, None));
}

fn a_mark_left_behind_is_not_unfinished(engine: Engine) {
    let (database, leases) = migrated(engine);
    database.connect().execute(&format!(
        "INSERT INTO diesel_leases (name, holder, instance, term, slot_ms, unfinished_slot_ms) \
         VALUES ('{JOB}', 'h', 'i', 1, {}, {})",
        minute_ms(2),
        minute_ms(1)
    ));
    nothing_found(&leases, JOB);
    let record = leases.inspect(JOB).unwrap().expect("a record");
    assert_eq!(record.unfinished_slot(), None);
    let next = won(leases.try_claim_slot(JOB, minute(3)));
    assert_eq!((next.term(), next.superseded()), (2, None));
}

fn a_plain_claim_leaves_the_instant_unfinished_and_what_was_found_stale(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    won(leases.try_claim_slot(JOB, minute(1)))
        .release()
        .unwrap();
    let stale = found(&leases, JOB);

    let plain = won(leases.try_claim(JOB));
    assert_eq!((plain.slot(), plain.superseded()), (None, None));
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), minute_ms(1), 0));
    nothing_found(&leases, JOB);
    refused(leases.try_claim_rerun(&stale));
    plain.release().unwrap();
    refused(leases.try_claim_rerun(&stale));

    let fresh = found(&leases, JOB);
    assert_ne!(fresh, stale);
    let second = won(leases.try_claim_rerun(&fresh));
    assert_eq!((second.term(), second.slot()), (3, Some(minute(1))));
}

fn a_name_forced_free_leaves_the_instant_unfinished_and_what_was_found_stale(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let first = won(leases.try_claim_slot(JOB, minute(1)));
    raw.expire(JOB);
    let stale = found(&leases, JOB);
    first.renew().unwrap_err();
    let now = raw.now_ms();
    raw.execute(&format!(
        "UPDATE diesel_leases SET expires_at_ms = {now} + 60000"
    ));
    assert!(leases.force_release(JOB).unwrap());
    refused(leases.try_claim_rerun(&stale));
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), minute_ms(1), 0));
    let second = won(leases.try_claim_rerun(&found(&leases, JOB)));
    assert_eq!(second.term(), 3);
    is_lost(first.finish(None));
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), 0, minute_ms(1)));
}

fn no_instant_is_last_where_none_was_claimed(engine: Engine) {
    let (_database, leases) = migrated(engine);
    assert_eq!(leases.last_slot(JOB).unwrap(), None);
    won(leases.try_claim(JOB)).release().unwrap();
    assert_eq!(leases.last_slot(JOB).unwrap(), None);
    let record = leases.inspect(JOB).unwrap().expect("a record");
    assert_eq!((record.last_slot(), record.unfinished_slot()), (None, None));
    nothing_found(&leases, JOB);
    let first = won(leases.try_claim_slot(JOB, minute(1)));
    assert_eq!((first.term(), first.superseded()), (2, None));
}

fn instants_are_whole_milliseconds(engine: Engine) {
    let (database, leases) = migrated(engine);
    let whole = minute(1) + TimeDelta::milliseconds(7);
    let odd = whole + TimeDelta::nanoseconds(999_999);
    let lease = won(leases.try_claim_slot(JOB, odd));
    assert_eq!(lease.slot(), Some(whole));
    lease
        .finish(Some(odd + TimeDelta::milliseconds(1)))
        .unwrap();
    let kept = whole + TimeDelta::milliseconds(1);
    assert_eq!(leases.last_slot(JOB).unwrap(), Some(kept));
    assert_eq!(
        marks(&mut database.connect(), JOB).0,
        kept.timestamp_millis()
    );
    refused(leases.try_claim_slot(JOB, odd + TimeDelta::milliseconds(1)));

    let earliest = DateTime::from_timestamp_millis(1).unwrap();
    let lease = won(leases.try_claim_slot("old", earliest + TimeDelta::nanoseconds(1)));
    lease.release().unwrap();
    assert_eq!(found(&leases, "old").slot(), earliest);
}

fn the_last_instant_of_all_can_be_claimed(engine: Engine) {
    let (_database, leases) = migrated(engine);
    let end = DateTime::<Utc>::MAX_UTC;
    let whole = DateTime::from_timestamp_millis(end.timestamp_millis()).unwrap();
    let lease = won(leases.try_claim_slot(JOB, end));
    assert_eq!(lease.slot(), Some(whole));
    lease.release().unwrap();
    let cut_short = found(&leases, JOB);
    assert_eq!(cut_short.slot(), whole);
    assert_eq!(leases.last_slot(JOB).unwrap(), Some(whole));
    won(leases.try_claim_rerun(&cut_short))
        .finish(Some(end))
        .unwrap();
    assert_eq!(leases.last_slot(JOB).unwrap(), Some(whole));
    refused(leases.try_claim_slot(JOB, end));
}

/// Leases that must not send anything.
fn silent(database: &Database) -> Leases {
    let refuse = |sql: Option<&str>| panic!("it was sent: {sql:?}");
    hooked(Leases::builder(), database.engine(), database.url(), refuse)
}

fn what_cannot_be_an_instant_is_refused_unsent(engine: Engine) {
    let (database, _leases) = migrated(engine);
    let leases = silent(&database);
    let start = DateTime::UNIX_EPOCH;
    for at in [
        start,
        start + TimeDelta::nanoseconds(999_999),
        start - TimeDelta::nanoseconds(1),
        start - TimeDelta::days(1),
        DateTime::<Utc>::MIN_UTC,
    ] {
        let answer = leases.try_claim_slot(JOB, at);
        let Err(error @ Error::InvalidSlot(_)) = answer else {
            panic!("{at}: {answer:?}");
        };
        assert!(!error.is_transient() && !error.is_lost());
        let why = std::error::Error::source(&error).expect("a reason");
        assert!(why.to_string().contains("1970"), "{why}");
    }
    assert_eq!(database.connect().row(JOB), None);
}

fn an_invalid_name_is_refused_unsent(engine: Engine) {
    let (database, _leases) = migrated(engine);
    let leases = silent(&database);
    let invalid = |error| assert!(matches!(error, Error::InvalidName(_)), "{error:?}");
    let long = "n".repeat(192);
    for name in ["", " job", "job\n", &long] {
        invalid(leases.try_claim_slot(name, minute(1)).unwrap_err());
        invalid(leases.last_slot(name).unwrap_err());
        let mut names = vec![JOB; 1000];
        names.push(name);
        invalid(leases.unfinished_slots(&names).unwrap_err());
    }
    assert_eq!(leases.unfinished_slots(&[]).unwrap(), []);
}

fn any_number_of_names_is_searched(engine: Engine) {
    const ALL: usize = 2000;
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let names: Vec<String> = (0..ALL).map(|n| format!("job {n:04}")).collect();
    for names in names.chunks(500) {
        let rows: Vec<String> = names
            .iter()
            .map(|name| format!("('{name}', 7, {0}, {0})", minute_ms(1)))
            .collect();
        raw.execute(&format!(
            "INSERT INTO diesel_leases (name, term, slot_ms, unfinished_slot_ms) VALUES {}",
            rows.join(", ")
        ));
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for count in [0, 1, 900, 901, ALL] {
        let mut found = leases.unfinished_slots(&names[..count]).unwrap();
        found.sort_by(|one, other| one.name().cmp(other.name()));
        let found: Vec<&str> = found.iter().map(Unfinished::name).collect();
        assert_eq!(found, names[..count], "{count} names");
    }
    // Named twice, found once.
    assert_eq!(
        leases.unfinished_slots(&[names[3]; 5]).unwrap(),
        leases.unfinished_slots(&names[3..4]).unwrap()
    );
    // The longest name there is.
    let long = "ü".repeat(95);
    won(leases.try_claim_slot(&long, minute(1)))
        .release()
        .unwrap();
    let mut names = names;
    names.push(&long);
    names.push("never claimed");
    assert_eq!(leases.unfinished_slots(&names).unwrap().len(), ALL + 1);
}

fn names_are_their_bytes(engine: Engine) {
    let (_database, leases) = migrated(engine);
    let names = ["job", "Job", "JOB", "jöb", "jo\u{308}b", "job\u{a0}x"];
    for (n, name) in names.iter().enumerate() {
        let lease = won(leases.try_claim_slot(name, minute(n as i64)));
        assert_eq!(lease.term(), 1, "{name}");
        lease.release().unwrap();
    }
    for (n, name) in names.iter().enumerate() {
        let at = minute(n as i64);
        assert_eq!(leases.last_slot(name).unwrap(), Some(at));
        let cut_short = found(&leases, name);
        assert_eq!((cut_short.name(), cut_short.slot()), (*name, at));
    }
    assert_eq!(leases.unfinished_slots(&names).unwrap().len(), names.len());
    won(leases.try_claim_rerun(&found(&leases, "Job")))
        .finish(None)
        .unwrap();
    nothing_found(&leases, "Job");
    assert_eq!(leases.unfinished_slots(&["jOB", "job"]).unwrap().len(), 1);
}

fn a_lease_for_no_instant_cannot_finish_and_is_given_back(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let not_a_slot = |answer| assert!(matches!(answer, Err(Error::NotASlot)), "{answer:?}");

    not_a_slot(won(leases.try_claim("plain")).finish(Some(minute(1))));
    soon_free(&mut raw, "plain");
    assert_eq!(marks(&mut raw, "plain"), (0, 0, 0));
    assert_eq!(leases.last_slot("plain").unwrap(), None);

    won(leases.try_claim_slot(JOB, minute(1)))
        .release()
        .unwrap();
    let held = won(leases.try_claim(JOB)).hold().unwrap();
    not_a_slot(held.finish(Some(minute(2))));
    soon_free(&mut raw, JOB);
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), minute_ms(1), 0));
}

fn a_finish_that_passed_an_impossible_instant_gives_back_as_a_drop_does(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let lease = won(leases.try_claim_slot(JOB, minute(1)));
    let answer = lease.finish(Some(DateTime::UNIX_EPOCH));
    assert!(matches!(answer, Err(Error::InvalidSlot(_))), "{answer:?}");
    soon_free(&mut raw, JOB);
    assert_eq!(found(&leases, JOB).slot(), minute(1));
}
