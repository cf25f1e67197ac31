//! Rounds that were cut short: who runs them again, how often, and until when.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use diesel_lease::Leases;
use diesel_lease::scheduler::{Scheduler, TestClock};
use log::Level;

use super::{
    Captured, LOOK, MINUTE, Ran, Stage, TIMINGS, assert_pairs, at, catch_up, first, rerun,
};
use crate::support::proxy::Proxy;
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn a_round_that_a_stop_cuts_short_is_run_again_by_another,
    fn a_round_that_a_crash_cuts_short_is_run_again_once,
    fn a_rerun_that_overruns_is_skipped_by_all,
    fn a_round_whose_end_could_not_be_recorded_is_run_again,
    fn a_round_cut_short_is_given_up_for_the_next_instant,
    fn a_round_cut_short_is_given_up_for_a_catch_up,
    fn a_rerun_cut_short_is_given_up_as_one,
    fn a_rerun_waits_for_a_round_and_runs_before_the_next,
    fn a_look_that_fails_is_told_and_made_again,
    fn jobs_get_their_own_reruns;
    servers: fn an_instant_whose_claim_a_stop_overtakes_is_run_by_another,
}

fn a_round_that_a_stop_cuts_short_is_run_again_by_another(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let a = stage.start_without_sweep(|round| {
        round.tenure().unwrap().sleep(LONG)?;
        Ok(())
    });
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 1));
    a.stop(LONG).unwrap();
    let interrupted = stage.log(Level::Warn, "cronjob interrupted");
    assert_eq!(interrupted.message, "cronjob interrupted: asked to stop");
    assert_pairs(
        &interrupted,
        &[
            ("job", &stage.job),
            ("at", "2026-03-02T10:01:00+00:00"),
            ("term", "1"),
        ],
    );
    stage.not_logged("finished cronjob");
    stage.cut_short("10:01:00");

    let _b = stage.start(|_| Ok(()));
    assert_eq!(stage.next(), rerun("10:01:00", 2));
    stage.finished("10:01:00");
    let finished = stage.log(Level::Info, "finished cronjob");
    assert_pairs(&finished, &[("rerun", "true"), ("catch_up", "false")]);
    // The next instant is still to come.
    stage.set("10:02:00");
    assert_eq!(stage.next(), first("10:02:00", 3));
    stage.finished("10:02:00");
}

fn a_round_that_a_crash_cuts_short_is_run_again_once(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let a = stage.start(|round| {
        round.tenure().unwrap().sleep(LONG)?;
        Ok(())
    });
    let lease = stage
        .other_leases()
        .try_claim_slot(&stage.lease(), at("10:00:00"));
    std::mem::forget(lease.unwrap().expect("the instant"));
    // Longer than it takes to look: it is not found while the lease is held.
    stage.no_round_within(LOOK);
    stage.raw().expire(&stage.lease());
    assert_eq!(stage.next(), rerun("10:00:00", 2));
    a.stop(LONG).unwrap();
    stage.cut_short("10:00:00");

    let _b = stage.start(|_| Ok(()));
    stage.no_round_within(LOOK);
    assert_eq!(stage.row().term, 2);
}

fn a_rerun_that_overruns_is_skipped_by_all(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let lease = stage
        .other_leases()
        .try_claim_slot(&stage.lease(), at("10:00:00"));
    std::mem::forget(lease.unwrap().expect("the instant"));
    let _a = stage.start(|_| Ok(()));
    stage.set("10:01:00");
    stage.no_round();
    stage.log(Level::Debug, "cronjob instant claimed elsewhere");
    stage.raw().expire(&stage.lease());
    assert_eq!(stage.next(), rerun("10:00:00", 2));
    // The instant that was refused is on record: who starts now does not catch up with it.
    stage.finished("10:01:00");
    let _b = stage.start(|_| Ok(()));
    stage.no_round();
    stage.set("10:02:00");
    assert_eq!(stage.next(), first("10:02:00", 3));
    stage.finished("10:02:00");
    assert_eq!(stage.logged("finished cronjob").len(), 2);
    stage.no_round();
}

fn a_round_whose_end_could_not_be_recorded_is_run_again(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let _running = stage.start(move |_| {
        let _ = wait.recv();
        Ok(())
    });
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 1));
    stage.take_table();
    drop(go);
    let warning = stage.log(Level::Warn, "cronjob could not record its round");
    assert_pairs(&warning, &[("term", "1")]);
    stage.give_table_back();
    stage.raw().expire(&stage.lease());
    assert_eq!(stage.next(), rerun("10:01:00", 2));
    stage.finished("10:01:00");
    stage.no_round();
}

fn a_round_cut_short_is_given_up_for_the_next_instant(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    stage.crashed("10:00:00");
    let _running = stage.start_without_sweep(|_| Ok(()));
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 2));
    stage.finished("10:01:00");
    let given_up = stage.log(Level::Warn, "cronjob gave up a round cut short");
    assert_pairs(
        &given_up,
        &[
            ("job", &stage.job),
            ("spec", "* * * * *"),
            ("at", "2026-03-02T10:00:00+00:00"),
            ("next", "2026-03-02T10:01:00+00:00"),
            ("rerun", "false"),
        ],
    );
    let _other = stage.start(|_| Ok(()));
    stage.no_round_within(LOOK);
}

