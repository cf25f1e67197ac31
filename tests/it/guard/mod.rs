//! The guard: a stale holder cannot commit.

#![allow(dead_code, reason = "not every build of the tests uses every tool")]

mod after_loss;
mod cases;
mod cell;
pub(crate) mod client;
mod cost;
mod elsewhere;
mod entered;
mod facts;
#[cfg(feature = "mysql")]
mod innodb;
mod matrix;
mod own_errors;
mod panics;
mod pool;
#[cfg(feature = "postgres")]
mod postgres;
mod read_only;
#[cfg(feature = "sqlite")]
mod sqlite;
pub(crate) mod stopped;
mod unknown;
mod usage;
#[cfg(feature = "mysql")]
mod use_database;
mod vanished;

use std::error::Error;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use diesel::result::{Error as DieselError, QueryResult};
use diesel_lease::{CommitUnknown, Lease, Leases, Lost, Tenure, Timings};

use self::client::{Client, Entrance};
use crate::support::database::Database;
use crate::support::raw::Raw;
use crate::support::{Engine, LONG, eventually, unique};

/// Renewals at once, and a deadline that a busy machine does not meet.
const PATIENT: Timings = Timings {
    lease: Duration::from_secs(30),
    renew: Duration::from_millis(150),
    attempt: Duration::from_secs(2),
    deadline: Duration::from_secs(20),
    grace: Duration::from_secs(5),
};

/// Makes a test of each scenario for MySQL and for MariaDB, as `engines!` does for all.
#[cfg(feature = "mysql")]
macro_rules! on_innodb {
    ($(fn $scenario:ident),+ $(,)?) => {
        mod mysql {
            $(
                #[test]
                fn $scenario() {
                    $crate::support::run($crate::support::Engine::Mysql, super::$scenario);
                }
            )+
        }
        mod mariadb {
            $(
                #[test]
                fn $scenario() {
                    $crate::support::run($crate::support::Engine::Mariadb, super::$scenario);
                }
            )+
        }
    };
}
#[cfg(feature = "mysql")]
use on_innodb;

/// A database with leases and a table for the work.
struct Stage {
    database: Database,
    leases: Leases,
    /// Another process, as it were.
    rival: Leases,
}

impl Stage {
    fn new(engine: Engine) -> Stage {
        Stage::with_timings(engine, PATIENT)
    }

    fn with_timings(engine: Engine, timings: Timings) -> Stage {
        Stage::with(Database::create(engine), timings)
    }

    fn timings(&self) -> Timings {
        self.leases.timings().clone()
    }

    fn with(database: Database, timings: Timings) -> Stage {
        let leases = leases(&database, &timings);
        leases.migrate().unwrap();
        let rival = self::leases(&database, &timings);
        make_table(&database);
        Stage {
            leases,
            rival,
            database,
        }
    }

    /// A lease that nothing renews.
    fn claim(&self) -> Lease {
        let lease = self.leases.try_claim(&unique("guard")).unwrap();
        lease.expect("a new name")
    }

    /// A connection as Diesel makes it: with SQLite it does not wait for a busy file.
    fn bare_client(&self, entrance: Entrance) -> Box<dyn Client> {
        client::connect(self.database.engine(), self.database.url(), entrance)
    }

    fn client(&self, entrance: Entrance) -> Box<dyn Client> {
        client(self.database.engine(), self.database.url(), entrance)
    }

    /// Makes the rival its holder.
    fn hand_over(&self, name: &str) -> Lease {
        self.database.connect().expire(name);
        let lease = self.rival.try_claim(name).unwrap();
        lease.expect("an expired name")
    }

    /// Lets the rival wait for it, whatever else the machine has to do.
    fn succeed(&self, lease: &Lease) {
        eventually(LONG, "the successor's claim", || {
            let next = self.rival.try_claim(lease.name());
            matches!(next, Ok(Some(next)) if next.term() > lease.term())
        });
    }

    fn rows(&self, id: i64) -> i64 {
        rows(&mut self.database.connect(), id)
    }
}

/// One that waits for a busy file.
fn client(engine: Engine, url: &str, entrance: Entrance) -> Box<dyn Client> {
    let mut client = client::connect(engine, url, entrance);
    if engine == Engine::Sqlite {
        client.sql().batch("PRAGMA busy_timeout = 5000").unwrap();
    }
    client
}

fn leases(database: &Database, timings: &Timings) -> Leases {
    let builder = Leases::builder().timings(timings.clone());
    builder.build(database.url()).unwrap()
}

fn make_table(database: &Database) {
    let engine = match database.engine().is_mysql_like() {
        true => "ENGINE=InnoDB",
        false => "",
    };
    let mut raw = database.connect();
    for table in ["work", "calm"] {
        raw.batch(&format!(
            "CREATE TABLE {table} (id BIGINT PRIMARY KEY, amount BIGINT NOT NULL) {engine}"
        ));
    }
}

/// An id in `work` that nobody else uses.
fn next_id() -> i64 {
    static COUNT: AtomicI64 = AtomicI64::new(1);
    COUNT.fetch_add(1, Ordering::Relaxed)
}

fn insert(id: i64) -> String {
    format!("INSERT INTO work (id, amount) VALUES ({id}, 0)")
}

/// Fixes the snapshot of a transaction. Nobody writes to that table.
const LOOK: &str = "SELECT COUNT(*) FROM calm";

fn rows(raw: &mut Raw, id: i64) -> i64 {
    raw.one_i64(&format!("SELECT COUNT(*) FROM work WHERE id = {id}"))
}

/// That it was refused because the lease was lost, and that this can be found out.
#[track_caller]
fn assert_lost(done: &QueryResult<()>, tenure: &Tenure) {
    let Err(error) = done else {
        panic!("committed under a lost lease");
    };
    let lost = Lost::from_diesel(error).unwrap_or_else(|| panic!("not a loss: {error:?}"));
    assert_eq!((lost.name(), lost.term()), (tenure.name(), tenure.term()));
    assert_eq!(Lost::find(error), Some(lost));
    let wrapped = Wrapped(lost.clone().into());
    assert_eq!(Lost::find(&wrapped), Some(lost));
    assert!(tenure.is_lost(), "the tenure does not know");
}

/// That it failed by itself, and the lease is as good as before.
#[track_caller]
fn assert_no_loss(done: QueryResult<()>, lease: &Lease) -> DieselError {
    let error = done.expect_err("it failed");
    assert!(Lost::find(&error).is_none(), "{error:?}");
    assert!(CommitUnknown::from_diesel(&error).is_none(), "{error:?}");
    lease.verify().unwrap();
    error
}

/// An error of an application's around one of Diesel's.
#[derive(Debug)]
struct Wrapped(DieselError);

impl std::fmt::Display for Wrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("could not book")
    }
}

impl Error for Wrapped {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.0)
    }
}
