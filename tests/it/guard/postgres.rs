//! PostgreSQL: its transaction builder, search paths, and constraints that wait for the COMMIT.

use std::time::Duration;

use diesel::connection::InstrumentationEvent;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel_lease::{Error, GuardedConnection, Tenure, Timings, Unsupported};

use super::client::{Entrance, Sql, Work, connect};
use super::{LOOK, Stage, assert_lost, assert_no_loss, insert, next_id};
use crate::support::{Engine, LONG};

fn guarded(stage: &Stage) -> GuardedConnection<PgConnection> {
    GuardedConnection::new(plain(stage))
}

fn plain(stage: &Stage) -> PgConnection {
    PgConnection::establish(stage.database.url()).unwrap()
}

/// One transaction of a connection's builder at a level, as the guarded connection's is.
macro_rules! at_level {
    ($conn:expr, $level:expr, $work:expr) => {
        match $level {
            "read committed" => $conn.build_transaction().read_committed().run($work),
            "repeatable read" => $conn.build_transaction().repeatable_read().run($work),
            _ => $conn.build_transaction().serializable().run($work),
        }
    };
}

const LEVELS: [&str; 3] = ["read committed", "repeatable read", "serializable"];
const LEVEL: &str = "SELECT COUNT(*) FROM pg_settings \
                     WHERE name = 'transaction_isolation' AND setting = ";

/// What must hold at every level.
fn assert_fenced(
    stage: &Stage,
    level: &str,
    transact: &mut dyn FnMut(&Tenure, &mut Work<'_>) -> QueryResult<()>,
) {
    let lease = stage.claim();
    let (id, lost) = (next_id(), next_id());
    let done = transact(&lease.tenure(), &mut |sql| {
        assert_eq!(sql.number(&format!("{LEVEL}'{level}'")), Ok(1));
        sql.number(LOOK)?;
        sql.run(&insert(id))?;
        lease.renew().unwrap();
        Ok(())
    });
    done.unwrap_or_else(|error| panic!("{level}: {error:?}"));
    let done = transact(&lease.tenure(), &mut |sql| {
        sql.number(LOOK)?;
        sql.run(&insert(lost))?;
        let _next = stage.hand_over(lease.name());
        Ok(())
    });
    assert_lost(&done, &lease.tenure());
    assert_eq!((stage.rows(id), stage.rows(lost)), (1, 0), "{level}");
}

#[test]
fn a_guarded_transaction_of_the_builder_is_fenced() {
    let stage = Stage::new(Engine::Postgres);
    let mut conn = guarded(&stage);
    for level in LEVELS {
        assert_fenced(&stage, level, &mut |tenure, work| {
            let _entered = tenure.enter();
            at_level!(conn, level, |conn| work(conn))
        });
    }
}

#[test]
fn a_transaction_of_diesels_builder_is_fenced_by_hand() {
    let stage = Stage::new(Engine::Postgres);
    let mut conn = plain(&stage);
    for level in LEVELS {
        assert_fenced(&stage, level, &mut |tenure, work| {
            at_level!(conn, level, |conn: &mut PgConnection| {
                work(conn)?;
                tenure.fence(conn)
            })
        });
    }
}

#[test]
fn lost_before_the_begin_the_builder_runs_no_work() {
    let stage = Stage::new(Engine::Postgres);
    let mut conn = guarded(&stage);
    let lease = stage.claim();
    let _next = stage.hand_over(lease.name());
    let tenure = lease.tenure();
    let _entered = tenure.enter();
    let done: QueryResult<()> = conn
        .build_transaction()
        .serializable()
        .run(|_| panic!("the work was run"));
    assert_lost(&done, &tenure);
}

#[test]
fn the_builder_begins_nothing_inside_another_transaction() {
    let stage = Stage::new(Engine::Postgres);
    let mut conn = guarded(&stage);
    let done: QueryResult<()> =
        conn.transaction(|conn| conn.build_transaction().run(|_| panic!("the work was run")));
    assert!(matches!(done, Err(DieselError::AlreadyInTransaction)));
}

/// A transaction of the builder that only reads, or is deferrable.
#[test]
fn the_builder_passes_on_all_its_properties() {
    let stage = Stage::new(Engine::Postgres);
    let mut conn = guarded(&stage);
    let lease = stage.claim();
    let tenure = lease.tenure();
    let _entered = tenure.enter();
    let setting = |name: &str| {
        format!("SELECT COUNT(*) FROM pg_settings WHERE name = '{name}' AND setting = 'on'")
    };
    conn.run("CREATE TEMPORARY TABLE scratch (id BIGINT)")
        .unwrap();
    let done: QueryResult<()> = conn
        .build_transaction()
        .serializable()
        .read_only()
        .deferrable()
        .run(|conn| {
            assert_eq!(conn.number(&setting("transaction_read_only")), Ok(1));
            assert_eq!(conn.number(&setting("transaction_deferrable")), Ok(1));
            conn.run("INSERT INTO scratch (id) VALUES (1)")
        });
    done.unwrap();
    assert_eq!(conn.number("SELECT COUNT(*) FROM scratch"), Ok(1));
    conn.run("SET default_transaction_read_only = on").unwrap();
    let id = next_id();
    let done: QueryResult<()> = conn
        .build_transaction()
        .read_write()
        .not_deferrable()
        .run(|conn| conn.run(&insert(id)));
    done.unwrap();
    assert_eq!(stage.rows(id), 1);
}

#[test]
fn another_search_path_is_found_out() {
    let stage = Stage::new(Engine::Postgres);
    stage.database.connect().batch("CREATE SCHEMA other");
    for entrance in Entrance::WHOLE {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        for path in ["public", "other", "other", "public", "public"] {
            client
                .sql()
                .run(&format!("SET search_path = {path}"))
                .unwrap();
            let (id, lost) = (next_id(), next_id());
            let insert = |id| insert(id).replace("work", "public.work");
            let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
            done.unwrap_or_else(|error| panic!("{entrance} {path}: {error:?}"));
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

/// It fails once, as no loss, and the next one knows.
#[test]
fn a_search_path_that_changes_within_is_no_loss() {
    let stage = Stage::new(Engine::Postgres);
    stage.database.connect().batch("CREATE SCHEMA other");
    for entrance in Entrance::WHOLE {
        let mut client = stage.client(entrance);
        let lease = stage.claim();
        let id = next_id();
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            sql.run("SET search_path = other")
        });
        match done {
            Ok(()) => assert_eq!(stage.rows(id), 1),
            failed => {
                assert_no_loss(failed, &lease);
                assert_eq!(stage.rows(id), 0);
            }
        }
        let id = next_id();
        let insert = insert(id).replace("work", "public.work");
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert)?;
            sql.run("SET search_path = public")
        });
        done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        assert_eq!(stage.rows(id), 1);
    }
}

