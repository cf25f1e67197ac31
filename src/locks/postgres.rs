//! PostgreSQL: session advisory locks, which are the database's ([advisory locks]).
//!
//! [advisory locks]: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS

use std::sync::Arc;
use std::time::Duration;

use diesel::connection::Connection;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Integer, Text};

use super::error::LockError;
use super::key;
use super::session::LockSession;
use super::target::Target;
use crate::clock::Clock;
use crate::protocol::checks;
use crate::timings::whole_millis;
use crate::unsupported::Unsupported;

/// Settings that a server does not know are left out.
const PREPARE: &str = "SELECT set_config(name, value, false) FROM (VALUES
    ('statement_timeout', '0'),
    ('idle_session_timeout', '0'),
    ('idle_in_transaction_session_timeout', '0'),
    ('transaction_timeout', '0')
    ) AS wanted (name, value) WHERE current_setting(name, true) IS NOT NULL";

const SESSION: &str = "SELECT pg_backend_pid() AS pid";
const LIMIT_WAIT: &str = "SELECT set_config('lock_timeout', $1, false)";

/// Behind a pooler that gives each statement to another session, nothing is locked by a stranger.
const TRY: &str =
    "SELECT CASE WHEN pg_backend_pid() = $2 THEN pg_try_advisory_lock($1) ELSE false END
    AS granted, pg_backend_pid() AS pid";
/// It is void, which is not null: granted.
const WAIT: &str = "SELECT CASE WHEN pg_backend_pid() = $2 THEN pg_advisory_lock($1) IS NOT NULL
    ELSE false END AS granted, pg_backend_pid() AS pid";

const RELEASE: &str =
    "SELECT CASE WHEN pg_backend_pid() = $2 THEN pg_advisory_unlock($1) ELSE false END
    AS granted, pg_backend_pid() AS pid";

/// A key of 64 bits stands in two columns, with 1 in the third
/// ([pg_locks](https://www.postgresql.org/docs/current/view-pg-locks.html)).
const IS_OURS: &str = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted
    AND pid = $2 AND objsubid = 1
    AND classid = (($1 >> 32) & 4294967295)::oid AND objid = ($1 & 4294967295)::oid
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS granted,
    pg_backend_pid() AS pid";

#[derive(QueryableByName)]
struct Answer {
    #[diesel(sql_type = Bool)]
    granted: bool,
    #[diesel(sql_type = Integer)]
    pid: i32,
}

#[derive(QueryableByName)]
struct Backend {
    #[diesel(sql_type = Integer)]
    pid: i32,
}

struct Lock {
    conn: PgConnection,
    number: i64,
    pid: i32,
}

pub(super) fn open(target: &Target, key: &str) -> Result<Box<dyn LockSession>, LockError> {
    let mut conn = target.establish(PgConnection::establish)?;
    if let Some(why) = checks::postgres::server(&mut conn)? {
        return Err(LockError::Unsupported(Arc::new(why)));
    }
    diesel::sql_query(PREPARE).execute(&mut conn)?;
    let Backend { pid } = diesel::sql_query(SESSION).get_result(&mut conn)?;
    Ok(Box::new(Lock {
        conn,
        number: key::number(key),
        pid,
    }))
}

impl Lock {
    fn ask(&mut self, query: &str) -> Result<bool, LockError> {
        let answer: Answer = diesel::sql_query(query)
            .bind::<BigInt, _>(self.number)
            .bind::<Integer, _>(self.pid)
            .get_result(&mut self.conn)?;
        if answer.pid != self.pid {
            return Err(LockError::Unsupported(Arc::new(Unsupported::Pooler)));
        }
        Ok(answer.granted)
    }
}

impl LockSession for Lock {
    /// A wait that ends by the server's limit is an error like others. That it was the limit is told
    /// by the time, and not by the text.
    fn acquire(&mut self, timeout: Duration) -> Result<bool, LockError> {
        if self.ask(TRY)? {
            return Ok(true);
        }
        if timeout.is_zero() {
            return Ok(false);
        }
        let limit = whole_millis(timeout);
        diesel::sql_query(LIMIT_WAIT)
            .bind::<Text, _>(limit.to_string())
            .execute(&mut self.conn)?;
        let clock = Clock::Machine;
        let start = clock.now();
        match self.ask(WAIT) {
            Err(error @ LockError::Database(_)) => {
                let is_over = clock.now().since(start) >= timeout;
                // Granted as the limit was reached: the statement fails, and the session has the lock.
                if self.is_ours()? {
                    Ok(true)
                } else if is_over {
                    Ok(false)
                } else {
                    Err(error)
                }
            }
            answer => answer,
        }
    }

    fn is_ours(&mut self) -> Result<bool, LockError> {
        self.ask(IS_OURS)
    }

    fn release(&mut self) -> Result<bool, LockError> {
        self.ask(RELEASE)
    }
}
