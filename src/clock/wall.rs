//! The wall clock, which schedules go by: it says when something is due, and never who may do it.
#![expect(clippy::disallowed_methods, reason = "this is the clock")]

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use chrono::{DateTime, Utc};
use parking_lot::Mutex;

use super::Clock;

/// The machine's, or one that is moved by hand.
#[derive(Debug, Clone, Default)]
pub(crate) struct WallClock(pub(crate) Option<Arc<Driven>>);

/// A clock that stands still until it is moved, and those that wait by it.
#[derive(Debug, Default)]
pub(crate) struct Driven {
    /// In milliseconds since 1970.
    pub(crate) now_ms: AtomicI64,
    waiters: Mutex<Vec<Weak<AtomicI64>>>,
}

/// What somebody waits for by a clock, in milliseconds; [`BUSY`] while at something else.
#[derive(Debug)]
pub(crate) struct Waiter(Arc<AtomicI64>);

const BUSY: i64 = i64::MIN;

impl WallClock {
    pub(crate) fn now(&self) -> DateTime<Utc> {
        match &self.0 {
            None => Utc::now(),
            Some(driven) => driven.now(),
        }
    }

    /// Somebody who will wait by this clock, and is at something until then.
    pub(crate) fn waiter(&self) -> Waiter {
        let waiter = Waiter(Arc::new(AtomicI64::new(BUSY)));
        if let Some(driven) = &self.0 {
            driven.waiters.lock().push(Arc::downgrade(&waiter.0));
        }
        waiter
    }

    /// How long a wait for `at` may last before it looks at this clock again, which can be set at any
    /// time. `None` when it has come.
    pub(crate) fn until(&self, at: DateTime<Utc>) -> Option<Duration> {
        let left = (at - self.now())
            .to_std()
            .ok()
            .filter(|left| !left.is_zero())?;
        Some(match &self.0 {
            None => left.min(Clock::LOOK),
            Some(_) => Duration::from_millis(1),
        })
    }
}

impl Driven {
    pub(crate) fn now(&self) -> DateTime<Utc> {
        DateTime::from_timestamp_millis(self.now_ms.load(Ordering::SeqCst)).unwrap_or_default()
    }

    /// Whether all who are left wait for a later time.
    #[allow(dead_code, reason = "for `test-util`")]
    pub(crate) fn is_settled(&self) -> bool {
        let mut waiters = self.waiters.lock();
        waiters.retain(|waiter| waiter.strong_count() > 0);
        let now = self.now_ms.load(Ordering::SeqCst);
        waiters
            .iter()
            .filter_map(Weak::upgrade)
            .all(|until| until.load(Ordering::SeqCst) > now)
    }
}

impl Waiter {
    pub(crate) fn waits_for(&self, at: DateTime<Utc>) {
        self.0.store(at.timestamp_millis(), Ordering::SeqCst);
    }

    pub(crate) fn busy(&self) {
        self.0.store(BUSY, Ordering::SeqCst);
    }
}
