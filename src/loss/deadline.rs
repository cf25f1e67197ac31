//! Whether a lease is lost, until when it is not, and why it is: one atomic word.
//!
//! Invariant: once lost, always lost, and for one cause. A word below [`CAUSES`] is the cause; any
//! other is the local deadline. Whoever finds a deadline that has passed swaps it to a cause, so the
//! answer is right even if every thread of the library is starved; an extension asks that question
//! first, and never changes a word that is a cause. Nothing here waits.
//!
//! This file stands on its own, so that a test can run it under every interleaving.

use super::{AtomicU64, Ordering};

/// Words below this are causes.
pub(crate) const CAUSES: u64 = 1 << 10;

/// A cause, as a word.
pub(crate) type Code = u64;

pub(crate) struct Deadline(AtomicU64);

impl Deadline {
    pub(crate) fn new(at: u64) -> Deadline {
        debug_assert!(at >= CAUSES);
        Deadline(AtomicU64::new(at))
    }

    /// The deadline, or the cause of the loss. A deadline that has passed at `now` becomes the loss
    /// `passed` first.
    pub(crate) fn look(&self, now: u64, passed: Code) -> Result<u64, Code> {
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            if word < CAUSES {
                return Err(word);
            }
            if now < word {
                return Ok(word);
            }
            match self
                .0
                .compare_exchange(word, passed, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Err(passed),
                Err(other) => word = other,
            }
        }
    }

    /// Moves the deadline to `to`, if it has not passed at `now` and lies before `to`.
    pub(crate) fn extend(&self, now: u64, to: u64, passed: Code) -> Result<(), Code> {
        self.look(now, passed)?;
        let moved = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
                (word >= CAUSES).then(|| word.max(to))
            });
        moved.map(drop)
    }

    /// Makes it lost. True if it was not before: the caller's `cause` is the cause then.
    pub(crate) fn lose(&self, cause: Code) -> bool {
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
                (word >= CAUSES).then_some(cause)
            })
            .is_ok()
    }
}
