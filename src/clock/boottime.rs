//! `CLOCK_BOOTTIME`: goes on while the machine is suspended ([`clock_gettime(2)`]).
//!
//! [`clock_gettime(2)`]: https://man7.org/linux/man-pages/man2/clock_gettime.2.html

use rustix::time::{ClockId, clock_gettime};

pub(super) fn nanos() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    // Both are never negative for a clock that counts from the boot.
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
