use std::time::Duration;

use chrono::{DateTime, Utc};
use chrono_tz::Tz;
use proptest::prelude::*;

use super::schedule::{Schedule, zone};
use crate::mistakes::Mistake;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn at(text: &str) -> DateTime<Utc> {
    text.parse().expect("an instant")
}

fn schedule(expression: &str, name: &str) -> Schedule {
    Schedule::parse(expression, zone(name).expect("a zone")).expect("a schedule")
}

fn instants(expression: &str, zone: &str, from: &str, count: usize) -> Vec<String> {
    let schedule = schedule(expression, zone);
    std::iter::successors(schedule.after(at(from)), |at| schedule.after(*at))
        .take(count)
        .map(|at| at.format("%FT%T").to_string())
        .collect()
}

#[test]
fn five_fields_six_fields_and_descriptors_are_read_in_utc() {
    assert_eq!(
        instants("30 6 * * *", "UTC", "2026-11-30T00:00:00Z", 1),
        ["2026-11-30T06:30:00"]
    );
    assert_eq!(
        instants("*/20 * * * * *", "UTC", "2026-11-30T00:00:01Z", 2),
        ["2026-11-30T00:00:20", "2026-11-30T00:00:40"]
    );
    assert_eq!(
        instants("@daily", "UTC", "2026-11-30T00:00:00Z", 1),
        ["2026-12-01T00:00:00"]
    );
    assert_eq!(
        instants("@midnight", "UTC", "2026-11-30T00:00:00Z", 1),
        ["2026-12-01T00:00:00"]
    );
}

#[test]
fn every_is_on_multiples_since_1970() {
    assert_eq!(
        instants("@every 5m", "UTC", "2026-11-30T10:03:20Z", 2),
        ["2026-11-30T10:05:00", "2026-11-30T10:10:00"]
    );
    for wrong in ["@every", "@every 0s", "@every 100ms", "@every soon"] {
        assert!(
            matches!(Schedule::parse(wrong, Tz::UTC), Err(Mistake::Expression(_))),
            "{wrong}"
        );
    }
}

#[test]
fn a_time_zone_shifts_the_instants() {
    assert_eq!(
        instants("0 2 * * *", "Asia/Shanghai", "2026-11-30T00:00:00Z", 1),
        ["2026-11-30T18:00:00"]
    );
    assert_eq!(zone("Local"), Err(Mistake::LocalZone));
    assert_eq!(
        zone("Mars/Olympus"),
        Err(Mistake::Zone("Mars/Olympus".to_owned()))
    );
}

#[test]
fn a_fixed_time_runs_once_on_the_day_of_a_daylight_saving_change() {
    // 02:30 does not exist on 29 March 2026 in Paris, and exists twice on 25 October.
    assert_eq!(
        instants("30 2 * * *", "Europe/Paris", "2026-03-27T12:00:00Z", 3),
        [
            "2026-03-28T01:30:00",
            "2026-03-29T01:00:00",
            "2026-03-30T00:30:00"
        ]
    );
    assert_eq!(
        instants("30 2 * * *", "Europe/Paris", "2026-10-24T12:00:00Z", 2),
        ["2026-10-25T00:30:00", "2026-10-26T01:30:00"]
    );
    // 8 March and 1 November 2026 in New York.
    assert_eq!(
        instants("30 2 * * *", "America/New_York", "2026-03-07T12:00:00Z", 2),
        ["2026-03-08T07:00:00", "2026-03-09T06:30:00"]
    );
    assert_eq!(
        instants("30 1 * * *", "America/New_York", "2026-10-31T12:00:00Z", 2),
        ["2026-11-01T05:30:00", "2026-11-02T06:30:00"]
    );
}

#[test]
fn an_hourly_job_follows_real_time_through_a_change() {
    assert_eq!(
        instants("0 * * * *", "Europe/Paris", "2026-10-24T23:30:00Z", 4),
        [
            "2026-10-25T00:00:00",
            "2026-10-25T01:00:00",
            "2026-10-25T02:00:00",
            "2026-10-25T03:00:00"
        ]
    );
    assert_eq!(
        instants("0 * * * *", "Europe/Paris", "2026-03-28T23:30:00Z", 3),
        [
            "2026-03-29T00:00:00",
            "2026-03-29T01:00:00",
            "2026-03-29T02:00:00"
        ]
    );
}

