//! A name that at most one healthy process holds at a time, kept in the database the processes already
//! share. For synchronous services on [Diesel](https://diesel.rs), with PostgreSQL, MySQL, MariaDB or
//! SQLite; no other service is needed.
//!
//! ```
//! use diesel_lease::Leases;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("app.db");
//! # let url = path.to_str().unwrap();
//! let leases = Leases::connect(url)?; // postgres://, mysql:// or a SQLite file
//! leases.migrate()?;
//! leases.available()?;
//!
//! let held = leases.claim("nightly-report")?.hold()?; // a thread renews it
//! held.run(|tenure| {
//!     while tenure.check().is_ok() {
//!         // … a page of the report …
//! #       break;
//!     }
//! });
//! held.release()?;
//! # Ok(())
//! # }
//! ```
//!
//! | part | what it gives | lost when |
//! |---|---|---|
//! | [`Leases`] | one row per name: a claim, renewed by a thread; a [term](Tenure::term) that rises with every holder | not renewed in time by the database's clock |
//! | [`guard`] | a transaction that a stale holder cannot commit | |
//! | [`Leases::try_run`] | run a closure if the name is free | |
//! | [`Leases::campaign`] | lead for as long as possible, on one replica | |
//! | [`Leases::try_claim_slot`] | each instant of a schedule once | |
//! | `scheduler` | cron jobs on that | |
//! | [`locks`] | the engine's own session locks | their session ends |
//!
//! # What is not guaranteed
//!
//! A lease alone does not stop a process that was paused and goes on: between a look at the tenure and
//! the next instruction anything can happen. Only what the database refuses is certain. So put what must
//! not happen twice into a transaction that is [guarded](guard), or send the [term](Tenure::term) along to
//! where it can be compared.
//!
//! At most one holder at a time *believes* in a name as long as:
//!
//! - the database's clock is not stepped forward by more than `lease - deadline` (5 s by default), and the
//!   machine of the holder is not frozen by its hypervisor in a way that its boot clock does not show;
//! - a fail-over leads to a server that has every claim: none that lagged behind;
//! - nobody deletes rows or restores an old copy: terms start anew then.
//!
//! Where one of these fails, two may believe in a name for a while. Within one database the guard still
//! lets only the newest claim commit. A clock that is set back after a claim blocks the name until it has
//! caught up; [`Leases::force_release`] frees it.
//!
//! The URL must lead to the primary, without a proxy that splits reads from writes. Galera and Group
//! Replication with several primaries are refused, because a row lock does not reach the other nodes. On
//! MySQL, MariaDB and PostgreSQL commits must be durable as they are by default. The lease table must not
//! be replicated by logical replication into a database where work runs.
//!
//! A process that ends right after a lease was dropped may end before the name is given back.
//!
//! # Threads
//!
//! A process that makes no [`Leases`] has no thread and no connection of this crate. One that does has a
//! few workers (`lease-io`), each with a connection, from the first call on, and a timekeeper
//! (`lease-renew`) for each held lease, which never touches a connection. On PostgreSQL there is one more
//! connection while somebody waits for a name, with a thread that listens (`lease-listen`). No call outlasts
//! its bound, whatever the network does.
//!
//! # Logs
//!
//! Through [`log`], with the key-values `lease`, `term` and `instance`: `error` for work under a lost lease
//! that will not stop, `warn` for a renewal or a release that failed and for a loss, `info` for taking and
//! leaving the lead, `debug` for claims and releases, `trace` for renewals. No URL is logged.
//!
//! # Features
//!
//! - `sqlite` and `bundled` (default): SQLite, built from source with `bundled`.
//! - `postgres`: PostgreSQL. Needs libpq.
//! - `mysql`: MySQL and MariaDB. Needs MariaDB's or MySQL's client library.
//! - `guarded-connection` (default): `GuardedConnection` and `LeaseGuard`. It turns on Diesel's
//!   `i-implement-a-third-party-backend-and-opt-into-breaking-changes`, which is why this crate asks for
//!   Diesel `~2.3`.
//! - `scheduler` (default): the module `scheduler`.
//! - `test-util`: a clock for tests of an application's jobs.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod campaign;
mod clock;
mod error;
pub mod guard;
mod lease;
mod leases;
pub mod locks;
mod loss;
pub mod migrations;
mod mistakes;
mod name;
mod panic;
mod protocol;
mod renew;
mod run;
#[cfg(feature = "scheduler")]
pub mod scheduler;
mod schema;
mod slot;
mod store;
mod tenure;
mod timings;
mod unsupported;

pub use campaign::{Campaign, Leader, LeaderEvent, StepDownReason};
pub use error::{Act, BoxError, CommitUnknown, Ending, Error, Lost};
pub use guard::LeaseBackend;
#[cfg(feature = "guarded-connection")]
pub use guard::connection::{GuardedConnection, TenureRequired};
#[cfg(feature = "guarded-connection")]
pub use guard::customizer::LeaseGuard;
#[cfg(all(feature = "guarded-connection", feature = "postgres"))]
pub use guard::postgres::GuardedTransactionBuilder;
pub use lease::{HeldLease, Lease};
pub use leases::{Builder, LeaseRecord, Leases};
pub use loss::{LossCause, StopToken};
pub use mistakes::{InvalidSchedule, Mistake};
pub use name::{InvalidName, validate_name};
pub use protocol::LeaseConnection;
pub use run::RunError;
pub use slot::{InvalidSlot, Unfinished};
pub use tenure::{Entered, Tenure, current};
pub use timings::{InvalidTimings, Timings};
pub use unsupported::Unsupported;

/// Its examples are tested.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
