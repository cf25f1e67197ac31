//! A database by script, for tests that drive the clock by hand.
//!
//! What it is asked is written down with the time, what it answers is told beforehand, and any call
//! can be left hanging until it is told. Nothing here decides by real time: where a test waits for
//! another thread it waits until something is so, and [`settle`] only gives what must *not* happen
//! the time to happen.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Once};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, after, bounded, unbounded};
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};
use parking_lot::Mutex;

use super::claim::What;
use super::connect::Connector;
use super::{Cancel, Spawn, Store, spawn};
use crate::clock::{Clock, Moment};
use crate::error::{BoxError, Error, Lost};
use crate::lease::Lease;
use crate::loss::{LossCause, StopToken, is_disconnected};
use crate::protocol::{Fencing, Key, LeaseConnection, Limits, NewClaim, Row, Session, Verdict};
use crate::tenure::Tenure;
use crate::timings::Timings;

/// The smallest step of the clock.
pub(crate) const NANO: Duration = Duration::from_nanos(1);

/// How long a test waits, in real time, for what must happen.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A store on a scripted database, and the clock that both go by.
pub(crate) struct World {
    pub(crate) database: Database,
    pub(crate) clock: Clock,
    pub(crate) store: Arc<Store>,
    /// Hears of work that will not stop.
    pub(crate) will_not_stop: Receiver<Lost>,
}

impl World {
    pub(crate) fn new() -> World {
        World::with(Timings::default(), 2, spawn)
    }

    /// On a database that says when a name is given back.
    pub(crate) fn telling() -> World {
        World::on(true, Timings::default(), 2, spawn)
    }

    /// With one connection, so that the calls of a test come in one order.
    pub(crate) fn of_one_connection() -> World {
        World::with(Timings::default(), 1, spawn)
    }

    pub(crate) fn with(timings: Timings, connections: usize, spawn: Spawn) -> World {
        World::on(false, timings, connections, spawn)
    }

    fn on(tells: bool, timings: Timings, connections: usize, spawn: Spawn) -> World {
        record_logs();
        timings.validate().unwrap();
        let clock = Clock::driven();
        let database = Database::new(&clock, tells);
        let (told, will_not_stop) = unbounded();
        let store = Store::new(
            database.connector(),
            connections,
            clock.clone(),
            timings,
            "this-instance".to_owned(),
            Arc::new(move |lost| told.send(lost.clone()).unwrap()),
            spawn,
        );
        World {
            database,
            clock,
            store: Arc::new(store),
            will_not_stop,
        }
    }

    pub(crate) fn claim(&self, name: &str) -> Lease {
        self.claim_under(name, &[])
    }

    pub(crate) fn claim_under(&self, name: &str, stops: &[StopToken]) -> Lease {
        let what = What::Name(name.to_owned());
        self.store
            .claim(what, stops, Cancel::OnStop)
            .unwrap()
            .unwrap()
    }

    pub(crate) fn claim_slot(&self, name: &str) -> Lease {
        let what = What::Slot(name.to_owned(), 60_000);
        self.store
            .claim(what, &[], Cancel::OnStop)
            .unwrap()
            .unwrap()
    }

    pub(crate) fn try_claim(&self, name: &str) -> Result<Option<Lease>, Error> {
        self.store
            .claim(What::Name(name.to_owned()), &[], Cancel::OnStop)
    }
}

/// What a database is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    Connect,
    Claim,
    Renew,
    Verify,
    Release,
    Finish,
    Settle,
    Undo,
    Read,
    IsLocked,
    HasTable,
    Listen,
    Other,
}

/// What it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The act was carried out. Read: held by another.
    Yes,
    /// It was not. Read: there is no row.
    No,
    /// Read: held by the holder of the last claim.
    Ours,
    /// Read: there is a row, and nobody holds it.
    Free,
    Fails,
}

enum Turn {
    Replies(Reply),
    Hangs {
        arrived: Sender<()>,
        told: Receiver<Reply>,
    },
}

#[derive(Debug, Clone)]
struct Call {
    ask: Ask,
    at: Moment,
    holder: String,
}

/// The database. Clones are the same.
#[derive(Clone)]
pub(crate) struct Database(Arc<Script>);

struct Script {
    clock: Clock,
    start: Moment,
    tells: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    turns: VecDeque<(Ask, Turn)>,
    always: Vec<(Ask, Reply)>,
    term: i64,
    sessions: usize,
    told: Vec<String>,
    tells_nothing: bool,
}

impl Database {
    pub(crate) fn new(clock: &Clock, tells: bool) -> Database {
        Database(Arc::new(Script {
            clock: clock.clone(),
            start: clock.now(),
            tells,
            state: Mutex::default(),
        }))
    }

