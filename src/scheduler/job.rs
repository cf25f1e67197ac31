//! One job: its loop and its rounds.
//!
//! Invariant: the next instant is always later than the one that was run, whatever the wall clock
//! does; a round's end is recorded unless it says that it was told to end.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use crossbeam_channel::{Receiver, Select, Sender};
use parking_lot::Mutex;

use super::schedule::Schedule;
use super::{PREFIX, Registered, Round, Work};
use crate::campaign::is_ending;
use crate::clock::wall::{Waiter, WallClock};
use crate::error::{BoxError, Error, chain};
use crate::lease::Lease;
use crate::leases::Leases;
use crate::loss::LossCause;
use crate::panic::{Panicked, catch};
use crate::slot::Unfinished;
use crate::store::Cancel;
use crate::tenure::Tenure;

/// More skipped instants than this are not counted.
pub(super) const SKIPPED: usize = 100_000;

/// What runs now, in all jobs.
#[derive(Debug, Default)]
pub(super) struct Rounds(Mutex<Running>);

#[derive(Debug, Default)]
struct Running {
    tenures: Vec<Tenure>,
    is_abandoned: bool,
}

impl Rounds {
    /// Gives up the leases of all rounds, also of those that are about to begin.
    pub(super) fn abandon(&self) {
        let mut running = self.0.lock();
        running.is_abandoned = true;
        let tenures = running.tenures.clone();
        drop(running);
        for tenure in tenures {
            tenure.lose(LossCause::Abandoned);
        }
    }

    fn begin(&self, tenure: &Tenure) {
        let mut running = self.0.lock();
        running.tenures.push(tenure.clone());
        let is_abandoned = running.is_abandoned;
        drop(running);
        if is_abandoned {
            tenure.lose(LossCause::Abandoned);
        }
    }

    fn end(&self, tenure: &Tenure) {
        let mut running = self.0.lock();
        let at = running.tenures.iter().position(|other| other.is(tenure));
        let ended = at.map(|at| running.tenures.swap_remove(at));
        drop(running);
        drop(ended);
    }
}

/// The instant of the round that runs now, for those who look for overruns.
pub(super) type RunningAt = Arc<Mutex<Option<DateTime<Utc>>>>;

pub(super) struct Job {
    leases: Leases,
    name: String,
    /// The name of its lease, if it is a shared one.
    lease: Option<String>,
    expression: String,
    schedule: Schedule,
    work: Work,
    catch_up_within: Duration,
    wall: WallClock,
    waiter: Waiter,
    /// Instants up to here are caught up with, those after it are waited for.
    started: DateTime<Utc>,
    rounds: Arc<Rounds>,
    running_at: RunningAt,
    mailbox: (Sender<Unfinished>, Receiver<Unfinished>),
}

/// What a job sees of another's overrun, and where it takes reruns.
pub(super) struct View {
    pub(super) name: String,
    pub(super) lease: Option<String>,
    pub(super) schedule: Schedule,
    pub(super) running_at: RunningAt,
    pub(super) reruns: Sender<Unfinished>,
    pub(super) wall: WallClock,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    First,
    CatchUp,
    Rerun,
}

/// A round that was run.
struct Ended {
    at: DateTime<Utc>,
    /// What has come until then is skipped.
    now: DateTime<Utc>,
}

enum Wake {
    Due,
    Rerun(Unfinished),
    Stopped,
}

impl Job {
    pub(super) fn new(
        leases: Leases,
        registered: &Registered,
        schedule: Schedule,
        catch_up_within: Duration,
        wall: WallClock,
        rounds: Arc<Rounds>,
    ) -> Job {
        Job {
            leases,
            name: registered.name.clone(),
            lease: registered
                .is_shared
                .then(|| format!("{PREFIX}{}", registered.name)),
            expression: registered.expression.clone(),
            schedule,
            work: Arc::clone(&registered.work),
            catch_up_within,
            waiter: wall.waiter(),
            started: wall.now(),
            wall,
            rounds,
            running_at: Arc::default(),
            // The one that waits there is stale when another is found: the next look finds that again.
            mailbox: crossbeam_channel::bounded(1),
        }
    }

    pub(super) fn view(&self) -> View {
        View {
            name: self.name.clone(),
            lease: self.lease.clone(),
            schedule: self.schedule.clone(),
            running_at: Arc::clone(&self.running_at),
            reruns: self.mailbox.0.clone(),
            wall: self.wall.clone(),
        }
    }

    /// What each entry begins with.
    fn keys(&self) -> (&str, &str, &str) {
        (&self.name, &self.expression, self.leases.instance())
    }

