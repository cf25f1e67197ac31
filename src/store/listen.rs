//! Hearing from other processes that a name was given back, where the engine can say so.
//!
//! While somebody here waits for a name, a thread has a session that listens. What it hears makes those
//! who are first in their lines, and candidates, look at once.
//!
//! Invariant: nothing depends on it. Whoever waits also looks by itself, which is all there is behind a
//! pooler that takes sessions away, and while the session is being made anew.
//!
//! Hazard: Diesel cannot wait for a notification, so what has arrived is asked of the socket every
//! [`LOOK`]; that sends nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Store;
use super::connect::Connector;
use super::queue::Queues;
use crate::clock::Clock;
use crate::error::chain;

/// How often the session is asked what has arrived.
const LOOK: Duration = Duration::from_millis(20);

/// How long the session is kept when nobody waits any more.
const KEPT: Duration = Duration::from_secs(10);

/// How long after an error the next session is made.
const AGAIN: Duration = Duration::from_secs(5);

/// Enough for a client library's name resolution, and for a logger that formats.
const STACK: usize = 1024 * 1024;

/// Whether there is a thread that listens.
#[derive(Default)]
pub(super) struct Listening(Arc<AtomicBool>);

impl Store {
    /// Somebody waits for a name: has a thread listen, if none does.
    pub(crate) fn listen(&self) {
        let is_running = &self.listening.0;
        if !self.connector.tells_of_releases() || is_running.swap(true, Ordering::AcqRel) {
            return;
        }
        let listener = Listener {
            connector: self.connector.clone(),
            clock: self.clock.clone(),
            queues: Arc::downgrade(&self.queues),
            _is_running: IsRunning(Arc::clone(is_running)),
        };
        let work = Box::new(move || listener.run());
        if let Err(error) = self.spawn("lease-listen", STACK, work) {
            let instance = self.instance();
            log::debug!(instance; "nobody listens for names that are given back: {error}");
        }
    }
}

struct Listener {
    connector: Connector,
    clock: Clock,
    queues: Weak<Queues>,
    _is_running: IsRunning,
}

/// Makes room for the next thread when this one ends, however it does.
struct IsRunning(Arc<AtomicBool>);

impl Drop for IsRunning {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Listener {
    fn run(self) {
        while self.is_wanted() {
            let ended = catch_unwind(AssertUnwindSafe(|| self.listen()));
            match ended {
                Ok(Ok(())) => return,
                Ok(Err(error)) => log::debug!("cannot hear of names that are given back: {error}"),
                Err(_) => log::error!("listening for names that are given back panicked"),
            }
            let until = self.clock.now().after(AGAIN);
            while self.clock.now() < until && self.is_wanted() {
                self.clock.sleep(LOOK);
            }
        }
    }

    fn is_wanted(&self) -> bool {
        let queues = self.queues.upgrade();
        queues.is_some_and(|queues| queues.has_waiters())
    }

    /// Until nobody has waited for a while, or an error.
    fn listen(&self) -> Result<(), String> {
        let mut session = self.connector.connect().map_err(|error| chain(&error))?;
        session.listen().map_err(|error| chain(&error))?;
        // What was given back before that was not heard.
        self.tell(None);
        let mut wanted = self.clock.now();
        loop {
            let now = self.clock.now();
            if self.is_wanted() {
                wanted = now;
            } else if now >= wanted.after(KEPT) || self.queues.strong_count() == 0 {
                return Ok(());
            }
            let names = session.heard().map_err(|error| chain(&error))?;
            if !names.is_empty() {
                self.tell(Some(&names));
            }
            self.clock.sleep(LOOK);
        }
    }

    /// Those who wait for one of `names`, or all.
    fn tell(&self, names: Option<&[String]>) {
        if let Some(queues) = self.queues.upgrade() {
            queues.look(|name| names.is_none_or(|names| names.iter().any(|heard| heard == name)));
        }
    }
}

#[cfg(test)]
mod tests;
