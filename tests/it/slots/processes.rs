//! Many processes at the same instants, some of which are killed in the middle of a round.
//!
//! Every process writes down what it does in a table of the test's own, in the same database. What
//! must hold of rounds is then read from there.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::process::ExitStatusExt;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use chrono::{DateTime, Utc};
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};
use diesel_lease::{Lease, Leases, Timings, Unfinished};
use rustix::process::{Signal, getpid, kill_process};

use crate::support::database::Database;
use crate::support::process::{Child, Role};
use crate::support::raw::Raw;
use crate::support::{Engine, engines};

engines! {
    fn processes_that_are_killed_run_no_instant_too_often,
}

const PROCESSES: u64 = 8;
const INSTANTS: i64 = 500;
const STEP_MS: i64 = 40;
const NAMES: [&str; 2] = ["report", "Report"];
const TIMINGS: Timings = Timings {
    lease: Duration::from_millis(1000),
    renew: Duration::from_millis(150),
    attempt: Duration::from_millis(700),
    deadline: Duration::from_millis(700),
    grace: Duration::from_millis(300),
};

/// Anything longer is a process that hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// What a process writes down. `term` is that of the lease, `slot_ms` the instant it is about.
#[derive(Clone, Debug, QueryableByName)]
struct Note {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    what: String,
    #[diesel(sql_type = BigInt)]
    slot_ms: i64,
    #[diesel(sql_type = BigInt)]
    term: i64,
}

const FIRST: &str = "first round";
const SECOND: &str = "second round";
/// The round of an earlier instant, given up by the claim of that term.
const GIVEN_UP: &str = "given up";
const SECOND_GIVEN_UP: &str = "second round given up";
/// The work has come to its end, and that is to be recorded.
const DONE: &str = "done";
const RECORDED: &str = "recorded";
const SETTLED: &str = "settled late";
/// Whether it was recorded, or claimed, is not known: the database was too slow.
const UNKNOWN: &str = "unknown";
const RELEASED: &str = "released";
const DROPPED: &str = "dropped";
const KILLED: &str = "killed";

/// A process that runs rounds until the last instant has come.
pub(crate) fn run_rounds(role: &Role) {
    let engine = match role.argument("engine").as_str() {
        "SQLite" => Engine::Sqlite,
        "PostgreSQL" => Engine::Postgres,
        "MySQL" => Engine::Mysql,
        "MariaDB" => Engine::Mariadb,
        other => panic!("no engine {other}"),
    };
    let url = role.argument("url");
    let builder = Leases::builder().timings(TIMINGS);
    let mut worker = Worker {
        leases: builder.build(&url).unwrap(),
        raw: Raw::connect(engine, &url),
        start_ms: role.argument("start").parse().unwrap(),
        seed: role.argument("seed").parse().unwrap(),
        thrown: 0,
    };
    worker.run();
    role.say("done");
}

struct Worker {
    leases: Leases,
    raw: Raw,
    start_ms: i64,
    seed: u64,
    thrown: u64,
}

impl Worker {
    fn run(&mut self) {
        loop {
            let instant = (now_ms() - self.start_ms) / STEP_MS;
            if instant > INSTANTS {
                return;
            }
            // Somewhat late, somewhat early, the same again, or from long ago.
            let chosen = match self.throw(20) {
                0 => self.throw(instant.max(1) as u64) as i64,
                1..4 => instant + 1,
                4..7 => instant - 1,
                _ => instant,
            };
            let name = NAMES[self.throw(NAMES.len() as u64) as usize];
            let at = self.start_ms + chosen.clamp(1, INSTANTS) * STEP_MS;
            match self.throw(60) {
                0 => drop(self.leases.force_release(name)),
                1..10 => self.run_again(),
                _ => self.run_first(name, at),
            }
            let pause = 1 + self.throw(STEP_MS as u64);
            thread::sleep(Duration::from_millis(pause));
        }
    }

    fn run_first(&mut self, name: &str, at: i64) {
        match self.leases.try_claim_slot(name, instant(at)) {
            Ok(None) => {}
            Ok(Some(lease)) => {
                let mut notes = vec![(FIRST, at)];
                notes.extend(lease.superseded().map(|round| {
                    let what = if round.is_rerun() {
                        SECOND_GIVEN_UP
                    } else {
                        GIVEN_UP
                    };
                    (what, round.slot().timestamp_millis())
                }));
                self.note(name, lease.term(), &notes);
                self.round(lease, at);
            }
            Err(error) => self.unknown(name, 0, at, &error),
        }
    }

    fn run_again(&mut self) {
        let Ok(found) = self.leases.unfinished_slots(&NAMES) else {
            return;
        };
        for round in found {
            let at = round.slot().timestamp_millis();
            match self.leases.try_claim_rerun(&round) {
                Ok(None) => {}
                Ok(Some(lease)) => {
                    self.note(round.name(), lease.term(), &[(SECOND, at)]);
                    self.round(lease, at);
                }
                Err(error) => self.unknown(round.name(), 0, at, &error),
            }
        }
    }

