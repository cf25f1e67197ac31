//! How a library session is made: from a URL, or by a connection manager that was given.
//!
//! Invariant: a URL is parsed before anything is sent, and its password leaves this file in no
//! error, log entry or `Debug`: what a client library says about a failed connection is passed on
//! with the password struck out.
//!
//! Each engine's file says what is its own in this; an engine that is not built in refuses.
#![allow(
    clippy::duplicate_mod,
    reason = "an engine that is not built in has its file from another"
)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use diesel::connection::Connection;
use diesel::result::{ConnectionError, ConnectionResult};
use percent_encoding::percent_decode_str;
use r2d2::ManageConnection;

use crate::error::Error;
use crate::protocol::{LeaseConnection, Limits, Session};

#[cfg_attr(not(feature = "mysql"), path = "connect/not_built.rs")]
mod mysql;
#[cfg_attr(not(feature = "postgres"), path = "connect/not_built.rs")]
mod postgres;
#[cfg_attr(not(feature = "sqlite"), path = "connect/not_built.rs")]
mod sqlite;

pub(crate) use postgres::url as postgres_url;
pub(crate) use sqlite::path as sqlite_path;

/// How long a statement of the library waits for a lock, on engines that lock rows. Short, so that a
/// renewal behind somebody's lock is tried often within its deadline, and a claim that meets a fence
/// says "held" soon.
pub(crate) const LOCK: Duration = Duration::from_secs(1);

/// Makes sessions. Clones make the same.
#[derive(Clone)]
pub(crate) struct Connector {
    connect: Connect,
    limits: Limits,
    tells_of_releases: bool,
    /// Found out when a session is made: see [`Fencing`](crate::protocol::Fencing).
    has_snapshot_isolation: Arc<AtomicBool>,
}

impl Connector {
    /// From a database URL, or the path of a SQLite file.
    pub(crate) fn from_url(url: &str, attempt: Duration) -> Result<Connector, Error> {
        match url.split_once("://") {
            Some(("postgres" | "postgresql", _)) => postgres::connect(url, attempt),
            Some(("mysql", _)) => mysql::connect(url, attempt),
            Some(("sqlite", path)) => sqlite::connect(path, attempt),
            Some(_) => Err(refused("the scheme is none of postgres, mysql and sqlite")),
            None => sqlite::connect(url, attempt),
        }
    }

    pub(crate) fn from_manager<M>(manager: M, attempt: Duration) -> Connector
    where
        M: ManageConnection,
        M::Connection: LeaseConnection,
    {
        let connect = move || match manager.connect() {
            Ok(connection) => Ok(Box::new(connection) as Box<dyn Session>),
            Err(error) => Err(ConnectionError::BadConnection(without_url(
                &error.to_string(),
            ))),
        };
        Connector::new::<M::Connection>(Arc::new(connect), attempt)
    }

    /// Of sessions that are such connections.
    fn new<C: Session>(connect: Connect, attempt: Duration) -> Connector {
        let limits = Limits {
            // Half: what a claim that met a lock does next is within its bound too.
            lock: LOCK.min(attempt / 2),
            statement: attempt,
        };
        Connector {
            connect,
            limits,
            tells_of_releases: C::tells_of_releases(),
            has_snapshot_isolation: Arc::default(),
        }
    }

    /// A session whose settings are set.
    pub(super) fn connect(&self) -> ConnectionResult<Box<dyn Session>> {
        let mut session = (self.connect)()?;
        let has_snapshot_isolation = session
            .prepare(self.limits)
            .map_err(ConnectionError::CouldntSetupConfiguration)?;
        self.has_snapshot_isolation
            .store(has_snapshot_isolation, Ordering::Relaxed);
        Ok(session)
    }

    /// Whether a session can hear of names that are given back.
    pub(super) fn tells_of_releases(&self) -> bool {
        self.tells_of_releases
    }

