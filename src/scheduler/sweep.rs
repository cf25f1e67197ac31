//! The look for rounds that were cut short, and for rounds that overrun their next instant.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::job::{Job, View};
use crate::clock::Moment;
use crate::error::{Error, chain};
use crate::leases::Leases;
use crate::name::random_fraction;

/// How often overruns are looked for.
const LOOK: Duration = Duration::from_millis(500);

/// A look for rounds cut short comes late by up to this part of the time between two, so that replicas
/// that were started together do not look together.
const JITTER: u32 = 15;

pub(super) struct Sweep {
    leases: Leases,
    every: Duration,
    jobs: Vec<View>,
}

impl Sweep {
    pub(super) fn new(leases: &Leases, every: Duration, jobs: &[Job]) -> Sweep {
        Sweep {
            leases: leases.clone(),
            every,
            jobs: jobs.iter().map(Job::view).collect(),
        }
    }

    pub(super) fn run(self) {
        let clock = self.leases.store().clock();
        let mut overruns: Vec<Option<Overrun>> = vec![None; self.jobs.len()];
        let mut due = self.next();
        loop {
            if self.leases.pause(clock.now().after(LOOK).min(due)).is_err() {
                return;
            }
            for (job, seen) in self.jobs.iter().zip(&mut overruns) {
                self.report_overrun(job, seen);
            }
            if clock.now() >= due {
                self.look();
                due = self.next();
            }
        }
    }

    fn next(&self) -> Moment {
        let jitter = (self.every / JITTER).mul_f64(random_fraction());
        self.leases
            .store()
            .clock()
            .now()
            .after(self.every.saturating_add(jitter))
    }

    fn look(&self) {
        let names: Vec<&str> = self
            .jobs
            .iter()
            .filter_map(|job| job.lease.as_deref())
            .collect();
        match self.leases.unfinished_slots(&names) {
            Ok(found) => {
                for unfinished in found {
                    let of_it = |job: &&View| job.lease.as_deref() == Some(unfinished.name());
                    if let Some(job) = self.jobs.iter().find(of_it) {
                        // Full: the next look finds it again.
                        let _ = job.reruns.try_send(unfinished);
                    }
                }
            }
            Err(Error::Stopped) => {}
            Err(error) => {
                if !self.leases.is_stopped() {
                    log::error!(instance = self.leases.instance(); "could not look for cronjobs cut short: {}", chain(&error));
                }
            }
        }
    }

    /// Says when more instants have passed while a round runs.
    fn report_overrun(&self, job: &View, seen: &mut Option<Overrun>) {
        let running = *job.running_at.lock();
        *seen = running.map(|at| {
            let mut overrun = seen.filter(|seen| seen.at == at).unwrap_or(Overrun {
                at,
                until: at,
                instants: 0,
            });
            let now = job.wall.now().max(overrun.until);
            let more = job.schedule.count(overrun.until, now, super::job::SKIPPED);
            overrun.until = now;
            overrun.instants += more;
            if more > 0 {
                let instant = at.to_rfc3339();
                log::warn!(job = job.name.as_str(), instance = self.leases.instance(), at = instant.as_str(), overrun = overrun.instants; "cronjob round is still running at its next instant");
            }
            overrun
        });
    }
}

/// How many instants have come since the one whose round still runs.
#[derive(Clone, Copy)]
struct Overrun {
    at: DateTime<Utc>,
    until: DateTime<Utc>,
    instants: usize,
}
