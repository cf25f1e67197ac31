//! Named locks: the engine's own session locks, on a connection of their own, kept alive.
//!
//! A lock belongs to its connection and vanishes with it. There is no table, no term and no fence: use
//! it where the work touches nothing that a stale holder could harm, or where the lock must be shared
//! with other programs.
//!
//! | | lease | named lock |
//! |---|---|---|
//! | is | a row | the server's lock of a session: `GET_LOCK`, an advisory lock, a locked file |
//! | needs | a table | a connection for each lock that is held |
//! | free after a crash | when it runs out | when the server notices: at once for a process, by TCP for a host |
//! | noticed when lost | at the local deadline, whatever the network does | at the latest a keep-alive interval and its timeout later |
//! | a stale holder's commit | is refused | goes through |
//! | shared with other programs | no | MySQL and MariaDB, by [`LockScope::Server`] |
//!
//! Invariant: nobody but the lock's own thread touches its connection, and that connection is never
//! used for another lock. On any doubt it is closed, so no lock leaks.
//!
//! Hazard: between the end of the session and its being noticed another may have the lock.
#![allow(
    clippy::duplicate_mod,
    reason = "an engine that is not built in has its file from another"
)]

use std::convert::Infallible;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use crossbeam_channel::Receiver;

use crate::clock::Clock;
use crate::error::chain;
use crate::loss::{Signal, StopToken, is_disconnected, wait};

mod error;
mod key;
#[cfg_attr(not(feature = "mysql"), path = "not_built.rs")]
mod mysql;
#[cfg_attr(not(feature = "postgres"), path = "not_built.rs")]
mod postgres;
mod session;
#[cfg_attr(not(all(feature = "sqlite", unix)), path = "not_built.rs")]
mod sqlite;
mod target;

pub use error::LockError;
pub use key::InvalidKey;
use session::{LockSession, Session};
use target::Target;

/// Enough for handlers that log.
const STACK: usize = 256 * 1024;

/// The longest that a server is asked to wait at once. What it takes for a limit differs.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// What is called when a lock is lost.
type OnLost = Arc<dyn Fn(&LockError) + Send + Sync>;

/// Among whom a key means one lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum LockScope {
    /// Those that use this crate on the same database. The same on every engine.
    #[default]
    Database,
    /// All programs on the server that use `GET_LOCK`: the key is its name, as it is. On MySQL and
    /// MariaDB only. MySQL compares such names without case.
    Server,
}

/// The named locks of one database.
///
/// Cheap to clone. It has no connection and no thread of its own; each lock that is held has one
/// connection and two threads.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_lease::locks::NamedLocks;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("app.db");
/// # let path = path.to_str().unwrap();
/// let locks = NamedLocks::connect(path)?;
/// let lock = locks.acquire("import", Duration::from_secs(5))?;
/// assert!(locks.try_acquire("import")?.is_none());
/// lock.release()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct NamedLocks(Arc<Shared>);

/// Makes a session for the lock of a key, which has nothing locked yet.
type Open = Box<dyn Fn(&str) -> Result<Box<dyn LockSession>, LockError> + Send + Sync>;

struct Shared {
    open: Open,
    scope: LockScope,
    keep_alive_interval: Duration,
    keep_alive_timeout: Duration,
    release_timeout: Duration,
    on_keep_alive_error: Option<OnLost>,
    clock: Clock,
}

impl NamedLocks {
    /// Locks in the database at `url`, with default settings. The URLs are those of
    /// [`Leases::connect`](crate::Leases::connect).
    ///
    /// # Errors
    ///
    /// As [`Builder::build`].
    pub fn connect(url: &str) -> Result<NamedLocks, LockError> {
        NamedLocks::builder().build(url)
    }

    /// For other settings than the defaults.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Acquires the lock of `key`, and waits for it at most `timeout`; [`Duration::MAX`] is no limit.
    ///
    /// Two acquisitions of one key exclude each other, also within a process.
    ///
    /// # Blocking
    ///
    /// At most `timeout` and one [`keep_alive_timeout`](Builder::keep_alive_timeout). It connects
    /// first, which is some four round trips, and then waits in steps of at most that: so a wait that has no
    /// limit ends within two of them when the server or the network stands still.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidKey`] and [`LockError::InvalidTimeout`] before anything is sent;
    /// [`LockError::Timeout`]; [`LockError::Failed`]; [`LockError::Deadlock`];
    /// [`LockError::Unsupported`] on a replica, a server that is read-only, Galera, several primaries,
    /// or behind a pooler that changes the session between statements; [`LockError::Connect`],
    /// [`LockError::Database`], [`LockError::Spawn`].
    pub fn acquire(&self, key: &str, timeout: Duration) -> Result<NamedLock, LockError> {
        self.acquire_with(key, timeout, AcquireOptions::new())
    }

