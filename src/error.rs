//! What can go wrong, said once.
//!
//! Invariant: "held by another" is an answer and never an error; no text here holds a database URL
//! or a password; a source is returned by `source()` and not printed as well.

use std::fmt;
use std::io;

use diesel::result::ConnectionError;

use crate::loss::LossCause;
use crate::mistakes::InvalidSchedule;
use crate::name::InvalidName;
use crate::slot::InvalidSlot;
use crate::timings::InvalidTimings;
use crate::unsupported::Unsupported;

/// Any error that can be sent to another thread: what work may fail with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An act of the protocol, as errors name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Act {
    /// Claiming a name.
    Claim,
    /// Renewing a lease.
    Renew,
    /// Asking whether a lease is still held.
    Verify,
    /// Giving a lease back.
    Release,
    /// Recording the end of a round.
    Finish,
    /// Locking a lease row around a commit.
    Fence,
    /// Reading one record or all of them.
    Inspect,
    /// Taking a name from its holder.
    ForceRelease,
    /// Creating or updating the table.
    Migrate,
    /// Asking whether the database can carry leases.
    Check,
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Act::Claim => "claim a name",
            Act::Renew => "renew a lease",
            Act::Verify => "verify a lease",
            Act::Release => "give a lease back",
            Act::Finish => "record the end of a round",
            Act::Fence => "lock a lease row around a commit",
            Act::Inspect => "read lease records",
            Act::ForceRelease => "force a name free",
            Act::Migrate => "create or update the lease table",
            Act::Check => "check whether the database can carry leases",
        })
    }
}

