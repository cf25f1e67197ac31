//! A lease as its holder has it: to use, to hold, to give back.
//!
//! Invariant: a lease is given back once. Giving it back latches every tenure of it as lost before
//! the statement is sent, and a lease that is lost already is left to the database: its row may be
//! another's.
//!
//! Hazard: a process that ends right after a drop may end before the name is given back; then it is
//! free when the lease runs out.

use std::fmt;
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::error::{Error, Lost, chain};
use crate::loss::LossCause;
use crate::renew::Renewal;
use crate::slot::Unfinished;
use crate::store::line::{Failure, Line};
use crate::tenure::Tenure;

/// A name that this process holds for now.
///
/// It is good until its local deadline, [`remaining`](Lease::remaining) from now. To keep it longer
/// let a thread renew it ([`hold`](Lease::hold)), or [`renew`](Lease::renew) it yourself.
///
/// # Dropping
///
/// Dropping gives the name back without waiting: its tenures are lost at once, and a thread of the
/// library sends the statement. A lease that is lost is not given back. In a forked child nothing is.
/// [`release`](Lease::release) does the same and says how it went.
///
/// It is neither `Clone` nor `Copy`:
///
/// ```compile_fail
/// fn cloned<T: Clone>() {}
/// cloned::<diesel_lease::Lease>();
/// ```
#[must_use = "dropping a `Lease` gives the name back"]
#[clippy::has_significant_drop]
pub struct Lease {
    tenure: Tenure,
    round: Round,
}

/// What a claim for a slot has found.
#[derive(Debug, Default)]
pub(crate) struct Round {
    pub(crate) superseded: Option<Unfinished>,
}

impl Lease {
    pub(crate) fn new(tenure: Tenure, round: Round) -> Lease {
        Lease { tenure, round }
    }

    /// The name that is leased.
    #[must_use]
    pub fn name(&self) -> &str {
        self.tenure.name()
    }

    /// The term: see [`Tenure::term`].
    #[must_use]
    pub fn term(&self) -> u64 {
        self.tenure.term()
    }

    /// The instant it was claimed for, if it was for one.
    #[must_use]
    pub fn slot(&self) -> Option<DateTime<Utc>> {
        self.tenure.slot()
    }

    /// The earlier round, cut short, that this claim of a later instant has given up for good.
    #[must_use]
    pub fn superseded(&self) -> Option<&Unfinished> {
        self.round.superseded.as_ref()
    }