    pub(super) fn run(&self) {
        let (job, spec, instance) = self.keys();
        log::info!(job, spec, instance; "scheduled cronjob");
        let mut next = match self.catch_up() {
            Some(ended) => self.after_round(&ended),
            None => self.schedule.after(self.started),
        };
        while let Some(at) = next {
            next = match self.wait(at) {
                Wake::Stopped => return,
                Wake::Due => match self.instant(at) {
                    Some(ended) => self.after_round(&ended),
                    None => self.after_refusal(at),
                },
                Wake::Rerun(found) => match self.rerun(&found) {
                    Some(ended) => self.after_round(&ended),
                    None => next,
                },
            };
        }
        log::warn!(job, spec, instance; "cronjob has no further instant");
    }

    /// The next instant; those that have passed during the round are skipped.
    fn after_round(&self, ended: &Ended) -> Option<DateTime<Utc>> {
        let Ended { at, now } = *ended;
        let skipped = self.schedule.count(at, now, SKIPPED);
        if skipped > 0 {
            let after = at.to_rfc3339();
            let (job, spec, instance) = self.keys();
            log::warn!(job, spec, instance, skipped, after = after.as_str(); "cronjob skipped instants");
        }
        self.schedule.after(now.max(at))
    }

    /// The last instant that has come while this one was claimed in vain, or the next one.
    fn after_refusal(&self, at: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let now = self.wall.now();
        let last = self.schedule.last(now, self.catch_up_within);
        last.filter(|last| *last > at)
            .or_else(|| self.schedule.after(now.max(at)))
    }

    /// Waits for the instant, a rerun, or a stop.
    fn wait(&self, at: DateTime<Utc>) -> Wake {
        self.waiter.waits_for(at);
        let wake = self.wake(at);
        self.waiter.busy();
        wake
    }

    fn wake(&self, at: DateTime<Utc>) -> Wake {
        loop {
            if self.leases.is_stopped() {
                return Wake::Stopped;
            }
            if let Ok(found) = self.mailbox.1.try_recv() {
                return Wake::Rerun(found);
            }
            let Some(left) = self.wall.until(at) else {
                return Wake::Due;
            };
            let mut select = Select::new();
            for token in &self.leases.stops {
                select.recv(token.receiver());
            }
            select.recv(&self.mailbox.1);
            // Woken or not, all is looked at again.
            let _ = select.ready_timeout(left);
        }
    }

    /// Runs the last instant that no replica has claimed.
    fn catch_up(&self) -> Option<Ended> {
        let lease = self.lease.as_deref()?;
        let at = self.schedule.last(self.started, self.catch_up_within)?;
        match self.leases.last_slot(lease) {
            Ok(Some(last)) if last < at => self.claim(lease, at, Kind::CatchUp),
            Ok(_) => None,
            Err(error) => {
                if !self.leases.is_stopped() {
                    let (job, spec, instance) = self.keys();
                    log::error!(job, spec, instance; "cronjob could not read its last instant: {}", chain(&error));
                }
                None
            }
        }
    }

    fn instant(&self, at: DateTime<Utc>) -> Option<Ended> {
        if let Some(lease) = &self.lease {
            return self.claim(lease, at, Kind::First);
        }
        let round = self.round(at, None, Kind::First);
        let outcome = self.work(&round);
        self.report(&round, &outcome);
        let now = self.wall.now();
        Some(Ended { at, now })
    }

    /// Claims an instant and runs its round. While the database cannot answer, it is tried again until
    /// the next instant. `None` if it was not run here.
    fn claim(&self, lease: &str, at: DateTime<Utc>, kind: Kind) -> Option<Ended> {
        let (job, spec, instance) = self.keys();
        let due = at.to_rfc3339();
        let mut is_reported = false;
        loop {
            // A stop does not end it: the claim would be undone, and those who were refused the instant
            // meanwhile do not ask for it again.
            match self.leases.claim_slot(lease, at, Cancel::Never) {
                Ok(Some(claimed)) => {
                    if let Some(earlier) = claimed.superseded() {
                        let (given_up, rerun) = (earlier.slot().to_rfc3339(), earlier.is_rerun());
                        log::warn!(job, spec, instance, at = given_up.as_str(), rerun, next = due.as_str(); "cronjob gave up a round cut short");
                    }
                    if self.leases.is_stopped() {
                        // It is cut short before it begins, for others to find.
                        if let Err(error) = claimed.release() {
                            log::warn!(job, spec, instance, at = due.as_str(); "cronjob could not release its lease: {}", chain(&error));
                        }
                        return None;
                    }
                    return Some(self.round_under(claimed, at, kind));
                }
                Ok(None) => {
                    log::debug!(job, spec, instance, at = due.as_str(); "cronjob instant claimed elsewhere");
                    return None;
                }
                Err(Error::Stopped) => return None,
                Err(error) => {
                    if !is_reported {
                        log::error!(job, spec, instance, at = due.as_str(); "cronjob could not claim its instant, trying again: {}", chain(&error));
                        is_reported = true;
                    }
                }
            }
            let again = self.wall.now() + self.leases.timings().renew;
            if self.schedule.after(at).is_some_and(|next| next <= again) || !self.pause(again) {
                return None;
            }
        }
    }

