//! SQLite: one writer.

use std::thread;
use std::time::Duration;

use super::{LOOK, Stage, assert_claim_waits, insert, next_id};
use crate::support::Engine;

#[test]
fn a_transaction_that_has_read_cannot_write_after_a_renewal() {
    let stage = Stage::new(Engine::Sqlite);
    let lease = stage.claim();
    let mut work = stage.database.connect();
    work.batch("BEGIN");
    work.one_i64(LOOK);
    // In the millisecond of the claim it would write what is there, which SQLite does not.
    thread::sleep(Duration::from_millis(5));
    lease.renew().unwrap();
    // at once: a busy timeout is of no use
    assert!(work.try_execute(&insert(next_id())).is_err(), "it wrote");
}

#[test]
fn a_write_that_changes_nothing_keeps_claims_out() {
    let stage = Stage::new(Engine::Sqlite);
    let lease = stage.claim();
    let mut work = stage.database.connect();
    work.batch("BEGIN");
    work.execute("UPDATE diesel_leases SET term = term WHERE 0");
    thread::scope(|scope| {
        let claim = scope.spawn(|| assert_claim_waits(&stage, &lease));
        thread::sleep(Duration::from_millis(200));
        assert!(!claim.is_finished(), "the claim did not wait");
        work.execute(&insert(next_id()));
        work.batch("COMMIT");
    });
    lease.renew().unwrap();
}