    fn round(&mut self, lease: Lease, at: i64) {
        let (name, term) = (lease.name().to_owned(), lease.term());
        let work = Duration::from_millis(self.throw(STEP_MS as u64 / 2));
        let lease = if self.throw(4) == 0 {
            let held = lease.hold().unwrap();
            thread::sleep(work);
            held.stop()
        } else {
            thread::sleep(work);
            lease
        };
        match self.throw(100) {
            0 => self.kill(&name, term, &[(KILLED, at)]),
            1 => self.kill(&name, term, &[(DONE, at), (KILLED, at)]),
            2..6 => {
                self.note(&name, term, &[(DROPPED, at)]);
                drop(lease);
            }
            6..20 => {
                self.note(&name, term, &[(RELEASED, at)]);
                let _ = lease.release();
            }
            end => {
                if end == 20 {
                    // Too long: it is lost.
                    thread::sleep(TIMINGS.lease);
                }
                self.note(&name, term, &[(DONE, at)]);
                let passed = match self.throw(3) {
                    0 => None,
                    // The last one that has come, or one still to come.
                    _ => Some(instant(now_ms() / STEP_MS * STEP_MS + STEP_MS / 2)),
                };
                match lease.finish(passed) {
                    Ok(()) => self.note(&name, term, &[(RECORDED, at)]),
                    Err(error) if error.is_lost() => self.note(&name, term, &[(SETTLED, at)]),
                    Err(error) => self.unknown(&name, term, at, &error),
                }
            }
        }
    }

    fn kill(&mut self, name: &str, term: u64, notes: &[(&str, i64)]) {
        self.note(name, term, notes);
        kill_process(getpid(), Signal::KILL).expect("to be killed");
        thread::sleep(LIMIT);
    }

    fn unknown(&mut self, name: &str, term: u64, at: i64, error: &diesel_lease::Error) {
        assert!(error.is_transient(), "{error:?}");
        self.note(name, term, &[(UNKNOWN, at)]);
    }

    fn note(&mut self, name: &str, term: u64, notes: &[(&str, i64)]) {
        let rows: Vec<String> = notes
            .iter()
            .map(|(what, slot_ms)| format!("('{name}', '{what}', {slot_ms}, {term})"))
            .collect();
        self.raw.execute(&format!(
            "INSERT INTO notes (name, what, slot_ms, term) VALUES {}",
            rows.join(", ")
        ));
    }

    /// A number below `sides`.
    fn throw(&mut self, sides: u64) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.seed, self.thrown).hash(&mut hasher);
        self.thrown += 1;
        hasher.finish() % sides
    }
}

fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("after 1970").as_millis() as i64
}

fn instant(ms: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_millis(ms).expect("an instant")
}

fn processes_that_are_killed_run_no_instant_too_often(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    leases.migrate().unwrap();
    let mut raw = database.connect();
    let name = if engine.is_mysql_like() {
        "VARBINARY(191)"
    } else {
        "VARCHAR(191)"
    };
    raw.batch(&format!(
        "CREATE TABLE notes (name {name} NOT NULL, what VARCHAR(40) NOT NULL, \
         slot_ms BIGINT NOT NULL, term BIGINT NOT NULL)"
    ));

    let start_ms = now_ms() / STEP_MS * STEP_MS + 500;
    let mut killed = 0;
    thread::scope(|scope| {
        let processes: Vec<_> = (0..PROCESSES)
            .map(|n| {
                let database = &database;
                scope.spawn(move || keep_running(engine, database.url(), start_ms, n))
            })
            .collect();
        for process in processes {
            killed += process.join().unwrap();
        }
    });
    raw.execute("UPDATE diesel_leases SET expires_at_ms = 1");
    let left = leases.unfinished_slots(&NAMES).unwrap();
    let mut notes: Vec<Note> = diesel::sql_query("SELECT name, what, slot_ms, term FROM notes")
        .load(&mut raw.connection)
        .unwrap();
    notes.sort_by_key(|note| note.term);

    let count = |what: &str| notes.iter().filter(|note| note.what == what).count();
    assert_eq!(count(KILLED), killed);
    eprintln!(
        "{engine}: {} first rounds, {} second ones, {killed} killed, {} given up, {} settled late, \
         {} unknown",
        count(FIRST),
        count(SECOND),
        count(GIVEN_UP) + count(SECOND_GIVEN_UP),
        count(SETTLED),
        count(UNKNOWN)
    );
    assert!(count(FIRST) >= 100 && count(SECOND) >= 5 && killed > 0);
    for name in NAMES {
        let of_name = |note: &&Note| note.name == name;
        let notes: Vec<Note> = notes.iter().filter(of_name).cloned().collect();
        let left = left.iter().find(|round| round.name() == name);
        let last = raw.row(name).expect("a row").slot_ms;
        History { notes, left, last }.check();
    }
}

