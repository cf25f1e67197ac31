//! The scheduler: when rounds run, how they end, what is run again, and what it all costs.
//!
//! Schedules go by a clock that the test moves, leases by the database's.

mod catch_up;
mod clocks;
pub(crate) mod cluster;
mod cost;
mod cut_short;
mod ends;
mod instants;
mod losses;
mod registration;
mod zones;

use std::time::Duration;

use chrono::{DateTime, Utc};
use crossbeam_channel::{Receiver, Sender};
use diesel_lease::scheduler::{Round, RunningScheduler, Scheduler, TestClock};
use diesel_lease::{BoxError, Builder, Leases, Timings};
use log::Level;

use crate::support::database::Database;
use crate::support::log::{Captured, Entry};
use crate::support::raw::{Raw, Row};
use crate::support::{Engine, LONG, eventually, unique};

const MINUTE: Duration = Duration::from_secs(60);

/// Longer than from one look for reruns to the next.
const LOOK: Duration = Duration::from_millis(1200);

/// The default timings, but that a loss is noticed soon.
const TIMINGS: Timings = Timings {
    lease: Duration::from_secs(15),
    renew: Duration::from_millis(200),
    attempt: Duration::from_secs(5),
    deadline: Duration::from_secs(10),
    grace: Duration::from_secs(5),
};

/// An instant of a day that the databases have behind them.
fn at(time: &str) -> DateTime<Utc> {
    format!("2026-03-02T{time}Z").parse().unwrap()
}

/// A round that was begun.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ran {
    at: DateTime<Utc>,
    term: u64,
    is_rerun: bool,
    is_catch_up: bool,
}

fn first(time: &str, term: u64) -> Ran {
    Ran {
        at: at(time),
        term,
        is_rerun: false,
        is_catch_up: false,
    }
}

fn catch_up(time: &str, term: u64) -> Ran {
    Ran {
        is_catch_up: true,
        ..first(time, term)
    }
}

fn rerun(time: &str, term: u64) -> Ran {
    Ran {
        is_rerun: true,
        ..first(time, term)
    }
}

/// A database, a clock, and one job that is due every minute.
struct Stage {
    database: Database,
    clock: TestClock,
    leases: Leases,
    job: String,
    log: Captured,
    begun: Sender<Ran>,
    ran: Receiver<Ran>,
}

impl Stage {
    fn new(engine: Engine, time: &str) -> Stage {
        let database = Database::create(engine);
        let job = unique("job");
        let (begun, ran) = crossbeam_channel::unbounded();
        let stage = Stage {
            leases: builder().build(database.url()).unwrap(),
            clock: TestClock::new(at(time)),
            log: Captured::with("job", &job),
            database,
            job,
            begun,
            ran,
        };
        stage.leases.migrate().unwrap();
        stage
    }

    fn lease(&self) -> String {
        format!("cron:{}", self.job)
    }

    /// Leases as another replica has them.
    fn other_leases(&self) -> Leases {
        builder().build(self.database.url()).unwrap()
    }

