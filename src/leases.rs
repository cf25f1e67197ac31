//! The way in: a database, and the names that are leased in it.
//!
//! Invariant: bad input is refused before anything is sent; "held" is an answer, not an error.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use chrono::{DateTime, Utc};
use r2d2::ManageConnection;

use crate::clock::{Clock, Moment};
use crate::error::{Error, Lost};
use crate::lease::Lease;
use crate::loss::{StopToken, wait};
use crate::name::{default_instance, validate_name};
use crate::protocol::{LeaseConnection, Row};
use crate::slot::instant;
use crate::store::claim::What;
use crate::store::connect::Connector;
use crate::store::queue::{GIVE_WAY, Pace, Place, Told};
use crate::store::{Cancel, OnWorkWillNotStop, Store, spawn};
use crate::timings::Timings;

/// The leases of one database.
///
/// Cheap to clone, and clones share their sessions. Nothing is connected and no thread is started
/// before the first call that needs the database.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("leases.db");
/// # let path = path.to_str().unwrap();
/// use diesel_lease::Leases;
///
/// let leases = Leases::connect(path)?;
/// leases.migrate()?;
/// if let Some(lease) = leases.try_claim("nightly-report")? {
///     assert!(leases.try_claim("nightly-report")?.is_none());
///     lease.release()?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Leases {
    store: Arc<Store>,
    pub(crate) stops: Vec<StopToken>,
}

impl Leases {
    /// Leases in the database at `url`, with default settings.
    ///
    /// `postgres://` and `postgresql://`, `mysql://` (MariaDB too), `sqlite://PATH`, or just the path
    /// of a SQLite file. The URL must lead to the primary, without a proxy that splits reads from
    /// writes.
    ///
    /// # Blocking
    ///
    /// Not at all: it connects when it is first used.
    ///
    /// # Errors
    ///
    /// As [`Builder::build`].
    pub fn connect(url: &str) -> Result<Leases, Error> {
        Leases::builder().build(url)
    }

    /// For other settings than the defaults.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Creates or updates the lease table.
    ///
    /// Any number of processes may call it at once, at every start. It runs the migrations of
    /// [`migrations`](crate::migrations) and needs the right to create tables. A SQLite file is put
    /// into WAL mode, and stays in it.
    ///
    /// # Blocking
    ///
    /// At most 60 s, waiting for others that do the same included.
    ///
    /// # Errors
    ///
    /// [`Error::Migration`], [`Error::Connect`], [`Error::TimedOut`].
    pub fn migrate(&self) -> Result<(), Error> {
        self.store.migrate()
    }

    /// Says whether this database can carry leases. Ask once at the start.
    ///
    /// # Blocking
    ///
    /// Some ten round trips, at most [`Timings::attempt`] altogether. The last few make a claim of a
    /// random name and roll it back.
    ///
    /// # Errors
    ///
    /// [`Error::SchemaMissing`] without the table; [`Error::Unsupported`] with the reason; else what
    /// kept the question from being answered.
    pub fn available(&self) -> Result<(), Error> {
        self.store.check()
    }

    /// The same leases, under a token that tells everything under them to end.
    ///
    /// When it is stopped, waits end with [`Error::Stopped`], new claims are refused with it, and
    /// work that runs under these leases is told by [`Tenure::ended`](crate::Tenure::ended). Renewals
    /// go on until the work has returned. Tokens add up: any of them ends it.
    #[must_use]
    pub fn with_stop(&self, token: &StopToken) -> Leases {
        let mut leases = self.clone();
        leases.stops.push(token.clone());
        leases
    }

    /// What this process calls itself in the rows it writes.
    #[must_use]
    pub fn instance(&self) -> &str {
        self.store.instance()
    }

    /// The timings these leases go by.
    #[must_use]
    pub fn timings(&self) -> &Timings {
        self.store.timings()
    }

