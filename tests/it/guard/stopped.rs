//! A process that is stopped in the middle of a guarded transaction, for longer than its lease, while
//! another holds the name and commits.
//!
//! Wherever it stands, it commits nothing when it goes on; except between the fence and the COMMIT,
//! where the other has to wait for it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::InstrumentationEvent;
use diesel_lease::{CommitUnknown, Lease, Leases, Lost, Timings};
use rustix::process::{Signal, getpid, kill_process};

use super::client::{Client, Entrance};
use super::{Stage, client, insert, make_table, next_id};
use crate::support::database::Database;
use crate::support::process::{self, Child, Role};
use crate::support::raw::Raw;
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn stopped_before_the_begin,
    fn stopped_after_the_verify,
    fn stopped_between_two_statements,
    fn stopped_before_the_fence,
    fn stopped_between_the_fence_and_the_commit,
    fn with_the_lease_elsewhere_stopped_before_the_begin,
    fn with_the_lease_elsewhere_stopped_after_the_verify,
    fn with_the_lease_elsewhere_stopped_between_two_statements,
    fn with_the_lease_elsewhere_stopped_before_the_fence,
    fn with_the_lease_elsewhere_stopped_between_the_fence_and_the_commit,
    fn a_stop_that_outlasts_the_limit_between_the_fence_and_the_commit,
}

/// Processes at once, and how often each is stopped.
const LANES: usize = 5;
const ROUNDS: usize = 10;

/// A fifth of the defaults. MySQL takes the limit of a beside session in whole seconds.
pub(super) const TIMINGS: Timings = Timings {
    lease: Duration::from_secs(3),
    renew: Duration::from_millis(200),
    attempt: Duration::from_secs(1),
    deadline: Duration::from_secs(2),
    grace: Duration::from_secs(1),
};

/// Where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    BeforeBegin,
    AfterVerify,
    BetweenStatements,
    BeforeFence,
    AfterFence,
}

impl Point {
    const ALL: [Point; 5] = [
        Point::BeforeBegin,
        Point::AfterVerify,
        Point::BetweenStatements,
        Point::BeforeFence,
        Point::AfterFence,
    ];

