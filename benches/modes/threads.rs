//! What is paid without a database: handing a call to another thread, and asking a tenure.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use diesel_lease::{BoxError, Leases};

use crate::Effort;
use crate::support::report::{Times, json, middle};

const QUESTIONS: u32 = 2_000_000;

pub(crate) fn run(effort: Effort) -> Result<(), BoxError> {
    println!("\nhand-over to a thread that waits, and back, without the time it works");
    for (work, millis) in [("none", 0), ("1 ms", 1)] {
        let times = hand_over(effort.rounds, Duration::from_millis(millis))?;
        let (median, p99) = (times.median(), times.p99());
        println!("work: {work}  median {median:5.1} µs, p99 {p99:5.1} µs");
        json(
            &[("bench", "hand-over"), ("work", work)],
            &[("median_us", median), ("p99_us", p99)],
        );
    }

    let check = check(effort.runs)?;
    println!("\n`Tenure::check`\n{check:.1} ns");
    json(&[("bench", "check")], &[("median_ns", check)]);
    Ok(())
}

/// A question goes through a channel, the answer comes back through another. With work in between
/// both threads have slept when they are woken, as they have around a call to a database.
fn hand_over(rounds: usize, work: Duration) -> Result<Times, BoxError> {
    let (ask, questions): (_, Receiver<Sender<Duration>>) = bounded(1);
    let answer_all = move || {
        questions.iter().try_for_each(|answer| {
            let start = Instant::now();
            if !work.is_zero() {
                thread::sleep(work);
            }
            answer.send(start.elapsed())
        })
    };
    let worker = thread::Builder::new().spawn(answer_all)?;
    let mut times = Times::default();
    for _ in 0..rounds {
        let start = Instant::now();
        let (answer, answered) = bounded(1);
        ask.send(answer)?;
        let worked = answered.recv()?;
        times.push(start.elapsed().saturating_sub(worked));
    }
    drop(ask);
    worker.join().map_err(|_| "the worker panicked")??;
    Ok(times)
}

fn check(runs: usize) -> Result<f64, BoxError> {
    let directory = tempfile::tempdir()?;
    let leases = Leases::connect(&directory.path().join("bench.db").to_string_lossy())?;
    leases.migrate()?;
    let held = leases.claim("bench:check")?.hold()?;
    let tenure = held.tenure();
    let mut each = Vec::new();
    for _ in 0..runs {
        let start = Instant::now();
        for _ in 0..QUESTIONS {
            black_box(black_box(tenure).check())?;
        }
        each.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(QUESTIONS));
    }
    held.release()?;
    Ok(middle(&each))
}
