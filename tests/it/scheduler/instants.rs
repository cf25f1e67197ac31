//! When a job runs, and on which replica.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use diesel_lease::scheduler::{Scheduler, TestClock};
use diesel_lease::{Leases, current};
use log::Level;

use super::{MINUTE, Stage, TIMINGS, assert_pairs, at, first};
use crate::support::log::Entry;
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    fn a_round_is_run_at_each_instant_and_not_before,
    fn an_instant_that_comes_at_the_start_is_run,
    fn replicas_run_each_instant_once_between_them,
    fn a_claim_without_an_answer_is_tried_again,
    fn a_claim_without_an_answer_is_given_up_for_the_next_instant,
    fn an_instant_that_comes_during_a_claim_is_run,
    fn nobody_runs_what_passes_during_a_round,
    fn many_instants_that_pass_during_a_round_bring_one_more_round,
    fn a_round_that_overruns_is_told_at_each_instant,
    fn a_round_knows_what_it_is,
}

const MOMENT: Duration = Duration::from_millis(1);

fn a_round_is_run_at_each_instant_and_not_before(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let running = stage.start(|_| Ok(()));
    stage.clock.set(at("10:01:00") - MOMENT);
    stage.no_round();
    stage.clock.advance(MOMENT);
    assert_eq!(stage.next(), first("10:01:00", 1));
    stage.finished("10:01:00");
    stage.clock.advance(MINUTE - MOMENT);
    stage.no_round();
    stage.clock.advance(MOMENT);
    assert_eq!(stage.next(), first("10:02:00", 2));
    stage.finished("10:02:00");
    stage.no_round();
    running.stop(LONG).unwrap();

    let finished = stage.logged("finished cronjob");
    assert_eq!(finished.len(), 2, "{}", stage.entries());
    assert_eq!(finished[0].level, Level::Info);
    assert_pairs(
        &finished[0],
        &[
            ("job", &stage.job),
            ("spec", "* * * * *"),
            ("instance", stage.leases.instance()),
            ("at", "2026-03-02T10:01:00+00:00"),
            ("term", "1"),
            ("rerun", "false"),
            ("catch_up", "false"),
        ],
    );
    stage.not_logged("cronjob skipped");
}

/// Every instant after `start` was called is one, however long it takes to get going.
fn an_instant_that_comes_at_the_start_is_run(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    stage.on_record("10:00:00");
    let _running = stage.start(|_| Ok(()));
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 2));
    stage.finished("10:01:00");
}

fn replicas_run_each_instant_once_between_them(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let _a = stage.start(|_| Ok(()));
    let other = Scheduler::new(&stage.other_leases());
    let _b = stage.run(other, &stage.clock, |_| Ok(()));
    for (term, time) in [(1, "10:01:00"), (2, "10:02:00"), (3, "10:03:00")] {
        stage.set(time);
        assert_eq!(stage.next(), first(time, term));
        stage.finished(time);
        stage.no_round();
        let refused = stage.logged("cronjob instant claimed elsewhere");
        assert_eq!(refused.len(), term as usize, "the other was refused");
    }
    let refused = stage.log(Level::Debug, "cronjob instant claimed elsewhere");
    assert_pairs(&refused, &[("at", "2026-03-02T10:01:00+00:00")]);
}

fn a_claim_without_an_answer_is_tried_again(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let _running = stage.start_without_sweep(|_| Ok(()));
    stage.take_table();
    stage.set("10:01:00");
    stage.clock.settle();
    let entry = stage.log(Level::Error, "cronjob could not claim its instant");
    assert_pairs(&entry, &[("at", "2026-03-02T10:01:00+00:00")]);
    stage.clock.advance(TIMINGS.renew);
    stage.no_round();

    stage.give_table_back();
    stage.clock.advance(TIMINGS.renew);
    assert_eq!(stage.next(), first("10:01:00", 1));
    stage.finished("10:01:00");
    stage.no_round();
    let told = stage.logged("cronjob could not claim");
    assert_eq!(told.len(), 1, "one entry for an instant");
}

fn a_claim_without_an_answer_is_given_up_for_the_next_instant(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let _running = stage.start_without_sweep(|_| Ok(()));
    stage.take_table();
    // Another try would come after 10:02:00.
    stage.clock.set(at("10:02:00") - TIMINGS.renew);
    stage.no_round();
    stage.log(Level::Error, "cronjob could not claim its instant");
    stage.give_table_back();
    stage.clock.advance(TIMINGS.renew - MOMENT);
    stage.no_round();
    stage.clock.advance(MOMENT);
    assert_eq!(stage.next(), first("10:02:00", 1));
    stage.finished("10:02:00");
}

/// Nobody was at a round meanwhile, so there is no reason to skip it.
fn an_instant_that_comes_during_a_claim_is_run(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let _running = stage.start_without_sweep(|_| Ok(()));
    stage.take_table();
    stage.set("10:01:00");
    stage.no_round();
    // The try that is due comes so late that the next instants have come too.
    stage.set("10:04:30");
    stage.no_round();
    let failed = stage.logged("cronjob could not claim its instant");
    let failed: Vec<_> = failed.iter().filter_map(|entry| entry.get("at")).collect();
    assert_eq!(
        failed,
        ["2026-03-02T10:01:00+00:00", "2026-03-02T10:04:00+00:00"]
    );
    stage.give_table_back();
    stage.clock.advance(TIMINGS.renew);
    assert_eq!(stage.next(), first("10:04:00", 1));
    stage.finished("10:04:00");
}

