//! The library's own sessions, and what is asked of the database through them.
//!
//! Every statement of the library on its own sessions goes through here, as a bounded call of the
//! [`pool`]. What is returned is the database's answer or an [`Error`] that names the act.
//!
//! Invariant: no call outlasts its bound, and nobody who watches a deadline runs one.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam_channel::Receiver;
use parking_lot::Mutex;

use crate::clock::{Clock, Moment};
use crate::error::{Act, Error, Lost, chain};
use crate::lease::Lease;
use crate::loss::StopToken;
use crate::name::mint_holder;
use crate::protocol::{NewClaim, Row, Session, Verdict};
use crate::slot::NAMES_AT_ONCE;
use crate::tenure::Tenure;
use crate::timings::Timings;
use crate::unsupported::Unsupported;

pub(crate) mod beside;
pub(crate) mod claim;
pub(crate) mod connect;
pub(crate) mod line;
mod listen;
mod pool;
pub(crate) mod queue;
pub(crate) mod renewals;
#[cfg(test)]
pub(crate) mod testing;

use claim::{Untaken, What};
use connect::Connector;
use line::{Failure, Line};
use listen::Listening;
use pool::Pool;
use queue::Queues;
use renewals::Renewals;

/// How long `migrate` may take, waiting for others that do the same included.
const MIGRATE: Duration = Duration::from_secs(60);

/// What is called when work under a lost lease will not stop.
pub(crate) type OnWorkWillNotStop = Arc<dyn Fn(&Lost) + Send + Sync>;

/// How library threads are started.
pub(crate) type Spawn = fn(thread::Builder, Box<dyn FnOnce() + Send>) -> io::Result<()>;

pub(crate) fn spawn(builder: thread::Builder, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    builder.spawn(work).map(drop)
}

/// Whether a stop ends a claim that is under way.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cancel {
    OnStop,
    /// Its answer is waited for, within its bound.
    #[allow(dead_code, reason = "for the scheduler")]
    Never,
}

/// What all leases of one [`Leases`](crate::Leases) share.
pub(crate) struct Store {
    pool: Pool,
    connector: Connector,
    renewals: Renewals,
    queues: Arc<Queues>,
    listening: Listening,
    /// A session that an earlier commit has locked a row with.
    spare: Mutex<Option<Box<dyn Session>>>,
    clock: Clock,
    timings: Timings,
    instance: String,
    on_work_will_not_stop: OnWorkWillNotStop,
    spawn: Spawn,
    process: u32,
    id: u64,
}

static STORES: AtomicU64 = AtomicU64::new(0);

impl Store {
    pub(crate) fn new(
        connector: Connector,
        connections: usize,
        clock: Clock,
        timings: Timings,
        instance: String,
        on_work_will_not_stop: OnWorkWillNotStop,
        spawn: Spawn,
    ) -> Store {
        let pool = Pool::new(connector.clone(), clock.clone(), connections);
        let process = std::process::id();
        Store {
            pool,
            connector,
            renewals: Renewals::default(),
            queues: Arc::default(),
            listening: Listening::default(),
            spare: Mutex::new(None),
            clock,
            timings,
            instance,
            on_work_will_not_stop,
            spawn,
            process,
            id: STORES.fetch_add(1, Ordering::Relaxed),
        }
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    pub(crate) fn queues(&self) -> &Arc<Queues> {
        &self.queues
    }

    pub(crate) fn timings(&self) -> &Timings {
        &self.timings
    }

    pub(crate) fn instance(&self) -> &str {
        &self.instance
    }

    pub(crate) fn on_work_will_not_stop(&self) -> &OnWorkWillNotStop {
        &self.on_work_will_not_stop
    }

    /// Which of this process's stores it is, in the order they were made.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// False in a forked child.
    pub(crate) fn is_of_this_process(&self) -> bool {
        std::process::id() == self.process
    }

    pub(crate) fn spawn(
        &self,
        name: &str,
        stack: usize,
        work: Box<dyn FnOnce() + Send>,
    ) -> io::Result<()> {
        (self.spawn)(
            thread::Builder::new().name(name.into()).stack_size(stack),
            work,
        )
    }

    /// Claims, if it can be had.
    pub(crate) fn claim(
        self: &Arc<Self>,
        what: What,
        stops: &[StopToken],
        cancel: Cancel,
    ) -> Result<Option<Lease>, Error> {
        let store = Arc::clone(self);
        let tokens = stops.to_vec();
        let cancel: Vec<_> = match cancel {
            Cancel::OnStop => stops.iter().map(StopToken::receiver).collect(),
            Cancel::Never => Vec::new(),
        };
        let won = self.call(Act::Claim, self.timings.attempt, &cancel, move |line| {
            claim::claim(line, &store, &what, &tokens)
        })?;
        Ok(won.map(Untaken::take))
    }

    /// Name, term and slot of those of `names` whose last round can be run again.
    pub(crate) fn cut_short(
        &self,
        names: &[&str],
        cancel: &[StopToken],
    ) -> Result<Vec<(String, i64, i64)>, Error> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let cancel: Vec<_> = cancel.iter().map(StopToken::receiver).collect();
        self.call(Act::Inspect, self.timings.attempt, &cancel, move |line| {
            let mut found = Vec::new();
            for names in names.chunks(NAMES_AT_ONCE) {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                found.extend(line.ask(|session| session.cut_short(&names))?);
            }
            Ok(found)
        })
    }

