//! PostgreSQL: row locks that know which columns are keys.

use std::thread;
use std::time::Duration;

use diesel::result::DatabaseErrorKind;

use super::{Stage, assert_claim_waits, fence, insert, kind, next_id, snapshot};
use crate::support::{Engine, LONG, eventually};

const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];
const LOCK: &str = "FOR KEY SHARE";

#[test]
fn a_key_share_passes_after_renewals_and_lets_them_pass() {
    let stage = Stage::new(Engine::Postgres);
    for level in LEVELS {
        let lease = stage.claim();
        let mut work = snapshot(&stage, level);
        lease.renew().unwrap();
        assert_eq!(work.maybe_i64(&fence(&stage, &lease, LOCK)), Some(1));
        lease.renew().unwrap();
        work.batch("COMMIT");
    }
}

#[test]
fn a_claim_waits_for_a_key_share_and_no_renewal_queues_behind_it() {
    let stage = Stage::new(Engine::Postgres);
    let mut admin = stage.database.admin();
    for level in LEVELS {
        let lease = stage.claim();
        let mut work = snapshot(&stage, level);
        assert_eq!(work.maybe_i64(&fence(&stage, &lease, LOCK)), Some(1));
        stage.database.connect().expire(lease.name());
        thread::scope(|scope| {
            let claim = scope.spawn(|| assert_claim_waits(&stage, &lease));
            eventually(LONG, "the claim waits", || {
                admin.one_i64(
                    "SELECT COUNT(*) FROM pg_stat_activity \
                     WHERE datname = current_database() AND wait_event_type = 'Lock'",
                ) > 0
            });
            // what changes no key is not held up by the claim that waits
            let mut renewal = stage.database.connect();
            renewal.batch("SET lock_timeout = '300ms'");
            renewal.execute("UPDATE diesel_leases SET expires_at_ms = 1");
            assert!(!claim.is_finished(), "the claim did not wait");
        });
        work.batch("COMMIT");
        let next = stage.rival.try_claim(lease.name()).unwrap();
        assert_eq!(next.expect("free").term(), 2);
    }
}

#[test]
fn a_key_share_after_a_claim_finds_no_row_or_fails() {
    let stage = Stage::new(Engine::Postgres);
    for level in LEVELS {
        let lease = stage.claim();
        let fence = fence(&stage, &lease, LOCK);
        let mut work = snapshot(&stage, level);
        let next = stage.hand_over(lease.name());
        let found = work.try_i64(&fence);
        if level == "READ COMMITTED" {
            assert_eq!(found.unwrap(), None);
        } else {
            assert_eq!(kind(found), DatabaseErrorKind::SerializationFailure);
        }
        next.release().unwrap();
    }
}

#[test]
fn without_the_index_a_claim_comes_through_a_key_share() {
    let stage = Stage::new(Engine::Postgres);
    let mut raw = stage.database.connect();
    let index = raw.one_text(
        "SELECT conname::text FROM pg_constraint \
         WHERE conrelid = 'diesel_leases'::regclass AND contype = 'u'",
    );
    raw.batch(&format!(
        "ALTER TABLE diesel_leases DROP CONSTRAINT {index}"
    ));
    let lease = stage.claim();
    let mut work = snapshot(&stage, "READ COMMITTED");
    assert_eq!(work.maybe_i64(&fence(&stage, &lease, LOCK)), Some(1));
    let next = stage.hand_over(lease.name());
    assert_eq!(next.term(), 2);
}

#[test]
fn an_idle_limit_of_the_transaction_gives_the_row_back() {
    let stage = Stage::new(Engine::Postgres);
    let lease = stage.claim();
    let fence = fence(&stage, &lease, LOCK);
    let mut work = snapshot(&stage, "READ COMMITTED");
    let id = next_id();
    work.execute(&insert(id));
    let limited =
        "SELECT term FROM (SELECT set_config('idle_in_transaction_session_timeout', '400', true))";
    work.maybe_i64(&format!("{limited} AS set, ({fence}) AS fenced"));
    stage.database.connect().expire(lease.name());
    assert_claim_or_wait(&stage, lease.name());
    assert!(work.try_batch("COMMIT").is_err(), "it has committed");
    assert_eq!(stage.rows(id), 0);
}

#[test]
fn an_idle_limit_of_the_transaction_ends_with_it() {
    let stage = Stage::new(Engine::Postgres);
    let mut work = stage.database.connect();
    let show = "SELECT setting::bigint FROM pg_settings \
                WHERE name = 'idle_in_transaction_session_timeout'";
    let before = work.one_i64(show);
    work.batch("BEGIN; SELECT set_config('idle_in_transaction_session_timeout', '400', true)");
    assert_eq!(work.one_i64(show), 400);
    work.batch("COMMIT");
    assert_eq!(work.one_i64(show), before);
    // and what is idle outside a transaction is left alone
    thread::sleep(Duration::from_millis(500));
    work.one_i64(show);
}

#[test]
fn a_read_only_transaction_refuses_a_key_share_and_is_over() {
    let stage = Stage::new(Engine::Postgres);
    let lease = stage.claim();
    let fence = fence(&stage, &lease, LOCK);
    let mut work = stage.database.connect();
    work.batch("BEGIN READ ONLY");
    assert_eq!(
        kind(work.try_i64(&fence)),
        DatabaseErrorKind::ReadOnlyTransaction
    );
    assert_eq!(kind(work.try_batch("SELECT 1")), DatabaseErrorKind::Unknown);
    // Nobody is told that this rolls back.
    work.batch("COMMIT");
}

fn assert_claim_or_wait(stage: &Stage, name: &str) {
    let next = stage.rival.claim_timeout(name, LONG).unwrap();
    assert_eq!(next.expect("the name").term(), 2);
}
