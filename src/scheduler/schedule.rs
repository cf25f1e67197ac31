//! When a job is due: a cron expression in a time zone, or multiples of a duration.
//!
//! Invariant: instants are whole seconds in UTC, and `after` never answers one that is not later than
//! what it was asked for.
//!
//! Hazard: around a change of daylight saving, an expression with a single time of day (one second, one
//! minute, one hour) runs once, right after the hour that is left out or at the first of the two. Any
//! other runs whenever the local time is one of its own: not at all in the hour that is left out, and
//! twice in the repeated one.

use std::time::Duration;

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use chrono_tz::Tz;
use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};

use crate::mistakes::Mistake;

#[derive(Debug, Clone)]
pub(super) struct Schedule {
    kind: Kind,
    zone: Tz,
}

#[derive(Debug, Clone)]
enum Kind {
    Cron(Box<Cron>),
    /// In seconds.
    Every(i64),
}

impl Schedule {
    pub(super) fn parse(expression: &str, zone: Tz) -> Result<Schedule, Mistake> {
        let expression = expression.trim();
        let kind = match expression.strip_prefix("@every") {
            Some(duration) => Kind::Every(whole_seconds(duration.trim())?),
            None => {
                let expression = if expression == "@midnight" {
                    "@daily"
                } else {
                    expression
                };
                let parser = CronParser::builder()
                    .seconds(Seconds::Optional)
                    .year(Year::Disallowed)
                    .build();
                let cron = parser
                    .parse(expression)
                    .map_err(|error| Mistake::Expression(error.to_string()))?;
                Kind::Cron(Box::new(cron))
            }
        };
        Ok(Schedule { kind, zone })
    }

    /// The first instant after `time`. `None` when there is no further one.
    pub(super) fn after(&self, time: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let time = time.trunc_subsecs(0);
        match &self.kind {
            Kind::Every(seconds) => {
                let next = (time.timestamp().div_euclid(*seconds) + 1).checked_mul(*seconds)?;
                DateTime::from_timestamp(next, 0)
            }
            Kind::Cron(cron) => {
                let next = cron
                    .find_next_occurrence(&time.with_timezone(&self.zone), false)
                    .ok()?;
                Some(next.to_utc()).filter(|next| *next > time)
            }
        }
    }

    /// The last instant at or before `time`, if it lies no further back than `within`.
    pub(super) fn last(&self, time: DateTime<Utc>, within: Duration) -> Option<DateTime<Utc>> {
        let whole = time.trunc_subsecs(0);
        let last = match &self.kind {
            Kind::Every(seconds) => {
                DateTime::from_timestamp(whole.timestamp().div_euclid(*seconds) * seconds, 0)?
            }
            Kind::Cron(cron) => {
                let zoned = whole.with_timezone(&self.zone);
                cron.find_previous_occurrence(&zoned, true).ok()?.to_utc()
            }
        };
        let within = TimeDelta::from_std(within).unwrap_or(TimeDelta::MAX);
        Some(last).filter(|last| *last <= time && time - *last <= within)
    }

    /// How many instants there are after `from`, up to `to`; counted no further than `limit`.
    pub(super) fn count(&self, from: DateTime<Utc>, to: DateTime<Utc>, limit: usize) -> usize {
        let later = std::iter::successors(self.after(from), |at| self.after(*at));
        later.take_while(|at| *at <= to).take(limit).count()
    }
}

/// The time zone of that name.
pub(super) fn zone(name: &str) -> Result<Tz, Mistake> {
    if name.eq_ignore_ascii_case("local") {
        return Err(Mistake::LocalZone);
    }
    name.parse().map_err(|_| Mistake::Zone(name.to_owned()))
}

fn whole_seconds(text: &str) -> Result<i64, Mistake> {
    let wrong = |why: String| Mistake::Expression(format!("@every {text}: {why}"));
    let duration = humantime::parse_duration(text).map_err(|error| wrong(error.to_string()))?;
    if duration.is_zero() || duration.subsec_nanos() != 0 {
        return Err(wrong("a number of whole seconds is needed".to_owned()));
    }
    i64::try_from(duration.as_secs()).map_err(|_| wrong("it is too long".to_owned()))
}
