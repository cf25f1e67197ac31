use std::time::Duration;

use super::*;
use crate::error::Ending;
use crate::lease::HeldLease;
use crate::store::spawn;
use crate::store::testing::{
    Ask, NANO, Reply, World, at_once, background, cause, has_ended, logged, logger_panics, ms,
    secs, settle, soon, wait_for_end,
};
use crate::timings::Timings;

fn hold(world: &World, name: &str) -> HeldLease {
    world.claim(name).hold().unwrap()
}

#[test]
fn the_deadline_counts_from_before_the_send_of_a_renewal() {
    let world = World::new();
    let first = world.database.hang(Ask::Renew);
    let second = world.database.hang(Ask::Renew);
    let held = hold(&world, "counted");
    world.clock.advance(secs(2));
    first.arrived();
    world.clock.advance(secs(3));
    assert_eq!(held.tenure().remaining(), secs(5));
    first.reply(Reply::Yes);
    second.arrived();
    assert_eq!(held.tenure().remaining(), secs(7));
    world.clock.advance(secs(1));
    second.reply(Reply::Yes);
    soon(|| held.tenure().remaining() == secs(9));
}

#[test]
fn a_renewal_that_failed_does_not_move_the_deadline() {
    let world = World::new();
    world.database.always(Ask::Renew, Reply::Fails);
    let held = hold(&world, "unmoved");
    world.clock.advance(secs(2));
    soon(|| logged("unmoved").len() == 2);
    assert_eq!(held.tenure().remaining(), secs(8));
}

#[test]
fn a_renewal_that_succeeds_keeps_the_lease_for_as_long_as_it_is_held() {
    let world = World::new();
    let held = hold(&world, "kept");
    for n in 1..=20 {
        world.clock.advance(secs(2));
        soon(|| held.tenure().remaining() == secs(10));
        assert_eq!(world.database.count(Ask::Renew), n);
    }
    assert!(!has_ended(held.tenure()));
}

#[test]
fn the_next_renewal_is_counted_from_the_start_of_the_last() {
    for (reply, name) in [(Reply::Yes, "succeeded"), (Reply::Fails, "failed")] {
        let world = World::new();
        let renewal = world.database.hang(Ask::Renew);
        let held = hold(&world, name);
        world.clock.advance(secs(2));
        renewal.arrived();
        world.clock.advance(ms(1_500));
        world.database.always(Ask::Renew, reply);
        renewal.reply(reply);
        soon(|| logged(name).len() == 2);
        let asked = world.database.asked(Ask::Renew);
        world.clock.advance(ms(500) - NANO);
        settle();
        assert_eq!(world.database.asked(Ask::Renew), asked, "it came early");
        world.clock.advance(NANO);
        soon(|| world.database.asked(Ask::Renew).last() == Some(&secs(4)));
        drop(held);
    }
}

#[test]
fn an_attempt_longer_than_the_interval_is_followed_at_once() {
    let world = World::new();
    let renewal = world.database.hang(Ask::Renew);
    let held = hold(&world, "long");
    world.clock.advance(secs(2));
    renewal.arrived();
    world.clock.advance(ms(4_500));
    settle();
    assert_eq!(world.database.count(Ask::Renew), 1);
    renewal.reply(Reply::Yes);
    // With the clock standing still.
    soon(|| held.tenure().remaining() == secs(10));
    assert_eq!(world.database.asked(Ask::Renew), [secs(2), ms(6_500)]);
}

#[test]
fn a_hung_renewal_is_a_loss_at_the_deadline_and_not_before() {
    let world = World::new();
    let first = world.database.hang(Ask::Renew);
    let second = world.database.hang(Ask::Renew);
    let held = hold(&world, "hung");
    world.clock.advance(secs(2));
    first.arrived();
    world.clock.advance(secs(5));
    second.arrived();
    // Neither the five seconds of an attempt nor the interval carries it over the deadline.
    world.clock.advance(secs(3) - NANO);
    settle();
    assert!(!has_ended(held.tenure()));
    assert!(!held.is_lost());
    world.clock.advance(NANO);
    wait_for_end(held.tenure());
    assert_eq!(cause(held.tenure()), Some(LossCause::Unreachable));
    assert_eq!(world.database.asked(Ask::Renew), [secs(2), secs(7)]);

    // Their answers are late.
    first.reply(Reply::Yes);
    second.reply(Reply::Yes);
    settle();
    assert!(held.is_lost());
    assert_eq!(held.tenure().remaining(), Duration::ZERO);
}

