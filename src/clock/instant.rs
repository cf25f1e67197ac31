//! `Instant`, where there is nothing better: on some systems it stands still during a suspend, and
//! a holder that slept finds out by its first renewal only.
#![expect(clippy::disallowed_methods, reason = "this is the clock")]

use std::sync::LazyLock;
use std::time::Instant;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

pub(super) fn nanos() -> u64 {
    START.elapsed().as_nanos() as u64
}
