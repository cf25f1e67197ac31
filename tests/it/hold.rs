//! Leases that are held: kept, lost and told of, run under, given back.

use std::any::Any;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError, select, unbounded};
use diesel::connection::SimpleConnection;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_lease::{
    Builder, Ending, Error, HeldLease, Lease, Leases, LossCause, Lost, StopToken, Tenure, Timings,
    current,
};
use log::Level;

use crate::support::database::Database;
use crate::support::log::Captured;
use crate::support::process::{Child, Role};
use crate::support::proxy::Proxy;
use crate::support::raw::{AnyConnection, Raw};
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn a_hold_outlasts_several_deadlines,
    fn one_failing_renewal_costs_nothing,
    fn renewals_late_by_three_tenths_of_the_deadline_keep_it,
    fn an_exhausted_pool_of_the_application_does_not_matter,
    fn without_renewals_it_is_lost_at_the_deadline,
    fn a_loss_is_heard_within_a_renewal_by_all,
    fn after_a_stop_renewals_go_on_until_the_work_returns,
    fn run_gives_back_what_the_work_does,
    fn by_default_work_that_will_not_stop_ends_the_process,
    fn a_process_that_stood_still_finds_its_leases_lost,
    fn a_release_beside_a_renewal_in_flight_frees_the_name,
    fn nothing_is_left_of_leases_that_ended,
}

/// The default timings with more frequent renewals: nothing is lost because this machine is busy.
pub(crate) const PATIENT: Timings = Timings {
    lease: Duration::from_secs(15),
    renew: Duration::from_millis(200),
    attempt: Duration::from_secs(5),
    deadline: Duration::from_secs(10),
    grace: Duration::from_secs(5),
};

/// The default timings in a fifth of the time.
const FIFTH: Timings = Timings {
    lease: Duration::from_secs(3),
    renew: Duration::from_millis(400),
    attempt: Duration::from_secs(1),
    deadline: Duration::from_secs(2),
    grace: Duration::from_secs(1),
};

/// What a busy machine may add to a time limit.
pub(crate) const SLACK: Duration = Duration::from_secs(2);

/// Leases at `url`, for which work that will not stop is no reason to end the tests.
pub(crate) fn leases(url: &str, timings: &Timings) -> Leases {
    builder(timings).build(url).unwrap()
}

/// Leases with one connection, so that it is known what a call does with it: once there, it is kept.
pub(crate) fn one_line(url: &str, timings: &Timings) -> Leases {
    builder(timings).connections(1).build(url).unwrap()
}

fn builder(timings: &Timings) -> Builder {
    Leases::builder()
        .timings(timings.clone())
        .on_work_will_not_stop(|_| {})
}

/// Leases in a database that has the table.
pub(crate) fn migrated(database: &Database, timings: &Timings) -> Leases {
    let leases = leases(database.url(), timings);
    leases.migrate().unwrap();
    leases
}

/// Claims a name that is free.
#[track_caller]
pub(crate) fn claim(leases: &Leases, name: &str) -> Lease {
    leases.try_claim(name).unwrap().expect("a free name")
}

#[track_caller]
pub(crate) fn hold(leases: &Leases, name: &str) -> HeldLease {
    claim(leases, name).hold().unwrap()
}

#[track_caller]
pub(crate) fn assert_held(leases: &Leases, name: &str) {
    let claimed = leases.try_claim(name).unwrap();
    assert!(claimed.is_none(), "{name} was free");
}

/// When the work under a tenure hears that it must end.
#[track_caller]
pub(crate) fn ended_at(tenure: &Tenure, limit: Duration) -> Instant {
    match tenure.ended().recv_timeout(limit) {
        Err(RecvTimeoutError::Disconnected) => Instant::now(),
        Err(RecvTimeoutError::Timeout) => panic!("not told to end within {limit:?}"),
        Ok(never) => match never {},
    }
}