    /// Acquires the lock of `key` if it is free. `None`: it is held.
    ///
    /// # Blocking
    ///
    /// At most one [`keep_alive_timeout`](Builder::keep_alive_timeout).
    ///
    /// # Errors
    ///
    /// As [`acquire`](NamedLocks::acquire). Without an answer in time it is [`LockError::Timeout`].
    pub fn try_acquire(&self, key: &str) -> Result<Option<NamedLock>, LockError> {
        self.lock(key, Duration::ZERO, AcquireOptions::new())
    }

    /// [`acquire`](NamedLocks::acquire), with a handler of the loss or a token that ends the wait.
    ///
    /// # Blocking
    ///
    /// As [`acquire`](NamedLocks::acquire).
    ///
    /// # Errors
    ///
    /// As [`acquire`](NamedLocks::acquire), and [`LockError::Stopped`].
    pub fn acquire_with(
        &self,
        key: &str,
        timeout: Duration,
        options: AcquireOptions,
    ) -> Result<NamedLock, LockError> {
        key::validate(key, self.0.scope).map_err(LockError::InvalidKey)?;
        if timeout.is_zero() {
            return Err(LockError::InvalidTimeout);
        }
        self.lock(key, timeout, options)?.ok_or(LockError::Timeout)
    }

    fn lock(
        &self,
        key: &str,
        timeout: Duration,
        options: AcquireOptions,
    ) -> Result<Option<NamedLock>, LockError> {
        let Shared {
            scope,
            keep_alive_timeout: step,
            clock,
            ..
        } = &*self.0;
        key::validate(key, *scope).map_err(LockError::InvalidKey)?;
        let stop = options.stop.as_ref();
        if stop.is_some_and(StopToken::is_stopped) {
            return Err(LockError::Stopped);
        }
        let due = clock.now().after(timeout).after(*step);
        let session = Session::start(clock)?;
        let (locks, opened) = (self.clone(), key.to_owned());
        session.ask(*step, stop, move |place| {
            *place = Some((locks.0.open)(&opened)?);
            Ok::<_, LockError>(())
        })??;
        let until = clock.now().after(timeout);
        loop {
            // In steps, so that a server that stands still is noticed however long the wait may be.
            let now = clock.now();
            let wait = until.since(now).min(*step).min(LONGEST_WAIT);
            let bound = due.since(now).min(wait.saturating_add(*step));
            let granted = session.ask(bound, stop, move |place| match place {
                Some(session) => session.acquire(wait),
                None => Err(LockError::Timeout),
            })??;
            if granted {
                let (locks, key) = (self.clone(), key.to_owned());
                return NamedLock::hold(locks, key, session, options.on_lost).map(Some);
            }
            if clock.now() >= until {
                return Ok(None);
            }
        }
    }
}

impl fmt::Debug for NamedLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamedLocks")
            .field("scope", &self.0.scope)
            .finish_non_exhaustive()
    }
}

/// The settings of [`NamedLocks`].
#[derive(Clone)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct Builder {
    keep_alive_interval: Duration,
    keep_alive_timeout: Duration,
    release_timeout: Duration,
    scope: LockScope,
    on_keep_alive_error: Option<OnLost>,
}

impl Default for Builder {
    fn default() -> Builder {
        Builder {
            keep_alive_interval: Duration::from_secs(30),
            keep_alive_timeout: Duration::from_secs(10),
            release_timeout: Duration::from_secs(10),
            scope: LockScope::Database,
            on_keep_alive_error: None,
        }
    }
}

impl Builder {
    /// How often the lock's session is asked whether it has the lock. Zero is ignored. Defaults to
    /// 30 s: below what proxies and firewalls take for a dead connection.
    pub fn keep_alive_interval(mut self, interval: Duration) -> Builder {
        if !interval.is_zero() {
            self.keep_alive_interval = interval;
        }
        self
    }

