//! Servers and networks that fail: what is lost and when, how long a call takes, what is left behind.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::TryRecvError;
use diesel_lease::{Ending, Error, HeldLease, Lease, Leases, LossCause, Tenure, Timings};
use log::Level;

use crate::hold::{
    PATIENT, SLACK, assert_held, claim, ended_at, hold, lease_threads, leases, lock_row, migrated,
    one_line, renewed,
};
use crate::support::database::Database;
use crate::support::log::Captured;
use crate::support::process::{Child, Role};
use crate::support::proxy::Proxy;
use crate::support::servers::OwnServer;
use crate::support::{Engine, LONG, TIMINGS, engines, eventually, unique};

engines! {
    fn a_claim_in_a_database_that_stays_busy_times_out;
    servers:
    fn behind_a_frozen_network_it_is_lost_before_another_holds,
    fn behind_a_network_that_resets_it_is_lost_before_another_holds,
    fn under_a_stopped_server_it_is_lost_before_another_holds,
    fn under_a_killed_server_it_is_lost_before_another_holds,
    fn under_a_read_only_server_it_is_lost_and_claims_work_after,
    fn a_short_stop_of_the_server_costs_nothing,
    fn a_short_freeze_of_the_network_costs_nothing,
    fn killed_and_reset_sessions_cost_nothing,
    fn calls_into_a_frozen_network_are_bounded,
    fn calls_to_a_stopped_server_are_bounded,
    fn a_wait_is_bounded_when_the_network_freezes_meanwhile,
    fn no_waiter_is_told_that_a_name_is_held_by_a_server_that_cannot_say,
    fn drops_and_the_exit_of_the_process_do_not_wait_for_a_stopped_server,
    fn rounds_against_a_stopped_server_leave_no_more_than_the_cap,
    fn rounds_against_reset_connections_leave_no_more_than_the_cap,
    fn a_claim_whose_reply_is_cut_is_won,
    fn a_claim_without_an_answer_blocks_the_name_for_a_lease_at_most,
    fn replies_that_are_cut_make_no_false_answers,
    fn a_release_whose_reply_is_cut_is_no_loss_when_another_claims,
    fn a_renewal_that_arrives_after_the_release_changes_nothing,
    fn a_row_that_is_locked_is_held,
}

/// From the deadline to the end of the lease there is time for a signal on a busy machine.
const TIMES: Timings = Timings {
    lease: Duration::from_secs(4),
    renew: Duration::from_millis(400),
    attempt: Duration::from_secs(1),
    deadline: Duration::from_secs(2),
    grace: Duration::from_secs(1),
};

/// Within the bound of a call, and what a busy machine adds.
#[track_caller]
fn within<T: Send + 'static>(
    bound: Duration,
    what: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (answer, answered) = mpsc::channel();
    let start = Instant::now();
    thread::spawn(move || answer.send(call()));
    let answer = answered.recv_timeout(bound + SLACK);
    answer.unwrap_or_else(|error| panic!("{what}: {error} after {:?}", start.elapsed()))
}

/// Waits for the loss of a lease whose renewals cannot succeed from `cut` on. It is the deadline's.
#[track_caller]
fn lost_at_its_deadline(tenure: &Tenure, cut: Instant) {
    let promised = Instant::now() + tenure.remaining();
    let deadline = TIMES.deadline;
    let at = ended_at(tenure, LONG);
    assert!(at >= promised, "lost {:?} early", promised - at);
    assert!(at < cut + deadline + SLACK, "lost {:?} late", at - cut);
    assert_eq!(tenure.ending(), Some(Ending::Lost(LossCause::Unreachable)));
}

/// The next holder, once the name is free; until then the database may be in trouble.
#[track_caller]
fn next_holder(leases: &Leases, after: &HeldLease) -> HeldLease {
    let tenure = after.tenure();
    let mut next = None;
    eventually(LONG, "the name passes on", || {
        next = leases.try_claim(tenure.name()).ok().flatten();
        next.is_some()
    });
    let next = next.unwrap();
    assert!(tenure.is_lost());
    assert_eq!(next.term(), tenure.term() + 1);
    next.hold().unwrap()
}