/// Waits for a renewal that succeeds from here on.
#[track_caller]
pub(crate) fn renewed(tenure: &Tenure) {
    let known = Instant::now() + tenure.remaining();
    eventually(LONG, "a renewal succeeds", || {
        assert!(!tenure.is_lost(), "lost: {:?}", tenure.check());
        Instant::now() + tenure.remaining() > known + Duration::from_millis(50)
    });
}

/// Keeps everybody else from the row (with SQLite: from writing) until the session's next COMMIT.
pub(crate) fn lock_row(raw: &mut Raw, engine: Engine, name: &str) {
    match engine {
        Engine::Sqlite => raw.batch("BEGIN IMMEDIATE"),
        _ => {
            raw.batch("BEGIN");
            let row = format!("SELECT term FROM diesel_leases WHERE name = '{name}' FOR UPDATE");
            assert_eq!(raw.all_i64(&row).len(), 1);
        }
    }
}

/// Makes every statement fail from here on.
fn hide_table(raw: &mut Raw) {
    raw.batch("ALTER TABLE diesel_leases RENAME TO hidden_leases");
}

fn show_table(raw: &mut Raw) {
    raw.batch("ALTER TABLE hidden_leases RENAME TO diesel_leases");
}

fn a_hold_outlasts_several_deadlines(engine: Engine) {
    let database = Database::create(engine);
    let other = migrated(&database, &FIFTH);
    let held = hold(&leases(database.url(), &FIFTH), "job");
    let tenure = held.tenure().clone();

    let until = Instant::now() + 3 * FIFTH.deadline;
    while Instant::now() < until {
        assert_held(&other, "job");
        assert!(!held.is_lost());
        assert!(tenure.remaining() <= FIFTH.deadline);
        thread::sleep(FIFTH.renew / 2);
    }

    let lease = held.stop();
    assert!(!lease.is_lost());
    assert_eq!(tenure.ended().try_recv(), Err(TryRecvError::Empty));
    lease.release().unwrap();
    assert_eq!(tenure.ended().try_recv(), Err(TryRecvError::Disconnected));
    assert!(tenure.is_lost());
    assert_eq!(claim(&other, "job").term(), 2);
}

fn one_failing_renewal_costs_nothing(engine: Engine) {
    let database = Database::create(engine);
    let name = unique("fails-once");
    let log = Captured::new(&name);
    let held = hold(&migrated(&database, &PATIENT), &name);

    let mut raw = database.connect();
    hide_table(&mut raw);
    eventually(LONG, "a renewal fails", || {
        log.has(Level::Warn, "lease renewal failed")
    });
    show_table(&mut raw);
    renewed(held.tenure());
    held.release().unwrap();
}

fn renewals_late_by_three_tenths_of_the_deadline_keep_it(engine: Engine) {
    let database = Database::create(engine);
    migrated(&database, &FIFTH);
    let late = FIFTH.deadline * 3 / 10;
    let two_deadlines = 2 * FIFTH.deadline;
    let over = |leases: &Leases, slow_down: &mut dyn FnMut(&Tenure, Instant)| {
        let held = hold(leases, "job");
        renewed(held.tenure());
        slow_down(held.tenure(), Instant::now() + two_deadlines);
        assert!(!held.is_lost(), "{:?}", held.tenure().check());
        renewed(held.tenure());
    };
    if engine == Engine::Sqlite {
        let mut writer = database.connect();
        over(&leases(database.url(), &FIFTH), &mut |_, until| {
            while Instant::now() < until {
                writer.batch("BEGIN IMMEDIATE");
                thread::sleep(late);
                writer.batch("COMMIT");
                thread::sleep(late / 2);
            }
        });
    } else {
        let proxy = Proxy::to(database.url());
        // it is a renewal that is late, and not the making of a session
        let leases = one_line(&proxy.url(database.url()), &FIFTH);
        over(&leases, &mut |tenure, until| {
            proxy.delay_requests(late);
            thread::sleep(FIFTH.deadline);
            while Instant::now() < until {
                // it counts from before the renewal was sent
                assert!(tenure.remaining() <= FIFTH.deadline - late);
                thread::sleep(Duration::from_millis(10));
            }
        });
    }
}

