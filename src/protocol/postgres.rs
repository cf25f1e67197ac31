//! PostgreSQL's words.
//!
//! A claim is one statement: `ON CONFLICT … DO UPDATE … WHERE` locks the row that is there, sees its
//! newest version at READ COMMITTED, and returns a term only when it wrote ([INSERT]).
//!
//! The clock is `clock_timestamp()`, which goes on within a transaction, where `now()` stands still
//! ([date and time]).
//!
//! [INSERT]: https://www.postgresql.org/docs/current/sql-insert.html#SQL-ON-CONFLICT
//! [date and time]: https://www.postgresql.org/docs/current/functions-datetime.html#FUNCTIONS-DATETIME-CURRENT

use std::time::Duration;

use diesel::connection::{LoadConnection, SimpleConnection, TransactionManager};
use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::sql_types::{Bool, Text};
use diesel_migrations::MigrationHarness;

use super::statements::{self, Now, OrUpdate, Update, WhereReturning, Write};
use super::{
    Engine, Fencing, Key, LeaseConnection, Limits, NewClaim, Row, Session, Verdict, checks,
    common_engine, common_questions,
};
use crate::error::BoxError;
use crate::guard::LeaseBackend;
use crate::migrations;
use crate::schema::diesel_leases as leases;
use crate::unsupported::Unsupported;

impl QueryFragment<Pg> for Now {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("CAST(FLOOR(EXTRACT(EPOCH FROM clock_timestamp()) * 1000) AS BIGINT)");
        Ok(())
    }
}

impl QueryFragment<Pg> for OrUpdate {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(" ON CONFLICT (\"name\") DO UPDATE SET ");
        Ok(())
    }
}

/// Settings that a server does not know are left out. What the server keeps for a commit is raised
/// to its default and never lowered: a claim that a crash undoes could be granted twice with one
/// term.
const PREPARE: &str = "SELECT set_config(name, value, false) FROM (VALUES
    ('default_transaction_isolation', 'read committed'),
    ('default_transaction_deferrable', 'off'),
    ('lock_timeout', $1),
    ('statement_timeout', $2),
    ('idle_session_timeout', '0'),
    ('idle_in_transaction_session_timeout', $2),
    ('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END)
    ) AS wanted (name, value) WHERE current_setting(name, true) IS NOT NULL";

/// Where names are told that were given back.
const CHANNEL: &str = "diesel_leases";

/// One key for all databases of a server would do; advisory locks are per database anyway
/// ([advisory locks]).
///
/// [advisory locks]: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS
const MIGRATE_ALONE: &str = "SELECT pg_advisory_xact_lock(7308332045852139380)";

impl LeaseBackend for Pg {}

impl Engine for Pg {
    const ONE_WRITER: bool = false;
    const ENDS_BEHIND_ERRORS: bool = false;
    const PREPARES_COMMIT: bool = false;

    common_engine!(postgres);

    fn verify_first<C>(conn: &mut C, key: Key<'_>) -> QueryResult<Option<bool>>
    where
        C: LoadConnection<Backend = Self>,
    {
        let read_only = current_setting("default_transaction_read_only");
        let mine = leases::table
            .select((leases::term, read_only))
            .filter(statements::held_live(key.name, key.holder, key.term));
        let found = mine.get_result::<(i64, String)>(conn).optional()?;
        Ok(found.map(|(_, read_only)| read_only == "on"))
    }

    /// `FOR KEY SHARE` passes beside our own renewals, which change no key, and holds up a claim,
    /// which changes `holder`, a key through the unique index ([row locks]). The setting is the
    /// transaction's own: a host that vanishes between here and its COMMIT keeps the row for `idle`
    /// and no longer ([set_config]).
    ///
    /// [row locks]: https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS
    /// [set_config]: https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADMIN-SET
    fn fence<C>(conn: &mut C, key: Key<'_>, how: Fencing) -> QueryResult<bool>
    where
        C: LoadConnection<Backend = Self>,
    {
        let idle = set_config(
            "idle_in_transaction_session_timeout",
            millis(how.idle),
            true,
        );
        let mine = leases::table
            .select((leases::term, idle))
            .filter(statements::held_as(key.name, key.holder, key.term))
            .for_key_share();
        Ok(mine.get_result::<(i64, String)>(conn).optional()?.is_some())
    }

    fn is_read_only<C>(conn: &mut C) -> QueryResult<bool>
    where
        C: LoadConnection<Backend = Self>,
    {
        let setting = diesel::select(current_setting("transaction_read_only"));
        Ok(setting.get_result::<String>(conn)? == "on")
    }

    fn refuses_fence<C>(conn: &mut C) -> QueryResult<Option<Unsupported>>
    where
        C: LoadConnection<Backend = Self>,
    {
        if !checks::postgres::has_fence_index(conn)? {
            return Ok(Some(Unsupported::FenceIndex));
        }
        if !Self::is_read_only(conn)? {
            let nobody = leases::table
                .select(leases::term)
                .filter(statements::named(""));
            nobody.for_key_share().execute(conn)?;
        }
        Ok(None)
    }
}

/// `name IN (names)`
struct NameIn<Names>(Names);

impl<Names: QueryFragment<Pg>> QueryFragment<Pg> for NameIn<Names> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_identifier("name")?;
        out.push_sql(" IN (");
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(")");
        Ok(())
    }
}

