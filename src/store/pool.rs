//! Bounded calls: the only place from which the database is touched.
//!
//! A call into Diesel cannot be cut short, so it is made by a worker thread with a connection of its
//! own, and whoever wants the answer waits no longer than the bound and goes on. A worker that is not
//! back by then is *written off*: another takes its place, and what it returns later is thrown
//! away with its connection. What a late answer has won is given back by being dropped.
//!
//! Invariant: at most `size` workers are in use, and at most `size + WRITTEN_OFF` exist, with one
//! more a minute once that many hang, so that a network that is back is noticed. No job, and nothing
//! that a job owns, is run or dropped under the lock.
//!
//! Hazard: a written off worker exists until its call returns. PostgreSQL's sessions are given up
//! by `tcp_user_timeout`; a MySQL session into a black hole is given up by TCP alone, after a quarter
//! of an hour by default.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Select, TryRecvError};
use parking_lot::{Condvar, Mutex};

use super::connect::Connector;
use super::line::Line;
use crate::clock::{Clock, Moment};
use crate::error::Error;

/// How many workers may hang before calls fail at once.
const WRITTEN_OFF: usize = 8;

/// How long after one worker was let through beyond that the next one is.
const PROBE: Duration = Duration::from_secs(60);

/// How long an answer is still waited for when it is no longer wanted. Often the process ends next, and
/// a client library that is at work while it is torn down crashes.
const MOMENT: Duration = Duration::from_millis(250);

/// The client libraries format errors and negotiate TLS on this stack.
const STACK: usize = 512 * 1024;

/// A few workers, each with a connection. They end when this is dropped and the jobs are done.
pub(crate) struct Pool(Arc<Shared>);

struct Shared {
    connector: Connector,
    clock: Clock,
    size: usize,
    process: u32,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Workers in use: those that wait for a job, those at one, those about to start.
    workers: usize,
    waiting: usize,
    /// The workers at a job, and when they must be back.
    at_work: Vec<(u64, Moment)>,
    written_off: usize,
    last_id: u64,
    next_probe: Option<Moment>,
    closed: bool,
}

/// Something to do with a line to the database, unless its time is up before it begins.
struct Job {
    due: Moment,
    run: Box<dyn FnOnce(&mut Line) + Send>,
}

/// Why there is no answer.
pub(crate) enum NoAnswer {
    TimedOut,
    Cancelled,
    Spawn(io::Error),
}

impl From<NoAnswer> for Error {
    fn from(why: NoAnswer) -> Error {
        match why {
            NoAnswer::TimedOut => Error::TimedOut,
            NoAnswer::Cancelled => Error::Stopped,
            NoAnswer::Spawn(error) => Error::Spawn(error),
        }
    }
}

impl Pool {
    pub(crate) fn new(connector: Connector, clock: Clock, size: usize) -> Pool {
        let (state, work) = (Mutex::default(), Condvar::new());
        Pool(Arc::new(Shared {
            connector,
            clock,
            size,
            process: std::process::id(),
            state,
            work,
        }))
    }

    /// Asks, and waits for the answer until `bound` is over or one of `cancel` disconnects.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        bound: Duration,
        cancel: &[&Receiver<Infallible>],
        question: impl FnOnce(&mut Line) -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        self.ask_until(self.0.clock.now().after(bound), cancel, question)
    }

    /// Asks, and waits for the answer until the moment `due` or one of `cancel` disconnects.
    pub(crate) fn ask_until<T: Send + 'static>(
        &self,
        due: Moment,
        cancel: &[&Receiver<Infallible>],
        question: impl FnOnce(&mut Line) -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        let (reply, answer) = crossbeam_channel::bounded(1);
        // The reply owns what the question won: nobody there to take it, and it is dropped.
        self.tell_until(due, move |line| drop(reply.send(question(line))))?;
        self.wait(due, cancel, &answer)
    }

    /// Waits for what a question sends until the moment `due` or one of `cancel` disconnects.
    pub(crate) fn wait<T>(
        &self,
        due: Moment,
        cancel: &[&Receiver<Infallible>],
        answer: &Receiver<T>,
    ) -> Result<T, NoAnswer> {
        let clock = &self.0.clock;
        let mut select = Select::new();
        select.recv(answer);
        for signal in cancel {
            select.recv(signal);
        }
        loop {
            match answer.try_recv() {
                Ok(answer) => return Ok(answer),
                // Its time was up before a worker came to it, or it panicked.
                Err(TryRecvError::Disconnected) => return Err(NoAnswer::TimedOut),
                Err(TryRecvError::Empty) => {}
            }
            if clock.now() >= due {
                self.0.write_off();
                return Err(NoAnswer::TimedOut);
            }
            if let Ok(ready) = select.ready_timeout(clock.nap(due))
                && ready > 0
            {
                let late = answer.recv_timeout(MOMENT);
                return late.map_err(|_| NoAnswer::Cancelled);
            }
        }
    }

    /// Asks, and does not wait.
    pub(crate) fn tell(
        &self,
        bound: Duration,
        question: impl FnOnce(&mut Line) + Send + 'static,
    ) -> Result<(), NoAnswer> {
        self.tell_until(self.0.clock.now().after(bound), question)
    }

    /// Asks, and does not wait. Nobody wants the answer after the moment `due`.
    pub(crate) fn tell_until(
        &self,
        due: Moment,
        question: impl FnOnce(&mut Line) + Send + 'static,
    ) -> Result<(), NoAnswer> {
        let run = Box::new(question);
        self.0.submit(Job { due, run })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.work.notify_all();
    }
}

