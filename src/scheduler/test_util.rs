//! A wall clock that a test moves.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::Scheduler;
use crate::clock::Clock;
use crate::clock::wall::{Driven, WallClock};

/// A wall clock that stands still until it is moved, for tests of an application's jobs.
///
/// It says when instants are due. Leases go by the database's clock and the machine's all the same.
/// Clones are the same clock.
///
/// An instant that passes while a round runs is skipped, also when it is a test that makes it pass. So
/// [`settle`](TestClock::settle) between two moves:
///
/// ```
/// # use std::time::Duration;
/// # use diesel_lease::Leases;
/// # use diesel_lease::scheduler::{Scheduler, TestClock};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let leases = Leases::connect("/no/such/folder/leases.db")?;
/// let clock = TestClock::new("2026-03-28T23:59:30Z".parse()?);
/// let (ran, runs) = std::sync::mpsc::channel();
/// let _running = Scheduler::new(&leases)
///     .clock(&clock)
///     .local_job("cache", "@daily", move |round| Ok(ran.send(round.at())?))
///     .start()?;
/// for day in ["2026-03-29T00:00:00Z", "2026-03-30T00:00:00Z"] {
///     clock.set(day.parse()?);
///     clock.settle();
///     assert_eq!(runs.try_recv()?.to_rfc3339(), day.replace('Z', "+00:00"));
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct TestClock(Arc<Driven>);

impl TestClock {
    /// A clock that shows `now`.
    #[must_use]
    pub fn new(now: DateTime<Utc>) -> TestClock {
        let clock = TestClock(Arc::default());
        clock.set(now);
        clock
    }

    /// What it shows.
    #[must_use]
    pub fn now(&self) -> DateTime<Utc> {
        self.0.now()
    }

    /// Sets it, forward or back.
    pub fn set(&self, now: DateTime<Utc>) {
        self.0
            .now_ms
            .store(now.timestamp_millis(), Ordering::SeqCst);
    }

    /// Moves it forward, in whole milliseconds.
    pub fn advance(&self, by: Duration) {
        let ms = i64::try_from(by.as_millis()).unwrap_or(i64::MAX);
        self.0.now_ms.fetch_add(ms, Ordering::SeqCst);
    }

    /// Waits until all jobs that go by it are done with what is due and wait for a later time.
    ///
    /// # Blocking
    ///
    /// As long as rounds run.
    pub fn settle(&self) {
        while !self.0.is_settled() {
            Clock::Machine.sleep(Duration::from_millis(1));
        }
    }
}

impl Scheduler {
    /// Goes by `clock` instead of the machine's wall clock.
    pub fn clock(mut self, clock: &TestClock) -> Scheduler {
        self.wall = WallClock(Some(Arc::clone(&clock.0)));
        self
    }
}
