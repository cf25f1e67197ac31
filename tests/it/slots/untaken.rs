//! Claims whose answer is lost, comes late, or finds nobody there to take it.

use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::{Error, Lease, Leases, StopToken, Timings, Unfinished};

use super::hooked::Gate;
use super::{found, is_lost, marks, migrated, minute, minute_ms, nothing_found, refused, won};
use crate::support::database::Database;
use crate::support::proxy::Proxy;
use crate::support::raw::{Raw, Row};
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn a_claim_stopped_in_flight_leaves_no_trace,
    fn a_claim_stopped_before_it_is_sent_leaves_no_trace;
    servers:
        fn an_answer_after_the_bound_leaves_no_trace,
        fn an_answer_after_the_deadline_leaves_no_trace,
        fn a_claim_whose_reply_was_cut_is_won,
        fn a_claim_that_cannot_be_read_leaves_its_instant_to_be_found,
        fn a_read_whose_reply_was_cut_is_asked_again,
        fn a_finish_whose_reply_was_cut_counts,
        fn a_session_that_died_unnoticed_costs_no_instant,
}

const JOB: &str = "job";

/// A claim that leaves something to undo.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Of the first instant of a name.
    First,
    /// Of an instant, where a round of an earlier one was cut short.
    Later,
    /// Of an instant, where the second round of an earlier one was cut short.
    LaterThanSecond,
    /// Of a second round, where that of an earlier instant had one too.
    Second,
}

const KINDS: [Kind; 4] = [
    Kind::First,
    Kind::Later,
    Kind::LaterThanSecond,
    Kind::Second,
];

/// What there is before a claim: some name's row, and what was found of it.
struct Before {
    kind: Kind,
    name: String,
    row: Option<Row>,
    cut_short: Option<Unfinished>,
}

impl Before {
    fn new(kind: Kind, leases: &Leases, raw: &mut Raw) -> Before {
        let name = unique(JOB);
        let cut_short = |at: i64| {
            won(leases.try_claim_slot(&name, minute(at)))
                .release()
                .unwrap();
            found(leases, &name)
        };
        let again = |cut_short| won(leases.try_claim_rerun(&cut_short)).release().unwrap();
        match kind {
            Kind::First => {}
            Kind::Later => drop(cut_short(1)),
            Kind::LaterThanSecond => again(cut_short(1)),
            Kind::Second => {
                again(cut_short(1));
                cut_short(2);
            }
        }
        let cut_short = leases.unfinished_slots(&[&name]).unwrap().pop();
        Before {
            kind,
            row: raw.row(&name),
            cut_short,
            name,
        }
    }

    fn claim(&self, leases: &Leases) -> Result<Option<Lease>, Error> {
        match (self.kind, &self.cut_short) {
            (Kind::Second, Some(cut_short)) => leases.try_claim_rerun(cut_short),
            _ => leases.try_claim_slot(&self.name, minute(3)),
        }
    }

    fn term(&self) -> i64 {
        self.row.as_ref().map_or(0, |row| row.term)
    }

    /// Whether a claim was carried out since, and no other.
    fn is_claimed(&self, raw: &mut Raw) -> bool {
        raw.row(&self.name)
            .is_some_and(|row| row.term == self.term() + 1)
    }