/// Holds a name by way of a network that is then cut, while another waits for it at the server.
fn cut_off(engine: Engine, cut: fn(&Proxy), mend: fn(&Proxy)) {
    let database = Database::create(engine);
    let other = migrated(&database, &TIMES);
    let proxy = Proxy::to(database.url());
    let leases = leases(&proxy.url(database.url()), &TIMES);
    let held = hold(&leases, "job");
    let tenure = held.tenure().clone();
    let next = thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let next = other.claim_timeout("job", LONG).unwrap();
            // before this asks, and would find the loss by itself
            let signal = tenure.ended().try_recv();
            (next.expect("a free name"), signal, tenure.is_lost())
        });
        renewed(&tenure);
        cut(&proxy);
        lost_at_its_deadline(&tenure, Instant::now());
        let (next, signal, was_lost) = waiter.join().unwrap();
        assert_eq!(signal, Err(TryRecvError::Disconnected));
        assert!(was_lost);
        next.hold().unwrap()
    });
    assert_eq!(next.tenure().term(), 2);

    let refused = within(Duration::ZERO, "a release when lost", || held.release());
    assert!(matches!(refused, Err(Error::Lost(_))));
    mend(&proxy);
    renewed(next.tenure());
    eventually(LONG, "the network carries again", || {
        leases.inspect("job").is_ok()
    });
    assert!(tenure.is_lost());
    assert_held(&leases, "job");
    next.tenure().verify().unwrap();
}

fn behind_a_frozen_network_it_is_lost_before_another_holds(engine: Engine) {
    cut_off(engine, Proxy::freeze, Proxy::thaw);
}

fn behind_a_network_that_resets_it_is_lost_before_another_holds(engine: Engine) {
    let reset = |proxy: &Proxy| {
        proxy.refuse();
        proxy.drop_connections();
    };
    cut_off(engine, reset, Proxy::accept);
}

fn under_a_stopped_server_it_is_lost_before_another_holds(engine: Engine) {
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    let held = hold(&migrated(&database, &TIMES), "job");
    renewed(held.tenure());
    let paused = server.pause();
    lost_at_its_deadline(held.tenure(), Instant::now());
    paused.resume();
    let next = next_holder(&leases(database.url(), &TIMES), &held);
    renewed(next.tenure());
}

fn under_a_killed_server_it_is_lost_before_another_holds(engine: Engine) {
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    let leases = migrated(&database, &TIMES);
    let held = hold(&leases, "job");
    renewed(held.tenure());
    server.kill();
    lost_at_its_deadline(held.tenure(), Instant::now());
    server.restart();
    let next = next_holder(&leases, &held);
    renewed(next.tenure());
}

fn under_a_read_only_server_it_is_lost_and_claims_work_after(engine: Engine) {
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    let leases = migrated(&database, &TIMES);
    let held = hold(&leases, "job");
    renewed(held.tenure());
    let (read_only, writable) = match engine {
        Engine::Postgres => {
            let set = |to| {
                let name = database.name();
                format!("ALTER DATABASE {name} SET default_transaction_read_only = {to}")
            };
            (set("on"), set("off"))
        }
        _ => (
            "SET GLOBAL read_only = 1".to_owned(),
            "SET GLOBAL read_only = 0".to_owned(),
        ),
    };
    server.configure(&read_only, &writable);
    database.kill_sessions();
    lost_at_its_deadline(held.tenure(), Instant::now());
    assert!(leases.inspect("job").unwrap().is_some());
    assert!(leases.try_claim("new").unwrap_err().is_transient());

    server.admin().batch(&writable);
    let next = next_holder(&leases, &held);
    renewed(next.tenure());
}

