//! Named locks: acquired and released at once, and by 16 threads that all want one. Beside that the
//! server's own statements, with a connection made for them as the library does, and without.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::BoxError;
use diesel_lease::locks::NamedLocks;

use crate::Effort;
use crate::support::bare::Bare;
use crate::support::engines::Engine;
use crate::support::report::{Times, json};

const THREADS: usize = 16;

/// What the server's lock is taken, waited for and given back with. SQLite has none.
struct Statements {
    take: &'static str,
    wait: &'static str,
    give_back: &'static str,
}

fn statements(engine: &str) -> Option<Statements> {
    match engine {
        "postgres" => Some(Statements {
            take: "SELECT pg_try_advisory_lock(7)::text AS answer",
            wait: "SELECT pg_advisory_lock(7)::text AS answer",
            give_back: "SELECT pg_advisory_unlock(7)::text AS answer",
        }),
        "sqlite" => None,
        _ => Some(Statements {
            take: "SELECT CAST(GET_LOCK('bench', 0) AS CHAR) AS answer",
            wait: "SELECT CAST(GET_LOCK('bench', 60) AS CHAR) AS answer",
            give_back: "SELECT CAST(RELEASE_LOCK('bench') AS CHAR) AS answer",
        }),
    }
}

pub(crate) fn run(engine: &Engine, effort: Effort) -> Result<(), BoxError> {
    let locks = NamedLocks::connect(&engine.url)?;
    let statements = statements(engine.name);
    let mut kept = engine.connect()?;
    let [mut ours, mut connected, mut bare] = [const { Times::new() }; 3];
    for _ in 0..effort.rounds {
        ours.time(|| {
            let lock = locks.try_acquire("bench")?;
            Ok(lock.ok_or("the lock is held")?.release()?)
        })?;
        if let Some(Statements {
            take, give_back, ..
        }) = &statements
        {
            connected.time(|| ask(&mut *engine.connect()?, &[take, give_back]))?;
            bare.time(|| ask(&mut *kept, &[take, give_back]))?;
        }
    }
    let each = effort.rounds / 50;
    let ours_contended = contend(each, || {
        Ok(|| {
            let lock = locks.acquire("bench", Duration::from_secs(60))?;
            Ok(lock.release()?)
        })
    })?;
    let mut contended = vec![("acquire + release", ours_contended)];
    if let Some(Statements {
        wait, give_back, ..
    }) = &statements
    {
        let connected = contend(each, || {
            Ok(|| ask(&mut *engine.connect()?, &[wait, give_back]))
        })?;
        let bare = contend(each, || {
            let mut kept = engine.connect()?;
            Ok(move || ask(&mut *kept, &[wait, give_back]))
        })?;
        contended.push(("bare, on a connection made for it", connected));
        contended.push(("bare, on a connection that is kept", bare));
    }

    let facts = engine.facts()?;
    println!("\n{facts}; {} rounds", effort.rounds);
    println!("{:35} {:>9} {:>9}", "one thread", "median", "p99");
    let mut alone = vec![("try_acquire + release", &ours)];
    if statements.is_some() {
        alone.push(("bare, on a connection made for it", &connected));
        alone.push(("bare, on a connection that is kept", &bare));
    }
    for (what, times) in alone {
        println!("{what:35} {:9.1} {:9.1} µs", times.median(), times.p99());
        report(engine, &facts, what, times, 1, None);
    }
    println!("{THREADS} threads");
    for (what, (times, handed)) in &contended {
        let (median, p99) = (times.median(), times.p99());
        println!("{what:35} {median:9.1} {p99:9.1} µs, {handed:.0} hand-overs a second");
        report(engine, &facts, what, times, THREADS, Some(*handed));
    }
    Ok(())
}

fn ask(bare: &mut dyn Bare, statements: &[&str]) -> Result<(), BoxError> {
    for statement in statements {
        bare.ask(statement)?;
    }
    Ok(())
}

/// How long an act of one of many threads took, and how many of them there were in a second.
fn contend<A>(
    each: usize,
    prepare: impl Fn() -> Result<A, BoxError> + Sync,
) -> Result<(Times, f64), BoxError>
where
    A: FnMut() -> Result<(), BoxError>,
{
    let all = Mutex::new(Times::new());
    let start = Instant::now();
    thread::scope(|scope| {
        let work = || -> Result<(), BoxError> {
            let mut act = prepare()?;
            for _ in 0..each {
                let start = Instant::now();
                act()?;
                let took = start.elapsed();
                all.lock().expect("nobody panics with it").push(took);
            }
            Ok(())
        };
        let workers: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().expect("no panic"))
    })?;
    let handed = (THREADS * each) as f64 / start.elapsed().as_secs_f64();
    Ok((all.into_inner().expect("nobody panics with it"), handed))
}

fn report(
    engine: &Engine,
    facts: &str,
    what: &str,
    times: &Times,
    threads: usize,
    handed: Option<f64>,
) {
    let texts = [
        ("bench", "locks"),
        ("engine", engine.name),
        ("server", facts),
        ("what", what),
    ];
    let mut numbers = vec![
        ("threads", threads as f64),
        ("median_us", times.median()),
        ("p99_us", times.p99()),
    ];
    numbers.extend(handed.map(|handed| ("hand_overs_per_second", handed)));
    json(&texts, &numbers);
}
