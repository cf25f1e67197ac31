//! The clock in rows is the database's, whatever a session, a server or this machine thinks it is.

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel_lease::{Leases, Timings};

use super::{another, claimed, migrated};
use crate::support::database::Database;
use crate::support::raw::Raw;
use crate::support::servers::OwnServer;
use crate::support::watched::Watch;
use crate::support::{Engine, LONG, engines};

engines! {
    fn a_lease_ends_its_length_from_now,
    fn every_statement_reads_the_clock_anew;
    servers:
    fn a_session_time_zone_changes_nothing,
    fn rows_follow_a_database_clock_an_hour_ahead,
    fn server_defaults_change_nothing,
}

const LEASE_MS: i64 = 15_000;

/// When it was, by the database's clock, that the expiry of a row was written.
#[track_caller]
fn written_at(raw: &mut Raw, name: &str) -> i64 {
    raw.row(name).expect("a row").expires_at_ms - LEASE_MS
}

/// Does something, and asserts that it set the row's expiry to a lease from then.
#[track_caller]
fn assert_from_now(raw: &mut Raw, name: &str, act: impl FnOnce()) {
    let before = raw.now_ms();
    act();
    let after = raw.now_ms();
    let written = written_at(raw, name);
    // A millisecond may be lost to rounding at either end.
    assert!(
        (before - 1..=after + 1).contains(&written),
        "{before} {written} {after}"
    );
}

fn a_lease_ends_its_length_from_now(engine: Engine) {
    let (database, leases) = migrated(engine);
    let mut raw = database.connect();
    let mut lease = None;
    assert_from_now(&mut raw, "name", || {
        lease = leases.try_claim("name").unwrap()
    });
    let lease = lease.expect("a free name");
    thread::sleep(Duration::from_millis(20));
    assert_from_now(&mut raw, "name", || lease.renew().unwrap());
    raw.expire("name");
    let mut next = None;
    assert_from_now(&mut raw, "name", || {
        next = leases.try_claim("name").unwrap()
    });
    let next = next.expect("an expired name");
    assert_eq!(next.term(), 2);

    // UTC, and milliseconds: this machine's clock is not that wrong.
    let here = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_millis() as i64;
    let off = (written_at(&mut raw, "name") - here).abs();
    assert!(off < 5 * 60_000, "{off} ms");
}

/// Also on one session, with whatever it has open.
fn every_statement_reads_the_clock_anew(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::builder()
        .connections(1)
        .build(database.url())
        .unwrap();
    leases.migrate().unwrap();
    let mut raw = database.connect();
    let first = claimed(&leases, "first");
    for name in ["second", "third"] {
        let before = raw.now_ms();
        thread::sleep(Duration::from_millis(30));
        let _lease = claimed(&leases, name);
        assert!(written_at(&mut raw, name) >= before + 29);
        first.renew().unwrap();
        assert!(written_at(&mut raw, "first") >= before + 29);
        first.verify().unwrap();
    }
}

/// A database, and the server if it is this test's alone.
struct Place {
    database: Database,
    server: Option<OwnServer>,
}

impl Place {
    fn new(engine: Engine) -> Place {
        if engine.is_mysql_like() {
            let server = OwnServer::take(engine);
            let database = Database::on(&server);
            Place {
                database,
                server: Some(server),
            }
        } else {
            let database = Database::create(engine);
            Place {
                database,
                server: None,
            }
        }
    }

    /// Sets what a session of an ordinary user has from its beginning: on PostgreSQL settings of the
    /// database, elsewhere statements that the server runs first.
    fn set_default(&self, postgres: &str, mysql: &str) {
        match &self.server {
            Some(server) => server.configure(
                &format!("SET GLOBAL init_connect = \"{mysql}\""),
                "SET GLOBAL init_connect = ''",
            ),
            None => {
                let name = self.database.name();
                let mut admin = self.database.admin();
                admin.batch(&format!("ALTER DATABASE {name} SET {postgres}"));
            }
        }
    }
}

/// Diesel sets UTC when it connects, so it takes a manager that changes it afterwards.
fn a_session_time_zone_changes_nothing(engine: Engine) {
    let database = Database::create(engine);
    another(&database).migrate().unwrap();
    let mut utc = database.connect();
    let zones = match engine {
        Engine::Postgres => [
            "SET timezone = 'Asia/Tokyo'",
            "SET timezone = 'America/New_York'",
        ],
        _ => ["SET time_zone = '+09:00'", "SET time_zone = '-05:00'"],
    };
    let mut here = Vec::new();
    for (name, zone) in ["east", "west"].into_iter().zip(zones) {
        let watch = Watch::default();
        let leases = watch.build_after(Leases::builder(), &database, zone);
        let mut lease = None;
        assert_from_now(&mut utc, name, || lease = leases.try_claim(name).unwrap());
        let lease = lease.expect("a free name");
        assert_from_now(&mut utc, name, || lease.renew().unwrap());
        here.push((name, leases, lease));
    }
    for (name, _, lease) in &here {
        for (_, leases, _) in &here {
            assert!(leases.try_claim(name).unwrap().is_none(), "{name}");
            let left = leases
                .inspect(name)
                .unwrap()
                .unwrap()
                .expires_in()
                .expect("held");
            assert!(left <= Duration::from_millis(LEASE_MS as u64), "{left:?}");
            assert!(left > Duration::from_secs(1), "{left:?}");
        }
        lease.verify().unwrap();
    }
    // Expired for one is expired for all.
    for (at, (name, ..)) in here.iter().enumerate() {
        utc.expire(name);
        let (_, next, _) = &here[1 - at];
        assert_eq!(claimed(next, name).term(), 2);
    }
}

