//! MySQL's and MariaDB's words.
//!
//! A claim is two statements. The upsert decides: under the lock of the row (or of the gap, for a
//! new name) it writes either all of its columns or none. What it did is then read, because Diesel
//! connects with `CLIENT_FOUND_ROWS`, under which an insert and an upsert that changed nothing both
//! count one row ([affected rows]). Each is a transaction of its own: in one transaction the two
//! deadlock under load.
//!
//! The clock is the start of the statement. `UNIX_TIMESTAMP()` is called without an argument, which
//! would pass through the session's time zone, where an hour of each autumn is ambiguous
//! ([UNIX_TIMESTAMP]).
//!
//! Hazard: the clock of a statement that waited for a row is as old as the wait. That errs to the
//! safe side: a shorter lease, a claim refused.
//!
//! [affected rows]: https://dev.mysql.com/doc/refman/9.4/en/insert-on-duplicate.html
//! [UNIX_TIMESTAMP]: https://dev.mysql.com/doc/refman/9.4/en/date-and-time-functions.html#function_unix-timestamp

use std::time::Duration;

use diesel::connection::{LoadConnection, TransactionManager};
use diesel::mysql::{Mysql, MysqlConnection};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::{BigInt, Double, Nullable};
use diesel_migrations::MigrationHarness;

use super::statements::{self, End, Now, OrUpdate, Write};
use super::{
    Engine, Fencing, Key, LeaseConnection, Limits, NewClaim, Row, Session, Verdict, checks,
    common_engine, common_questions,
};
use crate::error::BoxError;
use crate::guard::LeaseBackend;
use crate::migrations;
use crate::schema::diesel_leases as leases;
use crate::unsupported::Unsupported;

impl QueryFragment<Mysql> for Now {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Mysql>) -> QueryResult<()> {
        // MySQL's UNIX_TIMESTAMP is unsigned, and so would be a difference with it.
        out.push_sql("(CAST(UNIX_TIMESTAMP() AS SIGNED) * 1000 + MICROSECOND(NOW(3)) DIV 1000)");
        Ok(())
    }
}

impl QueryFragment<Mysql> for OrUpdate {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Mysql>) -> QueryResult<()> {
        out.push_sql(" ON DUPLICATE KEY UPDATE ");
        Ok(())
    }
}

/// READ COMMITTED would be refused where the binary log is statement based.
const ISOLATION: &str = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ";

/// `lock_wait_timeout` is for the table, `innodb_lock_wait_timeout` for the row; both in whole
/// seconds.
const LIMIT_LOCKS: &str =
    "SET SESSION autocommit = 1, lock_wait_timeout = ?, innodb_lock_wait_timeout = ?";

const IS_MARIADB: &str = "SELECT VERSION() LIKE '%MariaDB%' AS answer";

/// In seconds, for every statement ([manual]).
///
/// [manual]: https://mariadb.com/kb/en/server-system-variables/#max_statement_time
const LIMIT_STATEMENTS_MARIADB: &str = "SET SESSION max_statement_time = ?";

const HAS_SNAPSHOT_ISOLATION: &str =
    "SELECT COUNT(*) AS answer FROM information_schema.SYSTEM_VARIABLES
    WHERE VARIABLE_NAME = 'INNODB_SNAPSHOT_ISOLATION'";

/// In whole seconds.
const LIMIT_SILENCE: &str = "SET SESSION wait_timeout = ?";

/// In milliseconds, for reads only ([manual]).
///
/// [manual]: https://dev.mysql.com/doc/refman/9.4/en/server-system-variables.html#sysvar_max_execution_time
const LIMIT_STATEMENTS_MYSQL: &str = "SET SESSION max_execution_time = ?";

/// The name of a lock is the whole server's, so it has the database in it, and at most 64 characters
/// ([GET_LOCK]).
///
/// [GET_LOCK]: https://dev.mysql.com/doc/refman/9.4/en/locking-functions.html#function_get-lock
const MIGRATE_ALONE: &str =
    "SELECT GET_LOCK(CONCAT('migrate:', SHA2(DATABASE(), 224)), ?) AS answer";
