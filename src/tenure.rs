//! A lease as the work under it sees it.
//!
//! A [`Tenure`] is one shared place for a lease's identity, its deadline and its end; [`Lease`] and
//! [`HeldLease`] are handles on it. Every answer is given locally, at once, and is right even when
//! no thread of the library gets to run.
//!
//! Invariant: once lost, always lost, and the word says so before the channel does.
//!
//! Hazard: an answer is as old as the next instruction. What must not happen under a lost lease
//! belongs into a transaction that the database itself refuses.
//!
//! [`Lease`]: crate::Lease
//! [`HeldLease`]: crate::HeldLease

use std::cell::RefCell;
use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chrono::{DateTime, Utc};
use crossbeam_channel::Receiver;

use crate::clock::Moment;
use crate::error::{Ending, Error, Lost};
use crate::loss::deadline::Deadline;
use crate::loss::{LossCause, Signal, StopToken, wait};
use crate::protocol::Key;
use crate::slot::instant;
use crate::store::Store;

/// What the work sees of the lease it runs under.
///
/// Clones are the same tenure. None of its calls but [`verify`](Tenure::verify) touches the
/// database, and none of those waits for a lock that one that does could hold.
#[derive(Clone)]
pub struct Tenure(Arc<Shared>);

struct Shared {
    name: String,
    holder: String,
    term: i64,
    slot_ms: Option<i64>,
    deadline: Deadline,
    /// Whether the last renewal failed or is not answered: then a deadline that passes means
    /// `Unreachable`.
    failing: AtomicBool,
    ended: Signal,
    stops: Vec<StopToken>,
    store: Arc<Store>,
}

impl Tenure {
    /// A tenure that began with a claim sent at `sent`.
    pub(crate) fn new(
        name: String,
        holder: String,
        term: i64,
        slot_ms: Option<i64>,
        sent: Moment,
        stops: Vec<StopToken>,
        store: Arc<Store>,
    ) -> Tenure {
        let deadline = Deadline::new(sent.after(store.timings().deadline).nanos());
        let failing = AtomicBool::new(false);
        let ended = Signal::new();
        Tenure(Arc::new(Shared {
            name,
            holder,
            term,
            slot_ms,
            deadline,
            failing,
            ended,
            stops,
            store,
        }))
    }

    /// The name that is leased.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The term: it rises by one every time the name changes hands, and never goes back.
    ///
    /// Send it along to whatever lies outside the database and let that refuse a term lower than
    /// the highest it has seen (a *fencing token*).
    #[must_use]
    pub fn term(&self) -> u64 {
        self.0.term as u64
    }

    /// The instant that the lease was claimed for, if it was for one.
    #[must_use]
    pub fn slot(&self) -> Option<DateTime<Utc>> {
        self.0.slot_ms.and_then(instant)
    }

