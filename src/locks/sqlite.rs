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
use diesel::sqlite::SqliteConnection;

use super::error::LockError;
use super::key;
use super::session::LockSession;
use super::target::Target;
use crate::clock::Clock;
use crate::timings::whole_millis;

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
    /// A wait that ends by the busy timeout is an error like others. That it was the timeout is told by
    /// the time, and not by the text.
    fn acquire(&mut self, timeout: Option<Duration>) -> Result<bool, LockError> {
        let limit = timeout.map_or(i32::MAX as u128, whole_millis);
        let limit = limit.min(i32::MAX as u128);
        self.conn
            .batch_execute(&format!("PRAGMA busy_timeout = {limit}"))?;
        let clock = Clock::Machine;
        let start = clock.now();
        match self.conn.batch_execute("BEGIN EXCLUSIVE") {
            Ok(()) => {
                self.file = identity(&self.path);
                Ok(true)
            }
            Err(error) => {
                let waited = clock.now().since(start);
                // Looked at by its name: to open and close it here would end this process's locks on it.
                let can_be_locked =
                    fs::metadata(&self.path).is_ok_and(|file| !file.permissions().readonly());
                if timeout.is_some_and(|timeout| waited >= timeout) && can_be_locked {
                    Ok(false)
                } else {
                    Err(error.into())
                }
            }
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
