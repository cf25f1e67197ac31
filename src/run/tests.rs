use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::*;
use crate::error::Ending;
use crate::loss::{LossCause, StopToken};
use crate::store::testing::{
    Ask, Background, NANO, Reply, World, background, cause, logged, secs, settle, soon,
    wait_for_end,
};
use crate::tenure::current;

/// Work that returns when it is told to, and nothing else makes it.
struct Stubborn<T> {
    run: Background<T>,
    return_now: Sender<T>,
}

impl<T> Stubborn<T> {
    fn returns(self, output: T) -> T {
        self.return_now.send(output).unwrap();
        self.run.output()
    }
}

fn stubborn<T: Send + 'static>(held: &Arc<HeldLease>) -> Stubborn<T> {
    let held = Arc::clone(held);
    let (return_now, told) = bounded(1);
    let (begin, began) = bounded(1);
    let run = background(move || {
        held.run(|_| {
            begin.send(()).unwrap();
            told.recv().unwrap()
        })
    });
    began.recv().unwrap();
    Stubborn { run, return_now }
}

fn hold(world: &World, name: &str) -> Arc<HeldLease> {
    Arc::new(world.claim(name).hold().unwrap())
}

/// Has the next renewal find that the name was taken.
fn take(world: &World, tenure: &Tenure) {
    world.database.always(Ask::Renew, Reply::No);
    world.clock.advance(secs(2));
    wait_for_end(tenure);
    // The grace counts from about here.
    soon(|| {
        logged(tenure.name())
            .iter()
            .any(|entry| entry.starts_with("WARN lease lost"))
    });
    settle();
}

#[test]
fn it_returns_what_the_work_returns() {
    let world = World::new();
    let held = hold(&world, "returned");
    assert_eq!(held.run(|tenure| tenure.name().len()), 8);
    let error: Result<(), &str> = held.run(|_| Err("of the work"));
    assert_eq!(error, Err("of the work"));
    assert!(!held.is_lost());
    assert_eq!(world.database.count(Ask::Release), 0);
}

#[test]
fn the_tenure_is_entered_while_the_work_runs() {
    let world = World::new();
    let held = hold(&world, "entered");
    assert!(current().is_none());
    held.run(|tenure| {
        assert_eq!(current().unwrap().name(), "entered");
        assert_eq!(tenure.name(), "entered");
    });
    assert!(current().is_none());
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        held.run(|_| resume_unwind(Box::new("the work panics")))
    }));
    assert!(panicked.is_err());
    assert!(current().is_none());
}

#[test]
fn past_the_grace_the_handler_is_told_once_and_the_work_is_waited_for() {
    let world = World::new();
    let held = hold(&world, "stubborn");
    let work = stubborn(&held);
    take(&world, held.tenure());
    world.clock.advance(secs(5) - NANO);
    settle();
    assert!(world.will_not_stop.is_empty(), "before the grace was over");
    world.clock.advance(NANO);
    soon(|| !world.will_not_stop.is_empty());
    let lost = world.will_not_stop.recv().unwrap();
    assert_eq!((lost.name(), lost.term()), ("stubborn", 1));
    assert_eq!(lost.cause(), LossCause::TakenOrReleased);

    for _ in 0..3 {
        world.clock.advance(secs(5));
        settle();
    }
    assert!(work.run.is_running());
    assert!(world.will_not_stop.is_empty(), "more than once");
    assert_eq!(work.returns("at last"), "at last");

    let errors = [
        "WARN lease lost: it was taken by another holder or given back",
        "ERROR work under a lost lease will not stop",
    ];
    assert_eq!(logged("stubborn")[1..], errors);
    drop(held);
    settle();
    assert_eq!(
        world.database.count(Ask::Release),
        0,
        "a lost lease is not given back"
    );
}

#[test]
fn work_that_returns_within_the_grace_is_left_alone() {
    let world = World::new();
    let held = hold(&world, "prompt");
    let work = stubborn(&held);
    take(&world, held.tenure());
    world.clock.advance(secs(5) - NANO);
    settle();
    work.returns(());
    for _ in 0..3 {
        world.clock.advance(secs(5));
        settle();
    }
    assert!(world.will_not_stop.is_empty());
    let mut entries = logged("prompt").into_iter();
    assert!(!entries.any(|entry| entry.starts_with("ERROR")));
}

#[test]
fn work_that_begins_after_the_loss_has_a_grace_of_its_own() {
    let world = World::new();
    let held = hold(&world, "late");
    take(&world, held.tenure());
    world.clock.advance(secs(60));
    let work = stubborn(&held);
    settle();
    world.clock.advance(secs(5) - NANO);
    settle();
    assert!(world.will_not_stop.is_empty());
    world.clock.advance(NANO);
    soon(|| !world.will_not_stop.is_empty());
    work.returns(());
}

