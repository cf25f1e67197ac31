//! Instants of a schedule: who may claim them, what is recorded of their rounds, and which rounds run
//! once more.

use chrono::{DateTime, Utc};
use diesel_lease::{Error, Lease, Leases, Unfinished};

use crate::support::database::Database;
use crate::support::raw::Raw;
use crate::support::{Engine, LONG, eventually};

mod cases;
mod hooked;
mod model;
pub(crate) mod processes;
mod races;
mod statements;
mod untaken;

/// A database with the table, and leases in it. Nothing expires in the time that a test takes.
fn migrated(engine: Engine) -> (Database, Leases) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    leases.migrate().unwrap();
    (database, leases)
}

/// Instants of a schedule that fires every minute, all of them long past.
fn minute(n: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_millis(1_577_836_800_000 + n * 60_000).unwrap()
}

fn minute_ms(n: i64) -> i64 {
    minute(n).timestamp_millis()
}

#[track_caller]
fn won(claim: Result<Option<Lease>, Error>) -> Lease {
    claim.unwrap().expect("it was refused")
}

#[track_caller]
fn refused(claim: Result<Option<Lease>, Error>) {
    let lease = claim.unwrap();
    assert!(lease.is_none(), "it was claimed: {lease:?}");
}

#[track_caller]
fn is_lost(answer: Result<(), Error>) {
    assert!(matches!(answer, Err(Error::Lost(_))), "{answer:?}");
}

/// The one round of this name that can be run again.
#[track_caller]
fn found(leases: &Leases, name: &str) -> Unfinished {
    let mut found = leases.unfinished_slots(&[name]).unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

#[track_caller]
fn nothing_found(leases: &Leases, name: &str) {
    assert_eq!(leases.unfinished_slots(&[name]).unwrap(), []);
}

/// The last instant, the one marked as unfinished, and the one marked as run again.
#[track_caller]
fn marks(raw: &mut Raw, name: &str) -> (i64, i64, i64) {
    let row = raw.row(name).expect("a row");
    (row.slot_ms, row.unfinished_slot_ms, row.rerun_slot_ms)
}

/// Waits for what is given back on another thread.
#[track_caller]
fn soon_free(raw: &mut Raw, name: &str) {
    eventually(LONG, "the name is free", || {
        raw.row(name).expect("a row").expires_at_ms == 0
    });
}
