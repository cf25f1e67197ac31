//! How long everything may take, and the relations that must hold between those times.
//!
//! Invariant: a holder gives itself up (deadline) and its work has had its time to stop (grace)
//! before the database lets anybody else in (lease).

use std::time::Duration;

/// How long a lease lasts, how often it is renewed, and when its holder gives it up.
///
/// All processes that share names should use the same, and must agree on `lease`'s order of
/// magnitude: each row carries its own expiry, so different timings are safe, but a waiter polls
/// and a failure is noticed by these.
///
/// [`Builder::build`](crate::Builder::build) refuses anything but `renew < deadline`,
/// `attempt <= deadline`, `deadline + grace <= lease`, each above zero and below a day.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timings {
    /// How long after a claim or a renewal the database refuses the name to others, in its own
    /// time. This is the take-over time after a crash. Defaults to 15 s.
    pub lease: Duration,
    /// From the start of one renewal to the start of the next. Defaults to 2 s: seven tries fit
    /// into a lease.
    pub renew: Duration,
    /// How long one call waits for the database. Defaults to 5 s.
    ///
    /// A row that is locked is waited for a second, or half of this if that is less. MySQL and MariaDB
    /// know whole seconds only: with 1 s or less a claim that meets a locked row there is `TimedOut`,
    /// where it is "held" otherwise.
    pub attempt: Duration,
    /// How long after the start of the last renewal that succeeded the holder gives itself up, in
    /// this machine's time. Defaults to 10 s.
    pub deadline: Duration,
    /// How long work may go on after its lease was lost before
    /// [`on_work_will_not_stop`](crate::Builder::on_work_will_not_stop) is called. Defaults to 5 s.
    pub grace: Duration,
}

impl Default for Timings {
    fn default() -> Timings {
        Timings {
            lease: Duration::from_secs(15),
            renew: Duration::from_secs(2),
            attempt: Duration::from_secs(5),
            deadline: Duration::from_secs(10),
            grace: Duration::from_secs(5),
        }
    }
}

/// A rule that [`Timings`] break.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidTimings {
    /// A time is zero, or a day or longer.
    #[error("`{name}` must be above zero and below a day, and is {is:?}")]
    OutOfRange {
        /// The field.
        name: &'static str,
        /// Its value.
        is: Duration,
    },
    /// `renew` must be shorter than `deadline`, or no renewal could come in time.
    #[error("`renew` ({renew:?}) must be shorter than `deadline` ({deadline:?})")]
    RenewNotBeforeDeadline {
        /// As given.
        renew: Duration,
        /// As given.
        deadline: Duration,
    },
    /// `attempt` must not be longer than `deadline`.
    #[error("`attempt` ({attempt:?}) must not be longer than `deadline` ({deadline:?})")]
    AttemptBeyondDeadline {
        /// As given.
        attempt: Duration,
        /// As given.
        deadline: Duration,
    },
    /// `deadline` and `grace` together must not be longer than `lease`, or work could still be
    /// stopping when the next holder begins.
    #[error(
        "`deadline` ({deadline:?}) and `grace` ({grace:?}) together must not be longer than `lease` ({lease:?})"
    )]
    GraceBeyondLease {
        /// As given.
        deadline: Duration,
        /// As given.
        grace: Duration,
        /// As given.
        lease: Duration,
    },
}

const A_DAY: Duration = Duration::from_secs(24 * 60 * 60);

impl Timings {
    pub(crate) fn validate(&self) -> Result<(), InvalidTimings> {
        let Timings {
            lease,
            renew,
            attempt,
            deadline,
            grace,
        } = *self;
        let all = [
            ("lease", lease),
            ("renew", renew),
            ("attempt", attempt),
            ("deadline", deadline),
            ("grace", grace),
        ];
        if let Some(&(name, is)) = all.iter().find(|(_, is)| is.is_zero() || *is >= A_DAY) {
            return Err(InvalidTimings::OutOfRange { name, is });
        }
        if renew >= deadline {
            return Err(InvalidTimings::RenewNotBeforeDeadline { renew, deadline });
        }
        if attempt > deadline {
            return Err(InvalidTimings::AttemptBeyondDeadline { attempt, deadline });
        }
        if deadline + grace > lease {
            return Err(InvalidTimings::GraceBeyondLease {
                deadline,
                grace,
                lease,
            });
        }
        Ok(())
    }

    /// The lease as the database keeps it. Rounded up to whole milliseconds, so that the stored
    /// expiry never lies before what the holder counts on.
    pub(crate) fn lease_ms(&self) -> i64 {
        whole_millis(self.lease) as i64
    }

    /// How long giving a lease back may take: what is sure to be left of it then.
    pub(crate) fn give_back(&self) -> Duration {
        self.attempt.min(self.lease - self.deadline)
    }

    /// How long a waiting claim pauses between two looks.
    pub(crate) fn poll(&self) -> Duration {
        self.renew / 2
    }
}

/// Rounded up: what is to last as long as it was asked for must not end sooner.
pub(crate) fn whole_millis(duration: Duration) -> u128 {
    duration.as_nanos().div_ceil(1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Timings)) -> InvalidTimings {
        let mut timings = Timings::default();
        change(&mut timings);
        timings.validate().expect_err("it was accepted")
    }

    #[test]
    fn each_rule_is_named() {
        assert_eq!(Timings::default().validate(), Ok(()));
        let ms = Duration::from_millis;
        for wrong in [Duration::ZERO, A_DAY, Duration::MAX] {
            let set: [fn(&mut Timings, Duration); 5] = [
                |t, d| t.lease = d,
                |t, d| t.renew = d,
                |t, d| t.attempt = d,
                |t, d| t.deadline = d,
                |t, d| t.grace = d,
            ];
            for set in set {
                let error = refused(|t| set(t, wrong));
                assert!(matches!(error, InvalidTimings::OutOfRange { is, .. } if is == wrong));
            }
        }
        assert!(matches!(
            refused(|t| t.renew = t.deadline),
            InvalidTimings::RenewNotBeforeDeadline { .. }
        ));
        assert!(matches!(
            refused(|t| t.attempt = t.deadline + ms(1)),
            InvalidTimings::AttemptBeyondDeadline { .. }
        ));
        for change in [
            (|t| t.deadline = t.lease) as fn(&mut Timings),
            |t| t.grace += Duration::from_nanos(1),
            |t| t.lease = Duration::from_micros(1),
        ] {
            let error = refused(change);
            assert!(
                matches!(error, InvalidTimings::GraceBeyondLease { .. }),
                "{error}"
            );
        }
    }

    #[test]
    fn the_stored_lease_is_rounded_up() {
        let timings = |lease| Timings {
            lease,
            ..Timings::default()
        };
        assert_eq!(
            timings(Duration::from_nanos(15_000_000_001)).lease_ms(),
            15_001
        );
        assert_eq!(timings(Duration::from_secs(15)).lease_ms(), 15_000);
        assert_eq!(
            timings(A_DAY - Duration::from_nanos(1)).lease_ms(),
            86_400_000
        );
    }

    #[test]
    fn giving_back_fits_into_what_is_left() {
        assert_eq!(Timings::default().give_back(), Duration::from_secs(5));
        let timings = Timings {
            lease: Duration::from_secs(20),
            ..Timings::default()
        };
        assert_eq!(timings.give_back(), Duration::from_secs(5));
        let timings = Timings {
            grace: Duration::from_secs(1),
            lease: Duration::from_secs(11),
            ..Timings::default()
        };
        assert_eq!(timings.give_back(), Duration::from_secs(1));
    }
}
