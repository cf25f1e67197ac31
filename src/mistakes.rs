//! What can be wrong with the jobs of a schedule.

use std::fmt;

use crate::name::InvalidName;

/// Jobs that could not be started, each with every mistake in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidSchedule(pub(crate) Vec<(String, Mistake)>);

impl InvalidSchedule {
    /// The name of the job, and what is wrong with it.
    #[must_use]
    pub fn mistakes(&self) -> &[(String, Mistake)] {
        &self.0
    }
}

impl fmt::Display for InvalidSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (job, mistake)) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str("; ")?;
            }
            write!(f, "job {job:?}: {mistake}")?;
        }
        Ok(())
    }
}

impl std::error::Error for InvalidSchedule {}

/// Something wrong with a job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mistake {
    /// Its name cannot be a lease's.
    #[error("{0}")]
    Name(InvalidName),
    /// Another job has the same name.
    #[error("another job has the same name")]
    Twice,
    /// Its expression cannot be read.
    #[error("its expression cannot be read: {0}")]
    Expression(String),
    /// There is no such time zone.
    #[error("there is no time zone {0:?}")]
    Zone(String),
    /// The zone of the machine was asked for.
    #[error("the machine's own time zone may differ between replicas: name one")]
    LocalZone,
}
