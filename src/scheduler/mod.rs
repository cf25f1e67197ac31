//! Cron: each instant of a schedule runs once in the cluster, and a round cut short once more.
//!
//! A scheduler has one thread for each job, which waits for its next instant, claims it by a
//! [slot](crate::Leases::try_claim_slot), runs the round under the lease and records its end; and one
//! thread that looks for rounds cut short and for rounds that overrun.
//!
//! Invariant: an instant is claimed before its round runs, and a job's rounds in one process follow
//! one another.
//!
//! Hazard: the replicas' wall clocks decide when an instant is due, and must agree to within the
//! distance of two instants. The database decides who runs it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use chrono_tz::Tz;
use crossbeam_channel::Receiver;

use crate::clock::wall::WallClock;
use crate::error::{BoxError, Error};
use crate::leases::Leases;
use crate::loss::{StopToken, wait};
use crate::mistakes::{InvalidSchedule, Mistake};
use crate::name::validate_name;
use crate::tenure::Tenure;

mod job;
mod schedule;
mod sweep;
#[cfg(feature = "test-util")]
mod test_util;
#[cfg(test)]
mod tests;

use job::{Job, Rounds};
use schedule::Schedule;
#[cfg(feature = "test-util")]
pub use test_util::TestClock;

/// What the names of shared jobs begin with, as leases.
const PREFIX: &str = "cron:";

/// The rounds run on the threads of their jobs, whose stack this is.
const STACK: usize = 2 * 1024 * 1024;