/// What this crate's calls fail with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name breaks the rule of [`validate_name`](crate::validate_name). Nothing was sent.
    #[error("the lease name is not valid")]
    InvalidName(#[source] InvalidName),

    /// The timings contradict each other.
    #[error("the timings are not valid")]
    InvalidTimings(#[source] InvalidTimings),

    /// The instance is not 1 to 191 bytes, as a name.
    #[error("the instance is not valid")]
    InvalidInstance(#[source] InvalidName),

    /// Jobs could not be scheduled. Nothing was started.
    #[error("the schedule is not valid")]
    InvalidSchedule(#[source] InvalidSchedule),

    /// The instant cannot be one of a schedule. Nothing was sent.
    #[error("the instant is not valid")]
    InvalidSlot(#[source] InvalidSlot),

    /// A lease was to be finished that was not claimed for an instant. It was given back.
    #[error("the lease was not claimed for an instant")]
    NotASlot,

    /// The lease is not this holder's any more. Expect it wherever a lease is used.
    #[error(transparent)]
    Lost(Lost),

    /// This database cannot carry leases, for the reason given.
    #[error("this database cannot carry leases")]
    Unsupported(#[source] Unsupported),

    /// There is no table `diesel_leases` in sight. See [`Leases::migrate`](crate::Leases::migrate).
    #[error("there is no table diesel_leases in this database: run the migrations first")]
    SchemaMissing,

    /// The database gave no answer within the bound of the call, or too late a one. Whether the
    /// statement is carried out is not known; a claim that was is given back or runs out.
    #[error("the database gave no answer in time")]
    TimedOut,

    /// The [`StopToken`](crate::StopToken) of these leases was stopped.
    #[error("stopped")]
    Stopped,

    /// Work was to be run under a lease within a transaction that is guarded and still open: the lease
    /// would end before that transaction is committed. Nothing was sent.
    #[error("a lease must not begin and end within an open transaction")]
    InTransaction,

    /// A thread could not be started.
    #[error("a thread could not be started")]
    Spawn(#[source] io::Error),

    /// No connection could be made.
    #[error("could not connect to the database")]
    Connect(#[source] ConnectionError),

    /// The database answered with an error, or the connection failed meanwhile.
    #[error("could not {act}")]
    Database {
        /// What was tried.
        act: Act,
        /// What Diesel said.
        source: diesel::result::Error,
    },

    /// The migrations failed.
    #[error("could not create or update the lease table")]
    Migration(#[source] BoxError),
}

impl Error {
    /// Whether a lease was lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Error::Lost(_))
    }

    /// Whether the same call may succeed later with nothing changed by hand: [`TimedOut`], [`Connect`],
    /// [`Database`] and [`Spawn`].
    ///
    /// [`TimedOut`]: Error::TimedOut
    /// [`Connect`]: Error::Connect
    /// [`Database`]: Error::Database
    /// [`Spawn`]: Error::Spawn
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Error::TimedOut | Error::Connect(_) | Error::Database { .. } | Error::Spawn(_)
        )
    }
}

impl From<Lost> for Error {
    fn from(lost: Lost) -> Error {
        Error::Lost(lost)
    }
}

/// A lease was lost: which, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the lease {name:?} of term {term} is lost: {cause}")]
pub struct Lost {
    pub(crate) name: String,
    pub(crate) term: u64,
    pub(crate) cause: LossCause,
}

impl Lost {
    /// The name that was leased.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The term that was lost.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Why.
    #[must_use]
    pub fn cause(&self) -> LossCause {
        self.cause
    }

    /// Finds a loss in an error of Diesel's, where guarded connections put it: as
    /// [`QueryBuilderError`](diesel::result::Error::QueryBuilderError), also inside
    /// [`RollbackErrorOnCommit`](diesel::result::Error::RollbackErrorOnCommit).
    #[must_use]
    pub fn from_diesel(error: &diesel::result::Error) -> Option<&Lost> {
        inside_diesel(error)
    }

    /// Finds a loss in `error` or in what it was caused by. [`Error::Lost`] is one.
    #[must_use]
    pub fn find<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Lost> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(Error::Lost(lost)) = error.downcast_ref() {
                return Some(lost);
            }
            if let Some(lost) = error.downcast_ref() {
                return Some(lost);
            }
            if let Some(lost) = error.downcast_ref().and_then(Lost::from_diesel) {
                return Some(lost);
            }
            next = error.source();
        }
        None
    }
}

impl From<Lost> for diesel::result::Error {
    fn from(lost: Lost) -> diesel::result::Error {
        diesel::result::Error::QueryBuilderError(Box::new(lost))
    }
}

/// Whether a transaction was committed is not known: the reply to its COMMIT was lost, or the lock of
/// a lease in another database ended before it was released.
///
/// It is in a [`QueryBuilderError`](diesel::result::Error::QueryBuilderError) of Diesel's.
#[derive(Debug, thiserror::Error)]
#[error("whether the transaction was committed is not known")]
pub struct CommitUnknown {
    source: BoxError,
}

impl CommitUnknown {
    pub(crate) fn new(source: impl Into<BoxError>) -> CommitUnknown {
        CommitUnknown {
            source: source.into(),
        }
    }

    /// Finds it in an error of Diesel's.
    #[must_use]
    pub fn from_diesel(error: &diesel::result::Error) -> Option<&CommitUnknown> {
        inside_diesel(error)
    }
}

impl From<CommitUnknown> for diesel::result::Error {
    fn from(unknown: CommitUnknown) -> diesel::result::Error {
        diesel::result::Error::QueryBuilderError(Box::new(unknown))
    }
}

fn inside_diesel<E: std::error::Error + 'static>(error: &diesel::result::Error) -> Option<&E> {
    use diesel::result::Error as Diesel;
    match error {
        Diesel::QueryBuilderError(inner) => inner.downcast_ref(),
        Diesel::RollbackErrorOnCommit {
            rollback_error,
            commit_error,
        } => inside_diesel(commit_error).or_else(|| inside_diesel(rollback_error)),
        _ => None,
    }
}

/// Why work must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Ending {
    /// Its lease was lost: another may be running already.
    #[error("the lease is lost: {0}")]
    Lost(LossCause),
    /// It was asked to stop. The lease is held until it has returned.
    #[error("asked to stop")]
    Stopped,
}

/// An error and its sources on one line, for log entries.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}