/// Has a process run, and another in its place whenever it was killed. How often it was.
fn keep_running(engine: Engine, url: &str, start_ms: i64, n: u64) -> usize {
    let limit = Instant::now() + LIMIT;
    for killed in 0.. {
        let seed = format!("{}", start_ms as u64 * 1_000_000 + n * 1000 + killed);
        let arguments = [
            ("engine", engine.to_string()),
            ("url", url.to_owned()),
            ("start", start_ms.to_string()),
            ("seed", seed),
        ];
        let arguments = arguments.each_ref().map(|(key, value)| (*key, &**value));
        let mut child = Child::spawn("slots::processes::run_rounds", &arguments);
        let left = limit.saturating_duration_since(Instant::now());
        if child.hear_within(left).is_some() {
            return killed as usize;
        }
        let status = child.wait();
        assert_eq!(status.signal(), Some(9), "{status}: {}", child.output());
    }
    unreachable!("it is killed again and again");
}

/// What the processes wrote down of one name, by term.
struct History<'a> {
    notes: Vec<Note>,
    left: Option<&'a Unfinished>,
    /// The last instant in the row.
    last: i64,
}

impl History<'_> {
    fn check(&self) {
        self.terms_and_instants_rise();
        let mut by_instant: BTreeMap<i64, Vec<&Note>> = BTreeMap::new();
        for note in &self.notes {
            by_instant.entry(note.slot_ms).or_default().push(note);
        }
        for (slot, notes) in by_instant {
            self.check_instant(slot, &notes);
        }
    }

    fn terms_and_instants_rise(&self) {
        let (mut last_term, mut last_slot) = (0, 0);
        for note in &self.notes {
            let is_first = note.what == FIRST;
            if is_first || note.what == SECOND {
                assert!(note.term > last_term, "a term twice: {note:?}");
                last_term = note.term;
                if is_first {
                    assert!(note.slot_ms > last_slot, "an instant went back: {note:?}");
                    last_slot = note.slot_ms;
                } else if self.unknown_of(note.slot_ms).is_none() {
                    assert_eq!(note.slot_ms, last_slot, "of an earlier instant: {note:?}");
                }
            }
        }
        assert!(self.last >= last_slot);
    }

    fn check_instant(&self, slot: i64, notes: &[&Note]) {
        let count = |what: &str| notes.iter().filter(|note| note.what == what).count();
        let term_of = |what: &str| {
            let note = notes.iter().find(|note| note.what == what);
            note.map(|note| note.term)
        };
        let (firsts, seconds) = (count(FIRST), count(SECOND));
        let is_known = self.unknown_of(slot).is_none();
        assert!(firsts <= 1 && seconds <= 1, "too many rounds: {notes:#?}");
        if firsts == 0 {
            // A claim whose process never heard of it: its second round is the only one.
            assert!(!is_known, "no first round: {notes:#?}");
        }
        assert!(count(RECORDED) <= 1, "recorded twice: {notes:#?}");

        let (first, second) = (term_of(FIRST), term_of(SECOND));
        let ended = |term: Option<i64>, what: &str| {
            let is_it = |note: &&Note| note.what == what && Some(note.term) == term;
            notes.iter().any(is_it)
        };
        if seconds == 1 {
            assert!(
                !ended(first, RECORDED),
                "run again after its end: {notes:#?}"
            );
        }
        if ended(first, DONE) && ended(second, DONE) {
            let is_cut = !ended(first, RECORDED);
            assert!(is_cut, "to its end twice: {notes:#?}");
        }

        // Whatever was cut short is run again, given up by a later claim, or found now.
        let is_over = count(RECORDED) + count(SETTLED) > 0;
        let is_left = self
            .left
            .is_some_and(|left| left.slot().timestamp_millis() == slot);
        let given_up = (count(GIVEN_UP), count(SECOND_GIVEN_UP));
        if count(RECORDED) > 0 {
            assert_eq!(given_up, (0, 0), "given up after its end: {notes:#?}");
            assert!(!is_left, "found after its end: {notes:#?}");
        }
        if is_over || !is_known || firsts == 0 {
            return;
        }
        if seconds == 0 {
            let fates = usize::from(is_left) + given_up.0;
            assert_eq!((fates, given_up.1), (1, 0), "cut short: {notes:#?}");
        } else {
            let is_last = slot == self.last;
            let fates = usize::from(is_last) + given_up.1;
            assert_eq!((fates, given_up.0), (1, 0), "cut short twice: {notes:#?}");
            assert!(!is_left, "found after two rounds: {notes:#?}");
        }
    }

    /// Something about this instant, or a claim that may have given it up, that no process knows.
    fn unknown_of(&self, slot: i64) -> Option<&Note> {
        let later = |note: &&Note| note.what == FIRST && note.slot_ms > slot;
        let next = self.notes.iter().find(later);
        let next = next.map_or(i64::MAX, |note| note.slot_ms);
        self.notes
            .iter()
            .find(|note| note.what == UNKNOWN && (slot..=next).contains(&note.slot_ms))
    }
}
