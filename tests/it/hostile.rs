//! Whatever a caller gives: it is refused with a typed error, or it is kept and told exactly.
//!
//! `PROPTEST_CASES` says how much is tried of each.

use std::env;
use std::fmt::Debug;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use diesel_lease::locks::{LockError, NamedLocks};
use diesel_lease::{Error, Leases, Timings, validate_name};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::support::database::Database;
use crate::support::{Engine, engines, unique};

engines! {
    fn any_name_is_refused_or_a_lease_of_its_own,
    fn any_key_is_refused_or_a_lock_of_its_own,
    fn any_instant_is_refused_or_claimed_once,
    fn any_timings_are_refused_or_kept,
    fn any_timeout_is_borne,
}

fn for_any<S: Strategy>(values: &S, test: impl Fn(S::Value) -> Result<(), TestCaseError>)
where
    S::Value: Debug,
{
    let config = Config {
        cases: env::var("PROPTEST_CASES").map_or(40, |cases| cases.parse().expect("a number")),
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new(config)
        .run(values, test)
        .unwrap_or_else(|error| panic!("{error}"));
}

/// What one engine or another folds, cuts, quotes or refuses.
const PIECES: [&str; 32] = [
    "a", "A", "á", "a\u{301}", "ß", "ss", "ı", "I", "İ", "中", "🔒", "🔓", "\u{202e}", "\u{feff}",
    "\u{200b}", "\0", "\n", "\u{7f}", " ", "\u{3000}", "\t", "'", "\"", "`", "\\", "%", "_", "$1",
    "?", ";--", "/*", "\u{fffd}",
];

fn text() -> impl Strategy<Value = String> {
    let pieces = |count| {
        let piece = prop::sample::select(&PIECES[..]);
        prop::collection::vec(piece, count).prop_map(|pieces| pieces.concat())
    };
    let long = (0..400_usize, prop::sample::select(&PIECES[..]));
    prop_oneof![
        4 => pieces(1..6),
        1 => pieces(0..100),
        1 => any::<String>(),
        1 => long.prop_map(|(count, piece)| piece.repeat(count)),
    ]
}

/// As often as not a second text that is close to the first.
fn two_texts() -> impl Strategy<Value = (String, String)> {
    let close = |text: String, how: u8| match how {
        0 => text.to_uppercase(),
        1 => text.to_lowercase(),
        2 => format!("{text} "),
        3 => format!("{text}\u{301}"),
        4 => text.chars().skip(1).collect(),
        _ => text,
    };
    prop_oneof![
        (text(), text()),
        (text(), 0..6_u8).prop_map(move |(one, how)| (one.clone(), close(one, how))),
    ]
}

fn any_name_is_refused_or_a_lease_of_its_own(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    leases.migrate().unwrap();
    for_any(&two_texts(), |(one, other)| {
        let lease = match leases.try_claim(&one) {
            Err(Error::InvalidName(why)) => {
                prop_assert_eq!(validate_name(&one), Err(why));
                let refused = Leases::builder().instance(one).build(database.url());
                prop_assert!(matches!(refused, Err(Error::InvalidInstance(_))));
                return Ok(());
            }
            answer => answer.unwrap().expect("nobody else holds it"),
        };
        prop_assert_eq!(validate_name(&one), Ok(()));
        let builder = Leases::builder().instance(other.clone());
        if let Ok(named) = builder.build(database.url()) {
            let second = named.try_claim(&other).unwrap();
            prop_assert_eq!(second.is_none(), one == other);
            if let Some(second) = second {
                let record = named.inspect(&other).unwrap().expect("a row");
                prop_assert_eq!((record.name(), record.instance()), (&*other, &*other));
                second.release().unwrap();
            }
        }
        let record = leases.inspect(&one).unwrap().expect("a row");
        prop_assert_eq!(record.name(), &one);
        prop_assert!(record.expires_in().is_some());
        lease.release().unwrap();
        let record = leases.inspect(&one).unwrap().expect("a row");
        prop_assert!(record.expires_in().is_none());
        Ok(())
    });
}

fn any_key_is_refused_or_a_lock_of_its_own(engine: Engine) {
    let database = Database::create(engine);
    let locks = NamedLocks::connect(database.url()).unwrap();
    let is_valid = |key: &str| {
        (1..=64).contains(&key.chars().count())
            && !key.chars().any(char::is_control)
            && key.trim() == key
    };
    for_any(&two_texts(), |(one, other)| {
        let lock = match locks.try_acquire(&one) {
            Err(LockError::InvalidKey(_)) => {
                prop_assert!(!is_valid(&one));
                return Ok(());
            }
            answer => answer.unwrap().expect("nobody else has it"),
        };
        prop_assert!(is_valid(&one));
        if is_valid(&other) {
            let second = locks.try_acquire(&other).unwrap();
            prop_assert_eq!(second.is_none(), one == other);
        }
        lock.release().unwrap();
        Ok(())
    });
}

fn instant() -> impl Strategy<Value = DateTime<Utc>> {
    let at = |seconds: i64, nanos: u32| DateTime::from_timestamp(seconds, nanos);
    let (min, max) = (DateTime::<Utc>::MIN_UTC, DateTime::<Utc>::MAX_UTC);
    let edges = [
        min,
        max,
        DateTime::UNIX_EPOCH,
        DateTime::UNIX_EPOCH + TimeDelta::nanoseconds(1),
        DateTime::UNIX_EPOCH + TimeDelta::nanoseconds(999_999),
        DateTime::UNIX_EPOCH + TimeDelta::milliseconds(1),
        DateTime::UNIX_EPOCH - TimeDelta::milliseconds(1),
    ];
    // A leap second has more nanoseconds than others.
    let nanos = 0..2_000_000_000_u32;
    prop_oneof![
        prop::sample::select(edges.to_vec()),
        (min.timestamp()..=max.timestamp(), nanos.clone())
            .prop_filter_map("an instant", move |(seconds, nanos)| at(seconds, nanos)),
        (0..4_000_000_000_i64, nanos)
            .prop_filter_map("an instant", move |(seconds, nanos)| at(seconds, nanos)),
    ]
}

fn any_instant_is_refused_or_claimed_once(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    leases.migrate().unwrap();
    for_any(&(instant(), instant()), |(at, passed)| {
        let name = unique("slot");
        let ms = at.timestamp_millis();
        let lease = match leases.try_claim_slot(&name, at) {
            Err(Error::InvalidSlot(_)) => {
                prop_assert!(ms <= 0);
                return Ok(());
            }
            answer => answer.unwrap().expect("a new name"),
        };
        prop_assert!(ms > 0);
        prop_assert_eq!(lease.slot().map(|slot| slot.timestamp_millis()), Some(ms));
        let last = leases.last_slot(&name).unwrap().expect("an instant");
        prop_assert_eq!(last.timestamp_millis(), ms);
        match lease.finish(Some(passed)) {
            Err(Error::InvalidSlot(_)) => prop_assert!(passed.timestamp_millis() <= 0),
            finished => finished.unwrap(),
        }
        for again in [at, last] {
            prop_assert!(leases.try_claim_slot(&name, again).unwrap().is_none());
        }
        let earlier = last - TimeDelta::milliseconds(1);
        if earlier > DateTime::UNIX_EPOCH {
            prop_assert!(leases.try_claim_slot(&name, earlier).unwrap().is_none());
        }
        Ok(())
    });
}

fn duration() -> impl Strategy<Value = Duration> {
    const DAY: Duration = Duration::from_secs(86_400);
    let edges = [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_nanos(999_999),
        Duration::from_millis(1),
        DAY - Duration::from_nanos(1),
        DAY,
        Duration::from_secs(u64::MAX),
        Duration::MAX,
    ];
    prop_oneof![
        1 => prop::sample::select(edges.to_vec()),
        3 => (1..20_000_000_000_u64).prop_map(Duration::from_nanos),
        1 => any::<Duration>(),
    ]
}

/// As often as not in an order that is allowed.
fn timings() -> impl Strategy<Value = Timings> {
    let all = prop::array::uniform5(duration());
    (all, any::<bool>()).prop_map(|(mut all, is_ordered)| {
        if is_ordered {
            all.sort();
        }
        let [renew, attempt, deadline, grace, lease] = all;
        let lease = if is_ordered {
            lease.saturating_add(deadline).saturating_add(grace)
        } else {
            lease
        };
        Timings {
            lease,
            renew,
            attempt,
            deadline,
            grace,
        }
    })
}

fn any_timings_are_refused_or_kept(engine: Engine) {
    let database = Database::create(engine);
    Leases::connect(database.url()).unwrap().migrate().unwrap();
    for_any(&timings(), |timings| {
        let builder = Leases::builder().timings(timings.clone());
        let leases = match builder.build(database.url()) {
            Err(Error::InvalidTimings(_)) => return Ok(()),
            built => built.unwrap(),
        };
        let name = unique("timed");
        let lease = match leases.try_claim(&name) {
            // Within a nanosecond nothing is answered.
            Err(Error::TimedOut | Error::Connect(_) | Error::Database { .. }) => return Ok(()),
            answer => answer.unwrap().expect("a new name"),
        };
        prop_assert!(lease.remaining() <= timings.deadline);
        if let Ok(Some(record)) = leases.inspect(&name) {
            let left = record.expires_in().unwrap_or_default();
            prop_assert!(
                left <= timings.lease + Duration::from_millis(1),
                "{:?}",
                left
            );
        }
        drop(lease);
        Ok(())
    });
}

fn any_timeout_is_borne(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    leases.migrate().unwrap();
    let locks = NamedLocks::connect(database.url()).unwrap();
    let held = leases.claim("held").unwrap().hold().unwrap();
    let locked = locks.acquire("held", Duration::MAX).unwrap();
    for_any(&duration(), |timeout| {
        let lease = leases.claim_timeout("free", timeout).unwrap();
        lease.expect("it is free").release().unwrap();
        match locks.acquire("free", timeout) {
            Err(LockError::InvalidTimeout) => prop_assert!(timeout.is_zero()),
            lock => lock.unwrap().release().unwrap(),
        }
        let brief = timeout.min(Duration::from_millis(3));
        prop_assert!(leases.claim_timeout("held", brief).unwrap().is_none());
        if !brief.is_zero() {
            let refused = locks.acquire("held", brief);
            prop_assert!(matches!(refused, Err(LockError::Timeout)));
        }
        let held = leases.claim("worked").unwrap().hold().unwrap();
        held.tenure().sleep(brief).unwrap();
        held.release().unwrap();
        Ok(())
    });
    held.release().unwrap();
    locked.release().unwrap();
}