    pub(crate) fn connector(&self) -> Connector {
        let connector = Connector::from_manager(self.clone(), Timings::default().attempt);
        connector.telling(self.0.tells)
    }

    /// Those who listen are told of this name.
    pub(crate) fn tell(&self, name: &str) {
        self.0.state.lock().told.push(name.to_owned());
    }

    pub(crate) fn has_untold(&self) -> bool {
        !self.0.state.lock().told.is_empty()
    }

    pub(crate) fn start(&self) -> Moment {
        self.0.start
    }

    /// What those who listen are told cannot be had.
    pub(crate) fn tell_nothing(&self, is_so: bool) {
        self.0.state.lock().tells_nothing = is_so;
    }

    /// The next call of this kind for which nothing was said yet is answered so.
    pub(crate) fn next(&self, ask: Ask, reply: Reply) {
        let turn = Turn::Replies(reply);
        self.0.state.lock().turns.push_back((ask, turn));
    }

    /// From now on calls of this kind are answered so, if nothing is said about the very call.
    pub(crate) fn always(&self, ask: Ask, reply: Reply) {
        self.0.state.lock().always.insert(0, (ask, reply));
    }

    /// The next call of this kind for which nothing was said yet hangs.
    pub(crate) fn hang(&self, ask: Ask) -> Hung {
        let (arrived, arrival) = bounded(1);
        let (tell, told) = bounded(1);
        let turn = Turn::Hangs { arrived, told };
        self.0.state.lock().turns.push_back((ask, turn));
        Hung { arrival, tell }
    }

    /// When calls of this kind arrived, since the beginning; those of one moment count once.
    pub(crate) fn asked(&self, ask: Ask) -> Vec<Duration> {
        let mut at: Vec<_> = self
            .calls(ask)
            .iter()
            .map(|call| call.at.since(self.0.start))
            .collect();
        at.dedup();
        at
    }

    /// The holders that calls of this kind were for.
    pub(crate) fn holders(&self, ask: Ask) -> Vec<String> {
        self.calls(ask)
            .into_iter()
            .map(|call| call.holder)
            .collect()
    }

    pub(crate) fn count(&self, ask: Ask) -> usize {
        self.calls(ask).len()
    }

    /// Everything that was asked, in order.
    pub(crate) fn order(&self) -> Vec<Ask> {
        let state = self.0.state.lock();
        state.calls.iter().map(|call| call.ask).collect()
    }

    /// How many sessions are open.
    pub(crate) fn sessions(&self) -> usize {
        self.0.state.lock().sessions
    }

    fn calls(&self, ask: Ask) -> Vec<Call> {
        let state = self.0.state.lock();
        let calls = state.calls.iter().filter(|call| call.ask == ask);
        calls.cloned().collect()
    }

    fn ask(&self, ask: Ask, holder: &str) -> Reply {
        let turn = {
            let mut state = self.0.state.lock();
            state.calls.push(Call {
                ask,
                at: self.0.clock.now(),
                holder: holder.to_owned(),
            });
            match state.turns.iter().position(|(of, _)| *of == ask) {
                Some(at) => state.turns.remove(at).unwrap().1,
                None => Turn::Replies(state.usual(ask)),
            }
        };
        match turn {
            Turn::Replies(reply) => reply,
            Turn::Hangs { arrived, told } => {
                // Nobody there to tell it: the test is over.
                let _ = arrived.send(());
                told.recv().unwrap_or(Reply::Fails)
            }
        }
    }

    fn yes_or_no(&self, ask: Ask, holder: &str) -> QueryResult<bool> {
        match self.ask(ask, holder) {
            Reply::Yes | Reply::Ours => Ok(true),
            Reply::No | Reply::Free => Ok(false),
            Reply::Fails => Err(failure()),
        }
    }
}

impl State {
    fn usual(&self, ask: Ask) -> Reply {
        let said = self.always.iter().find(|(of, _)| *of == ask);
        match (said, ask) {
            (Some((_, reply)), _) => *reply,
            (None, Ask::Read | Ask::IsLocked) => Reply::No,
            (None, _) => Reply::Yes,
        }
    }
}

/// A call that hangs. If this is dropped, it fails.
pub(crate) struct Hung {
    arrival: Receiver<()>,
    tell: Sender<Reply>,
}

impl Hung {
    /// Waits until a thread is in the call.
    pub(crate) fn arrived(&self) {
        self.arrival
            .recv_timeout(PATIENCE)
            .expect("the call did not come");
    }

    pub(crate) fn reply(self, reply: Reply) {
        self.tell.send(reply).unwrap();
    }
}

fn failure() -> DieselError {
    let why = Box::new("the script says so".to_owned());
    DieselError::DatabaseError(DatabaseErrorKind::Unknown, why)
}