fn a_short_stop_of_the_server_costs_nothing(engine: Engine) {
    let timings = Timings {
        lease: Duration::from_secs(8),
        deadline: Duration::from_secs(5),
        ..TIMES
    };
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    let held = hold(&migrated(&database, &timings), "job");
    renewed(held.tenure());
    let paused = server.pause();
    thread::sleep(timings.deadline / 2);
    paused.resume();
    renewed(held.tenure());
    held.release().unwrap();
}

fn a_short_freeze_of_the_network_costs_nothing(engine: Engine) {
    let database = Database::create(engine);
    migrated(&database, &PATIENT);
    let proxy = Proxy::to(database.url());
    let name = unique("frozen");
    let held = hold(&leases(&proxy.url(database.url()), &PATIENT), &name);
    renewed(held.tenure());
    let log = Captured::new(&name);
    proxy.freeze();
    thread::sleep(PATIENT.attempt / 4);
    proxy.thaw();
    renewed(held.tenure());
    assert!(!log.has(Level::Warn, ""), "{:?}", log.entries());
    held.release().unwrap();
}

fn killed_and_reset_sessions_cost_nothing(engine: Engine) {
    let database = Database::create(engine);
    migrated(&database, &PATIENT);
    let proxy = Proxy::to(database.url());
    let leases = leases(&proxy.url(database.url()), &PATIENT);
    let held = hold(&leases, "job");
    for _ in 0..3 {
        renewed(held.tenure());
        assert!(database.kill_sessions() > 0);
        claim(&leases, "after a kill").release().unwrap();
        renewed(held.tenure());
        proxy.drop_connections();
        claim(&leases, "after a reset").release().unwrap();
    }
    held.release().unwrap();
}

/// Makes every call while `stop` has stopped the answers, all at once, through sessions that were
/// there before and through new ones.
fn calls_are_bounded<Stopped>(
    database: &Database,
    url: &str,
    stop: impl FnOnce() -> Stopped,
) -> Stopped {
    let kept = migrated(database, &PATIENT);
    let _other = claim(&kept, "held elsewhere");
    let kept = leases(url, &TIMINGS);
    let fresh = leases(url, &TIMINGS);
    kept.list().unwrap();
    let [renew, verify, release, held] =
        ["renew", "verify", "release", "held"].map(|name| claim(&kept, name));
    let tenure = renew.tenure();
    let held = held.hold().unwrap();
    let stopped = stop();

    let call = |what: &'static str, bound, call: Box<dyn FnOnce() -> Option<Error> + Send>| {
        thread::spawn(move || {
            let error = within(bound, what, call);
            let error = error.unwrap_or_else(|| panic!("{what}: answered"));
            assert!(error.is_transient(), "{what}: {error:?}");
        })
    };
    macro_rules! call {
        ($bound:expr, $leases:ident => $call:expr) => {{
            let $leases = $leases.clone();
            call(stringify!($call), $bound, Box::new(move || $call.err()))
        }};
    }
    let bound = TIMINGS.attempt;
    let timeout = Duration::from_secs(2);
    let calls = [
        call!(bound, tenure => tenure.verify()),
        call("renew", bound, Box::new(move || renew.renew().err())),
        call("verify", bound, Box::new(move || verify.verify().err())),
        call("release", bound, Box::new(move || release.release().err())),
        call(
            "release held",
            bound,
            Box::new(move || held.release().err()),
        ),
        call!(bound, kept => kept.try_claim("new")),
        call!(bound, fresh => fresh.try_claim("new")),
        call!(bound, kept => kept.claim("held elsewhere")),
        call!(timeout + bound, kept => kept.claim_timeout("held elsewhere", Duration::from_secs(2))),
        call!(bound, fresh => fresh.claim("held elsewhere")),
        call!(bound, kept => kept.inspect("held elsewhere")),
        call!(bound, fresh => fresh.inspect("held elsewhere")),
        call!(bound, kept => kept.list()),
        call!(bound, kept => kept.force_release("held elsewhere")),
        call!(bound, fresh => fresh.force_release("held elsewhere")),
        call!(bound, kept => kept.available()),
        call!(bound, fresh => fresh.available()),
    ];
    for call in calls {
        call.join().unwrap();
    }
    // by now there may be as many that hang as may hang
    for _ in 0..10 {
        let (kept, fresh) = (kept.clone(), fresh.clone());
        within(bound, "once more", move || kept.list()).unwrap_err();
        within(bound, "once more", move || fresh.list()).unwrap_err();
    }
    stopped
}