    #[cfg(test)]
    pub(super) fn telling(self, tells_of_releases: bool) -> Connector {
        Connector {
            tells_of_releases,
            ..self
        }
    }

    pub(super) fn has_snapshot_isolation(&self) -> bool {
        self.has_snapshot_isolation.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

type Connect = Arc<dyn Fn() -> ConnectionResult<Box<dyn Session>> + Send + Sync>;

fn refused(why: &str) -> Error {
    Error::Connect(ConnectionError::InvalidConnectionUrl(why.to_owned()))
}

fn establish<C: Connection + Session + 'static>(url: String, attempt: Duration) -> Connector {
    let secrets = secrets(&url);
    let connect = move || match C::establish(&url) {
        Ok(connection) => Ok(Box::new(connection) as Box<dyn Session>),
        Err(error) => Err(without(&secrets, error)),
    };
    Connector::new::<C>(Arc::new(connect), attempt)
}

/// What must not be shown of a URL: its passwords, as they are written and as they are meant.
pub(crate) fn secrets(url: &str) -> Vec<String> {
    let Some((_, rest)) = url.split_once("://") else {
        return Vec::new();
    };
    let (before_query, query) = rest.split_once('?').unwrap_or((rest, ""));
    // A password may hold an unescaped `@` or `/`: the last `@` ends it.
    let password = |part: &str| {
        let (user_info, _) = part.rsplit_once('@')?;
        Some(user_info.split_once(':')?.1.to_owned())
    };
    let in_authority = password(before_query);
    // Or what looks like a query is a part of it.
    let beyond = password(rest).filter(|found| !is_port(found));
    let in_query = query.split('&').filter_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        let key = percent_decode_str(key).decode_utf8_lossy();
        matches!(&*key, "password" | "sslpassword").then(|| value.to_owned())
    });
    let mut secrets = Vec::new();
    for written in in_authority.into_iter().chain(beyond).chain(in_query) {
        let meant = percent_decode_str(&written)
            .decode_utf8_lossy()
            .into_owned();
        // Where it is not escaped, a client library takes a part of it for the host and so on.
        let parts = written.split(DELIMITERS).filter(|part| part.len() > 2);
        secrets.extend(parts.map(str::to_owned));
        secrets.extend([written, meant]);
    }
    secrets.retain(|secret| !secret.is_empty());
    secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    secrets
}

const DELIMITERS: [char; 9] = ['@', ':', '/', '?', '#', '[', ']', '&', '='];

/// Whether what follows a colon begins with a port, so that there is no user.
fn is_port(text: &str) -> bool {
    let port = text.split(['/', '?']).next().unwrap_or_default();
    port.chars().all(|c| c.is_ascii_digit())
}

/// A manager's error may repeat its URL. Of that no more is left than a host and a path.
fn without_url(text: &str) -> String {
    let Some((before, url)) = text.split_once("://") else {
        return text.to_owned();
    };
    let shown = match url.rsplit_once('@') {
        // Or that `@` is one of a password in the query.
        Some((user_info, rest)) if !user_info.contains('?') => rest,
        _ => "",
    };
    let shown = shown.split('?').next().unwrap_or_default();
    format!("{before}://***@{shown}")
}

pub(crate) fn without(secrets: &[String], error: ConnectionError) -> ConnectionError {
    let text = |text: String| {
        secrets
            .iter()
            .fold(text, |text, secret| text.replace(secret, "***"))
    };
    match error {
        ConnectionError::BadConnection(why) => ConnectionError::BadConnection(text(why)),
        ConnectionError::InvalidConnectionUrl(why) => {
            ConnectionError::InvalidConnectionUrl(text(why))
        }
        // It names the byte of the URL and no text of it, but its `Debug` prints the whole.
        ConnectionError::InvalidCString(_) => {
            ConnectionError::InvalidConnectionUrl("the URL has a NUL byte".to_owned())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests;
