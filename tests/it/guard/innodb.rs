//! MySQL and MariaDB: errors that end the whole transaction, and settings of the next one alone.

use std::sync::mpsc::channel;
use std::thread::{JoinHandle, spawn};

use diesel::prelude::*;
use diesel_lease::{GuardedConnection, Tenure};

use super::client::{Client, Entrance, Sql};
use super::{
    LOOK, PATIENT, Stage, assert_lost, assert_no_loss, insert, leases, next_id, on_innodb,
};
use crate::support::Engine;
use crate::support::database::Database;
use crate::support::servers::OwnServer;

on_innodb! {
    fn nothing_is_seen_after_a_deadlock,
    fn nothing_is_seen_after_a_deadlock_in_a_savepoint,
    fn nothing_is_seen_after_a_deadlock_before_the_tenure_was_entered,
    fn a_savepoint_that_is_rolled_back_lets_it_go_on,
    fn an_error_of_a_known_kind_lets_it_go_on,
    fn read_only_for_the_next_transaction_keeps_its_effect,
    fn an_isolation_for_the_next_transaction_keeps_its_effect,
    fn what_was_set_outlives_a_begin_that_was_refused,
    fn what_was_set_unguarded_keeps_its_effect,
}

fn lock(id: i64) -> String {
    format!("UPDATE work SET amount = amount + 1 WHERE id = {id}")
}

/// Two rows, of which another session locks the second and then waits for the first.
struct Deadlock {
    one: i64,
    two: i64,
    other: Option<JoinHandle<()>>,
}

impl Deadlock {
    fn new(stage: &Stage) -> Deadlock {
        let (one, two) = (next_id(), next_id());
        let mut raw = stage.database.connect();
        raw.execute(&insert(one));
        raw.execute(&insert(two));
        let other = None;
        Deadlock { one, two, other }
    }

    /// Makes `sql` the victim, by `last`, which is to lock the second row.
    fn meet(&mut self, stage: &Stage, sql: &mut dyn Sql, last: &mut dyn FnMut(&mut dyn Sql, i64)) {
        sql.run(&lock(self.one)).unwrap();
        let mut other = stage.database.connect();
        other.batch("BEGIN");
        // the one that has written less is the victim
        for _ in 0..20 {
            other.execute(&insert(next_id()));
        }
        other.execute(&lock(self.two));
        let (tell, told) = channel();
        let first = lock(self.one);
        self.other = Some(spawn(move || {
            tell.send(()).unwrap();
            other.execute(&first);
            other.batch("COMMIT");
        }));
        told.recv().unwrap();
        last(sql, self.two);
        self.other.take().expect("it waits").join().unwrap();
    }
}

/// Every way to send a statement.
const LAST: [fn(&mut dyn Sql, i64); 3] = [
    |sql, id| assert!(sql.run(&lock(id)).is_err(), "no deadlock"),
    |sql, id| assert!(sql.batch(&lock(id)).is_err(), "no deadlock"),
    |sql, id| {
        let read = format!("SELECT amount FROM work WHERE id = {id} FOR UPDATE");
        assert!(sql.number(&read).is_err(), "no deadlock");
    },
];

/// The rest of a transaction that has swallowed such an error.
fn assert_over(stage: &Stage, sql: &mut dyn Sql) {
    let seen = next_id();
    assert!(sql.run(&insert(seen)).is_err(), "a statement came through");
    assert!(
        sql.batch(&insert(seen)).is_err(),
        "a statement came through"
    );
    assert!(sql.number(LOOK).is_err(), "a statement came through");
    let nested = sql.transact(&mut |_| panic!("the nested work was run"));
    assert!(nested.is_err(), "a statement came through");
    assert_eq!(stage.rows(seen), 0);
}

