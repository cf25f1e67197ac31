//! Servers and networks that stand still, end idle sessions, or are none to lock on.

use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::locks::{LockError, LockScope, NamedLocks};

use super::{SHORT, quick};
use crate::support::database::Database;
use crate::support::proxy::Proxy;
use crate::support::servers::OwnServer;
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    servers:
        fn a_server_that_stands_still_holds_nobody_up,
        fn a_frozen_network_is_a_loss,
        fn a_reset_under_a_keep_alive_is_a_loss_at_once,
        fn a_server_that_ends_idle_sessions_is_kept_busy,
        fn a_server_that_limits_statements_ends_no_wait,
        fn a_server_that_is_read_only_is_refused,
        fn a_wait_that_is_ended_from_outside_is_no_lock,
        fn a_wait_without_limit_notices_a_server_that_stands_still,
        fn a_deadlock_is_told,
        fn a_password_is_in_no_error
}

/// Beyond its limit, on a busy machine.
const SLACK: Duration = Duration::from_secs(2);

fn within<T>(limit: Duration, act: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = act();
    assert!(start.elapsed() < limit + SLACK, "{:?}", start.elapsed());
    done
}

fn a_server_that_stands_still_holds_nobody_up(engine: Engine) {
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    let locks = quick().build(database.url()).expect("locks");
    let lock = locks.acquire("k", LONG).expect("free");
    let kept = locks.acquire("kept", LONG).expect("free");
    let slow = NamedLocks::builder()
        .release_timeout(SHORT)
        .build(database.url())
        .expect("locks");
    let released = slow.acquire("released", LONG).expect("free");
    let paused = server.pause();
    let step = Duration::from_secs(1);
    let refused = within(SHORT + step, || locks.acquire("other", SHORT));
    assert!(matches!(refused, Err(LockError::Timeout)), "{refused:?}");
    assert!(within(step, || locks.try_acquire("other")).is_err());
    within(SHORT + step, || {
        kept.lost().recv().expect_err("nothing is sent")
    });
    let result = within(SHORT, || released.release());
    assert!(matches!(result, Err(LockError::Timeout)), "{result:?}");
    within(step, || drop(lock));
    paused.resume();
    drop((kept, released));
    for key in ["k", "kept", "released", "other"] {
        let lock = locks.acquire(key, LONG).expect("its session is closed");
        lock.release().expect("it was ours");
    }
    eventually(LONG, "no session is left", || database.session_count() == 0);
}

fn a_wait_without_limit_notices_a_server_that_stands_still(engine: Engine) {
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    let locks = quick().build(database.url()).expect("locks");
    let _lock = locks.acquire("k", LONG).expect("free");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| locks.acquire("k", Duration::MAX));
        // It has begun to wait, in the second of its steps.
        thread::sleep(Duration::from_millis(1_500));
        assert!(!waiter.is_finished());
        let paused = server.pause();
        let ended = within(Duration::from_secs(2), || waiter.join().unwrap());
        assert!(matches!(ended, Err(LockError::Timeout)), "{ended:?}");
        paused.resume();
    });
}

/// A session that waits for its first lock can only be in a deadlock if the server gives it another one
/// when it connects, which PostgreSQL cannot.
fn a_deadlock_is_told(engine: Engine) {
    if engine == Engine::Postgres {
        return;
    }
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    let builder = NamedLocks::builder().scope(LockScope::Server);
    let locks = builder.build(database.url()).expect("locks");
    let held = locks.acquire("held", LONG).expect("free");
    server.configure(
        "SET GLOBAL init_connect = 'DO GET_LOCK(\"other\", 0), SLEEP(2)'",
        "SET GLOBAL init_connect = ''",
    );
    let mut stranger = database.admin();
    assert_eq!(stranger.one_i64("SELECT GET_LOCK('k', 0)"), 1);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| locks.acquire("k", LONG));
        thread::sleep(Duration::from_secs(1));
        assert_eq!(stranger.one_i64("SELECT GET_LOCK('other', 20)"), 1);
        let ended = waiter.join().unwrap();
        assert!(matches!(ended, Err(LockError::Deadlock)), "{ended:?}");
    });
    assert!(!held.is_lost());
    let is_held = "SELECT IS_USED_LOCK('held') <> CONNECTION_ID()";
    assert_eq!(stranger.one_i64(is_held), 1);
    held.release().expect("it was ours");
}

fn a_frozen_network_is_a_loss(engine: Engine) {
    let database = Database::create(engine);
    let proxy = Proxy::to(database.url());
    let locks = quick().build(&proxy.url(database.url())).expect("locks");
    let lock = locks.acquire("k", LONG).expect("free");
    proxy.freeze();
    within(SHORT + Duration::from_secs(1), || {
        lock.lost().recv().expect_err("nothing is sent")
    });
    assert!(lock.is_lost());
    proxy.drop_connections();
    let direct = quick().build(database.url()).expect("locks");
    let lock = direct.acquire("k", LONG).expect("its session is gone");
    lock.release().expect("it was ours");
}

