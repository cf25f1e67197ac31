//! Slots: each instant of a schedule is claimed once in the cluster.
//!
//! The row of a name keeps the last instant that was claimed, whether its round has come to its end,
//! and whether it was claimed a second time. A round that was cut short, by a crash, a loss or a
//! release, is found by its mark and can be run once more, until a later instant is claimed.
//!
//! Invariant: no instant is claimed as a first round twice, and none after a later one; a claim that
//! nobody got to use leaves no trace.
//!
//! Hazard: a round whose end could not be recorded is run once more. Work must bear that.

use chrono::{DateTime, Utc};

use crate::error::Error;
use crate::lease::{HeldLease, Lease};
use crate::leases::Leases;
use crate::name::validate_name;
use crate::protocol::Row;
use crate::store::Cancel;
use crate::store::claim::What;

/// Why an instant cannot be a slot: it is at or before the start of 1970, which the row keeps for
/// "never".
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the instant {0} is not after 1970-01-01T00:00:00Z")]
pub struct InvalidSlot(DateTime<Utc>);

/// The instant in whole milliseconds, which is how it is kept.
fn slot_ms(at: DateTime<Utc>) -> Result<i64, Error> {
    let ms = at.timestamp_millis();
    if ms > 0 {
        Ok(ms)
    } else {
        Err(Error::InvalidSlot(InvalidSlot(at)))
    }
}

/// An instant from the database. `None` for one that no slot can be.
pub(crate) fn instant(ms: i64) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp_millis(ms).filter(|_| ms > 0)
}

/// A round that was cut short.
///
/// From [`Leases::unfinished_slots`] it is one that can be run again; from [`Lease::superseded`] it is
/// one that never will be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    name: String,
    slot: DateTime<Utc>,
    term: i64,
    is_rerun: bool,
}

impl Unfinished {
    /// The name it was claimed under.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its instant.
    #[must_use]
    pub fn slot(&self) -> DateTime<Utc> {
        self.slot
    }

    /// Whether it was its second round that was cut short.
    #[must_use]
    pub fn is_rerun(&self) -> bool {
        self.is_rerun
    }

    pub(crate) fn slot_ms(&self) -> i64 {
        self.slot.timestamp_millis()
    }

    pub(crate) fn term(&self) -> i64 {
        self.term
    }

    /// What a claim of a later instant gives up.
    pub(crate) fn superseded(name: &str, row: &Row) -> Option<Unfinished> {
        let slot = instant(row.slot_ms).filter(|_| row.unfinished_slot_ms == row.slot_ms)?;
        let is_rerun = row.rerun_slot_ms == row.slot_ms;
        Some(Unfinished {
            name: name.to_owned(),
            slot,
            term: row.term,
            is_rerun,
        })
    }
}

/// How many names one statement asks for: below what any SQLite takes as parameters
/// ([limits](https://www.sqlite.org/limits.html#max_variable_number)).
pub(crate) const NAMES_AT_ONCE: usize = 900;