    /// Records the end of a round. Whether the name was still this holder's, and now is free.
    pub(crate) fn finish(
        &self,
        tenure: &Tenure,
        is_lost: bool,
        slot_ms: i64,
        passed_ms: i64,
    ) -> Result<bool, Error> {
        let tenure = tenure.clone();
        let free = self.free_when_dropped(tenure.name());
        self.call(Act::Finish, self.timings.give_back(), &[], move |line| {
            let finished = if is_lost {
                Ok(false)
            } else {
                line.ask_to_change(|session| session.finish(tenure.key(), passed_ms))
            };
            drop(free);
            if !matches!(finished, Ok(true)) {
                line.ask(|session| session.settle(tenure.name(), slot_ms))?;
            }
            finished
        })
    }

    /// Whether the lease was still held and now is for another lease duration. Bounded by a moment, and
    /// not by what is left until then: this thread may stand still before it waits.
    pub(crate) fn renew(
        &self,
        tenure: &Tenure,
        start: Moment,
        deadline: Moment,
        cancel: &[&Receiver<Infallible>],
    ) -> Result<bool, Error> {
        let lease_ms = self.timings.lease_ms();
        let tenure = tenure.clone();
        let due = start.after(self.timings.attempt).min(deadline);
        let answer = self.pool.ask_until(due, cancel, move |line| {
            line.ask(|session| session.renew(tenure.key(), lease_ms))
        })?;
        answer.map_err(|failure| failure.into_error(Act::Renew))
    }

    /// Whether the lease is still held.
    pub(crate) fn verify(&self, tenure: &Tenure) -> Result<bool, Error> {
        let tenure = tenure.clone();
        self.call(Act::Verify, self.timings.attempt, &[], move |line| {
            line.ask(|session| session.verify(tenure.key()))
        })
    }

    /// Whether the name was still this holder's and now is free.
    pub(crate) fn release(&self, tenure: &Tenure) -> Result<bool, Error> {
        let tenure = tenure.clone();
        let free = self.free_when_dropped(tenure.name());
        self.call(Act::Release, self.timings.give_back(), &[], move |line| {
            let released = release(line, &tenure);
            drop(free);
            released
        })
    }

    /// Has a worker give it back by `ask`, if one can be had.
    pub(crate) fn give_back_without_waiting(
        &self,
        tenure: &Tenure,
        ask: impl FnOnce(&mut Line, &Tenure) -> Result<bool, Failure> + Send + 'static,
    ) {
        let (lease, term) = (tenure.name().to_owned(), tenure.term());
        let (tenure, instance) = (tenure.clone(), self.instance.clone());
        let free = self.free_when_dropped(tenure.name());
        let told = self.pool.tell(self.timings.give_back(), move |line| {
            let (lease, term) = (tenure.name(), tenure.term());
            let released = ask(line, &tenure);
            drop(free);
            match released.map_err(|failure| failure.into_error(Act::Release)) {
                Ok(true) => log::debug!(lease, term, instance = instance.as_str(); "lease released"),
                Ok(false) => log::warn!(lease, term, instance = instance.as_str(); "could not release the lease: it was lost before"),
                Err(error) => log::warn!(lease, term, instance = instance.as_str(); "could not release the lease: {}", chain(&error)),
            }
        });
        if let Err(error) = told.map_err(Error::from) {
            log::warn!(lease = lease.as_str(), term, instance = self.instance.as_str(); "could not release the lease: {}", chain(&error));
        }
    }

    /// For who gives a name back: those who wait for it here are told when it was tried.
    fn free_when_dropped(&self, name: &str) -> FreeWhenDropped {
        FreeWhenDropped {
            queues: Arc::clone(&self.queues),
            clock: self.clock.clone(),
            name: name.to_owned(),
        }
    }

    pub(crate) fn read(&self, name: &str, cancel: &[StopToken]) -> Result<Option<Row>, Error> {
        let name = name.to_owned();
        let cancel: Vec<_> = cancel.iter().map(StopToken::receiver).collect();
        self.call(Act::Inspect, self.timings.attempt, &cancel, move |line| {
            line.ask(|session| session.read(&name))
        })
    }