fn calls_into_a_frozen_network_are_bounded(engine: Engine) {
    let database = Database::create(engine);
    let proxy = Proxy::to(database.url());
    calls_are_bounded(&database, &proxy.url(database.url()), || proxy.freeze());
}

fn calls_to_a_stopped_server_are_bounded(engine: Engine) {
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    calls_are_bounded(&database, database.url(), || server.pause()).resume();
}

/// Also not those that have waited behind another all the while.
fn no_waiter_is_told_that_a_name_is_held_by_a_server_that_cannot_say(engine: Engine) {
    let database = Database::create(engine);
    migrated(&database, &TIMES);
    let proxy = Proxy::to(database.url());
    let leases = leases(&proxy.url(database.url()), &TIMES);
    leases.inspect("job").unwrap();
    proxy.freeze();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let answer = leases.claim_timeout("job", TIMES.attempt / 4);
                assert!(matches!(answer, Err(Error::TimedOut)), "{answer:?}");
            });
        }
    });
}

fn a_wait_is_bounded_when_the_network_freezes_meanwhile(engine: Engine) {
    let database = Database::create(engine);
    let _other = claim(&migrated(&database, &PATIENT), "job");
    let proxy = Proxy::to(database.url());
    let leases = leases(&proxy.url(database.url()), &TIMINGS);
    let timeout = Duration::from_secs(1);

    let start = Instant::now();
    let held = leases.claim_timeout("job", timeout).unwrap();
    assert!(held.is_none());
    assert!(start.elapsed() >= timeout);

    let waiting = leases.clone();
    let waiter = thread::spawn(move || {
        within(timeout + TIMINGS.attempt, "a wait", move || {
            waiting.claim_timeout("job", timeout)
        })
    });
    thread::sleep(timeout / 2);
    proxy.freeze();
    match waiter.join().unwrap() {
        Ok(lease) => assert!(lease.is_none()),
        Err(error) => assert!(error.is_transient(), "{error:?}"),
    }
    // without a timeout it is the error that ends it
    let error = within(TIMINGS.attempt, "a claim", move || leases.claim("job"));
    assert!(error.unwrap_err().is_transient());
}

fn drops_and_the_exit_of_the_process_do_not_wait_for_a_stopped_server(engine: Engine) {
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    migrated(&database, &PATIENT);
    let mut child = Child::spawn("network::drop_and_exit", &[("url", database.url())]);
    assert_eq!(child.hear(), "holding");
    let paused = server.pause();
    child.tell("drop");
    let dropped = child.hear_within(SLACK);
    assert_eq!(dropped.as_deref(), Some("dropped"), "in time");
    let start = Instant::now();
    child.tell("exit");
    assert!(child.wait().success());
    assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());
    paused.resume();
}

/// Drops leases, and exits with others.
pub(crate) fn drop_and_exit(role: &Role) {
    let leases = leases(&role.argument("url"), &PATIENT);
    let held = ["1", "2", "3", "4"].map(|name| hold(&leases, name));
    let plain = ["5", "6"].map(|name| claim(&leases, name));
    let (busy, free) = (leases.clone(), leases.clone());
    role.say("holding");
    assert_eq!(role.hear(), "drop");
    thread::spawn(move || busy.list());
    let [first, second, rest @ ..] = held;
    drop((first, second.stop(), plain, free));
    role.say("dropped");
    assert_eq!(role.hear(), "exit");
    std::mem::forget(rest); // the process ends with them
    drop(leases);
}

