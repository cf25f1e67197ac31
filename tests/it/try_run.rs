//! `try_run`: the work runs if the name is free, under a lease that spans it.

use std::error::Error as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel_lease::{
    Builder, Ending, Error, Leases, LossCause, RunError, StopToken, Timings, current,
};
use log::Level;
use parking_lot::Mutex;

use crate::support::concrete::{connect, on_engine};
use crate::support::database::Database;
use crate::support::log::Captured;
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn free_name_is_held_while_the_work_runs,
    fn held_name_is_refused_with_who_and_for_how_long,
    fn free_again_it_runs_with_the_next_term,
    fn within_the_work_the_name_is_held,
    fn another_name_can_be_run_within_the_work,
    fn what_the_work_returns_is_handed_on_as_it_is,
    fn panic_goes_on_after_the_name_is_given_back,
    fn a_loss_is_told_with_the_output_of_work_that_succeeded,
    fn a_loss_that_only_the_release_finds_is_told_too,
    fn lease_that_ran_out_unclaimed_is_no_loss,
    fn work_that_ignores_the_loss_is_reported,
    fn told_to_stop_the_work_keeps_the_name_until_it_returns,
    fn nothing_runs_after_a_stop,
    fn nothing_runs_under_a_name_that_is_not_valid,
    fn nothing_runs_without_a_table,
    fn failed_release_does_not_hide_the_output,
    fn updates_of_two_workers_are_not_lost,
    fn within_a_transaction_of_a_tenure_it_is_refused,
}

const NAME: &str = "rebuild";

/// Nothing is lost by accident, and what is lost is noticed soon.
const TIMINGS: Timings = Timings {
    lease: Duration::from_secs(15),
    renew: Duration::from_millis(100),
    attempt: Duration::from_secs(5),
    deadline: Duration::from_secs(10),
    grace: Duration::from_millis(300),
};

fn builder(instance: &str) -> Builder {
    Leases::builder()
        .timings(TIMINGS)
        .instance(instance)
        .on_work_will_not_stop(|_| {})
}

/// A migrated database and leases in it.
fn set_up(engine: Engine) -> (Database, Leases) {
    let database = Database::create(engine);
    let leases = builder("here").build(database.url()).unwrap();
    leases.migrate().unwrap();
    (database, leases)
}

fn is_free(leases: &Leases, name: &str) -> bool {
    let record = leases.inspect(name).unwrap();
    record.is_none_or(|record| record.expires_in().is_none())
}

fn free_name_is_held_while_the_work_runs(engine: Engine) {
    let (_database, leases) = set_up(engine);
    let other = leases.clone();
    let ran = leases.try_run(NAME, |tenure| {
        assert_eq!((tenure.name(), tenure.term()), (NAME, 1));
        assert_eq!(current().map(|tenure| tenure.term()), Some(1));
        let record = other.inspect(NAME).unwrap().unwrap();
        assert_eq!((record.instance(), record.term()), ("here", 1));
        assert!(record.expires_in().is_some());
        tenure.verify().unwrap();
        "done"
    });
    assert_eq!(ran.unwrap(), "done");
    assert!(is_free(&leases, NAME));
    assert!(current().is_none());
}

fn held_name_is_refused_with_who_and_for_how_long(engine: Engine) {
    let (database, leases) = set_up(engine);
    let there = builder("there").build(database.url()).unwrap();
    let _lease = there.try_claim(NAME).unwrap().unwrap();
    let start = Instant::now();
    let refused = leases
        .try_run(NAME, |_| panic!("it ran"))
        .expect_err("it is held");
    assert!(start.elapsed() < TIMINGS.attempt, "{:?}", start.elapsed());
    assert!(refused.to_string().contains("there"), "{refused}");
    let RunError::Held(record) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(
        (record.name(), record.instance(), record.term()),
        (NAME, "there", 1)
    );
    let left = record.expires_in().expect("it is held");
    assert!(TIMINGS.deadline < left && left <= TIMINGS.lease, "{left:?}");
}

