//! What a replica does with the last instant when it starts.

use std::time::Duration;

use diesel_lease::scheduler::Scheduler;
use log::Level;

use super::{Stage, assert_pairs, at, catch_up, first, ran};
use crate::support::{Engine, engines};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

engines! {
    fn the_last_instant_that_all_have_missed_is_run_at_the_start,
    fn instants_that_pass_during_a_catch_up_are_skipped,
    fn nothing_is_caught_up_without_a_record_or_when_it_is_on_record,
    fn what_is_older_than_the_limit_is_not_caught_up,
    fn the_limit_is_a_day,
    fn a_start_goes_on_when_the_record_cannot_be_read,
}

fn the_last_instant_that_all_have_missed_is_run_at_the_start(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    stage.on_record("09:58:00");
    let _running = stage.start(|_| Ok(()));
    assert_eq!(stage.next(), catch_up("10:00:00", 2));
    stage.finished("10:00:00");
    stage.no_round();
    let finished = stage.log(Level::Info, "finished cronjob");
    assert_pairs(&finished, &[("catch_up", "true"), ("rerun", "false")]);
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 3));
    stage.finished("10:01:00");
}

fn instants_that_pass_during_a_catch_up_are_skipped(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    stage.on_record("09:58:00");
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let _running = stage.start(move |_| {
        let _ = wait.recv();
        Ok(())
    });
    assert_eq!(stage.next(), catch_up("10:00:00", 2));
    stage.set("10:01:30");
    drop(go);
    stage.finished("10:01:00");
    stage.no_round();
    let skipped = stage.log(Level::Warn, "cronjob skipped instants");
    assert_pairs(
        &skipped,
        &[("skipped", "1"), ("after", "2026-03-02T10:00:00+00:00")],
    );
    stage.set("10:02:00");
    assert_eq!(stage.next(), first("10:02:00", 3));
    stage.finished("10:02:00");
}

fn nothing_is_caught_up_without_a_record_or_when_it_is_on_record(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let running = stage.start(|_| Ok(()));
    stage.no_round();
    assert_eq!(stage.raw().row(&stage.lease()), None);
    drop(running);

    stage.on_record("10:00:00");
    let _running = stage.start(|_| Ok(()));
    stage.no_round();
    assert_eq!(stage.row().term, 1);
}

fn what_is_older_than_the_limit_is_not_caught_up(engine: Engine) {
    let stage = Stage::new(engine, "10:00:31");
    stage.on_record("09:58:00");
    let within =
        |seconds| Scheduler::new(&stage.leases).catch_up_within(Duration::from_secs(seconds));
    let running = stage.run(within(30), &stage.clock, |_| Ok(()));
    stage.no_round();
    drop(running);
    let _running = stage.run(within(31), &stage.clock, |_| Ok(()));
    assert_eq!(stage.next(), catch_up("10:00:00", 2));
    stage.finished("10:00:00");
}

fn the_limit_is_a_day(engine: Engine) {
    let stage = Stage::new(engine, "00:00:01");
    let lease = stage
        .leases
        .try_claim_slot(&stage.lease(), at("00:00:00") - 30 * DAY);
    lease.unwrap().unwrap().finish(None).unwrap();
    // The last instant was the start of the day before.
    let start = || {
        let begun = stage.begun.clone();
        Scheduler::new(&stage.leases)
            .job(&stage.job, "0 0 1 * *", move |round| {
                begun.send(ran(round)).unwrap();
                Ok(())
            })
            .clock(&stage.clock)
            .start()
            .unwrap()
    };
    let running = start();
    stage.no_round();
    drop(running);
    stage.set("00:00:00");
    let _running = start();
    let caught_up = stage.next();
    assert_eq!(caught_up.at, at("00:00:00") - DAY);
    assert!(caught_up.is_catch_up);
    stage.finished_at(caught_up.at);
}

fn a_start_goes_on_when_the_record_cannot_be_read(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    stage.on_record("09:58:00");
    stage.take_table();
    let _running = stage.start(|_| Ok(()));
    stage.log(Level::Error, "cronjob could not read its last instant");
    stage.give_table_back();
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 2));
    stage.finished("10:01:00");
}