#[test]
fn a_constraint_that_waits_for_the_commit_is_reported_as_that() {
    let stage = Stage::new(Engine::Postgres);
    stage.database.connect().batch(
        "ALTER TABLE calm ADD CONSTRAINT once UNIQUE (amount) DEFERRABLE INITIALLY DEFERRED;
         CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN RAISE EXCEPTION 'no'; END $$;
         CREATE CONSTRAINT TRIGGER no AFTER INSERT ON calm DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW WHEN (NEW.amount = 1) EXECUTE FUNCTION no();",
    );
    for entrance in Entrance::ALL {
        let mut client = stage.client(entrance);
        for (amount, unique) in [(0, true), (1, false)] {
            let lease = stage.claim();
            let (id, one, two) = (next_id(), next_id(), next_id());
            let done = client.transact(&lease.tenure(), &mut |sql| {
                sql.run(&insert(id))?;
                let calm = |id| format!("INSERT INTO calm (id, amount) VALUES ({id}, {amount})");
                sql.run(&calm(one))?;
                if unique {
                    sql.run(&calm(two))?;
                }
                Ok(())
            });
            let error = assert_no_loss(done, &lease);
            let is_as_it_was = match error {
                DieselError::DatabaseError(DatabaseErrorKind::UniqueViolation, _) => unique,
                DieselError::DatabaseError(DatabaseErrorKind::Unknown, _) => !unique,
                _ => false,
            };
            assert!(is_as_it_was, "{entrance}: {error:?}");
            assert_eq!(stage.rows(id), 0, "{entrance}");
        }
    }
}

/// Also where no statement of the guard's runs on that connection any more.
#[test]
fn an_error_it_swallowed_is_never_reported_as_committed() {
    let stage = Stage::new(Engine::Postgres);
    let elsewhere = Stage::new(Engine::Postgres);
    for entrance in Entrance::WHOLE {
        let mut client = stage.client(entrance);
        let lease = elsewhere.claim();
        let id = next_id();
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            assert!(sql.run(&insert(id)).is_err(), "it is there twice");
            Ok(())
        });
        assert_eq!(stage.rows(id), 0, "{entrance}");
        assert_no_loss(done, &lease);
    }
}