#[test]
fn leap_days_come_and_impossible_days_never() {
    assert_eq!(
        instants("0 0 29 2 *", "UTC", "2026-11-30T00:00:00Z", 2),
        ["2028-02-29T00:00:00", "2032-02-29T00:00:00"]
    );
    assert_eq!(
        schedule("0 0 30 2 *", "UTC").after(at("2026-11-30T00:00:00Z")),
        None
    );
}

#[test]
fn the_last_instant_counts_now_and_not_what_is_too_long_ago() {
    let every_minute = schedule("* * * * *", "UTC");
    assert_eq!(
        every_minute.last(at("2026-11-30T10:00:30Z"), DAY),
        Some(at("2026-11-30T10:00:00Z"))
    );
    assert_eq!(
        every_minute.last(at("2026-11-30T10:00:00Z"), DAY),
        Some(at("2026-11-30T10:00:00Z"))
    );
    assert_eq!(
        schedule("@daily", "UTC").last(at("2026-11-30T10:00:00Z"), DAY),
        Some(at("2026-11-30T00:00:00Z"))
    );
    assert_eq!(
        schedule("@yearly", "UTC").last(at("2026-06-30T10:00:00Z"), DAY),
        None
    );
    assert_eq!(
        schedule("@every 1h", "UTC").last(at("2026-11-30T10:59:59Z"), DAY),
        Some(at("2026-11-30T10:00:00Z"))
    );
}

#[test]
fn instants_between_two_times_are_counted() {
    let every_minute = schedule("* * * * *", "UTC");
    let count = |from, to| every_minute.count(at(from), at(to), 100);
    assert_eq!(count("2026-11-30T10:00:00Z", "2026-11-30T10:03:59Z"), 3);
    assert_eq!(count("2026-11-30T10:00:00Z", "2026-11-30T10:00:59Z"), 0);
    assert_eq!(count("2026-11-30T10:00:00Z", "2027-11-30T10:00:00Z"), 100);
}

/// An expression, or what could be taken for one.
fn expression() -> impl Strategy<Value = String> {
    let field = prop::sample::select(vec![
        "*",
        "0",
        "1",
        "5",
        "7",
        "31",
        "59",
        "60",
        "99",
        "-1",
        "1-5",
        "5-1",
        "*/2",
        "*/0",
        "1,2,3",
        "L",
        "1L",
        "15W",
        "LW",
        "MON",
        "mon-fri",
        "FEB",
        "1#3",
        "?",
        "H",
        "+",
        "+1",
        "",
        "x",
        "é",
        "99999999999",
    ]);
    let fields = prop::collection::vec(field, 0..8).prop_map(|fields| fields.join(" "));
    let every = prop::sample::select(vec![
        "0s",
        "1s",
        "90s",
        "1h 30m",
        "1ms",
        "1y",
        "584542046090y",
        "18446744073709551615s",
        "-1s",
        "é",
        "",
        "9223372036854775807s",
        "9223372036854775808s",
    ]);
    let named = prop::sample::select(vec![
        "@daily",
        "@hourly",
        "@midnight",
        "@yearly",
        "@reboot",
        "@every",
        "@",
        "@DAILY",
    ]);
    prop_oneof![
        4 => fields,
        1 => every.prop_map(|every| format!("@every {every}")),
        1 => named.prop_map(str::to_owned),
        1 => any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_expression_is_refused_or_rises(
        expression in expression(),
        zone in prop::sample::select(chrono_tz::TZ_VARIANTS.to_vec()),
        seconds in -10_000_000_000..10_000_000_000_i64,
        millis in 0..1_000_u32,
    ) {
        let Ok(schedule) = Schedule::parse(&expression, zone) else {
            return Ok(());
        };
        let time = DateTime::from_timestamp(seconds, millis * 1_000_000).expect("a time");
        let mut before = time;
        for _ in 0..5 {
            let Some(next) = schedule.after(before) else { break };
            prop_assert!(next > before, "{:?}: {} after {}", expression, next, before);
            prop_assert_eq!(schedule.last(next, DAY), Some(next));
            before = next;
        }
        if let Some(last) = schedule.last(time, Duration::MAX) {
            prop_assert!(last <= time, "{:?}: {} at {}", expression, last, time);
        }
        schedule.count(time, DateTime::<Utc>::MAX_UTC, 3);
    }

    #[test]
    fn any_zone_is_refused_or_found(name in any::<String>()) {
        if let Ok(zone) = zone(&name) {
            prop_assert_eq!(zone.name(), name);
        }
    }
}
