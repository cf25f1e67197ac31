//! The one place that reads a clock.
//!
//! Every local limit is a [`Moment`] of this clock. On Linux it is `CLOCK_BOOTTIME`, which goes on
//! while the machine is suspended: a holder that slept through its deadline must find it passed.
//! The wall clock is read for schedules alone, to know when something is due; who may do it is asked
//! of the database, by its own clock.
//!
//! Hazards: a guest frozen by its hypervisor may see no time pass at all, and a timer (a channel
//! wait, a condition variable) counts on a clock that stands still during a suspend. So a wait
//! never decides; whoever wakes from one looks here again, at the latest after [`Clock::LOOK`].

#![expect(clippy::disallowed_methods, reason = "this is the clock")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg_attr(target_os = "linux", path = "clock/boottime.rs")]
#[cfg_attr(not(target_os = "linux"), path = "clock/instant.rs")]
mod machine;
#[cfg(feature = "scheduler")]
pub(crate) mod wall;

/// A moment on this machine's clock, in nanoseconds since a start that is the same for the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

impl Moment {
    /// No clock reads earlier than this, so the numbers below it are free for other meanings.
    pub(crate) const FIRST: Moment = Moment(1 << 10);

    pub(crate) fn nanos(self) -> u64 {
        self.0
    }

    pub(crate) fn from_nanos(nanos: u64) -> Moment {
        Moment(nanos)
    }

    /// The moment `duration` later; the last one there is when that is too far.
    pub(crate) fn after(self, duration: Duration) -> Moment {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Moment(self.0.saturating_add(nanos))
    }

    /// The moment `duration` earlier; the first one there is when that is too far.
    pub(crate) fn before(self, duration: Duration) -> Moment {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Moment(self.0.saturating_sub(nanos)).max(Moment::FIRST)
    }

    /// How long it is from `earlier` to here; zero when `earlier` is later.
    pub(crate) fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// The clock that a [`Leases`](crate::Leases) and all it hands out go by.
#[derive(Debug, Clone)]
pub(crate) enum Clock {
    /// The machine's.
    Machine,
    /// One that stands still until it is moved.
    #[cfg_attr(not(test), allow(dead_code))]
    Driven(Arc<AtomicU64>),
}

impl Clock {
    /// A wait looks at the clock at least this often, because timers may stand still in a suspend.
    pub(crate) const LOOK: Duration = Duration::from_secs(1);

    /// A clock that only [`Clock::advance`] moves.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "time is driven by hand in tests")
    )]
    pub(crate) fn driven() -> Clock {
        Clock::Driven(Arc::new(AtomicU64::new(
            Duration::from_secs(1_000).as_nanos() as u64,
        )))
    }

    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "time is driven by hand in tests")
    )]
    pub(crate) fn advance(&self, by: Duration) {
        match self {
            Clock::Machine => panic!("BUG: the machine's clock cannot be moved"),
            Clock::Driven(nanos) => {
                nanos.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
            }
        }
    }

    pub(crate) fn now(&self) -> Moment {
        let nanos = match self {
            Clock::Machine => machine::nanos(),
            Clock::Driven(nanos) => nanos.load(Ordering::SeqCst),
        };
        Moment(nanos).max(Moment::FIRST)
    }

    /// Stands still for `duration`.
    pub(crate) fn sleep(&self, duration: Duration) {
        let until = self.now().after(duration);
        while self.now() < until {
            std::thread::sleep(self.nap(until));
        }
    }

    /// How long a wait for `until` may last before it looks at this clock again.
    pub(crate) fn nap(&self, until: Moment) -> Duration {
        match self {
            Clock::Machine => until.since(self.now()).min(Clock::LOOK),
            Clock::Driven(_) => Duration::from_millis(1),
        }
    }
}

#[cfg(test)]
mod tests;