fn free_again_it_runs_with_the_next_term(engine: Engine) {
    let (_database, leases) = set_up(engine);
    let (entered, is_in) = mpsc::channel();
    let (leave, may_leave) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            leases.try_run(NAME, move |tenure| {
                entered.send(()).unwrap();
                may_leave.recv().unwrap();
                tenure.term()
            })
        });
        is_in.recv().unwrap();
        let second = leases.try_run(NAME, |tenure| tenure.term());
        assert!(matches!(second, Err(RunError::Held(_))), "{second:?}");
        leave.send(()).unwrap();
        assert_eq!(first.join().unwrap().unwrap(), 1);
    });
    assert_eq!(leases.try_run(NAME, |tenure| tenure.term()).unwrap(), 2);
}

fn within_the_work_the_name_is_held(engine: Engine) {
    let (_database, leases) = set_up(engine);
    let inner = leases.try_run(NAME, |_| leases.try_run(NAME, |_| panic!("it ran")));
    match inner.unwrap() {
        Err(RunError::Held(record)) => {
            assert_eq!((record.instance(), record.term()), ("here", 1));
        }
        other => panic!("{other:?}"),
    }
}

fn another_name_can_be_run_within_the_work(engine: Engine) {
    let (_database, leases) = set_up(engine);
    let inner = leases.try_run(NAME, |_| {
        let name = leases.try_run("other", |tenure| {
            assert_eq!(current().unwrap().name(), "other");
            tenure.name().to_owned()
        });
        assert_eq!(current().unwrap().name(), NAME);
        name
    });
    assert_eq!(inner.unwrap().unwrap(), "other");
}

fn what_the_work_returns_is_handed_on_as_it_is(engine: Engine) {
    let (_database, leases) = set_up(engine);
    let ran = leases.try_run(NAME, |_| Err::<(), _>("the work's own error"));
    assert_eq!(ran.unwrap(), Err("the work's own error"));
    assert!(is_free(&leases, NAME));
}

fn panic_goes_on_after_the_name_is_given_back(engine: Engine) {
    let (database, leases) = set_up(engine);
    let held = Mutex::new(None);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        leases.try_run(NAME, |tenure| {
            *held.lock() = Some(tenure.clone());
            lock_for_a_while(&database);
            panic!("out of cheese")
        })
    }));
    // A lease that was dropped on the way would be given back later than this.
    let row = database.connect().row(NAME).unwrap();
    let payload = panicked.map(|_| ()).unwrap_err();
    assert_eq!(payload.downcast_ref(), Some(&"out of cheese"));
    assert_eq!((row.expires_at_ms, row.term), (0, 1));
    assert!(held.lock().as_ref().unwrap().is_lost());
    assert!(current().is_none());
    assert_eq!(leases.try_run(NAME, |tenure| tenure.term()).unwrap(), 2);
}

/// Keeps the row from being written to for a moment from now on.
fn lock_for_a_while(database: &Database) {
    let mut session = database.connect();
    session.batch("BEGIN");
    session.execute("UPDATE diesel_leases SET slot_ms = slot_ms");
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        session.batch("ROLLBACK");
    });
}

fn a_loss_is_told_with_the_output_of_work_that_succeeded(engine: Engine) {
    let (database, leases) = set_up(engine);
    let mut taken = None;
    let ran = leases.try_run(NAME, |tenure| {
        taken = Some(database.admin().take_over(NAME));
        tenure.ended().recv_timeout(LONG).unwrap_err();
        assert_eq!(
            tenure.ending(),
            Some(Ending::Lost(LossCause::TakenOrReleased))
        );
        "all of it"
    });
    let error = ran.expect_err("it was lost");
    assert!(error.source().unwrap().is::<diesel_lease::Lost>());
    match error {
        RunError::Lost { lost, output } => {
            assert_eq!((lost.name(), lost.term()), (NAME, 1));
            assert_eq!(lost.cause(), LossCause::TakenOrReleased);
            assert_eq!(output, "all of it");
        }
        other => panic!("{other:?}"),
    }
    // The successor's row is as it was.
    assert_eq!(database.connect().row(NAME), taken);
}

