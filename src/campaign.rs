//! Leading for as long as possible, on one replica.
//!
//! A campaign is one thread. It waits for the name, claims and holds it, runs the work, gives the name
//! back, and begins anew: through errors of the database, losses, panics and returns of the work.
//!
//! Invariant: the work runs on that thread, so there are never two of one campaign; the name is given
//! back after the work has returned, never before.
//!
//! Hazard: work that does not see its tenure end keeps the name from everybody, or, once the lease is
//! lost, has the process ended.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;

use crate::clock::Moment;
use crate::error::{BoxError, Ending, Error, Lost, chain};
use crate::lease::HeldLease;
use crate::leases::Leases;
use crate::loss::{LossCause, Signal, StopToken, wait};
use crate::name::{self, validate_name};
use crate::panic::catch;
use crate::store::queue::Place;
use crate::tenure::Tenure;

/// The campaign's thread runs the work, whose stack this is.
const STACK: usize = 2 * 1024 * 1024;

/// A candidate that looked without a pause would only burden the database.
const SHORTEST_POLL: Duration = Duration::from_millis(10);

impl Leases {
    /// Prepares to lead under `name`: see [`Campaign`].
    pub fn campaign(&self, name: impl Into<String>) -> Campaign {
        Campaign {
            leases: self.clone(),
            name: name.into(),
            poll: Duration::from_secs(1),
            pause: Duration::from_secs(5),
            only_if: Arc::new(|| true),
        }
    }
}

/// A campaign that was not started yet.
///
/// A candidate that waits reads the record once in a [`poll`](Campaign::poll) and writes nothing. It
/// claims when the name is free or the present lease can end: a leader that crashed is followed within
/// the lease duration and a poll, one that stepped down within a poll. When the name is given back by the
/// same leases or their clones, or on PostgreSQL by anybody, it looks at once.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_lease::{LeaderEvent, Leases};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("leases.db");
/// # let leases = Leases::connect(path.to_str().unwrap())?;
/// # leases.migrate()?;
/// let leader = leases.campaign("outbox").start(|tenure| loop {
///     // … relay what is there …
///     tenure.sleep(Duration::from_millis(100))?;
/// })?;
/// let events = leader.events();
/// # if !leader.is_leading() {
/// assert!(matches!(events.recv()?, LeaderEvent::Elected { term: 1 }));
/// # }
/// leader.stop(Duration::from_secs(5))?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a campaign does nothing until `start` is called"]
pub struct Campaign {
    leases: Leases,
    name: String,
    poll: Duration,
    pause: Duration,
    only_if: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl Campaign {
    /// How often a candidate looks. Defaults to 1 s; at least 10 ms. Each time it is up to a quarter less,
    /// at random, so that those who came at one moment do not come back at one.
    pub fn poll(mut self, poll: Duration) -> Campaign {
        self.poll = poll.max(SHORTEST_POLL);
        self
    }

    /// How long a leader stays away after its work has ended, and up to a quarter longer at random, so
    /// that others come to lead and work that returns at once does not spin. After errors of the
    /// database the wait grows from a poll to this. Defaults to 5 s.
    pub fn pause(mut self, pause: Duration) -> Campaign {
        self.pause = pause;
        self
    }

    /// Asked before each claim: false abstains until the next poll. It is called on the campaign's
    /// thread. Defaults to always true.
    pub fn only_if(mut self, only_if: impl Fn() -> bool + Send + Sync + 'static) -> Campaign {
        self.only_if = Arc::new(only_if);
        self
    }

    /// Starts the campaign, for ever or until it is stopped.
    ///
    /// Each time this replica comes to lead, `work` is called with its tenure entered. It should go on
    /// until [`Tenure::ended`] and then return. It may return, fail or panic before: the name is given
    /// back then, and the campaign goes on after a [`pause`](Campaign::pause).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`]; [`Error::Spawn`].
    pub fn start<F>(self, work: F) -> Result<Leader, Error>
    where
        F: Fn(&Tenure) -> Result<(), BoxError> + Send + Sync + 'static,
    {
        validate_name(&self.name).map_err(Error::InvalidName)?;
        let shared = Arc::new(Shared {
            stop: StopToken::new(),
            office: Mutex::default(),
            listeners: Mutex::default(),
            ended: Signal::new(),
        });
        let leases = self.leases.with_stop(&shared.stop);
        let leader = Leader {
            leases: leases.clone(),
            shared: Arc::clone(&shared),
        };
        let candidate = Candidate {
            campaign: Campaign { leases, ..self },
            shared,
            work,
        };
        let store = leader.leases.store();
        store
            .spawn("lease-campaign", STACK, Box::new(move || candidate.run()))
            .map_err(Error::Spawn)?;
        Ok(leader)
    }
}

impl fmt::Debug for Campaign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Campaign")
            .field("name", &self.name)
            .field("poll", &self.poll)
            .field("pause", &self.pause)
            .finish_non_exhaustive()
    }
}