const MIGRATED: &str = "SELECT RELEASE_LOCK(CONCAT('migrate:', SHA2(DATABASE(), 224))) AS answer";

#[derive(QueryableByName)]
struct Answer {
    #[diesel(sql_type = Nullable<BigInt>)]
    answer: Option<i64>,
}

impl LeaseBackend for Mysql {}

impl Engine for Mysql {
    const ONE_WRITER: bool = false;
    const ENDS_BEHIND_ERRORS: bool = true;
    /// Diesel allows several statements in one before it, and forbids that after it: three round trips.
    const PREPARES_COMMIT: bool = true;

    common_engine!(mysql);

    /// A locking read sees the newest row at every isolation level ([locking reads]), except on
    /// MariaDB with `innodb_snapshot_isolation`, where it fails when the row has changed since the
    /// transaction's snapshot, be it by our own renewal ([setting]).
    ///
    /// [locking reads]: https://dev.mysql.com/doc/refman/9.4/en/innodb-locking-reads.html
    /// [setting]: https://mariadb.com/kb/en/innodb-system-variables/#innodb_snapshot_isolation
    fn fence<C>(conn: &mut C, key: Key<'_>, how: Fencing) -> QueryResult<bool>
    where
        C: LoadConnection<Backend = Self>,
    {
        let mine = leases::table
            .select(leases::term)
            .filter(statements::held_as(key.name, key.holder, key.term))
            .for_update();
        let term = if how.has_snapshot_isolation {
            ReadNewest(mine).get_result::<i64>(conn)
        } else {
            mine.get_result::<i64>(conn)
        };
        Ok(term.optional()?.is_some())
    }

    /// There a locking read fails, and the transaction goes on.
    fn is_read_only<C>(_: &mut C) -> QueryResult<bool>
    where
        C: LoadConnection<Backend = Self>,
    {
        Ok(false)
    }

    fn refuses_fence<C>(conn: &mut C) -> QueryResult<Option<Unsupported>>
    where
        C: LoadConnection<Backend = Self>,
    {
        let nobody = leases::table
            .select(leases::term)
            .filter(statements::named(""));
        match nobody.for_update().execute(conn) {
            Ok(_) | Err(DieselError::DatabaseError(DatabaseErrorKind::ReadOnlyTransaction, _)) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// `UPDATE diesel_leases` over those of `names` that nobody has locked. As that query is `DISTINCT`, it is
/// run by itself and not merged into the update, which would wait for a lock after all
/// ([derived tables]); and it comes first, since an update that went through the whole table would too.
///
/// [derived tables]: https://dev.mysql.com/doc/refman/9.4/en/derived-table-optimization.html
struct UpdateUnlocked<Names>(Names);

impl<Names: QueryFragment<Mysql>> QueryFragment<Mysql> for UpdateUnlocked<Names> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Mysql>) -> QueryResult<()> {
        out.push_sql("UPDATE (");
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(
            " FOR UPDATE SKIP LOCKED) AS `unlocked`
            STRAIGHT_JOIN `diesel_leases` FORCE INDEX (PRIMARY) USING (`name`) SET ",
        );
        Ok(())
    }
}

/// A read for which the snapshot's isolation is off
/// ([SET STATEMENT](https://mariadb.com/kb/en/set-statement/)).
#[derive(QueryId)]
struct ReadNewest<Read>(Read);

impl<Read: QueryFragment<Mysql>> QueryFragment<Mysql> for ReadNewest<Read> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Mysql>) -> QueryResult<()> {
        out.push_sql("SET STATEMENT innodb_snapshot_isolation=OFF FOR ");
        self.0.walk_ast(out)
    }
}

impl<Read: Query> Query for ReadNewest<Read> {
    type SqlType = Read::SqlType;
}

impl<Read, Conn> RunQueryDsl<Conn> for ReadNewest<Read> {}

impl LeaseConnection for MysqlConnection {}

/// Carries out what gives a name back. Whether there was such a row.
fn free<W>(conn: &mut MysqlConnection, write: W) -> QueryResult<bool>
where
    W: QueryFragment<Mysql> + QueryId + RunQueryDsl<MysqlConnection>,
{
    Ok(write.execute(conn)? == 1)
}

