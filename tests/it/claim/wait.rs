//! Claims that wait: what ends the wait, and when.
//!
//! That a waiter writes nothing is in `protocol`, where statements are counted.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::{Error, Leases, StopToken, Timings};

use super::{another, claimed, migrated};
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    fn a_timeout_ends_a_wait_with_nothing,
    fn a_timeout_of_zero_is_one_try,
    fn a_wait_ends_when_the_lease_can_end,
    fn a_wait_ends_soon_after_a_release,
    fn a_wait_ends_with_a_stop,
    fn a_database_error_ends_a_wait,
    fn of_many_waiters_each_gets_its_turn,
}

fn a_timeout_ends_a_wait_with_nothing(engine: Engine) {
    let (database, leases) = migrated(engine);
    let _held = claimed(&leases, "name");
    let waiter = another(&database);
    let timeout = Duration::from_millis(300);
    let start = Instant::now();
    assert!(waiter.claim_timeout("name", timeout).unwrap().is_none());
    let waited = start.elapsed();
    assert!(waited >= timeout, "{waited:?}");
    assert!(waited < timeout + waiter.timings().attempt, "{waited:?}");
}

fn a_timeout_of_zero_is_one_try(engine: Engine) {
    let (database, leases) = migrated(engine);
    let waiter = another(&database);
    let lease = waiter.claim_timeout("name", Duration::ZERO).unwrap();
    assert!(
        leases
            .claim_timeout("name", Duration::ZERO)
            .unwrap()
            .is_none()
    );
    lease.expect("a free name").release().unwrap();
    // Free at once, so not even the longest timeout matters.
    let lease = leases.claim_timeout("name", Duration::MAX).unwrap();
    assert_eq!(lease.expect("a free name").term(), 2);
}

/// The waiter looks every 4 s, but the lease ends in 5 s and not in 8 s.
fn a_wait_ends_when_the_lease_can_end(engine: Engine) {
    let (database, _) = migrated(engine);
    let timings = |lease, renew| Timings {
        lease: Duration::from_secs(lease),
        renew: Duration::from_secs(renew),
        grace: Duration::from_millis(1),
        deadline: Duration::from_secs(lease) - Duration::from_millis(1),
        attempt: Duration::from_secs(lease) - Duration::from_millis(1),
    };
    let build = |timings| {
        Leases::builder()
            .timings(timings)
            .build(database.url())
            .unwrap()
    };
    let (holder, waiter) = (build(timings(5, 1)), build(timings(15, 8)));
    let mut raw = database.connect();
    let first = claimed(&holder, "name");
    let ends = raw.row("name").unwrap().expires_at_ms;
    let next = waiter
        .claim_timeout("name", LONG)
        .unwrap()
        .expect("it ends");
    let since = raw.row("name").unwrap().expires_at_ms - 15_000;
    assert!(since >= ends, "{} ms too early", ends - since);
    assert!(since < ends + 2_500, "{} ms late", since - ends);
    assert_eq!(next.term(), 2);
    assert!(first.is_lost());
}

fn a_wait_ends_soon_after_a_release(engine: Engine) {
    let (database, leases) = migrated(engine);
    let lease = claimed(&leases, "name");
    let mut raw = database.connect();
    let would_end = raw.row("name").unwrap().expires_at_ms;
    let waiter = another(&database);
    let (done, waits) = mpsc::channel();
    let waiting = thread::spawn(move || {
        let lease = waiter
            .claim_timeout("name", LONG)
            .unwrap()
            .expect("a free name");
        done.send(()).unwrap();
        lease
    });
    assert!(waits.recv_timeout(Duration::from_millis(200)).is_err());
    lease.release().unwrap();
    let lease = waiting.join().unwrap();
    assert_eq!(lease.term(), 2);
    assert!(
        raw.now_ms() < would_end,
        "it waited for the lease to run out"
    );
}

fn a_wait_ends_with_a_stop(engine: Engine) {
    let (database, leases) = migrated(engine);
    let held = claimed(&leases, "name");
    let row = database.connect().row("name");
    let token = StopToken::new();
    let waiter = another(&database).with_stop(&token);
    let waiting = thread::spawn(move || waiter.claim("name"));
    eventually(LONG, "it waits", || {
        leases.inspect("name").unwrap().is_some()
    });
    thread::sleep(Duration::from_millis(100));
    assert!(!waiting.is_finished());
    token.stop();
    let stopped = Instant::now();
    let answer = waiting.join().unwrap();
    assert!(matches!(answer, Err(Error::Stopped)), "{answer:?}");
    // The next look would have come after a second, the name after fifteen.
    assert!(stopped.elapsed() < Duration::from_secs(10));
    assert_eq!(database.connect().row("name"), row);
    held.verify().unwrap();
}

fn a_database_error_ends_a_wait(engine: Engine) {
    let (database, leases) = migrated(engine);
    let _held = claimed(&leases, "name");
    let waiter = another(&database);
    let waiting = thread::spawn(move || waiter.claim_timeout("name", LONG));
    thread::sleep(Duration::from_millis(100));
    database.connect().batch("DROP TABLE diesel_leases");
    let answer = waiting.join().unwrap();
    assert!(matches!(answer, Err(Error::SchemaMissing)), "{answer:?}");
}

fn of_many_waiters_each_gets_its_turn(engine: Engine) {
    let (database, _) = migrated(engine);
    let often = Timings {
        renew: Duration::from_millis(20),
        ..Timings::default()
    };
    let build = || {
        Leases::builder()
            .timings(often.clone())
            .build(database.url())
            .unwrap()
    };
    let waiters: Vec<Leases> = (0..4).map(|_| build()).collect();
    let mut terms: Vec<u64> = thread::scope(|scope| {
        let turn = |leases: &Leases| {
            let lease = leases.claim_timeout("name", LONG).unwrap().expect("a turn");
            let term = lease.term();
            thread::sleep(Duration::from_millis(20));
            lease.release().unwrap();
            term
        };
        let turns: Vec<_> = waiters
            .iter()
            .map(|leases| scope.spawn(move || [turn(leases), turn(leases), turn(leases)]))
            .collect();
        turns
            .into_iter()
            .flat_map(|turns| turns.join().unwrap())
            .collect()
    });
    terms.sort_unstable();
    assert_eq!(terms, (1..=12).collect::<Vec<u64>>());
}
