//! What the guard costs, in statements.

use super::client::{Client, Entrance};
use super::{Stage, insert, next_id};
use crate::support::{Engine, engines};

engines! {
    fn a_transaction_costs_two_statements_more,
    fn one_entered_twice_costs_no_more,
    fn a_statement_costs_nothing,
}

/// Those of the third transaction, when everything is known.
fn statements(client: &mut dyn Client, transact: &mut dyn FnMut(&mut dyn Client)) -> Vec<String> {
    let sent = client.sent();
    for _ in 0..2 {
        transact(client);
        sent.take();
    }
    transact(client);
    sent.take()
}

fn a_transaction_costs_two_statements_more(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::WHOLE {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let plain = statements(client.as_mut(), &mut |client| {
            let sql = client.sql();
            sql.transact(&mut |sql| sql.run(&insert(next_id())))
                .unwrap();
        });
        let [begin, insert, commit] = &plain[..] else {
            panic!("{entrance}: {plain:?}");
        };
        assert!(insert.starts_with("INSERT"), "{plain:?}");
        assert_eq!(commit, "COMMIT");
        let tenure = lease.tenure();
        let guarded = statements(client.as_mut(), &mut |client| {
            let id = next_id();
            client
                .transact(&tenure, &mut |sql| sql.run(&super::insert(id)))
                .unwrap();
        });
        let [one, two, three, four, five] = &guarded[..] else {
            panic!("{entrance}: {guarded:?}");
        };
        // With its binds where it is kept prepared.
        assert!(five.starts_with(commit), "{guarded:?}");
        if engine == Engine::Sqlite {
            // The write lock and a look, and nothing at the end.
            assert_eq!(one, begin);
            assert!(two.starts_with("UPDATE diesel_leases"), "{guarded:?}");
            assert!(three.starts_with("SELECT"), "{guarded:?}");
            assert!(four.starts_with("INSERT"), "{guarded:?}");
        } else {
            assert!(one.starts_with("SELECT"), "{guarded:?}");
            assert_eq!(two, begin);
            assert!(three.starts_with("INSERT"), "{guarded:?}");
            assert!(four.contains("SELECT"), "{guarded:?}");
            assert!(four.contains("FOR "), "{guarded:?}");
        }
    }
}

/// As `Tenure::transaction` within `HeldLease::run` does.
fn one_entered_twice_costs_no_more(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::WHOLE {
        let mut client = stage.client(entrance);
        let tenure = stage.claim();
        let tenure = tenure.tenure();
        let _entered = tenure.enter();
        let guarded = statements(client.as_mut(), &mut |client| {
            let id = next_id();
            client
                .transact(&tenure, &mut |sql| sql.run(&insert(id)))
                .unwrap();
        });
        assert_eq!(guarded.len(), 5, "{entrance}: {guarded:?}");
    }
}

fn a_statement_costs_nothing(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let tenure = lease.tenure();
        let _entered = tenure.enter();
        let sent = client.sent();
        client.sql().run(&insert(next_id())).unwrap();
        assert_eq!(sent.take().len(), 1, "{entrance}");
    }
}
