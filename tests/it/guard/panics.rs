//! A panic in the work, caught, and the same connection used again.

use std::panic::{AssertUnwindSafe, catch_unwind};

use diesel::result::QueryResult;

use super::client::{Client, Entrance, Sql};
use super::{Stage, insert, next_id};
use crate::support::{Engine, engines};

/// Those whose transactions the library runs. The `transaction` of a pooled connection is Diesel's,
/// which leaves them open.
const OURS: [Entrance; 4] = [
    Entrance::Plain,
    Entrance::Pooled,
    Entrance::Guarded,
    Entrance::Both,
];

engines! {
    fn a_panic_rolls_back,
    fn a_panic_in_a_nested_transaction_rolls_back_all,
    fn a_panic_on_a_pooled_connection_commits_nothing,
    fn a_nested_panic_that_is_caught_rolls_back_its_part,
}

fn caught(work: impl FnOnce() -> QueryResult<()>) {
    let caught = catch_unwind(AssertUnwindSafe(work));
    let panic = caught.expect_err("it panicked");
    assert_eq!(panic.downcast_ref(), Some(&"out of luck"));
}

/// The next transaction on the same connection is one of its own.
fn assert_usable(stage: &Stage, client: &mut dyn Client, entrance: Entrance, lost: &[i64]) {
    let lease = stage.claim();
    let id = next_id();
    let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
    done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
    assert_eq!(stage.rows(id), 1, "{entrance}: reported as committed");
    for id in lost {
        assert_eq!(stage.rows(*id), 0, "{entrance}: half was committed");
    }
    // and plain statements are transactions of their own again
    let id = next_id();
    client.sql().run(&insert(id)).unwrap();
    assert_eq!(stage.rows(id), 1, "{entrance}");
}

fn a_panic_rolls_back(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in OURS {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let id = next_id();
        caught(|| {
            client.transact(&lease.tenure(), &mut |sql| {
                sql.run(&insert(id))?;
                panic!("out of luck");
            })
        });
        assert_eq!(stage.rows(id), 0, "{entrance}");
        assert_usable(&stage, client.as_mut(), entrance, &[id]);
        lease.verify().unwrap();
    }
}

fn a_panic_in_a_nested_transaction_rolls_back_all(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in OURS {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let (outer, inner) = (next_id(), next_id());
        caught(|| {
            client.transact(&lease.tenure(), &mut |sql| {
                sql.run(&insert(outer))?;
                sql.transact(&mut |sql| {
                    sql.run(&insert(inner))?;
                    panic!("out of luck");
                })
            })
        });
        assert_usable(&stage, client.as_mut(), entrance, &[outer, inner]);
    }
}

/// What follows on it is a part of what is still open, and the pool throws it all away.
fn a_panic_on_a_pooled_connection_commits_nothing(engine: Engine) {
    let stage = Stage::new(engine);
    let mut client = stage.client(Entrance::GuardedPool);
    let lease = stage.claim();
    let (id, next) = (next_id(), next_id());
    caught(|| {
        client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            panic!("out of luck");
        })
    });
    let _ = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(next)));
    assert_eq!(stage.rows(id), 0);
    drop(client);
    assert_eq!((stage.rows(id), stage.rows(next)), (0, 0));
}

fn a_nested_panic_that_is_caught_rolls_back_its_part(engine: Engine) {
    let stage = Stage::new(engine);
    let mut client = stage.client(Entrance::Guarded);
    let lease = stage.claim();
    let (outer, inner) = (next_id(), next_id());
    let done = client.transact(&lease.tenure(), &mut |sql| {
        sql.run(&insert(outer))?;
        caught(|| {
            sql.transact(&mut |sql: &mut dyn Sql| {
                sql.run(&insert(inner))?;
                panic!("out of luck");
            })
        });
        Ok(())
    });
    done.unwrap();
    assert_eq!((stage.rows(outer), stage.rows(inner)), (1, 0));
}