impl Shared {
    fn submit(self: &Arc<Self>, job: Job) -> Result<(), NoAnswer> {
        if std::process::id() != self.process {
            let why = "this process was forked, and the connections are its parent's";
            return Err(NoAnswer::Spawn(io::Error::other(why)));
        }
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.write_off(now);
        state.jobs.push_back(job);
        let staffed = self.staff(&mut state, now);
        if state.workers > 0 {
            drop(state);
            self.work.notify_one();
            return Ok(());
        }
        let job = state.jobs.pop_back();
        drop(state);
        drop(job);
        Err(staffed.err().map_or(NoAnswer::TimedOut, NoAnswer::Spawn))
    }

    /// A job is overdue: writes its worker off, and has another one take over the queue.
    fn write_off(self: &Arc<Self>) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.write_off(now);
        if let Err(error) = self.staff(&mut state, now) {
            drop(state);
            log::warn!("a worker thread could not be started: {error}");
        }
    }

    /// Starts a worker if more jobs wait than workers do, and one is allowed.
    fn staff(self: &Arc<Self>, state: &mut State, now: Moment) -> io::Result<()> {
        if state.jobs.len() <= state.waiting || state.workers >= self.size {
            return Ok(());
        }
        if state.written_off >= WRITTEN_OFF {
            if state.next_probe.is_some_and(|at| now < at) {
                return Ok(());
            }
            state.next_probe = Some(now.after(PROBE));
        }
        state.last_id += 1;
        let id = state.last_id;
        let shared = Arc::clone(self);
        thread::Builder::new()
            .name("lease-io".into())
            .stack_size(STACK)
            .spawn(move || shared.work(id))?;
        state.workers += 1;
        Ok(())
    }

    fn work(self: Arc<Self>, id: u64) {
        let mut line = Line::new(self.connector.clone(), self.clock.clone());
        while let Some(job) = self.next_job(id) {
            if self.clock.now() < job.due {
                line.begin(job.due);
                if catch_unwind(AssertUnwindSafe(|| (job.run)(&mut line))).is_err() {
                    log::error!("a call to the database panicked");
                    line.hang_up();
                }
            } else {
                drop(job);
            }
            if !self.is_back(id) {
                return;
            }
        }
    }

    /// Waits for a job. `None` when there will be no more.
    fn next_job(&self, id: u64) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                state.at_work.push((id, job.due));
                return Some(job);
            }
            if state.closed {
                state.workers -= 1;
                return None;
            }
            state.waiting += 1;
            self.work.wait(&mut state);
            state.waiting -= 1;
        }
    }

    /// Whether the worker is still in use after its job.
    fn is_back(&self, id: u64) -> bool {
        let mut state = self.state.lock();
        let at = state.at_work.iter().position(|(other, _)| *other == id);
        match at {
            Some(at) => {
                state.at_work.swap_remove(at);
            }
            None => {
                state.written_off -= 1;
                if state.written_off < WRITTEN_OFF {
                    state.next_probe = None;
                }
            }
        }
        at.is_some()
    }
}

impl State {
    fn write_off(&mut self, now: Moment) {
        let before = self.at_work.len();
        self.at_work.retain(|(_, due)| now < *due);
        let overdue = before - self.at_work.len();
        self.workers -= overdue;
        self.written_off += overdue;
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.0.state.lock();
        f.debug_struct("Pool")
            .field("workers", &state.workers)
            .field("written_off", &state.written_off)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
