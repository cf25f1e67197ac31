use super::*;
use crate::loss::LossCause;
use crate::store::testing::{
    Ask, NANO, Reply, World, at_once, background, cause, has_ended, ms, secs, settle, soon,
};

fn under(world: &World, stops: &[StopToken]) -> crate::Lease {
    world.claim_under("name", stops)
}

#[test]
fn it_is_lost_at_the_deadline_and_never_comes_back() {
    let world = World::new();
    let lease = world.claim("name");
    let tenure = lease.tenure();
    world.clock.advance(secs(10) - NANO);
    assert_eq!(tenure.check(), Ok(()));
    assert_eq!(tenure.remaining(), NANO);
    world.clock.advance(NANO);
    let lost = tenure.check().unwrap_err();
    assert_eq!((lost.name(), lost.term()), ("name", 1));
    assert_eq!(lost.cause(), LossCause::Expired);
    assert_eq!(tenure.remaining(), Duration::ZERO);
    assert!(lease.is_lost());
}

#[test]
fn a_success_that_arrives_after_the_deadline_does_not_revive() {
    let world = World::new();
    let lease = world.claim("name");
    let tenure = lease.tenure();
    world.clock.advance(secs(9));
    let start = world.clock.now();
    world.clock.advance(secs(1));
    // Nobody has asked meanwhile.
    let late = tenure.extend(start).unwrap_err();
    assert!(matches!(late, Error::Lost(lost) if lost.cause() == LossCause::Expired));
    assert!(tenure.is_lost());
    assert!(has_ended(&tenure));
    assert!(tenure.extend(world.clock.now()).is_err());
}

#[test]
fn a_success_that_took_longer_than_a_deadline_is_of_no_use() {
    let world = World::new();
    let lease = world.claim("name");
    let tenure = lease.tenure();
    world.clock.advance(secs(9));
    tenure.extend(world.clock.now()).unwrap();
    // An older success does not bring the deadline forward.
    tenure.extend(world.clock.now().before(secs(5))).unwrap();
    assert_eq!(tenure.remaining(), secs(10));
    // What was sent more than a deadline ago says nothing about now.
    world.clock.advance(secs(10) - NANO);
    tenure.extend(world.clock.now().before(secs(10))).unwrap();
    world.clock.advance(NANO);
    assert!(tenure.is_lost());
}

#[test]
fn whoever_finds_the_loss_ends_it_for_all() {
    let world = World::new();
    type Finds = fn(&Tenure);
    let finders: [Finds; 8] = [
        |tenure| assert!(tenure.is_lost()),
        |tenure| assert!(tenure.check().is_err()),
        |tenure| assert_eq!(tenure.remaining(), Duration::ZERO),
        |tenure| assert!(matches!(tenure.ending(), Some(Ending::Lost(_)))),
        |tenure| assert!(tenure.sleep(secs(1)).is_err()),
        |tenure| assert!(tenure.verify().is_err()),
        |tenure| assert!(tenure.renew().is_err()),
        |tenure| assert!(!tenure.lose(LossCause::Abandoned) || tenure.is_lost()),
    ];
    for finds in finders {
        let lease = world.claim("name");
        let (tenure, other) = (lease.tenure(), lease.tenure());
        world.clock.advance(secs(10));
        assert!(!has_ended(&other), "nobody has looked");
        finds(&tenure);
        assert!(has_ended(&other));
        assert!(lease.is_lost());
    }
    assert_eq!(world.database.count(Ask::Verify), 0);
    assert_eq!(world.database.count(Ask::Renew), 0);
}

#[test]
fn the_flag_is_set_before_the_channel_disconnects() {
    let world = World::new();
    for _ in 0..200 {
        let lease = world.claim("name");
        let seen = {
            let tenure = lease.tenure();
            background(move || {
                let _ = tenure.ended().recv();
                cause(&tenure)
            })
        };
        lease.tenure().lose(LossCause::Abandoned);
        assert_eq!(seen.output(), Some(LossCause::Abandoned));
    }
}

#[test]
fn every_receiver_sees_the_end() {
    let world = World::new();
    let lease = world.claim("name");
    let seen: Vec<_> = (0..4)
        .map(|_| {
            let ended = lease.tenure().ended().clone();
            background(move || ended.recv().is_err())
        })
        .collect();
    settle();
    assert!(seen.iter().all(|seen| seen.is_running()));
    drop(lease);
    assert!(seen.into_iter().all(|seen| seen.output()));
}

#[test]
fn a_sleep_that_is_not_disturbed_lasts_as_long_as_it_should() {
    let world = World::new();
    let lease = under(&world, &[StopToken::new()]);
    let tenure = lease.tenure();
    let sleep = background(move || tenure.sleep(secs(3)));
    settle();
    world.clock.advance(secs(3) - NANO);
    settle();
    assert!(sleep.is_running());
    world.clock.advance(NANO);
    assert_eq!(sleep.output(), Ok(()));
    assert_eq!(lease.tenure().sleep(Duration::ZERO), Ok(()));
}

#[test]
fn a_sleep_ends_at_the_deadline_though_nobody_holds_the_lease() {
    let world = World::new();
    let lease = world.claim("name");
    let tenure = lease.tenure();
    let sleep = background(move || tenure.sleep(Duration::MAX));
    world.clock.advance(secs(10) - NANO);
    settle();
    assert!(sleep.is_running());
    world.clock.advance(NANO);
    assert_eq!(sleep.output(), Err(Ending::Lost(LossCause::Expired)));
}

