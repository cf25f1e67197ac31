//! A claim and what becomes of it: renewed, verified, given back, lost, forced free.

mod clock;
mod names;
mod told;
mod wait;

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use diesel::result::ConnectionError;
use diesel_lease::{Error, InvalidTimings, Lease, Leases, LossCause, StopToken, Timings};

use crate::support::database::Database;
use crate::support::{Engine, LONG, TIMINGS, engines, eventually};

engines! {
    fn a_url_of_no_engine_is_refused_at_once,
    fn nothing_is_connected_before_it_is_needed,
    fn a_held_name_is_refused_and_its_row_untouched,
    fn the_term_rises_by_one_with_every_change_of_hands,
    fn a_lease_that_runs_out_passes_on_and_not_before,
    fn a_lease_renewed_in_time_is_kept,
    fn a_taken_lease_is_lost_and_its_taker_untouched,
    fn a_dropped_lease_that_was_taken_is_left_to_its_taker,
    fn an_expired_lease_is_lost_and_not_revived,
    fn a_released_lease_is_lost_though_its_row_still_names_it,
    fn releasing_what_nobody_took_is_no_error,
    fn dropping_a_lease_gives_the_name_back,
    fn one_instance_is_not_one_holder,
    fn a_claim_is_no_part_of_the_callers_transaction,
    fn a_refused_claim_leaves_the_callers_transaction_alone,
    fn a_record_says_what_the_row_says,
    fn records_are_listed_by_name,
    fn a_name_forced_free_is_lost_to_its_holder,
    fn nonsense_timings_are_refused,
    fn a_stopped_token_refuses_claims_and_nothing_else,
}

/// An empty lease table, and leases in it with default timings.
fn migrated(engine: Engine) -> (Database, Leases) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    leases.migrate().unwrap();
    (database, leases)
}

/// Other leases in the same database.
fn another(database: &Database) -> Leases {
    Leases::connect(database.url()).unwrap()
}

#[track_caller]
fn claimed(leases: &Leases, name: &str) -> Lease {
    leases.try_claim(name).unwrap().expect("a free name")
}

#[track_caller]
fn assert_lost(answer: Result<(), Error>) {
    match answer {
        Err(Error::Lost(lost)) => assert_eq!(lost.cause(), LossCause::TakenOrReleased),
        other => panic!("not lost: {other:?}"),
    }
}

fn a_url_of_no_engine_is_refused_at_once(engine: Engine) {
    let database = Database::create(engine);
    let (_, rest) = database
        .url()
        .split_once("://")
        .unwrap_or(("", "host/database"));
    for scheme in ["clickhouse", "oracle", "mariadb", "POSTGRES", "http", ""] {
        let built = Leases::connect(&format!("{scheme}://{rest}"));
        let refused = matches!(
            built,
            Err(Error::Connect(ConnectionError::InvalidConnectionUrl(_)))
        );
        assert!(refused, "{scheme}: {built:?}");
    }
}

fn nothing_is_connected_before_it_is_needed(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    let clone = leases.clone();
    assert!(leases.try_claim("").is_err());
    assert_eq!(database.session_count(), 0);
    leases.migrate().unwrap();
    claimed(&clone, "name").release().unwrap();
    assert!(database.session_count() > 0);
    drop((leases, clone));
    eventually(LONG, "sessions end with the last of the leases", || {
        database.session_count() == 0
    });
}

fn a_held_name_is_refused_and_its_row_untouched(engine: Engine) {
    let (database, leases) = migrated(engine);
    let lease = claimed(&leases, "name");
    let mut raw = database.connect();
    let before = raw.row("name");
    for other in [&leases, &another(&database)] {
        assert!(other.try_claim("name").unwrap().is_none());
        assert_eq!(raw.row("name"), before);
    }
    // Also when it is held by nobody we know.
    let taken = raw.take_over("name");
    assert!(leases.try_claim("name").unwrap().is_none());
    assert_eq!(raw.row("name"), Some(taken));
    assert_lost(lease.release());
}