fn a_loss_that_only_the_release_finds_is_told_too(engine: Engine) {
    let database = Database::create(engine);
    let leases = builder("here")
        .timings(Timings {
            renew: TIMINGS.deadline / 2,
            ..TIMINGS
        })
        .build(database.url())
        .unwrap();
    leases.migrate().unwrap();
    let mut taken = None;
    let ran = leases.try_run(NAME, |tenure| {
        taken = Some(database.admin().take_over(NAME));
        assert!(!tenure.is_lost());
        7
    });
    match ran {
        Err(RunError::Lost { lost, output: 7 }) => {
            assert_eq!(lost.cause(), LossCause::TakenOrReleased);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(database.connect().row(NAME), taken);
}

fn lease_that_ran_out_unclaimed_is_no_loss(engine: Engine) {
    let database = Database::create(engine);
    let leases = builder("here")
        .timings(Timings {
            renew: TIMINGS.deadline / 2,
            ..TIMINGS
        })
        .build(database.url())
        .unwrap();
    leases.migrate().unwrap();
    let ran = leases.try_run(NAME, |_| database.admin().expire(NAME));
    assert!(ran.is_ok(), "{ran:?}");
    assert!(is_free(&leases, NAME));
}

fn work_that_ignores_the_loss_is_reported(engine: Engine) {
    let database = Database::create(engine);
    let name = unique("try-run-ignores");
    let log = Captured::new(&name);
    let (told, overrun) = mpsc::channel();
    let leases = builder("here")
        .on_work_will_not_stop(move |lost| told.send(lost.clone()).unwrap())
        .build(database.url())
        .unwrap();
    leases.migrate().unwrap();
    let ran = leases.try_run(&name, |_| {
        database.admin().take_over(&name);
        overrun.recv_timeout(LONG).expect("it is reported")
    });
    match ran {
        Err(RunError::Lost { lost, output }) => {
            assert_eq!(lost, output);
            assert_eq!((lost.name(), lost.term()), (&*name, 1));
        }
        other => panic!("{other:?}"),
    }
    assert!(log.has(Level::Error, "work under a lost lease will not stop"));
    assert!(overrun.try_recv().is_err(), "it was reported twice");
}

fn told_to_stop_the_work_keeps_the_name_until_it_returns(engine: Engine) {
    let (database, leases) = set_up(engine);
    let stop = StopToken::new();
    let expiry = |mut session: crate::support::raw::Raw| session.row(NAME).unwrap().expires_at_ms;
    let ran = leases.with_stop(&stop).try_run(NAME, |tenure| {
        stop.stop();
        tenure.ended().recv_timeout(LONG).unwrap_err();
        assert_eq!(tenure.ending(), Some(Ending::Stopped));
        let before = expiry(database.connect());
        eventually(LONG, "renewals go on", || {
            expiry(database.connect()) > before
        });
        "cleaned up"
    });
    assert_eq!(ran.unwrap(), "cleaned up");
    assert!(is_free(&leases, NAME));
}

fn nothing_runs_after_a_stop(engine: Engine) {
    let (_database, leases) = set_up(engine);
    let stop = StopToken::new();
    stop.stop();
    let ran = leases.with_stop(&stop).try_run(NAME, |_| panic!("it ran"));
    assert!(
        matches!(ran, Err(RunError::Failed(Error::Stopped))),
        "{ran:?}"
    );
    assert!(leases.inspect(NAME).unwrap().is_none());
}

fn nothing_runs_under_a_name_that_is_not_valid(engine: Engine) {
    let (_database, leases) = set_up(engine);
    for name in ["", " padded", "a\nb", &"n".repeat(192)] {
        let ran = leases.try_run(name, |_| panic!("it ran"));
        assert!(
            matches!(ran, Err(RunError::Failed(Error::InvalidName(_)))),
            "{name:?}: {ran:?}"
        );
    }
    assert!(leases.list().unwrap().is_empty());
}

fn nothing_runs_without_a_table(engine: Engine) {
    let database = Database::create(engine);
    let leases = builder("here").build(database.url()).unwrap();
    let ran = leases.try_run(NAME, |_| panic!("it ran"));
    assert!(
        matches!(ran, Err(RunError::Failed(Error::SchemaMissing))),
        "{ran:?}"
    );
}

fn failed_release_does_not_hide_the_output(engine: Engine) {
    let (database, leases) = set_up(engine);
    let name = unique("try-run-unreleased");
    let log = Captured::new(&name);
    let ran = leases.try_run(&name, |_| {
        database
            .connect()
            .batch("ALTER TABLE diesel_leases RENAME TO elsewhere");
        "done"
    });
    assert_eq!(ran.unwrap(), "done");
    assert!(log.has(Level::Warn, "could not release the lease"));
}

fn updates_of_two_workers_are_not_lost(engine: Engine) {
    let (database, leases) = set_up(engine);
    database
        .connect()
        .batch("CREATE TABLE account (total BIGINT NOT NULL)");
    database.connect().batch("INSERT INTO account VALUES (0)");
    let work = || {
        on_engine!(engine, C => {
            let mut connection = connect::<C>(engine, database.url());
            let add = |connection: &mut C| {
                use diesel::dsl::sql;
                use diesel::sql_types::BigInt;
                let total: i64 = sql::<BigInt>("SELECT total FROM account").get_result(connection)?;
                thread::sleep(Duration::from_millis(50));
                diesel::sql_query(format!("UPDATE account SET total = {}", total + 1))
                    .execute(connection)
            };
            let start = Instant::now();
            loop {
                match leases.try_run(NAME, |tenure| tenure.transaction(&mut connection, add)) {
                    Ok(added) => break assert_eq!(added, Ok(1)),
                    Err(RunError::Held(_)) => {
                        assert!(start.elapsed() < LONG, "held for ever");
                        thread::sleep(Duration::from_millis(5));
                    }
                    Err(other) => panic!("{other:?}"),
                }
            }
        });
    };
    thread::scope(|scope| {
        scope.spawn(work);
        scope.spawn(work);
    });
    assert_eq!(database.connect().one_i64("SELECT total FROM account"), 2);
}

fn within_a_transaction_of_a_tenure_it_is_refused(engine: Engine) {
    let (database, leases) = set_up(engine);
    let lease = leases.try_claim("outer").unwrap().unwrap();
    on_engine!(engine, C => {
        let mut connection = connect::<C>(engine, database.url());
        lease.tenure().transaction(&mut connection, |_| {
            assert_refused(&leases);
            QueryResult::Ok(())
        })
        .unwrap();
        // Rolled back it has ended as well.
        let rolled_back: QueryResult<()> = lease.tenure().transaction(&mut connection, |_| {
            assert_refused(&leases);
            Err(diesel::result::Error::RollbackTransaction)
        });
        assert!(rolled_back.is_err());
    });
    assert_eq!(leases.try_run(NAME, |tenure| tenure.term()).unwrap(), 1);
}

#[track_caller]
fn assert_refused(leases: &Leases) {
    let ran = leases.try_run(NAME, |_| panic!("it ran"));
    assert!(
        matches!(ran, Err(RunError::Failed(Error::InTransaction))),
        "{ran:?}"
    );
}

#[cfg(feature = "guarded-connection")]
mod guarded {
    use std::any::Any;
    use std::cell::RefCell;
    use std::sync::mpsc::channel;

    use diesel::connection::TransactionManager;
    use diesel_lease::GuardedConnection;

    use super::*;
    use crate::support::concrete::{Statements, Watched};

    engines! {
        fn in_a_guarded_transaction_it_is_refused_before_anything_is_sent,
        fn after_the_transaction_it_runs,
        fn transaction_that_ended_on_another_thread_is_over,
        fn connection_that_is_dropped_takes_its_transaction_along,
        fn transaction_that_could_not_begin_is_none,
        fn thread_that_ends_may_still_begin_one,
    }

    fn in_a_guarded_transaction_it_is_refused_before_anything_is_sent(engine: Engine) {
        let (database, leases) = set_up(engine);
        let elsewhere = Database::create(engine);
        let statements = Statements::default();
        on_engine!(engine, C => {
            let watched = builder("here")
                .build_with(Watched::<C>::new(&database, &statements))
                .unwrap();
            watched.inspect(NAME).unwrap();
            statements.take();
            for database in [&database, &elsewhere] {
                let mut connection =
                    GuardedConnection::new(connect::<C>(engine, database.url()));
                // Without a tenure, and in a savepoint.
                connection.transaction(|connection| {
                    assert_refused(&watched);
                    connection.transaction(|_| {
                        assert_refused(&watched);
                        QueryResult::Ok(())
                    })
                })
                .unwrap();
                // With one.
                let held = leases.claim("outer").unwrap().hold().unwrap();
                held.run(|_| connection.transaction(|_| {
                    assert_refused(&watched);
                    QueryResult::Ok(())
                }))
                .unwrap();
                held.release().unwrap();
            }
            assert_eq!(statements.take(), [""; 0]);
            assert_eq!(watched.try_run(NAME, |tenure| tenure.term()).unwrap(), 1);
        });
    }

    /// In the destructor of a value of the thread's, when other such values are gone.
    fn thread_that_ends_may_still_begin_one(engine: Engine) {
        thread_local! {
            static LAST: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
        }
        struct AtTheEnd<F: FnMut()>(F);
        impl<F: FnMut()> Drop for AtTheEnd<F> {
            fn drop(&mut self) {
                self.0();
            }
        }
        let database = Database::create(engine);
        let (tell, told) = channel();
        on_engine!(engine, C => {
            let mut connection = GuardedConnection::new(connect::<C>(engine, database.url()));
            let ended = thread::spawn(move || {
                // Values are destroyed in the reverse order of their first use.
                LAST.with(|_| ());
                let mut begin = move || connection.transaction(|_| QueryResult::Ok(()));
                begin().unwrap();
                let at_the_end = AtTheEnd(move || tell.send(begin()).unwrap());
                LAST.set(Some(Box::new(at_the_end)));
            });
            ended.join().unwrap();
        });
        told.recv_timeout(LONG).unwrap().unwrap();
    }

    fn after_the_transaction_it_runs(engine: Engine) {
        let (database, leases) = set_up(engine);
        on_engine!(engine, C => {
            let mut connection = GuardedConnection::new(connect::<C>(engine, database.url()));
            let runs = |term| {
                assert_eq!(leases.try_run(NAME, |tenure| tenure.term()).unwrap(), term);
            };
            connection.transaction(|_| QueryResult::Ok(())).unwrap();
            runs(1);
            let rolled_back: QueryResult<()> =
                connection.transaction(|_| Err(diesel::result::Error::RollbackTransaction));
            assert!(rolled_back.is_err());
            runs(2);
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                connection.transaction(|_| -> QueryResult<()> { panic!("in the transaction") })
            }));
            assert!(panicked.is_err());
            runs(3);
            // The work itself may have transactions, one after the other.
            let ran = leases.try_run(NAME, |_| {
                connection.transaction(|_| QueryResult::Ok(()))?;
                assert!(leases.try_run("other", |_| ()).is_ok());
                connection.transaction(|_| QueryResult::Ok(()))
            });
            assert_eq!(ran.unwrap(), Ok(()));
        });
    }

    fn transaction_that_ended_on_another_thread_is_over(engine: Engine) {
        let (database, leases) = set_up(engine);
        on_engine!(engine, C => {
            type Guarded = GuardedConnection<C>;
            type Transactions = <Guarded as Connection>::TransactionManager;
            let mut connection: Guarded =
                GuardedConnection::new(connect::<C>(engine, database.url()));
            Transactions::begin_transaction(&mut connection).unwrap();
            assert_refused(&leases);
            thread::scope(|scope| {
                let leases = &leases;
                scope.spawn(move || {
                    Transactions::commit_transaction(&mut connection).unwrap();
                    assert_eq!(leases.try_run(NAME, |tenure| tenure.term()).unwrap(), 1);
                });
            });
            assert_eq!(leases.try_run(NAME, |tenure| tenure.term()).unwrap(), 2);
        });
    }

    fn connection_that_is_dropped_takes_its_transaction_along(engine: Engine) {
        let (database, leases) = set_up(engine);
        on_engine!(engine, C => {
            let mut connection = GuardedConnection::new(connect::<C>(engine, database.url()));
            <GuardedConnection<C> as Connection>::TransactionManager::begin_transaction(
                &mut connection,
            )
            .unwrap();
            assert_refused(&leases);
            drop(connection);
        });
        assert_eq!(leases.try_run(NAME, |tenure| tenure.term()).unwrap(), 1);
    }

    fn transaction_that_could_not_begin_is_none(engine: Engine) {
        let (database, leases) = set_up(engine);
        let lease = leases.try_claim("outer").unwrap().unwrap();
        on_engine!(engine, C => {
            let mut connection = GuardedConnection::new(connect::<C>(engine, database.url()));
            leases.force_release("outer").unwrap();
            let entered = lease.tenure().enter();
            let refused = connection.transaction(|_| -> QueryResult<()> { panic!("it ran") });
            assert!(refused.is_err());
            drop(entered);
            assert_eq!(leases.try_run(NAME, |tenure| tenure.term()).unwrap(), 1);
        });
    }
}