#[test]
fn the_missing_index_is_noticed() {
    let stage = Stage::new(Engine::Postgres);
    stage.leases.available().unwrap();
    let mut raw = stage.database.connect();
    let index = raw.one_text(
        "SELECT conname::text FROM pg_constraint \
         WHERE conrelid = 'diesel_leases'::regclass AND contype = 'u'",
    );
    raw.batch(&format!(
        "ALTER TABLE diesel_leases DROP CONSTRAINT {index}"
    ));
    let refused = |what: &str| {
        let error = stage.leases.available().expect_err(what);
        let is_that = matches!(error, Error::Unsupported(Unsupported::FenceIndex));
        assert!(is_that, "{what}: {error:?}");
    };
    refused("none");
    let pool = super::pool::try_build(Engine::Postgres, stage.database.url(), false);
    assert!(pool.is_err(), "the pool was built");
    raw.batch("CREATE UNIQUE INDEX fenced ON diesel_leases (name, holder) WHERE term > 0");
    refused("a partial one");
    raw.batch("DROP INDEX fenced; CREATE INDEX fenced ON diesel_leases (name, holder)");
    refused("one that is not unique");
    raw.batch(
        "DROP INDEX fenced; CREATE UNIQUE INDEX fenced ON diesel_leases (name, lower(holder))",
    );
    refused("one over an expression");
    raw.batch("DROP INDEX fenced; CREATE UNIQUE INDEX fenced ON diesel_leases (name, holder)");
    stage.leases.available().unwrap();
    super::pool::try_build(Engine::Postgres, stage.database.url(), false).unwrap();
}

/// The session is ended while it stands between the fence and the COMMIT.
#[test]
fn the_row_is_free_again_when_a_fenced_transaction_stands_still() {
    let millis = Duration::from_millis;
    let timings = Timings {
        lease: millis(1600),
        renew: millis(200),
        attempt: millis(1300),
        deadline: millis(1400),
        grace: millis(200),
    };
    let stage = Stage::with_timings(Engine::Postgres, timings);
    for entrance in [Entrance::Plain, Entrance::ByHand, Entrance::Guarded] {
        let mut client = connect(Engine::Postgres, stage.database.url(), entrance);
        let lease = stage.claim();
        let id = next_id();
        let (rival, name) = (stage.rival.clone(), lease.name().to_owned());
        let mut rival = Some(rival);
        client.instrument(Box::new(move |event| {
            if let InstrumentationEvent::CommitTransaction { .. } = event
                && let Some(rival) = rival.take()
            {
                let next = rival.claim_timeout(&name, LONG);
                assert_eq!(next.unwrap().expect("the name").term(), 2);
            }
        }));
        let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
        assert!(
            done.is_err(),
            "{entrance}: committed after its successor's claim"
        );
        assert_eq!(stage.rows(id), 0, "{entrance}");
    }
}

#[test]
fn rows_come_back_from_writes_and_one_by_one() {
    use diesel::pg::PgRowByRowLoadingMode;

    let stage = Stage::new(Engine::Postgres);
    let mut conn = guarded(&stage);
    let lease = stage.claim();
    let tenure = lease.tenure();
    let _entered = tenure.enter();
    let ids = [next_id(), next_id()];
    let done: QueryResult<()> = conn.transaction(|conn| {
        let rows = ids.map(|id| (work::id.eq(id), work::amount.eq(7)));
        let inserted = diesel::insert_into(work::table).values(rows.to_vec());
        let inserted: Vec<i64> = inserted.returning(work::id).get_results(conn)?;
        assert_eq!(inserted, ids);
        let changed = diesel::update(work::table.find(ids[0])).set(work::amount.eq(8));
        assert_eq!(changed.get_result::<(i64, i64)>(conn)?, (ids[0], 8));
        let taken =
            diesel::insert_into(work::table).values((work::id.eq(ids[1]), work::amount.eq(0)));
        let updated = taken
            .on_conflict(work::id)
            .do_update()
            .set(work::amount.eq(work::amount + 1));
        assert_eq!(updated.returning(work::amount).get_result::<i64>(conn)?, 8);
        let rows = work::table
            .filter(work::id.eq_any(ids))
            .select(work::amount);
        let rows = rows.load_iter::<i64, PgRowByRowLoadingMode>(conn)?;
        assert_eq!(rows.collect::<QueryResult<Vec<_>>>()?, [8, 8]);
        Ok(())
    });
    done.unwrap();
    assert_eq!((stage.rows(ids[0]), stage.rows(ids[1])), (1, 1));
}

diesel::table! {
    work (id) {
        id -> BigInt,
        amount -> BigInt,
    }
}

/// The lock limit leaves it time to see why.
#[test]
fn with_a_short_attempt_a_claim_that_meets_a_fence_says_held() {
    let timings = Timings {
        attempt: Duration::from_millis(600),
        ..super::PATIENT
    };
    let stage = Stage::with_timings(Engine::Postgres, timings);
    let lease = stage.claim();
    let mut fencing = stage.database.connect();
    stage.database.connect().expire(lease.name());
    fencing.batch("BEGIN");
    fencing.one_i64(&format!(
        "SELECT term FROM diesel_leases WHERE name = '{}' FOR KEY SHARE",
        lease.name()
    ));
    for _ in 0..3 {
        assert!(stage.rival.try_claim(lease.name()).unwrap().is_none());
    }
    fencing.batch("COMMIT");
    assert!(stage.rival.try_claim(lease.name()).unwrap().is_some());
}