type Work = Arc<dyn Fn(&Round<'_>) -> Result<(), BoxError> + Send + Sync>;

/// A set of jobs and when they are due.
///
/// An expression has five fields (minute, hour, day of month, month, day of week) or six (second
/// first), or is a descriptor: `@yearly`, `@monthly`, `@weekly`, `@daily`, `@hourly`, or `@every` and
/// a duration, on multiples since 1970. It is read in UTC unless the job has a
/// [`time_zone`](Scheduler::time_zone).
///
/// With both a day of month and a day of week (neither is `*` or `?`; `*/2` counts as given) either
/// will do; a `+` before the day of week asks for both: `0 6 1-7 * +MON` is the first Monday. `L`, `W`
/// and `#` are as in [croner](https://docs.rs/croner).
///
/// Where the local time jumps, an expression with a single time of day runs once: right after the hour
/// that is left out, or at the first of the two. Any other, with a list, a range, a step or a wildcard
/// in its hours, minutes or seconds, runs whenever the local time is one of its own: not at all in the
/// hour that is left out, and twice in the repeated one.
///
/// What is guaranteed for a [`job`](Scheduler::job), beyond what [`Lease`](crate::Lease) is:
///
/// - Each instant is run by one replica. If its round is cut short, by a crash, a loss or a stop, it
///   is run once more, within about [`sweep_every`](Scheduler::sweep_every) after the lease is free,
///   unless a later instant is claimed first. So a round must bear to be run again.
/// - An error or a panic of the job is the end of its round, not a cut.
/// - Instants that pass while a round runs are run by nobody; one log entry says how many.
/// - When a replica starts it catches up with the last instant, if that was missed by all of them.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_lease::Leases;
/// use diesel_lease::scheduler::Scheduler;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("leases.db");
/// # let leases = Leases::connect(path.to_str().unwrap())?;
/// # leases.migrate()?;
/// let scheduler = Scheduler::new(&leases)
///     .job("invoices", "30 6 * * *", |round| {
///         println!("invoices of {}", round.at());
///         Ok(())
///     })
///     .time_zone("Europe/Paris")
///     .local_job("cache", "@every 5m", |_| Ok(()))
///     .start()?;
/// scheduler.stop(Duration::from_secs(5))?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a scheduler does nothing until `start` is called"]
pub struct Scheduler {
    leases: Leases,
    jobs: Vec<Registered>,
    catch_up_within: Duration,
    sweep_every: Duration,
    wall: WallClock,
}

struct Registered {
    name: String,
    expression: String,
    zones: Vec<String>,
    is_shared: bool,
    work: Work,
}

impl Scheduler {
    /// A scheduler without jobs. Its leases have the timings and the stop tokens of `leases`.
    pub fn new(leases: &Leases) -> Scheduler {
        Scheduler {
            leases: leases.clone(),
            jobs: Vec::new(),
            catch_up_within: Duration::from_secs(24 * 60 * 60),
            sweep_every: Duration::from_secs(15),
            wall: WallClock::default(),
        }
    }

    /// Adds a job that runs once in the cluster at each instant of `cron`. Its lease is named
    /// `cron:` and `name`.
    pub fn job<F>(self, name: &str, cron: &str, work: F) -> Scheduler
    where
        F: Fn(&Round<'_>) -> Result<(), BoxError> + Send + Sync + 'static,
    {
        self.with(name, cron, true, Arc::new(work))
    }

    /// Adds a job that runs on every replica at each instant of `cron`, without a lease.
    pub fn local_job<F>(self, name: &str, cron: &str, work: F) -> Scheduler
    where
        F: Fn(&Round<'_>) -> Result<(), BoxError> + Send + Sync + 'static,
    {
        self.with(name, cron, false, Arc::new(work))
    }

    /// The time zone of the job that was added last, by its IANA name. The zone of the machine is
    /// refused: replicas may differ in it. Defaults to UTC.
    pub fn time_zone(mut self, name: &str) -> Scheduler {
        match self.jobs.last_mut() {
            Some(job) => job.zones.push(name.to_owned()),
            None => self.jobs.push(Registered {
                name: String::new(),
                expression: String::new(),
                zones: vec![name.to_owned()],
                is_shared: false,
                work: Arc::new(|_| Ok(())),
            }),
        }
        self
    }

    /// How old the last instant may be for a starting replica to catch up with it. Defaults to a day.
    pub fn catch_up_within(mut self, within: Duration) -> Scheduler {
        self.catch_up_within = within;
        self
    }

    /// How often rounds that were cut short are looked for, and up to a fifteenth more at random:
    /// one statement for all jobs. Defaults to 15 s.
    pub fn sweep_every(mut self, interval: Duration) -> Scheduler {
        self.sweep_every = interval;
        self
    }

    /// Starts all jobs.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSchedule`] with every mistake, and nothing was started; [`Error::Spawn`], and
    /// what was started is asked to stop.
    pub fn start(self) -> Result<RunningScheduler, Error> {
        let stop = StopToken::new();
        let leases = self.leases.with_stop(&stop);
        let rounds = Arc::new(Rounds::default());
        let mut jobs = Vec::new();
        let mut mistakes = Vec::new();
        for registered in &self.jobs {
            match self.check(registered) {
                Ok(schedule) => jobs.push(Job::new(
                    leases.clone(),
                    registered,
                    schedule,
                    self.catch_up_within,
                    self.wall.clone(),
                    Arc::clone(&rounds),
                )),
                Err(found) => {
                    mistakes.extend(
                        found
                            .into_iter()
                            .map(|mistake| (registered.name.clone(), mistake)),
                    );
                }
            }
        }
        if !mistakes.is_empty() {
            return Err(Error::InvalidSchedule(InvalidSchedule(mistakes)));
        }
        // Disconnects when the last thread has ended.
        let (alive, ended) = crossbeam_channel::bounded(0);
        let running = RunningScheduler {
            leases,
            stop,
            rounds,
            ended,
        };
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            running
                .leases
                .store()
                .spawn(name, STACK, work)
                .map_err(Error::Spawn)
        };
        let sweep = sweep::Sweep::new(&running.leases, self.sweep_every, &jobs);
        for job in jobs {
            let alive = alive.clone();
            spawn(
                "lease-cron",
                Box::new(move || {
                    job.run();
                    drop(alive);
                }),
            )?;
        }
        spawn(
            "lease-sweep",
            Box::new(move || {
                sweep.run();
                drop(alive);
            }),
        )?;
        Ok(running)
    }

    fn with(mut self, name: &str, cron: &str, is_shared: bool, work: Work) -> Scheduler {
        self.jobs.push(Registered {
            name: name.to_owned(),
            expression: cron.to_owned(),
            zones: Vec::new(),
            is_shared,
            work,
        });
        self
    }

    fn check(&self, job: &Registered) -> Result<Schedule, Vec<Mistake>> {
        let mut mistakes = Vec::new();
        let lease = format!("{PREFIX}{}", job.name);
        if let Err(error) = validate_name(&job.name).and_then(|()| validate_name(&lease)) {
            mistakes.push(Mistake::Name(error));
        }
        let namesakes = self
            .jobs
            .iter()
            .filter(|other| other.name == job.name)
            .count();
        if namesakes > 1 {
            mistakes.push(Mistake::Twice);
        }
        let mut zone = Tz::UTC;
        for name in &job.zones {
            match schedule::zone(name) {
                Ok(found) => zone = found,
                Err(mistake) => mistakes.push(mistake),
            }
        }
        match Schedule::parse(&job.expression, zone) {
            Ok(schedule) if mistakes.is_empty() => return Ok(schedule),
            Ok(_) => {}
            Err(mistake) => mistakes.push(mistake),
        }
        Err(mistakes)
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.jobs.iter().map(|job| &job.name).collect();
        f.debug_struct("Scheduler")
            .field("jobs", &names)
            .finish_non_exhaustive()
    }
}

/// One run of a job.
#[derive(Debug)]
pub struct Round<'a> {
    name: &'a str,
    at: DateTime<Utc>,
    tenure: Option<&'a Tenure>,
    is_rerun: bool,
    is_catch_up: bool,
}

impl Round<'_> {
    /// The name of the job.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name
    }

    /// The instant it is for.
    #[must_use]
    pub fn at(&self) -> DateTime<Utc> {
        self.at
    }

    /// The tenure it runs under, which says when it must end. `None` for a
    /// [`local_job`](Scheduler::local_job).
    #[must_use]
    pub fn tenure(&self) -> Option<&Tenure> {
        self.tenure
    }

    /// Whether its first round was cut short.
    #[must_use]
    pub fn is_rerun(&self) -> bool {
        self.is_rerun
    }

    /// Whether it was due before this replica started.
    #[must_use]
    pub fn is_catch_up(&self) -> bool {
        self.is_catch_up
    }
}