const ROUNDS: usize = 200;
const SIZE: usize = 2;
/// As many as may hang, and one that looks whether the network is back.
const CAP: usize = SIZE + 8 + 1;

/// Lets a child ask in rounds while `stop` lasts, and again when it is over.
fn rounds<Stopped>(url: &str, proxy: &Proxy, stop: impl FnOnce() -> Stopped, go_on: fn(Stopped)) {
    let mut child = Child::spawn("network::ask_in_rounds", &[("url", &proxy.url(url))]);
    assert_eq!(child.hear(), "ready");
    assert!(proxy.connections() <= SIZE);
    let stopped = stop();
    child.tell("ask");
    let start = Instant::now();
    loop {
        let connections = proxy.connections();
        assert!(connections <= CAP, "{connections} connections");
        match child.hear_within(Duration::from_millis(20)) {
            Some(line) => break assert_eq!(line, "asked"),
            None => assert!(start.elapsed() < LONG, "{}", child.output()),
        }
    }
    go_on(stopped);
    child.tell("ask again");
    assert_eq!(child.hear(), "answered");
    eventually(LONG, "connections that hung are closed", || {
        proxy.connections() <= SIZE
    });
    child.tell("end");
    assert!(child.wait().success());
}

/// Asks again and again, and counts the threads for that.
pub(crate) fn ask_in_rounds(role: &Role) {
    let url = role.argument("url");
    // able to answer before its sessions are lost
    let held = hold(&leases(&url, &PATIENT), "held");
    held.release().unwrap();
    let timings = Timings {
        attempt: Duration::from_millis(100),
        ..TIMINGS
    };
    let leases = leases(&url, &timings);
    eventually(LONG, "an answer", || leases.list().is_ok());
    eventually(LONG, "only these have threads", || {
        lease_threads("lease-io") <= SIZE
    });
    let held = ["a", "b", "c"].map(|name| {
        let mut lease = None;
        eventually(LONG, "a claim", || {
            lease = leases.try_claim(name).ok().flatten();
            lease.is_some()
        });
        lease.unwrap().hold().unwrap()
    });
    role.say("ready");
    assert_eq!(role.hear(), "ask");
    for round in 0..ROUNDS {
        let failed = match round % 3 {
            0 => leases.try_claim("new").err(),
            1 => leases.inspect("new").err(),
            _ => held[0].tenure().verify().err(),
        };
        assert!(failed.is_some(), "round {round} was answered");
        let threads = lease_threads("lease-io");
        assert!(threads <= CAP, "{threads} in round {round}");
        assert!(lease_threads("lease-renew") <= held.len());
        thread::sleep(Duration::from_millis(5));
    }
    drop(held);
    role.say("asked");
    assert_eq!(role.hear(), "ask again");
    eventually(LONG, "an answer", || leases.list().is_ok());
    eventually(LONG, "threads that hung end", || {
        lease_threads("lease-io") <= SIZE && lease_threads("lease-renew") == 0
    });
    role.say("answered");
    assert_eq!(role.hear(), "end");
}

fn rounds_against_a_stopped_server_leave_no_more_than_the_cap(engine: Engine) {
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    migrated(&database, &PATIENT);
    let proxy = Proxy::to(database.url());
    rounds(
        database.url(),
        &proxy,
        || server.pause(),
        |paused| paused.resume(),
    );
}

fn rounds_against_reset_connections_leave_no_more_than_the_cap(engine: Engine) {
    let database = Database::create(engine);
    migrated(&database, &PATIENT);
    let proxy = Proxy::to(database.url());
    let stop = || {
        proxy.refuse();
        proxy.drop_connections();
        &proxy
    };
    rounds(database.url(), &proxy, stop, Proxy::accept);
}

