//! Two replicas of a service with scheduled jobs, and who runs what.
//!
//! ```sh
//! cargo run --example cron              # SQLite, in a temporary file
//! cargo run --example cron --features postgres -- postgres://user:password@host/database
//! ```
//!
//! `report` and `sync` run once for each of their instants, on the replica that claims it first;
//! `cache` runs on both. After some seconds, the replica that is at a `sync` is stopped: that round is
//! cut short, and the other replica runs it again.
#![allow(
    clippy::disallowed_methods,
    reason = "the library's own rules on clocks and threads"
)]

use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use diesel_lease::scheduler::{Round, RunningScheduler, Scheduler};
use diesel_lease::{BoxError, Error, Leases};

fn main() -> Result<(), BoxError> {
    let directory = tempfile::tempdir()?;
    let url = std::env::args().nth(1).unwrap_or_else(|| {
        let path = directory.path().join("cron.db");
        path.to_string_lossy().into_owned()
    });
    Leases::connect(&url)?.migrate()?;

    let (begins, begun) = channel();
    let one = replica("one", &url, begins.clone())?;
    let two = replica("two", &url, begins)?;
    thread::sleep(Duration::from_secs(3));

    begun.try_iter().for_each(drop);
    let name = begun.recv()?;
    let (leaving, staying) = if name == "one" {
        (one, two)
    } else {
        (two, one)
    };
    leaving.stop(Duration::from_secs(5))?;
    println!("          {name} has left");
    thread::sleep(Duration::from_secs(2));
    staying.stop(Duration::from_secs(5))?;
    Ok(())
}

/// What a service does when it starts. All replicas have the same jobs.
fn replica(
    name: &'static str,
    url: &str,
    begins: Sender<&'static str>,
) -> Result<RunningScheduler, Error> {
    let leases = Leases::builder().instance(name).build(url)?;
    Scheduler::new(&leases)
        .job("report", "* * * * * *", move |round| {
            say(name, round, "ran")
        })
        .job("sync", "*/2 * * * * *", move |round| {
            begins.send(name)?;
            sync(name, round)
        })
        .local_job("cache", "@every 3s", move |round| say(name, round, "ran"))
        .sweep_every(Duration::from_millis(200))
        .start()
}

/// Takes a while, so it ends when its tenure does.
fn sync(name: &str, round: &Round<'_>) -> Result<(), BoxError> {
    let tenure = round.tenure().expect("the tenure of a shared job");
    for _ in 0..10 {
        if let Err(ending) = tenure.sleep(Duration::from_millis(50)) {
            say(name, round, "was cut short")?;
            return Err(ending.into());
        }
    }
    say(
        name,
        round,
        if round.is_rerun() {
            "ran it again"
        } else {
            "ran"
        },
    )
}

fn say(name: &str, round: &Round<'_>, what: &str) -> Result<(), BoxError> {
    let instant = round.at().format("%T");
    println!("{instant}  {:8}{name} {what}", round.name());
    Ok(())
}
