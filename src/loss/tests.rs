use std::time::Duration;

use super::deadline::{CAUSES, Deadline};
use super::*;
use crate::store::testing::{NANO, background, secs, settle};

const AT: u64 = 10_000;
const EXPIRED: u64 = LossCause::Expired as u64;
const TAKEN: u64 = LossCause::TakenOrReleased as u64;
const UNREACHABLE: u64 = LossCause::Unreachable as u64;

#[test]
fn every_cause_is_a_word_of_its_own_below_every_moment() {
    for cause in LossCause::ALL {
        assert_eq!(LossCause::from_code(cause.code()), cause);
        assert!(cause.code() < CAUSES);
    }
    assert!(Moment::FIRST.nanos() >= CAUSES);
}

#[test]
fn a_deadline_is_live_before_it_and_lost_at_it() {
    let deadline = Deadline::new(AT);
    assert_eq!(deadline.look(AT - 1, EXPIRED), Ok(AT));
    assert_eq!(deadline.look(AT, EXPIRED), Err(EXPIRED));
    // A clock that went back would not bring it back.
    assert_eq!(deadline.look(AT - 1, UNREACHABLE), Err(EXPIRED));
}

#[test]
fn an_extension_moves_it_to_the_later_of_the_two() {
    let deadline = Deadline::new(AT);
    assert_eq!(deadline.extend(AT - 1, AT + 50, EXPIRED), Ok(()));
    assert_eq!(deadline.look(AT, EXPIRED), Ok(AT + 50));
    assert_eq!(deadline.extend(AT, AT + 20, EXPIRED), Ok(()));
    assert_eq!(deadline.look(AT, EXPIRED), Ok(AT + 50));
}

#[test]
fn an_extension_finds_a_deadline_that_has_passed() {
    let deadline = Deadline::new(AT);
    assert_eq!(deadline.extend(AT, AT + 50, EXPIRED), Err(EXPIRED));
    assert_eq!(deadline.look(AT - 1, UNREACHABLE), Err(EXPIRED));
}

#[test]
fn a_loss_is_for_the_first_cause_and_is_not_extended() {
    let deadline = Deadline::new(AT);
    assert!(deadline.lose(TAKEN));
    assert!(!deadline.lose(UNREACHABLE));
    assert_eq!(deadline.extend(1, AT + 50, EXPIRED), Err(TAKEN));
    assert_eq!(deadline.look(1, EXPIRED), Err(TAKEN));
}

#[test]
fn the_last_moment_there_is_can_be_a_deadline() {
    let deadline = Deadline::new(u64::MAX);
    assert_eq!(deadline.look(u64::MAX - 1, EXPIRED), Ok(u64::MAX));
    assert_eq!(deadline.look(u64::MAX, EXPIRED), Err(EXPIRED));
}

#[test]
fn a_signal_disconnects_every_receiver_and_can_be_disconnected_again() {
    let signal = Signal::new();
    let receivers = [signal.receiver().clone(), signal.receiver().clone()];
    assert!(
        receivers
            .iter()
            .all(|receiver| receiver.try_recv().is_err())
    );
    signal.disconnect();
    signal.disconnect();
    assert!(receivers.iter().all(|receiver| receiver.recv().is_err()));
}

#[test]
fn a_wait_ends_at_its_moment() {
    let clock = Clock::driven();
    let until = clock.now().after(secs(3));
    let waits = {
        let clock = clock.clone();
        background(move || wait(&clock, until, &[]))
    };
    clock.advance(secs(3) - NANO);
    settle();
    assert!(waits.is_running());
    clock.advance(NANO);
    assert!(!waits.output());
    assert!(!wait(&clock, until, &[]), "it is over already");
}

#[test]
fn a_wait_ends_with_any_of_its_signals() {
    for which in 0..3 {
        let clock = Clock::driven();
        let signals = [Signal::new(), Signal::new(), Signal::new()];
        let receivers: Vec<_> = signals
            .iter()
            .map(|signal| signal.receiver().clone())
            .collect();
        let waits = {
            let (clock, until) = (clock.clone(), clock.now().after(Duration::MAX));
            background(move || wait(&clock, until, &receivers.iter().collect::<Vec<_>>()))
        };
        settle();
        assert!(waits.is_running());
        signals[which].disconnect();
        assert!(waits.output());
    }
}

#[test]
fn clones_of_a_stop_token_are_the_same() {
    let stop = StopToken::new();
    let clone = stop.clone();
    let seen = background({
        let stop = stop.clone();
        move || {
            let _ = stop.receiver().recv();
            // The flag is set before the channel disconnects.
            stop.is_stopped()
        }
    });
    assert!(!stop.is_stopped());
    settle();
    assert!(seen.is_running());
    clone.stop();
    clone.stop();
    assert!(stop.is_stopped());
    assert!(seen.output());
}

#[test]
fn a_stop_token_that_nobody_stopped_stays_so() {
    let stop = StopToken::new();
    drop(stop.clone());
    assert!(!stop.is_stopped());
    assert!(!StopToken::default().is_stopped());
}
