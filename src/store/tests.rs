use super::testing::{
    Ask, Background, Hung, NANO, Reply, World, background, cause, secs, settle, soon,
};
use super::*;
use crate::loss::LossCause;

type Claiming = Background<Result<Option<Lease>, Error>>;

fn claiming(world: &World, what: What, stops: &[StopToken]) -> Claiming {
    let (store, stops) = (Arc::clone(&world.store), stops.to_vec());
    background(move || store.claim(what, &stops, Cancel::OnStop))
}

fn name() -> What {
    What::Name("in-flight".to_owned())
}

fn slot() -> What {
    What::Slot("in-flight".to_owned(), 60_000)
}

/// A claim on another thread, when it has reached the database.
fn claim_in_flight(world: &World, stops: &[StopToken]) -> (Claiming, Hung) {
    let hung = world.database.hang(Ask::Claim);
    let claim = claiming(world, name(), stops);
    hung.arrived();
    (claim, hung)
}

/// What was claimed was given back, once.
#[track_caller]
fn is_given_back(world: &World) {
    soon(|| world.database.count(Ask::Release) == 1);
    settle();
    assert_eq!(
        world.database.holders(Ask::Release),
        world.database.holders(Ask::Claim)
    );
}

#[test]
fn nothing_is_connected_before_the_first_call() {
    let world = World::of_one_connection();
    settle();
    assert_eq!(world.database.order(), []);
    world.claim("first").release().unwrap();
    assert_eq!(
        world.database.order(),
        [Ask::Connect, Ask::Claim, Ask::Release]
    );
}

#[test]
fn the_deadline_counts_from_before_the_send_of_the_claim() {
    let world = World::new();
    let (claim, hung) = claim_in_flight(&world, &[]);
    world.clock.advance(secs(3));
    hung.reply(Reply::Yes);
    let lease = claim.output().unwrap().unwrap();
    assert_eq!(lease.remaining(), secs(7));
}

#[test]
fn the_deadline_of_a_claim_whose_reply_was_lost_counts_from_before_its_send() {
    let world = World::of_one_connection();
    let (claim, hung) = claim_in_flight(&world, &[]);
    world.database.next(Ask::Read, Reply::Ours);
    world.clock.advance(secs(3));
    hung.reply(Reply::Fails);
    let lease = claim.output().unwrap().unwrap();
    assert_eq!(lease.remaining(), secs(7));
    assert_eq!(lease.term(), 7);
    assert_eq!(
        world.database.order(),
        [Ask::Connect, Ask::Claim, Ask::Connect, Ask::Read]
    );
}

#[test]
fn to_connect_is_not_part_of_the_claim_but_of_its_bound() {
    let world = World::new();
    let connecting = world.database.hang(Ask::Connect);
    let claim = claiming(&world, name(), &[]);
    connecting.arrived();
    world.clock.advance(secs(3));
    connecting.reply(Reply::Yes);
    assert_eq!(claim.output().unwrap().unwrap().remaining(), secs(10));

    let (claim, hung) = claim_in_flight(&world, &[]);
    world.clock.advance(secs(5) - NANO);
    settle();
    assert!(claim.is_running());
    world.clock.advance(NANO);
    assert!(matches!(claim.output(), Err(Error::TimedOut)));
    drop(hung);
}

#[test]
fn a_claim_that_comes_back_after_its_own_deadline_is_given_back_and_timed_out() {
    let timings = Timings {
        attempt: secs(10),
        ..Timings::default()
    };
    let world = World::with(timings, 2, spawn);
    let (claim, hung) = claim_in_flight(&world, &[]);
    world.clock.advance(secs(10));
    hung.reply(Reply::Yes);
    let error = claim.output().unwrap_err();
    assert!(matches!(error, Error::TimedOut), "{error:?}");
    is_given_back(&world);
}

#[test]
fn a_claim_whose_caller_is_gone_is_given_back() {
    let world = World::new();
    let (claim, hung) = claim_in_flight(&world, &[]);
    world.clock.advance(secs(5));
    assert!(matches!(claim.output(), Err(Error::TimedOut)));
    hung.reply(Reply::Yes);
    is_given_back(&world);
}

#[test]
fn a_claim_of_a_slot_that_nobody_takes_is_undone() {
    // Its caller is gone, or it has come back after its own deadline.
    for attempt in [secs(5), secs(10)] {
        let timings = Timings {
            attempt,
            ..Timings::default()
        };
        let world = World::with(timings, 2, spawn);
        let hung = world.database.hang(Ask::Claim);
        let claim = claiming(&world, slot(), &[]);
        hung.arrived();
        world.clock.advance(attempt);
        assert!(matches!(claim.output(), Err(Error::TimedOut)));
        hung.reply(Reply::Yes);
        soon(|| world.database.count(Ask::Undo) == 1);
        settle();
        assert_eq!(
            world.database.holders(Ask::Undo),
            world.database.holders(Ask::Claim)
        );
        assert_eq!(world.database.count(Ask::Release), 0);
    }
}

