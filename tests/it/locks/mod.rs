//! Named locks: they exclude, they are noticed when lost, and nothing of them is left behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::StopToken;
use diesel_lease::locks::{
    AcquireOptions, Builder, InvalidKey, LockError, LockScope, NamedLock, NamedLocks,
};

use crate::support::database::Database;
use crate::support::process::{Child, Role};
use crate::support::random::Random;
use crate::support::{Engine, LONG, engines, eventually};

mod loss;
mod pooler;
mod servers;

engines! {
    fn a_second_acquisition_waits_and_gives_up,
    fn fractions_of_a_second_are_honoured,
    fn a_waiter_gets_the_lock_when_it_is_released,
    fn keys_that_differ_never_meet,
    fn keys_that_are_not_valid_are_refused_before_anything_is_sent,
    fn every_caller_of_release_gets_the_first_result,
    fn no_session_is_left_however_a_lock_ends,
    fn a_stop_ends_a_wait,
    fn a_lock_is_free_after_its_process_was_killed,
    fn a_release_at_the_moment_of_a_timeout_leaves_no_lock,
    fn two_that_want_each_others_lock_both_give_up;
    servers: fn databases_of_one_server_have_locks_of_their_own, fn the_scope_of_a_server
}

const SHORT: Duration = Duration::from_millis(200);

/// Keep-alives every 200 ms.
fn quick() -> Builder {
    NamedLocks::builder()
        .keep_alive_interval(SHORT)
        .keep_alive_timeout(Duration::from_millis(1_000))
        .release_timeout(Duration::from_millis(1_000))
}

fn on(database: &Database) -> NamedLocks {
    quick().build(database.url()).expect("locks")
}

/// The lock is free, for a session that knows nothing of who had it.
fn assert_free(locks: &NamedLocks, key: &str) {
    let lock = locks.acquire(key, LONG).expect("nobody has it");
    lock.release().expect("it is ours");
}

fn a_second_acquisition_waits_and_gives_up(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let lock = locks.acquire("k", LONG).expect("free");
    assert_eq!(lock.key(), "k");
    assert!(!lock.is_lost());
    assert!(locks.try_acquire("k").expect("an answer").is_none());
    let start = Instant::now();
    let second = locks.acquire("k", Duration::from_secs(1));
    assert!(matches!(second, Err(LockError::Timeout)), "{second:?}");
    assert!(start.elapsed() >= Duration::from_secs(1));
    lock.release().expect("it was ours");
    assert!(locks.try_acquire("k").expect("an answer").is_some());
}

fn fractions_of_a_second_are_honoured(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let _lock = locks.acquire("k", LONG).expect("free");
    let millis = [0.3, 60.9, 300.0, 1_300.0];
    for timeout in millis.map(|millis| Duration::from_secs_f64(millis / 1e3)) {
        let start = Instant::now();
        let second = locks.acquire("k", timeout);
        assert!(matches!(second, Err(LockError::Timeout)), "{second:?}");
        let waited = start.elapsed();
        assert!(
            waited >= timeout && waited < timeout + Duration::from_millis(700),
            "{waited:?}"
        );
    }
}

fn a_waiter_gets_the_lock_when_it_is_released(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let lock = locks.acquire("k", Duration::MAX).expect("free");
    let released = Mutex::new(None);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let second = locks.acquire("k", LONG).expect("it was released");
            assert!(released.lock().unwrap().is_some(), "two have the lock");
            second.release().expect("it was ours");
        });
        thread::sleep(SHORT * 2);
        *released.lock().unwrap() = Some(Instant::now());
        lock.release().expect("it was ours");
        waiter.join().unwrap();
    });
}

fn keys_that_differ_never_meet(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let long = "🔒".repeat(63);
    let keys = [
        "k",
        "K",
        "ķ",
        "k k",
        "%",
        "'",
        "\\",
        &format!("{long}a"),
        &format!("{long}b"),
    ];
    let held: Vec<NamedLock> = keys
        .iter()
        .map(|key| locks.try_acquire(key).expect("an answer").expect("free"))
        .collect();
    for key in keys {
        assert!(
            locks.try_acquire(key).expect("an answer").is_none(),
            "{key}"
        );
    }
    drop(held);
}

