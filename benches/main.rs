//! What a lease costs, beside what the database itself costs. How to run it and what came out is in
//! `README.md` here.

#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

use std::env;

use diesel_lease::BoxError;

use support::engines::Engine;

mod modes;
mod support;

const USAGE: &str = "usage: cargo bench --all-features -- [MODE...] [--quick] [--engine NAME...]
modes: acts (default), guard (default), threads (default), contend, locks, takeover, leases
engines: sqlite, postgres, mariadb, mysql; without --engine those whose URL is in the environment:
  DIESEL_LEASE_PG_URL, DIESEL_LEASE_MARIADB_URL, DIESEL_LEASE_MYSQL_URL";

/// How long to measure.
#[derive(Clone, Copy)]
struct Effort {
    runs: usize,
    rounds: usize,
    seconds: u64,
    /// How many leases are held, and for how many seconds.
    leases: &'static [(usize, u64)],
}

const FULL: Effort = Effort {
    runs: 15,
    rounds: 500,
    seconds: 60,
    leases: &[(10, 60), (100, 60), (1_000, 300), (10_000, 300)],
};
const QUICK: Effort = Effort {
    runs: 3,
    rounds: 100,
    seconds: 5,
    leases: &[(10, 5), (100, 5)],
};

fn main() -> Result<(), BoxError> {
    if let Some(part) = modes::contend::Part::of_this_process() {
        return part.play();
    }
    let (mut modes, mut engines, mut effort) = (Vec::new(), Vec::new(), FULL);
    let mut arguments = env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => effort = QUICK,
            "--engine" => engines.push(arguments.next().ok_or(USAGE)?),
            // Cargo's own.
            "--bench" => {}
            "acts" | "guard" | "threads" | "contend" | "locks" | "takeover" | "leases" => {
                modes.push(argument)
            }
            _ => return Err(USAGE.into()),
        }
    }
    let runs = |mode: &str, by_default: bool| {
        if modes.is_empty() {
            by_default
        } else {
            modes.iter().any(|asked| asked == mode)
        }
    };
    if runs("acts", true) {
        for engine in Engine::all(&engines)? {
            modes::acts::run(&engine, effort)?;
        }
    }
    for engine in Engine::all(&engines)? {
        if runs("guard", true) {
            modes::guard::run(&engine, effort)?;
        }
        if runs("contend", false) {
            modes::contend::run(&engine, effort)?;
        }
        if runs("locks", false) {
            modes::locks::run(&engine, effort)?;
        }
        if runs("takeover", false) {
            modes::takeover::run(&engine)?;
        }
        if runs("leases", false) {
            modes::leases::run(&engine, effort)?;
        }
    }
    if runs("threads", true) {
        modes::threads::run(effort)?;
    }
    Ok(())
}