    /// Waits until such a claim is undone, and sees that nothing of it is left.
    fn is_restored(&self, leases: &Leases, raw: &mut Raw) {
        eventually(LONG, "the claim is undone", || {
            raw.row(&self.name)
                .is_some_and(|row| row.term == self.term() + 1 && row.expires_at_ms == 0)
        });
        let restored = marks(raw, &self.name);
        match (&self.row, self.kind) {
            (None, _) => assert_eq!(restored, (0, 0, 0)),
            // That an earlier instant had a second round is of no use any more.
            (Some(row), Kind::Second) => {
                assert_eq!(restored, (row.slot_ms, row.unfinished_slot_ms, 0));
            }
            (Some(row), _) => {
                let before = (row.slot_ms, row.unfinished_slot_ms, row.rerun_slot_ms);
                assert_eq!(restored, before);
            }
        }
        let last = match self.kind {
            Kind::First => None,
            Kind::Later | Kind::LaterThanSecond => Some(minute(1)),
            Kind::Second => Some(minute(2)),
        };
        assert_eq!(leases.last_slot(&self.name).unwrap(), last);
        if self.cut_short.is_some() {
            let again = found(leases, &self.name);
            assert_eq!(Some(again.slot()), last);
        } else {
            nothing_found(leases, &self.name);
        }
        let lease = match self.kind {
            Kind::Second => won(leases.try_claim_rerun(&found(leases, &self.name))),
            _ => won(leases.try_claim_slot(&self.name, minute(3))),
        };
        let given_up = lease
            .superseded()
            .map(|round| (round.slot(), round.is_rerun()));
        match self.kind {
            Kind::First | Kind::Second => assert_eq!(given_up, None),
            Kind::Later => assert_eq!(given_up, Some((minute(1), false))),
            Kind::LaterThanSecond => assert_eq!(given_up, Some((minute(1), true))),
        }
        lease.finish(None).unwrap();
    }

    /// Sees that the claim is this one's, with all that it should have.
    fn is_won(&self, claim: Result<Option<Lease>, Error>, leases: &Leases, raw: &mut Raw) {
        let lease = won(claim);
        let at = match self.kind {
            Kind::Second => minute(2),
            _ => minute(3),
        };
        assert_eq!(
            (lease.slot(), lease.term() as i64),
            (Some(at), self.term() + 1)
        );
        let given_up = lease.superseded().map(Unfinished::is_rerun);
        match self.kind {
            Kind::First | Kind::Second => assert_eq!(given_up, None),
            Kind::Later => assert_eq!(given_up, Some(false)),
            Kind::LaterThanSecond => assert_eq!(given_up, Some(true)),
        }
        lease.verify().unwrap();
        nothing_found(leases, &self.name);
        lease.finish(None).unwrap();
        let (slot, unfinished, _) = marks(raw, &self.name);
        assert_eq!((slot, unfinished), (at.timestamp_millis(), 0));
    }
}

/// A stranger's transaction that keeps a claim of this name waiting.
fn lock(engine: Engine, database: &Database, before: &Before) -> Raw {
    let mut stranger = database.connect();
    let name = &before.name;
    match (engine, &before.row) {
        (Engine::Sqlite, _) => stranger.batch("BEGIN IMMEDIATE"),
        (_, Some(_)) => {
            stranger.batch("BEGIN");
            stranger.batch(&format!(
                "UPDATE diesel_leases SET instance = instance WHERE name = '{name}'"
            ));
        }
        (_, None) => {
            stranger.batch("BEGIN");
            stranger.batch(&format!(
                "INSERT INTO diesel_leases (name) VALUES ('{name}')"
            ));
        }
    }
    stranger
}

fn is_stopped(answer: Result<Option<Lease>, Error>) {
    assert!(matches!(answer, Err(Error::Stopped)), "{answer:?}");
}

fn a_claim_stopped_in_flight_leaves_no_trace(engine: Engine) {
    let (database, others) = migrated(engine);
    let gate = Gate::default();
    let leases = gate.leases(Leases::builder(), engine, database.url());
    let mut raw = database.connect();
    for kind in KINDS {
        // Where everything is slow the wait for the lock may come to its limit first.
        let undone = (0..5).any(|_| {
            let before = Before::new(kind, &others, &mut raw);
            let token = StopToken::new();
            let stoppable = leases.with_stop(&token);
            let mut stranger = lock(engine, &database, &before);
            let answer = gate.at_write(
                || before.claim(&stoppable),
                |mut held_up| {
                    held_up.let_go();
                    thread::sleep(Duration::from_millis(100));
                    token.stop();
                    held_up.answer()
                },
            );
            is_stopped(answer.expect("a write"));
            stranger.batch("ROLLBACK");
            let start = Instant::now();
            while !before.is_claimed(&mut raw) {
                if start.elapsed() > Duration::from_secs(3) {
                    return false;
                }
                thread::sleep(Duration::from_millis(5));
            }
            before.is_restored(&others, &mut raw);
            true
        });
        assert!(undone, "{kind:?}: never carried out");
    }
}

