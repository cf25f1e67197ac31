//! MySQL and MariaDB: a session that changes its database.

use super::client::Entrance;
use super::{PATIENT, Stage, assert_lost, assert_no_loss, insert, leases, next_id, on_innodb};
use crate::support::Engine;
use crate::support::database::Database;

on_innodb! {
    fn another_database_is_found_out,
    fn a_database_that_changes_within_is_no_loss,
}

fn another_database_is_found_out(engine: Engine) {
    let stage = Stage::new(engine);
    let other = Database::create(engine);
    for has_table in [false, true] {
        if has_table {
            leases(&other, &PATIENT).migrate().unwrap();
        }
        let [here, there] = [&stage.database, &other].map(|database| database.name());
        for entrance in Entrance::WHOLE {
            let mut client = stage.client(entrance);
            let lease = stage.claim();
            for database in [here, there, there, here, here] {
                client.sql().batch(&format!("USE {database}")).unwrap();
                let (id, lost) = (next_id(), next_id());
                let insert = |id| insert(id).replace("work", &format!("{here}.work"));
                let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
                done.unwrap_or_else(|error| panic!("{entrance} {database}: {error:?}"));
                assert_eq!(stage.rows(id), 1);
                let other = stage.claim();
                let done = client.transact(&other.tenure(), &mut |sql| {
                    sql.run(&insert(lost))?;
                    let _next = stage.hand_over(other.name());
                    Ok(())
                });
                assert_lost(&done, &other.tenure());
                assert_eq!(stage.rows(lost), 0);
            }
        }
    }
}

/// It may fail, as no loss, and the next one knows.
fn a_database_that_changes_within_is_no_loss(engine: Engine) {
    let stage = Stage::new(engine);
    let other = Database::create(engine);
    for has_table in [false, true] {
        if has_table {
            leases(&other, &PATIENT).migrate().unwrap();
        }
        for entrance in Entrance::WHOLE {
            let mut client = stage.client(entrance);
            let lease = stage.claim();
            for database in [&other, &stage.database] {
                let id = next_id();
                let insert = insert(id).replace("work", &format!("{}.work", stage.database.name()));
                let done = client.transact(&lease.tenure(), &mut |sql| {
                    sql.run(&insert)?;
                    sql.batch(&format!("USE {}", database.name()))
                });
                let committed = i64::from(done.is_ok());
                if done.is_err() {
                    assert_no_loss(done, &lease);
                }
                assert_eq!(stage.rows(id), committed, "{entrance}");
            }
            let id = next_id();
            let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
            done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        }
    }
}
