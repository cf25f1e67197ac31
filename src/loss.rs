//! How the end of something is known: a word that never goes back, a channel that disconnects.
//!
//! Invariant: the word first, then the channel. Whoever sees the channel disconnected finds the
//! word saying why. A channel is disconnected, never sent on: a message would reach one receiver, a
//! disconnect reaches all of them, and works in `select!`.
//!
//! Hazard: a sender is dropped outside the lock that holds it, because that wakes waiters.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_channel::{Receiver, Select, Sender, TryRecvError};
use parking_lot::Mutex;

use crate::clock::{Clock, Moment};

pub(crate) mod deadline;

/// Why a lease was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossCause {
    /// The database says that the lease is not this holder's: somebody else has claimed the name,
    /// the row was changed by hand, or the lease was given back.
    TakenOrReleased,
    /// The local deadline passed and no renewal had been tried in vain: the lease was not held by
    /// [`Lease::hold`](crate::Lease::hold), or the process or the machine stood still.
    Expired,
    /// The local deadline passed while the database did not answer the renewals.
    Unreachable,
    /// The renewal thread panicked, which is a fault of this library or of the program's logger.
    RenewalPanicked,
    /// The library gave the lease up because its work would not stop in the time it was given.
    Abandoned,
}

impl LossCause {
    const ALL: [LossCause; 5] = [
        LossCause::TakenOrReleased,
        LossCause::Expired,
        LossCause::Unreachable,
        LossCause::RenewalPanicked,
        LossCause::Abandoned,
    ];

    pub(crate) fn code(self) -> deadline::Code {
        self as deadline::Code
    }

    pub(crate) fn from_code(code: deadline::Code) -> LossCause {
        LossCause::ALL[code as usize]
    }
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LossCause::TakenOrReleased => "it was taken by another holder or given back",
            LossCause::Expired => "its local deadline passed",
            LossCause::Unreachable => "no renewal succeeded before its local deadline",
            LossCause::RenewalPanicked => "its renewal thread panicked",
            LossCause::Abandoned => "it was given up because its work did not stop",
        })
    }
}

/// A channel that can be disconnected once.
#[derive(Debug)]
pub(crate) struct Signal {
    sender: Mutex<Option<Sender<Infallible>>>,
    receiver: Receiver<Infallible>,
}

impl Signal {
    pub(crate) fn new() -> Signal {
        let (sender, receiver) = crossbeam_channel::bounded(0);
        Signal {
            sender: Mutex::new(Some(sender)),
            receiver,
        }
    }

    pub(crate) fn disconnect(&self) {
        let sender = self.sender.lock().take();
        drop(sender);
    }

    pub(crate) fn is_disconnected(&self) -> bool {
        is_disconnected(&self.receiver)
    }

    pub(crate) fn receiver(&self) -> &Receiver<Infallible> {
        &self.receiver
    }
}

pub(crate) fn is_disconnected(signal: &Receiver<Infallible>) -> bool {
    signal.try_recv() == Err(TryRecvError::Disconnected)
}

/// Waits until one of `signals` disconnects, or until the moment `until`. True if one did.
pub(crate) fn wait(clock: &Clock, until: Moment, signals: &[&Receiver<Infallible>]) -> bool {
    let mut select = Select::new();
    for signal in signals {
        select.recv(signal);
    }
    while clock.now() < until {
        if select.ready_timeout(clock.nap(until)).is_ok() {
            return true;
        }
    }
    false
}

/// Tells everything that was started under it to end.
///
/// Give one to [`Leases::with_stop`](crate::Leases::with_stop). When it is stopped, waits end with
/// [`Error::Stopped`](crate::Error::Stopped), new claims are refused, and running work sees it by
/// [`Tenure::ended`](crate::Tenure::ended); renewals go on until the work has returned.
///
/// Clones are the same token. It cannot be reset.
#[derive(Clone)]
pub struct StopToken(Arc<Stop>);

struct Stop {
    stopped: AtomicBool,
    signal: Signal,
}

impl StopToken {
    /// Makes a token that is not stopped.
    #[must_use]
    pub fn new() -> StopToken {
        StopToken(Arc::new(Stop {
            stopped: AtomicBool::new(false),
            signal: Signal::new(),
        }))
    }

    /// Stops it. A second time does nothing. Does not wait for anything.
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::Release);
        self.0.signal.disconnect();
    }

    /// Whether [`stop`](StopToken::stop) was called.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.stopped.load(Ordering::Acquire)
    }

    pub(crate) fn receiver(&self) -> &Receiver<Infallible> {
        self.0.signal.receiver()
    }
}

impl Default for StopToken {
    fn default() -> StopToken {
        StopToken::new()
    }
}

impl fmt::Debug for StopToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StopToken")
            .field("stopped", &self.is_stopped())
            .finish()
    }
}

#[cfg(test)]
mod tests;