fn a_claim_stopped_before_it_is_sent_leaves_no_trace(engine: Engine) {
    let (database, others) = migrated(engine);
    let gate = Gate::default();
    let leases = gate.leases(Leases::builder(), engine, database.url());
    let mut raw = database.connect();
    for kind in KINDS {
        let before = Before::new(kind, &others, &mut raw);
        let token = StopToken::new();
        let stoppable = leases.with_stop(&token);
        let answer = gate.at_write(
            || before.claim(&stoppable),
            |held_up| {
                token.stop();
                held_up.answer()
            },
        );
        is_stopped(answer.expect("a write"));
        before.is_restored(&others, &mut raw);
        // Nothing is sent any more.
        is_stopped(before.claim(&stoppable));
    }
}

/// Leases whose claims can be told from all other requests on their way.
fn by_proxy(database: &Database, timings: Timings) -> (Proxy, Leases) {
    let proxy = Proxy::to(database.url());
    // One connection: the one that was warmed up is the one that is cut.
    let builder = Leases::builder()
        .timings(timings)
        .instance(unique("far"))
        .connections(1);
    let leases = builder.build(&proxy.url(database.url())).unwrap();
    (proxy, leases)
}

/// An attempt of a second, the deadline as given, and a lease that outlasts the test.
fn timings(deadline: Duration) -> Timings {
    Timings {
        lease: Duration::from_secs(600),
        renew: Duration::from_millis(500),
        attempt: Duration::from_secs(1),
        deadline,
        grace: Duration::from_secs(1),
    }
}

fn an_answer_after_the_bound_leaves_no_trace(engine: Engine) {
    comes_late(engine, Duration::from_secs(300), Duration::ZERO);
}

fn an_answer_after_the_deadline_leaves_no_trace(engine: Engine) {
    let deadline = Duration::from_secs(1);
    comes_late(engine, deadline, deadline);
}

fn comes_late(engine: Engine, deadline: Duration, later: Duration) {
    let (database, others) = migrated(engine);
    let mut raw = database.connect();
    let (proxy, leases) = by_proxy(&database, timings(deadline));
    for kind in KINDS {
        // Where everything is slow the bound may be over before anything is sent.
        let undone = (0..5).any(|_| {
            let before = Before::new(kind, &others, &mut raw);
            let _ = leases.last_slot(&before.name);
            proxy.freeze_reply_to(leases.instance());
            let answer = before.claim(&leases);
            assert!(matches!(answer, Err(Error::TimedOut)), "{answer:?}");
            let claimed = before.is_claimed(&mut raw);
            thread::sleep(later);
            proxy.stop_cutting();
            proxy.thaw();
            if claimed {
                before.is_restored(&others, &mut raw);
            }
            claimed
        });
        assert!(undone, "{kind:?}: never carried out");
    }
}

fn a_claim_whose_reply_was_cut_is_won(engine: Engine) {
    let (database, others) = migrated(engine);
    let mut raw = database.connect();
    let (proxy, leases) = by_proxy(&database, Timings::default());
    for kind in KINDS {
        let before = Before::new(kind, &others, &mut raw);
        proxy.cut_reply_to(leases.instance());
        let answer = before.claim(&leases);
        assert!(!proxy.is_waiting(), "{kind:?}: nothing was cut");
        before.is_won(answer, &others, &mut raw);
    }
}