fn an_exhausted_pool_of_the_application_does_not_matter(engine: Engine) {
    let database = Database::create(engine);
    let held = hold(&migrated(&database, &FIFTH), "job");
    let pool = Pool::builder()
        .max_size(2)
        .connection_timeout(Duration::from_millis(100))
        .build(ConnectionManager::<AnyConnection>::new(database.url()))
        .unwrap();
    let mut workers = [pool.get().unwrap(), pool.get().unwrap()];
    for worker in &mut workers {
        worker
            .batch_execute("BEGIN; SELECT * FROM diesel_leases")
            .unwrap();
    }

    let until = Instant::now() + FIFTH.deadline * 3 / 2;
    while Instant::now() < until {
        assert!(pool.get().is_err());
        assert!(!held.is_lost());
    }
    renewed(held.tenure());
    for worker in &mut workers {
        worker.batch_execute("COMMIT").unwrap();
    }
    held.release().unwrap();
}

fn without_renewals_it_is_lost_at_the_deadline(engine: Engine) {
    // the renewal after the deadline would be nearly two seconds late
    let timings = Timings {
        lease: Duration::from_secs(4),
        renew: Duration::from_millis(2400),
        attempt: Duration::from_secs(1),
        deadline: Duration::from_secs(3),
        grace: Duration::from_millis(500),
    };
    let database = Database::create(engine);
    migrated(&database, &timings);
    let (leases, told) = told_of_stubborn_work(&database, &timings);
    let name = unique("deadline");
    let log = Captured::new(&name);

    let before = Instant::now();
    let lease = claim(&leases, &name);
    let after = Instant::now();
    let term = lease.term();
    hide_table(&mut database.connect());
    let held = lease.hold().unwrap();
    let output = held.run(|tenure| {
        let lost_at = ended_at(tenure, LONG);
        assert!(lost_at >= before + timings.deadline);
        assert!(lost_at < after + timings.deadline + Duration::from_millis(1500));
        assert_eq!(tenure.ending(), Some(Ending::Lost(LossCause::Unreachable)));

        let (told_at, lost) = told.recv_timeout(LONG).unwrap();
        assert!(told_at >= before + timings.deadline + timings.grace);
        assert_eq!((lost.name(), lost.term()), (name.as_str(), term));
        assert_eq!(lost.cause(), LossCause::Unreachable);
        // once, and the work goes on
        assert!(told.recv_timeout(3 * timings.grace).is_err());
        "worked on"
    });
    assert_eq!(output, "worked on");
    assert!(matches!(held.release(), Err(Error::Lost(_))));

    for (level, message) in [
        (Level::Warn, "lease renewal failed"),
        (Level::Error, "work under a lost lease will not stop"),
    ] {
        let entries = log.entries();
        let entry = entries
            .iter()
            .find(|entry| entry.message.starts_with(message));
        let entry = entry.unwrap_or_else(|| panic!("no {message:?} in {entries:?}"));
        assert_eq!(entry.level, level);
        assert_eq!(entry.get("lease"), Some(name.as_str()));
        assert_eq!(entry.get("term"), Some(term.to_string().as_str()));
        assert_eq!(entry.get("instance"), Some("this one"));
    }
}

/// Leases of the instance "this one", and when their work was found not to stop.
fn told_of_stubborn_work(
    database: &Database,
    timings: &Timings,
) -> (Leases, Receiver<(Instant, Lost)>) {
    let (tell, told) = unbounded();
    let leases = Leases::builder()
        .timings(timings.clone())
        .instance("this one")
        .on_work_will_not_stop(move |lost| drop(tell.send((Instant::now(), lost.clone()))))
        .build(database.url())
        .unwrap();
    (leases, told)
}