impl Leases {
    /// Claims `name` for the instant `at`, if nobody holds it and no such or later instant was
    /// claimed. `None` otherwise.
    ///
    /// The lease is for one round: [`finish`](Lease::finish) it when that has come to its end. A lease
    /// that is released, dropped or lost before leaves the instant unfinished, to be found by
    /// [`unfinished_slots`](Leases::unfinished_slots). Instants are kept in whole milliseconds.
    ///
    /// # Blocking
    ///
    /// Two round trips, three for a name that was never claimed; at most
    /// [`Timings::attempt`](crate::Timings).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSlot`] and [`Error::InvalidName`] before anything is sent; else as
    /// [`try_claim`](Leases::try_claim). A claim that was carried out all the same and whose answer is
    /// not taken is undone, so that the instant can be claimed again. If the database cannot be
    /// reached for that either, the instant is left unfinished.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("leases.db");
    /// # let leases = diesel_lease::Leases::connect(path.to_str().unwrap())?;
    /// # leases.migrate()?;
    /// let noon = "2026-03-29T12:00:00Z".parse()?;
    /// if let Some(lease) = leases.try_claim_slot("report", noon)? {
    ///     // … the round …
    ///     lease.finish(None)?;
    /// }
    /// assert!(leases.try_claim_slot("report", noon)?.is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub fn try_claim_slot(&self, name: &str, at: DateTime<Utc>) -> Result<Option<Lease>, Error> {
        self.claim_slot(name, at, Cancel::OnStop)
    }

    pub(crate) fn claim_slot(
        &self,
        name: &str,
        at: DateTime<Utc>,
        cancel: Cancel,
    ) -> Result<Option<Lease>, Error> {
        validate_name(name).map_err(Error::InvalidName)?;
        let slot_ms = slot_ms(at)?;
        self.claim_once(What::Slot(name.to_owned(), slot_ms), cancel)
    }

    /// Claims the instant of a round that was cut short a second time. `None` if it was claimed again
    /// or finished meanwhile, if a later instant was claimed, or if the name is or was held since.
    ///
    /// # Blocking
    ///
    /// One round trip, at most [`Timings::attempt`](crate::Timings).
    ///
    /// # Errors
    ///
    /// As [`try_claim_slot`](Leases::try_claim_slot).
    pub fn try_claim_rerun(&self, found: &Unfinished) -> Result<Option<Lease>, Error> {
        self.claim_once(What::Rerun(found.clone()), Cancel::OnStop)
    }

    /// Finds the rounds of `names` that were cut short and can be run once more: nobody is at them,
    /// and they were not claimed a second time.
    ///
    /// # Blocking
    ///
    /// One round trip for up to 900 names, none for none; at most [`Timings::attempt`](crate::Timings).
    ///
    /// # Errors
    ///
    /// As [`try_claim`](Leases::try_claim).
    pub fn unfinished_slots(&self, names: &[&str]) -> Result<Vec<Unfinished>, Error> {
        for name in names {
            validate_name(name).map_err(Error::InvalidName)?;
        }
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let found = self.store().cut_short(names, &self.stops)?;
        Ok(found
            .into_iter()
            .filter_map(|(name, term, slot_ms)| {
                let slot = instant(slot_ms)?;
                Some(Unfinished {
                    name,
                    slot,
                    term,
                    is_rerun: false,
                })
            })
            .collect())
    }

    /// The last instant that `name` was claimed for or that a finished round passed. `None` if it was
    /// never claimed for any.
    ///
    /// # Blocking
    ///
    /// One round trip, at most [`Timings::attempt`](crate::Timings).
    ///
    /// # Errors
    ///
    /// As [`try_claim`](Leases::try_claim).
    pub fn last_slot(&self, name: &str) -> Result<Option<DateTime<Utc>>, Error> {
        Ok(self.inspect(name)?.and_then(|record| record.last_slot()))
    }
}

impl Lease {
    /// Records that the round of this lease's instant has come to its end, and gives the name back.
    ///
    /// `passed` is the last instant of the schedule that has come by meanwhile, if any: it and those
    /// before it are then claimed by nobody. One that is still to come by the database's clock is
    /// ignored.
    ///
    /// # Blocking
    ///
    /// One round trip, two when the lease is not this holder's any more; at most the shorter of
    /// [`Timings::attempt`](crate::Timings) and `lease - deadline`.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when it was lost: the round is recorded as finished all the same, unless a later
    /// instant was claimed, and `passed` is not. [`Error::NotASlot`] for a lease that was not claimed
    /// for an instant, and [`Error::InvalidSlot`]; the lease is given back like one that is dropped.
    /// After any other error the instant may be left unfinished.
    pub fn finish(self, passed: Option<DateTime<Utc>>) -> Result<(), Error> {
        let Some(slot) = self.slot() else {
            return Err(Error::NotASlot);
        };
        let passed_ms = passed.map(slot_ms).transpose()?;
        self.give_back_finished(slot.timestamp_millis(), passed_ms.unwrap_or(0))
    }
}

impl HeldLease {
    /// Ends the renewals, records that the round has come to its end, and gives the name back. See
    /// [`Lease::finish`].
    ///
    /// # Blocking
    ///
    /// As [`Lease::finish`].
    ///
    /// # Errors
    ///
    /// As [`Lease::finish`].
    pub fn finish(self, passed: Option<DateTime<Utc>>) -> Result<(), Error> {
        self.stop().finish(passed)
    }
}
