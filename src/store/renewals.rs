//! Renewals in batches: what many leases need at about the same time is one statement.
//!
//! The first timekeeper to hand a renewal in waits a moment for others and has them all sent. With
//! so few leases that this would save nothing, each is sent at once and by itself.
//!
//! Invariant: a batch passes over a row that somebody has locked, so nobody's renewal waits for the
//! row of another. Those passed over then wait for their rows one after the other, on one session at
//! most. An answer reaches the lease that it is about, and none other.
//!
//! Hazard: a lease's attempt counts from when its renewal was handed in, the wait for others included.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;

use super::Store;
use super::line::{Failure, Line};
use crate::clock::Moment;
use crate::error::{Act, Error};
use crate::loss::wait;
use crate::protocol::Key;
use crate::tenure::Tenure;
use crate::timings::Timings;

/// At most so many batches leave in one renewal interval.
const BATCHES: u32 = 40;

/// The leases in one statement.
const AT_ONCE: usize = 500;

#[derive(Default)]
pub(crate) struct Renewals {
    /// What goes with the next batch. Whoever finds it empty sends that.
    next: Mutex<Vec<Due>>,
    held: AtomicUsize,
    /// Has the right to wait for locked rows.
    patient: Arc<Mutex<()>>,
}

/// A renewal that somebody waits for.
struct Due {
    tenure: Tenure,
    at: Moment,
    reply: Sender<Result<bool, Failure>>,
}

/// A lease that a thread renews, for as long as this lives.
pub(crate) struct Held(Arc<Store>);

impl Held {
    pub(crate) fn new(store: &Arc<Store>) -> Held {
        store.renewals.held.fetch_add(1, Ordering::Relaxed);
        Held(Arc::clone(store))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.renewals.held.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Renewals {
    /// How long a batch waits for more.
    fn gathering(&self, timings: &Timings) -> Duration {
        if self.held.load(Ordering::Relaxed) <= BATCHES as usize {
            Duration::ZERO
        } else {
            timings.renew / BATCHES
        }
    }
}

impl Store {
    /// As [`renew`](Store::renew), together with others that are due.
    pub(crate) fn renew_among_others(
        &self,
        tenure: &Tenure,
        start: Moment,
        deadline: Moment,
        cancel: &[&Receiver<Infallible>],
    ) -> Result<bool, Error> {
        let gathering = self.renewals.gathering(&self.timings);
        if gathering.is_zero() {
            return self.renew(tenure, start, deadline, cancel);
        }
        let at = start.after(self.timings.attempt).min(deadline);
        let (reply, answer) = crossbeam_channel::bounded(1);
        let mut next = self.renewals.next.lock();
        next.push(Due {
            tenure: tenure.clone(),
            at,
            reply,
        });
        let is_first = next.len() == 1;
        drop(next);
        if is_first {
            wait(&self.clock, start.after(gathering).min(at), cancel);
            let batch = std::mem::take(&mut *self.renewals.next.lock());
            self.send(batch);
        }
        let answer = self.pool.wait(at, cancel, &answer)?;
        answer.map_err(|failure| failure.into_error(Act::Renew))
    }

    /// Those that cannot be sent get no answer.
    fn send(&self, mut batch: Vec<Due>) {
        batch.sort_unstable_by(|one, other| one.tenure.name().cmp(other.tenure.name()));
        while !batch.is_empty() {
            let some: Vec<Due> = batch.drain(..batch.len().min(AT_ONCE)).collect();
            let Some(until) = some.iter().map(|due| due.at).max() else {
                return;
            };
            let lease_ms = self.timings.lease_ms();
            let patient = Arc::clone(&self.renewals.patient);
            let sent = self
                .pool
                .tell_until(until, move |line| renew_all(line, some, lease_ms, &patient));
            drop(sent);
        }
    }
}

fn renew_all(line: &mut Line, mut batch: Vec<Due>, lease_ms: i64, patient: &Mutex<()>) {
    // Given back meanwhile: it must not be renewed any more.
    batch.retain(|due| !due.tenure.is_lost());
    if batch.is_empty() {
        return;
    }
    let passed_over = match line.ask(|session| session.renew_all(&keys(&batch), lease_ms)) {
        Ok(renewed) => {
            let (renewed, passed_over) = split(batch, &renewed);
            answer(renewed, true);
            passed_over
        }
        Err(failure) => return fail(batch, &failure),
    };
    if passed_over.is_empty() {
        return;
    }
    let held = match line.ask(|session| session.verify_all(&keys(&passed_over))) {
        Ok(held) => held,
        Err(failure) => return fail(passed_over, &failure),
    };
    let (locked, lost) = split(passed_over, &held);
    answer(lost, false);
    // Another batch has its own to wait for; these are tried again in time.
    let Some(_patience) = patient.try_lock() else {
        return fail(locked, &Failure::Locked);
    };
    for due in locked {
        if line.is_overdue() {
            return;
        }
        let renewed = line.ask(|session| session.renew(due.tenure.key(), lease_ms));
        drop(due.reply.send(renewed));
    }
}

fn keys(batch: &[Due]) -> Vec<Key<'_>> {
    batch.iter().map(|due| due.tenure.key()).collect()
}

/// Those of `names`, and the others.
fn split(batch: Vec<Due>, names: &[String]) -> (Vec<Due>, Vec<Due>) {
    let names: HashSet<&str> = names.iter().map(String::as_str).collect();
    batch
        .into_iter()
        .partition(|due| names.contains(due.tenure.name()))
}

fn answer(batch: Vec<Due>, answer: bool) {
    for due in batch {
        // Whoever has stopped waiting wants no answer.
        drop(due.reply.send(Ok(answer)));
    }
}

fn fail(batch: Vec<Due>, failure: &Failure) {
    for due in batch {
        drop(due.reply.send(Err(failure.copy())));
    }
}