fn a_loss_is_heard_within_a_renewal_by_all(engine: Engine) {
    let database = Database::create(engine);
    let leases = migrated(&database, &PATIENT);
    let mut raw = database.connect();
    type End = fn(&mut Raw, &str);
    let ways: [(&str, End); 3] = [
        ("expired", Raw::expire),
        ("taken", |raw, name| drop(raw.take_over(name))),
        ("gone", |raw, name| {
            raw.batch(&format!("DELETE FROM diesel_leases WHERE name = '{name}'"));
        }),
    ];
    for (name, end) in ways {
        let held = hold(&leases, name);
        let tenure = held.tenure();
        assert_eq!(tenure.ended().try_recv(), Err(TryRecvError::Empty));
        let ended_by_hand = thread::scope(|scope| {
            let receivers = [(); 4].map(|()| {
                let tenure = tenure.clone();
                scope.spawn(move || {
                    select! {
                        recv(tenure.ended()) -> message => assert!(message.is_err()),
                        default(LONG) => panic!("{name}: nothing heard"),
                    }
                    // the word is there before the signal
                    (Instant::now(), tenure.ending())
                })
            });
            end(&mut raw, name);
            let ended = Instant::now();
            let row = raw.row(name);
            for receiver in receivers {
                let (at, ending) = receiver.join().unwrap();
                assert!(at < ended + PATIENT.renew + SLACK, "{name}: late");
                assert_eq!(ending, Some(Ending::Lost(LossCause::TakenOrReleased)));
            }
            row
        });
        assert!(matches!(tenure.verify(), Err(Error::Lost(_))));
        assert!(matches!(held.release(), Err(Error::Lost(_))));
        thread::sleep(2 * PATIENT.renew);
        assert_eq!(raw.row(name), ended_by_hand, "{name}: written to");
    }
}

fn after_a_stop_renewals_go_on_until_the_work_returns(engine: Engine) {
    let database = Database::create(engine);
    let other = migrated(&database, &FIFTH);
    let (leases, told) = told_of_stubborn_work(&database, &FIFTH);
    let token = StopToken::new();
    let leases = leases.with_stop(&token);
    let idle = hold(&leases, "idle");
    let held = hold(&leases, "work");

    thread::scope(|scope| {
        // dropped on a failure, so that the work returns
        let (may_return, returns) = unbounded::<()>();
        let held = &held;
        let work = scope.spawn(move || {
            held.run(|tenure| {
                ended_at(tenure, LONG);
                assert_eq!(tenure.ending(), Some(Ending::Stopped));
                assert_eq!(tenure.sleep(LONG), Err(Ending::Stopped));
                assert!(tenure.check().is_ok());
                returns.recv().unwrap();
                tenure.ending()
            })
        });
        token.stop();
        assert!(matches!(leases.try_claim("new"), Err(Error::Stopped)));
        ended_at(idle.tenure(), LONG);

        // longer than a lease, and than three graces
        let until = Instant::now() + FIFTH.lease * 3 / 2;
        while Instant::now() < until {
            assert_held(&other, "idle");
            assert_held(&other, "work");
            thread::sleep(FIFTH.renew / 2);
        }
        assert!(told.is_empty());
        assert!(!work.is_finished());
        idle.stop().release().unwrap();
        claim(&other, "idle").release().unwrap();

        database.connect().expire("work");
        let (_, lost) = told.recv_timeout(LONG).unwrap();
        assert_eq!(lost.name(), "work");
        assert_eq!(lost.cause(), LossCause::TakenOrReleased);
        assert!(!work.is_finished());
        may_return.send(()).unwrap();
        let ending = work.join().unwrap();
        assert_eq!(ending, Some(Ending::Lost(LossCause::TakenOrReleased)));
    });
    assert!(held.is_lost());
}

