//! Those in this process who wait for a name.
//!
//! They stand in a line, and only the first asks the database. When a lease of this process ends the
//! first is told, so a name passes on within the process without a poll. Candidates, which look for
//! themselves, are told with it.
//!
//! Invariant: where somebody stands in a line one is first, and was told so. Nothing is dropped under
//! the lock.
//!
//! Hazard: a name that is always passed on within one process never comes to another. So when a
//! [`Turn`] of this process is over the first gives way, for longer than those elsewhere pause
//! ([`Pace`]) while a name changes hands that quickly.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Select, Sender, bounded};
use parking_lot::Mutex;

use crate::clock::{Clock, Moment};
use crate::name::random_fraction;
use crate::protocol::Row;

/// How long one who waits pauses at the least.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);

/// How long the first gives way when a turn is over: one who pauses shortly elsewhere looks and claims.
pub(crate) const GIVE_WAY: Duration = Duration::from_millis(25);

/// A turn of this process lasts so long, and longer where nobody came when it gave way.
const SHORTEST_TURN: Duration = Duration::from_millis(50);
const LONGEST_TURN: Duration = Duration::from_millis(400);

/// What one who waits is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    /// It is first from now on, and the one before it has the name.
    First,
    /// It is first, and the name may be free.
    Free,
    /// The same, after others had their chance.
    FreeInAWhile,
    /// The name may have been given back elsewhere.
    Look,
}

/// The lines of a process for all names of one [`Store`](super::Store).
#[derive(Default)]
pub(crate) struct Queues(Mutex<HashMap<String, Queue>>);

#[derive(Default)]
struct Queue {
    line: VecDeque<Waiter>,
    candidates: VecDeque<Waiter>,
    turn: Option<Turn>,
    last_id: u64,
}

struct Waiter {
    id: u64,
    bell: Sender<Told>,
}

/// A time in which a name is passed on within this process.
struct Turn {
    until: Moment,
    length: Duration,
    /// The first was told to give way.
    is_over: bool,
    /// The last term of it.
    term: u64,
}

/// A place in a line, or beside it. Dropping it leaves it to the next.
pub(crate) struct Place {
    queues: Arc<Queues>,
    name: String,
    id: u64,
    told: Receiver<Told>,
}

impl Waiter {
    /// One who has not heard of two things yet looks anyway.
    fn tell(&self, what: Told) {
        let _ = self.bell.try_send(what);
    }
}

impl Queues {
    /// Takes the last place in the line. Who is first at once is told that the name may be free.
    pub(crate) fn join(self: &Arc<Self>, name: &str) -> Place {
        self.enter(name, |queue, waiter| {
            if queue.line.is_empty() {
                waiter.tell(Told::Free);
            }
            queue.line.push_back(waiter);
        })
    }

    /// Takes a place beside the line, for one who looks by itself: it is told when the name is free.
    pub(crate) fn listen(self: &Arc<Self>, name: &str) -> Place {
        self.enter(name, |queue, waiter| queue.candidates.push_back(waiter))
    }

    fn enter(self: &Arc<Self>, name: &str, enter: impl FnOnce(&mut Queue, Waiter)) -> Place {
        let (bell, told) = bounded(2);
        let mut queues = self.0.lock();
        let queue = queues.entry(name.to_owned()).or_default();
        queue.last_id += 1;
        let id = queue.last_id;
        enter(queue, Waiter { id, bell });
        drop(queues);
        Place {
            queues: Arc::clone(self),
            name: name.to_owned(),
            id,
            told,
        }
    }

    /// Whether somebody here is to have the name next, before others have their chance.
    pub(crate) fn passes_on(&self, name: &str, now: Moment) -> bool {
        let queues = self.0.lock();
        queues.get(name).is_some_and(|queue| {
            let is_over = queue.turn.as_ref().is_some_and(|turn| now >= turn.until);
            !queue.line.is_empty() && !is_over
        })
    }

    /// A lease of this process has ended: its name may be free.
    pub(crate) fn free(&self, name: &str, now: Moment) {
        let mut queues = self.0.lock();
        let Some(queue) = queues.get_mut(name) else {
            return;
        };
        if let Some(first) = queue.line.front() {
            let is_over = queue.turn.as_mut().is_some_and(|turn| {
                turn.is_over = now >= turn.until;
                turn.is_over
            });
            first.tell(if is_over {
                Told::FreeInAWhile
            } else {
                Told::Free
            });
        }
        for candidate in &queue.candidates {
            candidate.tell(Told::Free);
        }
        let unused = queue.is_unused().then(|| queues.remove(name));
        drop(queues);
        drop(unused);
    }