impl r2d2::ManageConnection for Database {
    type Connection = Scripted;
    type Error = fmt::Error;

    fn connect(&self) -> Result<Scripted, fmt::Error> {
        match self.ask(Ask::Connect, "") {
            Reply::Yes => {
                self.0.state.lock().sessions += 1;
                Ok(Scripted(self.clone()))
            }
            _ => Err(fmt::Error),
        }
    }

    fn is_valid(&self, _: &mut Scripted) -> Result<(), fmt::Error> {
        panic!("BUG: asked of a connection that no pool has");
    }

    fn has_broken(&self, _: &mut Scripted) -> bool {
        panic!("BUG: asked of a connection that no pool has");
    }
}

/// A session with the scripted database.
pub(crate) struct Scripted(Database);

impl Drop for Scripted {
    fn drop(&mut self) {
        self.0.0.state.lock().sessions -= 1;
    }
}

impl LeaseConnection for Scripted {}

impl Session for Scripted {
    fn prepare(&mut self, _: Limits) -> QueryResult<bool> {
        Ok(false)
    }

    fn claim(&mut self, claim: &NewClaim) -> QueryResult<Option<i64>> {
        let won = self.0.yes_or_no(Ask::Claim, &claim.holder)?;
        Ok(won.then(|| {
            let mut state = self.0.0.state.lock();
            state.term += 1;
            state.term
        }))
    }

    fn claim_slot(
        &mut self,
        claim: &NewClaim,
        _: i64,
        _: Option<&Row>,
    ) -> QueryResult<Option<i64>> {
        self.claim(claim)
    }

    fn claim_rerun(&mut self, claim: &NewClaim, _: i64, _: i64) -> QueryResult<Option<i64>> {
        self.claim(claim)
    }

    fn renew(&mut self, key: Key<'_>, _: i64) -> QueryResult<bool> {
        self.0.yes_or_no(Ask::Renew, key.holder)
    }