fn a_claim_whose_reply_is_cut_is_won(engine: Engine) {
    let database = Database::create(engine);
    let other = migrated(&database, &PATIENT);
    let proxy = Proxy::to(database.url());
    let leases = leases(&proxy.url(database.url()), &PATIENT);
    leases.list().unwrap();
    // a first claim, and one of a name that was held before
    for term in [1, 2] {
        proxy.cut_reply_to("job");
        let lease = claim(&leases, "job");
        assert!(!proxy.is_waiting());
        // sent once
        assert_eq!(lease.term(), term);
        assert_held(&other, "job");
        lease.verify().unwrap();
        lease.renew().unwrap();
        lease.release().unwrap();
    }
}

fn a_claim_without_an_answer_blocks_the_name_for_a_lease_at_most(engine: Engine) {
    let database = Database::create(engine);
    let other = migrated(&database, &TIMINGS);
    let proxy = Proxy::to(database.url());
    let url = proxy.url(database.url());
    let claim_unanswered = |timings: &Timings, name| {
        let leases = leases(&url, timings);
        leases.list().unwrap();
        proxy.freeze_reply_to(name);
        let claim = {
            let leases = leases.clone();
            move || leases.try_claim(name)
        };
        let answer = within(timings.attempt, "a claim", claim);
        assert!(matches!(answer, Err(Error::TimedOut)), "{answer:?}");
        assert!(!proxy.is_waiting());
        assert_held(&other, name);
        leases
    };
    let free_within = |limit, name| {
        let next = other.claim_timeout(name, limit).unwrap();
        assert_eq!(next.expect("a free name").term(), 2);
    };

    let silent = claim_unanswered(&TIMINGS, "silent");
    free_within(TIMINGS.lease + SLACK, "silent");
    proxy.thaw();
    drop(silent);

    // an answer that comes late, and well before the lease has run out, is given back
    let short = Timings {
        attempt: TIMINGS.attempt,
        ..PATIENT
    };
    let late = claim_unanswered(&short, "late");
    proxy.thaw();
    free_within(PATIENT.lease / 2, "late");
    drop(late);

    // there is nobody to ask whether it was won
    let cut = one_line(&url, &TIMINGS);
    claim(&cut, "prepared").release().unwrap();
    proxy.cut_replies();
    let error = cut.try_claim("cut").unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    free_within(TIMINGS.lease + SLACK, "cut");
}

fn replies_that_are_cut_make_no_false_answers(engine: Engine) {
    let database = Database::create(engine);
    let other = migrated(&database, &PATIENT);
    let proxy = Proxy::to(database.url());
    let leases = one_line(&proxy.url(database.url()), &PATIENT);
    let mut raw = database.connect();

    let lease = claim(&leases, "job");
    let renew: fn(&Lease) -> Result<(), Error> = Lease::renew;
    for (what, ask) in [("renew", renew), ("verify", Lease::verify)] {
        ask(&lease).unwrap();
        proxy.cut_reply_to("job");
        right_or_unknown(what, ask(&lease));
        assert!(!proxy.is_waiting(), "{what}: was not asked");
        proxy.cut_replies();
        unknown(what, ask(&lease));
        proxy.stop_cutting();
        ask(&lease).unwrap();
    }

    proxy.cut_reply_to("job");
    right_or_unknown("release", lease.release());
    assert!(!proxy.is_waiting());
    assert_eq!(raw.row("job").unwrap().expires_at_ms, 0);

    let lease = claim(&leases, "job");
    proxy.cut_replies();
    unknown("release", lease.release());
    proxy.stop_cutting();

    let forced = claim(&other, "forced");
    leases.list().unwrap();
    proxy.cut_reply_to("forced");
    let freed = leases.force_release("forced");
    right_or_unknown("force", freed.map(|freed| assert!(freed, "it was held")));
    assert!(!proxy.is_waiting());
    let row = raw.row("forced").unwrap();
    assert_eq!((row.term, row.expires_at_ms), (2, 0));
    assert!(matches!(forced.verify(), Err(Error::Lost(_))));
    assert!(!leases.force_release("forced").unwrap());
}

