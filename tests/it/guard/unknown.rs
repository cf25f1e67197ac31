//! A COMMIT that nobody has answered is reported as that.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use diesel::result::{Error as DieselError, QueryResult};
use diesel_lease::{CommitUnknown, Lost};

use super::client::{Client, Entrance, connect};
use super::{Stage, insert, next_id};
use crate::support::proxy::Proxy;
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    servers:
    fn a_commit_whose_reply_is_lost_is_unknown,
    fn a_commit_that_never_arrives_is_unknown,
    fn a_session_that_dies_before_its_commit_has_committed_nothing,
}

#[track_caller]
fn assert_unknown(done: QueryResult<()>) -> DieselError {
    let error = done.expect_err("nobody has said so");
    let unknown = CommitUnknown::from_diesel(&error);
    assert!(
        unknown.is_some_and(|unknown| std::error::Error::source(unknown).is_some()),
        "{error:?}"
    );
    assert!(Lost::find(&error).is_none(), "{error:?}");
    error
}

/// Disturbs the network between the fence and the COMMIT, on a connection that has committed before.
fn disturbed(
    stage: &Stage,
    entrance: Entrance,
    disturb: impl FnOnce(&Proxy) + Send + 'static,
) -> (QueryResult<()>, i64, Box<dyn Client>) {
    let proxy = Arc::new(Proxy::to(stage.database.url()));
    let url = proxy.url(stage.database.url());
    let mut client = connect(stage.database.engine(), &url, entrance);
    let lease = stage.claim();
    client
        .transact(&lease.tenure(), &mut |sql| sql.run(&insert(next_id())))
        .unwrap();
    let at_commit = Arc::clone(&proxy);
    client.before_commit(move || disturb(&at_commit));
    let id = next_id();
    let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
    lease.verify().unwrap();
    (done, id, client)
}

fn a_commit_whose_reply_is_lost_is_unknown(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::WHOLE {
        let is_prepared = matches!(engine, Engine::Mysql | Engine::Mariadb)
            && !matches!(entrance, Entrance::Plain | Entrance::Pooled);
        let (done, id, mut client) = disturbed(&stage, entrance, move |proxy| {
            if is_prepared {
                proxy.cut_next_reply();
            } else {
                proxy.cut_reply_to("COMMIT");
            }
        });
        assert_unknown(done);
        // in fact it was committed
        eventually(LONG, "the row", || stage.rows(id) == 1);
        // and the connection is not used again
        assert!(client.sql().run(&insert(next_id())).is_err(), "{entrance}");
    }
}

/// As far as the client can tell it is the same.
fn a_commit_that_never_arrives_is_unknown(engine: Engine) {
    let stage = Stage::new(engine);
    for entrance in Entrance::WHOLE {
        let (done, id, _) = disturbed(&stage, entrance, |proxy| {
            proxy.refuse();
            proxy.drop_connections();
        });
        assert_unknown(done);
        assert_eq!(stage.rows(id), 0, "{entrance}");
    }
}

fn a_session_that_dies_before_its_commit_has_committed_nothing(engine: Engine) {
    let stage = Stage::new(engine);
    let session = match engine {
        Engine::Postgres => "SELECT pg_backend_pid()::bigint",
        _ => "SELECT CAST(connection_id() AS SIGNED)",
    };
    for entrance in Entrance::ALL {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let session = client.sql().number(session).unwrap();
        let ((ask, asked), (tell, told)) = (channel(), channel());
        client.before_commit(move || {
            ask.send(()).unwrap();
            told.recv().unwrap();
        });
        let id = next_id();
        let stage = &stage;
        let done = thread::scope(|scope| {
            scope.spawn(move || {
                asked.recv().unwrap();
                stage.database.kill(session);
                tell.send(()).unwrap();
            });
            client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)))
        });
        let error = done.expect_err("it was not committed");
        assert!(Lost::find(&error).is_none(), "{entrance}: {error:?}");
        assert_eq!(stage.rows(id), 0, "{entrance}");
        lease.verify().unwrap();
    }
}
