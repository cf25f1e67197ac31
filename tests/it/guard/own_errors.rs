//! What the work does wrong by itself is reported as that, while the lease is held.

use std::sync::mpsc;
use std::thread;

use diesel::result::{DatabaseErrorKind, Error as DieselError};

use super::cell::{Cell, each};
use super::client::Entrance;
use super::{LOOK, assert_no_loss, insert, next_id};
use crate::support::{Engine, engines};

engines! {
    fn an_error_of_the_work_is_handed_on;
    servers:
    fn its_own_serialization_failure_is_no_loss,
    fn an_error_it_swallowed_is_no_loss_on_postgres,
    fn a_changed_row_is_no_loss_where_snapshots_are_isolated,
}

#[track_caller]
fn assert_kind(error: &DieselError, kind: DatabaseErrorKind) {
    match error {
        DieselError::DatabaseError(found, _) if same(found, &kind) => {}
        other => panic!("{other:?} is not {kind:?}"),
    }
}

fn same(one: &DatabaseErrorKind, other: &DatabaseErrorKind) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

fn an_error_of_the_work_is_handed_on(engine: Engine) {
    each(engine, &Entrance::ALL, |mut cell| {
        let lease = cell.stage.claim();
        let id = cell.id;
        let done = cell.client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            sql.run(&insert(id))
        });
        assert_kind(
            &assert_no_loss(done, &lease),
            DatabaseErrorKind::UniqueViolation,
        );
        let done = cell.client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            Err(DieselError::NotFound)
        });
        assert_eq!(assert_no_loss(done, &lease), DieselError::NotFound);
        assert_eq!(cell.stage.rows(id), 0, "{cell}");
    });
}

fn its_own_serialization_failure_is_no_loss(engine: Engine) {
    each(engine, &Entrance::ALL, |cell| match cell.engine {
        Engine::Postgres if cell.setting.is_serializable() => write_skew(cell),
        Engine::Postgres => {}
        _ => deadlock(cell),
    });
}

/// Each of two transactions adds to what the other has counted. It is the fence or the COMMIT that
/// fails.
fn write_skew(mut cell: Cell<'_>) {
    let lease = cell.stage.claim();
    let id = cell.id;
    let mut raw = cell.stage.database.connect();
    raw.batch(&format!("CREATE TABLE skew{id} (class BIGINT)"));
    let count = |class| format!("SELECT COUNT(*) FROM skew{id} WHERE class = {class}");
    let add = |class| format!("INSERT INTO skew{id} (class) VALUES ({class})");
    for fails_at_commit in [false, true] {
        let mut other = cell.stage.database.connect();
        other.batch("BEGIN ISOLATION LEVEL SERIALIZABLE");
        let done = cell.client.transact(&lease.tenure(), &mut |sql| {
            sql.number(&count(1))?;
            sql.run(&add(2))?;
            sql.run(&insert(id))?;
            other.one_i64(&count(2));
            other.execute(&add(1));
            if !fails_at_commit {
                other.batch("COMMIT");
            }
            Ok(())
        });
        if fails_at_commit {
            // the other one fails, as it comes later
            done.unwrap_or_else(|error| panic!("{cell}: {error:?}"));
            assert!(other.try_batch("COMMIT").is_err(), "both have committed");
            assert_eq!(cell.stage.rows(id), 1, "{cell}");
        } else {
            let error = assert_no_loss(done, &lease);
            assert_kind(&error, DatabaseErrorKind::SerializationFailure);
            assert_eq!(cell.stage.rows(id), 0, "{cell}");
        }
    }
}

fn deadlock(mut cell: Cell<'_>) {
    let lease = cell.stage.claim();
    let (one, two, id) = (next_id(), next_id(), cell.id);
    let mut other = cell.stage.database.connect();
    other.execute(&insert(one));
    other.execute(&insert(two));
    let lock = |id| format!("UPDATE work SET amount = amount + 1 WHERE id = {id}");
    let (tell, told) = mpsc::channel();
    let mut waiting = None;
    let mut other = Some(other);
    let done = cell.client.transact(&lease.tenure(), &mut |sql| {
        sql.run(&insert(id))?;
        sql.run(&lock(one))?;
        let (mut other, tell) = (other.take().expect("once"), tell.clone());
        other.batch("BEGIN");
        // the one that has written less is the victim
        for _ in 0..20 {
            other.execute(&insert(next_id()));
        }
        other.execute(&lock(two));
        let last = lock(one);
        waiting = Some(thread::spawn(move || {
            tell.send(()).unwrap();
            other.execute(&last);
            other.batch("COMMIT");
        }));
        told.recv().unwrap();
        sql.run(&lock(two))
    });
    let error = assert_no_loss(done, &lease);
    assert_kind(&error, DatabaseErrorKind::SerializationFailure);
    assert_eq!(cell.stage.rows(id), 0, "{cell}");
    waiting.expect("it has run").join().unwrap();
}

/// 25P02: PostgreSQL refuses all that comes after an error.
fn an_error_it_swallowed_is_no_loss_on_postgres(engine: Engine) {
    if engine != Engine::Postgres {
        return;
    }
    each(engine, &Entrance::ALL, |mut cell| {
        let lease = cell.stage.claim();
        let id = cell.id;
        let done = cell.client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            assert!(sql.run(&insert(id)).is_err(), "it is there twice");
            Ok(())
        });
        assert_kind(&assert_no_loss(done, &lease), DatabaseErrorKind::Unknown);
        assert_eq!(cell.stage.rows(id), 0, "{cell}");
    });
}

/// 1020, of a row of the work's own.
fn a_changed_row_is_no_loss_where_snapshots_are_isolated(engine: Engine) {
    if engine != Engine::Mariadb {
        return;
    }
    each(engine, &Entrance::ALL, |mut cell| {
        if !cell.setting.has_isolated_snapshots() {
            return;
        }
        let lease = cell.stage.claim();
        let (id, row) = (cell.id, next_id());
        let mut other = cell.stage.database.connect();
        other.execute(&insert(row));
        let add = format!("UPDATE work SET amount = amount + 1 WHERE id = {row}");
        let done = cell.client.transact(&lease.tenure(), &mut |sql| {
            sql.number(LOOK)?;
            sql.run(&insert(id))?;
            other.execute(&add);
            sql.run(&add)
        });
        assert_kind(&assert_no_loss(done, &lease), DatabaseErrorKind::Unknown);
        assert_eq!(cell.stage.rows(id), 0, "{cell}");
    });
}