fn rows_follow_a_database_clock_an_hour_ahead(engine: Engine) {
    const HOUR_MS: i64 = 3_600_000;
    let place = Place::new(engine);
    let database = &place.database;
    another(database).migrate().unwrap();
    let mut admin = database.admin();
    if engine == Engine::Postgres {
        admin.batch(
            "CREATE SCHEMA ahead; GRANT USAGE ON SCHEMA ahead TO PUBLIC; \
             CREATE FUNCTION ahead.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE \
             AS 'SELECT pg_catalog.clock_timestamp() + interval ''1 hour'''; \
             CREATE FUNCTION ahead.now() RETURNS timestamptz LANGUAGE sql STABLE \
             AS 'SELECT pg_catalog.now() + interval ''1 hour''';",
        );
    }
    // On MySQL such a clock stands still as well: a renewal then writes what is there already.
    place.set_default(
        "search_path = ahead, pg_catalog, public",
        "SET timestamp = UNIX_TIMESTAMP() + 3600",
    );
    // The superuser's session keeps the true time.
    let mut assert_ahead = |what: &str| {
        let off = written_at(&mut admin, "name") - admin.now_ms() - HOUR_MS;
        assert!(off.abs() < LONG.as_millis() as i64, "{what}: {off} ms");
    };
    let often = Timings {
        renew: Duration::from_millis(50),
        ..Timings::default()
    };
    let build = || {
        Leases::builder()
            .timings(often.clone())
            .build(database.url())
            .unwrap()
    };
    let (first, second) = (build(), build());
    let lease = claimed(&first, "name");
    assert_ahead("claim");
    lease.renew().unwrap();
    assert_ahead("renewal");
    lease.verify().unwrap();
    let left = second
        .inspect("name")
        .unwrap()
        .unwrap()
        .expires_in()
        .expect("held");
    assert!(left <= Duration::from_millis(LEASE_MS as u64), "{left:?}");
    assert!(second.try_claim("name").unwrap().is_none());

    database.admin().expire("name");
    let taken = claimed(&second, "name");
    assert_eq!(taken.term(), 2);
    assert_ahead("take-over");
    let next = thread::scope(|scope| {
        let waiting = scope.spawn(|| first.claim_timeout("name", LONG).unwrap());
        thread::sleep(often.renew * 3);
        taken.release().unwrap();
        waiting.join().unwrap().expect("no wait of an hour")
    });
    assert_eq!(next.term(), 3);
    assert_ahead("a claim that waited");
}

fn server_defaults_change_nothing(engine: Engine) {
    let place = Place::new(engine);
    let database = &place.database;
    another(database).migrate().unwrap();
    let mut raw = database.admin();
    if engine == Engine::Postgres {
        for setting in [
            "default_transaction_isolation = 'serializable'",
            "default_transaction_deferrable = on",
            "idle_session_timeout = '200ms'",
            "idle_in_transaction_session_timeout = '200ms'",
            "synchronous_commit = off",
            "extra_float_digits = -15",
            "plan_cache_mode = force_generic_plan",
            "datestyle = 'German'",
        ] {
            place.set_default(setting, "");
        }
    } else {
        place.set_default(
            "",
            "SET autocommit = 0, sql_mode = 'ANSI,NO_BACKSLASH_ESCAPES', wait_timeout = 1; \
             SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        );
    }
    let leases = Leases::builder()
        .connections(1)
        .build(database.url())
        .unwrap();
    let other = another(database);
    let mut lease = None;
    assert_from_now(&mut raw, "name", || {
        lease = leases.try_claim("name").unwrap()
    });
    let lease = lease.expect("a free name");
    assert!(
        other.try_claim("name").unwrap().is_none(),
        "others see it at once"
    );
    for _ in 0..3 {
        thread::sleep(Duration::from_millis(500));
        assert_from_now(&mut raw, "name", || lease.renew().unwrap());
        lease.verify().unwrap();
        assert!(other.try_claim("name").unwrap().is_none());
    }
    lease.release().unwrap();
    let next = claimed(&other, "name");
    assert_eq!(next.term(), 2);
    assert!(other.force_release("name").unwrap());
    assert_eq!(raw.row("name").expect("a row").term, 3);
    leases.available().unwrap();
}
