use super::super::queue::{Place, Told};
use super::*;
use crate::store::testing::{Ask, Reply, World, settle, soon};

/// One who waits, and whose thread listens.
fn waiting(world: &World) -> Place {
    let place = world.store.queues().join("name");
    assert_eq!(heard(world, &place), Some(Told::Free));
    world.store.listen();
    // What was given back before the session listened was not told.
    soon(|| heard(world, &place) == Some(Told::Look));
    place
}

fn heard(world: &World, place: &Place) -> Option<Told> {
    place.hear(&world.clock, world.clock.now(), &[])
}

/// Time passes in steps until `so`.
fn pass_until(world: &World, so: impl Fn() -> bool) {
    soon(|| {
        world.clock.advance(LOOK);
        so()
    });
}

#[test]
fn who_waits_looks_when_a_name_is_told() {
    let world = World::telling();
    let place = waiting(&world);
    for other in [false, true] {
        world.database.tell("another");
        if other {
            world.database.tell("name");
        }
        pass_until(&world, || !world.database.has_untold());
        settle();
        assert_eq!(heard(&world, &place), other.then_some(Told::Look));
    }
}

#[test]
fn one_thread_listens_for_all() {
    let world = World::telling();
    let _place = waiting(&world);
    for _ in 0..3 {
        world.store.listen();
    }
    settle();
    assert_eq!(world.database.count(Ask::Listen), 1);
}

#[test]
fn nothing_listens_where_nothing_is_told() {
    let world = World::new();
    let _place = world.store.queues().join("name");
    world.store.listen();
    settle();
    assert_eq!(world.database.count(Ask::Connect), 0);
}

#[test]
fn the_session_goes_some_time_after_the_last_who_waited() {
    let world = World::telling();
    let place = waiting(&world);
    drop(place);
    settle();
    assert_eq!(world.database.sessions(), 1);
    let start = world.clock.now();
    pass_until(&world, || world.database.sessions() == 0);
    assert!(world.clock.now().since(start) >= KEPT);
    let _place = waiting(&world);
    assert_eq!(world.database.count(Ask::Listen), 2);
}

#[test]
fn the_session_goes_with_the_leases() {
    let world = World::telling();
    drop(waiting(&world));
    let World {
        database,
        clock,
        store,
        ..
    } = world;
    drop(store);
    soon(|| {
        clock.advance(LOOK);
        database.sessions() == 0
    });
    assert!(clock.now().since(database.start()) < KEPT);
}

#[test]
fn a_session_that_fails_is_made_anew_after_a_while() {
    let world = World::telling();
    world.database.next(Ask::Connect, Reply::Fails);
    world.database.next(Ask::Listen, Reply::Fails);
    let place = world.store.queues().join("name");
    assert_eq!(heard(&world, &place), Some(Told::Free));
    world.store.listen();
    pass_until(&world, || world.database.count(Ask::Listen) == 2);
    pass_until(&world, || heard(&world, &place) == Some(Told::Look));
    world.database.tell_nothing(true);
    pass_until(&world, || world.database.sessions() == 0);
    world.database.tell_nothing(false);
    world.database.tell("name");
    pass_until(&world, || heard(&world, &place) == Some(Told::Look));
    let asked = world.database.asked(Ask::Connect);
    assert_eq!(asked.len(), 4);
    for tries in asked.windows(2) {
        assert!(tries[1] - tries[0] >= AGAIN);
    }
}