diesel::define_sql_function! {
    fn set_config(name: Text, value: Text, is_local: Bool) -> Text;
}

diesel::define_sql_function! {
    fn current_setting(name: Text) -> Text;
}

impl LeaseConnection for PgConnection {}

/// Carries out what gives a name back, and tells those who listen when it commits ([NOTIFY]). Where the
/// server cannot tell, it is carried out all the same.
///
/// [NOTIFY]: https://www.postgresql.org/docs/current/sql-notify.html
fn free<W>(conn: &mut PgConnection, write: W) -> QueryResult<bool>
where
    W: QueryFragment<Pg> + QueryId + RunQueryDsl<PgConnection>,
{
    match Telling(&write).execute(conn) {
        Ok(rows) => Ok(rows == 1),
        Err(error) => match diesel::sql_query(CANNOT_TELL).get_result::<Answer>(conn) {
            Ok(Answer { answer: true }) => Ok(write.execute(conn)? == 1),
            _ => Err(error),
        },
    }
}

/// The queue of what is told is of a fixed size, and full where a session that listens does not come to
/// take what is its.
const CANNOT_TELL: &str = "SELECT pg_notification_queue_usage() > 0.9
    OR NOT has_function_privilege('pg_notify(text, text)', 'EXECUTE') AS answer";

#[derive(QueryableByName)]
struct Answer {
    #[diesel(sql_type = Bool)]
    answer: bool,
}

/// A write that tells the name to those who listen.
struct Telling<'a, W>(&'a W);

impl<W: QueryFragment<Pg>> QueryFragment<Pg> for Telling<'_, W> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(" RETURNING pg_notify('");
        out.push_sql(CHANNEL);
        out.push_sql("', \"name\")");
        Ok(())
    }
}

impl<W: QueryId> QueryId for Telling<'_, W> {
    type QueryId = Telling<'static, W::QueryId>;
    const HAS_STATIC_QUERY_ID: bool = W::HAS_STATIC_QUERY_ID;
}

impl<W> RunQueryDsl<PgConnection> for Telling<'_, W> {}

impl Session for PgConnection {
    common_questions!();

    fn prepare(&mut self, limits: Limits) -> QueryResult<bool> {
        diesel::sql_query(PREPARE)
            .bind::<Text, _>(millis(limits.lock))
            .bind::<Text, _>(millis(limits.statement))
            .execute(self)?;
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
        Write::upsert(super::Claim, first, next, only_free)
            .get_result(self)
            .optional()
    }

    fn tells_of_releases() -> bool {
        true
    }

    fn listen(&mut self) -> QueryResult<()> {
        self.batch_execute(&format!("LISTEN {CHANNEL}"))
    }

    fn heard(&mut self) -> QueryResult<Vec<String>> {
        let notifications = self.notifications_iter();
        notifications
            .map(|told| told.map(|told| told.payload))
            .collect()
    }

    /// A lock that a fence takes is none to a renewal, so a fenced row is not left out.
    fn renew_all(&mut self, keys: &[Key<'_>], lease_ms: i64) -> QueryResult<Vec<String>> {
        let unlocked = leases::table
            .select(leases::name)
            .filter(statements::any_held_live(keys))
            .for_no_key_update()
            .skip_locked();
        let mine = WhereReturning(NameIn(unlocked), leases::name);
        Write::of(
            super::RenewAll,
            Update,
            statements::extended(lease_ms),
            mine,
        )
        .get_results(self)
    }

    fn is_locked(&mut self, name: &str) -> QueryResult<bool> {
        let row = leases::table
            .select(leases::term)
            .filter(statements::named(name));
        Ok(row
            .for_update()
            .skip_locked()
            .get_result::<i64>(self)
            .optional()?
            .is_none())
    }

    fn lock(&mut self, key: Key<'_>, how: Fencing) -> QueryResult<bool> {
        super::lock(self, key, how, "BEGIN")
    }

    fn check(&mut self) -> QueryResult<Verdict> {
        checks::postgres::check(self)
    }

    /// In one transaction with a lock of its own, so that it also works behind a pooler.
    fn migrate(&mut self, limit: Duration) -> Result<(), BoxError> {
        self.prepare(Limits {
            lock: limit,
            statement: limit,
        })?;
        self.transaction(|conn| {
            diesel::sql_query(MIGRATE_ALONE).execute(conn)?;
            conn.run_pending_migrations(migrations::POSTGRES)?;
            Ok(())
        })
    }
}

fn millis(limit: Duration) -> String {
    // Zero would mean no limit.
    limit.as_millis().max(1).to_string()
}
