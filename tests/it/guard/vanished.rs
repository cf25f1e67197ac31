//! A host that vanishes between the fence and the COMMIT: for the servers a network on which nothing
//! moves any more, with no connection closed.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use diesel_lease::{CommitUnknown, Leases, Lost};

use super::client::{Entrance, connect};
use super::stopped::TIMINGS;
use super::{Stage, insert, make_table, next_id, rows};
use crate::hold::SLACK;
use crate::support::database::Database;
use crate::support::proxy::Proxy;
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    servers:
    fn it_keeps_the_name_no_longer_than_the_limit,
}

/// One lease duration after the fence. Where the work's own session
/// has the row locked on MySQL and MariaDB there is no limit but the server's `wait_timeout`.
fn it_keeps_the_name_no_longer_than_the_limit(engine: Engine) {
    if engine == Engine::Postgres {
        vanish(engine, false);
    }
    vanish(engine, true);
}

fn vanish(engine: Engine, is_work_elsewhere: bool) {
    let stage = Stage::with_timings(engine, TIMINGS);
    let elsewhere = is_work_elsewhere.then(|| Database::create(engine));
    if let Some(work) = &elsewhere {
        make_table(work);
    }
    let work = elsewhere.as_ref().unwrap_or(&stage.database);

    let network = Arc::new(Proxy::to(stage.database.url()));
    let leases = Leases::builder().timings(TIMINGS);
    let leases = leases.build(&network.url(stage.database.url())).unwrap();
    let mut client = connect(engine, &network.url(work.url()), Entrance::Plain);
    let name = unique("vanished");
    // From the fence on its lock alone keeps the name: the lease is ended by hand, in InnoDB before it.
    let passes = engine == Engine::Postgres;
    let mut raw = stage.database.connect();
    let lease = leases.claim(&name).unwrap();
    let (vanishes, vanished) = channel();
    let (at_commit, ended) = (Arc::clone(&network), name.clone());
    client.before_commit(move || {
        at_commit.freeze();
        if passes {
            raw.expire(&ended);
        }
        vanishes.send(()).unwrap();
    });
    let (id, next) = (next_id(), next_id());
    thread::scope(|scope| {
        let (tenure, name, database) = (lease.tenure(), &name, &stage.database);
        let host = scope.spawn(move || {
            client.transact(&tenure, &mut |sql| {
                if !passes {
                    database.connect().expire(name);
                }
                sql.run(&insert(id))
            })
        });
        vanished.recv_timeout(LONG).unwrap();

        let start = Instant::now();
        let mut next_lease = None;
        eventually(LONG, "the successor's claim", || {
            next_lease = stage.rival.try_claim(name).ok().flatten();
            next_lease.is_some()
        });
        let (took, next_lease) = (start.elapsed(), next_lease.unwrap());
        let mut successor = connect(engine, work.url(), Entrance::Plain);
        let done = successor.transact(&next_lease.tenure(), &mut |sql| sql.run(&insert(next)));

        network.refuse();
        network.drop_connections();
        let error = host.join().unwrap().expect_err("it was cut off");
        let is_told = CommitUnknown::from_diesel(&error).is_some() || Lost::find(&error).is_some();
        assert!(is_told, "{error:?}");
        done.unwrap();
        // The last try may have begun just before.
        assert!(took < TIMINGS.lease + TIMINGS.attempt + SLACK, "{took:?}");
        assert!(took > TIMINGS.lease / 2, "{took:?}");
    });
    let mut raw = work.connect();
    assert_eq!((rows(&mut raw, id), rows(&mut raw, next)), (0, 1));
}
