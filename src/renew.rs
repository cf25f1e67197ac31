//! The renewal thread: a timekeeper for one held lease.
//!
//! It sleeps until the next renewal or the deadline, whichever is first, hands the renewal to the
//! store and waits for the answer no longer than until the deadline. An answer moves the deadline,
//! a proven "not yours" is the loss, anything else is another try at the same cadence. Once the
//! lease is lost it stays to see the work end within its grace.
//!
//! Invariant: this thread touches no connection, so nothing can keep it from seeing the deadline.
//!
//! Hazard: the program's logger runs on it.

use std::convert::Infallible;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::Receiver;
use parking_lot::Mutex;

use crate::clock::Moment;
use crate::error::{Error, chain};
use crate::loss::{LossCause, Signal, StopToken, is_disconnected, wait};
use crate::store::renewals::Held;
use crate::tenure::Tenure;

/// Enough for a logger that formats.
const STACK: usize = 256 * 1024;

/// The looks at the work of a lost lease, in parts of its grace.
const GRACE_LOOKS: u32 = 10;

/// A running renewal thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Renewal {
    control: Signal,
    runs: Arc<Runs>,
}

impl Renewal {
    pub(crate) fn start(tenure: &Tenure) -> io::Result<Renewal> {
        let control = Signal::new();
        let runs = Arc::new(Runs::default());
        let keeper = Keeper {
            tenure: tenure.clone(),
            control: control.receiver().clone(),
            runs: Arc::clone(&runs),
            _held: Held::new(tenure.store()),
        };
        tenure
            .store()
            .spawn("lease-renew", STACK, Box::new(move || keeper.keep()))?;
        Ok(Renewal { control, runs })
    }

    pub(crate) fn end(&self) {
        self.control.disconnect();
    }

    /// Work began, and ends when the guard is dropped.
    pub(crate) fn running(&self, since: Moment) -> Running<'_> {
        self.runs.0.lock().push(since);
        Running {
            runs: &self.runs,
            since,
        }
    }
}

/// When each of the runs under the lease began.
#[derive(Debug, Default)]
struct Runs(Mutex<Vec<Moment>>);

impl Runs {
    fn oldest(&self) -> Option<Moment> {
        self.0.lock().iter().min().copied()
    }
}

pub(crate) struct Running<'a> {
    runs: &'a Runs,
    since: Moment,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut runs = self.runs.0.lock();
        if let Some(at) = runs.iter().position(|since| *since == self.since) {
            runs.swap_remove(at);
        }
    }
}

enum End {
    Stopped,
    Lost,
}

struct Keeper {
    tenure: Tenure,
    control: Receiver<Infallible>,
    runs: Arc<Runs>,
    _held: Held,
}

impl Keeper {
    fn keep(self) {
        match catch_unwind(AssertUnwindSafe(|| self.renew())) {
            Ok(End::Stopped) => return,
            Ok(End::Lost) => {}
            Err(_) => {
                self.tenure.lose(LossCause::RenewalPanicked);
            }
        }
        if !self.is_stopped() {
            self.see_the_work_end();
        }
    }

    fn renew(&self) -> End {
        let tenure = &self.tenure;
        let store = tenure.store();
        let (clock, timings) = (store.clock(), store.timings());
        let Ok(deadline) = tenure.look() else {
            return End::Lost;
        };
        // The start of the claim, or of the last renewal by hand.
        let mut attempted = deadline.before(timings.deadline);
        let mut told_to_stop = false;
        loop {
            if self.is_stopped() {
                return End::Stopped;
            }
            let Ok(deadline) = tenure.look() else {
                return End::Lost;
            };
            if !told_to_stop && tenure.is_asked_to_stop() {
                tenure.tell_to_stop();
                told_to_stop = true;
            }
            // What has this thread look again, whether it sleeps or waits for an answer.
            let mut signals = vec![&self.control];
            if !told_to_stop {
                signals.push(tenure.ended());
                signals.extend(tenure.stops().iter().map(StopToken::receiver));
            }
            let wake = attempted.after(timings.renew).min(deadline);
            let now = clock.now();
            if now < wake {
                wait(clock, wake, &signals);
                continue;
            }
            match tenure.renew_among_others(&signals) {
                Ok(()) => {
                    log::trace!(lease = tenure.name(), term = tenure.term(), instance = store.instance(); "lease renewed");
                }
                Err(Error::Lost(_)) => return End::Lost,
                // If it goes on, another takes the place of the one whose answer it gave up.
                Err(Error::Stopped) => continue,
                Err(error) => {
                    log::warn!(lease = tenure.name(), term = tenure.term(), instance = store.instance(); "lease renewal failed: {}", chain(&error));
                }
            }
            attempted = now;
        }
    }

    /// Waits for the work to return or, past its grace, says that it does not.
    fn see_the_work_end(&self) {
        let tenure = &self.tenure;
        let store = tenure.store();
        let (clock, grace) = (store.clock(), store.timings().grace);
        let Err(lost) = tenure.check() else { return };
        let lost_at = clock.now();
        say(|| {
            log::warn!(lease = tenure.name(), term = tenure.term(), instance = store.instance(); "lease lost: {}", lost.cause());
        });
        loop {
            let now = clock.now();
            let look = match self.runs.oldest() {
                Some(since) => {
                    let over = since.max(lost_at).after(grace);
                    if now >= over {
                        break;
                    }
                    over
                }
                None => now.after(grace / GRACE_LOOKS),
            };
            if wait(clock, look, &[&self.control]) {
                return;
            }
        }
        say(|| {
            log::error!(lease = tenure.name(), term = tenure.term(), instance = store.instance(); "work under a lost lease will not stop");
        });
        let fail = Arc::clone(store.on_work_will_not_stop());
        let told = thread::Builder::new()
            .name("lease-fail".into())
            .spawn(move || fail(&lost));
        if let Err(error) = told {
            say(|| {
                log::error!(lease = tenure.name(), term = tenure.term(), instance = store.instance(); "no thread could be started to say so, so the process ends: {error}");
            });
            std::process::abort();
        }
    }

    fn is_stopped(&self) -> bool {
        is_disconnected(&self.control)
    }
}

/// A logger that panics does not end the watch over the work.
fn say(entry: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(entry));
}

#[cfg(test)]
mod tests;
