//! InnoDB: locking reads that see the newest row, and errors that end the whole transaction.

use std::sync::mpsc;
use std::thread;

use diesel::result::DatabaseErrorKind;

use super::{LOOK, Stage, assert_claim_waits, fence, insert, kind, next_id, snapshot};
use crate::guard::on_innodb;
use crate::support::Engine;

const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];
const LOCK: &str = "FOR UPDATE";

on_innodb! {
    fn a_locking_read_sees_the_newest_row,
    fn a_plain_read_repeats_its_snapshot,
    fn a_claim_waits_for_a_locking_read,
    fn a_locking_read_that_finds_nothing_locks_all_the_same,
    fn a_read_only_transaction_refuses_it_and_goes_on,
    fn a_select_uses_up_what_was_set_for_the_next_transaction,
    fn a_serializable_verify_would_lock_out_renewals,
    fn behind_a_deadlock_every_statement_commits,
    fn a_changed_row_ends_the_transaction_where_snapshots_are_isolated,
}

/// A fence that does not mind what has changed since the snapshot.
fn newest(engine: Engine, fence: &str) -> String {
    match engine {
        Engine::Mariadb => format!("SET STATEMENT innodb_snapshot_isolation=OFF FOR {fence}"),
        _ => fence.to_owned(),
    }
}

fn a_locking_read_sees_the_newest_row(engine: Engine) {
    let stage = Stage::new(engine);
    for level in LEVELS {
        for snapshots in ["OFF", "ON"] {
            let lease = stage.claim();
            let fence = newest(engine, &fence(&stage, &lease, LOCK));
            let mut work = stage.database.connect();
            if engine == Engine::Mariadb {
                work.batch(&format!("SET innodb_snapshot_isolation = {snapshots}"));
            }
            work.batch(&format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}"));
            work.batch("BEGIN");
            work.one_i64(LOOK);
            lease.renew().unwrap();
            assert_eq!(work.maybe_i64(&fence), Some(1), "{level}");
            work.batch("ROLLBACK; BEGIN");
            work.one_i64(LOOK);
            stage.hand_over(lease.name()).release().unwrap();
            assert_eq!(work.maybe_i64(&fence), None, "{level}");
            work.batch("ROLLBACK");
        }
    }
}

fn a_plain_read_repeats_its_snapshot(engine: Engine) {
    let stage = Stage::new(engine);
    let lease = stage.claim();
    let plain = fence(&stage, &lease, "");
    let mut work = snapshot(&stage, "REPEATABLE READ");
    stage.hand_over(lease.name()).release().unwrap();
    assert_eq!(work.maybe_i64(&plain), Some(1));
    assert_eq!(
        work.maybe_i64(&newest(engine, &format!("{plain} {LOCK}"))),
        None
    );
}

fn a_claim_waits_for_a_locking_read(engine: Engine) {
    let stage = Stage::new(engine);
    let lease = stage.claim();
    let mut work = snapshot(&stage, "REPEATABLE READ");
    assert_eq!(work.maybe_i64(&fence(&stage, &lease, LOCK)), Some(1));
    assert_claim_waits(&stage, &lease);
    work.batch("COMMIT");
    lease.renew().unwrap();
}

fn a_locking_read_that_finds_nothing_locks_all_the_same(engine: Engine) {
    let stage = Stage::new(engine);
    let lease = stage.claim();
    let fence = newest(engine, &fence(&stage, &lease, LOCK));
    let mut work = snapshot(&stage, "REPEATABLE READ");
    let next = stage.hand_over(lease.name());
    assert_eq!(work.maybe_i64(&fence), None);
    let error = next.renew().unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    work.batch("ROLLBACK");
    next.renew().unwrap();
}

fn a_read_only_transaction_refuses_it_and_goes_on(engine: Engine) {
    let stage = Stage::new(engine);
    let lease = stage.claim();
    let fence = newest(engine, &fence(&stage, &lease, LOCK));
    let mut work = stage.database.connect();
    work.batch("START TRANSACTION READ ONLY");
    assert_eq!(
        kind(work.try_i64(&fence)),
        DatabaseErrorKind::ReadOnlyTransaction
    );
    work.one_i64(LOOK);
    work.batch("COMMIT");
}

fn a_select_uses_up_what_was_set_for_the_next_transaction(engine: Engine) {
    let stage = Stage::new(engine);
    let mut work = stage.database.connect();
    let mut writes = |between: &str| {
        work.batch("SET TRANSACTION READ ONLY");
        if !between.is_empty() {
            work.one_i64(between);
        }
        work.batch("BEGIN");
        let written = work.try_execute(&insert(next_id()));
        work.batch("ROLLBACK");
        written.is_ok()
    };
    assert!(!writes(""), "it was not read only");
    assert!(writes(LOOK), "a read was no transaction");
}

fn a_serializable_verify_would_lock_out_renewals(engine: Engine) {
    let stage = Stage::new(engine);
    let lease = stage.claim();
    let plain = fence(&stage, &lease, "");
    let mut work = snapshot(&stage, "SERIALIZABLE");
    assert_eq!(work.maybe_i64(&plain), Some(1));
    assert!(lease.renew().is_err(), "it was renewed");
    work.batch("ROLLBACK");
    lease.renew().unwrap();
    // in autocommit it locks nothing
    let mut work = stage.database.connect();
    work.batch("SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE");
    assert_eq!(work.maybe_i64(&plain), Some(1));
    lease.renew().unwrap();
}

fn behind_a_deadlock_every_statement_commits(engine: Engine) {
    let stage = Stage::new(engine);
    let (one, two) = (next_id(), next_id());
    let (lost, seen) = (next_id(), next_id());
    let mut raw = stage.database.connect();
    raw.execute(&insert(one));
    raw.execute(&insert(two));
    let lock = |id| format!("UPDATE work SET amount = amount + 1 WHERE id = {id}");
    let mut victim = stage.database.connect();
    let mut other = stage.database.connect();
    let (tell, told) = mpsc::channel();
    victim.batch("BEGIN");
    victim.execute(&insert(lost));
    victim.execute(&lock(one));
    other.batch("BEGIN");
    // the one that has written less is the victim
    for _ in 0..20 {
        other.execute(&insert(next_id()));
    }
    other.execute(&lock(two));
    let other = thread::spawn(move || {
        tell.send(()).unwrap();
        other.execute(&lock(one));
        other.batch("COMMIT");
    });
    told.recv().unwrap();
    assert_eq!(
        kind(victim.try_execute(&lock(two))),
        DatabaseErrorKind::SerializationFailure
    );
    victim.execute(&insert(seen));
    assert_eq!((stage.rows(lost), stage.rows(seen)), (0, 1));
    other.join().unwrap();
}

fn a_changed_row_ends_the_transaction_where_snapshots_are_isolated(engine: Engine) {
    if engine != Engine::Mariadb {
        return;
    }
    let stage = Stage::new(engine);
    let lease = stage.claim();
    let fence = fence(&stage, &lease, LOCK);
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let (lost, seen) = (next_id(), next_id());
        let mut work = stage.database.connect();
        work.batch("SET innodb_snapshot_isolation = ON");
        work.batch(&format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}"));
        work.batch("BEGIN");
        work.one_i64(LOOK);
        work.execute(&insert(lost));
        lease.renew().unwrap();
        assert_eq!(kind(work.try_i64(&fence)), DatabaseErrorKind::Unknown);
        work.execute(&insert(seen));
        assert_eq!((stage.rows(lost), stage.rows(seen)), (0, 1), "{level}");
    }
}
