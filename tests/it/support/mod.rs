//! What the scenarios stand on: engines, databases, servers that can be disturbed, networks that
//! fail, processes, logs.
//!
//! A scenario is one `fn(Engine)`. [`engines!`] makes a test of it for every engine of this build.
//! What a test needs and cannot have (a URL, the servers script) is a panic that names it: no test
//! is skipped in silence.

#![allow(dead_code, reason = "not every build of the tests uses every tool")]
#![allow(
    clippy::disallowed_methods,
    reason = "tests measure and wait by the real clock"
)]

pub(crate) mod concrete;
pub(crate) mod database;
pub(crate) mod log;
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod random;
pub(crate) mod raw;
pub(crate) mod servers;
pub(crate) mod url;
pub(crate) mod watched;

mod absent;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod pg;
#[cfg(feature = "sqlite")]
mod sqlite;

#[cfg(not(feature = "mysql"))]
use absent as mysql;
#[cfg(not(feature = "postgres"))]
use absent as pg;
#[cfg(not(feature = "sqlite"))]
use absent as sqlite;

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::Timings;

use self::raw::Dialect;

/// The default timings in a tenth of the time.
pub(crate) const TIMINGS: Timings = Timings {
    lease: Duration::from_millis(1500),
    renew: Duration::from_millis(200),
    attempt: Duration::from_millis(500),
    deadline: Duration::from_millis(1000),
    grace: Duration::from_millis(500),
};

/// Long enough for anything that must happen at all, on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// A database engine that a scenario runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    Sqlite,
    Postgres,
    Mysql,
    Mariadb,
}

impl Engine {
    /// Whether it speaks MySQL's protocol.
    pub(crate) fn is_mysql_like(self) -> bool {
        matches!(self, Engine::Mysql | Engine::Mariadb)
    }

    pub(crate) fn dialect(self) -> Dialect {
        match self {
            Engine::Sqlite => sqlite::DIALECT,
            Engine::Postgres => pg::DIALECT,
            Engine::Mysql | Engine::Mariadb => mysql::DIALECT,
        }
        .unwrap_or_else(|| panic!("this build of the tests has no {self}"))
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Engine::Sqlite => "SQLite",
            Engine::Postgres => "PostgreSQL",
            Engine::Mysql => "MySQL",
            Engine::Mariadb => "MariaDB",
        })
    }
}

/// Runs a scenario: every test that [`engines!`] makes comes through here.
pub(crate) fn run(engine: Engine, scenario: fn(Engine)) {
    log::install();
    scenario(engine);
}

/// A name that no other test of this process uses, for leases whose log is looked at.
pub(crate) fn unique(stem: &str) -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    format!("{stem}-{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Waits until `holds` does, and panics with `what` when it does not within `limit`.
#[track_caller]
pub(crate) fn eventually(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Makes a test of each scenario for every engine of this build: `postgres::claim_twice` and so on.
///
/// ```text
/// engines! {
///     fn claim_twice, fn release_frees;
///     servers: fn frozen_network;         // not for SQLite; may be left out
/// }
/// ```
///
/// Once in a module: it makes the modules `sqlite`, `postgres`, `mysql` and `mariadb`.
macro_rules! engines {
    ($(fn $every:ident),+ $(,)? $(;)?) => {
        $crate::support::engines! { @ [$($every)+] [] }
    };
    (servers: $(fn $server:ident),+ $(,)? $(;)?) => {
        $crate::support::engines! { @ [] [$($server)+] }
    };
    ($(fn $every:ident),+ $(,)? ; servers: $(fn $server:ident),+ $(,)? $(;)?) => {
        $crate::support::engines! { @ [$($every)+] [$($server)+] }
    };
    (@ [$($every:ident)*] [$($server:ident)*]) => {
        // in use, whatever engines there are
        const _: &[fn($crate::support::Engine)] = &[$($every,)* $($server,)*];
        #[cfg(feature = "sqlite")]
        mod sqlite {
            $crate::support::engines! { @ Sqlite $($every)* }
        }
        #[cfg(feature = "postgres")]
        mod postgres {
            $crate::support::engines! { @ Postgres $($every)* $($server)* }
        }
        #[cfg(feature = "mysql")]
        mod mysql {
            $crate::support::engines! { @ Mysql $($every)* $($server)* }
        }
        #[cfg(feature = "mysql")]
        mod mariadb {
            $crate::support::engines! { @ Mariadb $($every)* $($server)* }
        }
    };
    (@ $engine:ident $($scenario:ident)*) => {
        $(
            #[test]
            fn $scenario() {
                $crate::support::run($crate::support::Engine::$engine, super::$scenario);
            }
        )*
    };
}
pub(crate) use engines;