/// What a campaign tells.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaderEvent {
    /// This replica leads from now on.
    Elected {
        /// Its term.
        term: u64,
    },
    /// This replica has led until now. Its work has returned, and the name is given back or lost.
    SteppedDown {
        /// The term that ended.
        term: u64,
        /// Why it ended.
        reason: StepDownReason,
    },
    /// Another replica leads.
    LeaderSeen {
        /// What its process calls itself.
        instance: String,
        /// Its term.
        term: u64,
    },
}

/// Why a replica leads no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StepDownReason {
    /// The lease was lost.
    Lost(LossCause),
    /// By [`Leader::step_down`].
    Asked,
    /// The work returned of its own accord.
    Returned,
    /// The work failed or panicked.
    Failed,
    /// The campaign, or the leases it is in, was stopped.
    Stopped,
}

impl fmt::Display for StepDownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StepDownReason::Lost(cause) => write!(f, "lease lost: {cause}"),
            StepDownReason::Asked => f.write_str("asked to"),
            StepDownReason::Returned => f.write_str("work returned"),
            StepDownReason::Failed => f.write_str("work failed"),
            StepDownReason::Stopped => f.write_str("shutting down"),
        }
    }
}

/// A campaign that is running.
///
/// # Dropping
///
/// Dropping asks it to stop and does not wait.
#[must_use = "dropping a `Leader` ends the campaign"]
pub struct Leader {
    leases: Leases,
    shared: Arc<Shared>,
}

struct Shared {
    stop: StopToken,
    /// What this replica leads under, and how to ask it to step down.
    office: Mutex<Option<Office>>,
    listeners: Mutex<Vec<Sender<LeaderEvent>>>,
    ended: Signal,
}

#[derive(Clone)]
struct Office {
    tenure: Tenure,
    step_down: StopToken,
}

impl Leader {
    /// Whether this replica leads, as far as it knows. Never waits.
    #[must_use]
    pub fn is_leading(&self) -> bool {
        self.tenure().is_some_and(|tenure| !tenure.is_lost())
    }

    /// The tenure that this replica leads under, until its work has returned.
    #[must_use]
    pub fn tenure(&self) -> Option<Tenure> {
        self.shared
            .office
            .lock()
            .as_ref()
            .map(|office| office.tenure.clone())
    }

    /// What happens from now on. Every receiver hears everything; it disconnects when the campaign has
    /// ended. What is not received is kept, so drop a receiver that is not read.
    #[must_use]
    pub fn events(&self) -> Receiver<LeaderEvent> {
        let (sender, receiver) = crossbeam_channel::unbounded();
        let mut listeners = self.shared.listeners.lock();
        if !self.has_ended() {
            listeners.push(sender);
        }
        drop(listeners);
        receiver
    }

