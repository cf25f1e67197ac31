//! The fault matrix: each act of a holder under each fault, on each engine.
//!
//! A fault is one function; all acts meet it at once, in one process ([`holder`]) and a database each.
//! Whatever comes of an act for the one who asked, this must hold afterwards:
//!
//! - It ended, in time.
//! - Work that was told as committed is there, and is absent unless it was told as committed or unknown.
//! - Nobody else gets a lease or a lock that the process takes for held.
//! - Under a lease that is lost nothing can be written.
//! - Everything is to be had again, the leases under a higher term, and no session is left.
//!
//! Beyond that a fault names the outcomes it must have. `scripts/faults` collects what was seen in
//! `docs/faults.md`.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::locks::NamedLocks;
use diesel_lease::{Leases, Timings};
use parking_lot::Mutex;
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use self::holder::{Act, HARM, Outcome, ROWS};
use crate::support::database::Database;
use crate::support::process::Child;
use crate::support::proxy::Proxy;
use crate::support::raw::Raw;
use crate::support::servers::{OwnServer, Server};
use crate::support::{Engine, LONG, engines, eventually, run};

pub(crate) mod holder;

engines! {
    fn no_fault,
    fn table_renamed_and_back,
    fn row_deleted,
    fn row_given_to_another,
    fn clock_stepped_forward,
    fn clock_stepped_back,
    fn row_locked_by_a_stranger,
    fn process_killed,
    fn process_stopped_for_less_than_the_deadline,
    fn process_stopped_for_more_than_the_lease,
    fn no_thread_can_be_started,
    fn work_panics;
    servers:
    fn sessions_killed,
    fn server_killed_and_restarted,
    fn server_stopped_for_less_than_the_deadline,
    fn server_stopped_for_more_than_the_lease,
    fn network_frozen,
    fn connections_reset_and_refused,
    fn replies_cut,
    fn latency,
    fn database_read_only_and_back,
}

/// A renewal that fails for a while has time for more on a busy machine.
const TIMINGS: Timings = Timings {
    lease: Duration::from_secs(6),
    renew: Duration::from_millis(300),
    attempt: Duration::from_millis(1_500),
    deadline: Duration::from_millis(4_500),
    grace: Duration::from_secs(1),
};

/// Well below the deadline with an attempt begun, and more than the lease.
const BRIEF: Duration = Duration::from_millis(700);
const LASTING: Duration = Duration::from_secs(7);

/// After that an order to a database waits for something.
const SETTLE: Duration = Duration::from_secs(1);

/// The lease's name and the lock's key in each database.
const NAME: &str = "job";
const KEY: &str = "key";

