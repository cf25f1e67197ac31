//! Rounds whose lease is lost on the way.

use std::sync::Arc;
use std::time::Duration;

use diesel_lease::scheduler::Scheduler;
use diesel_lease::{BoxError, Ending, LossCause, Tenure, Timings};
use log::Level;
use parking_lot::Mutex;

use super::{Stage, TIMINGS, assert_pairs, builder, first, rerun};
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    fn a_round_that_ends_because_its_lease_is_lost_is_cut_short,
    fn a_round_that_goes_through_although_its_lease_is_lost_is_finished,
    fn a_loss_goes_before_a_stop,
    fn a_round_that_ignores_the_loss_is_reported,
}

/// Until the lease is lost.
fn until_lost(tenure: &Tenure) -> LossCause {
    let _ = tenure.ended().recv_timeout(LONG);
    match tenure.ending() {
        Some(Ending::Lost(cause)) => cause,
        other => panic!("{other:?}"),
    }
}

fn a_round_that_ends_because_its_lease_is_lost_is_cut_short(engine: Engine) {
    type Answer = fn(&Tenure) -> BoxError;
    let answers: [Answer; 4] = [
        |tenure| tenure.ending().unwrap().into(),
        |tenure| tenure.check().unwrap_err().into(),
        |tenure| tenure.verify().unwrap_err().into(),
        |tenure| diesel::result::Error::from(tenure.check().unwrap_err()).into(),
    ];
    for answer in answers {
        let stage = Stage::new(engine, "10:00:30");
        let running = stage.start_without_sweep(move |round| {
            let tenure = round.tenure().unwrap();
            until_lost(tenure);
            Err(answer(tenure))
        });
        stage.set("10:01:00");
        assert_eq!(stage.next(), first("10:01:00", 1));
        let taken = stage.raw().take_over(&stage.lease());
        let interrupted = stage.log(Level::Warn, "cronjob interrupted");
        assert_eq!(
            interrupted.message,
            "cronjob interrupted: the lease is lost: it was taken by another holder or given back"
        );
        assert_pairs(&interrupted, &[("term", "1")]);
        running.stop(LONG).unwrap();
        stage.not_logged("cronjob lost its lease");
        // Nothing of it was written.
        assert_eq!(stage.row(), taken);

        stage.raw().expire(&stage.lease());
        let _other = stage.start(|_| Ok(()));
        assert_eq!(stage.next(), rerun("10:01:00", 3));
        stage.finished("10:01:00");
    }
}

fn a_round_that_goes_through_although_its_lease_is_lost_is_finished(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let _running = stage.start(|round| {
        until_lost(round.tenure().unwrap());
        Ok(())
    });
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 1));
    let taken = stage.raw().take_over(&stage.lease());
    let warning = stage.log(Level::Warn, "cronjob lost its lease during the round");
    assert_pairs(
        &warning,
        &[
            ("job", &stage.job),
            ("at", "2026-03-02T10:01:00+00:00"),
            ("term", "1"),
        ],
    );
    assert_eq!(stage.logged("finished cronjob").len(), 1);
    eventually(LONG, "it is recorded as finished", || {
        stage.row().unfinished_slot_ms == 0
    });
    // Whose lease it is now is left alone.
    let row = stage.row();
    assert_eq!(
        (row.holder, row.expires_at_ms, row.slot_ms),
        (taken.holder, taken.expires_at_ms, taken.slot_ms)
    );
}

fn a_loss_goes_before_a_stop(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let running = stage.start(move |round| {
        let tenure = round.tenure().unwrap();
        assert_eq!(tenure.sleep(LONG), Err(Ending::Stopped));
        let _ = wait.recv();
        // Slow to wind down, and the renewals find the loss.
        while !tenure.is_lost() {
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(Ending::Stopped.into())
    });
    stage.set("10:01:00");
    stage.next();
    let stops = std::thread::spawn(move || running.stop(LONG));
    stage.raw().take_over(&stage.lease());
    drop(go);
    stops.join().unwrap().unwrap();
    let interrupted = stage.log(Level::Warn, "cronjob interrupted");
    assert!(
        interrupted.message.contains("the lease is lost"),
        "{interrupted}"
    );
    assert_ne!(stage.row().unfinished_slot_ms, 0);
}

fn a_round_that_ignores_the_loss_is_reported(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let reported = Arc::new(Mutex::new(None));
    let report = Arc::clone(&reported);
    let leases = builder()
        .timings(Timings {
            grace: Duration::from_millis(200),
            ..TIMINGS
        })
        .on_work_will_not_stop(move |lost| *report.lock() = Some(lost.name().to_owned()))
        .build(stage.database.url())
        .unwrap();
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let _running = stage.run(Scheduler::new(&leases), &stage.clock, move |_| {
        let _ = wait.recv();
        Ok(())
    });
    stage.set("10:01:00");
    stage.next();
    stage.raw().take_over(&stage.lease());
    eventually(LONG, "the program is told", || {
        *reported.lock() == Some(stage.lease())
    });
    // It is waited for all the same.
    stage.not_logged("finished cronjob");
    drop(go);
    stage.log(Level::Info, "finished cronjob");
}