    /// Claims `name`, if nobody holds it. `None` means that somebody does.
    ///
    /// # Blocking
    ///
    /// One round trip on PostgreSQL and SQLite, two on MySQL and MariaDB; at most
    /// [`Timings::attempt`]. It does not wait for the name; a row that is locked counts as held, at
    /// the latest after the lock limit of a second. A SQLite file that others keep busy is waited
    /// for within that bound.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`] before anything is sent; [`Error::Stopped`]; [`Error::SchemaMissing`];
    /// [`Error::TimedOut`], [`Error::Connect`], [`Error::Database`] when the database could not
    /// answer. A claim that was carried out all the same is given back when the answer comes, or
    /// blocks the name for one lease.
    pub fn try_claim(&self, name: &str) -> Result<Option<Lease>, Error> {
        validate_name(name).map_err(Error::InvalidName)?;
        self.claim_once(What::Name(name.to_owned()), Cancel::OnStop)
    }

    /// Claims `name`, and waits for it as long as it takes.
    ///
    /// Of those that wait for a name by these leases and their clones only the first asks the database;
    /// they come to it in the order in which they came. It reads soon, and then ever less often, down
    /// to about twice in a renewal interval, and writes nothing before the name is free. Where a name
    /// changes hands quickly it reads more often, at most each 10 ms. When one of these leases gives the
    /// name back it is told at once; after some 50 ms or more of that it lets other processes try first.
    /// On PostgreSQL it hears within some 20 ms of a name that any process gives back: while somebody
    /// waits there is one more connection, which listens ([LISTEN]). Behind a pooler that hears nothing,
    /// and reading is all there is.
    ///
    /// [LISTEN]: https://www.postgresql.org/docs/current/sql-listen.html
    ///
    /// # Blocking
    ///
    /// Without limit. A [`StopToken`] ends it.
    ///
    /// # Errors
    ///
    /// As [`try_claim`](Leases::try_claim). An error of the database ends the wait.
    pub fn claim(&self, name: &str) -> Result<Lease, Error> {
        let lease = self.claim_timeout(name, Duration::MAX)?;
        Ok(lease.expect("BUG: a wait without limit ended"))
    }

    /// Claims `name`, and waits for it at most `timeout`. `None` means that it was held all the
    /// while. With a timeout of zero it is [`try_claim`](Leases::try_claim).
    ///
    /// # Blocking
    ///
    /// At most `timeout` and one [`Timings::attempt`].
    ///
    /// # Errors
    ///
    /// As [`try_claim`](Leases::try_claim). An error of the database ends the wait.
    pub fn claim_timeout(&self, name: &str, timeout: Duration) -> Result<Option<Lease>, Error> {
        validate_name(name).map_err(Error::InvalidName)?;
        // A forked child has the line of its parent, which nobody leaves there.
        if timeout.is_zero() || !self.store.is_of_this_process() {
            return self.try_claim(name);
        }
        let clock = self.store.clock();
        let until = clock.now().after(timeout);
        let place = self.store.queues().join(name);
        let mut pace = Pace::new(self.timings().poll());
        // Nothing is looked at before it is told to be the first.
        let mut look = until;
        let mut was_asked = false;
        loop {
            let told = self.hear(&place, look)?;
            let is_over = told.is_none() && clock.now() >= until;
            let may_be_free = match told {
                Some(Told::Free) => true,
                Some(Told::FreeInAWhile) => {
                    self.pause(clock.now().after(GIVE_WAY).min(until))?;
                    true
                }
                Some(Told::First) => false,
                // That it is held is what the database says, and not that others wait for it.
                None if is_over => !was_asked,
                None | Some(Told::Look) => match self.store.read(name, &self.stops)? {
                    Some(row) if !row.is_free() => {
                        pace.saw(&row);
                        false
                    }
                    _ => true,
                },
            };
            if may_be_free && let Some(lease) = self.try_claim(name)? {
                place.won(lease.term(), clock.now());
                return Ok(Some(lease));
            }
            if is_over {
                return Ok(None);
            }
            was_asked |= told != Some(Told::First);
            self.store.listen();
            look = clock.now().after(pace.next()).min(until);
        }
    }

