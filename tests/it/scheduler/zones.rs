//! Instants in time zones, in days of both kinds, and around the changes of daylight saving.

use chrono::{DateTime, TimeDelta, Utc};
use diesel_lease::Leases;
use diesel_lease::scheduler::{Scheduler, TestClock};

/// The first instants of an expression after `from`, as days and times in UTC.
fn instants(expression: &str, zone: &str, from: &str, count: usize) -> Vec<String> {
    let mut from: DateTime<Utc> = format!("{from}:00Z").parse().unwrap();
    let mut all = Vec::new();
    while all.len() < count {
        from = first_after(expression, zone, from);
        all.push(from.format("%d %H:%M").to_string());
    }
    all
}

/// A job's first round after its clock has moved on by a year.
fn first_after(expression: &str, zone: &str, from: DateTime<Utc>) -> DateTime<Utc> {
    let clock = TestClock::new(from);
    let leases = Leases::connect("/no/such/folder/leases.db").unwrap();
    let (begun, ran) = crossbeam_channel::unbounded();
    let _running = Scheduler::new(&leases)
        .local_job("job", expression, move |round| {
            let _ = begun.send(round.at());
            Ok(())
        })
        .time_zone(zone)
        .clock(&clock)
        .start()
        .unwrap();
    clock.set(from + TimeDelta::days(366));
    clock.settle();
    ran.try_recv().expect("a round")
}

const PARIS: &str = "Europe/Paris";
const NEW_YORK: &str = "America/New_York";

#[test]
fn an_expression_is_read_in_the_zone_of_its_job() {
    let noon = "2026-03-02T12:00";
    assert_eq!(instants("@daily", "UTC", noon, 1), ["03 00:00"]);
    assert_eq!(
        instants("0 2 * * *", "Asia/Shanghai", noon, 1),
        ["02 18:00"]
    );
    assert_eq!(instants("30 0 2 * * *", "UTC", noon, 1), ["03 02:00"]);
    assert_eq!(
        instants("@every 5m", PARIS, noon, 2),
        ["02 12:05", "02 12:10"]
    );
}

#[test]
fn a_single_time_of_day_is_run_once_on_the_day_of_a_change() {
    // Left out on 29 March 2026: right after the gap. Twice on 25 October: at the first.
    assert_eq!(
        instants("30 2 * * *", PARIS, "2026-03-28T12:00", 2),
        ["29 01:00", "30 00:30"]
    );
    assert_eq!(
        instants("30 2 * * *", PARIS, "2026-10-24T12:00", 2),
        ["25 00:30", "26 01:30"]
    );
    assert_eq!(
        instants("30 2 * * *", NEW_YORK, "2026-03-07T12:00", 2),
        ["08 07:00", "09 06:30"]
    );
    assert_eq!(
        instants("30 1 * * *", NEW_YORK, "2026-10-31T12:00", 2),
        ["01 05:30", "02 06:30"]
    );
}

#[test]
fn several_times_of_day_are_run_whenever_the_local_time_is_one_of_them() {
    // Not at all in the hour left out, and twice in the repeated one: lists, ranges and steps.
    for expression in ["15,45 2,14 * * *", "15-45/30 2,14 * * *"] {
        assert_eq!(
            instants(expression, PARIS, "2026-03-28T18:00", 2),
            ["29 12:15", "29 12:45"]
        );
        assert_eq!(
            instants(expression, PARIS, "2026-10-24T18:00", 5),
            ["25 00:15", "25 00:45", "25 01:15", "25 01:45", "25 13:15"]
        );
    }
    assert_eq!(
        instants("0 1,2 * * *", NEW_YORK, "2026-10-31T12:00", 4),
        ["01 05:00", "01 06:00", "01 07:00", "02 06:00"]
    );
    // So every hour, or minute, follows real time.
    assert_eq!(
        instants("0 * * * *", NEW_YORK, "2026-03-08T05:30", 3),
        ["08 06:00", "08 07:00", "08 08:00"]
    );
    assert_eq!(
        instants("*/30 * * * *", PARIS, "2026-10-25T00:15", 4),
        ["25 00:30", "25 01:00", "25 01:30", "25 02:00"]
    );
}

#[test]
fn a_day_is_one_of_the_month_or_of_the_week_unless_a_plus_asks_for_both() {
    // 13 March 2026 is a Friday.
    let from = "2026-03-02T12:00";
    assert_eq!(
        instants("0 0 12 * FRI", "UTC", from, 3),
        ["06 00:00", "12 00:00", "13 00:00"]
    );
    assert_eq!(
        instants("0 0 13 * +FRI", "UTC", from, 2),
        ["13 00:00", "13 00:00"]
    );
    assert_eq!(
        instants("0 0 * * FRI", "UTC", from, 2),
        ["06 00:00", "13 00:00"]
    );
    assert_eq!(
        instants("0 0 12 * *", "UTC", from, 2),
        ["12 00:00", "12 00:00"]
    );
    // The first Monday.
    assert_eq!(
        instants("0 0 1-7 * +MON", "UTC", "2026-03-02T12:00", 2),
        ["06 00:00", "04 00:00"]
    );
    // A step is no wildcard here.
    assert_eq!(
        instants("0 0 */10 * FRI", "UTC", from, 3),
        ["06 00:00", "11 00:00", "13 00:00"]
    );
}

#[test]
fn leap_days_come() {
    assert_eq!(
        instants("0 0 29 2 *", "UTC", "2027-12-01T00:00", 1),
        ["29 00:00"]
    );
}