    /// Whether the lease is lost. Never waits, and never goes back to `false`.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.look().is_err()
    }

    /// Says whether the work may go on as far as this process knows.
    ///
    /// # Errors
    ///
    /// [`Lost`], with the cause.
    pub fn check(&self) -> Result<(), Lost> {
        match self.look() {
            Ok(_) => Ok(()),
            Err(cause) => Err(self.lost(cause)),
        }
    }

    /// How long it is until the local deadline, which each renewal moves. Zero when lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        match self.look() {
            Ok(deadline) => deadline.since(self.0.store.clock().now()),
            Err(_) => Duration::ZERO,
        }
    }

    /// A channel that disconnects when the work must end: the lease is lost, or a stop was asked
    /// for. Nothing is ever sent on it. Use it in `select!`.
    ///
    /// It is the renewal thread that disconnects it in time. On a lease that is not held by
    /// [`Lease::hold`](crate::Lease::hold) it disconnects when some other call finds the loss; ask
    /// [`ending`](Tenure::ending) or [`sleep`](Tenure::sleep) there. After a suspend of the machine it may be a second
    /// late, where [`is_lost`](Tenure::is_lost) is not.
    #[must_use]
    pub fn ended(&self) -> &Receiver<Infallible> {
        self.0.ended.receiver()
    }

    /// Why the work must end, if it must. A loss goes before a stop.
    #[must_use]
    pub fn ending(&self) -> Option<Ending> {
        match self.look() {
            Err(cause) => Some(Ending::Lost(cause)),
            Ok(_) if self.is_asked_to_stop() => Some(Ending::Stopped),
            Ok(_) => None,
        }
    }

    /// Sleeps for `duration`, or until the work must end.
    ///
    /// # Errors
    ///
    /// The [`Ending`], at once when it has come already.
    pub fn sleep(&self, duration: Duration) -> Result<(), Ending> {
        let clock = self.0.store.clock();
        let until = clock.now().after(duration);
        let mut signals = vec![self.ended()];
        signals.extend(self.0.stops.iter().map(StopToken::receiver));
        loop {
            let deadline = match self.look() {
                Ok(_) if self.is_asked_to_stop() => return Err(Ending::Stopped),
                Ok(deadline) => deadline,
                Err(cause) => return Err(Ending::Lost(cause)),
            };
            if clock.now() >= until {
                return Ok(());
            }
            wait(clock, until.min(deadline), &signals);
        }
    }

    /// Makes this the tenure of the calling thread until the guard is dropped.
    ///
    /// [`HeldLease::run`](crate::HeldLease::run) does it for its work. Tenures nest: [`current`] is
    /// the one entered last.
    ///
    /// The guard cannot be sent to another thread:
    ///
    /// ```compile_fail
    /// fn sent<T: Send>() {}
    /// sent::<diesel_lease::Entered>();
    /// ```
    ///
    /// # Panics
    ///
    /// In the destructor of a thread-local value: what cannot be entered must not run unguarded.
    #[must_use = "the tenure is left when the guard is dropped"]
    pub fn enter(&self) -> Entered {
        ENTERED.with_borrow_mut(|entered| entered.push(self.clone()));
        Entered {
            tenure: self.clone(),
            not_send: PhantomData,
        }
    }

    /// Asks the database whether the lease is still held.
    ///
    /// # Blocking
    ///
    /// One round trip on a session of the library's own, at most [`Timings::attempt`](crate::Timings).
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when it is not, and every tenure of this lease is lost from then on. Any
    /// other error says nothing about the lease.
    pub fn verify(&self) -> Result<(), Error> {
        self.check()?;
        if self.0.store.verify(self)? {
            Ok(())
        } else {
            Err(self.gone().into())
        }
    }

    /// Renews once, bounded by the deadline.
    pub(crate) fn renew(&self) -> Result<(), Error> {
        self.renew_by(|start, deadline| self.0.store.renew(self, start, deadline, &[]))
    }

    /// The same, perhaps with other leases in one statement, unless one of `cancel` disconnects first.
    pub(crate) fn renew_among_others(&self, cancel: &[&Receiver<Infallible>]) -> Result<(), Error> {
        let store = &self.0.store;
        self.renew_by(|start, deadline| store.renew_among_others(self, start, deadline, cancel))
    }

    fn renew_by(
        &self,
        renew: impl FnOnce(Moment, Moment) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let start = self.0.store.clock().now();
        let deadline = self.look().map_err(|cause| self.lost(cause))?;
        // Before the send: whoever finds the deadline passed may be faster than this thread.
        let was_failing = self.0.failing.swap(true, Ordering::Relaxed);
        match renew(start, deadline) {
            Ok(true) => self.extend(start),
            Ok(false) => Err(self.gone().into()),
            Err(Error::Stopped) => {
                self.0.failing.store(was_failing, Ordering::Relaxed);
                Err(Error::Stopped)
            }
            Err(error) => Err(error),
        }
    }

    /// Counts a renewal that was sent at `start` and succeeded.
    fn extend(&self, start: Moment) -> Result<(), Error> {
        let store = &self.0.store;
        let to = start.after(store.timings().deadline);
        let moved = self.0.deadline.extend(
            store.clock().now().nanos(),
            to.nanos(),
            self.passed().code(),
        );
        match moved {
            Ok(()) => {
                self.0.failing.store(false, Ordering::Relaxed);
                Ok(())
            }
            Err(code) => {
                self.0.ended.disconnect();
                Err(self.lost(LossCause::from_code(code)).into())
            }
        }
    }

    /// Ends it for `cause`. True if it was not lost before.
    pub(crate) fn lose(&self, cause: LossCause) -> bool {
        let first = self.0.deadline.lose(cause.code());
        self.0.ended.disconnect();
        first
    }

    /// Tells the work to end, without a loss.
    pub(crate) fn tell_to_stop(&self) {
        self.0.ended.disconnect();
    }

    pub(crate) fn is_asked_to_stop(&self) -> bool {
        self.0.stops.iter().any(StopToken::is_stopped)
    }

    /// The local deadline, or why there is none any more.
    pub(crate) fn look(&self) -> Result<Moment, LossCause> {
        let now = self.0.store.clock().now().nanos();
        match self.0.deadline.look(now, self.passed().code()) {
            Ok(nanos) => Ok(Moment::from_nanos(nanos)),
            Err(code) => {
                self.0.ended.disconnect();
                Err(LossCause::from_code(code))
            }
        }
    }

    /// What it means when the deadline passes now.
    fn passed(&self) -> LossCause {
        if self.0.failing.load(Ordering::Relaxed) {
            LossCause::Unreachable
        } else {
            LossCause::Expired
        }
    }

    /// The database has said that it is not ours.
    fn gone(&self) -> Lost {
        self.lose(LossCause::TakenOrReleased);
        self.lost(self.look().err().unwrap_or(LossCause::TakenOrReleased))
    }

    pub(crate) fn lost(&self, cause: LossCause) -> Lost {
        Lost {
            name: self.0.name.clone(),
            term: self.term(),
            cause,
        }
    }

    pub(crate) fn key(&self) -> Key<'_> {
        Key {
            name: &self.0.name,
            holder: &self.0.holder,
            term: self.0.term,
        }
    }

    /// By which all transactions fence in the same order.
    pub(crate) fn order(&self) -> (u64, &str) {
        (self.0.store.id(), &self.0.name)
    }

    pub(crate) fn is(&self, other: &Tenure) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.0.store
    }

    pub(crate) fn stops(&self) -> &[StopToken] {
        &self.0.stops
    }
}

