//! A session of the test's own, beside the library: to edit rows by hand, look, and kill.
//!
//! A plain Diesel connection in autocommit mode. What fails where a test does not expect it is a
//! panic with the statement.

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};

use super::Engine;

/// A plain connection to any engine.
#[derive(diesel::MultiConnection)]
pub(crate) enum AnyConnection {
    #[cfg(feature = "postgres")]
    Pg(diesel::PgConnection),
    #[cfg(feature = "mysql")]
    Mysql(diesel::MysqlConnection),
    #[cfg(feature = "sqlite")]
    Sqlite(diesel::SqliteConnection),
}

/// One session.
pub(crate) struct Raw {
    pub(crate) connection: AnyConnection,
    dialect: Dialect,
}

/// What differs between engines for a test. An engine's module has one, or none in a build without it.
#[derive(Clone, Copy)]
pub(crate) struct Dialect {
    pub(crate) connect: fn(url: &str) -> ConnectionResult<AnyConnection>,
    /// Statements that make an empty database for a user, and those that remove it.
    pub(crate) create: fn(database: &str, user: &str) -> Vec<String>,
    pub(crate) drop: fn(database: &str, user: &str) -> Vec<String>,
    /// A query for the ids of a database's sessions.
    pub(crate) sessions: fn(database: &str) -> String,
    pub(crate) kill: fn(session: i64) -> String,
    /// A query for the id of the session that asks, as in `sessions`.
    pub(crate) session: &'static str,
    /// The database's clock in UTC milliseconds, as an expression.
    pub(crate) now_ms: &'static str,
}

/// A row of `diesel_leases`.
#[derive(Clone, Debug, PartialEq, Eq, QueryableByName)]
pub(crate) struct Row {
    #[diesel(sql_type = Text)]
    pub(crate) name: String,
    #[diesel(sql_type = Text)]
    pub(crate) holder: String,
    #[diesel(sql_type = Text)]
    pub(crate) instance: String,
    #[diesel(sql_type = BigInt)]
    pub(crate) term: i64,
    #[diesel(sql_type = BigInt)]
    pub(crate) expires_at_ms: i64,
    #[diesel(sql_type = BigInt)]
    pub(crate) slot_ms: i64,
    #[diesel(sql_type = BigInt)]
    pub(crate) unfinished_slot_ms: i64,
    #[diesel(sql_type = BigInt)]
    pub(crate) rerun_slot_ms: i64,
}

impl Raw {
    /// Connects to a database of the engine.
    pub(crate) fn connect(engine: Engine, url: &str) -> Raw {
        Raw::try_connect(engine, url).unwrap_or_else(|error| panic!("{engine}: {error}"))
    }

    pub(crate) fn try_connect(engine: Engine, url: &str) -> ConnectionResult<Raw> {
        let dialect = engine.dialect();
        let connection = (dialect.connect)(url)?;
        Ok(Raw {
            connection,
            dialect,
        })
    }

    /// Runs one statement; how many rows it matched.
    #[track_caller]
    pub(crate) fn execute(&mut self, statement: &str) -> usize {
        answer(statement, self.try_execute(statement))
    }

    pub(crate) fn try_execute(&mut self, statement: &str) -> QueryResult<usize> {
        diesel::sql_query(statement).execute(&mut self.connection)
    }

    /// Runs statements as plain text, as some can only be sent.
    #[track_caller]
    pub(crate) fn batch(&mut self, statements: &str) {
        answer(statements, self.try_batch(statements));
    }

    pub(crate) fn try_batch(&mut self, statements: &str) -> QueryResult<()> {
        self.connection.batch_execute(statements)
    }

    /// The one number that a query gives. On PostgreSQL it must be a bigint.
    #[track_caller]
    pub(crate) fn one_i64(&mut self, query: &str) -> i64 {
        self.maybe_i64(query)
            .unwrap_or_else(|| panic!("{query}: none"))
    }

    /// As [`Raw::one_i64`], with none for no row and for NULL.
    #[track_caller]
    pub(crate) fn maybe_i64(&mut self, query: &str) -> Option<i64> {
        answer(query, self.try_i64(query))
    }

    pub(crate) fn try_i64(&mut self, query: &str) -> QueryResult<Option<i64>> {
        let found = sql::<Nullable<BigInt>>(query)
            .get_result(&mut self.connection)
            .optional()?;
        Ok(found.flatten())
    }

    /// The first column of every row.
    #[track_caller]
    pub(crate) fn all_i64(&mut self, query: &str) -> Vec<i64> {
        answer(query, self.try_all_i64(query))
    }

    pub(crate) fn try_all_i64(&mut self, query: &str) -> QueryResult<Vec<i64>> {
        sql::<BigInt>(query).load(&mut self.connection)
    }

    /// The one text that a query gives.
    #[track_caller]
    pub(crate) fn one_text(&mut self, query: &str) -> String {
        self.maybe_text(query)
            .unwrap_or_else(|| panic!("{query}: none"))
    }

    #[track_caller]
    pub(crate) fn maybe_text(&mut self, query: &str) -> Option<String> {
        let found: QueryResult<Option<Option<String>>> = sql::<Nullable<Text>>(query)
            .get_result(&mut self.connection)
            .optional();
        answer(query, found).flatten()
    }

    /// The database's clock, within a statement.
    pub(crate) fn now_expression(&self) -> &'static str {
        self.dialect.now_ms
    }

    /// The database's clock.
    pub(crate) fn now_ms(&mut self) -> i64 {
        let now = self.now_expression();
        self.one_i64(&format!("SELECT {now}"))
    }

    /// The server's id of this session.
    pub(crate) fn session(&mut self) -> i64 {
        let query = self.dialect.session;
        self.one_i64(query)
    }

    /// The lease of that name as it stands in the table.
    #[track_caller]
    pub(crate) fn row(&mut self, name: &str) -> Option<Row> {
        let query = format!("SELECT * FROM diesel_leases WHERE name = '{name}'");
        answer(
            &query,
            diesel::sql_query(&query)
                .get_result(&mut self.connection)
                .optional(),
        )
    }

    /// Takes the lease over by hand: another holder for a minute, the next term. The row as it is then.
    #[track_caller]
    pub(crate) fn take_over(&mut self, name: &str) -> Row {
        let now = self.dialect.now_ms;
        let holder = "b".repeat(32);
        let taken = self.execute(&format!(
            "UPDATE diesel_leases SET holder = '{holder}', instance = 'by hand', \
             term = term + 1, expires_at_ms = {now} + 60000 WHERE name = '{name}'"
        ));
        assert_eq!(taken, 1, "a row for {name}");
        self.row(name).expect("the row")
    }

    /// Lets the lease expire: for the database it is as if its clock had jumped.
    #[track_caller]
    pub(crate) fn expire(&mut self, name: &str) {
        let expired = self.execute(&format!(
            "UPDATE diesel_leases SET expires_at_ms = 1 WHERE name = '{name}'"
        ));
        assert_eq!(expired, 1, "a row for {name}");
    }
}

#[track_caller]
fn answer<T>(statement: &str, result: QueryResult<T>) -> T {
    result.unwrap_or_else(|error| panic!("{statement}: {error}"))
}
