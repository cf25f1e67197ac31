//! How long a name is without a leader: after a crash, and after a clean stop.
//!
//! A crash is a lease whose renewals end at some moment between two of them and that is not given back: so
//! a killed process leaves it; there all times are a tenth of the defaults. A stop is [`Leader::stop`],
//! from the call until the work of the next leader runs, with the defaults.

use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::{BoxError, Leader, Leases, Tenure, Timings};

use crate::support::engines::Engine;
use crate::support::report::json;

const CRASHES: u32 = 50;
const STOPS: u32 = 100;

const TIMINGS: Timings = Timings {
    lease: Duration::from_millis(1500),
    renew: Duration::from_millis(200),
    attempt: Duration::from_millis(500),
    deadline: Duration::from_millis(1000),
    grace: Duration::from_millis(500),
};
const POLL: Duration = Duration::from_millis(100);
const DEFAULT_POLL: Duration = Duration::from_secs(1);

/// Measures, and prints a table.
pub(crate) fn run(engine: &Engine) -> Result<(), BoxError> {
    let url = engine.url.as_str();
    println!("\n{}", engine.facts()?);
    Leases::connect(url)?.migrate()?;
    println!("| a leader that | min | median | 90 % | 99 % | max |");
    println!("|---|---|---|---|---|---|");
    print(engine, "crashed", crashes(url)?);
    print(engine, "stopped", stops(url)?);
    Ok(())
}

/// A candidate, and when its work begins.
fn candidate(
    leases: &Leases,
    name: &str,
    poll: Duration,
) -> Result<(Leader, Receiver<Instant>), BoxError> {
    let (say, begins) = channel();
    let work = move |tenure: &Tenure| {
        say.send(Instant::now())?;
        Ok(tenure.sleep(Duration::MAX)?)
    };
    let campaign = leases.campaign(name).poll(poll);
    Ok((campaign.start(work)?, begins))
}

fn crashes(url: &str) -> Result<Vec<Duration>, BoxError> {
    let builder = Leases::builder().timings(TIMINGS);
    let (leases, next) = (builder.clone().build(url)?, builder.build(url)?);
    let mut times = Vec::new();
    for round in 0..CRASHES {
        let held = leases.claim("bench-crash")?.hold()?;
        let (leader, begins) = candidate(&next, "bench-crash", POLL)?;
        // Some renewals, and a part of the time to the next one.
        thread::sleep(TIMINGS.renew * 2 + TIMINGS.renew * round / CRASHES);
        let crashed = Instant::now();
        std::mem::forget(held.stop());
        times.push(begins.recv()?.duration_since(crashed));
        leader.stop(Duration::MAX)?;
    }
    Ok(times)
}

fn stops(url: &str) -> Result<Vec<Duration>, BoxError> {
    // They share nothing, like those of two processes.
    let (one, other) = (Leases::connect(url)?, Leases::connect(url)?);
    let mut times = Vec::new();
    let (mut leader, begins) = candidate(&one, "bench-stop", DEFAULT_POLL)?;
    begins.recv()?;
    for round in 0..STOPS {
        let next = if round % 2 == 0 { &other } else { &one };
        let (next, begins) = candidate(next, "bench-stop", DEFAULT_POLL)?;
        // At any moment between two looks.
        thread::sleep(DEFAULT_POLL + DEFAULT_POLL * round / STOPS);
        let stopped = Instant::now();
        leader.stop(Duration::MAX)?;
        times.push(begins.recv()?.duration_since(stopped));
        leader = next;
    }
    leader.stop(Duration::MAX)?;
    Ok(times)
}

fn print(engine: &Engine, what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_millis();
    println!(
        "| {what} | {} ms | {} ms | {} ms | {} ms | {} ms |",
        at(0),
        at(50),
        at(90),
        at(99),
        at(100)
    );
    json(
        &[
            ("bench", "takeover"),
            ("engine", engine.name),
            ("leader", what),
        ],
        &[
            ("rounds", times.len() as f64),
            ("min_ms", at(0) as f64),
            ("median_ms", at(50) as f64),
            ("p90_ms", at(90) as f64),
            ("p99_ms", at(99) as f64),
            ("max_ms", at(100) as f64),
        ],
    );
}