    /// How long an answer to that is waited for, and how long an acquisition may take beyond its own
    /// timeout. Zero is ignored. Defaults to 10 s.
    pub fn keep_alive_timeout(mut self, timeout: Duration) -> Builder {
        if !timeout.is_zero() {
            self.keep_alive_timeout = timeout;
        }
        self
    }

    /// How long a release may take. Zero is ignored. Defaults to 10 s.
    pub fn release_timeout(mut self, timeout: Duration) -> Builder {
        if !timeout.is_zero() {
            self.release_timeout = timeout;
        }
        self
    }

    /// Among whom a key means one lock. Defaults to [`LockScope::Database`].
    pub fn scope(mut self, scope: LockScope) -> Builder {
        self.scope = scope;
        self
    }

    /// What is called when a lock is lost, before the lock's own handler, on the thread that noticed.
    /// It may release the lock. A panic in it is caught. Defaults to nothing.
    pub fn on_keep_alive_error(
        mut self,
        handler: impl Fn(&LockError) + Send + Sync + 'static,
    ) -> Builder {
        self.on_keep_alive_error = Some(Arc::new(handler));
        self
    }

    /// Locks in the database at `url`. It connects when the first lock is acquired.
    ///
    /// # Errors
    ///
    /// [`LockError::Connect`] for a URL that no engine reads; [`LockError::Unsupported`] for a SQLite
    /// database in memory, and for [`LockScope::Server`] on PostgreSQL and SQLite.
    pub fn build(self, url: &str) -> Result<NamedLocks, LockError> {
        let target = Target::parse(url, self.scope, self.keep_alive_timeout)?;
        Ok(self.with(Box::new(move |key| target.open(key)), Clock::Machine))
    }

    fn with(self, open: Open, clock: Clock) -> NamedLocks {
        NamedLocks(Arc::new(Shared {
            open,
            scope: self.scope,
            keep_alive_interval: self.keep_alive_interval,
            keep_alive_timeout: self.keep_alive_timeout,
            release_timeout: self.release_timeout,
            on_keep_alive_error: self.on_keep_alive_error,
            clock,
        }))
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("keep_alive_interval", &self.keep_alive_interval)
            .field("keep_alive_timeout", &self.keep_alive_timeout)
            .field("release_timeout", &self.release_timeout)
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}

/// What one acquisition has of its own.
#[derive(Clone, Default)]
#[must_use = "options do nothing until they are given to `acquire_with`"]
pub struct AcquireOptions {
    on_lost: Option<OnLost>,
    stop: Option<StopToken>,
}

impl AcquireOptions {
    /// No handler and no token.
    pub fn new() -> AcquireOptions {
        AcquireOptions::default()
    }

    /// What is called when this lock is lost: see [`Builder::on_keep_alive_error`].
    pub fn on_lost(
        mut self,
        handler: impl Fn(&LockError) + Send + Sync + 'static,
    ) -> AcquireOptions {
        self.on_lost = Some(Arc::new(handler));
        self
    }

    /// A token that ends the wait for the lock. It does not release a lock that is held.
    pub fn stop(mut self, token: &StopToken) -> AcquireOptions {
        self.stop = Some(token.clone());
        self
    }
}

impl fmt::Debug for AcquireOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireOptions")
            .field("stop", &self.stop)
            .finish_non_exhaustive()
    }
}

const HELD: u8 = 0;
const RELEASED: u8 = 1;
const LOST: u8 = 2;

/// A lock that is held.
///
/// # Dropping
///
/// Dropping releases it, which takes at most the
/// [`release_timeout`](Builder::release_timeout), and logs a failure. In a forked child nothing is
/// released.
#[must_use = "dropping a `NamedLock` releases it"]
#[clippy::has_significant_drop]
pub struct NamedLock(Arc<Held>);

struct Held {
    locks: NamedLocks,
    key: String,
    session: Session,
    /// Released or lost: whoever moves it from held decides.
    verdict: AtomicU8,
    lost: Signal,
    /// Disconnects when the keep-alives are to end.
    done: Signal,
    released: OnceLock<Result<(), LockError>>,
    process: u32,
}

impl NamedLock {
    fn hold(
        locks: NamedLocks,
        key: String,
        session: Session,
        on_lost: Option<OnLost>,
    ) -> Result<NamedLock, LockError> {
        let held = Arc::new(Held {
            locks,
            key,
            session,
            verdict: AtomicU8::new(HELD),
            lost: Signal::new(),
            done: Signal::new(),
            released: OnceLock::new(),
            process: std::process::id(),
        });
        let kept = Arc::clone(&held);
        thread::Builder::new()
            .name("lease-keep-alive".into())
            .stack_size(STACK)
            .spawn(move || kept.keep_alive(on_lost))
            .map_err(|error| LockError::Spawn(Arc::new(error)))?;
        Ok(NamedLock(held))
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.0.key
    }

