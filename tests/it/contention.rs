//! Many claims of one name at once: one wins, and nobody is told anything but that it is held.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use diesel_lease::{Error, Lease, Leases, Timings};
use log::Level;

use crate::support::database::{Database, Isolation};
use crate::support::log::Captured;
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn of_many_claimants_one_wins,
    fn first_claims_disturb_no_neighbour;
    servers:
    fn of_many_claimants_one_wins_where_serializable_is_the_default,
    fn of_many_claimants_one_wins_where_repeatable_read_is_the_default,
}

const CLAIMANTS: usize = 16;
const NAMES: usize = 100;

fn of_many_claimants_one_wins(engine: Engine) {
    race_twice(&Database::create(engine));
}

fn of_many_claimants_one_wins_where_serializable_is_the_default(engine: Engine) {
    race_twice_where(engine, Isolation::Serializable);
}

fn of_many_claimants_one_wins_where_repeatable_read_is_the_default(engine: Engine) {
    race_twice_where(engine, Isolation::RepeatableRead);
}

fn race_twice_where(engine: Engine, isolation: Isolation) {
    let database = Database::with_default_isolation(engine, isolation);
    let _on = (engine == Engine::Mariadb).then(|| SnapshotIsolation::turn_on(&database));
    race_twice(&database);
}

/// What comes with MariaDB from 11.6 on. The server is the test's alone.
struct SnapshotIsolation<'a>(&'a Database);

impl<'a> SnapshotIsolation<'a> {
    fn turn_on(database: &'a Database) -> SnapshotIsolation<'a> {
        let mut admin = database.admin();
        admin.batch("SET GLOBAL innodb_snapshot_isolation = ON");
        SnapshotIsolation(database)
    }
}

impl Drop for SnapshotIsolation<'_> {
    fn drop(&mut self) {
        let mut admin = self.0.admin();
        admin.batch("SET GLOBAL innodb_snapshot_isolation = OFF");
    }
}

/// For names that are new, and again when all of them have expired.
fn race_twice(database: &Database) {
    let names: Vec<String> = (0..NAMES).map(|at| format!("name-{at}")).collect();
    let claimants = claimants(database);
    let new = race(&claimants, &names);
    assert_one_winner_each(database, &names, new, 1, |_new| {
        let mut raw = database.connect();
        let expired = raw.execute("UPDATE diesel_leases SET expires_at_ms = 1");
        assert_eq!(expired, NAMES);
        let expired = race(&claimants, &names);
        assert_one_winner_each(database, &names, expired, 2, |_expired| ());
    });
}

/// Each with a session of its own.
fn claimants(database: &Database) -> Vec<Leases> {
    let builder = Leases::builder().connections(1);
    let build = |_| builder.clone().build(database.url()).unwrap();
    let claimants: Vec<Leases> = (0..CLAIMANTS).map(build).collect();
    claimants[0].migrate().unwrap();
    // Sessions are made before it begins.
    for leases in &claimants {
        assert!(leases.list().unwrap().is_empty());
    }
    claimants
}

type Answer = Result<Option<Lease>, Error>;

/// All claim each name at once. What every claimant was answered, name by name.
fn race(claimants: &[Leases], names: &[String]) -> Vec<Vec<Answer>> {
    let barrier = Barrier::new(claimants.len());
    thread::scope(|scope| {
        let run = |leases: &Leases| -> Vec<Answer> {
            let claim = |name: &String| {
                barrier.wait();
                leases.try_claim(name)
            };
            names.iter().map(claim).collect()
        };
        let runs: Vec<_> = claimants
            .iter()
            .map(|leases| scope.spawn(move || run(leases)))
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    })
}

/// The leases that were won live as long as `then` takes.
fn assert_one_winner_each(
    database: &Database,
    names: &[String],
    answers: Vec<Vec<Answer>>,
    term: u64,
    then: impl FnOnce(&[Lease]),
) {
    let mut won: Vec<Lease> = answers
        .into_iter()
        .flatten()
        .filter_map(|answer| answer.expect("held, if not won"))
        .collect();
    won.sort_by_key(|lease| names.iter().position(|name| name == lease.name()));
    let winners: Vec<&str> = won.iter().map(Lease::name).collect();
    assert_eq!(winners, names, "one winner each");
    let mut raw = database.connect();
    for lease in &won {
        assert_eq!(lease.term(), term, "{}", lease.name());
        assert_eq!(raw.row(lease.name()).expect("a row").term, term as i64);
        lease.verify().unwrap();
    }
    then(&won);
}

/// Neighbours in the index, before and after each new name.
fn first_claims_disturb_no_neighbour(engine: Engine) {
    let database = Database::create(engine);
    let claimants = claimants(&database);
    let often = Timings {
        renew: Duration::from_millis(20),
        ..Timings::default()
    };
    let holder = Leases::builder()
        .timings(often)
        .build(database.url())
        .unwrap();
    let stem = unique("neighbour");
    let names: Vec<String> = (0..40).map(|at| format!("{stem}-{at:02}-5")).collect();
    let neighbours: Vec<String> = [0, 13, 20, 39].map(|at| format!("{stem}-{at:02}")).to_vec();
    let logs: Vec<Captured> = neighbours.iter().map(|name| Captured::new(name)).collect();
    let held: Vec<_> = neighbours
        .iter()
        .map(|name| holder.claim(name).unwrap().hold().unwrap())
        .collect();
    let answers = race(&claimants, &names);
    assert_one_winner_each(&database, &names, answers, 1, |_won| ());
    for (held, log) in held.into_iter().zip(&logs) {
        eventually(LONG, "it is renewed", || log.has(Level::Trace, "renewed"));
        assert!(!held.is_lost());
        assert!(!log.has(Level::Warn, ""), "{:?}", log.entries());
        held.release().unwrap();
    }
}