fn the_term_rises_by_one_with_every_change_of_hands(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let mut holders = Vec::new();
    let mut claimed_as = |term| {
        let lease = claimed(&leases, "name");
        let row = database.connect().row("name").unwrap();
        assert_eq!((lease.term(), row.term), (term, term as i64));
        assert_eq!(row.instance, leases.instance());
        assert_eq!(row.holder.len(), 32);
        assert!(!holders.contains(&row.holder), "a holder was used again");
        assert_eq!(
            (row.slot_ms, row.unfinished_slot_ms, row.rerun_slot_ms),
            (0, 0, 0)
        );
        holders.push(row.holder);
        lease
    };
    let first = claimed_as(1);
    first.renew().unwrap();
    assert_eq!(raw.row("name").unwrap().term, 1);
    first.release().unwrap();
    assert_eq!(raw.row("name").unwrap().term, 1);

    let second = claimed_as(2);
    raw.expire("name");
    let third = claimed_as(3);
    assert!(leases.force_release("name").unwrap());
    assert_eq!(raw.row("name").unwrap().term, 4);
    let fifth = claimed_as(5);

    assert_lost(second.release());
    assert_lost(third.release());
    fifth.release().unwrap();
}

fn a_lease_that_runs_out_passes_on_and_not_before(engine: Engine) {
    let (database, leases) = migrated(engine);
    let short = Leases::builder()
        .timings(TIMINGS)
        .build(database.url())
        .unwrap();
    let mut raw = database.connect();
    let first = claimed(&short, "name");
    let ends = raw.row("name").unwrap().expires_at_ms;
    let mut next = None;
    eventually(LONG, "it runs out", || {
        next = leases.try_claim("name").unwrap();
        next.is_some()
    });
    let next = next.unwrap();
    let since = raw.row("name").unwrap().expires_at_ms - 15_000;
    assert!(since >= ends, "claimed {} ms too early", ends - since);
    assert!(first.is_lost(), "lost to its holder before it passed on");
    assert_eq!(next.term(), 2);
    next.verify().unwrap();
}

fn a_lease_renewed_in_time_is_kept(engine: Engine) {
    let (database, leases) = migrated(engine);
    let timings = Timings {
        lease: Duration::from_millis(2500),
        deadline: Duration::from_millis(2000),
        ..TIMINGS
    };
    let mine = Leases::builder()
        .timings(timings.clone())
        .build(database.url())
        .unwrap();
    let lease = claimed(&mine, "name");
    let start = Instant::now();
    while start.elapsed() < timings.lease * 2 {
        thread::sleep(timings.renew);
        lease.renew().unwrap();
        assert!(leases.try_claim("name").unwrap().is_none());
    }
    assert_eq!(lease.term(), 1);
    lease.release().unwrap();
}

type Act = fn(Lease) -> Result<(), Error>;

fn a_taken_lease_is_lost_and_its_taker_untouched(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let acts: [(&str, Act); 4] = [
        ("renew", |lease| lease.renew()),
        ("verify", |lease| lease.verify()),
        ("tenure", |lease| lease.tenure().verify()),
        ("release", Lease::release),
    ];
    for (name, act) in acts {
        let lease = claimed(&leases, name);
        let tenure = lease.tenure();
        let taken = raw.take_over(name);
        assert!(!lease.is_lost(), "nobody has asked yet");
        assert_lost(act(lease));
        assert!(tenure.is_lost());
        assert_eq!(raw.row(name), Some(taken), "{name}");
    }
    // The successor of an expired lease holds it as any other.
    let old = claimed(&leases, "expired");
    raw.expire("expired");
    let successor = claimed(&another(&database), "expired");
    let row = raw.row("expired");
    assert_lost(old.renew());
    assert_lost(old.verify());
    assert_lost(old.release());
    assert_eq!(raw.row("expired"), row);
    successor.verify().unwrap();
    assert!(leases.try_claim("expired").unwrap().is_none());
}