impl Session for MysqlConnection {
    common_questions!();

    fn prepare(&mut self, limits: Limits) -> QueryResult<bool> {
        diesel::sql_query(ISOLATION).execute(self)?;
        let seconds = seconds(limits.lock);
        diesel::sql_query(LIMIT_LOCKS)
            .bind::<BigInt, _>(seconds)
            .bind::<BigInt, _>(seconds)
            .execute(self)?;
        let mariadb: Answer = diesel::sql_query(IS_MARIADB).get_result(self)?;
        if mariadb.answer == Some(1) {
            diesel::sql_query(LIMIT_STATEMENTS_MARIADB)
                .bind::<Double, _>(limits.statement.as_secs_f64())
                .execute(self)?;
            let setting: Answer = diesel::sql_query(HAS_SNAPSHOT_ISOLATION).get_result(self)?;
            return Ok(setting.answer == Some(1));
        }
        diesel::sql_query(LIMIT_STATEMENTS_MYSQL)
            .bind::<BigInt, _>(limits.statement.as_millis().max(1) as i64)
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
        let next = statements::next_if_free(holder, instance, *lease_ms);
        let first = diesel::insert_into(leases::table).values(first);
        Write::upsert(super::Claim, first, next, End).execute(self)?;
        let row = self.read(name)?;
        Ok(row.filter(|row| row.holder == *holder).map(|row| row.term))
    }

    /// An update says neither which rows it has changed nor passes over those that are locked. So the
    /// new end is read from the clock beforehand, by which the rows that got it are found, and the
    /// update goes over a list of unlocked rows.
    fn renew_all(&mut self, keys: &[Key<'_>], lease_ms: i64) -> QueryResult<Vec<String>> {
        let end = diesel::select(Now + lease_ms).get_result::<i64>(self)?;
        let unlocked = leases::table
            .select(leases::name)
            .filter(statements::any_held_live(keys))
            .distinct();
        let start = UpdateUnlocked(unlocked);
        let extended = leases::expires_at_ms.eq(end);
        let renewed = Write::of(super::RenewAll, start, extended, End).execute(self)?;
        if renewed == keys.len() {
            return Ok(keys.iter().map(|key| key.name.to_owned()).collect());
        }
        leases::table
            .select(leases::name)
            .filter(statements::any_held(keys).and(leases::expires_at_ms.ge(end)))
            .load(self)
    }

    /// `SKIP LOCKED` is MySQL 8's and MariaDB 10.6's.
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

    /// The server ends a session that is silent for longer, and with it the lock
    /// ([manual](https://dev.mysql.com/doc/refman/9.4/en/server-system-variables.html#sysvar_wait_timeout)).
    fn lock(&mut self, key: Key<'_>, how: Fencing) -> QueryResult<bool> {
        diesel::sql_query(LIMIT_SILENCE)
            .bind::<BigInt, _>(seconds(how.idle))
            .execute(self)?;
        super::lock(self, key, how, "BEGIN")
    }

    fn check(&mut self) -> QueryResult<Verdict> {
        checks::mysql::check(self)
    }

    /// Under a lock of the session, because a `CREATE TABLE` commits whatever is open.
    fn migrate(&mut self, limit: Duration) -> Result<(), BoxError> {
        self.prepare(Limits {
            lock: limit,
            statement: limit,
        })?;
        let alone: Answer = diesel::sql_query(MIGRATE_ALONE)
            .bind::<BigInt, _>(seconds(limit))
            .get_result(self)?;
        if alone.answer != Some(1) {
            return Err("another session kept the lock of the migrations".into());
        }
        let migrated = self.run_pending_migrations(migrations::MYSQL).map(drop);
        let freed: QueryResult<Answer> = diesel::sql_query(MIGRATED).get_result(self);
        migrated?;
        freed?;
        Ok(())
    }
}

fn seconds(limit: Duration) -> i64 {
    limit.as_secs().max(1) as i64
}