#[test]
fn a_sleep_goes_on_over_a_deadline_that_was_moved() {
    let world = World::new();
    let lease = world.claim("name");
    let tenure = lease.tenure();
    let sleep = background(move || tenure.sleep(secs(12)));
    settle();
    world.clock.advance(secs(5));
    lease.renew().unwrap();
    world.clock.advance(secs(7) - NANO);
    settle();
    assert!(sleep.is_running());
    world.clock.advance(NANO);
    assert_eq!(sleep.output(), Ok(()));
}

#[test]
fn a_sleep_ends_at_once_when_the_work_must_end() {
    let world = World::new();
    let stop = StopToken::new();
    let lease = under(&world, &[StopToken::new(), stop.clone()]);
    let tenure = lease.tenure();
    let sleep = background(move || tenure.sleep(secs(60)));
    settle();
    stop.stop();
    assert_eq!(sleep.output(), Err(Ending::Stopped));
    let tenure = lease.tenure();
    assert_eq!(
        at_once(move || tenure.sleep(secs(60))),
        Err(Ending::Stopped)
    );

    let lease = world.claim("name");
    let tenure = lease.tenure();
    let sleep = background(move || tenure.sleep(secs(60)));
    settle();
    drop(lease);
    assert_eq!(
        sleep.output(),
        Err(Ending::Lost(LossCause::TakenOrReleased))
    );
}

#[test]
fn a_loss_goes_before_a_stop() {
    let world = World::new();
    let stop = StopToken::new();
    let lease = under(&world, std::slice::from_ref(&stop));
    let tenure = lease.tenure();
    assert_eq!(tenure.ending(), None);
    stop.stop();
    assert_eq!(tenure.ending(), Some(Ending::Stopped));
    assert_eq!(tenure.check(), Ok(()));
    world.clock.advance(secs(10));
    assert_eq!(tenure.ending(), Some(Ending::Lost(LossCause::Expired)));
    assert_eq!(tenure.sleep(secs(1)), Err(Ending::Lost(LossCause::Expired)));
}

#[test]
fn the_deadline_that_passes_after_a_failed_renewal_is_unreachable() {
    let world = World::new();
    let lease = world.claim("name");
    world.database.next(Ask::Renew, Reply::Fails);
    world.database.next(Ask::Renew, Reply::Fails);
    assert!(lease.renew().is_err());
    world.clock.advance(secs(10));
    assert_eq!(cause(&lease.tenure()), Some(LossCause::Unreachable));
}

#[test]
fn an_answer_is_given_while_the_database_hangs() {
    let world = World::new();
    let lease = world.claim("name");
    let hung = [
        world.database.hang(Ask::Verify),
        world.database.hang(Ask::Verify),
    ];
    for _ in &hung {
        let tenure = lease.tenure();
        drop(background(move || tenure.verify()));
    }
    hung.iter().for_each(|call| call.arrived());
    let tenure = lease.tenure();
    let answers = at_once(move || {
        (
            tenure.is_lost(),
            tenure.remaining(),
            tenure.ending(),
            tenure.check(),
        )
    });
    assert_eq!(answers, (false, secs(10), None, Ok(())));
}

#[test]
fn the_one_entered_last_and_not_left_is_current() {
    let world = World::new();
    let name = || current().map(|tenure| tenure.name().to_owned());
    let (a, b) = (world.claim("a"), world.claim("b"));
    let in_a = a.tenure().enter();
    let in_b = b.tenure().enter();
    assert_eq!(name().as_deref(), Some("b"));
    let in_a_again = a.tenure().enter();
    assert_eq!(name().as_deref(), Some("a"));
    drop(in_a);
    assert_eq!(name().as_deref(), Some("b"), "left in any order");
    drop(in_b);
    assert_eq!(name().as_deref(), Some("a"));
    assert!(at_once(current).is_none(), "it is the thread's own");
    drop(in_a_again);
    assert_eq!(name(), None);
}

#[test]
fn a_tenure_outlives_its_lease_and_says_so() {
    let world = World::new();
    let lease = world.claim("name");
    let tenure = lease.tenure();
    let entered = tenure.enter();
    drop(lease);
    assert!(current().unwrap().is_lost());
    drop(entered);
    soon(|| world.database.count(Ask::Release) == 1);
}

#[test]
fn renewals_by_hand_move_the_deadline_by_their_start() {
    let world = World::new();
    let lease = world.claim("name");
    let renewal = world.database.hang(Ask::Renew);
    let tenure = lease.tenure();
    world.clock.advance(secs(1));
    let renew = background(move || tenure.renew());
    renewal.arrived();
    world.clock.advance(ms(1_500));
    renewal.reply(Reply::Yes);
    renew.output().unwrap();
    assert_eq!(lease.remaining(), ms(8_500));
}

#[test]
fn a_renewal_in_flight_at_the_deadline_makes_it_unreachable() {
    let timings = crate::Timings {
        attempt: secs(10),
        ..crate::Timings::default()
    };
    let world = World::with(timings, 2, crate::store::spawn);
    let lease = world.claim("name");
    let renewal = world.database.hang(Ask::Renew);
    let tenure = lease.tenure();
    let renew = background(move || tenure.renew().is_err());
    renewal.arrived();
    world.clock.advance(secs(10));
    assert_eq!(cause(&lease.tenure()), Some(LossCause::Unreachable));
    assert!(renew.output());
}