fn a_dropped_lease_that_was_taken_is_left_to_its_taker(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::builder()
        .connections(1)
        .build(database.url())
        .unwrap();
    leases.migrate().unwrap();
    let mut raw = database.connect();
    let lease = claimed(&leases, "name");
    let held = claimed(&leases, "held").hold().unwrap();
    let taken = [raw.take_over("name"), raw.take_over("held")];
    drop(lease);
    drop(held);
    // On one connection, so after what the drops have sent.
    assert_eq!(leases.list().unwrap().len(), 2);
    assert_eq!([raw.row("name"), raw.row("held")], taken.map(Some));
}

fn an_expired_lease_is_lost_and_not_revived(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    for act in [Lease::renew, Lease::verify] {
        let lease = claimed(&leases, "name");
        raw.expire("name");
        let expired = raw.row("name");
        assert_lost(act(&lease));
        assert_lost(lease.renew());
        assert!(lease.is_lost());
        assert_eq!(lease.remaining(), Duration::ZERO);
        assert_eq!(raw.row("name"), expired);
    }
}

fn a_released_lease_is_lost_though_its_row_still_names_it(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let lease = claimed(&leases, "name");
    let tenure = lease.tenure();
    let before = raw.row("name").unwrap();
    lease.release().unwrap();
    let after = raw.row("name").unwrap();
    assert_eq!(after.expires_at_ms, 0);
    assert_eq!((&after.holder, after.term), (&before.holder, before.term));
    assert!(tenure.is_lost());
    assert_lost(tenure.verify());
}

fn releasing_what_nobody_took_is_no_error(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let expired = claimed(&leases, "expired");
    raw.expire("expired");
    expired.release().unwrap();
    assert_eq!(raw.row("expired").unwrap().expires_at_ms, 0);
    let released = claimed(&leases, "released");
    raw.execute("UPDATE diesel_leases SET expires_at_ms = 0 WHERE name = 'released'");
    released.release().unwrap();
    let deleted = claimed(&leases, "deleted");
    raw.execute("DELETE FROM diesel_leases WHERE name = 'deleted'");
    assert_lost(deleted.release());
}

fn dropping_a_lease_gives_the_name_back(engine: Engine) {
    let (database, leases) = migrated(engine);
    let other = another(&database);
    let lease = claimed(&leases, "name");
    let tenure = lease.tenure();
    drop(lease);
    assert!(tenure.is_lost());
    let next = other.claim_timeout("name", LONG).unwrap();
    assert_eq!(next.expect("well before it runs out").term(), 2);
}

fn one_instance_is_not_one_holder(engine: Engine) {
    let database = Database::create(engine);
    let same = || {
        Leases::builder()
            .instance("same")
            .build(database.url())
            .unwrap()
    };
    let all: Vec<Leases> = (0..4).map(|_| same()).collect();
    all[0].migrate().unwrap();
    let barrier = Barrier::new(all.len());
    let wins: Vec<Option<Lease>> = thread::scope(|scope| {
        let claims: Vec<_> = all
            .iter()
            .map(|leases| {
                scope.spawn(|| {
                    barrier.wait();
                    leases.try_claim("name").unwrap()
                })
            })
            .collect();
        claims
            .into_iter()
            .map(|claim| claim.join().unwrap())
            .collect()
    });
    assert_eq!(wins.iter().flatten().count(), 1);
    for leases in &all {
        assert!(leases.try_claim("name").unwrap().is_none());
        assert_eq!(leases.inspect("name").unwrap().unwrap().instance(), "same");
    }
    let mut raw = database.connect();
    let first = raw.row("name").unwrap().holder;
    drop(wins);
    let _next = all[1]
        .claim_timeout("name", LONG)
        .unwrap()
        .expect("a free name");
    assert_ne!(raw.row("name").unwrap().holder, first);
}

