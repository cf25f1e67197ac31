//! A transaction that cannot write has nothing to fence.

use diesel::result::{DatabaseErrorKind, Error as DieselError};

use super::cell::{Cell, each};
use super::client::{Entrance, Work};
use super::{LOOK, Stage, assert_lost, assert_no_loss, insert};
use crate::support::{Engine, engines};

engines! {
    servers:
    fn read_only_by_default_it_commits,
    fn made_read_only_within_it_is_rolled_back_and_says_so,
    fn what_a_read_only_transaction_may_write_is_kept,
    fn a_known_loss_is_refused_all_the_same,
}

fn read_only_by_default(engine: Engine) -> &'static str {
    match engine {
        Engine::Postgres => "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        _ => "SET SESSION TRANSACTION READ ONLY",
    }
}

fn read(cell: &mut Cell<'_>, work: &mut Work<'_>) {
    let lease = cell.stage.claim();
    let done = cell.client.transact(&lease.tenure(), work);
    done.unwrap_or_else(|error| panic!("{cell}: {error:?}"));
    lease.renew().unwrap();
    lease.release().unwrap();
}

fn read_only_by_default_it_commits(engine: Engine) {
    each(engine, &Entrance::ALL, |mut cell| {
        let set = read_only_by_default(cell.engine);
        cell.client.sql().batch(set).unwrap();
        for _ in 0..2 {
            read(&mut cell, &mut |sql| sql.number(LOOK).map(drop));
        }
        // and it was that
        let done = cell.client.sql().run(&insert(cell.id));
        assert!(done.is_err(), "it can write");
    });
}

/// PostgreSQL can change its mind in the transaction, MySQL and MariaDB only before it. What was written
/// before that is never said to be committed when it is not.
fn made_read_only_within_it_is_rolled_back_and_says_so(engine: Engine) {
    if engine != Engine::Postgres {
        return;
    }
    each(engine, &Entrance::WHOLE, |mut cell| {
        let lease = cell.stage.claim();
        let id = cell.id;
        let done = cell.client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            sql.run("SET TRANSACTION READ ONLY")
        });
        let kind = match assert_no_loss(done, &lease) {
            DieselError::DatabaseError(kind, _) => kind,
            error => panic!("{cell}: {error:?}"),
        };
        assert!(
            matches!(kind, DatabaseErrorKind::ReadOnlyTransaction),
            "{cell}"
        );
        assert_eq!(cell.stage.rows(id), 0, "{cell}");
        read(&mut cell, &mut |sql| sql.run(&insert(id)));
        assert_eq!(cell.stage.rows(id), 1, "{cell}");
    });
}

/// Temporary tables.
fn what_a_read_only_transaction_may_write_is_kept(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::ALL {
        let mut client = stage.client(entrance);
        let sql = client.sql();
        sql.batch("CREATE TEMPORARY TABLE scratch (id BIGINT)")
            .unwrap();
        sql.batch(read_only_by_default(engine)).unwrap();
        let lease = stage.claim();
        for count in 1..3 {
            let done = client.transact(&lease.tenure(), &mut |sql| {
                sql.run("INSERT INTO scratch (id) VALUES (1)")
            });
            done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
            let kept = client.sql().number("SELECT COUNT(*) FROM scratch");
            assert_eq!(kept, Ok(count), "{entrance}");
        }
    }
}

fn a_known_loss_is_refused_all_the_same(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::ALL {
        let mut client = stage.client(entrance);
        client.sql().batch(read_only_by_default(engine)).unwrap();
        let lease = stage.claim();
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.number(LOOK)?;
            let next = stage.hand_over(lease.name());
            assert!(lease.verify().is_err(), "still held");
            next.release().unwrap();
            Ok(())
        });
        assert_lost(&done, &lease.tenure());
    }
}