    /// Reads the record of `name`. `None` if it was never claimed.
    ///
    /// # Blocking
    ///
    /// One round trip, at most [`Timings::attempt`].
    ///
    /// # Errors
    ///
    /// As [`try_claim`](Leases::try_claim).
    pub fn inspect(&self, name: &str) -> Result<Option<LeaseRecord>, Error> {
        validate_name(name).map_err(Error::InvalidName)?;
        Ok(self.store.read(name, &self.stops)?.map(LeaseRecord))
    }

    /// Reads every record, by name.
    ///
    /// # Blocking
    ///
    /// One round trip, at most [`Timings::attempt`].
    ///
    /// # Errors
    ///
    /// As [`try_claim`](Leases::try_claim).
    pub fn list(&self) -> Result<Vec<LeaseRecord>, Error> {
        Ok(self.store.list()?.into_iter().map(LeaseRecord).collect())
    }

    /// Takes a name from whoever holds it, for operators: the name is free and its term one higher.
    /// False if it was free.
    ///
    /// The holder finds out by its next renewal. Use it when a clock that was set back after a claim
    /// has left a name held for longer than anybody lives.
    ///
    /// # Blocking
    ///
    /// One round trip, at most [`Timings::attempt`]. It waits for a commit under that lease, at most
    /// the lock limit of a second.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] at that limit; else as [`try_claim`](Leases::try_claim).
    pub fn force_release(&self, name: &str) -> Result<bool, Error> {
        validate_name(name).map_err(Error::InvalidName)?;
        let forced = self.store.force_release(name)?;
        if forced {
            log::warn!(lease = name, instance = self.instance(); "lease forced free");
        }
        Ok(forced)
    }

    pub(crate) fn claim_once(&self, what: What, cancel: Cancel) -> Result<Option<Lease>, Error> {
        self.refuse_if_stopped()?;
        self.store.claim(what, &self.stops, cancel)
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Waits until `place` is told something, `until`, or until a stop.
    pub(crate) fn hear(&self, place: &Place, until: Moment) -> Result<Option<Told>, Error> {
        let signals: Vec<_> = self.stops.iter().map(StopToken::receiver).collect();
        let told = place.hear(self.store.clock(), until, &signals);
        self.refuse_if_stopped()?;
        Ok(told)
    }

    /// Stands still until `until`, or until a stop.
    pub(crate) fn pause(&self, until: Moment) -> Result<(), Error> {
        let signals: Vec<_> = self.stops.iter().map(StopToken::receiver).collect();
        wait(self.store.clock(), until, &signals);
        self.refuse_if_stopped()
    }

    fn refuse_if_stopped(&self) -> Result<(), Error> {
        if self.is_stopped() {
            Err(Error::Stopped)
        } else {
            Ok(())
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stops.iter().any(StopToken::is_stopped)
    }
}

impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases")
            .field("store", &self.store)
            .field("stops", &self.stops)
            .finish()
    }
}

/// The settings of [`Leases`].
#[derive(Clone)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct Builder {
    timings: Timings,
    instance: Option<String>,
    connections: usize,
    on_work_will_not_stop: OnWorkWillNotStop,
}

impl Default for Builder {
    fn default() -> Builder {
        Builder {
            timings: Timings::default(),
            instance: None,
            connections: 2,
            on_work_will_not_stop: Arc::new(|_| std::process::abort()),
        }
    }
}

impl Builder {
    /// How long everything may take. Defaults to [`Timings::default`].
    pub fn timings(mut self, timings: Timings) -> Builder {
        self.timings = timings;
        self
    }

    /// What this process calls itself in rows and logs, for people to read; it decides nothing. 1 to
    /// 191 bytes, as a name. Defaults to the machine's name and eight random hex digits, one for the
    /// process.
    pub fn instance(mut self, instance: impl Into<String>) -> Builder {
        self.instance = Some(instance.into());
        self
    }

