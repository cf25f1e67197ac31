//! The migrations that make the lease table, for programs that run them with their own.
//!
//! [`Leases::migrate`](crate::Leases::migrate) runs them for everybody else. Both write to Diesel's
//! table `__diesel_schema_migrations`, beside an application's own versions; versions of this crate
//! are those listed in its CHANGELOG. Diesel goes by version alone, so nothing collides, with one
//! thing to know: `diesel migration revert` and `redo` take the latest version of the table, and
//! fail when that is one of this crate's and its files are not among the application's. Copy the
//! files of the crate's `migrations` folder into the application's to have it all in one place;
//! `Leases::migrate` then finds them done.

use diesel_migrations::{EmbeddedMigrations, embed_migrations};

/// For PostgreSQL.
#[cfg(feature = "postgres")]
pub const POSTGRES: EmbeddedMigrations = embed_migrations!("migrations/postgres");

/// For MySQL and MariaDB.
#[cfg(feature = "mysql")]
pub const MYSQL: EmbeddedMigrations = embed_migrations!("migrations/mysql");

/// For SQLite. [`Leases::migrate`](crate::Leases::migrate) also puts the file into WAL mode.
#[cfg(feature = "sqlite")]
pub const SQLITE: EmbeddedMigrations = embed_migrations!("migrations/sqlite");