#[test]
fn a_connection_that_hangs_is_a_loss_at_the_deadline_as_well() {
    let world = World::new();
    world.database.always(Ask::Renew, Reply::Fails);
    let held = hold(&world, "unconnected");
    world.database.always(Ask::Connect, Reply::Fails);
    world.clock.advance(secs(2));
    soon(|| logged("unconnected").len() == 2);
    let connecting = world.database.hang(Ask::Connect);
    world.clock.advance(secs(2));
    connecting.arrived();
    world.clock.advance(secs(5));
    world.clock.advance(NANO);
    settle();
    assert!(!has_ended(held.tenure()));
    world.clock.advance(secs(1));
    wait_for_end(held.tenure());
    assert_eq!(cause(held.tenure()), Some(LossCause::Unreachable));
}

#[test]
fn errors_are_retries_until_the_deadline() {
    let world = World::new();
    world.database.always(Ask::Renew, Reply::Fails);
    let held = hold(&world, "retried");
    let mut at = Vec::new();
    for n in 1..=4 {
        world.clock.advance(secs(2));
        at.push(secs(2 * n));
        soon(|| world.database.asked(Ask::Renew) == at);
        soon(|| logged("retried").len() as u64 == 1 + n);
        assert!(!held.is_lost());
    }
    world.clock.advance(secs(2));
    wait_for_end(held.tenure());
    assert_eq!(cause(held.tenure()), Some(LossCause::Unreachable));
    // At the deadline there is no further try.
    assert_eq!(world.database.asked(Ask::Renew), at);
    let entries = logged("retried");
    assert!(
        entries[1..5]
            .iter()
            .all(|entry| entry.starts_with("WARN lease renewal failed: could not renew a lease: ")),
        "{entries:?}"
    );
    assert!(
        !entries.iter().any(|entry| entry.starts_with("ERROR")),
        "{entries:?}"
    );
}

#[test]
fn errors_before_a_success_are_forgotten() {
    let world = World::new();
    world.database.next(Ask::Renew, Reply::Fails);
    world.database.next(Ask::Renew, Reply::Fails);
    let held = hold(&world, "forgotten");
    world.clock.advance(secs(2));
    soon(|| logged("forgotten").len() == 2);
    world.clock.advance(secs(2));
    soon(|| held.tenure().remaining() == secs(10));
    // The process stands still.
    world.clock.advance(secs(10));
    wait_for_end(held.tenure());
    assert_eq!(cause(held.tenure()), Some(LossCause::Expired));
}

#[test]
fn who_sleeps_through_the_deadline_has_lost_without_one_more_try() {
    let world = World::new();
    let held = hold(&world, "slept");
    world.clock.advance(secs(10));
    wait_for_end(held.tenure());
    assert_eq!(cause(held.tenure()), Some(LossCause::Expired));
    assert_eq!(world.database.count(Ask::Renew), 0);

    // The same where the thread starts only then.
    let lease = world.claim("slept");
    world.clock.advance(secs(10));
    let held = lease.hold().unwrap();
    wait_for_end(held.tenure());
    settle();
    assert_eq!(world.database.count(Ask::Renew), 0);
}

#[test]
fn who_fails_just_short_of_the_deadline_wakes_at_it_and_not_an_interval_later() {
    let timings = Timings {
        renew: secs(2),
        deadline: secs(4),
        attempt: secs(2),
        ..Timings::default()
    };
    let world = World::with(timings, 2, spawn);
    let renewal = world.database.hang(Ask::Renew);
    let held = hold(&world, "short");
    world.clock.advance(secs(3));
    renewal.arrived();
    world.clock.advance(ms(900));
    world.database.always(Ask::Renew, Reply::Fails);
    renewal.reply(Reply::Fails);
    soon(|| logged("short").len() == 2);
    let asked = *world.database.asked(Ask::Renew).last().unwrap();
    world.clock.advance(ms(100) - NANO);
    settle();
    assert!(!has_ended(held.tenure()));
    world.clock.advance(NANO);
    wait_for_end(held.tenure());
    assert_eq!(cause(held.tenure()), Some(LossCause::Unreachable));
    assert_eq!(*world.database.asked(Ask::Renew).last().unwrap(), asked);
}

