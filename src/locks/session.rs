//! A bounded call on the one connection of one lock.
//!
//! A thread has the connection, and makes every call on it; whoever wants an answer waits no longer
//! than the bound. The connection is never made anew: what the thread has lost is the lock.
//!
//! Invariant: when the last handle is gone, or a call has not come back in time, the connection is
//! closed as soon as the call returns, and with it the lock.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Select, Sender};

use super::error::LockError;
use crate::clock::Clock;
use crate::loss::StopToken;

/// The client libraries format errors and negotiate TLS on this stack.
const STACK: usize = 512 * 1024;

/// What an engine does for one lock, on one connection.
pub(super) trait LockSession: Send {
    /// Waits for the lock at most `timeout`, a minute or less. False: it was held all the while.
    fn acquire(&mut self, timeout: Duration) -> Result<bool, LockError>;

    /// Whether this session has the lock.
    fn is_ours(&mut self) -> Result<bool, LockError>;

    /// Whether this session had the lock, which now is free.
    fn release(&mut self) -> Result<bool, LockError>;
}

type Call = Box<dyn FnOnce(&mut Option<Box<dyn LockSession>>) + Send>;

/// The thread that has a lock's connection. Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct Session {
    calls: Sender<Call>,
    /// A call has not come back: what it may return is worth nothing.
    is_given_up: Arc<AtomicBool>,
    clock: Clock,
}

/// Why there is no answer.
pub(super) enum NoAnswer {
    TimedOut,
    Cancelled,
}

impl From<NoAnswer> for LockError {
    fn from(why: NoAnswer) -> LockError {
        match why {
            NoAnswer::TimedOut => LockError::Timeout,
            NoAnswer::Cancelled => LockError::Stopped,
        }
    }
}

impl Session {
    pub(super) fn start(clock: &Clock) -> Result<Session, LockError> {
        let (calls, inbox) = crossbeam_channel::unbounded::<Call>();
        let is_given_up = Arc::new(AtomicBool::new(false));
        let given_up = Arc::clone(&is_given_up);
        thread::Builder::new()
            .name("lease-lock".into())
            .stack_size(STACK)
            .spawn(move || {
                let mut session = None;
                for call in inbox {
                    let done = catch_unwind(AssertUnwindSafe(|| call(&mut session)));
                    if done.is_err() || given_up.load(Ordering::Acquire) {
                        return;
                    }
                }
            })
            .map_err(|error| LockError::Spawn(Arc::new(error)))?;
        Ok(Session {
            calls,
            is_given_up,
            clock: clock.clone(),
        })
    }

    /// Asks, and waits for the answer until `bound` is over or it is stopped. Without an answer
    /// the session is given up.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        bound: Duration,
        stop: Option<&StopToken>,
        question: impl FnOnce(&mut Option<Box<dyn LockSession>>) -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        let until = self.clock.now().after(bound);
        let (reply, answer) = crossbeam_channel::bounded(1);
        let call: Call = Box::new(move |session| drop(reply.send(question(session))));
        if self.is_given_up.load(Ordering::Acquire) || self.calls.send(call).is_err() {
            return Err(NoAnswer::TimedOut);
        }
        let mut select = Select::new();
        select.recv(&answer);
        if let Some(stop) = stop {
            select.recv(stop.receiver());
        }
        loop {
            match select.ready_timeout(self.clock.nap(until)) {
                Ok(0) => match answer.recv() {
                    Ok(answer) => return Ok(answer),
                    Err(_) => break Err(NoAnswer::TimedOut),
                },
                Ok(_) => break Err(NoAnswer::Cancelled),
                Err(_) if self.clock.now() >= until => break Err(NoAnswer::TimedOut),
                Err(_) => {}
            }
        }
        .inspect_err(|_| {
            self.is_given_up.store(true, Ordering::Release);
            // Where the answer came all the same the thread waits for another call: it looks again.
            let _ = self.calls.send(Box::new(|_| {}));
        })
    }
}