/// What comes of an act, whatever the engine.
type Expected = [(Act, &'static [Outcome])];

/// Where an act takes place.
struct Place {
    act: Act,
    database: Database,
    term: i64,
}

struct Stage {
    engine: Engine,
    fault: String,
    places: Vec<Place>,
    network: Option<Proxy>,
    server: Option<OwnServer>,
    child: Mutex<Child>,
}

/// What a stage is made with.
#[derive(Default)]
struct Setting {
    /// On a server that the fault may do anything to.
    own_server: bool,
    panics: bool,
    /// How long the fault lasts.
    time: Duration,
}

impl Stage {
    fn new(engine: Engine, fault: &str, setting: &Setting) -> Stage {
        let server = setting.own_server.then(|| OwnServer::take(engine));
        let places: Vec<Place> = Act::ALL
            .map(|act| {
                let database = match &server {
                    Some(server) => Database::on(server),
                    None => Database::create(engine),
                };
                set_up(&database);
                let term = 1 + i64::from(act != Act::Claim);
                Place {
                    act,
                    database,
                    term,
                }
            })
            .into();
        let network = (engine != Engine::Sqlite).then(|| Proxy::to(places[0].database.url()));
        let urls: Vec<String> = places
            .iter()
            .map(|place| match &network {
                Some(network) => network.url(place.database.url()),
                None => place.database.url().to_owned(),
            })
            .collect();
        let watch = setting.time + TIMINGS.renew + TIMINGS.attempt;
        let mut child = Child::spawn(
            "faults::holder::hold",
            &[
                ("engine", &engine.to_string()),
                ("urls", &urls.join("\n")),
                ("watch", &watch.as_millis().to_string()),
                ("panics", &setting.panics.to_string()),
            ],
        );
        assert_eq!(child.hear(), "ready");
        Stage {
            engine,
            fault: fault.to_owned(),
            places,
            network,
            server,
            child: Mutex::new(child),
        }
    }

    fn network(&self) -> &Proxy {
        self.network.as_ref().expect("a network")
    }

    fn server(&self) -> &OwnServer {
        self.server.as_ref().expect("a server")
    }

    /// Lets all acts go on from their brink.
    fn go(&self) {
        self.child.lock().tell("go");
    }

    /// Does something to each database, lets all acts go, and undoes it after a time.
    ///
    /// What has to wait for the act there is done when that lets it through.
    fn go_into(
        &self,
        change: impl Fn(&mut Raw) + Sync,
        time: Duration,
        undo: impl Fn(&mut Raw) + Sync,
    ) {
        let (changed, gone) = (AtomicUsize::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            for place in &self.places {
                let (changed, gone, change, undo) = (&changed, &gone, &change, &undo);
                scope.spawn(move || {
                    let mut raw = patient(&place.database);
                    change(&mut raw);
                    changed.fetch_add(1, Ordering::Relaxed);
                    eventually(LONG, "the acts go", || gone.load(Ordering::Relaxed));
                    thread::sleep(time);
                    undo(&mut raw);
                });
            }
            let start = Instant::now();
            while changed.load(Ordering::Relaxed) < Act::ALL.len() && start.elapsed() < SETTLE {
                thread::sleep(Duration::from_millis(5));
            }
            self.go();
            gone.store(true, Ordering::Relaxed);
        });
    }

    /// What came of each act.
    fn outcomes(&self) -> BTreeMap<Act, Outcome> {
        let mut child = self.child.lock();
        let start = Instant::now();
        let mut outcomes = BTreeMap::new();
        while outcomes.len() < Act::ALL.len() {
            let left = LONG.saturating_sub(start.elapsed());
            let said = child.hear_within(left).unwrap_or_else(|| {
                panic!("only {outcomes:?} ended:\n{}", child.output());
            });
            let (act, outcome) = said.split_once('=').expect("an act and its outcome");
            outcomes.insert(named(&Act::ALL, act), named(&Outcome::ALL, outcome));
        }
        outcomes
    }

    fn ask(&self, question: &str) -> String {
        let mut child = self.child.lock();
        child.tell(question);
        child.hear()
    }

    /// The acts whose lease or lock the process takes for held.
    fn healthy(&self) -> Vec<Act> {
        let acts = self.ask("healthy");
        acts.split_whitespace()
            .map(|act| named(&Act::ALL, act))
            .collect()
    }

    fn check(self, expected: &Expected) {
        let outcomes = self.outcomes();
        eprintln!("{}: {}: {outcomes:?}", self.engine, self.fault);
        for (act, allowed) in expected {
            let outcome = outcomes[act];
            assert!(allowed.contains(&outcome), "{act}: {outcome}");
        }
        for place in &self.places {
            if place.act.is_in_a_transaction() {
                let rows = rows(&place.database, &ROWS);
                let allowed: &[i64] = match outcomes[&place.act] {
                    Outcome::Done => &[2],
                    Outcome::Unknown => &[0, 2],
                    _ => &[0],
                };
                assert!(allowed.contains(&rows), "{}: {rows} rows", place.act);
            }
        }
        self.assert_nobody_gets_what_is_held();
        assert_eq!(self.ask("harm"), "none");
        for place in &self.places {
            assert_eq!(rows(&place.database, &[HARM]), 0, "{}", place.act);
        }
        assert_eq!(self.ask("end"), "ended");
        self.child.lock().wait();
        self.record(&outcomes);
        self.assert_all_is_to_be_had();
    }

    fn assert_nobody_gets_what_is_held(&self) {
        let healthy = self.healthy();
        for place in &self.places {
            if !healthy.contains(&place.act) {
                continue;
            }
            let database = &place.database;
            // An error is no lease.
            let got = if place.act.is_of_a_lock() {
                matches!(locks(database).try_acquire(KEY), Ok(Some(_)))
            } else {
                matches!(rival(database).try_claim(NAME), Ok(Some(_)))
            };
            // It may have been lost this very moment, and is known to be then.
            let two_have_it = got && self.healthy().contains(&place.act);
            assert!(!two_have_it, "two have it: {}", place.act);
        }
    }

    /// With the process gone.
    fn assert_all_is_to_be_had(&self) {
        for place in &self.places {
            let act = place.act;
            if act.is_of_a_lock() {
                let locks = locks(&place.database);
                eventually(LONG, &format!("the lock: {act}"), || {
                    matches!(locks.try_acquire(KEY), Ok(Some(_)))
                });
            } else {
                let rival = rival(&place.database);
                let mut term = 0;
                eventually(LONG, &format!("the lease: {act}"), || {
                    let lease = rival.try_claim(NAME).ok().flatten();
                    term = lease.map_or(0, |lease| lease.term());
                    term > 0
                });
                let before = if self.fault == "row deleted" {
                    0
                } else {
                    place.term
                };
                assert!(i64::try_from(term).unwrap() > before, "{act}: {term}");
            }
        }
        if self.engine != Engine::Sqlite {
            for place in &self.places {
                eventually(LONG, &format!("no session is left: {}", place.act), || {
                    place.database.session_count() == 0
                });
            }
        }
    }

    /// Sets a limit for the process, or takes it away.
    fn limit(&self, what: Resource, current: Option<u64>) {
        let id = self.child.lock().id();
        let pid = i32::try_from(id).ok().and_then(Pid::from_raw);
        let limit = Rlimit {
            current,
            maximum: None,
        };
        prlimit(pid, what, limit).expect("a limit");
    }

    /// Where the environment asks for it, for `scripts/faults`.
    fn record(&self, outcomes: &BTreeMap<Act, Outcome>) {
        let Ok(folder) = env::var("DIESEL_LEASE_FAULTS") else {
            return;
        };
        let lines = outcomes
            .iter()
            .map(|(act, outcome)| format!("{}\t{act}\t{}\t{outcome}\n", self.fault, self.engine));
        let file = format!("{}-{}.tsv", self.fault, self.engine);
        fs::write(Path::new(&folder).join(file), lines.collect::<String>()).expect("a file");
    }
}

fn named<T: Copy + ToString>(all: &[T], name: &str) -> T {
    let found = all.iter().find(|one| one.to_string() == name);
    *found.unwrap_or_else(|| panic!("{name} is none of them"))
}

fn set_up(database: &Database) {
    let leases = rival(database);
    leases.migrate().unwrap();
    // so that there is a row for each act to come
    leases.claim(NAME).unwrap().release().unwrap();
    let engine = match database.engine().is_mysql_like() {
        true => "ENGINE=InnoDB",
        false => "",
    };
    let table = format!("CREATE TABLE work (id BIGINT PRIMARY KEY) {engine}");
    database.connect().batch(&table);
}

fn rival(database: &Database) -> Leases {
    let leases = Leases::builder().timings(TIMINGS).instance("rival");
    leases.build(database.url()).unwrap()
}

fn locks(database: &Database) -> NamedLocks {
    NamedLocks::connect(database.url()).unwrap()
}

fn rows(database: &Database, ids: &[i64]) -> i64 {
    let ids: Vec<String> = ids.iter().map(i64::to_string).collect();
    let ids = ids.join(", ");
    database
        .connect()
        .one_i64(&format!("SELECT COUNT(*) FROM work WHERE id IN ({ids})"))
}

/// A session that waits for a busy file.
fn patient(database: &Database) -> Raw {
    let mut raw = database.connect();
    if database.engine() == Engine::Sqlite {
        raw.batch("PRAGMA busy_timeout = 10000");
    }
    raw
}

const DONE: &[Outcome] = &[Outcome::Done];
const LOST: &[Outcome] = &[Outcome::Lost];

/// Whatever is not interrupted is done.
const ALL_DONE: &Expected = &[
    (Act::Claim, DONE),
    (Act::Renewal, DONE),
    (Act::Verify, DONE),
    (Act::Work, DONE),
    (Act::Fence, DONE),
    (Act::Commit, DONE),
    (Act::Release, DONE),
    (Act::Finish, DONE),
    (Act::Acquire, DONE),
    (Act::KeepAlive, DONE),
];

/// The lease is lost to everyone but to a transaction that is past its fence, or has the file to itself.
fn row_gone(engine: Engine) -> Vec<(Act, &'static [Outcome])> {
    let kept_out: &[Act] = match engine {
        Engine::Sqlite => &[Act::Work, Act::Fence, Act::Commit],
        _ => &[Act::Commit],
    };
    let outcome = |act: Act| {
        let is_done = act.is_of_a_lock() || kept_out.contains(&act);
        (act, if is_done { DONE } else { LOST })
    };
    // A claim finds the row gone or taken.
    let held = Act::ALL.into_iter().filter(|act| *act != Act::Claim);
    held.map(outcome).collect()
}

/// The connections of the application's pool are all in use while this goes on, which is nothing to the
/// library.
fn no_fault(engine: Engine) {
    let stage = Stage::new(
        engine,
        "none, the application's pool exhausted",
        &Setting::default(),
    );
    stage.go();
    stage.check(ALL_DONE);
}

fn sessions_killed(engine: Engine) {
    let stage = Stage::new(engine, "all sessions killed", &Setting::default());
    for place in &stage.places {
        place.database.kill_sessions();
    }
    stage.go();
    stage.check(&[
        (Act::Renewal, DONE),
        (Act::Verify, DONE),
        (Act::Work, &[Outcome::Failed]),
        (Act::KeepAlive, LOST),
    ]);
}

fn server_killed_and_restarted(engine: Engine) {
    let setting = Setting {
        own_server: true,
        time: LASTING,
        ..Setting::default()
    };
    let stage = Stage::new(engine, "server killed and restarted", &setting);
    stage.server().kill();
    stage.go();
    thread::sleep(BRIEF);
    stage.server().restart();
    stage.check(&[
        (Act::Work, &[Outcome::Failed, Outcome::Lost]),
        (Act::KeepAlive, LOST),
    ]);
}

fn server_stopped(engine: Engine, fault: &str, time: Duration, expected: &Expected) {
    let setting = Setting {
        own_server: true,
        time,
        ..Setting::default()
    };
    let stage = Stage::new(engine, fault, &setting);
    let paused = stage.server().pause();
    stage.go();
    thread::sleep(time);
    paused.resume();
    stage.check(expected);
}

fn server_stopped_for_less_than_the_deadline(engine: Engine) {
    let fault = "server stopped for less than the deadline";
    server_stopped(
        engine,
        fault,
        BRIEF,
        &[(Act::Renewal, DONE), (Act::Commit, DONE)],
    );
}

fn server_stopped_for_more_than_the_lease(engine: Engine) {
    let fault = "server stopped for more than the lease";
    server_stopped(
        engine,
        fault,
        LASTING,
        &[(Act::Renewal, LOST), (Act::KeepAlive, LOST)],
    );
}

fn network_frozen(engine: Engine) {
    let setting = Setting {
        time: LASTING,
        ..Setting::default()
    };
    let stage = Stage::new(engine, "network frozen", &setting);
    stage.network().freeze();
    stage.go();
    thread::sleep(LASTING);
    stage.network().drop_connections();
    stage.network().thaw();
    stage.check(&[
        (Act::Renewal, LOST),
        (Act::Work, &[Outcome::Failed, Outcome::Lost]),
        (Act::KeepAlive, LOST),
    ]);
}

fn connections_reset_and_refused(engine: Engine) {
    let setting = Setting {
        time: BRIEF,
        ..Setting::default()
    };
    let stage = Stage::new(
        engine,
        "connections reset, and refused for a while",
        &setting,
    );
    stage.network().refuse();
    stage.network().drop_connections();
    stage.go();
    thread::sleep(BRIEF);
    stage.network().accept();
    stage.check(&[
        (Act::Renewal, DONE),
        (Act::Work, &[Outcome::Failed]),
        (Act::KeepAlive, LOST),
    ]);
}

fn replies_cut(engine: Engine) {
    let setting = Setting {
        time: BRIEF,
        ..Setting::default()
    };
    let stage = Stage::new(
        engine,
        "no reply arrives for a while, what is asked is done",
        &setting,
    );
    stage.network().cut_replies();
    stage.go();
    thread::sleep(BRIEF);
    stage.network().stop_cutting();
    stage.check(&[
        (Act::Renewal, DONE),
        (Act::Work, &[Outcome::Failed]),
        (Act::Commit, &[Outcome::Unknown]),
        (Act::KeepAlive, LOST),
    ]);
}

fn latency(engine: Engine) {
    let setting = Setting {
        time: LASTING,
        ..Setting::default()
    };
    let stage = Stage::new(engine, "latency of 300 ms", &setting);
    stage.network().delay_requests(Duration::from_millis(150));
    stage.network().delay_replies(Duration::from_millis(150));
    stage.go();
    thread::sleep(LASTING);
    stage.network().delay_requests(Duration::ZERO);
    stage.network().delay_replies(Duration::ZERO);
    stage.check(&[
        (Act::Claim, DONE),
        (Act::Renewal, DONE),
        (Act::Verify, DONE),
        (Act::Work, DONE),
        (Act::Fence, DONE),
        (Act::Commit, DONE),
        (Act::Release, DONE),
        (Act::Finish, DONE),
        (Act::KeepAlive, DONE),
    ]);
}

/// PostgreSQL's is a default of the sessions to come, so those that are there end with it.
fn database_read_only_and_back(engine: Engine) {
    let setting = Setting {
        own_server: true,
        time: BRIEF,
        ..Setting::default()
    };
    let stage = Stage::new(engine, "database read only for a while", &setting);
    let [on, off] = match engine {
        Engine::Mysql => [
            "SET GLOBAL super_read_only = ON",
            "SET GLOBAL super_read_only = OFF, read_only = OFF",
        ],
        Engine::Mariadb => ["SET GLOBAL read_only = ON", "SET GLOBAL read_only = OFF"],
        _ => [
            "ALTER SYSTEM SET default_transaction_read_only = on",
            "ALTER SYSTEM SET default_transaction_read_only = off",
        ],
    };
    let set = |server: &Server, statement: &str| {
        let mut admin = server.admin();
        admin.batch(statement);
        if engine == Engine::Postgres {
            admin.batch("SELECT pg_reload_conf()");
        }
    };
    let end_sessions = || {
        if engine == Engine::Postgres {
            for place in &stage.places {
                place.database.kill_sessions();
            }
        }
    };
    stage.server().configure("SELECT 1", off);
    let server = Server::clone(stage.server());
    thread::scope(|scope| {
        // MariaDB waits for transactions that are open.
        scope.spawn(|| set(&server, on));
        thread::sleep(SETTLE);
        end_sessions();
        stage.go();
    });
    thread::sleep(BRIEF);
    set(&server, off);
    end_sessions();
    stage.check(&[(Act::Renewal, DONE)]);
}

fn table_renamed_and_back(engine: Engine) {
    let setting = Setting {
        time: BRIEF,
        ..Setting::default()
    };
    let stage = Stage::new(engine, "table renamed, and back", &setting);
    stage.go_into(
        |raw| raw.batch("ALTER TABLE diesel_leases RENAME TO elsewhere"),
        BRIEF,
        |raw| raw.batch("ALTER TABLE elsewhere RENAME TO diesel_leases"),
    );
    stage.check(&[
        (Act::Renewal, DONE),
        (Act::Acquire, DONE),
        (Act::KeepAlive, DONE),
    ]);
}

fn change_row(
    engine: Engine,
    fault: &str,
    change: &(dyn Fn(&mut Raw) -> String + Sync),
    expected: &Expected,
) {
    let stage = Stage::new(engine, fault, &Setting::default());
    let change = |raw: &mut Raw| {
        let statement = change(raw);
        raw.execute(&statement);
    };
    stage.go_into(change, Duration::ZERO, |_| ());
    stage.check(expected);
}

fn row_deleted(engine: Engine) {
    let delete = |_: &mut Raw| format!("DELETE FROM diesel_leases WHERE name = '{NAME}'");
    change_row(engine, "row deleted", &delete, &row_gone(engine));
}

/// By hand, for two seconds.
fn row_given_to_another(engine: Engine) {
    let give = |raw: &mut Raw| {
        format!(
            "UPDATE diesel_leases SET holder = 'somebody', instance = 'somebody', term = term + 1, \
             expires_at_ms = {} WHERE name = '{NAME}'",
            raw.now_ms() + 2_000
        )
    };
    change_row(
        engine,
        "row given to another by hand",
        &give,
        &row_gone(engine),
    );
}

/// The clock is compared with what stands in the rows and used for nothing else, so they are moved.
fn clock_stepped_forward(engine: Engine) {
    let step =
        |_: &mut Raw| format!("UPDATE diesel_leases SET expires_at_ms = 1 WHERE name = '{NAME}'");
    let expected = &[
        (Act::Claim, DONE),
        (Act::Renewal, LOST),
        (Act::Verify, LOST),
        (Act::KeepAlive, DONE),
    ];
    change_row(
        engine,
        "database's clock stepped forward by a day",
        &step,
        expected,
    );
}

fn clock_stepped_back(engine: Engine) {
    let step = |_: &mut Raw| {
        format!(
            "UPDATE diesel_leases SET expires_at_ms = expires_at_ms + 5000 WHERE name = '{NAME}'"
        )
    };
    let expected: Vec<_> = ALL_DONE
        .iter()
        .copied()
        // a free row of the past may be in the future then
        .filter(|(act, _)| *act != Act::Claim)
        .collect();
    change_row(
        engine,
        "database's clock stepped back by 5 s",
        &step,
        &expected,
    );
}

fn row_locked_by_a_stranger(engine: Engine) {
    let setting = Setting {
        time: BRIEF,
        ..Setting::default()
    };
    let stage = Stage::new(engine, "row locked by a stranger for a while", &setting);
    let lock = |raw: &mut Raw| match engine {
        Engine::Sqlite => raw.batch("BEGIN IMMEDIATE"),
        _ => {
            raw.batch("BEGIN");
            let lock = format!("SELECT term FROM diesel_leases WHERE name = '{NAME}' FOR UPDATE");
            raw.one_i64(&lock);
        }
    };
    stage.go_into(lock, BRIEF, |raw| raw.batch("ROLLBACK"));
    stage.check(&[
        (Act::Renewal, DONE),
        (Act::Verify, DONE),
        (Act::Commit, DONE),
        (Act::KeepAlive, DONE),
    ]);
}

fn process_killed(engine: Engine) {
    let stage = Stage::new(engine, "process killed", &Setting::default());
    stage.go();
    stage.child.lock().kill();
    for place in &stage.places {
        if place.act.is_in_a_transaction() {
            // It may have come to its end.
            let rows = || rows(&place.database, &ROWS);
            eventually(LONG, "all of it or nothing", || matches!(rows(), 0 | 2));
        }
    }
    stage.assert_all_is_to_be_had();
}

fn process_stopped(engine: Engine, fault: &str, time: Duration, expected: &Expected) {
    let setting = Setting {
        time,
        ..Setting::default()
    };
    let stage = Stage::new(engine, fault, &setting);
    stage.child.lock().stop();
    stage.go();
    thread::sleep(time);
    stage.child.lock().cont();
    stage.check(expected);
}

fn process_stopped_for_less_than_the_deadline(engine: Engine) {
    let fault = "process stopped for less than the deadline";
    process_stopped(engine, fault, BRIEF, ALL_DONE);
}

fn process_stopped_for_more_than_the_lease(engine: Engine) {
    let expected = &[
        (Act::Renewal, LOST),
        (Act::Verify, LOST),
        (Act::Work, LOST),
        (Act::Fence, LOST),
    ];
    let fault = "process stopped for more than the lease";
    process_stopped(engine, fault, LASTING, expected);
}

/// Less than a stack of the library's, and enough for what Rust maps when a thread has started: without
/// that it aborts.
const ROOM: u64 = 200 * 1024;

/// By leaving it no room for a stack.
fn no_thread_can_be_started(engine: Engine) {
    let stage = Stage::new(engine, "no thread can be started", &Setting::default());
    let id = stage.child.lock().id();
    let pages = fs::read_to_string(format!("/proc/{id}/statm")).expect("/proc");
    let pages: u64 = pages
        .split(' ')
        .next()
        .and_then(|size| size.parse().ok())
        .expect("a size");
    stage.limit(Resource::As, Some(pages * 4096 + ROOM));
    stage.go();
    thread::sleep(BRIEF);
    stage.limit(Resource::As, None);
    stage.check(&[
        (Act::Renewal, DONE),
        (Act::Verify, DONE),
        // What another thread has left may be room enough.
        (Act::Acquire, &[Outcome::NoThread, Outcome::Done]),
        (Act::KeepAlive, DONE),
    ]);
}

/// Nothing more can be written to any file. Servers have disks of their own.
#[cfg(feature = "sqlite")]
#[test]
fn disk_full() {
    run(Engine::Sqlite, |engine| {
        let setting = Setting {
            time: BRIEF,
            ..Setting::default()
        };
        let stage = Stage::new(engine, "disk full for a while", &setting);
        stage.limit(Resource::Fsize, Some(1));
        stage.go();
        thread::sleep(BRIEF);
        stage.limit(Resource::Fsize, None);
        let failed = &[Outcome::Failed];
        stage.check(&[
            (Act::Claim, failed),
            (Act::Renewal, DONE),
            (Act::Verify, DONE),
            (Act::Work, failed),
            (Act::Release, failed),
            (Act::Finish, failed),
            (Act::KeepAlive, DONE),
        ]);
    });
}

fn work_panics(engine: Engine) {
    let setting = Setting {
        panics: true,
        ..Setting::default()
    };
    let stage = Stage::new(engine, "work panics", &setting);
    stage.go();
    let panicked = &[Outcome::Panicked];
    stage.check(&[
        (Act::Work, panicked),
        (Act::Fence, panicked),
        (Act::Commit, panicked),
    ]);
}