#[test]
fn an_attempt_is_bounded_by_what_is_left_and_by_its_own_limit() {
    let world = World::new();
    let lease = world.claim("bounded");
    let tenure = lease.tenure();
    let left = world.database.hang(Ask::Renew);
    let limit = world.database.hang(Ask::Renew);

    let renewal = background({
        let tenure = tenure.clone();
        move || tenure.renew()
    });
    left.arrived();
    world.clock.advance(secs(5) - NANO);
    settle();
    assert!(renewal.is_running());
    world.clock.advance(NANO);
    assert!(matches!(renewal.output(), Err(Error::TimedOut)));

    world.clock.advance(secs(2));
    let renewal = background({
        let tenure = tenure.clone();
        move || tenure.renew()
    });
    limit.arrived();
    world.clock.advance(secs(3) - NANO);
    settle();
    assert!(renewal.is_running());
    world.clock.advance(NANO);
    assert!(renewal.output().is_err());
    assert_eq!(cause(&tenure), Some(LossCause::Unreachable));
}

#[test]
fn a_proven_no_is_a_loss_at_once() {
    let world = World::new();
    world.database.next(Ask::Renew, Reply::No);
    let held = hold(&world, "taken");
    world.clock.advance(secs(2));
    wait_for_end(held.tenure());
    assert_eq!(cause(held.tenure()), Some(LossCause::TakenOrReleased));
    assert_eq!(world.database.count(Ask::Renew), 1);
    soon(|| {
        logged("taken")
            .contains(&"WARN lease lost: it was taken by another holder or given back".to_owned())
    });
    // It goes on to renew nothing.
    world.clock.advance(secs(4));
    settle();
    assert_eq!(world.database.count(Ask::Renew), 1);
}

#[test]
fn the_first_cause_stays() {
    let world = World::new();
    world.database.next(Ask::Renew, Reply::No);
    let held = hold(&world, "one-cause");
    world.clock.advance(secs(2));
    wait_for_end(held.tenure());
    world.clock.advance(secs(20));
    assert_eq!(cause(held.tenure()), Some(LossCause::TakenOrReleased));
    assert!(!held.tenure().lose(LossCause::Abandoned));
    assert_eq!(cause(held.tenure()), Some(LossCause::TakenOrReleased));
}

#[test]
fn a_panic_on_the_renewal_thread_is_a_loss_and_the_grace_still_counts() {
    let world = World::new();
    world.database.always(Ask::Renew, Reply::Fails);
    logger_panics("panics", log::Level::Warn);
    let held = hold(&world, "panics");
    let tenure = held.tenure().clone();
    let (return_now, returns) = crossbeam_channel::bounded::<()>(0);
    let run = background(move || held.run(|_| returns.recv()));
    world.clock.advance(secs(2));
    wait_for_end(&tenure);
    assert_eq!(cause(&tenure), Some(LossCause::RenewalPanicked));
    soon(|| {
        world.clock.advance(secs(1));
        !world.will_not_stop.is_empty()
    });
    let lost = world.will_not_stop.recv().unwrap();
    assert_eq!(lost.cause(), LossCause::RenewalPanicked);
    drop(return_now);
    assert!(run.output().is_err());
}

/// The renewal thread's loop, on a thread that can be waited for.
fn keeper(lease: &Tenure) -> (Signal, Keeper) {
    let control = Signal::new();
    let keeper = Keeper {
        tenure: lease.clone(),
        control: control.receiver().clone(),
        runs: Arc::default(),
        _held: Held::new(lease.store()),
    };
    (control, keeper)
}

#[test]
fn a_stop_ends_the_renewals_at_once_with_one_in_flight_and_is_no_loss() {
    let world = World::new();
    let renewal = world.database.hang(Ask::Renew);
    let lease = world.claim("stopped");
    let (control, keeper) = keeper(&lease.tenure());
    let thread = background(move || keeper.keep());
    world.clock.advance(secs(2));
    renewal.arrived();
    control.disconnect();
    thread.output();
    assert!(!lease.is_lost());
    assert!(!has_ended(&lease.tenure()));
    assert_eq!(lease.remaining(), secs(8));
    // What the renewal comes to is of no account.
    renewal.reply(Reply::No);
    settle();
    assert!(!lease.is_lost());
    assert!(
        !logged("stopped")
            .iter()
            .any(|entry| entry.starts_with("WARN"))
    );
}

