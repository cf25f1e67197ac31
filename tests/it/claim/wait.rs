//! Claims that wait: what ends the wait, and when.
//!
//! That a waiter writes nothing is in `protocol`, where statements are counted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::{Error, Lease, Leases, StopToken, Timings};

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
    fn in_one_process_a_wait_ends_when_the_name_is_given_back,
    fn in_one_process_waiters_get_their_turn_in_order,
    fn a_name_that_is_passed_on_in_a_process_comes_to_others_too,
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

/// However it is given back. The waiters look again some 2 s later.
fn in_one_process_a_wait_ends_when_the_name_is_given_back(engine: Engine) {
    let (database, _) = migrated(engine);
    let seldom = Timings {
        renew: Duration::from_secs(8),
        ..Timings::default()
    };
    let builder = Leases::builder().timings(seldom).connections(4);
    let leases = builder.build(database.url()).unwrap();
    type GiveBack = fn(&Leases, Lease);
    let ways: [(&str, GiveBack); 4] = [
        ("release", |_, lease| lease.release().unwrap()),
        ("drop", |_, lease| drop(lease)),
        ("held", |_, lease| lease.hold().unwrap().release().unwrap()),
        ("force_release", |leases, lease| {
            assert!(leases.force_release(lease.name()).unwrap());
        }),
    ];
    thread::scope(|scope| {
        for (way, give_back) in ways {
            let leases = &leases;
            scope.spawn(move || {
                let lease = claimed(leases, way);
                let waiter = scope.spawn(move || {
                    let lease = leases.claim(way).unwrap();
                    (Instant::now(), lease)
                });
                // By then a waiter pauses for 2 s and more.
                thread::sleep(Duration::from_secs(3));
                assert!(!waiter.is_finished());
                let start = Instant::now();
                give_back(leases, lease);
                let (end, lease) = waiter.join().unwrap();
                assert!(
                    end - start < Duration::from_secs(1),
                    "{way}: {:?}",
                    end - start
                );
                assert_eq!(lease.term(), if way == "force_release" { 3 } else { 2 });
            });
        }
    });
}

fn in_one_process_waiters_get_their_turn_in_order(engine: Engine) {
    const WAITERS: u64 = 6;
    let (_database, leases) = migrated(engine);
    let lease = claimed(&leases, "name");
    let terms: Vec<u64> = thread::scope(|scope| {
        let mut waiters = Vec::new();
        for _ in 0..WAITERS {
            let leases = &leases;
            waiters.push(scope.spawn(move || {
                let lease = leases.claim("name").unwrap();
                let term = lease.term();
                lease.release().unwrap();
                term
            }));
            thread::sleep(Duration::from_millis(100));
        }
        lease.release().unwrap();
        waiters
            .into_iter()
            .map(|waiter| waiter.join().unwrap())
            .collect()
    });
    assert_eq!(terms, (2..2 + WAITERS).collect::<Vec<u64>>());
}

fn a_name_that_is_passed_on_in_a_process_comes_to_others_too(engine: Engine) {
    let (database, leases) = migrated(engine);
    let other = another(&database);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let lease = leases.claim("name").unwrap();
                    thread::sleep(Duration::from_millis(2));
                    lease.release().unwrap();
                }
            });
        }
        let turns = (0..5).all(|_| match other.claim_timeout("name", LONG) {
            Ok(Some(lease)) => lease.release().is_ok(),
            _ => false,
        });
        is_over.store(true, Ordering::Relaxed);
        assert!(turns);
    });
}
