//! Cases that other tools have met: B7, B9, B19, B25 and L15 of the collection.

use std::thread;
use std::time::Duration;

use diesel::result::QueryResult;
use diesel_lease::{Error, Leases, Timings};

use super::client::{Entrance, Sql};
use super::{LOOK, PATIENT, Stage, assert_lost, insert, next_id};
use crate::support::proxy::Proxy;
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn expired_and_passed_on_no_work_runs,
    fn a_claim_is_no_part_of_an_open_transaction,
    fn a_claim_in_an_old_transaction_is_as_long_as_any,
    fn work_in_a_transaction_that_outlives_the_lease_does_not_commit,
    fn two_workers_lose_no_update;
    servers:
    fn cut_off_from_the_leases_nothing_commits_after_the_deadline,
}

/// L15: not by SQL, but in time.
fn expired_and_passed_on_no_work_runs(engine: Engine) {
    let timings = Timings {
        lease: Duration::from_millis(2200),
        deadline: Duration::from_millis(2000),
        grace: Duration::from_millis(200),
        ..PATIENT
    };
    let stage = Stage::with_timings(engine, timings);
    for entrance in [Entrance::Plain, Entrance::GuardedPool] {
        let lease = stage.claim();
        stage.succeed(&lease);
        let mut client = stage.client(entrance);
        let done = client.transact(&lease.tenure(), &mut |_| panic!("the work was run"));
        assert_lost(&done, &lease.tenure());
    }
}

/// B7: others see it at once, and it outlives a rollback.
fn a_claim_is_no_part_of_an_open_transaction(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let name = unique("within");
        let mut claimed = None;
        let done: QueryResult<()> = client.sql().transact(&mut |sql| {
            sql.number(LOOK)?;
            let lease = stage.leases.try_claim(&name).unwrap();
            assert!(stage.rival.try_claim(&name).unwrap().is_none());
            claimed = lease;
            Err(diesel::result::Error::RollbackTransaction)
        });
        assert!(done.is_err());
        let lease = claimed.expect("a new name");
        lease.verify().unwrap();
        assert!(stage.rival.try_claim(&name).unwrap().is_none());
    }
}

/// B19: the clock of a transaction may stand still.
fn a_claim_in_an_old_transaction_is_as_long_as_any(engine: Engine) {
    let stage = Stage::new(engine);
    let mut client = stage.client(Entrance::Guarded);
    let mut raw = stage.database.connect();
    let done = client.sql().transact(&mut |sql| {
        sql.number(LOOK)?;
        thread::sleep(Duration::from_millis(1100));
        let lease = stage.claim();
        let before = raw.now_ms();
        lease.renew().unwrap();
        let row = raw.row(lease.name()).unwrap();
        assert!(row.expires_at_ms >= before + PATIENT.lease.as_millis() as i64);
        // and it is no older for a transaction that is
        let tenure = lease.tenure();
        let _entered = tenure.enter();
        tenure.verify().unwrap();
        sql.fence(&tenure).or_else(|error| match engine {
            // it has read before we wrote
            Engine::Sqlite => Ok(()),
            _ => Err(error),
        })
    });
    if engine != Engine::Sqlite {
        // The lease has ended with the closure.
        assert!(done.is_err(), "committed after its lease was given back");
    }
}

/// Reads, adds and writes under a lease that it gives back at once.
fn add_one(stage: &Stage, sql: &mut dyn Sql, row: i64) -> Result<(), Error> {
    let lease = stage.leases.claim(&unique("counter"))?;
    let tenure = lease.tenure();
    let entered = tenure.enter();
    let read = format!("SELECT amount FROM work WHERE id = {row}");
    let amount = sql.number(&read).expect("the row");
    thread::sleep(Duration::from_millis(20));
    let write = format!("UPDATE work SET amount = {} WHERE id = {row}", amount + 1);
    // one that waits for the other's row, or for its file, may fail
    let _ = sql.run(&write);
    drop(entered);
    lease.release()
}

/// B9: the lease is given back inside the transaction, which commits later.
fn work_in_a_transaction_that_outlives_the_lease_does_not_commit(engine: Engine) {
    let stage = Stage::new(engine);
    let row = next_id();
    stage.database.connect().execute(&insert(row));
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let done = client.sql().transact(&mut |sql| {
            let _ = add_one(&stage, sql, row);
            thread::sleep(Duration::from_millis(100));
            Ok(())
        });
        assert!(
            done.is_err(),
            "{entrance}: committed after its lease was given back"
        );
        let read = format!("SELECT amount FROM work WHERE id = {row}");
        assert_eq!(stage.database.connect().one_i64(&read), 0, "{entrance}");
    }
}

/// B9 as it should be.
fn two_workers_lose_no_update(engine: Engine) {
    const ROUNDS: i64 = 5;
    let stage = Stage::new(engine);
    let row = next_id();
    stage.database.connect().execute(&insert(row));
    let read = format!("SELECT amount FROM work WHERE id = {row}");
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut client = stage.client(Entrance::GuardedPool);
                for _ in 0..ROUNDS {
                    let lease = stage.leases.claim("counter").unwrap();
                    let done = client.transact(&lease.tenure(), &mut |sql| {
                        let amount = sql.number(&read)? + 1;
                        thread::sleep(Duration::from_millis(5));
                        sql.run(&format!(
                            "UPDATE work SET amount = {amount} WHERE id = {row}"
                        ))
                    });
                    done.unwrap_or_else(|error| panic!("{engine}: {error:?}"));
                    lease.release().unwrap();
                }
            });
        }
    });
    assert_eq!(stage.database.connect().one_i64(&read), 2 * ROUNDS);
}

/// B25: the work does not stop, and its own connection is as healthy as ever.
fn cut_off_from_the_leases_nothing_commits_after_the_deadline(engine: Engine) {
    let timings = Timings {
        lease: Duration::from_millis(2500),
        attempt: Duration::from_millis(1000),
        deadline: Duration::from_millis(2000),
        grace: Duration::from_millis(500),
        ..PATIENT
    };
    let stage = Stage::with_timings(engine, timings.clone());
    let proxy = Proxy::to(stage.database.url());
    let leases = Leases::builder().timings(timings);
    let leases = leases.build(&proxy.url(stage.database.url())).unwrap();
    for entrance in [Entrance::Plain, Entrance::GuardedPool] {
        let mut client = stage.client(entrance);
        let held = leases.claim(&unique("cut-off")).unwrap().hold().unwrap();
        let mut transact = || {
            let id = next_id();
            let done = client.transact(held.tenure(), &mut |sql| sql.run(&insert(id)));
            (id, done)
        };
        transact().1.unwrap();
        proxy.freeze();
        let mut refused = 0;
        eventually(LONG, "it is refused for good", || {
            let was_lost = held.is_lost();
            let (id, done) = transact();
            assert_eq!(stage.rows(id), i64::from(done.is_ok()));
            if was_lost {
                assert_lost(&done, held.tenure());
                refused += 1;
            }
            refused == 5
        });
        // the successor need not wait for any of it
        proxy.thaw();
        let next = stage
            .rival
            .claim_timeout(held.tenure().name(), LONG)
            .unwrap();
        assert_eq!(next.expect("it runs out").term(), 2);
    }
}
