//! Many leases of one process, whose renewals share statements.

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::{HeldLease, Leases, LossCause, Timings};

use crate::hold::{ended_at, hold, lock_row, migrated};
use crate::support::database::Database;
use crate::support::watched::Watch;
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    fn many_leases_need_few_statements,
    fn a_loss_is_told_to_the_lease_that_it_concerns,
    fn a_lease_that_was_given_back_is_not_renewed;
    servers:
    fn a_locked_row_delays_no_other,
    fn several_locked_rows_are_renewed_once_they_are_free,
}

/// More than are renewed one by one.
const MANY: usize = 120;

/// A fifth of the defaults, with a deadline that a busy machine does not miss.
const TIMINGS: Timings = Timings {
    lease: Duration::from_secs(6),
    renew: Duration::from_millis(400),
    attempt: Duration::from_secs(3),
    deadline: Duration::from_secs(4),
    grace: Duration::from_secs(2),
};

/// Holds `a-000` and so on, in the order in which the database sorts them.
fn hold_many(leases: &Leases) -> Vec<HeldLease> {
    (0..MANY).map(|at| hold(leases, &name(at))).collect()
}

fn name(at: usize) -> String {
    format!("a-{at:03}")
}

/// Waits until each of them has been renewed from here on.
#[track_caller]
fn all_renewed<'a>(held: impl IntoIterator<Item = &'a HeldLease>) {
    let known: Vec<_> = held
        .into_iter()
        .map(|held| (held, Instant::now() + held.tenure().remaining()))
        .collect();
    eventually(LONG, "all are renewed", || {
        known.iter().all(|(held, known)| {
            assert!(!held.is_lost(), "{held:?}");
            Instant::now() + held.tenure().remaining() > *known + Duration::from_millis(50)
        })
    });
}

#[track_caller]
fn assert_all_held<'a>(held: impl IntoIterator<Item = &'a HeldLease>) {
    for held in held {
        let tenure = held.tenure();
        assert!(!held.is_lost(), "{}: {:?}", tenure.name(), tenure.check());
    }
}

fn many_leases_need_few_statements(engine: Engine) {
    let database = Database::create(engine);
    migrated(&database, &TIMINGS);
    let watch = Watch::default();
    let leases = watch.build(Leases::builder().timings(TIMINGS), &database);
    let held = hold_many(&leases);
    all_renewed(&held);

    watch.take_ran();
    let start = Instant::now();
    thread::sleep(5 * TIMINGS.renew);
    let intervals = start.elapsed().as_secs_f64() / TIMINGS.renew.as_secs_f64();
    let sent = watch.take_ran();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for sent in &sent {
        *counts
            .entry(sent.split_whitespace().next().unwrap())
            .or_default() += 1;
    }
    // Forty batches in an interval at the most; with MySQL a batch also reads the clock.
    let updates = counts["UPDATE"] as f64;
    assert!(
        updates <= 41.0 * (intervals + 1.0),
        "{counts:?} in {intervals}"
    );
    assert!(
        updates < 0.6 * MANY as f64 * intervals,
        "{counts:?} in {intervals}"
    );
    // A session that is made meanwhile is set up by a few.
    assert!(sent.len() as f64 <= 2.0 * updates + 10.0, "{counts:?}");
    assert_all_held(&held);
}

fn a_loss_is_told_to_the_lease_that_it_concerns(engine: Engine) {
    let database = Database::create(engine);
    let leases = migrated(&database, &TIMINGS);
    let held = hold_many(&leases);
    all_renewed(&held);

    let mut stranger = database.connect();
    let (forced, taken, deleted, expired) = (0, 40, 41, MANY - 1);
    assert!(leases.force_release(&name(forced)).unwrap());
    let successor = stranger.take_over(&name(taken));
    stranger.execute("DELETE FROM diesel_leases WHERE name = 'a-041'");
    stranger.expire(&name(expired));
    let start = Instant::now();
    let gone = [forced, taken, deleted, expired];
    for at in gone {
        ended_at(held[at].tenure(), LONG);
        let lost = held[at].tenure().check().unwrap_err();
        assert_eq!(lost.name(), name(at));
        assert_eq!(lost.cause(), LossCause::TakenOrReleased);
    }
    assert!(start.elapsed() < TIMINGS.deadline);
    let others = || {
        (0..MANY)
            .filter(|at| !gone.contains(at))
            .map(|at| &held[at])
    };
    all_renewed(others());
    assert_eq!(stranger.row(&name(taken)), Some(successor));
    assert_eq!(stranger.row(&name(deleted)), None);
}

fn a_lease_that_was_given_back_is_not_renewed(engine: Engine) {
    let database = Database::create(engine);
    let leases = migrated(&database, &TIMINGS);
    let mut held = hold_many(&leases);
    for held in held.drain(..MANY / 2) {
        held.release().unwrap();
    }
    all_renewed(&held);
    let mut stranger = database.connect();
    for at in 0..MANY / 2 {
        assert_eq!(stranger.row(&name(at)).unwrap().expires_at_ms, 0);
    }
    assert_all_held(&held);
}

fn a_locked_row_delays_no_other(engine: Engine) {
    let database = Database::create(engine);
    let leases = migrated(&database, &TIMINGS);
    let held = hold_many(&leases);
    all_renewed(&held);

    let locked = 60;
    let mut stranger = database.connect();
    lock_row(&mut stranger, engine, &name(locked));
    let mut least = TIMINGS.deadline;
    eventually(LONG, "the lease of the locked row is lost", || {
        let others = (0..MANY).filter(|at| *at != locked);
        let remaining = others.map(|at| held[at].tenure().remaining()).min();
        least = least.min(remaining.unwrap());
        held[locked].is_lost()
    });
    let lost = held[locked].tenure().check().unwrap_err();
    assert_eq!(lost.cause(), LossCause::Unreachable);
    stranger.batch("COMMIT");
    assert_all_held((0..MANY).filter(|at| *at != locked).map(|at| &held[at]));
    // An interval, the attempt beside it, and what a busy machine adds. A second of waiting for the
    // row with each renewal would leave none.
    assert!(least > TIMINGS.deadline / 2, "{least:?}");
}

fn several_locked_rows_are_renewed_once_they_are_free(engine: Engine) {
    let database = Database::create(engine);
    let leases = migrated(&database, &TIMINGS);
    let held = hold_many(&leases);
    all_renewed(&held);

    let locked = [3, 4, 5, 90];
    let mut strangers: Vec<_> = locked.iter().map(|_| database.connect()).collect();
    for (stranger, at) in strangers.iter_mut().zip(locked) {
        lock_row(stranger, engine, &name(at));
    }
    thread::sleep(TIMINGS.deadline / 2);
    for mut stranger in strangers {
        stranger.batch("COMMIT");
    }
    all_renewed(&held);
    assert_all_held(&held);
}