/// SQLite has one writer: there the caller only reads.
fn a_claim_is_no_part_of_the_callers_transaction(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut caller = database.connect();
    caller.batch("CREATE TABLE work (id BIGINT)");
    caller.batch("BEGIN");
    caller.one_i64("SELECT count(*) FROM work");
    if engine != Engine::Sqlite {
        caller.execute("INSERT INTO work VALUES (1)");
    }
    let lease = claimed(&leases, "name");
    let row = database.connect().row("name");
    assert_eq!(
        row.as_ref().map(|row| row.term),
        Some(1),
        "others see it at once"
    );
    assert!(another(&database).try_claim("name").unwrap().is_none());
    caller.batch("ROLLBACK");
    assert_eq!(caller.row("name"), row);
    lease.verify().unwrap();
    assert_eq!(caller.one_i64("SELECT count(*) FROM work"), 0);
}

fn a_refused_claim_leaves_the_callers_transaction_alone(engine: Engine) {
    let (database, leases) = migrated(engine);
    let _held = claimed(&another(&database), "name");
    let mut caller = database.connect();
    caller.batch("CREATE TABLE work (id BIGINT)");
    caller.batch("BEGIN");
    caller.one_i64("SELECT count(*) FROM work");
    assert!(leases.try_claim("name").unwrap().is_none());
    caller.execute("INSERT INTO work VALUES (1)");
    caller.batch("COMMIT");
    assert_eq!(caller.one_i64("SELECT count(*) FROM work"), 1);
}

fn a_record_says_what_the_row_says(engine: Engine) {
    let (database, leases) = migrated(engine);
    let reader = another(&database);
    assert!(reader.inspect("name").unwrap().is_none());
    let lease = claimed(&leases, "name");
    let lease_length = leases.timings().lease;

    let record = reader.inspect("name").unwrap().unwrap();
    assert_eq!((record.name(), record.term()), ("name", 1));
    assert_eq!(record.instance(), leases.instance());
    assert_eq!((record.last_slot(), record.unfinished_slot()), (None, None));
    let left = record.expires_in().expect("held");
    assert!(
        left <= lease_length && left > lease_length - LONG.min(lease_length),
        "{left:?}"
    );
    thread::sleep(Duration::from_millis(300));
    let later = reader
        .inspect("name")
        .unwrap()
        .unwrap()
        .expires_in()
        .expect("held");
    assert!(later < left, "{later:?} after {left:?}");
    lease.renew().unwrap();
    let renewed = reader
        .inspect("name")
        .unwrap()
        .unwrap()
        .expires_in()
        .expect("held");
    assert!(
        renewed > later && renewed <= lease_length,
        "{renewed:?} after {later:?}"
    );

    lease.release().unwrap();
    let record = reader.inspect("name").unwrap().unwrap();
    assert_eq!((record.expires_in(), record.term()), (None, 1));
    let _lease = claimed(&leases, "name");
    database.connect().expire("name");
    let record = reader.inspect("name").unwrap().unwrap();
    assert_eq!((record.expires_in(), record.term()), (None, 2));
}

fn records_are_listed_by_name(engine: Engine) {
    let (_database, leases) = migrated(engine);
    assert!(leases.list().unwrap().is_empty());
    let names = ["é", "b", "a", "B", "a-1", "_", "Z"];
    let held: Vec<Lease> = names.iter().map(|name| claimed(&leases, name)).collect();
    let records = leases.list().unwrap();
    let listed: Vec<&str> = records.iter().map(|record| record.name()).collect();
    let mut sorted = names;
    sorted.sort_unstable();
    assert_eq!(listed, sorted);
    assert!(records.iter().all(|record| record.expires_in().is_some()));
    drop(held);
}