    fn rerun(&self, found: &Unfinished) -> Option<Ended> {
        let (job, spec, instance) = self.keys();
        let due = found.slot().to_rfc3339();
        match self.leases.try_claim_rerun(found) {
            Ok(Some(lease)) => Some(self.round_under(lease, found.slot(), Kind::Rerun)),
            Ok(None) => {
                log::debug!(job, spec, instance, at = due.as_str(), rerun = true; "cronjob instant claimed elsewhere");
                None
            }
            Err(Error::Stopped) => None,
            Err(error) => {
                log::error!(job, spec, instance, at = due.as_str(), rerun = true; "cronjob could not claim its instant: {}", chain(&error));
                None
            }
        }
    }

    /// Waits until the wall clock shows `until`. False when a stop came first.
    fn pause(&self, until: DateTime<Utc>) -> bool {
        self.waiter.waits_for(until);
        while let Some(left) = self.wall.until(until) {
            let mut select = Select::new();
            for token in &self.leases.stops {
                select.recv(token.receiver());
            }
            let _ = select.ready_timeout(left);
            if self.leases.is_stopped() {
                break;
            }
        }
        self.waiter.busy();
        !self.leases.is_stopped()
    }

    fn round<'a>(&'a self, at: DateTime<Utc>, tenure: Option<&'a Tenure>, kind: Kind) -> Round<'a> {
        Round {
            name: &self.name,
            at,
            tenure,
            is_rerun: kind == Kind::Rerun,
            is_catch_up: kind == Kind::CatchUp,
        }
    }

    fn work(&self, round: &Round<'_>) -> Result<Result<(), BoxError>, Panicked> {
        *self.running_at.lock() = Some(round.at);
        let outcome = catch(|| (self.work)(round));
        *self.running_at.lock() = None;
        outcome
    }

    fn round_under(&self, lease: Lease, at: DateTime<Utc>, kind: Kind) -> Ended {
        let (job, spec, instance) = self.keys();
        let held = match lease.hold() {
            Ok(held) => held,
            Err(error) => {
                log::error!(job, spec, instance; "cronjob could not hold its lease: {}", chain(&error));
                return Ended { at, now: at };
            }
        };
        let tenure = held.tenure().clone();
        let term = tenure.term();
        let due = at.to_rfc3339();
        self.rounds.begin(&tenure);
        let (is_cut_short, lost) = held.run(|tenure| {
            let round = self.round(at, Some(tenure), kind);
            let outcome = self.work(&round);
            self.report(&round, &outcome);
            let is_cut_short = tenure.ending().is_some()
                && matches!(&outcome, Ok(Err(error)) if is_ending(error.as_ref()));
            (is_cut_short, tenure.is_lost())
        });
        self.rounds.end(&tenure);
        let now = self.wall.now();
        if is_cut_short {
            // A lost lease is left to the database.
            if let (false, Err(error)) = (lost, held.release()) {
                log::warn!(job, spec, instance, at = due.as_str(), term; "cronjob could not release its lease: {}", chain(&error));
            }
            return Ended { at, now };
        }
        if lost {
            log::warn!(job, spec, instance, at = due.as_str(), term; "cronjob lost its lease during the round");
        }
        let passed = self.schedule.last(now, self.catch_up_within);
        match held.finish(passed) {
            Ok(()) => {}
            Err(Error::Lost(_)) if lost => {}
            Err(error @ Error::Lost(_)) => {
                log::warn!(job, spec, instance, at = due.as_str(), term; "cronjob could not release its lease: {}", chain(&error));
            }
            Err(error) => {
                log::warn!(job, spec, instance, at = due.as_str(), term; "cronjob could not record its round as finished: {}", chain(&error));
            }
        }
        Ended { at, now }
    }

    fn report(&self, round: &Round<'_>, outcome: &Result<Result<(), BoxError>, Panicked>) {
        let (job, spec, instance) = self.keys();
        let at = round.at.to_rfc3339();
        let at = at.as_str();
        let term = round.tenure.map_or(0, Tenure::term);
        let (rerun, catch_up) = (round.is_rerun, round.is_catch_up);
        let ending = round.tenure.and_then(Tenure::ending);
        match (outcome, ending) {
            (Ok(Ok(())), _) => {
                log::info!(job, spec, instance, at, term, rerun, catch_up; "finished cronjob");
            }
            (Ok(Err(error)), Some(ending)) if is_ending(error.as_ref()) => {
                log::warn!(job, spec, instance, at, term, rerun, catch_up; "cronjob interrupted: {ending}");
            }
            (Ok(Err(error)), _) => {
                log::error!(job, spec, instance, at, term, rerun, catch_up; "finished cronjob with error: {}", chain(error.as_ref()));
            }
            (Err(panicked), _) => {
                log::error!(job, spec, instance, at, term, rerun, catch_up; "cronjob panicked: {panicked}");
            }
        }
    }
}
