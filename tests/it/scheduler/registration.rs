//! What can be registered, and what is said of what cannot.

use std::time::Duration;

use diesel_lease::scheduler::{Scheduler, TestClock};
use diesel_lease::{Error, InvalidName, Leases, Mistake};
use log::Level;

use super::{Captured, at};
use crate::support::{LONG, eventually, unique};

/// Nothing here asks a database.
fn leases() -> Leases {
    Leases::connect("/no/such/folder/leases.db").unwrap()
}

fn scheduler() -> Scheduler {
    Scheduler::new(&leases())
}

#[track_caller]
fn mistakes(scheduler: Scheduler) -> Vec<(String, Mistake)> {
    match scheduler.start() {
        Err(Error::InvalidSchedule(invalid)) => invalid.mistakes().to_vec(),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn only_mistake(scheduler: Scheduler) -> Mistake {
    let mut mistakes = mistakes(scheduler);
    assert_eq!(mistakes.len(), 1, "{mistakes:?}");
    mistakes.remove(0).1
}

#[test]
fn all_mistakes_are_reported_together() {
    let long = "n".repeat(187);
    let scheduler = scheduler()
        .job("right", "* * * * *", |_| Ok(()))
        .job("", "* * * * *", |_| Ok(()))
        .job("twice", "* * * * *", |_| Ok(()))
        .local_job("twice", "@daily", |_| Ok(()))
        .job("expression", "every day", |_| Ok(()))
        .job("no expression", "", |_| Ok(()))
        .job("zone", "@daily", |_| Ok(()))
        .time_zone("Mars/Olympus")
        .local_job("local zone", "@daily", |_| Ok(()))
        .time_zone("Local")
        .job(&long, "* * * * *", |_| Ok(()))
        .job(" outer ", "61 * * * *", |_| Ok(()))
        .time_zone("UTC+1");
    let error = scheduler.start().unwrap_err();
    let Error::InvalidSchedule(invalid) = &error else {
        panic!("{error:?}");
    };
    let of = |job: &str| -> Vec<&Mistake> {
        let found = invalid.mistakes().iter().filter(|(name, _)| name == job);
        found.map(|(_, mistake)| mistake).collect()
    };
    assert_eq!(of("right"), Vec::<&Mistake>::new());
    assert_eq!(of(""), [&Mistake::Name(InvalidName::Empty)]);
    assert_eq!(of("twice"), [&Mistake::Twice, &Mistake::Twice]);
    assert!(matches!(of("expression")[..], [Mistake::Expression(_)]));
    assert!(matches!(of("no expression")[..], [Mistake::Expression(_)]));
    assert_eq!(of("zone"), [&Mistake::Zone("Mars/Olympus".to_owned())]);
    assert_eq!(of("local zone"), [&Mistake::LocalZone]);
    assert!(matches!(
        of(&long)[..],
        [Mistake::Name(InvalidName::TooLong { bytes: 192 })]
    ));
    assert!(matches!(
        of(" outer ")[..],
        [
            Mistake::Name(InvalidName::OuterWhiteSpace { .. }),
            Mistake::Zone(_),
            Mistake::Expression(_)
        ]
    ));
    // Said once, with the job and the reason.
    assert_eq!(error.to_string(), "the schedule is not valid");
    let text = std::error::Error::source(&error).unwrap().to_string();
    for said in [
        "job \"twice\": another job has the same name",
        "job \"zone\": there is no time zone \"Mars/Olympus\"",
        "job \"local zone\": the machine's own time zone may differ between replicas",
    ] {
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn a_name_may_fill_what_its_prefix_leaves() {
    let running = scheduler()
        .local_job(&"n".repeat(186), "@daily", |_| Ok(()))
        .start()
        .unwrap();
    running.stop(LONG).unwrap();
}

#[test]
fn a_time_zone_needs_a_job_before_it() {
    let mistakes = mistakes(scheduler().time_zone("Europe/Paris"));
    assert!(!mistakes.is_empty());
}

#[test]
fn a_zone_within_an_expression_is_refused() {
    for expression in [
        "CRON_TZ=Asia/Shanghai 0 2 * * *",
        "TZ=Local 0 2 * * *",
        "CRON_TZ=Local @daily",
    ] {
        let mistake = only_mistake(scheduler().job("job", expression, |_| Ok(())));
        assert!(matches!(mistake, Mistake::Expression(_)), "{mistake}");
    }
}

#[test]
fn the_zone_of_the_machine_is_refused_by_any_spelling() {
    for zone in ["Local", "local", "LOCAL"] {
        let scheduler = scheduler().job("job", "@daily", |_| Ok(())).time_zone(zone);
        assert_eq!(only_mistake(scheduler), Mistake::LocalZone);
    }
}

#[test]
fn an_expression_that_never_matches_ends_its_job_with_a_warning() {
    let job = unique("never");
    let log = Captured::with("job", &job);
    let running = scheduler()
        .job(&job, "0 0 30 2 *", |_| Ok(()))
        .clock(&TestClock::new(at("10:00:00")))
        .catch_up_within(Duration::MAX)
        .start()
        .unwrap();
    eventually(LONG, "the warning", || {
        log.has(Level::Warn, "cronjob has no further instant")
    });
    let entries = log.entries();
    assert_eq!(entries.last().unwrap().get("spec"), Some("0 0 30 2 *"));
    running.stop(LONG).unwrap();
}

#[test]
fn a_scheduler_without_jobs_starts_and_stops() {
    scheduler().start().unwrap().stop(LONG).unwrap();
}