#[test]
fn a_stop_ends_the_renewals_while_they_wait() {
    let world = World::new();
    let lease = world.claim("stopped-waiting");
    let (control, keeper) = keeper(&lease.tenure());
    let thread = background(move || keeper.keep());
    settle();
    assert!(thread.is_running());
    drop(control);
    thread.output();
    assert!(!lease.is_lost());
}

#[test]
fn a_stopped_lease_is_good_until_its_deadline_and_is_renewed_by_nobody() {
    let world = World::new();
    let held = hold(&world, "let-go");
    world.clock.advance(secs(2));
    soon(|| logged("let-go").len() == 2);
    settle();
    let lease = held.stop();
    world.clock.advance(secs(10) - NANO);
    settle();
    assert_eq!(lease.remaining(), NANO);
    assert_eq!(world.database.count(Ask::Renew), 1);
    world.clock.advance(NANO);
    assert_eq!(cause(&lease.tenure()), Some(LossCause::Expired));
    assert!(has_ended(&lease.tenure()));
}

#[test]
fn a_lease_can_be_held_again() {
    let world = World::new();
    let lease = hold(&world, "again").stop();
    world.clock.advance(secs(1));
    let held = lease.hold().unwrap();
    world.clock.advance(secs(1));
    soon(|| held.tenure().remaining() == secs(10));
    assert_eq!(world.database.asked(Ask::Renew), [secs(2)]);
}

#[test]
fn a_renewal_by_hand_moves_the_next_one() {
    let world = World::new();
    let lease = world.claim("by-hand");
    world.clock.advance(secs(5));
    lease.renew().unwrap();
    let held = lease.hold().unwrap();
    settle();
    assert_eq!(world.database.asked(Ask::Renew), [secs(5)]);
    world.clock.advance(secs(2));
    soon(|| held.tenure().remaining() == secs(10));
    assert_eq!(world.database.asked(Ask::Renew), [secs(5), secs(7)]);
}

#[test]
fn a_stop_token_tells_the_work_and_renewals_go_on() {
    let world = World::new();
    let stop = StopToken::new();
    let lease = world.claim_under("told", std::slice::from_ref(&stop));
    let held = lease.hold().unwrap();
    let tenure = held.tenure();
    assert_eq!(tenure.ending(), None);
    stop.stop();
    wait_for_end(tenure);
    assert_eq!(tenure.ending(), Some(Ending::Stopped));
    assert_eq!(cause(tenure), None);
    for _ in 0..10 {
        world.clock.advance(secs(2));
        soon(|| tenure.remaining() == secs(10));
    }
    assert_eq!(tenure.ending(), Some(Ending::Stopped));

    // A loss goes before a stop.
    world.database.always(Ask::Renew, Reply::No);
    world.clock.advance(secs(2));
    soon(|| held.is_lost());
    assert_eq!(
        tenure.ending(),
        Some(Ending::Lost(LossCause::TakenOrReleased))
    );
}

#[test]
fn each_of_several_stop_tokens_tells_the_work() {
    let world = World::new();
    let stops = [StopToken::new(), StopToken::new()];
    for (n, stop) in stops.iter().enumerate() {
        let stops = [StopToken::new(), stop.clone(), StopToken::new()];
        let name = format!("told-{n}");
        let lease = world.claim_under(&name, &stops);
        let held = lease.hold().unwrap();
        settle();
        assert!(!has_ended(held.tenure()));
        stop.stop();
        wait_for_end(held.tenure());
        assert!(!held.is_lost());
    }
}

#[test]
fn a_stop_before_the_hold_is_told_as_well() {
    let world = World::new();
    let stop = StopToken::new();
    let lease = world.claim_under("told-before", std::slice::from_ref(&stop));
    stop.stop();
    let held = lease.hold().unwrap();
    wait_for_end(held.tenure());
    assert_eq!(held.tenure().ending(), Some(Ending::Stopped));
}