    /// Whether it is lost. Never waits, and never goes back to `false`.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.tenure.is_lost()
    }

    /// How long it is until the local deadline. Zero when lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.tenure.remaining()
    }

    /// What to hand to the work.
    #[must_use]
    pub fn tenure(&self) -> Tenure {
        self.tenure.clone()
    }

    /// Renews it once.
    ///
    /// # Blocking
    ///
    /// One round trip; at most [`Timings::attempt`](crate::Timings), and not beyond the local
    /// deadline.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when it is not this holder's any more, expired unclaimed, or its local
    /// deadline passed meanwhile. Any other error is no loss: it can be tried again.
    pub fn renew(&self) -> Result<(), Error> {
        self.tenure.renew()
    }

    /// Asks the database whether it is still held. See [`Tenure::verify`].
    ///
    /// # Blocking
    ///
    /// One round trip, at most [`Timings::attempt`](crate::Timings).
    ///
    /// # Errors
    ///
    /// As [`Tenure::verify`].
    pub fn verify(&self) -> Result<(), Error> {
        self.tenure.verify()
    }

    /// Gives the name back.
    ///
    /// Every tenure of the lease is lost from the start of this call on. To release a lease that
    /// ran out by the database's clock but that nobody took is no error.
    ///
    /// # Blocking
    ///
    /// One round trip, at most the shorter of [`Timings::attempt`](crate::Timings) and
    /// `lease - deadline`.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when it was lost before; nothing is sent when that was known. After any other
    /// error the name is free at the latest when the lease runs out.
    pub fn release(self) -> Result<(), Error> {
        self.give_back()
    }

    /// Starts the renewal thread.
    ///
    /// # Blocking
    ///
    /// Only while the thread is started.
    ///
    /// # Errors
    ///
    /// [`Error::Spawn`] when it cannot be started; the name is given back then, as by a drop.
    pub fn hold(self) -> Result<HeldLease, Error> {
        let renewal = Renewal::start(&self.tenure).map_err(Error::Spawn)?;
        Ok(HeldLease {
            renewal,
            lease: self,
        })
    }

    /// `release`, for those who cannot move it.
    pub(crate) fn give_back(&self) -> Result<(), Error> {
        let tenure = &self.tenure;
        self.latch()?;
        if tenure.store().release(tenure)? {
            log::debug!(lease = tenure.name(), term = tenure.term(), instance = tenure.store().instance(); "lease released");
            Ok(())
        } else {
            Err(tenure.lost(LossCause::TakenOrReleased).into())
        }
    }

    /// Records the end of the round of `slot_ms`, whether the lease is lost or not.
    pub(crate) fn give_back_finished(&self, slot_ms: i64, passed_ms: i64) -> Result<(), Error> {
        let tenure = &self.tenure;
        let lost = self.latch().err();
        let is_ours = tenure
            .store()
            .finish(tenure, lost.is_some(), slot_ms, passed_ms)?;
        match lost {
            Some(lost) => Err(lost.into()),
            None if is_ours => Ok(()),
            None => Err(tenure.lost(LossCause::TakenOrReleased).into()),
        }
    }

    /// Gives it back on a worker, by `ask`, without waiting, if it is not lost.
    pub(crate) fn give_back_by(
        &self,
        ask: impl FnOnce(&mut Line, &Tenure) -> Result<bool, Failure> + Send + 'static,
    ) {
        let store = self.tenure.store();
        // In a forked child the threads that would send it are the parent's, and so is the lease.
        if store.is_of_this_process() && self.latch().is_ok() {
            store.give_back_without_waiting(&self.tenure, ask);
        }
    }

    /// Makes it lost for every tenure of it. An error if it was.
    fn latch(&self) -> Result<(), Lost> {
        let tenure = &self.tenure;
        match tenure.look() {
            Ok(_) if tenure.lose(LossCause::TakenOrReleased) => Ok(()),
            _ => tenure.check(),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.give_back_by(crate::store::release);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("tenure", &self.tenure)
            .finish()
    }
}

/// A lease that a thread renews.
///
/// The thread is a timekeeper named `lease-renew`: it hands a renewal to the library's sessions
/// every [`Timings::renew`](crate::Timings) and never touches the database itself, so that it sees
/// the deadline pass whatever the network does.
///
/// # Dropping
///
/// Dropping ends the renewals and gives the name back, like dropping a [`Lease`]; it waits for
/// neither.
#[must_use = "dropping a `HeldLease` gives the name back"]
#[clippy::has_significant_drop]
#[derive(Debug)]
pub struct HeldLease {
    // Dropped in this order: no renewal follows a release.
    pub(crate) renewal: Renewal,
    lease: Lease,
}

impl HeldLease {
    /// What to hand to the work.
    #[must_use]
    pub fn tenure(&self) -> &Tenure {
        &self.lease.tenure
    }

    /// Whether it is lost. Never waits, and never goes back to `false`.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// Ends the renewals, at once, whatever is in flight, and gives the lease as it is then: good
    /// until its local deadline.
    pub fn stop(self) -> Lease {
        let HeldLease { renewal, lease } = self;
        drop(renewal);
        lease
    }

    /// Ends the renewals and gives the name back. See [`Lease::release`].
    ///
    /// # Blocking
    ///
    /// As [`Lease::release`].
    ///
    /// # Errors
    ///
    /// As [`Lease::release`].
    pub fn release(self) -> Result<(), Error> {
        self.stop().release()
    }

    /// Gives it back before a panic goes on its way.
    pub(crate) fn give_back(&self) {
        self.renewal.end();
        if let Err(error) = self.lease.give_back() {
            let tenure = self.tenure();
            log::warn!(lease = tenure.name(), term = tenure.term(), instance = tenure.store().instance(); "could not release the lease: {}", chain(&error));
        }
    }
}

#[cfg(test)]
mod tests;