fn a_round_cut_short_is_given_up_for_a_catch_up(engine: Engine) {
    let stage = Stage::new(engine, "10:02:30");
    stage.crashed("10:00:00");
    let _running = stage.start_without_sweep(|_| Ok(()));
    assert_eq!(stage.next(), catch_up("10:02:00", 2));
    stage.finished("10:02:00");
    let given_up = stage.log(Level::Warn, "cronjob gave up a round cut short");
    assert_pairs(
        &given_up,
        &[
            ("at", "2026-03-02T10:00:00+00:00"),
            ("next", "2026-03-02T10:02:00+00:00"),
            ("rerun", "false"),
        ],
    );
}

fn a_rerun_cut_short_is_given_up_as_one(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    stage.crashed("10:00:00");
    let leases = stage.other_leases();
    let found = leases.unfinished_slots(&[&stage.lease()]).unwrap();
    std::mem::forget(leases.try_claim_rerun(&found[0]).unwrap().unwrap());
    stage.raw().expire(&stage.lease());
    let _running = stage.start(|_| Ok(()));
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 3));
    let given_up = stage.log(Level::Warn, "cronjob gave up a round cut short");
    assert_pairs(
        &given_up,
        &[("at", "2026-03-02T10:00:00+00:00"), ("rerun", "true")],
    );
    stage.finished("10:01:00");
}

/// A rerun is found while the job is at a round of its own: what is found then is stale.
fn a_rerun_waits_for_a_round_and_runs_before_the_next(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let is_first = AtomicBool::new(true);
    let _running = stage.start(move |_| {
        if is_first.swap(false, Ordering::SeqCst) {
            let _ = wait.recv();
        }
        Ok(())
    });
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 1));
    // As if it had been frozen: its lease runs out, and the instant after is claimed and cut short.
    stage.raw().expire(&stage.lease());
    let lease = stage
        .other_leases()
        .try_claim_slot(&stage.lease(), at("10:02:00"));
    std::mem::forget(lease.unwrap().expect("the instant"));
    stage.raw().expire(&stage.lease());
    stage.no_round_within(LOOK);
    drop(go);
    assert_eq!(stage.next(), rerun("10:02:00", 3));
    stage.finished("10:02:00");
    stage.log(Level::Warn, "cronjob lost its lease during the round");
    stage.set("10:02:59");
    stage.no_round();
    stage.set("10:03:00");
    assert_eq!(stage.next(), first("10:03:00", 4));
    stage.finished("10:03:00");
}

fn a_look_that_fails_is_told_and_made_again(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    stage.crashed("10:00:00");
    let instance = unique("instance");
    let log = Captured::with("instance", &instance);
    let leases = Leases::builder().timings(TIMINGS).instance(&instance);
    let leases = leases.build(stage.database.url()).unwrap();
    stage.take_table();
    let scheduler = Scheduler::new(&leases).sweep_every(Duration::ZERO);
    let _running = stage.run(scheduler, &stage.clock, |_| Ok(()));
    eventually(LONG, "two looks fail", || {
        let entries = log.entries();
        let failed = entries.iter().filter(|entry| {
            entry
                .message
                .starts_with("could not look for cronjobs cut short")
                && entry.level == Level::Error
        });
        failed.count() >= 2
    });
    stage.give_table_back();
    assert_eq!(stage.next(), rerun("10:00:00", 2));
    stage.finished("10:00:00");
}

fn jobs_get_their_own_reruns(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let names = ["a", "b", "c"].map(unique);
    let (begun, ran) = crossbeam_channel::unbounded();
    let mut scheduler = Scheduler::new(&stage.leases)
        .sweep_every(Duration::ZERO)
        .clock(&stage.clock);
    for name in &names {
        let begun = begun.clone();
        scheduler = scheduler.job(name, "* * * * *", move |round| {
            let name = round.name().to_owned();
            begun.send((name, super::ran(round))).unwrap();
            Ok(())
        });
    }
    let _running = scheduler.start().unwrap();
    for name in &names[..2] {
        let lease = format!("cron:{name}");
        let claimed = stage.other_leases().try_claim_slot(&lease, at("10:00:00"));
        std::mem::forget(claimed.unwrap().expect("the instant"));
        stage.raw().expire(&lease);
    }
    let mut all: Vec<(String, Ran)> = (0..2).map(|_| ran.recv_timeout(LONG).unwrap()).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    let again = |name: &String| (name.clone(), rerun("10:00:00", 2));
    assert_eq!(all, [again(&names[0]), again(&names[1])]);
    stage.clock.settle();
    stage.clock.advance(MINUTE);
    let mut all: Vec<String> = (0..3).map(|_| ran.recv_timeout(LONG).unwrap().0).collect();
    all.sort();
    assert_eq!(all, names);
}

fn an_instant_whose_claim_a_stop_overtakes_is_run_by_another(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let network = Proxy::to(stage.database.url());
    let (instance, early) = (unique("instance"), TestClock::new(at("10:00:30")));
    let leases = Leases::builder().timings(TIMINGS).instance(&instance);
    let leases = leases.build(&network.url(stage.database.url())).unwrap();
    let a = stage.run(Scheduler::new(&leases), &early, |_| Ok(()));
    let _b = stage.start(|_| Ok(()));
    early.settle();
    network.freeze_reply_to(&instance);
    early.set(at("10:01:00"));
    eventually(LONG, "one has claimed it", || {
        stage.raw().row(&stage.lease()).is_some()
    });
    stage.set("10:01:00");
    stage.no_round();
    stage.log(Level::Debug, "cronjob instant claimed elsewhere");

    let stops = std::thread::spawn(move || a.stop(LONG));
    std::thread::sleep(Duration::from_millis(100));
    network.thaw();
    stops.join().unwrap().unwrap();
    assert_eq!(stage.next(), rerun("10:01:00", 2));
    stage.finished("10:01:00");
}