fn a_name_forced_free_is_lost_to_its_holder(engine: Engine) {
    let (database, leases) = migrated(engine);
    let operator = another(&database);
    let mut raw = database.connect();
    assert!(!operator.force_release("name").unwrap());
    assert_eq!(raw.row("name"), None);

    let lease = claimed(&leases, "name");
    assert!(operator.force_release("name").unwrap());
    let row = raw.row("name").unwrap();
    assert_eq!((row.holder.as_str(), row.instance.as_str()), ("", ""));
    assert_eq!((row.term, row.expires_at_ms), (2, 0));
    assert!(!operator.force_release("name").unwrap());
    assert_lost(lease.renew());
    assert_lost(lease.release());
    assert_eq!(raw.row("name"), Some(row));

    let held = claimed(&leases, "name").hold().unwrap();
    assert_eq!(held.tenure().term(), 3);
    assert!(operator.force_release("name").unwrap());
    eventually(LONG, "the next renewal finds out", || held.is_lost());
    let next = claimed(&operator, "name");
    assert_eq!(next.term(), 5);
    assert_lost(held.release());
    next.verify().unwrap();
}

fn nonsense_timings_are_refused(engine: Engine) {
    let database = Database::create(engine);
    let wrong: [fn(&mut Timings); 12] = [
        |t| t.renew = t.deadline,
        |t| t.renew = t.deadline * 2,
        |t| t.attempt = t.deadline + Duration::from_nanos(1),
        |t| t.deadline = t.lease,
        |t| t.grace += Duration::from_nanos(1),
        |t| t.lease = Duration::ZERO,
        |t| t.renew = Duration::ZERO,
        |t| t.attempt = Duration::ZERO,
        |t| t.grace = Duration::ZERO,
        |t| t.lease = Duration::from_micros(1),
        |t| t.lease = Duration::MAX,
        |t| (t.lease, t.deadline, t.grace) = (Duration::MAX, Duration::MAX, Duration::MAX),
    ];
    for (at, change) in wrong.iter().enumerate() {
        let mut timings = Timings::default();
        change(&mut timings);
        let built = Leases::builder().timings(timings).build(database.url());
        let Err(Error::InvalidTimings(rule)) = built else {
            panic!("number {at}: {built:?}");
        };
        let rule: InvalidTimings = rule;
        assert!(!rule.to_string().is_empty());
    }
    // The shortest and the longest that make sense.
    let tiny = Timings {
        lease: Duration::from_micros(3),
        renew: Duration::from_nanos(1),
        attempt: Duration::from_secs(1).min(Duration::from_micros(1)),
        deadline: Duration::from_micros(2),
        grace: Duration::from_micros(1),
    };
    Leases::builder()
        .timings(tiny)
        .build(database.url())
        .unwrap();
    let day = Duration::from_secs(86_400) - Duration::from_nanos(1);
    let long = Timings {
        lease: day,
        ..Timings::default()
    };
    let leases = Leases::builder()
        .timings(long)
        .build(database.url())
        .unwrap();
    leases.migrate().unwrap();
    let mut raw = database.connect();
    let now = raw.now_ms();
    let _lease = claimed(&leases, "name");
    let left = raw.row("name").unwrap().expires_at_ms - now;
    assert!((86_400_000..86_500_000).contains(&left), "{left}");
}

fn a_stopped_token_refuses_claims_and_nothing_else(engine: Engine) {
    let (_database, leases) = migrated(engine);
    let (first, second) = (StopToken::new(), StopToken::new());
    let under = leases.with_stop(&first).with_stop(&second);
    let lease = claimed(&under, "name");
    second.stop();
    assert!(second.is_stopped() && !first.is_stopped());
    for refused in [
        under.try_claim("other"),
        under.claim("other").map(Some),
        under.claim_timeout("other", Duration::ZERO),
    ] {
        assert!(matches!(refused, Err(Error::Stopped)), "{refused:?}");
    }
    assert!(
        leases.inspect("other").unwrap().is_none(),
        "nothing was sent"
    );
    // What is held is kept, and can be looked at.
    lease.renew().unwrap();
    assert_eq!(under.list().unwrap().len(), 1);
    lease.release().unwrap();
    claimed(&leases, "name").release().unwrap();
}
