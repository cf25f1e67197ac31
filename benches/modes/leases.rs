//! Many leases held by one process: what each more costs.

use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::{BoxError, HeldLease, Leases};

use crate::Effort;
use crate::support::engines::Engine;
use crate::support::report::json;
use crate::support::{process, record};

/// More of them at once are what a file with one writer is not for.
const MOST_IN_A_FILE: usize = 1_000;

pub(crate) fn run(engine: &Engine, effort: Effort) -> Result<(), BoxError> {
    println!("\n{}; held by one process", engine.facts()?);
    println!(
        "| leases | held for | lost | least left of 10 s | connections | statements/s | processor | switches/s | kB each |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for &(count, seconds) in effort.leases {
        if engine.name != "sqlite" || count <= MOST_IN_A_FILE {
            hold(engine, count, seconds)?;
        }
    }
    Ok(())
}

fn hold(engine: &Engine, count: usize, seconds: u64) -> Result<(), BoxError> {
    let mut beside = engine.connect()?;
    let others = engine.sessions(beside.as_mut())?;
    record::count_statements()?;
    let leases = Leases::connect(&engine.url)?;
    leases.migrate()?;
    let program = format!("bench-{}", std::process::id());
    let first = leases.claim(&format!("{program}:first"))?.hold()?;
    let resident = process::resident();
    let claimed = |at| -> Result<HeldLease, BoxError> {
        Ok(leases.claim(&format!("{program}:{at}"))?.hold()?)
    };
    let start = Instant::now();
    let held: Vec<HeldLease> = (0..count).map(claimed).collect::<Result<_, _>>()?;
    let claiming = start.elapsed().as_secs_f64();

    let (start, statements) = (Instant::now(), record::statements());
    let (cpu, switches) = (process::cpu(), process::switches());
    let (mut most_sessions, mut shortest) = (0.0_f64, Duration::MAX);
    for _ in 0..seconds {
        thread::sleep(Duration::from_secs(1));
        most_sessions = most_sessions.max(engine.sessions(beside.as_mut())? - others);
        let remaining = held.iter().map(|held| held.tenure().remaining()).min();
        shortest = shortest.min(remaining.unwrap_or_default());
    }
    let seconds = start.elapsed().as_secs_f64();
    let statements = (record::statements() - statements) as f64 / seconds;
    let cpu = (process::cpu() - cpu) / seconds * 100.0;
    let switches = (process::switches() - switches) / seconds;
    let bytes = (process::resident() - resident) / count as f64;
    let lost = held.iter().filter(|held| held.is_lost()).count();
    for held in held {
        held.release()?;
    }
    first.release()?;

    println!(
        "| {count} | {seconds:.0} s | {lost} | {:.1} s | {most_sessions:.0} | {statements:.0} | {cpu:.1} % | {switches:.0} | {:.1} |",
        shortest.as_secs_f64(),
        bytes / 1e3,
    );
    json(
        &[("bench", "leases"), ("engine", engine.name)],
        &[
            ("leases", count as f64),
            ("seconds", seconds),
            ("claiming_s", claiming),
            ("lost", lost as f64),
            ("least_remaining_s", shortest.as_secs_f64()),
            ("connections", most_sessions),
            ("statements_per_s", statements),
            ("cpu_percent", cpu),
            ("switches_per_s", switches),
            ("bytes_per_lease", bytes),
        ],
    );
    if lost > 0 {
        Err(format!("{lost} leases were lost").into())
    } else {
        Ok(())
    }
}
