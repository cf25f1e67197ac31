//! Work under a held lease, on the caller's thread.
//!
//! Invariant: `run` returns when the work has returned, never before; a panic of the work goes on
//! only after the lease was given back.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::error::{Error, Lost, chain};
use crate::guard::is_in_transaction;
use crate::lease::HeldLease;
use crate::leases::{LeaseRecord, Leases};
use crate::tenure::Tenure;

impl Leases {
    /// Runs `work` under `name` if nobody holds it, on the calling thread, and gives the name back.
    ///
    /// The name is claimed once, without waiting, and held while the work runs, as by
    /// [`HeldLease::run`]. It is not re-entrant: within the work the name is held. It keeps two from
    /// working at once, not from working one after the other.
    ///
    /// # Blocking
    ///
    /// As long as the work; a [claim](Leases::try_claim) before it, and a read if that is refused; a
    /// [release](crate::Lease::release) after it.
    ///
    /// # Errors
    ///
    /// - [`RunError::Held`], with the record of who holds it.
    /// - [`RunError::Lost`] when the lease was lost on the way, with what the work returned: another
    ///   may have been at the same work meanwhile.
    /// - [`RunError::Failed`]: the work was not run. [`Error::InTransaction`] on a thread that has a
    ///   guarded transaction open, before anything is sent: the lease would end before that is
    ///   committed. Else as [`try_claim`](Leases::try_claim) and [`Lease::hold`](crate::Lease::hold).
    ///
    /// # Panics
    ///
    /// As [`HeldLease::run`].
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("leases.db");
    /// # let leases = diesel_lease::Leases::connect(path.to_str().unwrap())?;
    /// # leases.migrate()?;
    /// use diesel_lease::RunError;
    ///
    /// match leases.try_run("rebuild", |tenure| tenure.term()) {
    ///     Ok(term) => assert_eq!(term, 1),
    ///     Err(RunError::Held(record)) => println!("{} is at it", record.instance()),
    ///     Err(error) => return Err(error.into()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn try_run<T>(
        &self,
        name: &str,
        work: impl FnOnce(&Tenure) -> T,
    ) -> Result<T, RunError<T>> {
        if is_in_transaction() {
            return Err(RunError::Failed(Error::InTransaction));
        }
        let lease = loop {
            if let Some(lease) = self.try_claim(name)? {
                break lease;
            }
            // No record: the row was deleted since.
            if let Some(record) = self.inspect(name)? {
                return Err(RunError::Held(record));
            }
        };
        let held = lease.hold()?;
        let output = held.run(work);
        match held.tenure().check() {
            Ok(()) => {}
            Err(lost) => return Err(RunError::Lost { lost, output }),
        }
        let tenure = held.tenure().clone();
        match held.release() {
            Ok(()) => Ok(output),
            Err(Error::Lost(lost)) => Err(RunError::Lost { lost, output }),
            Err(error) => {
                log::warn!(lease = name, term = tenure.term(), instance = self.instance(); "could not release the lease: {}", chain(&error));
                Ok(output)
            }
        }
    }
}

/// Why [`Leases::try_run`] did not do what was asked.
#[derive(Debug)]
#[non_exhaustive]
pub enum RunError<T> {
    /// Somebody holds the name, or did when it was claimed. The work was not run.
    Held(LeaseRecord),
    /// The lease was lost while the work ran.
    Lost {
        /// Which, and why.
        lost: Lost,
        /// What the work returned.
        output: T,
    },
    /// The work was not run.
    Failed(Error),
}

impl<T> From<Error> for RunError<T> {
    fn from(error: Error) -> RunError<T> {
        RunError::Failed(error)
    }
}

impl<T> fmt::Display for RunError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Held(record) => {
                write!(
                    f,
                    "the name {:?} is held by {}",
                    record.name(),
                    record.instance()
                )
            }
            RunError::Lost { .. } => f.write_str("the lease was lost while the work ran"),
            RunError::Failed(_) => f.write_str("the work was not run"),
        }
    }
}

impl<T: fmt::Debug> std::error::Error for RunError<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RunError::Held(_) => None,
            RunError::Lost { lost, .. } => Some(lost),
            RunError::Failed(error) => Some(error),
        }
    }
}

impl HeldLease {
    /// Runs `work` on the calling thread with its [`Tenure`] entered, and returns what it returns.
    ///
    /// When a stop is asked for, [`Tenure::ended`] disconnects, renewals go on, and this waits for
    /// the work without limit. When the lease is lost, the work has
    /// [`Timings::grace`](crate::Timings) to return; past it the library logs `work under a lost lease
    /// will not stop` and calls [`on_work_will_not_stop`](crate::Builder::on_work_will_not_stop), by
    /// default ending the process: running on beside the successor is the one thing a lease must
    /// rule out. If that handler returns, this still waits for the work.
    ///
    /// Under a tenure that is lost already the work is called all the same, and finds it lost.
    ///
    /// The lease is not given back by this; see [`release`](HeldLease::release).
    ///
    /// # Blocking
    ///
    /// As long as the work. No round trips of its own.
    ///
    /// # Panics
    ///
    /// A panic of the work goes on after the lease was given back, which takes as long as
    /// [`Lease::release`](crate::Lease::release).
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("leases.db");
    /// # let leases = diesel_lease::Leases::connect(path.to_str().unwrap())?;
    /// leases.migrate()?;
    /// let held = leases.claim("report")?.hold()?;
    /// let rows = held.run(|tenure| {
    ///     let mut rows = 0;
    ///     while rows < 3 && tenure.check().is_ok() {
    ///         rows += 1;
    ///     }
    ///     rows
    /// });
    /// assert_eq!(rows, 3);
    /// held.release()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn run<T>(&self, work: impl FnOnce(&Tenure) -> T) -> T {
        let tenure = self.tenure();
        let running = self.renewal.running(tenure.store().clock().now());
        let entered = tenure.enter();
        let outcome = catch_unwind(AssertUnwindSafe(|| work(tenure)));
        drop(entered);
        drop(running);
        match outcome {
            Ok(output) => output,
            Err(panic) => {
                self.give_back();
                resume_unwind(panic)
            }
        }
    }
}

#[cfg(test)]
mod tests;
