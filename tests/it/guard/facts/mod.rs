//! What the guard rests on, on sessions of the test's own: the locks and snapshots of each engine.

#[cfg(feature = "mysql")]
mod innodb;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};
use diesel_lease::Lease;

use super::{LOOK, Stage, insert, next_id};
use crate::support::Engine;
use crate::support::raw::Raw;

/// The fence of a lease as the guard asks for it.
fn fence(stage: &Stage, lease: &Lease, lock: &str) -> String {
    let row = stage.database.connect().row(lease.name()).unwrap();
    format!(
        "SELECT term FROM diesel_leases \
         WHERE name = '{}' AND holder = '{}' AND term = {} {lock}",
        row.name, row.holder, row.term
    )
}

/// A session with a transaction open whose snapshot is taken.
fn snapshot(stage: &Stage, level: &str) -> Raw {
    let mut raw = stage.database.connect();
    match stage.database.engine() {
        Engine::Postgres => raw.batch(&format!("BEGIN ISOLATION LEVEL {level}")),
        _ => {
            raw.batch(&format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}"));
            raw.batch("BEGIN");
        }
    }
    raw.one_i64(LOOK);
    raw
}

fn kind<T>(answer: QueryResult<T>) -> DatabaseErrorKind {
    match answer {
        Err(DieselError::DatabaseError(kind, _)) => kind,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it succeeded"),
    }
}

/// A claim that meets a lock: refused, and no error.
#[track_caller]
fn assert_claim_waits(stage: &Stage, lease: &Lease) {
    let answer = stage.rival.try_claim(lease.name()).unwrap();
    assert!(answer.is_none(), "a claim came through");
}