    /// Has those look who wait for a name of which `is_meant` is true.
    pub(crate) fn look(&self, is_meant: impl Fn(&str) -> bool) {
        let queues = self.0.lock();
        for (name, queue) in queues.iter() {
            if is_meant(name) {
                for waiter in queue.line.front().into_iter().chain(&queue.candidates) {
                    waiter.tell(Told::Look);
                }
            }
        }
    }

    pub(crate) fn has_waiters(&self) -> bool {
        self.0.lock().values().any(|queue| !queue.is_unused())
    }

    /// Takes a waiter out, and tells the one who is first now.
    fn leave(&self, name: &str, id: u64, won: Option<(u64, Moment)>) {
        let mut queues = self.0.lock();
        let Entry::Occupied(mut entry) = queues.entry(name.to_owned()) else {
            return;
        };
        let queue = entry.get_mut();
        let was_first = queue.line.front().is_some_and(|first| first.id == id);
        let left = take(&mut queue.line, id).or_else(|| take(&mut queue.candidates, id));
        if left.is_none() {
            // It left before, with the name.
            return;
        }
        if let Some((term, now)) = won {
            queue.note(term, now);
        }
        if was_first && let Some(first) = queue.line.front() {
            first.tell(if won.is_some() {
                Told::First
            } else {
                Told::Free
            });
        }
        // Who has the name tells of its end, and the turn goes on until then.
        let unused = (won.is_none() && queue.is_unused()).then(|| entry.remove());
        drop(queues);
        drop((left, unused));
    }
}

fn take(waiters: &mut VecDeque<Waiter>, id: u64) -> Option<Waiter> {
    let at = waiters.iter().position(|waiter| waiter.id == id)?;
    waiters.remove(at)
}

impl Queue {
    fn is_unused(&self) -> bool {
        self.line.is_empty() && self.candidates.is_empty()
    }

    /// The name has come to this process, or has stayed in it.
    fn note(&mut self, term: u64, now: Moment) {
        let mut length = SHORTEST_TURN;
        if let Some(turn) = &mut self.turn
            && turn.term + 1 == term
        {
            turn.term = term;
            if !turn.is_over {
                return;
            }
            // Nobody came when it gave way.
            length = (turn.length * 2).min(LONGEST_TURN);
        }
        self.turn = Some(Turn {
            until: now.after(length),
            length,
            is_over: false,
            term,
        });
    }
}

impl Place {
    /// Waits until it is told something, one of `signals` disconnects, or the moment `until`.
    pub(crate) fn hear(
        &self,
        clock: &Clock,
        until: Moment,
        signals: &[&Receiver<Infallible>],
    ) -> Option<Told> {
        let mut select = Select::new();
        select.recv(&self.told);
        for signal in signals {
            select.recv(signal);
        }
        loop {
            if let Ok(told) = self.told.try_recv() {
                return Some(told);
            }
            if clock.now() >= until {
                return None;
            }
            if let Ok(ready) = select.ready_timeout(clock.nap(until))
                && ready > 0
            {
                return None;
            }
        }
    }

    /// Leaves with the name, which has the term `term`.
    pub(crate) fn won(self, term: u64, now: Moment) {
        self.queues.leave(&self.name, self.id, Some((term, now)));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.queues.leave(&self.name, self.id, None);
    }
}

/// How long one who waits pauses between two looks: about half of what a term lasted lately, so that a
/// name that changes hands quickly is looked at often and one that is held for long is not.
pub(crate) struct Pace {
    pause: Duration,
    longest: Duration,
    /// The last term that was seen.
    term: Option<i64>,
    /// How long the lease lasts that was seen last.
    expires_in: Duration,
}

impl Pace {
    pub(crate) fn new(longest: Duration) -> Pace {
        Pace {
            pause: SHORTEST_PAUSE.min(longest),
            longest,
            term: None,
            expires_in: Duration::MAX,
        }
    }

    pub(crate) fn saw(&mut self, row: &Row) {
        let passed = self.term.map_or(0, |term| row.term.saturating_sub(term));
        self.term = Some(row.term);
        let pause = match u32::try_from(passed) {
            Ok(0) => self.pause.saturating_mul(2),
            Ok(passed) => self.pause / passed.saturating_mul(2),
            Err(_) => self.longest,
        };
        self.pause = pause.max(SHORTEST_PAUSE).min(self.longest);
        self.expires_in = Duration::from_millis(row.expires_in_ms.unsigned_abs());
    }

    /// The next pause, up to a quarter shorter at random, so that many do not look at one moment, and
    /// no longer than the lease can last that was seen since the last one.
    pub(crate) fn next(&mut self) -> Duration {
        let expires_in = std::mem::replace(&mut self.expires_in, Duration::MAX);
        let jitter = self.pause.mul_f64(random_fraction() / 4.0);
        (self.pause - jitter).min(expires_in)
    }
}

#[cfg(test)]
mod tests;
