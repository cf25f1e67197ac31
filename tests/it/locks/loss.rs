//! A lock whose session ends is noticed, and never taken for one that is held.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::locks::{AcquireOptions, LockError, NamedLock};

use super::{SHORT, Told, on, quick};
use crate::support::database::Database;
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    fn a_lock_is_kept_alive;
    servers:
        fn a_session_that_is_killed_is_a_loss,
        fn a_release_after_the_session_was_killed_says_so,
        fn handlers_are_called_in_order_and_their_panics_caught,
        fn a_lock_can_be_released_from_its_handler,
        fn another_holder_is_left_alone
}

fn a_lock_is_kept_alive(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let lock = locks.acquire("k", LONG).expect("free");
    thread::sleep(SHORT * 6);
    assert!(!lock.is_lost());
    assert!(locks.try_acquire("k").expect("an answer").is_none());
    lock.release().expect("it was ours");
}

/// Ends the session of the one lock that is held.
fn kill(database: &Database) {
    assert!(database.kill_sessions() > 0);
}

fn assert_lost_soon(lock: &NamedLock) {
    let disconnected = lock.lost().recv_timeout(LONG);
    assert!(matches!(
        disconnected,
        Err(crossbeam_channel::RecvTimeoutError::Disconnected)
    ));
    // The flag before the channel.
    assert!(lock.is_lost());
}

fn a_session_that_is_killed_is_a_loss(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let lock = locks.acquire("k", LONG).expect("free");
    kill(&database);
    let start = Instant::now();
    assert_lost_soon(&lock);
    // An interval and a timeout, on a busy machine.
    assert!(start.elapsed() < Duration::from_secs(4));
    for _ in 0..2 {
        let released = lock.release();
        assert!(
            matches!(released, Err(LockError::Lost { .. })),
            "{released:?}"
        );
    }
    assert!(locks.try_acquire("k").expect("an answer").is_some());
}

fn a_release_after_the_session_was_killed_says_so(engine: Engine) {
    let database = Database::create(engine);
    let locks = quick()
        .keep_alive_interval(LONG)
        .build(database.url())
        .expect("locks");
    let lock = locks.acquire("k", LONG).expect("free");
    kill(&database);
    let released = lock.release();
    assert!(
        matches!(
            released,
            Err(LockError::Lost { .. } | LockError::Database(_))
        ),
        "{released:?}"
    );
}

fn handlers_are_called_in_order_and_their_panics_caught(engine: Engine) {
    let database = Database::create(engine);
    let told = Told::default();
    let first = told.by("manager");
    let locks = quick()
        .on_keep_alive_error(move |error| {
            first(error);
            panic!("on purpose");
        })
        .build(database.url())
        .expect("locks");
    let options = AcquireOptions::new().on_lost(told.by("lock"));
    let lock = locks.acquire_with("k", LONG, options).expect("free");
    kill(&database);
    eventually(LONG, "both handlers are called", || told.all().len() == 2);
    assert_eq!(
        told.all(),
        [
            "manager: the lock \"k\" is lost",
            "lock: the lock \"k\" is lost"
        ]
    );
    assert!(lock.is_lost());
    assert!(matches!(lock.release(), Err(LockError::Lost { .. })));
    thread::sleep(SHORT * 2);
    assert_eq!(told.all().len(), 2);
}

fn a_lock_can_be_released_from_its_handler(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let place: Arc<OnceLock<NamedLock>> = Arc::default();
    let told = Told::default();
    let (of_handler, tell) = (Arc::clone(&place), told.by("released"));
    let options = AcquireOptions::new().on_lost(move |_| {
        let released = of_handler.wait_for_it().release();
        tell(&released.expect_err("it was lost"));
    });
    let lock = locks.acquire_with("k", LONG, options).expect("free");
    place.set(lock).expect("set once");
    kill(&database);
    eventually(LONG, "the handler has released it", || {
        told.all().len() == 1
    });
}

trait WaitForIt {
    fn wait_for_it(&self) -> &NamedLock;
}

impl WaitForIt for OnceLock<NamedLock> {
    fn wait_for_it(&self) -> &NamedLock {
        eventually(LONG, "the lock is there", || self.get().is_some());
        self.get().expect("it is there")
    }
}

fn another_holder_is_left_alone(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let first = locks.acquire("k", LONG).expect("free");
    kill(&database);
    let second = locks.acquire("k", LONG).expect("its session is gone");
    assert_lost_soon(&first);
    assert!(matches!(first.release(), Err(LockError::Lost { .. })));
    drop(first);
    thread::sleep(SHORT * 2);
    assert!(!second.is_lost());
    assert!(locks.try_acquire("k").expect("an answer").is_none());
    second.release().expect("it was ours");
}