    /// Whether it is known to be lost. Never waits, and never goes back to `false`.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.verdict.load(Ordering::Acquire) == LOST
    }

    /// A channel that disconnects when the lock is lost. Nothing is ever sent on it.
    #[must_use]
    pub fn lost(&self) -> &Receiver<Infallible> {
        self.0.lost.receiver()
    }

    /// Releases it. From any thread and any number of times: the first call does it, and every one
    /// gets its result.
    ///
    /// # Blocking
    ///
    /// One round trip, at most the [`release_timeout`](Builder::release_timeout), behind a keep-alive
    /// that is under way.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] when it was lost before, or the server says that it was not ours;
    /// [`LockError::Timeout`] and [`LockError::Database`] when that is not known;
    /// [`LockError::Forked`] in a forked child, whose parent has the lock. The connection is
    /// closed in any case, and the lock is free when the server has noticed that.
    pub fn release(&self) -> Result<(), LockError> {
        if std::process::id() != self.0.process {
            return Err(LockError::Forked);
        }
        self.0.release()
    }
}

impl Drop for NamedLock {
    fn drop(&mut self) {
        if std::process::id() != self.0.process {
            return;
        }
        let is_first = self.0.released.get().is_none();
        if let (true, Err(error)) = (is_first, self.0.release()) {
            log::warn!(lock = self.key(); "could not release the lock: {}", chain(&error));
        }
    }
}

impl fmt::Debug for NamedLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamedLock")
            .field("key", &self.key())
            .field("is_lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}

impl Held {
    fn release(&self) -> Result<(), LockError> {
        self.released.get_or_init(|| self.release_once()).clone()
    }

    fn release_once(&self) -> Result<(), LockError> {
        if !self.decide(RELEASED) {
            return Err(self.lost_by(None));
        }
        self.done.disconnect();
        let timeout = self.locks.0.release_timeout;
        let freed = self.session.ask(timeout, None, |session| {
            // Whatever it answers, its connection has served.
            session.take().map(|mut session| session.release())
        });
        match freed {
            Ok(Some(Ok(true))) => Ok(()),
            Ok(Some(Ok(false)) | None) => Err(self.lost_by(None)),
            Ok(Some(Err(error))) => Err(error),
            Err(no_answer) => Err(no_answer.into()),
        }
    }

    /// Whether this call ends the holding.
    fn decide(&self, verdict: u8) -> bool {
        self.verdict
            .compare_exchange(HELD, verdict, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    fn lost_by(&self, source: Option<LockError>) -> LockError {
        LockError::Lost {
            key: self.key.clone(),
            source: source.map(Arc::new),
        }
    }

    fn keep_alive(&self, on_lost: Option<OnLost>) {
        let Shared {
            keep_alive_interval,
            keep_alive_timeout,
            on_keep_alive_error,
            clock,
            ..
        } = &*self.locks.0;
        let done = self.done.receiver();
        loop {
            wait(clock, clock.now().after(*keep_alive_interval), &[done]);
            if is_disconnected(done) {
                return;
            }
            let answer = self.session.ask(*keep_alive_timeout, None, |session| {
                session.as_mut().map(|session| session.is_ours())
            });
            let source = match answer {
                Ok(Some(Ok(true))) => continue,
                Ok(Some(Ok(false)) | None) => None,
                Ok(Some(Err(error))) => Some(error),
                Err(no_answer) => Some(no_answer.into()),
            };
            if !self.decide(LOST) {
                return;
            }
            self.lost.disconnect();
            let error = self.lost_by(source);
            log::warn!(lock = self.key.as_str(); "lock lost: {}", chain(&error));
            for handler in [on_keep_alive_error, &on_lost].into_iter().flatten() {
                if catch_unwind(AssertUnwindSafe(|| handler(&error))).is_err() {
                    log::error!(lock = self.key.as_str(); "a handler of a lost lock panicked");
                }
            }
            // Closes the connection: what the server thinks of it does not matter any more.
            let _ = self
                .session
                .ask(*keep_alive_timeout, None, |session| drop(session.take()));
            return;
        }
    }
}

#[cfg(test)]
mod tests;
