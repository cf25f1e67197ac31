//! Named locks: acquired and released at once, and by 16 threads that all want one.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::BoxError;
use diesel_lease::locks::NamedLocks;

use crate::Effort;
use crate::support::engines::Engine;
use crate::support::report::{Times, json};

const THREADS: usize = 16;

pub(crate) fn run(engine: &Engine, effort: Effort) -> Result<(), BoxError> {
    let locks = NamedLocks::connect(&engine.url)?;
    let mut bare = engine.connect()?;
    let floor = match engine.name {
        "postgres" => Some([
            "SELECT pg_try_advisory_lock(7)::text AS answer",
            "SELECT pg_advisory_unlock(7)::text AS answer",
        ]),
        "sqlite" => None,
        _ => Some([
            "SELECT CAST(GET_LOCK('bench', 0) AS CHAR) AS answer",
            "SELECT CAST(RELEASE_LOCK('bench') AS CHAR) AS answer",
        ]),
    };
    let (mut ours, mut connecting, mut theirs) =
        (Times::default(), Times::default(), Times::default());
    for _ in 0..effort.rounds {
        let start = Instant::now();
        locks
            .try_acquire("bench")?
            .ok_or("the lock is held")?
            .release()?;
        ours.push(start.elapsed());
        let start = Instant::now();
        drop(engine.connect()?);
        connecting.push(start.elapsed());
        if let Some(statements) = floor {
            let start = Instant::now();
            for statement in statements {
                bare.ask(statement)?;
            }
            theirs.push(start.elapsed());
        }
    }

    let waits = Mutex::new(Times::default());
    let start = Instant::now();
    let each = effort.rounds / 50;
    thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| -> Result<(), BoxError> {
                    for _ in 0..each {
                        let start = Instant::now();
                        let lock = locks.acquire("bench", Duration::from_secs(60))?;
                        waits
                            .lock()
                            .expect("nobody panics with it")
                            .push(start.elapsed());
                        lock.release()?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().expect("no panic"))
    })?;
    let handed = (THREADS * each) as f64 / start.elapsed().as_secs_f64();
    let waits = waits.into_inner().expect("nobody panics with it");

    let facts = engine.facts()?;
    println!("\n{facts}; {} rounds", effort.rounds);
    println!("                         median       p99");
    for (what, times) in [
        ("try_acquire + release", &ours),
        ("a connection alone", &connecting),
        ("bare statements alone", &theirs),
        ("acquire, 16 threads", &waits),
    ] {
        println!("{what:22} {:8.1} {:9.1} µs", times.median(), times.p99());
        json(
            &[
                ("bench", "locks"),
                ("engine", engine.name),
                ("server", &facts),
                ("what", what),
            ],
            &[("median_us", times.median()), ("p99_us", times.p99())],
        );
    }
    println!("hand-overs: {handed:.0} a second");
    Ok(())
}