fn run_gives_back_what_the_work_does(engine: Engine) {
    let database = Database::create(engine);
    let other = migrated(&database, &PATIENT);
    let (leases, told) = told_of_stubborn_work(&database, &PATIENT);

    let held = hold(&leases, "job");
    let value = held.run(|tenure| {
        assert_eq!(current().unwrap().name(), "job");
        tenure.term()
    });
    assert_eq!(value, 1);
    assert!(current().is_none());
    let failed: Result<(), _> = held.run(|_| Err("as it is"));
    assert_eq!(failed, Err("as it is"));
    assert_held(&other, "job");

    let panic = caught(|| held.run(|_| -> () { panic!("on purpose") }));
    assert_eq!(panic.downcast_ref(), Some(&"on purpose"));
    assert!(current().is_none());
    assert!(held.is_lost());
    claim(&other, "job").release().unwrap();

    // lost before it begins: the work is called, and finds out
    let found = held.run(|tenure| tenure.check().map_err(|lost| lost.cause()));
    assert_eq!(found, Err(LossCause::TakenOrReleased));
    assert!(matches!(held.release(), Err(Error::Lost(_))));
    assert!(told.is_empty());
}

fn caught(work: impl FnOnce()) -> Box<dyn Any + Send> {
    catch_unwind(AssertUnwindSafe(work)).expect_err("a panic")
}

fn by_default_work_that_will_not_stop_ends_the_process(engine: Engine) {
    let database = Database::create(engine);
    migrated(&database, &PATIENT);
    let mut child = Child::spawn("hold::will_not_stop", &[("url", database.url())]);
    assert_eq!(child.hear(), "working");
    database.connect().expire("job");
    assert_eq!(child.hear(), "lost");
    assert_eq!(child.hear(), "working on in the grace");
    assert_eq!(child.wait().signal(), Some(6), "SIGABRT");
}

/// Works on under a lost lease.
pub(crate) fn will_not_stop(role: &Role) {
    let timings = Timings {
        grace: Duration::from_secs(1),
        ..PATIENT
    };
    let leases = Leases::builder()
        .timings(timings)
        .build(&role.argument("url"))
        .unwrap();
    hold(&leases, "job").run(|tenure| {
        role.say("working");
        ended_at(tenure, LONG);
        role.say("lost");
        thread::sleep(Duration::from_millis(200));
        role.say("working on in the grace");
        thread::sleep(LONG);
    });
    role.say("returned");
}

const STOOD_STILL: [&str; 4] = ["held-taken", "held-left", "plain-taken", "plain-left"];

fn a_process_that_stood_still_finds_its_leases_lost(engine: Engine) {
    let database = Database::create(engine);
    let other = migrated(&database, &PATIENT);
    let mut child = Child::spawn("hold::stand_still", &[("url", database.url())]);
    assert_eq!(child.hear(), "holding");
    child.stop();
    for name in STOOD_STILL {
        assert_held(&other, name);
    }
    for name in STOOD_STILL {
        eventually(LONG, "leases run out", || {
            let record = other.inspect(name).unwrap().unwrap();
            record.expires_in().is_none()
        });
    }
    let taken = [STOOD_STILL[0], STOOD_STILL[2]].map(|name| claim(&other, name));
    let mut raw = database.connect();
    let rows = STOOD_STILL.map(|name| raw.row(name));

    child.cont();
    child.tell("go on");
    assert_eq!(child.hear(), "all lost");
    child.tell("end");
    assert!(child.wait().success());
    assert_eq!(STOOD_STILL.map(|name| raw.row(name)), rows);
    for lease in taken {
        assert_eq!(lease.term(), 2);
        lease.verify().unwrap();
    }
    assert_eq!(claim(&other, "held-left").term(), 2);
    assert_eq!(claim(&other, "plain-left").term(), 2);
}

/// Holds leases while its parent stops it.
pub(crate) fn stand_still(role: &Role) {
    let leases = leases(&role.argument("url"), &FIFTH);
    let [held @ .., third, fourth] = STOOD_STILL;
    let held = held.map(|name| hold(&leases, name));
    let plain = [third, fourth].map(|name| claim(&leases, name));
    for lease in &plain {
        lease.renew().unwrap();
    }
    role.say("holding");
    assert_eq!(role.hear(), "go on");
    for lease in &plain {
        assert!(matches!(lease.renew(), Err(Error::Lost(_))));
        assert!(lease.is_lost());
    }
    for held in &held {
        assert!(held.is_lost());
        ended_at(held.tenure(), SLACK);
        assert!(matches!(held.tenure().verify(), Err(Error::Lost(_))));
    }
    thread::sleep(2 * FIFTH.renew);
    for lease in plain {
        assert!(matches!(lease.release(), Err(Error::Lost(_))));
    }
    drop(held);
    role.say("all lost");
    assert_eq!(role.hear(), "end");
}

