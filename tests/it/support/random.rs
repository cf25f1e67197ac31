//! Chance that can be repeated.

use std::env;
use std::time::SystemTime;

/// A small generator (SplitMix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// From `DIESEL_LEASE_SEED`, or a new seed. It is printed, for a test that fails.
    pub(crate) fn from_environment() -> Random {
        let seed = env::var("DIESEL_LEASE_SEED").map_or_else(
            |_| {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                now.expect("a time after 1970").as_nanos() as u64
            },
            |seed| seed.parse().expect("a number"),
        );
        println!("DIESEL_LEASE_SEED={seed}");
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}
