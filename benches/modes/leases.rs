//! Many leases held by one process, on PostgreSQL.

use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::{BoxError, HeldLease, Leases};

use crate::Effort;
use crate::support::engines::Engine;
use crate::support::report::json;
use crate::support::{process, record};

pub(crate) fn run(effort: Effort) -> Result<(), BoxError> {
    let engine = Engine::all(&["postgres".to_owned()])?.pop();
    let engine = engine.ok_or("it needs the feature `postgres`")?;
    let facts = engine.facts()?;
    let mut beside = engine.connect()?;
    let program = format!("diesel-lease-bench-{}", std::process::id());
    let sessions = format!(
        "SELECT COUNT(*)::text AS answer FROM pg_stat_activity WHERE application_name = '{program}'"
    );

    record::count_statements()?;
    let sign = if engine.url.contains('?') { '&' } else { '?' };
    let leases = Leases::connect(&format!("{}{sign}application_name={program}", engine.url))?;
    leases.migrate()?;
    let first = leases.claim(&format!("{program}:first"))?.hold()?;
    let resident = process::resident();
    let claimed = |at| -> Result<HeldLease, BoxError> {
        Ok(leases.claim(&format!("{program}:{at}"))?.hold()?)
    };
    let start = Instant::now();
    let held: Vec<HeldLease> = (0..effort.leases).map(claimed).collect::<Result<_, _>>()?;
    let claiming = start.elapsed().as_secs_f64();
    let threads = process::threads();

    let (start, statements) = (Instant::now(), record::statements());
    let (cpu, switches) = (process::cpu(), process::switches());
    let (mut most_sessions, mut shortest) = (0.0_f64, Duration::MAX);
    for _ in 0..effort.seconds {
        thread::sleep(Duration::from_secs(1));
        most_sessions = most_sessions.max(beside.ask(&sessions)?.parse()?);
        let remaining = held.iter().map(|held| held.tenure().remaining()).min();
        shortest = shortest.min(remaining.unwrap_or_default());
    }
    let seconds = start.elapsed().as_secs_f64();
    let statements = (record::statements() - statements) as f64 / seconds;
    let cpu = (process::cpu() - cpu) / seconds * 100.0;
    let switches = (process::switches() - switches) / seconds;
    let bytes = (process::resident() - resident) / effort.leases as f64;
    let lost = held.iter().filter(|held| held.is_lost()).count();
    for held in held {
        held.release()?;
    }
    first.release()?;

    println!(
        "\n{facts}; {} leases held for {seconds:.0} s by one process",
        effort.leases
    );
    println!("claimed in         {claiming:.1} s");
    println!("lost               {lost}");
    println!("least remaining    {:.1} s of 10 s", shortest.as_secs_f64());
    println!("connections        {most_sessions:.0} at most");
    println!("threads            {threads:.0}");
    println!("statements         {statements:.0}/s");
    println!("processor          {cpu:.1} % of one");
    println!("context switches   {switches:.0}/s");
    println!(
        "memory             {:.1} kB for each lease, {:.1} MB in all",
        bytes / 1e3,
        process::resident() / 1e6
    );
    json(
        &[
            ("bench", "leases"),
            ("engine", engine.name),
            ("server", &facts),
        ],
        &[
            ("leases", effort.leases as f64),
            ("seconds", seconds),
            ("lost", lost as f64),
            ("least_remaining_s", shortest.as_secs_f64()),
            ("connections", most_sessions),
            ("threads", threads),
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
