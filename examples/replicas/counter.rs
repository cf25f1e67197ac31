//! The work: a counter that is read and written by plain Diesel, on whichever engine the URL names.
//!
//! Each increment is a row, with the term it was made under and the database's clock, all in the
//! statement that makes it. Nothing keeps two of them from having one value.

use diesel::dsl::{max, sql};
use diesel::prelude::*;
use diesel::sql_types::BigInt;

diesel::table! {
    replicas_increments (value, term) {
        value -> BigInt,
        term -> BigInt,
        at_ms -> BigInt,
    }
}
use replicas_increments as increments;

const CREATE: &str = "CREATE TABLE replicas_increments
    (value BIGINT NOT NULL, term BIGINT NOT NULL, at_ms BIGINT NOT NULL)";

#[derive(Debug, Queryable)]
pub(crate) struct Increment {
    pub(crate) value: i64,
    pub(crate) term: i64,
}

#[derive(diesel::MultiConnection)]
pub(crate) enum AnyConnection {
    #[cfg(feature = "postgres")]
    Postgres(PgConnection),
    #[cfg(feature = "mysql")]
    Mysql(MysqlConnection),
    #[cfg(feature = "sqlite")]
    Sqlite(SqliteConnection),
}

pub(crate) struct Counter {
    connection: AnyConnection,
    /// The database's clock, in milliseconds.
    clock: &'static str,
}

impl Counter {
    pub(crate) fn open(url: &str) -> ConnectionResult<Counter> {
        let (connection, clock) = match url.split("://").next() {
            #[cfg(feature = "postgres")]
            Some("postgres" | "postgresql") => (
                AnyConnection::Postgres(PgConnection::establish(url)?),
                "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
            ),
            #[cfg(feature = "mysql")]
            Some("mysql") => (
                AnyConnection::Mysql(MysqlConnection::establish(url)?),
                "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000",
            ),
            #[cfg(feature = "sqlite")]
            _ => (
                AnyConnection::Sqlite(open_file(url.trim_start_matches("sqlite://"))?),
                "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
            ),
            #[cfg(not(feature = "sqlite"))]
            _ => unreachable!("`Leases` has refused it"),
        };
        Ok(Counter { connection, clock })
    }

    pub(crate) fn create(&mut self) -> QueryResult<()> {
        self.remove()?;
        diesel::sql_query(CREATE).execute(&mut self.connection)?;
        Ok(())
    }

    pub(crate) fn remove(&mut self) -> QueryResult<()> {
        let drop = "DROP TABLE IF EXISTS replicas_increments";
        diesel::sql_query(drop).execute(&mut self.connection)?;
        Ok(())
    }

    pub(crate) fn last_value(&mut self) -> QueryResult<i64> {
        let last = increments::table.select(max(increments::value));
        let last: Option<i64> = last.get_result(&mut self.connection)?;
        Ok(last.unwrap_or(0))
    }

    pub(crate) fn write(&mut self, value: i64, term: u64) -> QueryResult<()> {
        diesel::insert_into(increments::table)
            .values((
                increments::value.eq(value),
                increments::term.eq(term as i64),
                increments::at_ms.eq(sql::<BigInt>(self.clock)),
            ))
            .execute(&mut self.connection)?;
        Ok(())
    }

    /// All increments, in the order of the database's clock.
    pub(crate) fn increments(&mut self) -> QueryResult<Vec<Increment>> {
        increments::table
            .select((increments::value, increments::term))
            .order((increments::at_ms, increments::value))
            .load(&mut self.connection)
    }
}

#[cfg(feature = "sqlite")]
fn open_file(path: &str) -> ConnectionResult<SqliteConnection> {
    let mut connection = SqliteConnection::establish(path)?;
    diesel::sql_query("PRAGMA busy_timeout = 5000")
        .execute(&mut connection)
        .map_err(ConnectionError::CouldntSetupConfiguration)?;
    Ok(connection)
}