    /// Starts a replica that looks for reruns all the time.
    fn start(
        &self,
        work: impl Fn(&Round<'_>) -> Result<(), BoxError> + Send + Sync + 'static,
    ) -> RunningScheduler {
        let scheduler = Scheduler::new(&self.leases).sweep_every(Duration::ZERO);
        self.run(scheduler, &self.clock, work)
    }

    /// Starts a replica that leaves reruns to the others.
    fn start_without_sweep(
        &self,
        work: impl Fn(&Round<'_>) -> Result<(), BoxError> + Send + Sync + 'static,
    ) -> RunningScheduler {
        self.run(
            Scheduler::new(&self.leases).sweep_every(LONG * 10),
            &self.clock,
            work,
        )
    }

    /// Starts `scheduler` with the job.
    fn run(
        &self,
        scheduler: Scheduler,
        clock: &TestClock,
        work: impl Fn(&Round<'_>) -> Result<(), BoxError> + Send + Sync + 'static,
    ) -> RunningScheduler {
        let begun = self.begun.clone();
        let work = move |round: &Round<'_>| {
            begun.send(ran(round)).unwrap();
            work(round)
        };
        let scheduler = scheduler.job(&self.job, "* * * * *", work).clock(clock);
        scheduler.start().unwrap()
    }

    /// The next round that is begun.
    #[track_caller]
    fn next(&self) -> Ran {
        self.ran
            .recv_timeout(LONG)
            .unwrap_or_else(|_| panic!("no round; the log:\n{}", self.entries()))
    }

    /// What is due has been seen to, and no round was begun that was not looked at.
    #[track_caller]
    fn no_round(&self) {
        self.clock.settle();
        self.no_round_within(Duration::ZERO);
    }

    #[track_caller]
    fn no_round_within(&self, time: Duration) {
        if let Ok(ran) = self.ran.recv_timeout(time) {
            panic!("{ran:?}; the log:\n{}", self.entries());
        }
    }

    fn set(&self, time: &str) {
        self.clock.set(at(time));
    }

    fn raw(&self) -> Raw {
        self.database.connect()
    }

    #[track_caller]
    fn row(&self) -> Row {
        self.raw().row(&self.lease()).expect("a row")
    }

    /// Waits until all is done, the name is free and nothing unfinished, with this instant on record.
    #[track_caller]
    fn finished(&self, time: &str) -> Row {
        self.finished_at(at(time))
    }

    #[track_caller]
    fn finished_at(&self, instant: DateTime<Utc>) -> Row {
        let mut raw = self.raw();
        let mut row = None;
        eventually(LONG, &format!("{instant} is finished"), || {
            row = raw.row(&self.lease());
            row.as_ref().is_some_and(|row| {
                row.slot_ms == instant.timestamp_millis()
                    && row.unfinished_slot_ms == 0
                    && row.expires_at_ms == 0
            })
        });
        self.clock.settle();
        row.unwrap()
    }

    /// Waits until the name is free and this instant is unfinished.
    #[track_caller]
    fn cut_short(&self, time: &str) -> Row {
        let mut raw = self.raw();
        let mut row = None;
        eventually(LONG, &format!("{time} is cut short"), || {
            row = raw.row(&self.lease());
            row.as_ref().is_some_and(|row| {
                row.unfinished_slot_ms == at(time).timestamp_millis() && row.expires_at_ms == 0
            })
        });
        row.unwrap()
    }

    /// A round of this instant whose process is gone, and its lease over.
    fn crashed(&self, time: &str) {
        let lease = self.other_leases().try_claim_slot(&self.lease(), at(time));
        std::mem::forget(lease.unwrap().expect("the instant"));
        self.raw().expire(&self.lease());
    }

    /// Puts an instant on record that has been run.
    fn on_record(&self, time: &str) {
        let lease = self.leases.try_claim_slot(&self.lease(), at(time));
        lease.unwrap().expect("the instant").finish(None).unwrap();
    }

    /// Takes the lease table away, so that nothing about leases is answered.
    fn take_table(&self) {
        self.raw()
            .batch("ALTER TABLE diesel_leases RENAME TO taken_away");
    }

    fn give_table_back(&self) {
        self.raw()
            .batch("ALTER TABLE taken_away RENAME TO diesel_leases");
    }

    /// The entries with that text.
    fn logged(&self, text: &str) -> Vec<Entry> {
        let mut entries = self.log.entries();
        entries.retain(|entry| entry.message.starts_with(text));
        entries
    }

    #[track_caller]
    fn not_logged(&self, text: &str) {
        assert!(self.logged(text).is_empty(), "{}", self.entries());
    }

    /// Waits for an entry that begins with that text.
    #[track_caller]
    fn log(&self, level: Level, text: &str) -> Entry {
        let mut found = Vec::new();
        eventually(LONG, text, || {
            found = self.logged(text);
            !found.is_empty()
        });
        assert_eq!(found[0].level, level, "{}", found[0]);
        found.remove(0)
    }

    fn entries(&self) -> String {
        let entries = self.log.entries();
        entries.iter().map(|entry| format!("{entry}\n")).collect()
    }
}

fn builder() -> Builder {
    Leases::builder().timings(TIMINGS)
}

fn ran(round: &Round<'_>) -> Ran {
    Ran {
        at: round.at(),
        term: round.tenure().map_or(0, diesel_lease::Tenure::term),
        is_rerun: round.is_rerun(),
        is_catch_up: round.is_catch_up(),
    }
}

#[track_caller]
fn assert_pairs(entry: &Entry, pairs: &[(&str, &str)]) {
    for (key, value) in pairs {
        assert_eq!(entry.get(key), Some(*value), "{key} of {entry}");
    }
}