    /// How many connections the library has, each with a thread. Zero counts as one. Defaults to 2:
    /// one that hangs leaves another. On PostgreSQL there is one more while somebody waits for a name.
    ///
    /// A call that hangs is written off with its connection and replaced, so there can be up to eight
    /// more for as long as the network or the server is stuck, and one more each minute after that.
    pub fn connections(mut self, connections: usize) -> Builder {
        self.connections = connections.max(1);
        self
    }

    /// What is called, on a thread of its own, when work under a lost lease has not returned within
    /// the grace. Defaults to ending the process ([`std::process::abort`]), because another holder may
    /// be at the same work. If it returns, the work goes on.
    pub fn on_work_will_not_stop(
        mut self,
        handler: impl Fn(&Lost) + Send + Sync + 'static,
    ) -> Builder {
        self.on_work_will_not_stop = Arc::new(handler);
        self
    }

    /// Leases in the database at `url`: see [`Leases::connect`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidTimings`], [`Error::InvalidInstance`]; [`Error::Connect`] for a URL that no
    /// engine of this build reads; [`Error::Unsupported`] for a SQLite database in memory or without
    /// a path, of which every connection has one of its own.
    pub fn build(self, url: &str) -> Result<Leases, Error> {
        let connector = Connector::from_url(url, self.timings.attempt)?;
        self.with(connector)
    }

    /// Leases over connections that `manager` makes. The library calls its `connect` alone, sets up
    /// each session itself, and closes it on any error.
    ///
    /// Use it where a URL is not enough. Do not hand it a manager that gives out pooled connections.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidTimings`], [`Error::InvalidInstance`].
    pub fn build_with<M>(self, manager: M) -> Result<Leases, Error>
    where
        M: ManageConnection,
        M::Connection: LeaseConnection,
    {
        let connector = Connector::from_manager(manager, self.timings.attempt);
        self.with(connector)
    }

    fn with(self, connector: Connector) -> Result<Leases, Error> {
        self.timings.validate().map_err(Error::InvalidTimings)?;
        let instance = match self.instance {
            Some(instance) => {
                validate_name(&instance).map_err(Error::InvalidInstance)?;
                instance
            }
            None => INSTANCE.get_or_init(default_instance).clone(),
        };
        let store = Store::new(
            connector,
            self.connections,
            Clock::Machine,
            self.timings,
            instance,
            self.on_work_will_not_stop,
            spawn,
        );
        Ok(Leases {
            store: Arc::new(store),
            stops: Vec::new(),
        })
    }
}

static INSTANCE: OnceLock<String> = OnceLock::new();

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("timings", &self.timings)
            .field("instance", &self.instance)
            .field("connections", &self.connections)
            .finish_non_exhaustive()
    }
}

/// The row of a name as it was read.
#[derive(Debug, Clone)]
pub struct LeaseRecord(Row);

impl LeaseRecord {
    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The term of the present holder, or of the last one.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.0.term as u64
    }

    /// What the process of that holder calls itself.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.0.instance
    }

    /// How long the name is still held if nobody renews it, by the database's clock when it was
    /// read. `None`: it is free.
    #[must_use]
    pub fn expires_in(&self) -> Option<Duration> {
        (!self.0.is_free()).then(|| Duration::from_millis(self.0.expires_in_ms.unsigned_abs()))
    }

    /// The last instant that the name was claimed for, if it ever was.
    #[must_use]
    pub fn last_slot(&self) -> Option<DateTime<Utc>> {
        instant(self.0.slot_ms)
    }

    /// The last instant, if its round has not run to its end.
    #[must_use]
    pub fn unfinished_slot(&self) -> Option<DateTime<Utc>> {
        instant(self.0.unfinished_slot_ms).filter(|_| self.0.unfinished_slot_ms == self.0.slot_ms)
    }
}
