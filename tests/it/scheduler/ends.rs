//! How a round ends: finished, whatever came of it, or cut short because it was told to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use diesel_lease::scheduler::{Round, Scheduler};
use diesel_lease::{BoxError, Ending, Error, LossCause, StopToken, Tenure};
use log::Level;

use super::{Stage, assert_pairs, at, builder, first};
use crate::support::proxy::Proxy;
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    fn an_error_of_the_job_is_its_end,
    fn a_panic_of_the_job_is_its_end,
    fn a_round_that_is_told_to_stop_is_cut_short_by_an_ending_alone,
    fn a_stop_waits_for_the_round,
    fn a_drop_tells_the_round_and_does_not_wait,
    fn a_stopped_parent_ends_the_scheduler,
    fn a_round_that_outlasts_the_stop_is_abandoned;
    servers: fn a_stop_does_not_wait_for_a_database_that_is_silent,
}

/// What is in the log of a round that an own error or a panic has ended; the job goes on.
fn ends(
    engine: Engine,
    work: impl Fn(&Round<'_>) -> Result<(), BoxError> + Send + Sync + 'static,
    text: &str,
) -> String {
    let stage = Stage::new(engine, "10:00:30");
    let _running = stage.start(work);
    stage.set("10:01:00");
    assert_eq!(stage.next(), first("10:01:00", 1));
    stage.finished("10:01:00");
    let entry = stage.log(Level::Error, text);
    assert_pairs(
        &entry,
        &[
            ("job", &stage.job),
            ("spec", "* * * * *"),
            ("at", "2026-03-02T10:01:00+00:00"),
            ("term", "1"),
            ("rerun", "false"),
            ("catch_up", "false"),
        ],
    );
    stage.no_round();
    stage.set("10:02:00");
    assert_eq!(stage.next(), first("10:02:00", 2));
    stage.finished("10:02:00");
    entry.message
}

fn an_error_of_the_job_is_its_end(engine: Engine) {
    let message = ends(
        engine,
        |_| Err("out of cheese".into()),
        "finished cronjob with error",
    );
    assert_eq!(message, "finished cronjob with error: out of cheese");
    // Nobody has told it to end: that is an error like any other.
    let message = ends(
        engine,
        |_| Err(Ending::Stopped.into()),
        "finished cronjob with error",
    );
    assert_eq!(message, "finished cronjob with error: asked to stop");
}

fn a_panic_of_the_job_is_its_end(engine: Engine) {
    let message = ends(engine, |_| panic!("out of cheese"), "cronjob panicked");
    assert!(
        message.starts_with("cronjob panicked: out of cheese at tests/it/scheduler/ends.rs:"),
        "{message}"
    );
}

#[derive(Debug, thiserror::Error)]
#[error("half of it is missing")]
struct Own(#[source] Ending);

fn a_round_that_is_told_to_stop_is_cut_short_by_an_ending_alone(engine: Engine) {
    type Answer = fn(Ending) -> Result<(), BoxError>;
    let answers: [(&str, bool, Answer); 5] = [
        ("nothing", false, |_| Ok(())),
        ("the ending", true, |ending| Err(ending.into())),
        ("an own error", false, |_| Err("out of cheese".into())),
        ("an own error for it", false, |ending| {
            Err(Own(ending).into())
        }),
        ("a panic", false, |_| panic!("out of cheese")),
    ];
    for (what, is_cut_short, answer) in answers {
        let stage = Stage::new(engine, "10:00:30");
        let running = stage.start(move |round| {
            let ending = round.tenure().unwrap().sleep(LONG).unwrap_err();
            answer(ending)
        });
        stage.set("10:01:00");
        assert_eq!(stage.next(), first("10:01:00", 1));
        running.stop(LONG).unwrap();
        let row = stage.row();
        assert_eq!(row.expires_at_ms, 0, "{what}");
        assert_eq!(row.unfinished_slot_ms != 0, is_cut_short, "{what}");
        assert_eq!(
            stage.logged("cronjob interrupted: asked to stop").len(),
            usize::from(is_cut_short),
            "{what}"
        );
    }
}

fn a_stop_waits_for_the_round(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let running = stage.start(|round| {
        let tenure = round.tenure().unwrap();
        let _ = tenure.ended().recv();
        assert_eq!(tenure.ending(), Some(Ending::Stopped));
        // Renewals go on until it has returned.
        std::thread::sleep(Duration::from_millis(500));
        assert!(!tenure.is_lost());
        Ok(())
    });
    stage.set("10:01:00");
    stage.next();
    let start = Instant::now();
    running.stop(LONG).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(500));
    // All is done when it returns.
    let row = stage.row();
    assert_eq!((row.expires_at_ms, row.unfinished_slot_ms), (0, 0));
    stage.log(Level::Info, "finished cronjob");
}

fn a_drop_tells_the_round_and_does_not_wait(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let running = stage.start(move |round| {
        let _ = round.tenure().unwrap().ended().recv();
        let _ = wait.recv();
        Ok(())
    });
    stage.set("10:01:00");
    stage.next();
    drop(running);
    drop(go);
    stage.finished("10:01:00");
    stage.set("10:02:00");
    stage.no_round();
}

fn a_stopped_parent_ends_the_scheduler(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    // With the threads gone there is nothing to wait for. That takes them a moment.
    let mut moment = Duration::from_millis(20);
    let mut minute = at("10:00:00");
    eventually(LONG, "a stop without waiting", || {
        moment *= 2;
        minute += super::MINUTE;
        let token = StopToken::new();
        let scheduler = Scheduler::new(&stage.leases.with_stop(&token));
        let running = stage.run(scheduler, &stage.clock, |round| {
            round.tenure().unwrap().sleep(LONG)?;
            Ok(())
        });
        stage.clock.set(minute);
        stage.next();
        token.stop();
        std::thread::sleep(moment);
        running.stop(Duration::ZERO).is_ok()
    });
    stage.log(Level::Warn, "cronjob interrupted: asked to stop");
}

fn a_round_that_outlasts_the_stop_is_abandoned(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let failed = Arc::new(AtomicUsize::new(0));
    let fails = Arc::clone(&failed);
    let leases = builder()
        .timings(diesel_lease::Timings {
            grace: Duration::from_millis(200),
            ..super::TIMINGS
        })
        .on_work_will_not_stop(move |lost| {
            assert_eq!(lost.cause(), LossCause::Abandoned);
            fails.fetch_add(1, Ordering::SeqCst);
        })
        .build(stage.database.url())
        .unwrap();
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let (tells, told) = crossbeam_channel::unbounded::<Tenure>();
    let running = stage.run(Scheduler::new(&leases), &stage.clock, move |round| {
        tells.send(round.tenure().unwrap().clone()).unwrap();
        let _ = wait.recv();
        Ok(())
    });
    stage.set("10:01:00");
    let tenure = told.recv_timeout(LONG).unwrap();
    let start = Instant::now();
    let answer = running.stop(Duration::from_millis(100));
    assert!(matches!(answer, Err(Error::TimedOut)), "{answer:?}");
    assert!(start.elapsed() >= Duration::from_millis(100));
    assert_eq!(tenure.ending(), Some(Ending::Lost(LossCause::Abandoned)));
    assert!(tenure.verify().is_err());
    eventually(LONG, "the program is told", || {
        failed.load(Ordering::SeqCst) == 1
    });
    // Nobody renews it: it runs out by itself.
    let expires = stage.row().expires_at_ms;
    std::thread::sleep(super::TIMINGS.renew * 3);
    assert_eq!(stage.row().expires_at_ms, expires);
    drop(go);
    stage.log(Level::Warn, "cronjob lost its lease during the round");
    // It has come to its end all the same, and is not run again.
    eventually(LONG, "it is recorded as finished", || {
        stage.row().unfinished_slot_ms == 0
    });
}

fn a_stop_does_not_wait_for_a_database_that_is_silent(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let network = Proxy::to(stage.database.url());
    let leases = builder().build(&network.url(stage.database.url())).unwrap();
    let scheduler = Scheduler::new(&leases).sweep_every(Duration::ZERO);
    let running = stage.run(scheduler, &stage.clock, |_| Ok(()));
    stage.clock.settle();
    network.freeze();
    // By now a look is on its way.
    std::thread::sleep(super::LOOK);
    let start = Instant::now();
    running.stop(LONG).unwrap();
    assert!(start.elapsed() < super::TIMINGS.attempt / 2);
}