fn keys_that_are_not_valid_are_refused_before_anything_is_sent(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    for key in ["", " k", "k ", "a\nb", &"é".repeat(65)] {
        let refused = locks.acquire(key, LONG);
        assert!(
            matches!(refused, Err(LockError::InvalidKey(_))),
            "{refused:?}"
        );
        assert!(matches!(
            locks.try_acquire(key),
            Err(LockError::InvalidKey(_))
        ));
    }
    let refused = locks.acquire("k", Duration::ZERO);
    assert!(
        matches!(refused, Err(LockError::InvalidTimeout)),
        "{refused:?}"
    );
    assert_eq!(database.session_count(), 0);
}

fn every_caller_of_release_gets_the_first_result(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let lock = locks.acquire("k", LONG).expect("free");
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| lock.release().expect("it was ours"));
        }
    });
    lock.release().expect("it was ours");
    assert!(!lock.is_lost());
    assert_free(&locks, "k");
}

fn no_session_is_left_however_a_lock_ends(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    for _ in 0..4 {
        drop(locks.acquire("k", LONG).expect("free"));
        locks
            .acquire("k", LONG)
            .expect("free")
            .release()
            .expect("it was ours");
        let panicked = thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _lock = locks.acquire("k", LONG).expect("free");
                    panic!("on purpose");
                })
                .join()
        });
        assert!(panicked.is_err());
        let _first = locks.acquire("k", LONG).expect("free");
        assert!(locks.try_acquire("k").expect("an answer").is_none());
    }
    assert_free(&locks, "k");
    if engine != Engine::Sqlite {
        eventually(LONG, "no session is left", || database.session_count() == 0);
    }
}

fn a_stop_ends_a_wait(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let lock = locks.acquire("k", LONG).expect("free");
    let token = StopToken::new();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let options = AcquireOptions::new().stop(&token);
            locks.acquire_with("k", Duration::MAX, options)
        });
        thread::sleep(SHORT);
        token.stop();
        let stopped = waiter.join().unwrap();
        assert!(matches!(stopped, Err(LockError::Stopped)), "{stopped:?}");
    });
    let refused = locks.acquire_with("k", LONG, AcquireOptions::new().stop(&token));
    assert!(matches!(refused, Err(LockError::Stopped)), "{refused:?}");
    lock.release().expect("it was ours");
    // The one that was stopped may have been granted it since, and gives it back.
    assert_free(&locks, "k");
}

/// Holds a lock until it is killed.
pub(crate) fn hold(role: &Role) {
    let locks = quick().build(&role.argument("url")).expect("locks");
    let _lock = locks.acquire("k", LONG).expect("free");
    role.say("held");
    role.hear();
}

fn a_lock_is_free_after_its_process_was_killed(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let mut child = Child::spawn("locks::hold", &[("url", database.url())]);
    assert_eq!(child.hear(), "held");
    assert!(locks.try_acquire("k").expect("an answer").is_none());
    child.kill();
    assert_free(&locks, "k");
}

/// The moment of the release is brought to where half of the waiters get the lock.
fn a_release_at_the_moment_of_a_timeout_leaves_no_lock(engine: Engine) {
    const ROUNDS: u64 = 300;
    const TIMEOUT: Duration = Duration::from_millis(60);
    let database = Database::create(engine);
    let locks = on(&database);
    let (granted, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for worker in 0..6_u64 {
            let (locks, granted, refused) = (&locks, &granted, &refused);
            scope.spawn(move || {
                let key = format!("k{worker}");
                let mut random = Random::new(worker);
                let mut moment = TIMEOUT;
                for _ in 0..ROUNDS / 6 {
                    let lock = locks.acquire(&key, LONG).expect("free");
                    thread::scope(|scope| {
                        let waiter = scope.spawn(|| locks.acquire(&key, TIMEOUT));
                        thread::sleep(moment + Duration::from_micros(random.below(4_000)));
                        lock.release().expect("it was ours");
                        match waiter.join().unwrap() {
                            Ok(second) => {
                                granted.fetch_add(1, Ordering::Relaxed);
                                moment += Duration::from_millis(2);
                                second.release().expect("it was ours");
                            }
                            Err(LockError::Timeout) => {
                                refused.fetch_add(1, Ordering::Relaxed);
                                moment = moment.saturating_sub(Duration::from_millis(2));
                            }
                            Err(error) => panic!("{error:?}"),
                        }
                    });
                }
            });
        }
    });
    let counts = [granted, refused].map(AtomicUsize::into_inner);
    assert!(counts.iter().all(|count| *count > 10), "{counts:?}");
    let keys: Vec<String> = (0..6).map(|worker| format!("k{worker}")).collect();
    if engine != Engine::Sqlite {
        eventually(LONG, "no session is left", || database.session_count() == 0);
        assert_eq!(locked_on(&database, &keys), [""; 0]);
        let _lock = locks.acquire("k3", LONG).expect("free");
        assert_eq!(locked_on(&database, &keys), ["k3"]);
    }
    for key in keys {
        assert_free(&locks, &key);
    }
}