#[test]
fn the_grace_is_that_of_the_run_that_is_still_on() {
    let world = World::new();
    let held = hold(&world, "overlapping");
    let first = stubborn(&held);
    take(&world, held.tenure());
    world.clock.advance(secs(3));
    let second = stubborn(&held);
    first.returns(());
    world.clock.advance(secs(5) - NANO);
    settle();
    assert!(world.will_not_stop.is_empty(), "the first has returned");
    world.clock.advance(NANO);
    soon(|| !world.will_not_stop.is_empty());
    second.returns(());
}

#[test]
fn under_a_lost_lease_the_work_is_called_and_finds_it_lost() {
    let world = World::new();
    let held = hold(&world, "found-lost");
    take(&world, held.tenure());
    let found = held.run(|tenure| tenure.ending());
    assert_eq!(found, Some(Ending::Lost(LossCause::TakenOrReleased)));
    assert!(world.will_not_stop.is_empty());
}

#[test]
fn a_stop_is_waited_for_without_limit_and_a_loss_meanwhile_is_not() {
    let world = World::new();
    let stop = StopToken::new();
    let lease = world.claim_under("winding-down", std::slice::from_ref(&stop));
    let held = Arc::new(lease.hold().unwrap());
    let work = stubborn(&held);
    stop.stop();
    wait_for_end(held.tenure());
    for _ in 0..8 {
        world.clock.advance(secs(2));
        soon(|| held.tenure().remaining() == secs(10));
    }
    assert!(work.run.is_running());
    assert!(world.will_not_stop.is_empty());

    world.database.always(Ask::Renew, Reply::No);
    world.clock.advance(secs(2));
    soon(|| held.is_lost());
    soon(|| {
        world.clock.advance(secs(1));
        !world.will_not_stop.is_empty()
    });
    assert!(work.run.is_running());
    work.returns(());
    assert_eq!(cause(held.tenure()), Some(LossCause::TakenOrReleased));
}

#[test]
fn a_panic_goes_on_only_after_the_lease_was_given_back() {
    let world = World::new();
    let held = hold(&world, "panicking");
    let tenure = held.tenure().clone();
    let release = world.database.hang(Ask::Release);
    let run = background(move || {
        catch_unwind(AssertUnwindSafe(|| {
            held.run(|_| resume_unwind(Box::new("the work panics")))
        }))
    });
    release.arrived();
    settle();
    assert!(run.is_running());
    assert!(tenure.is_lost());
    release.reply(Reply::Yes);
    let panic: Result<(), _> = run.output();
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"the work panics"));
    settle();
    assert_eq!(world.database.count(Ask::Release), 1);
    assert_eq!(world.database.count(Ask::Renew), 0);
}

#[test]
fn a_panic_is_not_kept_by_a_database_that_hangs() {
    let world = World::new();
    let held = hold(&world, "panicking-hung");
    let release = world.database.hang(Ask::Release);
    let run = background(move || {
        catch_unwind(AssertUnwindSafe(|| {
            held.run(|_| resume_unwind(Box::new("the work panics")))
        }))
    });
    release.arrived();
    world.clock.advance(secs(5));
    let panic: Result<(), _> = run.output();
    assert!(panic.is_err());
    let entries = logged("panicking-hung");
    assert_eq!(
        entries.last().unwrap(),
        "WARN could not release the lease: the database gave no answer in time"
    );
}

#[test]
fn a_panic_under_a_lost_lease_goes_on_and_nothing_is_given_back() {
    let world = World::new();
    let held = hold(&world, "panicking-lost");
    take(&world, held.tenure());
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        held.run(|_| resume_unwind(Box::new("the work panics")))
    }));
    let panic: Result<(), _> = panicked;
    assert!(panic.is_err());
    drop(held);
    settle();
    assert_eq!(world.database.count(Ask::Release), 0);
}

#[test]
fn two_works_run_beside_each_other() {
    let world = World::new();
    let held = hold(&world, "beside");
    let (one, other): (Stubborn<u8>, Stubborn<u8>) = (stubborn(&held), stubborn(&held));
    assert_eq!(one.returns(1), 1);
    assert!(other.run.is_running());
    assert_eq!(other.returns(2), 2);
}

#[test]
fn work_sees_the_end_in_a_select() {
    let world = World::new();
    let held = hold(&world, "selected");
    let run = {
        let held = Arc::clone(&held);
        background(move || {
            let never: Receiver<()> = crossbeam_channel::never();
            held.run(|tenure| {
                crossbeam_channel::select! {
                    recv(tenure.ended()) -> _ => tenure.ending(),
                    recv(never) -> _ => None,
                }
            })
        })
    };
    take(&world, held.tenure());
    assert_eq!(run.output(), Some(Ending::Lost(LossCause::TakenOrReleased)));
}
