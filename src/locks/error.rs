//! What can go wrong with a named lock.

use std::io;
use std::sync::Arc;

use diesel::result::ConnectionError;

use super::key::InvalidKey;
use crate::unsupported::Unsupported;

/// What the calls of named locks fail with. Clones share their sources: every caller of
/// [`release`](super::NamedLock::release) gets the same.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// It was held by another for the whole time, or the server gave no answer in it.
    #[error("the lock was not free within the timeout")]
    Timeout,

    /// The server answered neither that the lock was granted nor that it is held: MySQL's and
    /// MariaDB's NULL, for a statement that was ended from outside, say. It can be tried again.
    #[error("the server did not say whether the lock is free")]
    Failed,

    /// The key breaks the rule. Nothing was sent.
    #[error("the key is not valid")]
    InvalidKey(#[source] InvalidKey),

    /// A timeout of zero: use [`try_acquire`](super::NamedLocks::try_acquire). Nothing was sent.
    #[error("the timeout must be above zero")]
    InvalidTimeout,

    /// The lock is not this process's any more: its session ended, or the server says so.
    #[error("the lock {key:?} is lost")]
    Lost {
        /// Its key.
        key: String,
        /// What showed it, if it was an error.
        #[source]
        source: Option<Arc<LockError>>,
    },

    /// This process was forked by the one that has the lock.
    #[error("this process was forked, and the lock is its parent's")]
    Forked,

    /// The [`StopToken`](crate::StopToken) was stopped.
    #[error("stopped")]
    Stopped,

    /// The server has ended the wait because of a deadlock.
    #[error("the wait for the lock would never have ended")]
    Deadlock,

    /// This database cannot give out locks that others must respect.
    #[error("this database cannot carry named locks")]
    Unsupported(#[source] Arc<Unsupported>),

    /// No connection could be made.
    #[error("could not connect to the database")]
    Connect(#[source] Arc<ConnectionError>),

    /// The database answered with an error, or the connection failed meanwhile.
    #[error("the database could not answer about the lock")]
    Database(#[source] Arc<diesel::result::Error>),

    /// A thread could not be started.
    #[error("a thread could not be started")]
    Spawn(#[source] Arc<io::Error>),
}

impl From<diesel::result::Error> for LockError {
    fn from(error: diesel::result::Error) -> LockError {
        use diesel::result::{DatabaseErrorKind, Error};
        match error {
            Error::DatabaseError(DatabaseErrorKind::SerializationFailure, _) => LockError::Deadlock,
            error => LockError::Database(Arc::new(error)),
        }
    }
}