fn a_release_beside_a_renewal_in_flight_frees_the_name(engine: Engine) {
    let database = Database::create(engine);
    let other = migrated(&database, &PATIENT);
    let held = hold(&leases(database.url(), &PATIENT), "job");
    renewed(held.tenure());

    let mut stranger = database.connect();
    lock_row(&mut stranger, engine, "job");
    // a renewal comes and waits for the row, and then the release
    thread::sleep(2 * PATIENT.renew);
    thread::scope(|scope| {
        let release = scope.spawn(|| held.release());
        thread::sleep(PATIENT.renew);
        assert!(!release.is_finished());
        stranger.batch("COMMIT");
        release.join().unwrap().unwrap();
    });

    let lease = claim(&other, "job");
    let row = stranger.row("job");
    thread::sleep(3 * PATIENT.renew);
    assert_eq!(stranger.row("job"), row);
    lease.release().unwrap();
    thread::sleep(3 * PATIENT.renew);
    assert_eq!(stranger.row("job").unwrap().expires_at_ms, 0);
}

fn nothing_is_left_of_leases_that_ended(engine: Engine) {
    let database = Database::create(engine);
    migrated(&database, &PATIENT);
    let mut child = Child::spawn("hold::come_and_go", &[("url", database.url())]);
    assert_eq!(child.hear(), "gone");
    child.tell("end");
    assert!(child.wait().success());
}

/// Counts its threads and its connections, before, while and after it has leases.
pub(crate) fn come_and_go(role: &Role) {
    let url = role.argument("url");
    // some client libraries let the parent's sockets through
    let inherited = connections(&url);
    let nothing_is_there = || lease_threads("lease-") == 0 && connections(&url) == inherited;
    assert!(nothing_is_there());
    let leases = leases(&url, &PATIENT);
    drop(leases.with_stop(&StopToken::new()));
    assert!(nothing_is_there());

    let held = Vec::from_iter((0..10).map(|at| hold(&leases, &format!("job-{at}"))));
    eventually(LONG, "each has a thread with its name", || {
        lease_threads("lease-renew") == 10
    });
    assert!(lease_threads("lease-io") <= 2);
    assert!(connections(&url) > inherited);
    for (at, held) in held.into_iter().enumerate() {
        match at % 3 {
            0 => drop(held),
            1 => held.release().unwrap(),
            _ => drop(held.stop()),
        }
    }
    eventually(LONG, "no renewal thread is left", || {
        lease_threads("lease-renew") == 0
    });
    eventually(LONG, "all names are free", || {
        let records = leases.list().unwrap();
        records.iter().all(|record| record.expires_in().is_none())
    });
    assert!(lease_threads("lease-io") <= 2);
    drop(leases);
    eventually(LONG, "nothing is left", nothing_is_there);
    role.say("gone");
    assert_eq!(role.hear(), "end");
}

/// How many threads of this process have names that begin so.
pub(crate) fn lease_threads(name: &str) -> usize {
    let threads = fs::read_dir("/proc/self/task").unwrap().flatten();
    threads
        .filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok())
        .filter(|comm| comm.starts_with(name))
        .count()
}

/// How many sockets this process has, or descriptors of the SQLite file and those beside it.
fn connections(url: &str) -> usize {
    let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
    open.filter_map(|open| fs::read_link(open.path()).ok())
        .filter(|to| {
            let to = to.to_string_lossy();
            to.starts_with("socket:") || to.starts_with(url)
        })
        .count()
}