fn nobody_runs_what_passes_during_a_round(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let replica = || {
        let wait = wait.clone();
        let scheduler = Scheduler::new(&stage.other_leases());
        stage.run(scheduler, &stage.clock, move |_| {
            // Does not wait once the other side is gone.
            let _ = wait.recv();
            Ok(())
        })
    };
    let _a = replica();
    let _b = replica();
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 1));
    stage.set("10:02:30");
    let _c = replica();
    eventually(LONG, "10:02 is refused to two", || {
        let refused = stage.logged("cronjob instant claimed elsewhere");
        let of_it = |entry: &&Entry| entry.get("at") == Some("2026-03-02T10:02:00+00:00");
        refused.iter().filter(of_it).count() == 2
    });
    stage.no_round_within(Duration::ZERO);
    drop(go);
    stage.finished("10:02:00");
    let _d = replica();
    stage.no_round();
    stage.set("10:03:00");
    assert_eq!(stage.next(), first("10:03:00", 2));
    stage.finished("10:03:00");
    stage.no_round();
    let skipped = stage.log(Level::Warn, "cronjob skipped instants");
    assert_pairs(
        &skipped,
        &[("skipped", "1"), ("after", "2026-03-02T10:01:00+00:00")],
    );
}

fn many_instants_that_pass_during_a_round_bring_one_more_round(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let _running = stage.start(move |_| {
        let _ = wait.recv();
        Ok(())
    });
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 1));
    stage.set("10:04:10");
    drop(go);
    let skipped = stage.log(Level::Warn, "cronjob skipped instants");
    assert_pairs(
        &skipped,
        &[
            ("job", &stage.job),
            ("spec", "* * * * *"),
            ("skipped", "3"),
            ("after", "2026-03-02T10:01:00+00:00"),
        ],
    );
    stage.finished("10:04:00");
    stage.no_round();
    stage.set("10:05:00");
    assert_eq!(stage.next(), first("10:05:00", 2));
    stage.finished("10:05:00");
}

fn a_round_that_overruns_is_told_at_each_instant(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let _running = stage.start(move |_| {
        let _ = wait.recv();
        Ok(())
    });
    let text = "cronjob round is still running at its next instant";
    stage.set("10:01:00");
    stage.next();
    for overrun in ["1", "2"] {
        stage.clock.advance(MINUTE);
        eventually(LONG, "the overrun is told", || {
            let told = stage.logged(text);
            told.last()
                .is_some_and(|entry| entry.get("overrun") == Some(overrun))
        });
    }
    drop(go);
    stage.finished("10:03:00");
    let told = stage.logged(text);
    assert_eq!(told.len(), 2, "{}", stage.entries());
    assert_eq!(told[0].level, Level::Warn);
    assert_pairs(
        &told[0],
        &[("job", &stage.job), ("at", "2026-03-02T10:01:00+00:00")],
    );
}

fn a_round_knows_what_it_is(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let (job, lease) = (stage.job.clone(), stage.lease());
    let is_right = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_right);
    let _running = stage.start(move |round| {
        let tenure = round.tenure().expect("a tenure");
        let entered = current().expect("a tenure that is entered");
        let right = round.name() == job
            && round.at() == at("10:01:00")
            && (tenure.name(), tenure.term()) == (&*lease, 1)
            && tenure.slot() == Some(at("10:01:00"))
            && (entered.name(), entered.term()) == (&*lease, 1);
        seen.store(right, Ordering::SeqCst);
        Ok(())
    });
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 1));
    stage.finished("10:01:00");
    assert!(is_right.load(Ordering::SeqCst));
    assert!(stage.log(Level::Info, "scheduled cronjob").get("job") == Some(&stage.job));
}

#[test]
fn a_local_job_runs_on_every_replica_and_needs_no_database() {
    let clock = TestClock::new(at("10:00:30"));
    let (begun, ran) = crossbeam_channel::unbounded();
    let replicas = [(), ()].map(|()| {
        let begun = begun.clone();
        let leases = Leases::connect("/no/such/folder/leases.db").unwrap();
        Scheduler::new(&leases)
            .local_job("job", "* * * * *", move |round| {
                let is_local = round.tenure().is_none() && current().is_none();
                let is_plain = !round.is_rerun() && !round.is_catch_up();
                begun.send((round.at(), is_local && is_plain)).unwrap();
                Ok(())
            })
            .clock(&clock)
            .start()
            .unwrap()
    });
    for time in ["10:01:00", "10:02:00"] {
        clock.set(at(time));
        clock.settle();
        let runs: Vec<_> = ran.try_iter().collect();
        assert_eq!(runs, [(at(time), true), (at(time), true)]);
    }
    for replica in replicas {
        replica.stop(LONG).unwrap();
    }
}
