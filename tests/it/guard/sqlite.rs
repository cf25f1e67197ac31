//! SQLite: one writer, and connections that do not wait for the file.

use std::thread;
use std::time::Duration;

use diesel_lease::Timings;

use super::client::Entrance;
use super::{LOOK, PATIENT, Stage, assert_lost, assert_no_loss, insert, next_id};
use crate::support::database::Database;
use crate::support::{Engine, LONG, eventually, unique};

/// B35: Diesel sets no busy timeout.
#[test]
fn our_own_renewals_make_no_transaction_fail() {
    let timings = Timings {
        renew: Duration::from_millis(2),
        ..PATIENT
    };
    for entrance in Entrance::WHOLE {
        let stage = Stage::with(Database::create(Engine::Sqlite), timings.clone());
        let held = stage.leases.claim(&unique("busy")).unwrap().hold().unwrap();
        let mut client = stage.bare_client(entrance);
        for _ in 0..200 {
            let id = next_id();
            let done = client.transact(held.tenure(), &mut |sql| {
                sql.number(LOOK)?;
                sql.run(&insert(id))
            });
            done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        }
        // with the renewals of several intervals held up
        let id = next_id();
        let done = client.transact(held.tenure(), &mut |sql| {
            sql.number(LOOK)?;
            thread::sleep(Duration::from_millis(50));
            sql.run(&insert(id))
        });
        done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        held.release().unwrap();
    }
}

/// Another's writing transaction, which is longer than a renewal.
#[test]
fn the_begin_waits_for_a_writer() {
    for entrance in Entrance::WHOLE {
        let stage = Stage::new(Engine::Sqlite);
        let lease = stage.claim();
        let mut client = stage.bare_client(entrance);
        let mut other = stage.database.connect();
        other.batch("BEGIN IMMEDIATE");
        other.execute(&insert(next_id()));
        let writer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(150));
            other.batch("COMMIT");
        });
        let id = next_id();
        let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
        done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        writer.join().unwrap();
    }
}

/// A file that stays busy is no loss.
#[test]
fn a_busy_file_is_no_loss() {
    for entrance in Entrance::WHOLE {
        let stage = Stage::new(Engine::Sqlite);
        let lease = stage.claim();
        let mut client = stage.bare_client(entrance);
        let mut other = stage.database.connect();
        other.batch("BEGIN IMMEDIATE");
        let done = client.transact(&lease.tenure(), &mut |_| panic!("the work was run"));
        assert_no_loss(done, &lease);
        other.batch("ROLLBACK");
        let id = next_id();
        let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
        done.unwrap();
        assert_eq!(stage.rows(id), 1, "{entrance}");
    }
}

/// There is no write lock to be had.
#[test]
fn a_connection_that_cannot_write_is_no_loss() {
    for entrance in Entrance::WHOLE {
        let stage = Stage::new(Engine::Sqlite);
        let lease = stage.claim();
        let mut client = stage.bare_client(entrance);
        client.sql().batch("PRAGMA query_only = ON").unwrap();
        let done = client.transact(&lease.tenure(), &mut |sql| sql.number(LOOK).map(drop));
        assert_no_loss(done, &lease);
    }
}

/// One that was entered when the transaction had read, and somebody has written since.
#[test]
fn a_late_tenure_of_a_transaction_that_cannot_write_any_more_is_no_loss() {
    for entrance in Entrance::GUARDED {
        let stage = Stage::new(Engine::Sqlite);
        let lease = stage.claim();
        let tenure = lease.tenure();
        let mut client = stage.bare_client(entrance);
        let done = client.sql().transact(&mut |sql| {
            sql.number(LOOK)?;
            let _entered = tenure.enter();
            sql.number(LOOK)?;
            lease.renew().unwrap();
            Ok(())
        });
        assert_no_loss(done, &lease);
        let id = next_id();
        let done = client.transact(&tenure, &mut |sql| sql.run(&insert(id)));
        done.unwrap();
    }
}

/// `OR ROLLBACK` ends the transaction behind the error, as InnoDB does.
#[test]
fn what_follows_a_rollback_of_the_engine_is_never_seen() {
    for entrance in Entrance::GUARDED {
        let stage = Stage::new(Engine::Sqlite);
        let lease = stage.claim();
        let mut client = stage.bare_client(entrance);
        let there = next_id();
        client.sql().run(&insert(there)).unwrap();
        let again = insert(there).replace("INSERT", "INSERT OR ROLLBACK");
        let returning = format!("{again} RETURNING id");
        for way in ["run", "batch", "load"] {
            let seen = next_id();
            let done = client.transact(&lease.tenure(), &mut |sql| {
                let failed = match way {
                    "run" => sql.run(&again).is_err(),
                    "batch" => sql.batch(&again).is_err(),
                    _ => sql.number(&returning).is_err(),
                };
                assert!(failed, "it is there twice");
                let _ = sql.run(&insert(seen));
                assert_eq!(stage.rows(seen), 0, "{entrance} {way}: committed");
                Ok(())
            });
            assert_no_loss(done, &lease);
            assert_eq!(stage.rows(seen), 0, "{entrance} {way}");
            let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(seen)));
            done.unwrap();
        }
    }
}

/// No claim gets in while the work runs, whatever the clock says.
#[test]
fn a_claim_waits_for_the_work() {
    let timings = Timings {
        attempt: Duration::from_millis(400),
        ..PATIENT
    };
    for entrance in Entrance::WHOLE {
        let stage = Stage::with(Database::create(Engine::Sqlite), timings.clone());
        let lease = stage.claim();
        let mut client = stage.bare_client(entrance);
        let id = next_id();
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.run("UPDATE diesel_leases SET expires_at_ms = 1")?;
            let answer = stage.rival.try_claim(lease.name());
            assert!(!matches!(answer, Ok(Some(_))), "a claim came through");
            sql.run(&insert(id))
        });
        done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        assert_eq!(stage.rows(id), 1);
        eventually(LONG, "then it is claimed", || {
            matches!(stage.rival.try_claim(lease.name()), Ok(Some(_)))
        });
        let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
        assert_lost(&done, &lease.tenure());
    }
}
