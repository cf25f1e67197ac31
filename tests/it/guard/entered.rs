//! Which tenures a transaction is fenced for, and what is not a transaction of its own.

use diesel::result::{Error as DieselError, QueryResult};
use diesel_lease::{Lost, current};

use super::client::{Entrance, Sql};
use super::{LOOK, Stage, assert_lost, insert, next_id};
use crate::support::{Engine, engines};

engines! {
    fn without_a_tenure_it_runs_untouched,
    fn the_work_reads_its_term,
    fn one_entered_after_the_begin_is_fenced,
    fn one_left_before_the_commit_is_fenced,
    fn every_entered_one_is_fenced,
    fn a_transaction_of_the_inner_lease_is_fenced_for_the_outer_too,
    fn a_nested_transaction_is_a_savepoint,
    fn a_transaction_of_a_tenure_inside_another_is_refused_where_it_would_be_unfenced,
    fn a_test_transaction_commits_nothing,
    fn a_fence_needs_a_transaction;
    servers:
    fn lost_while_nested_it_never_commits,
}

/// L16, and L23 on connections that know of the guard.
fn without_a_tenure_it_runs_untouched(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::ALL {
        let mut client = stage.client(entrance);
        let id = next_id();
        let sent = client.sent();
        client
            .sql()
            .transact(&mut |sql| sql.run(&insert(id)))
            .unwrap();
        let sent = sent.take();
        assert_eq!(sent.len(), 3, "{entrance}: {sent:?}");
        assert_eq!(stage.rows(id), 1);
    }
}

/// L14.
fn the_work_reads_its_term(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::WHOLE {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let mut read = None;
        let done = client.transact(&lease.tenure(), &mut |_| {
            read = current().map(|tenure| (tenure.name().to_owned(), tenure.term()));
            Ok(())
        });
        done.unwrap();
        assert_eq!(read, Some((lease.name().to_owned(), lease.term())));
        assert!(current().is_none());
    }
}

fn one_entered_after_the_begin_is_fenced(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        for is_lost in [false, true] {
            let lease = stage.claim();
            let tenure = lease.tenure();
            let mut next = None;
            if is_lost && engine == Engine::Sqlite {
                // the transaction will not let it pass
                next = Some(stage.hand_over(lease.name()));
            }
            let id = next_id();
            let done = client.sql().transact(&mut |sql| {
                sql.run(&insert(id))?;
                let _entered = tenure.enter();
                sql.number(LOOK)?;
                if is_lost && next.is_none() {
                    next = Some(stage.hand_over(lease.name()));
                }
                Ok(())
            });
            if is_lost {
                assert_lost(&done, &tenure);
                assert_eq!(stage.rows(id), 0, "{entrance}");
            } else {
                done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
                assert_eq!(stage.rows(id), 1, "{entrance}");
                // or else SQLite's next transaction meets it
                lease.release().unwrap();
            }
        }
    }
}

fn one_left_before_the_commit_is_fenced(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let tenure = lease.tenure();
        let (id, mut next, mut lease) = (next_id(), None, Some(lease));
        let mut entered = Some(tenure.enter());
        let done = client.sql().transact(&mut |sql| {
            sql.run(&insert(id))?;
            drop(entered.take());
            if engine == Engine::Sqlite {
                // nobody else can take it over here
                lease.take().expect("once").release().ok();
            } else {
                next = Some(stage.hand_over(tenure.name()));
            }
            // without a tenure entered the statement is one of that transaction all the same
            sql.number(LOOK).map(drop)
        });
        assert_lost(&done, &tenure);
        assert_eq!(stage.rows(id), 0, "{entrance}");
    }
}

fn every_entered_one_is_fenced(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        for lost in 0..3 {
            let leases = [stage.claim(), stage.claim(), stage.claim()];
            let tenures = leases.each_ref().map(|lease| lease.tenure());
            let mut next = None;
            if engine == Engine::Sqlite {
                next = Some(stage.hand_over(tenures[lost].name()));
            }
            let _entered = tenures.each_ref().map(|tenure| tenure.enter());
            let id = next_id();
            let done = client.sql().transact(&mut |sql| {
                sql.run(&insert(id))?;
                if next.is_none() {
                    next = Some(stage.hand_over(tenures[lost].name()));
                }
                Ok(())
            });
            assert_lost(&done, &tenures[lost]);
            assert_eq!(stage.rows(id), 0, "{entrance}");
            let others = tenures.iter().filter(|tenure| !tenure.is_lost());
            assert_eq!(others.count(), 2, "{entrance}");
        }
    }
}

