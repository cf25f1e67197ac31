//! A name that another process gives back: who waits for it hears of that where the engine says so, and
//! finds it by looking where it does not.
//!
//! Leases that were made by themselves share nothing, like those of another process.

use std::thread;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use diesel_lease::{Lease, Leases, Timings};

use super::claimed;
use crate::support::database::Database;
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    fn who_waits_hears_of_what_is_given_back_elsewhere,
    fn a_candidate_hears_of_what_is_given_back_elsewhere,
    fn at_most_one_session_listens,
    fn a_session_that_listened_is_replaced,
    fn where_nothing_may_be_told_names_are_given_back_all_the_same,
}

fn tells(engine: Engine) -> bool {
    engine == Engine::Postgres
}

/// Who waits pauses for 3 s and more after a few seconds.
fn seldom(database: &Database) -> Leases {
    let timings = Timings {
        renew: Duration::from_secs(8),
        ..Timings::default()
    };
    let builder = Leases::builder().timings(timings).connections(8);
    builder.build(database.url()).unwrap()
}

fn migrated(engine: Engine) -> (Database, Leases, Leases) {
    let database = Database::create(engine);
    let (one, other) = (seldom(&database), seldom(&database));
    one.migrate().unwrap();
    (database, one, other)
}

/// Those that listen there.
fn listening(database: &Database) -> Vec<i64> {
    database.admin().all_i64(
        "SELECT CAST(pid AS BIGINT) FROM pg_stat_activity \
         WHERE datname = current_database() AND query LIKE 'LISTEN%'",
    )
}

type GiveBack = fn(&Leases, Lease);

/// How long one who waits elsewhere is without the name after it was given back.
fn hand_over(one: &Leases, other: &Leases, lease: Lease, give_back: GiveBack) -> (Duration, Lease) {
    let name = lease.name().to_owned();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let lease = other.claim(&name).unwrap();
            (Instant::now(), lease)
        });
        thread::sleep(Duration::from_secs(3));
        assert!(!waiter.is_finished());
        let start = Instant::now();
        give_back(one, lease);
        let (end, lease) = waiter.join().unwrap();
        (end - start, lease)
    })
}

fn who_waits_hears_of_what_is_given_back_elsewhere(engine: Engine) {
    let (_database, one, other) = migrated(engine);
    let slot: DateTime<Utc> = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
    let ways: [(&str, GiveBack); 5] = [
        ("release", |_, lease| lease.release().unwrap()),
        ("drop", |_, lease| drop(lease)),
        ("held", |_, lease| lease.hold().unwrap().release().unwrap()),
        ("finish", |_, lease| lease.finish(None).unwrap()),
        ("force_release", |leases, lease| {
            assert!(leases.force_release(lease.name()).unwrap());
        }),
    ];
    thread::scope(|scope| {
        for (way, give_back) in ways {
            let (one, other) = (&one, &other);
            scope.spawn(move || {
                let lease = match way {
                    "finish" => one.try_claim_slot(way, slot).unwrap().expect("a slot"),
                    _ => claimed(one, way),
                };
                let (time, _next) = hand_over(one, other, lease, give_back);
                let limit = if tells(engine) { 1 } else { 6 };
                assert!(time < Duration::from_secs(limit), "{way}: {time:?}");
            });
        }
    });
}

fn a_candidate_hears_of_what_is_given_back_elsewhere(engine: Engine) {
    let (_database, one, other) = migrated(engine);
    let poll = Duration::from_secs(if tells(engine) { 30 } else { 1 });
    let campaign = |leases: &Leases| {
        let campaign = leases.campaign("name").poll(poll);
        campaign
            .start(|tenure| Ok(tenure.sleep(Duration::MAX)?))
            .unwrap()
    };
    let first = campaign(&one);
    eventually(LONG, "the first leads", || first.is_leading());
    let next = campaign(&other);
    if tells(engine) {
        eventually(LONG, "it listens", || !listening(&_database).is_empty());
    }
    thread::sleep(Duration::from_millis(200));
    first.stop(LONG).unwrap();
    eventually(Duration::from_secs(10), "the next leads", || {
        next.is_leading()
    });
    next.stop(LONG).unwrap();
}

fn at_most_one_session_listens(engine: Engine) {
    let (database, one, other) = migrated(engine);
    let names = ["a", "b", "c"];
    let held: Vec<Lease> = names.iter().map(|name| claimed(&one, name)).collect();
    let most = if engine == Engine::Sqlite {
        usize::MAX
    } else {
        2 + 8 + 1
    };
    thread::scope(|scope| {
        for name in names.iter().chain(&names) {
            let other = &other;
            scope.spawn(move || other.claim(name).unwrap().release().unwrap());
        }
        for _ in 0..30 {
            thread::sleep(Duration::from_millis(50));
            assert!(database.session_count() <= most);
            if tells(engine) {
                assert!(listening(&database).len() <= 1);
            }
        }
        if tells(engine) {
            assert_eq!(listening(&database).len(), 1);
        }
        drop(held);
    });
    if tells(engine) {
        // Nobody waits any more.
        eventually(LONG, "it is closed", || listening(&database).is_empty());
    }
}

fn a_session_that_listened_is_replaced(engine: Engine) {
    let (database, one, other) = migrated(engine);
    let lease = claimed(&one, "name");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| other.claim("name").unwrap());
        if tells(engine) {
            eventually(LONG, "it listens", || !listening(&database).is_empty());
            let old = listening(&database);
            database.kill(old[0]);
            eventually(LONG, "another listens", || {
                listening(&database)
                    .iter()
                    .any(|session| !old.contains(session))
            });
            // It looks once when it listens; and then not for 3 s.
            thread::sleep(Duration::from_millis(200));
        }
        let start = Instant::now();
        lease.release().unwrap();
        let _next = waiter.join().unwrap();
        let limit = Duration::from_secs(if tells(engine) { 1 } else { 6 });
        assert!(start.elapsed() < limit);
    });
}

/// On PostgreSQL, where the role may not tell; elsewhere nothing is told anyway.
fn where_nothing_may_be_told_names_are_given_back_all_the_same(engine: Engine) {
    let (database, one, other) = migrated(engine);
    if tells(engine) {
        let revoke = "REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC";
        database.admin().batch(revoke);
    }
    let lease = claimed(&one, "name");
    let (time, lease) = hand_over(&one, &other, lease, |_, lease| lease.release().unwrap());
    assert!(time < Duration::from_secs(6), "{time:?}");
    assert_eq!(lease.term(), 2);
    assert!(one.force_release("name").unwrap());
    assert!(lease.release().is_err());
    let slot: DateTime<Utc> = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
    let lease = one.try_claim_slot("name", slot).unwrap().expect("a slot");
    lease.finish(None).unwrap();
    assert!(!one.force_release("name").unwrap());
}
