//! Times to tables and JSON.

use std::fmt::Write;
use std::time::{Duration, Instant};

use diesel_lease::BoxError;

/// Times of one thing.
#[derive(Debug, Default, Clone)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    pub(crate) const fn new() -> Times {
        Times(Vec::new())
    }

    pub(crate) fn time(
        &mut self,
        act: impl FnOnce() -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let start = Instant::now();
        act()?;
        self.push(start.elapsed());
        Ok(())
    }

    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// In microseconds; `part` of all are not above it.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let mut times = self.0.clone();
        times.sort_unstable();
        let at = (times.len() as f64 * part).ceil() as usize;
        let time = times.get(at.saturating_sub(1));
        time.map_or(0.0, |time| time.as_secs_f64() * 1e6)
    }

    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    pub(crate) fn p99(&self) -> f64 {
        self.quantile(0.99)
    }
}

/// The middle one.
pub(crate) fn middle(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// One JSON object on a line.
pub(crate) fn json(texts: &[(&str, &str)], numbers: &[(&str, f64)]) {
    let mut line = String::new();
    for (key, value) in texts {
        let value = value.replace('\\', "\\\\").replace('"', "\\\"");
        let _ = write!(line, ",\"{key}\":\"{value}\"");
    }
    for (key, value) in numbers {
        let _ = match value.is_finite() {
            true => write!(line, ",\"{key}\":{value:.3}"),
            // JSON has no other word for it.
            false => write!(line, ",\"{key}\":null"),
        };
    }
    println!("{{{}}}", line.trim_start_matches(','));
}