/// Also on a connection that is not guarded.
fn a_transaction_of_the_inner_lease_is_fenced_for_the_outer_too(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::WHOLE {
        let mut client = stage.client(entrance);
        let (outer, inner) = (stage.claim(), stage.claim());
        let outer = outer.tenure();
        let _entered = outer.enter();
        let id = next_id();
        let _next = stage.hand_over(outer.name());
        let done = client.transact(&inner.tenure(), &mut |sql| sql.run(&insert(id)));
        assert_lost(&done, &outer);
        assert_eq!(stage.rows(id), 0, "{entrance}");
    }
}

fn a_nested_transaction_is_a_savepoint(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::ALL {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let (outer, inner, kept) = (next_id(), next_id(), next_id());
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(outer))?;
            let undone: QueryResult<()> = sql.transact(&mut |sql| {
                sql.run(&insert(inner))?;
                Err(DieselError::RollbackTransaction)
            });
            assert!(undone.is_err());
            sql.transact(&mut |sql| sql.run(&insert(kept)))
        });
        done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        let rows = [outer, inner, kept].map(|id| stage.rows(id));
        assert_eq!(rows, [1, 0, 1], "{entrance}");
    }
}

/// The end of a savepoint checks nothing; the COMMIT does.
fn lost_while_nested_it_never_commits(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::ALL {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let (outer, inner) = (next_id(), next_id());
        let mut next = None;
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(outer))?;
            sql.transact(&mut |sql| {
                sql.run(&insert(inner))?;
                next = Some(stage.hand_over(lease.name()));
                Ok(())
            })?;
            sql.number(LOOK).map(drop)
        });
        assert_lost(&done, &lease.tenure());
        assert_eq!((stage.rows(outer), stage.rows(inner)), (0, 0), "{entrance}");
    }
}

fn a_transaction_of_a_tenure_inside_another_is_refused_where_it_would_be_unfenced(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in [Entrance::Plain, Entrance::Pooled] {
        let lease = stage.claim();
        let mut client = stage.client(entrance);
        let done = client.transact_within(&lease.tenure(), &mut |_| panic!("the work was run"));
        let refused = matches!(done, Err(DieselError::AlreadyInTransaction));
        assert!(refused, "{entrance}: {done:?}");
        lease.release().unwrap();
    }
    // On a guarded connection it is a savepoint, and the COMMIT is fenced.
    for entrance in Entrance::GUARDED {
        let lease = stage.claim();
        let mut client = stage.client(entrance);
        let id = next_id();
        let done = client.transact_within(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
        done.unwrap();
        assert_eq!(stage.rows(id), 1);
        lease.release().unwrap();
    }
}

fn a_test_transaction_commits_nothing(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let lease = stage.claim();
        let tenure = lease.tenure();
        let mut client = stage.client(entrance);
        let (one, two) = (next_id(), next_id());
        {
            let _entered = tenure.enter();
            client.sql().begin_test_transaction().unwrap();
            client.sql().run(&insert(one)).unwrap();
            client
                .sql()
                .transact(&mut |sql| sql.run(&insert(two)))
                .unwrap();
        }
        let count = format!("SELECT COUNT(*) FROM work WHERE id IN ({one}, {two})");
        assert_eq!(client.sql().number(&count), Ok(2));
        drop(client);
        assert_eq!((stage.rows(one), stage.rows(two)), (0, 0), "{entrance}");
        lease.release().unwrap();
    }
}

fn a_fence_needs_a_transaction(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::ALL {
        let lease = stage.claim();
        let mut client = stage.client(entrance);
        let fenced = client.sql().fence(&lease.tenure());
        let refused = matches!(fenced, Err(DieselError::NotInTransaction));
        assert!(refused, "{entrance}: {fenced:?}");
        assert!(!lease.is_lost());
        // and of a lease that is lost it says so
        let next = stage.hand_over(lease.name());
        let done: QueryResult<()> = client
            .sql()
            .transact(&mut |sql: &mut dyn Sql| sql.fence(&lease.tenure()));
        let lost = done.as_ref().err().and_then(Lost::from_diesel);
        assert!(lost.is_some(), "{entrance}: {done:?}");
        next.release().unwrap();
    }
}
