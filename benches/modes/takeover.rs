//! How long a name is without a leader: after a crash, and after a clean stop.
//!
//! All times are a tenth of the defaults. A crash is a lease whose renewals end at some moment between
//! two of them and that is not given back: so a killed process leaves it. A stop is [`Leader::stop`],
//! from the call until the work of the next leader runs.

use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::{BoxError, Leader, Leases, Tenure, Timings};

use crate::support::engines::Engine;

const ROUNDS: u32 = 50;

const TIMINGS: Timings = Timings {
    lease: Duration::from_millis(1500),
    renew: Duration::from_millis(200),
    attempt: Duration::from_millis(500),
    deadline: Duration::from_millis(1000),
    grace: Duration::from_millis(500),
};
const POLL: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(500);

/// Measures, and prints a table.
pub(crate) fn run(engine: &Engine) -> Result<(), BoxError> {
    let url = engine.url.as_str();
    println!("\n{}", engine.facts()?);
    leases(url, "migrate")?.migrate()?;
    println!("| a leader that | min | median | 90 % | max |");
    println!("|---|---|---|---|---|");
    print("crashed", crashes(url)?);
    print("stopped", stops(url)?);
    Ok(())
}

fn leases(url: &str, instance: &str) -> Result<Leases, BoxError> {
    let builder = Leases::builder().timings(TIMINGS).instance(instance);
    Ok(builder.build(url)?)
}

/// A candidate, and when its work begins.
fn candidate(leases: &Leases, name: &str) -> Result<(Leader, Receiver<Instant>), BoxError> {
    let (say, begins) = channel();
    let work = move |tenure: &Tenure| {
        say.send(Instant::now())?;
        Ok(tenure.sleep(Duration::MAX)?)
    };
    let campaign = leases.campaign(name).poll(POLL).pause(PAUSE);
    Ok((campaign.start(work)?, begins))
}

fn crashes(url: &str) -> Result<Vec<Duration>, BoxError> {
    let (leases, next) = (leases(url, "first")?, leases(url, "next")?);
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let held = leases.claim("bench-crash")?.hold()?;
        let (leader, begins) = candidate(&next, "bench-crash")?;
        // Some renewals, and a part of the time to the next one.
        thread::sleep(TIMINGS.renew * 2 + TIMINGS.renew * round / ROUNDS);
        let crashed = Instant::now();
        std::mem::forget(held.stop());
        times.push(begins.recv()?.duration_since(crashed));
        leader.stop(Duration::MAX)?;
    }
    Ok(times)
}

fn stops(url: &str) -> Result<Vec<Duration>, BoxError> {
    let (one, other) = (leases(url, "one")?, leases(url, "other")?);
    let mut times = Vec::new();
    let (mut leader, begins) = candidate(&one, "bench-stop")?;
    begins.recv()?;
    for round in 0..ROUNDS {
        let next = if round % 2 == 0 { &other } else { &one };
        let (next, begins) = candidate(next, "bench-stop")?;
        // At any moment between two looks.
        thread::sleep(POLL * 2 + POLL * round / ROUNDS);
        let stopped = Instant::now();
        leader.stop(Duration::MAX)?;
        times.push(begins.recv()?.duration_since(stopped));
        leader = next;
    }
    leader.stop(Duration::MAX)?;
    Ok(times)
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_millis();
    println!(
        "| {what} | {} ms | {} ms | {} ms | {} ms |",
        at(0),
        at(50),
        at(90),
        at(100)
    );
}
