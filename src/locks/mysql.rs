//! MySQL and MariaDB: `GET_LOCK`, whose names are the whole server's ([locking functions]).
//!
//! [locking functions]: https://dev.mysql.com/doc/refman/9.4/en/locking-functions.html

use std::sync::Arc;
use std::time::Duration;

use diesel::connection::{Connection, SimpleConnection};
use diesel::mysql::MysqlConnection;
use diesel::prelude::*;
use diesel::result::Error as DieselError;
use diesel::sql_types::{BigInt, Nullable, Text};

use super::LockScope;
use super::error::LockError;
use super::key;
use super::session::LockSession;
use super::target::Target;
use crate::clock::Clock;
use crate::protocol::checks;
use crate::unsupported::Unsupported;

/// The server would end a session that is silent for longer, and a wait that lasts longer. A year is the
/// most that it takes. MariaDB's limit and MySQL's have different names, and each server takes the comment
/// of the other for a comment ([MariaDB], [MySQL]).
///
/// [MariaDB]: https://mariadb.com/kb/en/comment-syntax/
/// [MySQL]: https://dev.mysql.com/doc/refman/9.4/en/comments.html
const PREPARE: &str = "SET SESSION wait_timeout = 31536000
    /*M!100100 , max_statement_time = 0 */ /*!80000 , max_execution_time = 0 */";

const SESSION: &str =
    "SELECT CONNECTION_ID() AS answer, CONNECTION_ID() AS session, DATABASE() AS db";
/// Behind a pooler that gives each statement to another session, nothing is locked by a stranger.
const ACQUIRE: &str = "SELECT IF(CONNECTION_ID() = ?, GET_LOCK(?, ?), NULL) AS answer,
    CONNECTION_ID() AS session, NULL AS db";
const IS_OURS: &str =
    "SELECT IS_USED_LOCK(?) = CONNECTION_ID() AS answer, CONNECTION_ID() AS session, NULL AS db";
const RELEASE: &str = "SELECT RELEASE_LOCK(?) AS answer, CONNECTION_ID() AS session, NULL AS db";

/// The number of the last error, of which Diesel tells the kind alone ([GET DIAGNOSTICS]).
///
/// [GET DIAGNOSTICS]: https://dev.mysql.com/doc/refman/9.4/en/get-diagnostics.html
const DIAGNOSE: &str = "GET DIAGNOSTICS CONDITION 1 @diesel_lease_error = MYSQL_ERRNO";
const ERROR: &str =
    "SELECT CAST(@diesel_lease_error AS SIGNED) AS answer, CONNECTION_ID() AS session, NULL AS db";

/// `ER_USER_LOCK_DEADLOCK`, of MySQL. MariaDB's is 1213, which Diesel tells.
const DEADLOCK: i64 = 3058;

/// Between two looks within the last second of a wait.
const POLL: Duration = Duration::from_millis(20);

#[derive(QueryableByName)]
struct Answer {
    #[diesel(sql_type = Nullable<BigInt>)]
    answer: Option<i64>,
    #[diesel(sql_type = BigInt)]
    session: i64,
    #[diesel(sql_type = Nullable<Text>)]
    db: Option<String>,
}

struct Lock {
    conn: MysqlConnection,
    name: String,
    session: i64,
}

pub(super) fn open(target: &Target, key: &str) -> Result<Box<dyn LockSession>, LockError> {
    let mut conn = target.establish(MysqlConnection::establish)?;
    if let Some(why) = checks::mysql::server(&mut conn)? {
        return Err(LockError::Unsupported(Arc::new(why)));
    }
    diesel::sql_query(PREPARE).execute(&mut conn)?;
    let Answer { session, db, .. } = diesel::sql_query(SESSION).get_result(&mut conn)?;
    let name = match target.scope() {
        LockScope::Server => key.to_owned(),
        LockScope::Database => key::on_server(db.as_deref().unwrap_or_default(), key),
    };
    Ok(Box::new(Lock {
        conn,
        name,
        session,
    }))
}

impl Lock {
    fn told(&self, answer: &Answer) -> Result<Option<i64>, LockError> {
        if answer.session != self.session {
            return Err(LockError::Unsupported(Arc::new(Unsupported::Pooler)));
        }
        Ok(answer.answer)
    }

    fn get_lock(&mut self, seconds: u64) -> Result<bool, LockError> {
        let answer = diesel::sql_query(ACQUIRE)
            .bind::<BigInt, _>(self.session)
            .bind::<Text, _>(&self.name)
            .bind::<BigInt, _>(seconds as i64)
            .get_result(&mut self.conn)
            .map_err(|error| self.explain(error))?;
        match self.told(&answer)? {
            Some(1) => Ok(true),
            Some(0) => Ok(false),
            _ => Err(LockError::Failed),
        }
    }

    fn explain(&mut self, error: DieselError) -> LockError {
        let conn = &mut self.conn;
        let number = conn
            .batch_execute(DIAGNOSE)
            .and_then(|()| diesel::sql_query(ERROR).get_result::<Answer>(conn));
        match number {
            Ok(Answer {
                answer: Some(DEADLOCK),
                ..
            }) => LockError::Deadlock,
            _ => error.into(),
        }
    }

    fn ask(&mut self, query: &str) -> Result<Option<i64>, LockError> {
        let answer = diesel::sql_query(query)
            .bind::<Text, _>(&self.name)
            .get_result(&mut self.conn)?;
        self.told(&answer)
    }
}

impl LockSession for Lock {
    /// MySQL 9.7 takes whole seconds only, so what is left of the last one is waited for here.
    fn acquire(&mut self, timeout: Duration) -> Result<bool, LockError> {
        let clock = Clock::Machine;
        let start = clock.now();
        if self.get_lock(timeout.as_secs())? {
            return Ok(true);
        }
        let until = start.after(timeout);
        while clock.now() < until {
            clock.sleep(POLL.min(until.since(clock.now())));
            if self.get_lock(0)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn is_ours(&mut self) -> Result<bool, LockError> {
        Ok(self.ask(IS_OURS)? == Some(1))
    }

    fn release(&mut self) -> Result<bool, LockError> {
        Ok(self.ask(RELEASE)? == Some(1))
    }
}