fn nothing_is_seen_after_a_deadlock(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        for mut last in LAST {
            let lease = stage.claim();
            let id = next_id();
            let mut deadlock = Deadlock::new(&stage);
            let done = client.transact(&lease.tenure(), &mut |sql| {
                sql.run(&insert(id))?;
                deadlock.meet(&stage, sql, &mut last);
                assert_over(&stage, sql);
                Ok(())
            });
            assert_no_loss(done, &lease);
            assert_eq!(stage.rows(id), 0, "{entrance}");
            // the next one is as good as any
            let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
            done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
            assert_eq!(stage.rows(id), 1, "{entrance}");
        }
    }
}

fn nothing_is_seen_after_a_deadlock_in_a_savepoint(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        for mut last in LAST {
            let lease = stage.claim();
            let id = next_id();
            let mut deadlock = Deadlock::new(&stage);
            let done = client.transact(&lease.tenure(), &mut |sql| {
                sql.run(&insert(id))?;
                for nested_says in [Ok(()), Err(diesel::result::Error::NotFound)] {
                    let mut says = Some(nested_says);
                    let nested = sql.transact(&mut |sql| {
                        sql.transact(&mut |sql| {
                            if deadlock.other.is_none() && deadlock.one != 0 {
                                deadlock.meet(&stage, sql, &mut last);
                                deadlock.one = 0;
                            }
                            says.take().expect("once")
                        })
                    });
                    assert!(nested.is_err(), "{entrance}: the savepoint is there");
                    assert_over(&stage, sql);
                }
                Ok(())
            });
            assert_no_loss(done, &lease);
            assert_eq!(stage.rows(id), 0, "{entrance}");
        }
    }
}

fn nothing_is_seen_after_a_deadlock_before_the_tenure_was_entered(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let tenure = lease.tenure();
        let mut last = LAST[0];
        let mut deadlock = Deadlock::new(&stage);
        let done = client.sql().transact(&mut |sql| {
            deadlock.meet(&stage, sql, &mut last);
            let _entered = tenure.enter();
            assert_over(&stage, sql);
            Ok(())
        });
        assert_no_loss(done, &lease);
    }
}

/// The server says that the transaction is still there.
fn a_savepoint_that_is_rolled_back_lets_it_go_on(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let (before, within, after) = (next_id(), next_id(), next_id());
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(before))?;
            let nested = sql.transact(&mut |sql| {
                sql.run(&insert(within))?;
                sql.run("SELECT no_such_function()")
            });
            assert!(nested.is_err(), "there is such a function");
            sql.run(&insert(after))
        });
        done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        let rows = [before, within, after].map(|id| stage.rows(id));
        assert_eq!(rows, [1, 0, 1], "{entrance}");
    }
}

fn an_error_of_a_known_kind_lets_it_go_on(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let (id, after) = (next_id(), next_id());
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            assert!(sql.run(&insert(id)).is_err(), "it is there twice");
            sql.run(&insert(after))
        });
        done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        assert_eq!((stage.rows(id), stage.rows(after)), (1, 1), "{entrance}");
    }
}

/// Whether the next transaction of `client` could write.
fn could_write(stage: &Stage, client: &mut dyn Client, tenure: &Tenure) -> bool {
    let id = next_id();
    let _ = client.transact(tenure, &mut |sql| sql.run(&insert(id)));
    stage.rows(id) == 1
}

fn read_only_for_the_next_transaction_keeps_its_effect(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let tenure = lease.tenure();
        for _ in 0..2 {
            client.sql().batch("SET TRANSACTION READ ONLY").unwrap();
            assert!(!could_write(&stage, client.as_mut(), &tenure), "{entrance}");
            assert!(could_write(&stage, client.as_mut(), &tenure), "{entrance}");
            client.sql().run("SET TRANSACTION READ ONLY").unwrap();
            let done = client.transact(&tenure, &mut |sql| sql.number(LOOK).map(drop));
            done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
            assert!(could_write(&stage, client.as_mut(), &tenure), "{entrance}");
        }
    }
}