/// A scheduler that is running.
///
/// # Dropping
///
/// Dropping asks it to stop and does not wait.
#[must_use = "dropping a `RunningScheduler` stops it"]
pub struct RunningScheduler {
    leases: Leases,
    stop: StopToken,
    rounds: Arc<Rounds>,
    ended: Receiver<std::convert::Infallible>,
}

impl RunningScheduler {
    /// Claims no more, tells the rounds to end, and waits until they have.
    ///
    /// A round that returns an [`Ending`](crate::Ending) then, or nothing else, is cut short: another
    /// replica runs its instant again. If rounds take longer than `timeout` their leases are given up
    /// ([`LossCause::Abandoned`](crate::LossCause::Abandoned)), as by [`Leader::stop`](crate::Leader::stop).
    ///
    /// # Blocking
    ///
    /// At most `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`].
    pub fn stop(self, timeout: Duration) -> Result<(), Error> {
        self.stop.stop();
        let clock = self.leases.store().clock();
        let until = clock.now().after(timeout);
        if crate::loss::is_disconnected(&self.ended) || wait(clock, until, &[&self.ended]) {
            return Ok(());
        }
        self.rounds.abandon();
        Err(Error::TimedOut)
    }
}

impl Drop for RunningScheduler {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

impl fmt::Debug for RunningScheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunningScheduler")
            .field("stop", &self.stop)
            .finish_non_exhaustive()
    }
}