    pub(crate) fn list(&self) -> Result<Vec<Row>, Error> {
        self.call(Act::Inspect, self.timings.attempt, &[], |line| {
            line.ask(|session| session.list())
        })
    }

    /// Whether the name was held and now is free.
    pub(crate) fn force_release(&self, name: &str) -> Result<bool, Error> {
        let name = name.to_owned();
        let free = self.free_when_dropped(&name);
        self.call(Act::ForceRelease, self.timings.attempt, &[], move |line| {
            let forced = line.ask_to_change(|session| session.force_release(&name));
            drop(free);
            match forced {
                Err(Failure::Database(_)) if claim::is_locked(line, &name) => Err(Failure::Locked),
                answer => answer,
            }
        })
    }

    pub(crate) fn migrate(&self) -> Result<(), Error> {
        let migrated = self.call(Act::Migrate, MIGRATE, &[], |line| {
            let migrated = line.ask_once(|session| Ok(session.migrate(MIGRATE)));
            // Its limits are not those of the other calls.
            line.hang_up();
            migrated
        })?;
        migrated.map_err(Error::Migration)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let rehearsal = NewClaim {
            name: format!("rehearsal:{}", mint_holder()),
            holder: mint_holder(),
            instance: self.instance.clone(),
            lease_ms: self.timings.lease_ms(),
        };
        let attempt = self.timings.attempt;
        let verdict = self.call(Act::Check, attempt, &[], move |line| {
            let verdict = line.ask(|session| session.check())?;
            if !matches!(verdict, Verdict::Carries) {
                return Ok(verdict);
            }
            rehearse(line, &rehearsal)
        })?;
        match verdict {
            Verdict::Carries => Ok(()),
            Verdict::SchemaMissing => Err(Error::SchemaMissing),
            Verdict::Unsupported(why) => Err(Error::Unsupported(why)),
        }
    }

    fn call<T: Send + 'static>(
        &self,
        act: Act,
        bound: Duration,
        cancel: &[&Receiver<Infallible>],
        question: impl FnOnce(&mut Line) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Error> {
        let answer = self.pool.ask(bound, cancel, question)?;
        answer.map_err(|failure| failure.into_error(act))
    }
}

struct FreeWhenDropped {
    queues: Arc<Queues>,
    clock: Clock,
    name: String,
}

impl Drop for FreeWhenDropped {
    fn drop(&mut self) {
        self.queues.free(&self.name, self.clock.now());
    }
}

/// Whether the name was still this holder's, and now is free. Others are told, unless it passes on
/// within this process.
pub(crate) fn release(line: &mut Line, tenure: &Tenure) -> Result<bool, Failure> {
    let store = tenure.store();
    let passes_on = store.queues.passes_on(tenure.name(), store.clock.now());
    line.ask_to_change(|session| session.release(tenure.key(), !passes_on))
}

/// Tries the clock and the upsert, which a server that only speaks the protocol may not have.
fn rehearse(line: &mut Line, claim: &NewClaim) -> Result<Verdict, Failure> {
    let answer = match line.ask_once(|session| session.rehearse(claim)) {
        Ok(answer) => answer,
        Err(Failure::Database(source)) => {
            // A database that still answers has refused the statement.
            line.ask_once(|session| session.has_table())?;
            let what = "a first claim";
            return Ok(Verdict::Unsupported(Unsupported::Statement {
                what,
                source,
            }));
        }
        Err(failure) => return Err(failure),
    };
    let works = match answer {
        (Some(1), Some(row)) => {
            row.holder == claim.holder && (1..=claim.lease_ms).contains(&row.expires_in_ms)
        }
        _ => false,
    };
    if works {
        Ok(Verdict::Carries)
    } else {
        let (what, source) = ("a first claim", diesel::result::Error::NotFound);
        Ok(Verdict::Unsupported(Unsupported::Statement {
            what,
            source,
        }))
    }
}

impl Drop for Store {
    /// In a forked child the session is the parent's, and closing it would end the parent's.
    fn drop(&mut self) {
        if !self.is_of_this_process() {
            std::mem::forget(self.spare.get_mut().take());
        }
    }
}

impl Failure {
    fn into_error(self, act: Act) -> Error {
        match self {
            Failure::SchemaMissing => Error::SchemaMissing,
            Failure::Locked | Failure::TooLate => Error::TimedOut,
            Failure::Connect(error) => Error::Connect(error),
            Failure::Database(source) => Error::Database { act, source },
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("instance", &self.instance)
            .field("timings", &self.timings)
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