    fn renew_all(&mut self, keys: &[Key<'_>], lease_ms: i64) -> QueryResult<Vec<String>> {
        let mut renewed = Vec::new();
        for key in keys {
            if self.renew(*key, lease_ms)? {
                renewed.push(key.name.to_owned());
            }
        }
        Ok(renewed)
    }

    fn verify_all(&mut self, keys: &[Key<'_>]) -> QueryResult<Vec<String>> {
        let mut held = Vec::new();
        for key in keys {
            if self.verify(*key)? {
                held.push(key.name.to_owned());
            }
        }
        Ok(held)
    }

    fn verify(&mut self, key: Key<'_>) -> QueryResult<bool> {
        self.0.yes_or_no(Ask::Verify, key.holder)
    }

    fn release(&mut self, key: Key<'_>, _: bool) -> QueryResult<bool> {
        self.0.yes_or_no(Ask::Release, key.holder)
    }

    fn finish(&mut self, key: Key<'_>, _: i64) -> QueryResult<bool> {
        self.0.yes_or_no(Ask::Finish, key.holder)
    }

    fn settle(&mut self, _: &str, _: i64) -> QueryResult<()> {
        self.0.yes_or_no(Ask::Settle, "").map(drop)
    }

    fn undo_slot(&mut self, key: Key<'_>, _: i64, _: i64) -> QueryResult<bool> {
        self.0.yes_or_no(Ask::Undo, key.holder)
    }

    fn undo_rerun(&mut self, key: Key<'_>) -> QueryResult<bool> {
        self.0.yes_or_no(Ask::Undo, key.holder)
    }

    fn read(&mut self, name: &str) -> QueryResult<Option<Row>> {
        let reply = self.0.ask(Ask::Read, "");
        let holder = match reply {
            Reply::Yes | Reply::Free => "another".to_owned(),
            Reply::Ours => self.0.holders(Ask::Claim).pop().unwrap(),
            Reply::No => return Ok(None),
            Reply::Fails => return Err(failure()),
        };
        Ok(Some(Row {
            name: name.to_owned(),
            holder,
            instance: "an-instance".to_owned(),
            term: 7,
            expires_in_ms: if reply == Reply::Free { 0 } else { 15_000 },
            slot_ms: 0,
            unfinished_slot_ms: 0,
            rerun_slot_ms: 0,
        }))
    }

    fn is_locked(&mut self, _: &str) -> QueryResult<bool> {
        self.0.yes_or_no(Ask::IsLocked, "")
    }

    fn has_table(&mut self) -> QueryResult<bool> {
        self.0.yes_or_no(Ask::HasTable, "")
    }

    fn lock(&mut self, key: Key<'_>, _: Fencing) -> QueryResult<bool> {
        self.0.yes_or_no(Ask::Other, key.holder)
    }

    fn unlock(&mut self) -> QueryResult<()> {
        self.0.yes_or_no(Ask::Other, "").map(drop)
    }

    fn listen(&mut self) -> QueryResult<()> {
        self.0.yes_or_no(Ask::Listen, "").map(drop)
    }

    fn heard(&mut self) -> QueryResult<Vec<String>> {
        let mut state = self.0.0.state.lock();
        if state.tells_nothing {
            return Err(failure());
        }
        Ok(std::mem::take(&mut state.told))
    }

    fn cut_short(&mut self, _: &[&str]) -> QueryResult<Vec<(String, i64, i64)>> {
        self.0.yes_or_no(Ask::Other, "").map(|_| Vec::new())
    }

    fn force_release(&mut self, _: &str) -> QueryResult<bool> {
        self.0.yes_or_no(Ask::Other, "")
    }

    fn list(&mut self) -> QueryResult<Vec<Row>> {
        self.0.yes_or_no(Ask::Other, "").map(|_| Vec::new())
    }

    fn check(&mut self) -> QueryResult<Verdict> {
        self.0.yes_or_no(Ask::Other, "").map(|_| Verdict::Carries)
    }

    fn rehearse(&mut self, _: &NewClaim) -> QueryResult<(Option<i64>, Option<Row>)> {
        self.0.yes_or_no(Ask::Other, "").map(|_| (None, None))
    }

    fn migrate(&mut self, _: Duration) -> Result<(), BoxError> {
        Ok(())
    }
}

/// Waits until `so`.
#[track_caller]
pub(crate) fn soon(mut so: impl FnMut() -> bool) {
    let patience = after(PATIENCE);
    while !so() {
        assert!(patience.try_recv().is_err(), "it did not become so");
        pause(ms(1));
    }
}

/// Gives what must not happen the time to happen.
pub(crate) fn settle() {
    pause(ms(25));
}

fn pause(duration: Duration) {
    after(duration).recv().unwrap();
}

/// What a thread of its own returns. It runs by the time there is one of these.
pub(crate) struct Background<T>(Receiver<T>);

pub(crate) fn background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Background<T> {
    let (begin, began) = bounded(1);
    let (done, output) = bounded(1);
    let work = move || {
        begin.send(()).unwrap();
        drop(done.send(work()));
    };
    thread::Builder::new().spawn(work).unwrap();
    began.recv().unwrap();
    Background(output)
}

impl<T> Background<T> {
    #[track_caller]
    pub(crate) fn output(self) -> T {
        self.0.recv_timeout(PATIENCE).expect("it did not return")
    }

    pub(crate) fn is_running(&self) -> bool {
        self.0.is_empty()
    }
}

/// Runs `work` on another thread while the clock stands still.
#[track_caller]
pub(crate) fn at_once<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    background(work).output()
}

pub(crate) fn has_ended(tenure: &Tenure) -> bool {
    is_disconnected(tenure.ended())
}

#[track_caller]
pub(crate) fn wait_for_end(tenure: &Tenure) {
    soon(|| has_ended(tenure));
}

pub(crate) fn cause(tenure: &Tenure) -> Option<LossCause> {
    tenure.check().err().map(|lost| lost.cause())
}

/// The program's logger: keeps what is said of each lease, and panics when it was told to.
struct Recorder {
    entries: Mutex<Vec<(String, String)>>,
    panics: Mutex<Vec<(String, log::Level)>>,
}

static RECORDER: Recorder = Recorder {
    entries: Mutex::new(Vec::new()),
    panics: Mutex::new(Vec::new()),
};

fn record_logs() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&RECORDER).unwrap();
        log::set_max_level(log::LevelFilter::Trace);
    });
}

/// What was logged of a lease: the level and the text.
pub(crate) fn logged(lease: &str) -> Vec<String> {
    let entries = RECORDER.entries.lock();
    let of = entries.iter().filter(|(of, _)| of == lease);
    of.map(|(_, entry)| entry.clone()).collect()
}

/// The logger panics at the next entry of this lease on this level.
pub(crate) fn logger_panics(lease: &str, level: log::Level) {
    RECORDER.panics.lock().push((lease.to_owned(), level));
}

impl log::Log for Recorder {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let values = record.key_values();
        let Some(lease) = values.get(log::kv::Key::from("lease")) else {
            return;
        };
        let lease = lease.to_string();
        let entry = format!("{} {}", record.level(), record.args());
        self.entries.lock().push((lease.clone(), entry));
        let panics = {
            let mut panics = self.panics.lock();
            let at = panics
                .iter()
                .position(|(of, level)| *of == lease && *level == record.level());
            at.map(|at| panics.swap_remove(at)).is_some()
        };
        if panics {
            // Not `panic!`: nothing is to be printed.
            std::panic::resume_unwind(Box::new("the logger panics"));
        }
    }

    fn flush(&self) {}
}
