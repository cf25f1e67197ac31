//! Wall clocks that differ or go back: no instant is run twice.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use chrono::{DateTime, Utc};
use crossbeam_channel::{Receiver, Sender};
use diesel_lease::Leases;
use diesel_lease::scheduler::{RunningScheduler, Scheduler, TestClock};

use super::{MINUTE, Stage, at};
use crate::support::log::Entry;
use crate::support::{Engine, engines};

engines! {
    fn replicas_whose_clocks_differ_or_go_back_run_no_instant_twice,
}

const SECOND: Duration = Duration::from_secs(1);

/// A replica with a job that is due every second and takes a moment.
fn replica(
    leases: &Leases,
    job: &str,
    clock: &TestClock,
    begun: &Sender<DateTime<Utc>>,
) -> RunningScheduler {
    let begun = begun.clone();
    Scheduler::new(leases)
        .job(job, "* * * * * *", move |round| {
            begun.send(round.at()).unwrap();
            thread::sleep(Duration::from_millis(20));
            Ok(())
        })
        .clock(clock)
        .start()
        .unwrap()
}

/// A second later on this clock: what is run then.
fn tick(clock: &TestClock, ran: &Receiver<DateTime<Utc>>) -> Vec<DateTime<Utc>> {
    clock.settle();
    clock.advance(SECOND);
    clock.settle();
    ran.try_iter().collect()
}

/// How often a replica was told that this instant is taken.
fn refusals(stage: &Stage, instant: DateTime<Utc>) -> usize {
    let instant = instant.to_rfc3339();
    let refused = stage.logged("cronjob instant claimed elsewhere");
    let of_it = |entry: &&Entry| entry.get("at") == Some(&instant);
    refused.iter().filter(of_it).count()
}

fn replicas_whose_clocks_differ_or_go_back_run_no_instant_twice(engine: Engine) {
    let stage = Stage::new(engine, "10:00:00");
    let (begun, ran) = crossbeam_channel::unbounded();
    let (ahead, behind) = (
        TestClock::new(at("10:00:03")),
        TestClock::new(at("10:00:00")),
    );
    let _a = replica(&stage.leases, &stage.job, &ahead, &begun);
    let _b = replica(&stage.other_leases(), &stage.job, &behind, &begun);
    let mut all = BTreeSet::new();

    // Each instant comes to the one first, and to the other three steps later.
    for _ in 0..20 {
        let run = tick(&ahead, &ran);
        assert_eq!(run, [ahead.now()]);
        assert!(all.insert(ahead.now()));
        assert!(tick(&behind, &ran).is_empty());
        assert_eq!(refusals(&stage, behind.now()), 1);
    }
    assert_eq!(ahead.now(), at("10:00:23"));

    // The first clock goes back: there is nothing to do until it has come there again, and the other
    // goes on.
    ahead.set(at("10:00:13"));
    for _ in 0..5 {
        assert!(tick(&ahead, &ran).is_empty());
        assert_eq!(refusals(&stage, ahead.now()), 1);
        let run = tick(&behind, &ran);
        if behind.now() <= at("10:00:23") {
            assert!(run.is_empty());
        } else {
            assert_eq!(run, [behind.now()]);
            assert!(all.insert(behind.now()));
        }
    }
    assert_eq!(behind.now(), at("10:00:25"));

    // A process that starts with a clock that was set back asks for what is long on record.
    let late = TestClock::new(at("10:00:10"));
    let _c = replica(&stage.other_leases(), &stage.job, &late, &begun);
    assert!(tick(&late, &ran).is_empty());
    assert_eq!(refusals(&stage, late.now()), 2);

    ahead.set(at("10:00:25"));
    assert_eq!(tick(&ahead, &ran), [at("10:00:26")]);
    assert_eq!(all.len(), 22);
}

#[test]
fn a_clock_that_is_set_back_brings_a_local_job_no_instant_twice() {
    let clock = TestClock::new(at("10:00:30"));
    let (begun, ran) = crossbeam_channel::unbounded();
    let leases = Leases::connect("/no/such/folder/leases.db").unwrap();
    let _running = Scheduler::new(&leases)
        .local_job("job", "* * * * *", move |round| {
            begun.send(round.at()).unwrap();
            Ok(())
        })
        .clock(&clock)
        .start()
        .unwrap();
    let moved = |time| {
        clock.set(at(time));
        clock.settle();
        ran.try_iter().collect::<Vec<_>>()
    };
    assert_eq!(moved("10:01:00"), [at("10:01:00")]);
    assert!(moved("09:30:00").is_empty());
    for _ in 0..31 {
        clock.advance(MINUTE);
        clock.settle();
    }
    assert_eq!(clock.now(), at("10:01:00"));
    assert!(moved("10:01:59").is_empty());
    assert_eq!(moved("10:02:00"), [at("10:02:00")]);
}