#[test]
fn a_claim_that_no_stop_is_to_end_is_waited_for() {
    // Undone, it would be an instant that the others were refused meanwhile and do not ask for again.
    let world = World::new();
    let stop = StopToken::new();
    let hung = world.database.hang(Ask::Claim);
    let (store, stops) = (Arc::clone(&world.store), vec![stop.clone()]);
    let claim = background(move || store.claim(slot(), &stops, Cancel::Never));
    hung.arrived();
    stop.stop();
    settle();
    assert!(claim.is_running());
    hung.reply(Reply::Yes);
    let lease = claim.output().unwrap().unwrap();
    assert_eq!(lease.tenure().ending(), Some(crate::Ending::Stopped));
}

#[test]
fn a_stop_ends_a_claim_at_once_and_what_it_won_is_given_back() {
    let world = World::new();
    let stop = StopToken::new();
    let (claim, hung) = claim_in_flight(&world, &[StopToken::new(), stop.clone()]);
    settle();
    assert!(claim.is_running());
    stop.stop();
    assert!(matches!(claim.output(), Err(Error::Stopped)));
    hung.reply(Reply::Yes);
    is_given_back(&world);
}

#[test]
fn a_held_name_is_no_error() {
    let world = World::of_one_connection();
    world.database.next(Ask::Claim, Reply::No);
    assert!(world.try_claim("held").unwrap().is_none());
    assert_eq!(world.database.order(), [Ask::Connect, Ask::Claim]);
}

#[test]
fn a_claim_that_failed_on_a_kept_session_is_tried_again_with_another_holder() {
    let world = World::of_one_connection();
    drop(world.claim("kept"));
    soon(|| world.database.count(Ask::Release) == 1);
    settle();
    world.database.next(Ask::Claim, Reply::Fails);
    let lease = world.try_claim("kept").unwrap().unwrap();
    let mut holders = world.database.holders(Ask::Claim);
    assert_eq!(holders.len(), 3);
    // The row is read before the next is sent.
    let order = world.database.order();
    let asked = order.split(|ask| *ask == Ask::Release).next_back();
    assert_eq!(
        asked.unwrap(),
        [Ask::Claim, Ask::Connect, Ask::Read, Ask::Claim]
    );
    holders.sort();
    holders.dedup();
    assert_eq!(holders.len(), 3, "a holder was sent twice");
    drop(lease);
}

