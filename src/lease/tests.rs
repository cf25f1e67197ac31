use std::io;
use std::thread;

use super::*;
use crate::store::testing::{
    Ask, NANO, Reply, World, at_once, background, cause, has_ended, logged, secs, settle, soon,
};
use crate::timings::Timings;

#[test]
fn a_release_latches_every_tenure_before_the_statement_is_sent() {
    let world = World::new();
    let lease = world.claim("latched");
    let tenures = [lease.tenure(), lease.tenure()];
    let release = world.database.hang(Ask::Release);
    let released = background(move || lease.release());
    release.arrived();
    for tenure in &tenures {
        assert_eq!(cause(tenure), Some(LossCause::TakenOrReleased));
        assert!(has_ended(tenure));
    }
    release.reply(Reply::Yes);
    released.output().unwrap();
}

#[test]
fn a_drop_latches_every_tenure_before_the_statement_is_sent() {
    let world = World::new();
    let lease = world.claim("latched-by-drop");
    let tenure = lease.tenure();
    let release = world.database.hang(Ask::Release);
    drop(lease);
    assert_eq!(cause(&tenure), Some(LossCause::TakenOrReleased));
    assert!(has_ended(&tenure));
    release.arrived();
    release.reply(Reply::Yes);
    soon(|| logged("latched-by-drop").last().unwrap() == "DEBUG lease released");
}

#[test]
fn it_is_given_back_once() {
    let world = World::new();
    let lease = world.claim("once");
    lease.release().unwrap();
    let held = world.claim("once").hold().unwrap();
    held.release().unwrap();
    drop(world.claim("once").hold().unwrap());
    soon(|| world.database.count(Ask::Release) == 3);
    settle();
    assert_eq!(
        world.database.holders(Ask::Release),
        world.database.holders(Ask::Claim)
    );
}

#[test]
fn a_finish_latches_every_tenure_before_the_statement_is_sent() {
    let world = World::new();
    let lease = world.claim_slot("finished");
    let tenure = lease.tenure();
    let finish = world.database.hang(Ask::Finish);
    let finished = background(move || lease.finish(None));
    finish.arrived();
    assert_eq!(cause(&tenure), Some(LossCause::TakenOrReleased));
    assert!(has_ended(&tenure));
    finish.reply(Reply::Yes);
    finished.output().unwrap();
    settle();
    assert_eq!(world.database.count(Ask::Release), 0);
}

#[test]
fn a_finish_of_a_lost_round_clears_its_mark_alone() {
    let world = World::new();
    let lease = world.claim_slot("finished-late");
    world.clock.advance(secs(10));
    let error = lease.finish(None).unwrap_err();
    assert!(matches!(&error, Error::Lost(lost) if lost.cause() == LossCause::Expired));
    settle();
    let asked = [Ask::Finish, Ask::Settle, Ask::Release].map(|ask| world.database.count(ask));
    assert_eq!(asked, [0, 1, 0]);
}

#[test]
fn a_drop_never_waits_for_a_database_that_hangs() {
    let world = World::new();
    let leases = [world.claim("a"), world.claim("b"), world.claim("undropped")];
    let hung = [
        world.database.hang(Ask::Verify),
        world.database.hang(Ask::Verify),
    ];
    let [a, b, lease] = leases;
    let verifying: Vec<_> = [a, b]
        .into_iter()
        .map(|lease| background(move || lease.verify()))
        .collect();
    hung.iter().for_each(|call| call.arrived());
    let held = lease.hold().unwrap();
    let tenure = held.tenure().clone();
    at_once(move || drop(held));
    assert!(tenure.is_lost());
    assert!(verifying.iter().all(|verify| verify.is_running()));
    drop(hung);
    soon(|| logged("undropped").last().unwrap() == "DEBUG lease released");
}

#[test]
fn a_drop_that_cannot_be_sent_says_so() {
    let world = World::new();
    world.database.always(Ask::Release, Reply::Fails);
    drop(world.claim("unsent"));
    soon(|| {
        logged("unsent")
            .last()
            .unwrap()
            .starts_with("WARN could not release the lease: could not give a lease back: ")
    });
    world.database.always(Ask::Release, Reply::No);
    drop(world.claim("unsent"));
    soon(|| {
        logged("unsent").last().unwrap() == "WARN could not release the lease: it was lost before"
    });
}

#[test]
fn a_lost_lease_is_never_given_back() {
    let world = World::new();
    let lease = world.claim("lost");
    world.clock.advance(secs(10));
    let error = lease.release().unwrap_err();
    assert!(matches!(&error, Error::Lost(lost) if lost.cause() == LossCause::Expired));

    let lease = world.claim("lost");
    world.database.next(Ask::Verify, Reply::No);
    assert!(lease.verify().unwrap_err().is_lost());
    drop(lease);

    let held = world.claim("lost").hold().unwrap();
    world.clock.advance(secs(10));
    drop(held);
    settle();
    assert_eq!(world.database.count(Ask::Release), 0);
}

#[test]
fn a_release_says_what_the_database_said() {
    let world = World::new();
    world.database.next(Ask::Release, Reply::No);
    let error = world.claim("gone").release().unwrap_err();
    assert!(matches!(&error, Error::Lost(lost) if lost.cause() == LossCause::TakenOrReleased));

    world.database.always(Ask::Release, Reply::Fails);
    let error = world.claim("failing").release().unwrap_err();
    assert!(error.is_transient(), "{error:?}");
}

#[test]
fn a_release_is_bounded_by_what_is_left_of_the_lease() {
    let timings = Timings {
        lease: secs(13),
        grace: secs(3),
        ..Timings::default()
    };
    let world = World::with(timings, 2, crate::store::spawn);
    let lease = world.claim("bounded");
    let release = world.database.hang(Ask::Release);
    let released = background(move || lease.release());
    release.arrived();
    world.clock.advance(secs(3) - NANO);
    settle();
    assert!(released.is_running());
    world.clock.advance(NANO);
    assert!(matches!(released.output(), Err(Error::TimedOut)));
}

#[test]
fn a_release_ends_the_renewals_with_one_in_flight() {
    let world = World::new();
    let renewal = world.database.hang(Ask::Renew);
    let held = world.claim("in-flight").hold().unwrap();
    let tenure = held.tenure().clone();
    world.clock.advance(secs(2));
    renewal.arrived();
    at_once(move || held.release()).unwrap();
    // The renewal comes to nothing: it finds the row given back, or came first.
    renewal.reply(Reply::Yes);
    settle();
    assert!(tenure.is_lost());
    assert_eq!(world.database.count(Ask::Release), 1);
    world.clock.advance(secs(4));
    settle();
    assert_eq!(world.database.count(Ask::Renew), 1);
}

#[test]
fn a_thread_that_cannot_be_started_is_an_error_and_the_name_is_given_back() {
    fn none(_: thread::Builder, _: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        Err(io::Error::other("there are no threads"))
    }
    let world = World::with(Timings::default(), 2, none);
    let lease = world.claim("threadless");
    let tenure = lease.tenure();
    let error = lease.hold().unwrap_err();
    assert!(matches!(error, Error::Spawn(_)), "{error:?}");
    assert!(error.is_transient());
    assert!(tenure.is_lost());
    soon(|| world.database.count(Ask::Release) == 1);
    assert_eq!(
        world.database.holders(Ask::Release),
        world.database.holders(Ask::Claim)
    );
}
