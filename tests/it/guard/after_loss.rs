//! Once a tenure is lost nothing is sent under it any more.

use super::client::Entrance;
use super::{LOOK, Stage, assert_lost, insert, next_id};
use crate::support::{Engine, engines};

engines! {
    fn every_statement_is_refused_before_it_is_sent,
    fn outside_a_transaction_too,
    fn the_connection_goes_on_without_it,
}

fn every_statement_is_refused_before_it_is_sent(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let tenure = lease.tenure();
        let id = next_id();
        let sent = client.sent();
        let mut lease = Some(lease);
        let done = client.transact(&tenure, &mut |sql| {
            sql.run(&insert(id))?;
            sent.take();
            drop(lease.take()); // given back, so lost
            assert_lost(&sql.run(&insert(next_id())), &tenure);
            assert_lost(&sql.batch(&insert(next_id())), &tenure);
            assert_lost(&sql.number(LOOK).map(drop), &tenure);
            let nested = sql.transact(&mut |_| panic!("the nested work was run"));
            assert_lost(&nested, &tenure);
            assert_eq!(sent.take(), [""; 0], "{entrance}");
            Ok(())
        });
        assert_lost(&done, &tenure);
        assert_eq!(sent.take(), ["ROLLBACK"], "{entrance}");
        assert_eq!(stage.rows(id), 0, "{entrance}");
    }
}

fn outside_a_transaction_too(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::GUARDED {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let tenure = lease.tenure();
        let id = next_id();
        let entered = tenure.enter();
        client.sql().run(&insert(id)).unwrap();
        lease.release().unwrap();
        let sent = client.sent();
        assert_lost(&client.sql().run(&insert(next_id())), &tenure);
        assert_lost(&client.sql().number(LOOK).map(drop), &tenure);
        let begun = client.sql().transact(&mut |_| panic!("the work was run"));
        assert_lost(&begun, &tenure);
        assert_eq!(sent.take(), [""; 0], "{entrance}");
        // but for this, so that pools work
        client.ping().unwrap();
        assert_eq!(sent.take().len(), 1, "{entrance}");
        drop(entered);
        assert_eq!(stage.rows(id), 1);
    }
}

fn the_connection_goes_on_without_it(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::WHOLE {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let tenure = lease.tenure();
        let (lost, kept) = (next_id(), next_id());
        let mut lease = Some(lease);
        let done = client.transact(&tenure, &mut |sql| {
            sql.run(&insert(lost))?;
            drop(lease.take());
            Ok(())
        });
        assert_lost(&done, &tenure);
        client.sql().run(&insert(kept)).unwrap();
        let next = stage.claim();
        let done = client.transact(&next.tenure(), &mut |sql| sql.number(LOOK).map(drop));
        done.unwrap();
        assert_eq!((stage.rows(lost), stage.rows(kept)), (0, 1), "{entrance}");
    }
}