fn an_isolation_for_the_next_transaction_keeps_its_effect(engine: Engine) {
    let stage = Stage::new(engine);
    let row = next_id();
    let mut raw = stage.database.connect();
    raw.execute(&insert(row));
    let read = format!("SELECT amount FROM work WHERE id = {row}");
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        for (set, sees_more) in [
            ("SET TRANSACTION ISOLATION LEVEL READ COMMITTED", 1),
            ("DO 0", 0),
        ] {
            client.sql().batch(set).unwrap();
            let done = client.transact(&lease.tenure(), &mut |sql| {
                let before = sql.number(&read)?;
                raw.execute(&lock(row));
                assert_eq!(sql.number(&read)? - before, sees_more, "{entrance} {set}");
                Ok(())
            });
            done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        }
    }
}

/// Nothing was sent, so it is still set.
fn what_was_set_outlives_a_begin_that_was_refused(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let (lost, lease) = (stage.claim(), stage.claim());
        let tenure = lost.tenure();
        drop(lost);
        client.sql().batch("SET TRANSACTION READ ONLY").unwrap();
        assert_lost(&client.transact(&tenure, &mut |_| Ok(())), &tenure);
        let tenure = lease.tenure();
        assert!(!could_write(&stage, client.as_mut(), &tenure), "{entrance}");
        assert!(could_write(&stage, client.as_mut(), &tenure), "{entrance}");
    }
}

fn what_was_set_unguarded_keeps_its_effect(engine: Engine) {
    let stage = Stage::new(engine);
    let inner = MysqlConnection::establish(stage.database.url()).unwrap();
    let mut conn = GuardedConnection::new(inner);
    let lease = stage.claim();
    let tenure = lease.tenure();
    let _entered = tenure.enter();
    conn.transaction(|conn| conn.run(LOOK)).unwrap();
    let inner = conn.unguarded();
    inner.batch("SET TRANSACTION READ ONLY").unwrap();
    let id = next_id();
    let _ = conn.transaction(|conn| conn.run(&insert(id)));
    assert_eq!(stage.rows(id), 0);
}

/// 1020, swallowed.
#[test]
fn nothing_is_seen_after_a_changed_row() {
    let stage = Stage::new(Engine::Mariadb);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        client
            .sql()
            .batch("SET innodb_snapshot_isolation = ON")
            .unwrap();
        let lease = stage.claim();
        let (id, row) = (next_id(), next_id());
        let mut other = stage.database.connect();
        other.execute(&insert(row));
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.number(LOOK)?;
            sql.run(&insert(id))?;
            other.execute(&lock(row));
            assert!(sql.run(&lock(row)).is_err(), "the row has not changed");
            assert_over(&stage, sql);
            Ok(())
        });
        assert_no_loss(done, &lease);
        assert_eq!(stage.rows(id), 0, "{entrance}");
    }
}

/// The default since MariaDB 11.6, for the library's own sessions too.
#[test]
fn snapshots_may_be_isolated_on_the_whole_server() {
    let server = OwnServer::take(Engine::Mariadb);
    server.configure(
        "SET GLOBAL innodb_snapshot_isolation = ON",
        "SET GLOBAL innodb_snapshot_isolation = OFF",
    );
    let stage = Stage::with(Database::on(&server), PATIENT);
    leases(&stage.database, &PATIENT).available().unwrap();
    for entrance in Entrance::ALL {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let id = next_id();
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.number(LOOK)?;
            sql.run(&insert(id))?;
            lease.renew().unwrap();
            Ok(())
        });
        done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        let lost = next_id();
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.number(LOOK)?;
            sql.run(&insert(lost))?;
            let _next = stage.hand_over(lease.name());
            Ok(())
        });
        assert_lost(&done, &lease.tenure());
        assert_eq!((stage.rows(id), stage.rows(lost)), (1, 0), "{entrance}");
    }
}
