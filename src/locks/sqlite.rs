//! SQLite: a file beside the database's, for each key, locked by SQLite's own means ([file locking]).
//!
//! The file is an empty SQLite database, in which an exclusive transaction is open as long as the lock
//! is held. The system ends it with the process. The file stays.
//!
//! Hazard: whoever deletes the file of a lock that is held makes two locks of one. The keep-alive
//! notices that.
//!
//! [file locking]: https://www.sqlite.org/lockingv3.html

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use diesel::connection::{Connection, SimpleConnection};
use diesel::prelude::*;
use diesel::result::Error as DieselError;
use diesel::sqlite::SqliteConnection;

use super::error::LockError;
use super::key;
use super::session::LockSession;
use super::target::Target;
use crate::timings::whole_millis;

/// What `SQLITE_BUSY` is in words ([sqlite3_errstr]), the only ones of an error of SQLite's that Diesel hands
/// on.
///
/// [sqlite3_errstr]: https://www.sqlite.org/c3ref/errcode.html
const BUSY: &str = "database is locked";

struct Lock {
    conn: SqliteConnection,
    path: String,
    /// The file that is locked.
    file: Option<(u64, u64)>,
}

pub(super) fn open(target: &Target, key: &str) -> Result<Box<dyn LockSession>, LockError> {
    let path = format!("{}{}", target.path(), key::file_suffix(key));
    let conn = target.establish(|_| SqliteConnection::establish(&path))?;
    Ok(Box::new(Lock {
        conn,
        path,
        file: None,
    }))
}

fn identity(path: &str) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

impl LockSession for Lock {
    fn acquire(&mut self, timeout: Duration) -> Result<bool, LockError> {
        let limit = whole_millis(timeout);
        self.conn
            .batch_execute(&format!("PRAGMA busy_timeout = {limit}"))?;
        match self.conn.batch_execute("BEGIN EXCLUSIVE") {
            Ok(()) => {
                self.file = identity(&self.path);
                Ok(true)
            }
            Err(DieselError::DatabaseError(_, why)) if why.message() == BUSY => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn is_ours(&mut self) -> Result<bool, LockError> {
        diesel::sql_query("SELECT 1 FROM sqlite_master").execute(&mut self.conn)?;
        Ok(self.file.is_some() && identity(&self.path) == self.file)
    }

    fn release(&mut self) -> Result<bool, LockError> {
        let was_ours = self.is_ours()?;
        self.conn.batch_execute("ROLLBACK")?;
        Ok(was_ours)
    }
}
