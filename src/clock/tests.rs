use super::*;
use crate::store::testing::{background, secs, settle};

const NANO: Duration = Duration::from_nanos(1);

#[test]
fn moments_do_not_overflow() {
    let now = Clock::driven().now();
    let last = now.after(Duration::MAX);
    assert_eq!(last, Moment::from_nanos(u64::MAX));
    assert_eq!(last.after(NANO), last);
    assert_eq!(now.before(Duration::MAX), Moment::FIRST);
    assert_eq!(now.since(last), Duration::ZERO);
    assert_eq!(now.after(secs(3)).since(now), secs(3));
    assert_eq!(now.after(secs(3)).before(secs(3)), now);
}

#[test]
fn no_clock_reads_earlier_than_the_first_moment() {
    assert!(Clock::Machine.now() >= Moment::FIRST);
    let stopped = Clock::Driven(Arc::new(AtomicU64::new(0)));
    assert_eq!(stopped.now(), Moment::FIRST);
}

#[test]
fn the_machines_clock_goes_on() {
    let clock = Clock::Machine;
    let before = clock.now();
    clock.sleep(Duration::from_millis(5));
    assert!(clock.now().since(before) >= Duration::from_millis(5));
}

#[test]
fn a_wait_looks_at_the_clock_again_though_it_is_long() {
    let clock = Clock::Machine;
    assert_eq!(clock.nap(clock.now().after(secs(3_600))), Clock::LOOK);
    assert!(clock.nap(clock.now().after(NANO)) <= NANO);
}

#[test]
fn a_sleep_lasts_until_its_moment_by_this_clock() {
    let clock = Clock::driven();
    let sleeper = clock.clone();
    let sleep = background(move || sleeper.sleep(secs(60)));
    settle();
    clock.advance(secs(60) - NANO);
    settle();
    assert!(sleep.is_running());
    clock.advance(NANO);
    sleep.output();
}