fn a_reset_under_a_keep_alive_is_a_loss_at_once(engine: Engine) {
    let database = Database::create(engine);
    let proxy = Proxy::to(database.url());
    let patient = NamedLocks::builder()
        .keep_alive_interval(SHORT)
        .keep_alive_timeout(LONG);
    let locks = patient.build(&proxy.url(database.url())).expect("locks");
    let lock = locks.acquire("k", LONG).expect("free");
    proxy.freeze_replies();
    thread::sleep(SHORT * 3);
    assert!(!lock.is_lost());
    proxy.drop_connections();
    within(SHORT, || lock.lost().recv().expect_err("nothing is sent"));
    assert!(lock.is_lost());
}

fn a_server_that_ends_idle_sessions_is_kept_busy(engine: Engine) {
    let server = OwnServer::take(engine);
    if engine.is_mysql_like() {
        server.configure(
            "SET GLOBAL wait_timeout = 1",
            "SET GLOBAL wait_timeout = 28800",
        );
    }
    let database = Database::on(&server);
    if !engine.is_mysql_like() {
        database.admin().batch(&format!(
            "ALTER DATABASE {} SET idle_session_timeout = '500ms'",
            database.name()
        ));
    }
    // Without a keep-alive in the meantime: the session has switched that off for itself.
    let locks = NamedLocks::connect(database.url()).expect("locks");
    let lock = locks.acquire("k", LONG).expect("free");
    thread::sleep(Duration::from_millis(2_500));
    lock.release().expect("it was ours");
}

/// B28.
fn a_server_that_limits_statements_ends_no_wait(engine: Engine) {
    let server = OwnServer::take(engine);
    match engine {
        Engine::Mariadb => server.configure(
            "SET GLOBAL max_statement_time = 1",
            "SET GLOBAL max_statement_time = 0",
        ),
        Engine::Mysql => server.configure(
            "SET GLOBAL max_execution_time = 1000",
            "SET GLOBAL max_execution_time = 0",
        ),
        _ => {}
    }
    let database = Database::on(&server);
    if engine == Engine::Postgres {
        database.admin().batch(&format!(
            "ALTER DATABASE {} SET statement_timeout = '1s'",
            database.name()
        ));
    }
    let locks = NamedLocks::connect(database.url()).expect("locks");
    let lock = locks.acquire("k", LONG).expect("free");
    let timeout = Duration::from_secs(3);
    let start = Instant::now();
    let second = locks.acquire("k", timeout);
    assert!(matches!(second, Err(LockError::Timeout)), "{second:?}");
    assert!(start.elapsed() >= timeout);
    lock.release().expect("it was ours");
}

fn a_server_that_is_read_only_is_refused(engine: Engine) {
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    if engine.is_mysql_like() {
        server.configure("SET GLOBAL read_only = 1", "SET GLOBAL read_only = 0");
    } else {
        database.admin().batch(&format!(
            "ALTER DATABASE {} SET default_transaction_read_only = on",
            database.name()
        ));
    }
    let locks = NamedLocks::connect(database.url()).expect("locks");
    let refused = locks.acquire("k", LONG);
    assert!(
        matches!(refused, Err(LockError::Unsupported(_))),
        "{refused:?}"
    );
}

fn a_wait_that_is_ended_from_outside_is_no_lock(engine: Engine) {
    let database = Database::create(engine);
    let locks = quick().build(database.url()).expect("locks");
    let lock = locks.acquire("k", LONG).expect("free");
    let held_by = database.sessions();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| locks.acquire("k", LONG));
        let mut waiting = None;
        eventually(LONG, "the waiter is connected", || {
            waiting = database
                .sessions()
                .into_iter()
                .find(|id| !held_by.contains(id));
            waiting.is_some()
        });
        thread::sleep(SHORT * 2);
        let id = waiting.expect("it is connected");
        let end = if engine.is_mysql_like() {
            format!("KILL QUERY {id}")
        } else {
            format!("SELECT pg_cancel_backend({id})")
        };
        database.admin().batch(&end);
        let ended = waiter.join().unwrap();
        assert!(
            matches!(ended, Err(LockError::Failed | LockError::Database(_))),
            "{ended:?}"
        );
    });
    assert!(!lock.is_lost());
    lock.release().expect("it was ours");
    let lock = locks.acquire("k", LONG).expect("free");
    lock.release().expect("it was ours");
}

fn a_password_is_in_no_error(engine: Engine) {
    let database = Database::create(engine);
    let password = "s3cr3t-of-locks";
    let url = database
        .url()
        .replacen(":lease@", &format!(":{password}@"), 1);
    let locks = NamedLocks::connect(&url).expect("locks");
    let refused = locks.acquire("k", LONG).expect_err("the password is wrong");
    let mut texts = vec![format!("{refused:?}"), format!("{locks:?}")];
    let mut next: Option<&dyn std::error::Error> = Some(&refused);
    while let Some(error) = next {
        texts.push(error.to_string());
        next = error.source();
    }
    assert!(
        texts.iter().all(|text| !text.contains(password)),
        "{texts:?}"
    );
}