fn a_claim_that_cannot_be_read_leaves_its_instant_to_be_found(engine: Engine) {
    let (database, others) = migrated(engine);
    let mut raw = database.connect();
    let (proxy, leases) = by_proxy(&database, Timings::default());
    for kind in [Kind::First, Kind::Later] {
        let before = Before::new(kind, &others, &mut raw);
        // A session on each worker there is.
        leases.last_slot(&before.name).unwrap();
        proxy.cut_reply_to(leases.instance());
        proxy.refuse();
        let error = before.claim(&leases).unwrap_err();
        assert!(error.is_transient(), "{error:?}");
        proxy.stop_cutting();
        proxy.accept();

        assert!(before.is_claimed(&mut raw));
        let at = minute_ms(3);
        assert_eq!(marks(&mut raw, &before.name), (at, at, 0));
        refused(others.try_claim_slot(&before.name, minute(4)));
        raw.expire(&before.name);
        let cut_short = found(&others, &before.name);
        assert_eq!(cut_short.slot(), minute(3));
        won(others.try_claim_rerun(&cut_short))
            .finish(None)
            .unwrap();
    }
}

fn a_read_whose_reply_was_cut_is_asked_again(engine: Engine) {
    let (database, others) = migrated(engine);
    let mut raw = database.connect();
    let (proxy, leases) = by_proxy(&database, Timings::default());
    for kind in [Kind::First, Kind::Later, Kind::LaterThanSecond] {
        let before = Before::new(kind, &others, &mut raw);
        leases.last_slot("warm up").unwrap();
        proxy.cut_reply_to(&before.name);
        let answer = before.claim(&leases);
        assert!(!proxy.is_waiting(), "{kind:?}: nothing was cut");
        before.is_won(answer, &others, &mut raw);
    }
    let before = Before::new(Kind::Second, &others, &mut raw);
    proxy.cut_reply_to(&before.name);
    let found = leases.unfinished_slots(&[&before.name]).unwrap();
    assert!(!proxy.is_waiting());
    assert_eq!(found.as_slice(), before.cut_short.as_slice());
}

fn a_finish_whose_reply_was_cut_counts(engine: Engine) {
    let (database, others) = migrated(engine);
    let mut raw = database.connect();
    let (proxy, leases) = by_proxy(&database, Timings::default());
    let name = unique(JOB);
    let lease = won(leases.try_claim_slot(&name, minute(1)));
    proxy.cut_reply_to(&name);
    lease.finish(Some(minute(2))).unwrap();
    assert!(!proxy.is_waiting());
    assert_eq!(marks(&mut raw, &name), (minute_ms(2), 0, 0));
    assert_eq!(raw.row(&name).unwrap().expires_at_ms, 0);

    // Of a round that was lost.
    let lease = won(leases.try_claim_slot(&name, minute(3)));
    raw.expire(&name);
    let second = won(others.try_claim_rerun(&found(&others, &name)));
    lease.renew().unwrap_err();
    proxy.cut_reply_to(&name);
    is_lost(lease.finish(Some(minute(4))));
    assert!(!proxy.is_waiting());
    assert_eq!(marks(&mut raw, &name), (minute_ms(3), 0, minute_ms(3)));
    second.verify().unwrap();
}

fn a_session_that_died_unnoticed_costs_no_instant(engine: Engine) {
    let (database, leases) = migrated(engine);
    for kind in KINDS {
        let before = Before::new(kind, &leases, &mut database.connect());
        assert!(database.kill_sessions() > 0);
        let claim = before.claim(&leases);
        let mut raw = database.connect();
        before.is_won(claim, &leases, &mut raw);
        assert!(before.is_claimed(&mut raw), "{kind:?}");
    }
    let lease = won(leases.try_claim_slot(JOB, minute(1)));
    database.kill_sessions();
    lease.finish(Some(minute(2))).unwrap();
    database.kill_sessions();
    assert_eq!(leases.last_slot(JOB).unwrap(), Some(minute(2)));
    database.kill_sessions();
    nothing_found(&leases, JOB);
}