    /// Asks the work to end, so that another replica comes to lead. This one campaigns again after a
    /// [`pause`](Campaign::pause). Does nothing when it does not lead. Does not wait.
    pub fn step_down(&self) {
        let office = self.shared.office.lock().clone();
        if let Some(office) = office {
            office.step_down.stop();
        }
    }

    /// Ends the campaign, and waits until the work has returned and the name is given back.
    ///
    /// If that takes longer than `timeout` the lease is given up
    /// ([`LossCause::Abandoned`]): its renewals end, so that the name passes on, and nothing of that
    /// work is committed any more under the guard. Should the work then not return within the grace,
    /// [`on_work_will_not_stop`](crate::Builder::on_work_will_not_stop) is called.
    ///
    /// # Blocking
    ///
    /// At most `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`].
    pub fn stop(self, timeout: Duration) -> Result<(), Error> {
        self.shared.stop.stop();
        let clock = self.leases.store().clock();
        let until = clock.now().after(timeout);
        if self.has_ended() || wait(clock, until, &[self.shared.ended.receiver()]) {
            return Ok(());
        }
        if let Some(tenure) = self.tenure() {
            tenure.lose(LossCause::Abandoned);
        }
        Err(Error::TimedOut)
    }

    fn has_ended(&self) -> bool {
        self.shared.ended.is_disconnected()
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.shared.stop.stop();
    }
}

impl fmt::Debug for Leader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leader")
            .field("tenure", &self.tenure())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn tell(&self, event: &LeaderEvent) {
        let listeners: Vec<_> = self.listeners.lock().clone();
        let gone: Vec<_> = listeners
            .iter()
            .filter(|listener| listener.send(event.clone()).is_err())
            .collect();
        if !gone.is_empty() {
            let mut listeners = self.listeners.lock();
            listeners.retain(|listener| !gone.iter().any(|gone| gone.same_channel(listener)));
        }
    }
}

struct Candidate<F> {
    campaign: Campaign,
    shared: Arc<Shared>,
    work: F,
}

