use super::*;
use crate::store::testing::ms;

const NAME: &str = "name";

fn line() -> (Arc<Queues>, Clock) {
    (Arc::default(), Clock::driven())
}

fn heard(place: &Place) -> Vec<Told> {
    place.told.try_iter().collect()
}

#[test]
fn only_the_first_is_told() {
    let (queues, clock) = line();
    let [first, second, third] = [(); 3].map(|()| queues.join(NAME));
    assert_eq!(heard(&first), [Told::Free]);
    queues.free(NAME, clock.now());
    queues.free("another", clock.now());
    assert_eq!(heard(&first), [Told::Free]);
    assert!(heard(&second).is_empty() && heard(&third).is_empty());
}

#[test]
fn who_leaves_is_followed_by_the_next() {
    let (queues, clock) = line();
    let [first, second, third, fourth] = [(); 4].map(|()| queues.join(NAME));
    drop(third);
    assert!(heard(&second).is_empty());
    drop(first);
    // It left without the name, so that may be free.
    assert_eq!(heard(&second), [Told::Free]);
    second.won(7, clock.now());
    assert_eq!(heard(&fourth), [Told::First]);
    queues.free(NAME, clock.now());
    assert_eq!(heard(&fourth), [Told::Free]);
}

#[test]
fn a_release_is_not_missed_by_one_who_has_not_heard_that_it_is_first() {
    let (queues, clock) = line();
    let [first, second] = [(); 2].map(|()| queues.join(NAME));
    first.won(1, clock.now());
    for _ in 0..3 {
        queues.free(NAME, clock.now());
    }
    assert_eq!(heard(&second), [Told::First, Told::Free]);
}

#[test]
fn a_candidate_is_told_and_nobody_waits_for_it() {
    let (queues, clock) = line();
    let candidate = queues.listen(NAME);
    let first = queues.join(NAME);
    assert!(heard(&candidate).is_empty());
    assert_eq!(heard(&first), [Told::Free]);
    queues.free(NAME, clock.now());
    assert_eq!(heard(&candidate), [Told::Free]);
    assert_eq!(heard(&first), [Told::Free]);
    drop(first);
    queues.free(NAME, clock.now());
    assert_eq!(heard(&candidate), [Told::Free]);
}

#[test]
fn a_name_that_nobody_waits_for_is_forgotten() {
    let (queues, clock) = line();
    let count = || queues.0.lock().len();
    drop(queues.join(NAME));
    drop(queues.listen(NAME));
    assert_eq!(count(), 0);
    queues.join(NAME).won(1, clock.now());
    assert_eq!(count(), 1);
    queues.free(NAME, clock.now());
    assert_eq!(count(), 0);
}

/// Passes the name on once, when it has the given term, and says what the next one was told.
fn pass_on(queues: &Arc<Queues>, clock: &Clock, holder: Place, term: u64) -> (Place, Told) {
    let next = queues.join(NAME);
    holder.won(term, clock.now());
    queues.free(NAME, clock.now());
    let told = heard(&next);
    assert_eq!((told[0], told.len()), (Told::First, 2));
    (next, told[1])
}

#[test]
fn a_turn_ends_so_that_others_come_to_the_name() {
    let (queues, clock) = line();
    let (mut place, mut told) = pass_on(&queues, &clock, queues.join(NAME), 1);
    let mut term = 1;
    let mut turns = Vec::new();
    for _ in 0..5 {
        let start = clock.now();
        while told == Told::Free {
            clock.advance(ms(1));
            term += 1;
            (place, told) = pass_on(&queues, &clock, place, term);
        }
        assert_eq!(told, Told::FreeInAWhile);
        turns.push(clock.now().since(start));
        // Nobody came.
        term += 1;
        (place, told) = pass_on(&queues, &clock, place, term);
    }
    assert_eq!(turns, [50, 100, 200, 400, 400].map(ms));
    clock.advance(LONGEST_TURN);
    (place, told) = pass_on(&queues, &clock, place, term + 1);
    assert_eq!(told, Told::FreeInAWhile);
    // Now somebody has come.
    (place, told) = pass_on(&queues, &clock, place, term + 3);
    assert_eq!(told, Told::Free);
    clock.advance(SHORTEST_TURN);
    (_, told) = pass_on(&queues, &clock, place, term + 4);
    assert_eq!(told, Told::FreeInAWhile);
}

#[test]
fn a_name_passes_on_here_until_the_turn_is_over() {
    let (queues, clock) = line();
    let passes_on = || queues.passes_on(NAME, clock.now());
    assert!(!passes_on());
    let _candidate = queues.listen(NAME);
    assert!(!passes_on());
    let [first, _second] = [(); 2].map(|()| queues.join(NAME));
    first.won(1, clock.now());
    assert!(passes_on());
    assert!(!queues.passes_on("another", clock.now()));
    clock.advance(SHORTEST_TURN);
    assert!(!passes_on());
}

fn row(term: i64, expires_in_ms: i64) -> Row {
    Row {
        name: NAME.to_owned(),
        holder: String::new(),
        instance: String::new(),
        term,
        expires_in_ms,
        slot_ms: 0,
        unfinished_slot_ms: 0,
        rerun_slot_ms: 0,
    }
}

#[track_caller]
fn about(pause: Duration, longest: Duration) {
    assert!(pause <= longest && pause >= longest * 3 / 4, "{pause:?}");
}

#[test]
fn looks_become_rare_while_the_name_is_held() {
    let mut pace = Pace::new(ms(100));
    about(pace.next(), ms(10));
    for pause in [20, 40, 80, 100, 100] {
        pace.saw(&row(1, 5_000));
        about(pace.next(), ms(pause));
    }
}

#[test]
fn looks_become_frequent_where_it_changes_hands() {
    let mut pace = Pace::new(ms(1_000));
    for _ in 0..10 {
        pace.saw(&row(1, 5_000));
    }
    about(pace.next(), ms(1_000));
    pace.saw(&row(6, 5_000));
    about(pace.next(), ms(100));
    pace.saw(&row(1_000_000_000_000, 5_000));
    about(pace.next(), ms(1_000));
    pace.saw(&row(1_000_000_000_000 + 4_000, 5_000));
    about(pace.next(), SHORTEST_PAUSE);
}

#[test]
fn no_pause_is_longer_than_the_lease_can_last() {
    let mut pace = Pace::new(ms(1_000));
    for _ in 0..10 {
        pace.saw(&row(1, 3));
    }
    assert_eq!(pace.next(), ms(3));
    about(pace.next(), ms(1_000));
    about(Pace::new(ms(4)).next(), ms(4));
}