/// Which of some keys are locked, by the word of the server and the documented encoding.
fn locked_on(database: &Database, keys: &[String]) -> Vec<String> {
    let mut admin = database.admin();
    let mut is_locked = |key: &String| {
        let query = match database.engine() {
            Engine::Postgres => format!(
                "SELECT COUNT(*) FROM pg_locks, (SELECT encode(substr(sha256( \
                 'diesel-lease:lock'::bytea || '\\x00'::bytea || '{key}'::bytea), 1, 8), 'hex') AS hex) h \
                 WHERE locktype = 'advisory' AND objsubid = 1 \
                 AND lpad(to_hex(classid::bigint), 8, '0') || lpad(to_hex(objid::bigint), 8, '0') = hex \
                 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            ),
            _ => format!(
                "SELECT IS_USED_LOCK(SHA2(CONCAT('diesel-lease:lock', CHAR(0), DATABASE(), CHAR(0), \
                 '{key}'), 256)) IS NOT NULL"
            ),
        };
        admin.one_i64(&query) > 0
    };
    keys.iter().filter(|key| is_locked(key)).cloned().collect()
}

fn two_that_want_each_others_lock_both_give_up(engine: Engine) {
    let database = Database::create(engine);
    let locks = on(&database);
    let both_have_one = Barrier::new(2);
    let both_gave_up = Barrier::new(2);
    thread::scope(|scope| {
        for (own, others) in [("a", "b"), ("b", "a")] {
            let (locks, both_have_one, both_gave_up) = (&locks, &both_have_one, &both_gave_up);
            scope.spawn(move || {
                let lock = locks.acquire(own, LONG).expect("free");
                both_have_one.wait();
                let wanted = locks.acquire(others, Duration::from_secs(1));
                assert!(matches!(wanted, Err(LockError::Timeout)), "{wanted:?}");
                both_gave_up.wait();
                assert!(!lock.is_lost());
                assert!(locks.try_acquire(own).expect("an answer").is_none());
                both_gave_up.wait();
                lock.release().expect("it was ours");
            });
        }
    });
    assert_free(&locks, "a");
    assert_free(&locks, "b");
}

fn databases_of_one_server_have_locks_of_their_own(engine: Engine) {
    let (one, other) = (Database::create(engine), Database::create(engine));
    let _lock = on(&one).acquire("k", LONG).expect("free");
    assert!(on(&other).try_acquire("k").expect("an answer").is_some());
}

fn the_scope_of_a_server(engine: Engine) {
    let database = Database::create(engine);
    let locks = quick().scope(LockScope::Server).build(database.url());
    if !engine.is_mysql_like() {
        assert!(matches!(locks, Err(LockError::Unsupported(_))));
        return;
    }
    let locks = locks.expect("locks");
    let refused = locks.acquire("🔒", LONG);
    assert!(
        matches!(
            refused,
            Err(LockError::InvalidKey(InvalidKey::NotForServer { .. }))
        ),
        "{refused:?}"
    );
    // As long as a name can be.
    let key = format!("{:中<64}", database.name());
    let mut other = database.connect();
    let lock = locks.acquire(&key, LONG).expect("free");
    assert_eq!(other.one_i64(&format!("SELECT GET_LOCK('{key}', 0)")), 0);
    lock.release().expect("it was ours");
    assert_eq!(other.one_i64(&format!("SELECT GET_LOCK('{key}', 10)")), 1);
    assert!(locks.try_acquire(&key).expect("an answer").is_none());
    assert_eq!(other.one_i64(&format!("SELECT RELEASE_LOCK('{key}')")), 1);
}

/// What handlers were told, in order.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<String>>>);

impl Told {
    fn by(&self, who: &'static str) -> impl Fn(&LockError) + Send + Sync + use<> {
        let told = self.0.clone();
        move |error| told.lock().unwrap().push(format!("{who}: {error}"))
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}