impl fmt::Debug for Tenure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenure")
            .field("name", &self.name())
            .field("term", &self.term())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

thread_local! {
    static ENTERED: RefCell<Vec<Tenure>> = const { RefCell::new(Vec::new()) };
}

/// While it lives, the tenure it came from is the calling thread's. See [`Tenure::enter`].
#[derive(Debug)]
pub struct Entered {
    tenure: Tenure,
    not_send: PhantomData<*const ()>,
}

impl Drop for Entered {
    /// Guards may be dropped in any order, and even while the thread's values are being destroyed.
    fn drop(&mut self) {
        let left = ENTERED.try_with(|entered| {
            let mut entered = entered.borrow_mut();
            let at = entered.iter().rposition(|other| other.is(&self.tenure));
            at.map(|at| entered.remove(at))
        });
        drop(left);
    }
}

/// Those that the calling thread has entered and not left, the first one first. None while its values
/// are being destroyed.
pub(crate) fn with_entered<R: Default>(look: impl FnOnce(&[Tenure]) -> R) -> R {
    ENTERED
        .try_with(|entered| look(&entered.borrow()))
        .unwrap_or_default()
}

/// The tenure that the calling thread has entered last and not left.
#[must_use]
pub fn current() -> Option<Tenure> {
    with_entered(|entered| entered.last().cloned())
}

#[cfg(test)]
mod tests;
