//! Three replicas of one service, one database, and one replica at a time that does the work.
//!
//! ```sh
//! cargo run --example replicas          # SQLite, in a temporary file
//! cargo run --example replicas --features postgres -- --database-url postgres://user:password@host/database
//! cargo run --example replicas --features mysql -- --database-url mysql://user:password@host/database
//! ```
//!
//! The program starts itself three times. Each replica waits for the name `counter` and, while it
//! holds it, reads a counter, finds that it still holds the name, and writes the counter plus one:
//! two that did so at once would write one number twice. Then the holder is killed, the next one is
//! frozen for longer than its lease and let go on, and the two after that are asked to stop. At the
//! end every hold and every increment is judged: the exit code is 1 if two ever held the name at
//! once.
//!
//! What to read: [`replica`] and [`count`] are all that a service needs. [`show`] is the script of
//! the show; in `replicas/` are `cluster.rs`, its stage, `counter.rs`, the database, and `judge.rs`.
//!
//! It needs signals, so it runs on Unix. On a server it leaves the lease table with one row behind.

use std::env;
use std::io::Read;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use diesel::QueryResult;
use diesel_lease::{BoxError, Ending, Error, Leases, StopToken, Tenure, Timings};
use rustix::time::{ClockId, clock_gettime};

use cluster::Cluster;
use counter::Counter;

#[path = "replicas/cluster.rs"]
mod cluster;
#[path = "replicas/counter.rs"]
mod counter;
#[path = "replicas/judge.rs"]
mod judge;

const NAME: &str = "counter";
const PAUSE: Duration = Duration::from_millis(100);

/// A fifth of the defaults: a crash is taken over within 3 s.
fn timings() -> Timings {
    Timings {
        lease: Duration::from_secs(3),
        renew: Duration::from_millis(400),
        attempt: Duration::from_secs(1),
        deadline: Duration::from_secs(2),
        grace: Duration::from_secs(1),
    }
}

fn main() -> Result<ExitCode, BoxError> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // Every user of the machine can read a command line, and the URL may hold a password.
        ["--replica", number] => replica(number, &env::var("DATABASE_URL")?),
        ["--database-url", url] => show(url),
        [] => {
            let directory = tempfile::tempdir()?;
            show(&directory.path().join("replicas.db").to_string_lossy())
        }
        _ => Err("usage: replicas [--database-url URL]".into()),
    }
}

/// One replica: waits for the name, works while it holds it, until it is asked to stop.
fn replica(number: &str, url: &str) -> Result<ExitCode, BoxError> {
    let stop = StopToken::new();
    let leases = Leases::builder()
        .timings(timings())
        .instance(format!("replica {number}"))
        .build(url)?
        .with_stop(&stop);
    let mut counter = Counter::open(url)?;
    stop_at_the_end_of_input(stop)?;
    loop {
        let lease = match leases.claim(NAME) {
            Ok(lease) => lease,
            Err(Error::Stopped) => return Ok(ExitCode::SUCCESS),
            Err(error) if error.is_transient() => {
                eprintln!("replica {number}: {error}; trying again");
                thread::park_timeout(PAUSE);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let term = lease.term();
        println!("{} claimed {term}", now().as_nanos());

        let held = lease.hold()?;
        match held.run(|tenure| count(tenure, &mut counter))? {
            Ending::Stopped => {
                held.release()?;
                println!("{} released {term}", now().as_nanos());
            }
            ending => println!("{} lost {term} {ending}", now().as_nanos()),
        }
    }
}

/// The work: counts until it must end.
fn count(tenure: &Tenure, counter: &mut Counter) -> QueryResult<Ending> {
    loop {
        let value = counter.last_value()? + 1;
        // Read before the question is asked: if the answer is yes, it was true at this moment.
        let held_at = now();
        if let Err(lost) = tenure.check() {
            return Ok(Ending::Lost(lost.cause()));
        }
        counter.write(value, tenure.term())?;
        println!("{} counted {}", held_at.as_nanos(), tenure.term());
        if let Err(ending) = tenure.sleep(PAUSE) {
            return Ok(ending);
        }
    }
}

fn stop_at_the_end_of_input(stop: StopToken) -> Result<(), BoxError> {
    let wait = move || {
        let _ = std::io::stdin().read(&mut [0]);
        stop.stop();
    };
    thread::Builder::new().name("stop".into()).spawn(wait)?;
    Ok(())
}

/// By the machine's clock, which is one for all its processes.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The show: starts the replicas, kills one, freezes one, stops two, and judges.
fn show(url: &str) -> Result<ExitCode, BoxError> {
    let leases = Leases::builder().timings(timings()).build(url)?;
    leases.migrate()?;
    leases.available()?;
    let mut counter = Counter::open(url)?;
    counter.create()?;
    let mut cluster = Cluster::start(url)?;

    cluster.wait_for_claim()?;
    let killed = cluster.wait_for_increments(15)?;
    cluster.kill(killed)?;
    cluster.wait_for_claim()?;

    let frozen = freeze_past_its_lease(&mut cluster)?;
    cluster.wait_for_increments(5)?;
    cluster.wake(frozen)?;
    cluster.wait_for_loss(frozen)?;

    let stopped = cluster.wait_for_increments(15)?;
    cluster.ask_to_stop(stopped);
    cluster.wait_for_claim()?;
    let last = cluster.wait_for_increments(5)?;
    cluster.ask_to_stop(last);
    cluster.wait_for_release(last)?;

    let increments = counter.increments()?;
    counter.remove()?;
    println!();
    Ok(judge::judge(cluster.holds(), &increments))
}

/// Freezes the holder until another holds the name.
fn freeze_past_its_lease(cluster: &mut Cluster) -> Result<usize, BoxError> {
    for _ in 0..3 {
        // It has just counted, so it is asleep now, or almost always so.
        let frozen = cluster.wait_for_increments(15)?;
        cluster.freeze(frozen)?;
        if cluster.wait_for_claim().is_ok() {
            return Ok(frozen);
        }
        // Frozen in the middle of a write it keeps SQLite's file locked.
        cluster.wake(frozen)?;
        cluster.wait_for_claim()?;
    }
    Err("the holder was frozen three times, and nobody took over".into())
}