#[test]
fn a_loss_found_by_the_work_ends_the_renewals() {
    let world = World::new();
    let held = hold(&world, "found");
    world.database.next(Ask::Verify, Reply::No);
    let tenure = held.tenure().clone();
    assert!(at_once(move || tenure.verify()).is_err());
    assert!(has_ended(held.tenure()));
    soon(|| logged("found").len() == 2);
    world.clock.advance(secs(8));
    settle();
    assert_eq!(world.database.count(Ask::Renew), 0);
}

#[test]
fn the_thread_says_the_name_of_the_lease_in_a_log_entry() {
    let world = World::new();
    let held = hold(&world, "traced");
    world.clock.advance(secs(2));
    soon(|| logged("traced") == ["DEBUG lease claimed", "TRACE lease renewed"]);
    held.release().unwrap();
    soon(|| logged("traced").last().unwrap() == "DEBUG lease released");
}

#[test]
fn a_run_that_ends_leaves_another_of_the_same_moment() {
    let world = World::new();
    let held = hold(&world, "runs");
    let now = world.clock.now();
    let (first, second) = (held.renewal.running(now), held.renewal.running(now));
    drop(first);
    assert_eq!(held.renewal.runs.oldest(), Some(now));
    drop(second);
    assert_eq!(held.renewal.runs.oldest(), None);
}

#[test]
fn a_stop_is_told_at_once_with_a_renewal_in_flight_and_renewals_go_on() {
    let world = World::new();
    let stop = StopToken::new();
    let renewal = world.database.hang(Ask::Renew);
    let lease = world.claim_under("told-in-flight", std::slice::from_ref(&stop));
    let held = lease.hold().unwrap();
    world.clock.advance(secs(2));
    renewal.arrived();
    stop.stop();
    wait_for_end(held.tenure());
    assert_eq!(held.tenure().ending(), Some(Ending::Stopped));
    // The one in flight is not waited for; another takes its place.
    soon(|| held.tenure().remaining() == secs(10));
}

#[test]
fn a_logger_that_always_panics_does_not_end_the_watch_over_the_work() {
    let world = World::new();
    for _ in 0..2 {
        logger_panics("panics-always", log::Level::Warn);
    }
    logger_panics("panics-always", log::Level::Error);
    world.database.always(Ask::Renew, Reply::Fails);
    let held = hold(&world, "panics-always");
    let tenure = held.tenure().clone();
    let (return_now, returns) = crossbeam_channel::bounded::<()>(0);
    let run = background(move || held.run(|_| returns.recv()));
    world.clock.advance(secs(2));
    wait_for_end(&tenure);
    soon(|| {
        world.clock.advance(secs(1));
        !world.will_not_stop.is_empty()
    });
    drop(return_now);
    assert!(run.output().is_err());
}

#[test]
fn after_a_stop_no_renewal_is_sent() {
    let world = World::new();
    let lease = world.claim("due");
    let (control, keeper) = keeper(&lease.tenure());
    world.clock.advance(secs(2));
    control.disconnect();
    background(move || keeper.keep()).output();
    settle();
    assert_eq!(world.database.count(Ask::Renew), 0);
    assert!(!lease.is_lost());
}

#[test]
fn a_loss_found_by_the_work_is_seen_at_once_with_a_renewal_in_flight() {
    let world = World::new();
    let renewal = world.database.hang(Ask::Renew);
    let held = hold(&world, "found-in-flight");
    world.clock.advance(secs(2));
    renewal.arrived();
    held.tenure().lose(LossCause::TakenOrReleased);
    soon(|| logged("found-in-flight").len() == 2);
}

#[test]
fn a_renewal_that_was_cut_short_by_a_stop_has_not_failed() {
    let world = World::new();
    let renewal = world.database.hang(Ask::Renew);
    let lease = world.claim("cut-short");
    let (control, keeper) = keeper(&lease.tenure());
    let thread = background(move || keeper.keep());
    world.clock.advance(secs(2));
    renewal.arrived();
    control.disconnect();
    thread.output();
    world.clock.advance(secs(8));
    assert_eq!(cause(&lease.tenure()), Some(LossCause::Expired));
}
