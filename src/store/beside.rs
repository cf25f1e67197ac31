//! The fence of a lease whose row is in another database than the work.
//!
//! While the work's transaction commits, a session of the library's has the row locked. It is a
//! session apart from those that renew, one for each commit, and the server ends it when it is silent
//! for a lease: a host that vanishes does not keep the row.
//!
//! Invariant: as long as [`Beside::end`] succeeds, the row was locked from before the COMMIT until
//! after it.
//!
//! Hazard: a process that is stopped for longer than that limit may commit after the lock is gone.
//! It is told so by `end`.

use std::sync::Arc;

use super::line::Failure;
use super::{Act, Error, Store};
use crate::protocol::{Fencing, Session};
use crate::tenure::Tenure;

/// A lease row that is locked.
pub(crate) struct Beside {
    session: Option<Box<dyn Session>>,
    store: Arc<Store>,
}

impl Store {
    /// Locks the row. `None` if the lease is not ours any more.
    pub(crate) fn lock_beside(self: &Arc<Self>, tenure: &Tenure) -> Result<Option<Beside>, Error> {
        let how = self.fencing();
        let store = Arc::clone(self);
        let tenure = tenure.clone();
        self.call(Act::Fence, self.timings.attempt, &[], move |line| {
            let kept = store.spare_session();
            let lock = |session: Option<Box<dyn Session>>| -> Result<_, Failure> {
                let mut session = match session {
                    Some(session) => session,
                    None => line.another_session()?,
                };
                let locked = session.lock(tenure.key(), how).map_err(Failure::Database)?;
                Ok((session, locked))
            };
            // A kept session may have been ended meanwhile.
            let (session, locked) = match kept {
                Some(session) => lock(Some(session)).or_else(|_| lock(None))?,
                None => lock(None)?,
            };
            let beside = Beside {
                session: Some(session),
                store: Arc::clone(&store),
            };
            if locked {
                Ok(Some(beside))
            } else {
                beside.keep();
                Ok(None)
            }
        })
    }

    pub(crate) fn fencing(&self) -> Fencing {
        Fencing {
            idle: self.timings.lease,
            has_snapshot_isolation: self.connector.has_snapshot_isolation(),
        }
    }

    fn spare_session(&self) -> Option<Box<dyn Session>> {
        self.spare.lock().take()
    }
}

impl Beside {
    /// Ends the lock. An error means that it may have ended earlier.
    pub(crate) fn end(mut self) -> Result<(), Error> {
        let session = self.session.take();
        let store = Arc::clone(&self.store);
        self.store
            .call(Act::Fence, self.store.timings.attempt, &[], move |_| {
                let mut ended = Beside { session, store };
                if let Some(session) = &mut ended.session {
                    session.unlock().map_err(Failure::Database)?;
                }
                ended.keep();
                Ok(())
            })
    }

    /// Keeps the session for the next commit. On a thread that may block.
    fn keep(mut self) {
        let session = self.session.take();
        let other = std::mem::replace(&mut *self.store.spare.lock(), session);
        drop(other);
    }
}

impl Drop for Beside {
    /// Closing ends the lock, and may block.
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            let _ = self
                .store
                .pool
                .tell(self.store.timings.attempt, move |_| drop(session));
        }
    }
}