#[test]
fn a_claim_that_failed_on_a_new_session_is_not_sent_again() {
    let world = World::new();
    world.database.always(Ask::Claim, Reply::Fails);
    let error = world.try_claim("failed").unwrap_err();
    assert!(
        matches!(
            error,
            Error::Database {
                act: Act::Claim,
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(world.database.count(Ask::Claim), 1);
}

#[test]
fn no_holder_is_ever_sent_in_two_claims() {
    let world = World::new();
    for n in 0..50 {
        if n % 3 != 0 {
            world.database.next(Ask::Claim, Reply::Fails);
        }
        if n % 5 == 0 {
            world.database.next(Ask::Read, Reply::Fails);
        }
        drop(world.try_claim("twice"));
    }
    let mut holders = world.database.holders(Ask::Claim);
    let sent = holders.len();
    holders.sort();
    holders.dedup();
    assert_eq!(holders.len(), sent);
}

#[test]
fn a_claim_that_failed_is_read() {
    for (read, locked, held) in [
        (Reply::Yes, Reply::No, true),
        (Reply::Free, Reply::Yes, true),
        (Reply::Free, Reply::No, false),
        (Reply::Free, Reply::Fails, false),
        (Reply::No, Reply::Yes, false),
        (Reply::Fails, Reply::Yes, false),
    ] {
        let world = World::new();
        world.database.always(Ask::Claim, Reply::Fails);
        world.database.always(Ask::Read, read);
        world.database.always(Ask::IsLocked, locked);
        match world.try_claim("read") {
            Ok(None) => assert!(held, "{read:?} {locked:?}"),
            Ok(Some(lease)) => panic!("{lease:?}"),
            Err(error) => assert!(!held && !error.is_lost(), "{read:?} {locked:?}: {error:?}"),
        }
        assert_eq!(world.database.count(Ask::Claim), 1);
    }
}

#[test]
fn a_missing_table_is_told_by_asking_for_it() {
    let world = World::new();
    world.database.always(Ask::Claim, Reply::Fails);
    world.database.always(Ask::Read, Reply::Fails);
    world.database.always(Ask::HasTable, Reply::No);
    let error = world.try_claim("schema").unwrap_err();
    assert!(matches!(error, Error::SchemaMissing), "{error:?}");
}

#[test]
fn who_cannot_connect_says_so() {
    let world = World::new();
    world.database.always(Ask::Connect, Reply::Fails);
    let error = world.try_claim("unconnected").unwrap_err();
    assert!(matches!(error, Error::Connect(_)), "{error:?}");
    world.database.always(Ask::Connect, Reply::Yes);
    drop(world.claim("unconnected"));
}

#[test]
fn a_renewal_on_a_kept_session_that_died_is_asked_again_on_a_new_one() {
    let world = World::of_one_connection();
    let lease = world.claim("kept");
    world.database.next(Ask::Renew, Reply::Fails);
    lease.renew().unwrap();
    assert_eq!(
        world.database.order(),
        [
            Ask::Connect,
            Ask::Claim,
            Ask::Renew,
            Ask::Connect,
            Ask::Renew
        ]
    );
}

#[test]
fn a_renewal_that_failed_on_a_new_session_is_not_asked_again() {
    let world = World::of_one_connection();
    let lease = world.claim("new");
    world.database.always(Ask::Renew, Reply::Fails);
    world.database.always(Ask::HasTable, Reply::Fails);
    for asked in [2, 3, 4] {
        let error = lease.renew().unwrap_err();
        assert!(
            matches!(
                error,
                Error::Database {
                    act: Act::Renew,
                    ..
                }
            ),
            "{error:?}"
        );
        assert_eq!(world.database.count(Ask::Renew), asked);
    }
    assert!(!lease.is_lost());
}

#[test]
fn what_nobody_waits_for_any_more_is_not_asked_again() {
    let world = World::new();
    let lease = world.claim("overdue");
    let renewal = world.database.hang(Ask::Renew);
    let renew = background(move || lease.renew().err().map(|_| lease));
    renewal.arrived();
    world.clock.advance(secs(5));
    let lease = renew.output().unwrap();
    renewal.reply(Reply::Fails);
    settle();
    assert_eq!(world.database.count(Ask::Renew), 1);
    drop(lease);
}

#[test]
fn a_session_is_kept_from_call_to_call() {
    let world = World::of_one_connection();
    let lease = world.claim("kept");
    for _ in 0..10 {
        lease.renew().unwrap();
        lease.verify().unwrap();
    }
    assert_eq!(world.database.count(Ask::Connect), 1);
}

#[test]
fn a_verify_tells_a_loss_from_an_error() {
    let world = World::new();
    let lease = world.claim("verified");
    world.database.always(Ask::Verify, Reply::Fails);
    assert!(!lease.verify().unwrap_err().is_lost());
    assert!(!lease.is_lost());
    world.database.always(Ask::Verify, Reply::No);
    assert!(lease.verify().unwrap_err().is_lost());
    assert_eq!(cause(&lease.tenure()), Some(LossCause::TakenOrReleased));
    // From then on the database is not asked.
    let asked = world.database.count(Ask::Verify);
    assert!(lease.verify().unwrap_err().is_lost());
    assert_eq!(world.database.count(Ask::Verify), asked);
}

#[test]
fn nothing_waits_longer_than_an_attempt() {
    let world = World::new();
    let lease = world.claim("waits");
    type Call = fn(&Lease) -> Option<Error>;
    let calls: [(Ask, Call); 3] = [
        (Ask::Verify, |lease| lease.verify().err()),
        (Ask::Read, |lease| {
            let store = lease.tenure().store().clone();
            store.read("waits", &[]).err()
        }),
        (Ask::Other, |lease| {
            let store = lease.tenure().store().clone();
            store.list().err()
        }),
    ];
    let lease = Arc::new(lease);
    for (ask, call) in calls {
        let hung = world.database.hang(ask);
        let called = background({
            let lease = Arc::clone(&lease);
            move || call(&lease)
        });
        hung.arrived();
        settle();
        assert!(called.is_running());
        world.clock.advance(secs(5));
        let error = called.output().unwrap();
        assert!(
            matches!(error, Error::TimedOut | Error::Lost(_)),
            "{error:?}"
        );
    }
}

#[test]
fn calls_go_on_beside_one_that_hangs() {
    let world = World::new();
    let (claim, hung) = claim_in_flight(&world, &[]);
    assert!(claiming(&world, name(), &[]).output().unwrap().is_some());
    drop((claim, hung));
}

#[test]
fn a_logger_that_panics_at_a_claim_does_not_keep_the_name() {
    let world = World::new();
    super::testing::logger_panics("panics-at-claim", log::Level::Debug);
    assert!(world.try_claim("panics-at-claim").is_err());
    is_given_back(&world);
}
