//! What a scheduler asks of the database while it has nothing to do.

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use diesel::connection::{Connection, InstrumentationEvent};
use diesel_lease::scheduler::{RunningScheduler, Scheduler};
use diesel_lease::{LeaseConnection, Leases};
use r2d2::ManageConnection;

use super::{Stage, at, builder};
use crate::support::raw::AnyConnection;
use crate::support::{Engine, LONG, engines};

engines! {
    fn an_idle_scheduler_reads_once_in_a_look_and_writes_nothing,
    fn a_scheduler_of_local_jobs_asks_nothing,
}

/// A statement, and when it was sent.
type Sent = (Instant, String);

/// Makes connections that tell of every statement.
struct Telling<C> {
    url: String,
    told: Sender<Sent>,
    makes: PhantomData<fn() -> C>,
}

impl<C: LeaseConnection + Connection> ManageConnection for Telling<C> {
    type Connection = C;
    type Error = diesel::ConnectionError;

    fn connect(&self) -> Result<C, diesel::ConnectionError> {
        let mut connection = C::establish(&self.url)?;
        let told = self.told.clone();
        connection.set_instrumentation(move |event: InstrumentationEvent<'_>| {
            if let InstrumentationEvent::StartQuery { query, .. } = event {
                let _ = told.send((Instant::now(), query.to_string()));
            }
        });
        Ok(connection)
    }

    fn is_valid(&self, _: &mut C) -> Result<(), diesel::ConnectionError> {
        Ok(())
    }

    fn has_broken(&self, _: &mut C) -> bool {
        false
    }
}

/// Leases whose every statement is told.
fn telling(stage: &Stage) -> (Leases, Receiver<Sent>) {
    fn leases<C: LeaseConnection + Connection>(url: &str, told: Sender<Sent>) -> Leases {
        let url = url.to_owned();
        let makes = PhantomData::<fn() -> C>;
        // With one connection, no second one is set up at some later time.
        let builder = builder().connections(1);
        builder.build_with(Telling { url, told, makes }).unwrap()
    }
    let url = stage.database.url();
    let (told, sent) = crossbeam_channel::unbounded();
    let leases = match stage.raw().connection {
        #[cfg(feature = "postgres")]
        AnyConnection::Pg(_) => leases::<diesel::PgConnection>(url, told),
        #[cfg(feature = "mysql")]
        AnyConnection::Mysql(_) => leases::<diesel::MysqlConnection>(url, told),
        #[cfg(feature = "sqlite")]
        AnyConnection::Sqlite(_) => leases::<diesel::SqliteConnection>(url, told),
    };
    (leases, sent)
}

fn an_idle_scheduler_reads_once_in_a_look_and_writes_nothing(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    stage.on_record("10:00:00");
    let row = stage.row();
    let (leases, sent) = telling(&stage);
    let every = Duration::from_millis(500);
    let mut scheduler = Scheduler::new(&leases).sweep_every(every);
    for job in ["a", "b", "c"] {
        scheduler = scheduler.job(job, "* * * * *", |_| Ok(()));
    }
    let _running = stage.run(scheduler, &stage.clock, |_| Ok(()));
    stage.clock.settle();
    let mut looks = Vec::new();
    while looks.len() < 4 {
        let (when, statement) = sent.recv_timeout(LONG).expect("a look");
        let asks_for_many =
            statement.contains("`name` IN (") || statement.contains("\"name\" = ANY(");
        if statement.starts_with("SELECT") && asks_for_many {
            looks.push(when);
        } else {
            // At first the sessions are set up, and the records of the jobs are read.
            assert!(looks.is_empty(), "{statement}");
        }
    }
    for (one, next) in looks.iter().zip(&looks[1..]) {
        let gap = next.duration_since(*one);
        assert!(gap > every / 2, "two looks within {gap:?}");
    }
    assert_eq!(stage.row(), row);
}

fn a_scheduler_of_local_jobs_asks_nothing(engine: Engine) {
    let stage = Stage::new(engine, "10:00:30");
    let (leases, sent) = telling(&stage);
    let (begun, ran) = crossbeam_channel::unbounded();
    let running: RunningScheduler = Scheduler::new(&leases)
        .sweep_every(Duration::ZERO)
        .clock(&stage.clock)
        .local_job("local", "* * * * *", move |round| {
            begun.send(round.at()).unwrap();
            Ok(())
        })
        .start()
        .unwrap();
    stage.set("10:01:00");
    assert_eq!(ran.recv_timeout(LONG), Ok(at("10:01:00")));
    std::thread::sleep(super::LOOK);
    running.stop(LONG).unwrap();
    assert_eq!(sent.try_iter().count(), 0);
}