fn a_release_whose_reply_is_cut_is_no_loss_when_another_claims(engine: Engine) {
    let database = Database::create(engine);
    let other = migrated(&database, &PATIENT);
    let proxy = Proxy::to(database.url());
    let lease = claim(&one_line(&proxy.url(database.url()), &PATIENT), "job");
    lease.renew().unwrap();
    // the other comes before a new session is made
    proxy.delay_requests(Duration::from_millis(100));
    proxy.cut_reply_to("job");
    let release = thread::spawn(move || lease.release());
    let mut next = None;
    eventually(LONG, "the name is free", || {
        next = other.try_claim("job").unwrap();
        next.is_some()
    });
    right_or_unknown("release", release.join().unwrap());
    next.unwrap().verify().unwrap();
}

#[track_caller]
fn right_or_unknown(what: &str, answer: Result<(), Error>) {
    if answer.is_err() {
        unknown(what, answer);
    }
}

#[track_caller]
fn unknown(what: &str, answer: Result<(), Error>) {
    let error = answer.expect_err(what);
    assert!(error.is_transient(), "{what}: {error:?}");
}

fn a_renewal_that_arrives_after_the_release_changes_nothing(engine: Engine) {
    let late = Duration::from_secs(1);
    let database = Database::create(engine);
    let other = migrated(&database, &PATIENT);
    let proxy = Proxy::to(database.url());
    let held = hold(&leases(&proxy.url(database.url()), &PATIENT), "job");
    renewed(held.tenure());
    proxy.delay_requests(late);
    thread::sleep(2 * PATIENT.renew);
    proxy.delay_requests(Duration::ZERO);
    held.release().unwrap();

    let mut raw = database.connect();
    assert_eq!(raw.row("job").unwrap().expires_at_ms, 0);
    thread::sleep(late + 2 * PATIENT.renew);
    assert_eq!(raw.row("job").unwrap().expires_at_ms, 0);
    assert_eq!(claim(&other, "job").term(), 2);
}

fn a_row_that_is_locked_is_held(engine: Engine) {
    let database = Database::create(engine);
    let name = unique("locked");
    let log = Captured::new(&name);
    let held = hold(&migrated(&database, &PATIENT), &name);
    let other = leases(database.url(), &PATIENT);
    claim(&other, "free").release().unwrap();
    renewed(held.tenure());

    let mut strangers = [database.connect(), database.connect()];
    lock_row(&mut strangers[0], engine, &name);
    lock_row(&mut strangers[1], engine, "free");
    for name in [&name, "free"] {
        let start = Instant::now();
        assert_held(&other, name);
        let took = start.elapsed();
        assert!(took < Duration::from_secs(2) + SLACK, "{name}: {took:?}");
    }
    let forced = other.force_release(&name);
    assert!(matches!(forced, Err(Error::TimedOut)), "{forced:?}");
    eventually(LONG, "a renewal meets the lock", || {
        log.has(Level::Warn, "lease renewal failed")
    });
    for stranger in &mut strangers {
        stranger.batch("COMMIT");
    }
    renewed(held.tenure());
    claim(&other, "free").release().unwrap();
    held.release().unwrap();
}

fn a_claim_in_a_database_that_stays_busy_times_out(engine: Engine) {
    let database = Database::create(engine);
    let leases = migrated(&database, &TIMINGS);
    let mut stranger = database.connect();
    stranger.batch(match engine {
        Engine::Sqlite => "BEGIN IMMEDIATE",
        Engine::Postgres => "BEGIN; LOCK TABLE diesel_leases IN ACCESS EXCLUSIVE MODE",
        _ => "LOCK TABLES diesel_leases WRITE",
    });
    let busy = leases.clone();
    let answer = within(TIMINGS.attempt, "a claim", move || busy.try_claim("job"));
    match answer {
        Err(Error::TimedOut) => {}
        // the server may come first
        Err(Error::Database { .. }) if engine != Engine::Sqlite => {}
        other => panic!("{other:?}"),
    }
    drop(stranger);
    eventually(LONG, "claims work again", || {
        matches!(leases.try_claim("job"), Ok(Some(_)))
    });
}
