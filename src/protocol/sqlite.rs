//! SQLite's words.
//!
//! A claim is one statement under the file's write lock ([UPSERT], [RETURNING], from 3.35).
//!
//! The clock is `julianday('now')`, a float whose rounding is below a millisecond; it works on every
//! SQLite ([date and time]).
//!
//! Hazard: whoever writes, writes alone, so the lock limit is that of a whole call: a statement
//! waits for the file as long as somebody waits for its answer.
//!
//! [UPSERT]: https://www.sqlite.org/lang_upsert.html
//! [RETURNING]: https://www.sqlite.org/lang_returning.html
//! [date and time]: https://www.sqlite.org/lang_datefunc.html

use std::time::Duration;

use diesel::connection::{LoadConnection, SimpleConnection, TransactionManager};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::sql_types::Text;
use diesel::sqlite::{Sqlite, SqliteConnection};
use diesel_migrations::MigrationHarness;

use super::statements::{self, Now, OrUpdate, Update, WhereReturning, Write};
use super::{
    Engine, Fencing, Key, LeaseConnection, Limits, NewClaim, Row, Session, Verdict, checks,
    common_engine, common_questions,
};
use crate::clock::Clock;
use crate::error::BoxError;
use crate::guard::LeaseBackend;
use crate::migrations;
use crate::schema::diesel_leases as leases;
use crate::unsupported::Unsupported;

impl QueryFragment<Sqlite> for Now {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Sqlite>) -> QueryResult<()> {
        out.push_sql("CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)");
        Ok(())
    }
}

impl QueryFragment<Sqlite> for OrUpdate {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Sqlite>) -> QueryResult<()> {
        out.push_sql(" ON CONFLICT (`name`) DO UPDATE SET ");
        Ok(())
    }
}

#[derive(QueryableByName)]
struct JournalMode {
    #[diesel(sql_type = Text)]
    journal_mode: String,
}

impl LeaseBackend for Sqlite {}

impl Engine for Sqlite {
    const ONE_WRITER: bool = true;
    const ENDS_BEHIND_ERRORS: bool = false;
    const PREPARES_COMMIT: bool = false;

    common_engine!(sqlite);

    /// Takes the file's write lock by a write that changes nothing, and looks. A connection without a
    /// busy timeout would fail because one of our own renewals is under way, so it is tried for as
    /// long as a row is waited for elsewhere. A transaction that has read before somebody else wrote
    /// cannot become the writer any more, and has written nothing
    /// ([isolation](https://www.sqlite.org/isolation.html)).
    fn fence<C>(conn: &mut C, key: Key<'_>, _: Fencing) -> QueryResult<bool>
    where
        C: LoadConnection<Backend = Self>,
    {
        conn.batch_execute(BECOME_WRITER)?;
        Self::verify(conn, key)
    }

    fn is_read_only<C>(_: &mut C) -> QueryResult<bool>
    where
        C: LoadConnection<Backend = Self>,
    {
        Ok(false)
    }

    /// `OR ROLLBACK` and a full disk end it. A transaction cannot be begun within one
    /// ([conflicts](https://www.sqlite.org/lang_conflict.html)).
    fn has_ended<C>(conn: &mut C) -> bool
    where
        C: LoadConnection<Backend = Self>,
    {
        conn.batch_execute("BEGIN").is_ok()
    }

    /// There are no roles.
    fn refuses_fence<C>(_: &mut C) -> QueryResult<Option<Unsupported>>
    where
        C: LoadConnection<Backend = Self>,
    {
        Ok(None)
    }
}

const BECOME_WRITER: &str = "UPDATE diesel_leases SET term = term WHERE 0";

impl LeaseConnection for SqliteConnection {}

/// Carries out what gives a name back. Whether there was such a row.
fn free<W>(conn: &mut SqliteConnection, write: W) -> QueryResult<bool>
where
    W: QueryFragment<Sqlite> + QueryId + RunQueryDsl<SqliteConnection>,
{
    Ok(write.execute(conn)? == 1)
}

impl Session for SqliteConnection {
    common_questions!();

    /// A claim that a power failure undoes could be granted twice with one term, hence
    /// `synchronous` ([PRAGMA](https://www.sqlite.org/pragma.html#pragma_synchronous)).
    fn prepare(&mut self, limits: Limits) -> QueryResult<bool> {
        let busy = limits.statement.as_millis().max(1);
        self.batch_execute(&format!(
            "PRAGMA busy_timeout = {busy}; PRAGMA synchronous = FULL"
        ))?;
        Ok(false)
    }

    fn claim(&mut self, claim: &NewClaim) -> QueryResult<Option<i64>> {
        let NewClaim {
            name,
            holder,
            instance,
            lease_ms,
        } = claim;
        let first = statements::first(name, holder, instance, *lease_ms);
        let next = statements::next(holder, instance, *lease_ms);
        let only_free = WhereReturning(statements::free(), leases::term);
        let first = diesel::insert_into(leases::table).values(first);
        // To its end, since it is committed then: of a COMMIT that fails in the reset of a statement that is
        // left after its first row nothing is heard.
        let terms = Write::upsert(super::Claim, first, next, only_free).get_results(self)?;
        Ok(terms.into_iter().next())
    }

    /// There are no row locks to leave out.
    fn renew_all(&mut self, keys: &[Key<'_>], lease_ms: i64) -> QueryResult<Vec<String>> {
        let mine = WhereReturning(statements::any_held_live(keys), leases::name);
        Write::of(
            super::RenewAll,
            Update,
            statements::extended(lease_ms),
            mine,
        )
        .get_results(self)
    }

    /// There are no row locks, and whoever waits for the file is told by the caller's own bound.
    fn is_locked(&mut self, _: &str) -> QueryResult<bool> {
        Ok(false)
    }

    fn lock(&mut self, key: Key<'_>, how: Fencing) -> QueryResult<bool> {
        super::lock(self, key, how, "BEGIN IMMEDIATE")
    }

    fn check(&mut self) -> QueryResult<Verdict> {
        checks::sqlite::check(self)
    }

    /// The file is put into WAL mode first, which is lasting. SQLite does not wait for a file that
    /// is busy when its mode is changed, so that is tried again here
    /// ([WAL](https://www.sqlite.org/wal.html)).
    fn migrate(&mut self, limit: Duration) -> Result<(), BoxError> {
        self.prepare(Limits {
            lock: limit,
            statement: limit,
        })?;
        let clock = Clock::Machine;
        let until = clock.now().after(limit);
        loop {
            let mode =
                diesel::sql_query("PRAGMA journal_mode = WAL").get_result::<JournalMode>(self);
            match mode {
                Ok(mode) if mode.journal_mode == "wal" => break,
                // In memory, for instance: `available` says what is wrong with it.
                Ok(_) => break,
                Err(error) if clock.now() >= until => return Err(error.into()),
                Err(_) => clock.sleep(Duration::from_millis(10)),
            }
        }
        self.immediate_transaction(|conn| {
            conn.run_pending_migrations(migrations::SQLITE)?;
            Ok(())
        })
    }
}