impl<F> Candidate<F>
where
    F: Fn(&Tenure) -> Result<(), BoxError>,
{
    fn run(self) {
        let leases = &self.campaign.leases;
        let name = self.campaign.name.as_str();
        log::info!(lease = name, instance = leases.instance(); "campaigning for leadership");
        let place = leases.store().queues().listen(name);
        let mut seen = 0;
        let mut failures = 0;
        while !leases.is_stopped() {
            // `only_if` may panic. A stop is seen by the loop, here and below.
            let failed = match catch(|| self.stand(&place, &mut seen)) {
                Ok(Ok(Some(held))) => {
                    failures = 0;
                    self.lead(held);
                    let _ = leases.pause(self.after(self.campaign.pause, Jitter::Longer));
                    continue;
                }
                Ok(Ok(None)) => {
                    failures = 0;
                    continue;
                }
                Ok(Err(Error::Stopped)) => continue,
                Ok(Err(error)) => chain(&error),
                Err(panicked) => panicked.to_string(),
            };
            log::warn!(lease = name, instance = leases.instance(); "leader campaign failed: {failed}");
            let backoff = self.campaign.poll.saturating_mul(1 << failures.min(10));
            failures += 1;
            let _ = leases.pause(self.after(backoff.min(self.campaign.pause), Jitter::Longer));
        }
        self.shared.ended.disconnect();
        let listeners = std::mem::take(&mut *self.shared.listeners.lock());
        drop(listeners);
    }

    /// Claims the name if it is free, or waits for a poll or until it is told that it may be free.
    fn stand(&self, place: &Place, seen: &mut u64) -> Result<Option<HeldLease>, Error> {
        let Campaign {
            leases,
            name,
            poll,
            only_if,
            ..
        } = &self.campaign;
        let record = leases.inspect(name)?;
        if let Some(record) = &record
            && record.term() != *seen
            && record.expires_in().is_some()
        {
            *seen = record.term();
            let (instance, term) = (record.instance().to_owned(), record.term());
            self.shared
                .tell(&LeaderEvent::LeaderSeen { instance, term });
        }
        let held_for = record.and_then(|record| record.expires_in());
        if held_for.is_none() && only_if() {
            let step_down = StopToken::new();
            if let Some(lease) = leases.with_stop(&step_down).try_claim(name)? {
                *seen = lease.term();
                let office = Office {
                    tenure: lease.tenure(),
                    step_down,
                };
                let held = lease.hold()?;
                *self.shared.office.lock() = Some(office);
                // A `stop` that has looked before this and found nobody to give up.
                if leases.is_stopped() {
                    self.shared.office.lock().take();
                    // Not by a drop: the process may end before that is carried out.
                    let _ = held.release();
                    return Err(Error::Stopped);
                }
                return Ok(Some(held));
            }
        }
        leases.store().listen();
        let poll = self.after(*poll, Jitter::Sooner);
        let look = match held_for {
            Some(left) => leases.store().clock().now().after(left).min(poll),
            None => poll,
        };
        leases.hear(place, look)?;
        Ok(None)
    }

    fn lead(&self, held: HeldLease) {
        let leases = &self.campaign.leases;
        let tenure = held.tenure().clone();
        let (lease, term, instance) = (tenure.name(), tenure.term(), leases.instance());
        log::info!(lease, term, instance; "elected leader");
        self.shared.tell(&LeaderEvent::Elected { term });
        let outcome = held.run(|tenure| catch(|| (self.work)(tenure)));
        let noticed = tenure.check().err();
        let office = self.shared.office.lock().take();
        let asked = office.is_some_and(|office| office.step_down.is_stopped());
        let is_stopped = leases.is_stopped();
        let (lost, unreleased) = match (noticed, held.release()) {
            (None, Err(Error::Lost(lost))) => (Some(lost), None),
            (None, Err(error)) => (None, Some(error)),
            (noticed, _) => (noticed, None),
        };
        let reason = match (&lost, &outcome) {
            (Some(lost), _) => StepDownReason::Lost(lost.cause()),
            _ if asked => StepDownReason::Asked,
            _ if is_stopped => StepDownReason::Stopped,
            (None, Ok(Ok(()))) => StepDownReason::Returned,
            (None, _) => StepDownReason::Failed,
        };
        match outcome {
            Err(panicked) => {
                log::error!(lease, term, instance; "leader work panicked: {panicked}");
            }
            Ok(Err(error)) if reason == StepDownReason::Failed || !is_ending(error.as_ref()) => {
                log::error!(lease, term, instance; "leader stepped down with error, {reason}: {}", chain(error.as_ref()));
            }
            Ok(_) => log::info!(lease, term, instance; "leader stepped down, {reason}"),
        }
        if let Some(error) = unreleased {
            log::warn!(lease, term, instance; "leader could not release its lease: {}", chain(&error));
        }
        self.shared.tell(&LeaderEvent::SteppedDown { term, reason });
    }

    fn after(&self, duration: Duration, jitter: Jitter) -> Moment {
        let part = duration.mul_f64(name::random_fraction() / 4.0);
        let duration = match jitter {
            Jitter::Sooner => duration - part,
            Jitter::Longer => duration.saturating_add(part),
        };
        self.campaign.leases.store().clock().now().after(duration)
    }
}

enum Jitter {
    Sooner,
    Longer,
}

/// Whether an error says nothing but that the work was to end.
pub(crate) fn is_ending(error: &(dyn StdError + 'static)) -> bool {
    let is_loss = |error: &(dyn StdError + 'static)| {
        error.is::<Ending>()
            || error.is::<Lost>()
            || matches!(error.downcast_ref(), Some(Error::Lost(_)))
    };
    let in_diesel = |error: &(dyn StdError + 'static)| {
        error
            .downcast_ref()
            .is_some_and(|error| Lost::from_diesel(error).is_some())
    };
    is_loss(error) || in_diesel(error)
}