    /// Whether this is the moment, where the connection tells of it.
    fn is_at(self, engine: Engine, event: &InstrumentationEvent<'_>) -> bool {
        let is_lease = |query: &str| query.contains("diesel_leases") && query.contains("SELECT");
        match (self, event) {
            // The verify is before the BEGIN, and with SQLite right after it.
            (Point::AfterVerify, InstrumentationEvent::BeginTransaction { .. }) => {
                engine != Engine::Sqlite
            }
            (Point::AfterVerify, InstrumentationEvent::FinishQuery { query, .. }) => {
                engine == Engine::Sqlite && is_lease(&query.to_string())
            }
            (Point::BeforeFence, InstrumentationEvent::StartQuery { query, .. }) => {
                let query = query.to_string();
                is_lease(&query) && query.contains("FOR ")
            }
            (Point::AfterFence, InstrumentationEvent::CommitTransaction { depth, .. }) => {
                depth.get() == 1
            }
            _ => false,
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What becomes of the one who was stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The other claims and commits meanwhile, and it is refused.
    Overtaken,
    /// It has the file's write lock: nobody can claim, and it finds itself late and commits nothing.
    Blocking,
    /// The other waits, and it commits.
    Waited,
}

fn stopped_before_the_begin(engine: Engine) {
    fifty_times(engine, Point::BeforeBegin, Where::Inside, Way::Overtaken);
}

fn stopped_after_the_verify(engine: Engine) {
    fifty_times(engine, Point::AfterVerify, Where::Inside, overtaken(engine));
}

fn stopped_between_two_statements(engine: Engine) {
    fifty_times(
        engine,
        Point::BetweenStatements,
        Where::Inside,
        overtaken(engine),
    );
}

fn stopped_before_the_fence(engine: Engine) {
    fifty_times(engine, Point::BeforeFence, Where::Inside, overtaken(engine));
}

fn stopped_between_the_fence_and_the_commit(engine: Engine) {
    fifty_times(engine, Point::AfterFence, Where::Inside, Way::Waited);
}

fn with_the_lease_elsewhere_stopped_before_the_begin(engine: Engine) {
    fifty_times(engine, Point::BeforeBegin, Where::Beside, Way::Overtaken);
}

fn with_the_lease_elsewhere_stopped_after_the_verify(engine: Engine) {
    fifty_times(engine, Point::AfterVerify, Where::Beside, Way::Overtaken);
}

fn with_the_lease_elsewhere_stopped_between_two_statements(engine: Engine) {
    fifty_times(
        engine,
        Point::BetweenStatements,
        Where::Beside,
        Way::Overtaken,
    );
}

fn with_the_lease_elsewhere_stopped_before_the_fence(engine: Engine) {
    fifty_times(engine, Point::BeforeFence, Where::Beside, Way::Overtaken);
}

fn with_the_lease_elsewhere_stopped_between_the_fence_and_the_commit(engine: Engine) {
    fifty_times(engine, Point::AfterFence, Where::Beside, Way::Waited);
}

/// A transaction on SQLite has the write lock from its begin.
fn overtaken(engine: Engine) -> Way {
    match engine {
        Engine::Sqlite => Way::Blocking,
        _ => Way::Overtaken,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    /// The work is in the lease's database.
    Inside,
    /// It is in another one of the same kind.
    Beside,
}

/// The databases.
struct Place {
    stage: Stage,
    /// That of the work, if it is not that of the lease.
    work: Option<Database>,
}

impl Place {
    fn new(engine: Engine, at: Where) -> Place {
        let stage = Stage::with_timings(engine, TIMINGS);
        let work = (at == Where::Beside).then(|| Database::create(engine));
        if let Some(work) = &work {
            make_table(work);
        }
        Place { stage, work }
    }

    fn work(&self) -> &Database {
        self.work.as_ref().unwrap_or(&self.stage.database)
    }
}

/// A process to be stopped, and another to take its place.
struct Lane<'a> {
    place: &'a Place,
    child: Child,
    rival: Box<dyn Client>,
}

impl<'a> Lane<'a> {
    fn new(place: &'a Place, entrance: Entrance, point: Point) -> Lane<'a> {
        let engine = place.stage.database.engine();
        let child = Child::spawn(
            "guard::stopped::write",
            &[
                ("engine", &engine.to_string()),
                ("leases", place.stage.database.url()),
                ("work", place.work().url()),
                ("entrance", &entrance.to_string()),
                ("point", &point.to_string()),
            ],
        );
        Lane {
            place,
            child,
            rival: client(engine, place.work().url(), Entrance::Plain),
        }
    }

    /// Has the child stop in a transaction under a lease of this name that writes two rows.
    fn stop(&mut self, name: &str, ids: [i64; 2]) {
        loop {
            self.child.tell(&format!("{name} {} {}", ids[0], ids[1]));
            match self.child.hear().as_str() {
                "stopped" => return,
                // This machine was so busy that it lost its lease on the way.
                "lost" => assert_eq!(self.rows(ids), 0),
                other => panic!("{other}"),
            }
        }
    }

    /// Lets the child go on, and says how its transaction ended.
    fn go_on(&mut self) -> String {
        self.child.cont();
        self.child.hear()
    }

    fn rival_claims(&self, name: &str) -> Lease {
        let mut lease = None;
        eventually(LONG, "the rival's claim", || {
            lease = self.place.stage.rival.try_claim(name).ok().flatten();
            lease.is_some()
        });
        lease.expect("it was claimed")
    }

    /// The rival claims the name and commits. On a busy machine not at the first try.
    fn rival_takes_over(&mut self, name: &str) {
        let place = self.place;
        let rival = &mut self.rival;
        let mut id = next_id();
        eventually(LONG, "the rival's commit", || {
            let Ok(Some(lease)) = place.stage.rival.try_claim(name) else {
                return false;
            };
            id = next_id();
            let done = rival.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
            done.is_ok()
        });
        assert_eq!(self.rows([id, id]), 1);
    }

    /// Nobody gets the name for this long.
    fn assert_held_for(&self, name: &str, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            if let Ok(Some(lease)) = self.place.stage.rival.try_claim(name) {
                panic!("{} was claimed under term {}", name, lease.term());
            }
            thread::sleep(TIMINGS.renew);
        }
    }

    fn rows(&self, ids: [i64; 2]) -> i64 {
        self.place.work().connect().one_i64(&format!(
            "SELECT COUNT(*) FROM work WHERE id IN ({}, {})",
            ids[0], ids[1]
        ))
    }
}

fn fifty_times(engine: Engine, point: Point, at: Where, way: Way) {
    let place = Place::new(engine, at);
    thread::scope(|scope| {
        for entrance in Entrance::WHOLE.into_iter().cycle().take(LANES) {
            let place = &place;
            scope.spawn(move || {
                // There is one writer in a file, and the one who is stopped may be it.
                let own = (engine == Engine::Sqlite).then(|| Place::new(engine, at));
                let mut lane = Lane::new(own.as_ref().unwrap_or(place), entrance, point);
                for _ in 0..ROUNDS {
                    round(&mut lane, engine, at, way);
                }
            });
        }
    });
}

fn round(lane: &mut Lane<'_>, engine: Engine, at: Where, way: Way) {
    let (name, ids) = (unique("stopped"), [next_id(), next_id()]);
    lane.stop(&name, ids);
    match way {
        Way::Overtaken => {
            // In a file, the one who is stopped keeps every other writer out.
            let keeps_out = engine == Engine::Sqlite && at == Where::Beside;
            if keeps_out {
                drop(lane.rival_claims(&name));
            } else {
                lane.rival_takes_over(&name);
            }
            assert_eq!(lane.go_on(), "lost");
            assert_eq!(lane.rows(ids), 0);
            if keeps_out {
                lane.rival_takes_over(&name);
            }
        }
        Way::Blocking => {
            lane.assert_held_for(&name, TIMINGS.lease + TIMINGS.attempt);
            assert_eq!(lane.go_on(), "lost");
            assert_eq!(lane.rows(ids), 0);
            lane.rival_takes_over(&name);
        }
        Way::Waited => {
            // Where there is a limit of one lease from the fence on, well below that: the last try may
            // wait for an attempt.
            let time = match (engine, at) {
                (Engine::Sqlite, _) | (Engine::Mysql | Engine::Mariadb, Where::Inside) => {
                    TIMINGS.lease + TIMINGS.attempt
                }
                _ => TIMINGS.attempt / 2,
            };
            // So the lease is ended by hand, here where the fence lets that through: it alone is in the
            // way then. In InnoDB the process itself does it before the fence.
            if engine == Engine::Postgres {
                lane.place.stage.database.connect().expire(&name);
            }
            lane.assert_held_for(&name, time);
            assert_eq!(lane.go_on(), "committed");
            assert_eq!(lane.rows(ids), 2);
            lane.rival_takes_over(&name);
        }
    }
}

/// The server then ends the session that has the row locked. If that is the work's own, its work is
/// gone. If it is the library's beside it, the work may be committed late, which is said.
fn a_stop_that_outlasts_the_limit_between_the_fence_and_the_commit(engine: Engine) {
    let places: &[Where] = match engine {
        // Nobody ends the sessions of a file.
        Engine::Sqlite => &[],
        Engine::Postgres => &[Where::Inside, Where::Beside],
        Engine::Mysql | Engine::Mariadb => &[Where::Beside],
    };
    if places.is_empty() {
        let place = Place::new(engine, Where::Inside);
        let mut lane = Lane::new(&place, Entrance::Plain, Point::AfterFence);
        let (name, ids) = (unique("stopped"), [next_id(), next_id()]);
        lane.stop(&name, ids);
        lane.assert_held_for(&name, 3 * TIMINGS.lease);
        assert_eq!(lane.go_on(), "committed");
        assert_eq!(lane.rows(ids), 2);
    }
    for &at in places {
        let place = Place::new(engine, at);
        thread::scope(|scope| {
            for entrance in Entrance::WHOLE {
                let place = &place;
                scope.spawn(move || {
                    let mut lane = Lane::new(place, entrance, Point::AfterFence);
                    let (name, ids) = (unique("stopped"), [next_id(), next_id()]);
                    lane.stop(&name, ids);
                    lane.rival_takes_over(&name);
                    assert_eq!(lane.go_on(), "unknown");
                    let written = if at == Where::Inside { 0 } else { 2 };
                    assert_eq!(lane.rows(ids), written, "{entrance}");
                });
            }
        });
    }
}

/// Writes two rows in a transaction under a lease, and stands still on the way, whenever it is told to.
pub(crate) fn write(role: &Role) {
    let (leases_url, work) = (role.argument("leases"), role.argument("work"));
    let engine = named(&ENGINES, &role.argument("engine"));
    let entrance = named(&Entrance::ALL, &role.argument("entrance"));
    let point = named(&Point::ALL, &role.argument("point"));
    // Where the fence is not a statement of this connection's, the last moment that it knows of.
    let is_inside = leases_url == work && engine != Engine::Sqlite;
    let leases = Leases::builder().timings(TIMINGS).connections(1);
    let leases = leases.build(&leases_url).unwrap();
    let mut client = client(engine, &work, entrance);
    let armed = Arc::new(AtomicBool::new(false));
    let is_armed = Arc::clone(&armed);
    client.instrument(Box::new(move |event| {
        if point.is_at(engine, &event) && is_armed.swap(false, Ordering::Relaxed) {
            stand_still();
        }
    }));
    loop {
        let told = role.hear();
        let mut words = told.split(' ');
        let name = words.next().expect("a name");
        let ids: Vec<i64> = words.map(|id| id.parse().expect("an id")).collect();
        let lease = leases.claim(name);
        let held = lease.expect("a new name").hold().unwrap();
        armed.store(true, Ordering::Relaxed);
        if point == Point::BeforeBegin {
            stand_still();
        }
        let done = client.transact(held.tenure(), &mut |sql| {
            assert_ne!(point, Point::BeforeBegin, "the work was begun");
            sql.run(&insert(ids[0]))?;
            if point == Point::BetweenStatements {
                stand_still();
            }
            sql.run(&insert(ids[1]))?;
            if point == Point::BeforeFence && !is_inside {
                stand_still();
            }
            if point == Point::AfterFence && !is_inside && engine.is_mysql_like() {
                Raw::connect(engine, &leases_url).expire(name);
            }
            Ok(())
        });
        role.say(&match done {
            Ok(()) => "committed".to_owned(),
            Err(error) if Lost::from_diesel(&error).is_some() => "lost".to_owned(),
            Err(error) if CommitUnknown::from_diesel(&error).is_some() => "unknown".to_owned(),
            Err(error) => format!("{error:?}"),
        });
    }
}

const ENGINES: [Engine; 4] = [
    Engine::Sqlite,
    Engine::Postgres,
    Engine::Mysql,
    Engine::Mariadb,
];

fn named<T: Copy + ToString>(all: &[T], name: &str) -> T {
    let found = all.iter().find(|one| one.to_string() == name);
    *found.expect("one of them")
}

/// Says so, and stops the whole process until somebody lets it go on.
fn stand_still() {
    process::say("stopped");
    let start = Instant::now();
    kill_process(getpid(), Signal::STOP).expect("a signal to itself");
    // Any thread may be the one that takes the signal, and this one would go on until then.
    while start.elapsed() < 3 * TIMINGS.renew {
        thread::sleep(TIMINGS.renew / 10);
    }
}
