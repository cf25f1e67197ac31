//! A worker: four uses of the library at once, in a process that may end or stand still at any moment.
//!
//! It says what it is told of each write: `done N`, `unknown`, `refused`.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use diesel::connection::LoadConnection;
use diesel::r2d2::{ConnectionManager, Pool, R2D2Connection};
use diesel_lease::locks::NamedLocks;
use diesel_lease::scheduler::{Round, Scheduler};
use diesel_lease::{
    BoxError, CommitUnknown, GuardedConnection, LeaseBackend, LeaseGuard, Leases, StopToken, Tenure,
};

use crate::guard::client::{Sql, Work};
use crate::support::concrete::on_engine;
use crate::support::process::{Role, say};
use crate::support::random::Random;
use crate::support::raw::Raw;
use crate::support::{Engine, LONG, TIMINGS, eventually};

/// Runs work in a transaction on a connection of the application's pool, which is guarded.
type Transact = Arc<dyn Fn(&mut Work<'_>) -> Result<(), BoxError> + Send + Sync>;

fn pool<C>(url: &str) -> Transact
where
    C: LoadConnection + R2D2Connection + Send + 'static,
    C::Backend: LeaseBackend,
    GuardedConnection<C>: Sql,
{
    let pool = Pool::builder()
        .max_size(3)
        .min_idle(Some(0))
        .connection_timeout(Duration::from_secs(1))
        .connection_customizer(Box::new(LeaseGuard::new()))
        .build_unchecked(ConnectionManager::<GuardedConnection<C>>::new(url));
    Arc::new(move |work| Ok(Sql::transact(&mut *pool.get()?, work)?))
}

#[derive(Clone)]
struct Worker {
    engine: Engine,
    url: String,
    number: usize,
    /// The fault that the checker must find: writes without a look at the lease.
    skips_the_fence: bool,
    /// Waits once, between the number that it reads and the one that it writes.
    waits: Arc<AtomicBool>,
    stop: StopToken,
}

/// The role.
pub(crate) fn work(role: &Role) {
    let engine = role.argument("engine");
    let all = [
        Engine::Sqlite,
        Engine::Postgres,
        Engine::Mysql,
        Engine::Mariadb,
    ];
    let engine = all.into_iter().find(|one| one.to_string() == engine);
    let worker = Worker {
        engine: engine.expect("an engine"),
        url: role.argument("url"),
        number: role.argument("number").parse().expect("a number"),
        skips_the_fence: role.argument("skips") == "true",
        waits: Arc::new(AtomicBool::new(role.argument("waits") == "true")),
        stop: StopToken::new(),
    };
    let transact = on_engine!(worker.engine, C => pool::<C>(&worker.url));
    worker.run(role, &transact);
    drop(transact);
    drop(worker);
    eventually(LONG, "no thread of the library is left", || threads() == 0);
    role.say("ended");
}

/// Those of the library. Those of a pool of r2d2's stay for half a minute.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").expect("/proc");
    let names = tasks
        .flatten()
        .map(|task| fs::read_to_string(task.path().join("comm")));
    names
        .flatten()
        .filter(|name| name.starts_with("lease-"))
        .count()
}

impl Worker {
    fn run(&self, role: &Role, transact: &Transact) {
        let leases = Leases::builder()
            .timings(TIMINGS)
            .instance(format!("worker {}", self.number))
            // Whoever oversleeps goes on: the database is to keep it out.
            .on_work_will_not_stop(|_| {})
            .build(&self.url)
            .unwrap()
            .with_stop(&self.stop);
        let leader = {
            let transact = Arc::clone(transact);
            let campaign = leases.campaign("leader");
            let campaign = campaign
                .poll(Duration::from_millis(100))
                .pause(Duration::from_millis(300));
            campaign
                .start(move |tenure| lead(tenure, &transact))
                .unwrap()
        };
        let scheduler = {
            let transact = Arc::clone(transact);
            Scheduler::new(&leases)
                .sweep_every(Duration::from_millis(200))
                .job("tick", "* * * * * *", move |round| {
                    run_round(round, &transact)
                })
                .start()
                .unwrap()
        };
        thread::scope(|scope| {
            scope.spawn(|| self.write_on(role, &leases, transact));
            scope.spawn(|| self.lock_on());
            while role.hear() != "end" {
                self.waits.store(false, Ordering::Release);
            }
            self.stop.stop();
            self.waits.store(false, Ordering::Release);
        });
        leader.stop(LONG).unwrap();
        scheduler.stop(LONG).unwrap();
    }

    /// Counts under a lease, as long as it is held and a little, and again.
    fn write_on(&self, role: &Role, leases: &Leases, transact: &Transact) {
        let mut random = Random::new(self.number as u64);
        while !self.stop.is_stopped() {
            let Ok(Some(lease)) = leases.claim_timeout("counter", Duration::from_secs(1)) else {
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            let Ok(held) = lease.hold() else { continue };
            held.run(|tenure| {
                for _ in 0..random.below(20) {
                    if tenure.check().is_err() && random.below(2) == 0 {
                        break;
                    }
                    match self.write(tenure, transact) {
                        Ok(n) => role.say(&format!("done {n}")),
                        Err(error) if is_unknown(error.as_ref()) => role.say("unknown"),
                        Err(_) => role.say("refused"),
                    }
                    if tenure
                        .sleep(Duration::from_millis(random.below(20)))
                        .is_err()
                    {
                        break;
                    }
                }
            });
            let _ = held.release();
            // Others are to come to it too.
            thread::sleep(TIMINGS.renew / 4);
        }
    }

    /// Reads a number, and writes the next one.
    fn write(&self, tenure: &Tenure, transact: &Transact) -> Result<i64, BoxError> {
        let (term, worker) = (tenure.term(), self.number);
        let read = "SELECT n FROM counter";
        let count = |n: i64| format!("UPDATE counter SET n = {n}");
        let note = |n: i64| format!("INSERT INTO writes VALUES ({n}, {term}, {worker})");
        if self.skips_the_fence {
            let mut raw = Raw::try_connect(self.engine, &self.url)?;
            let n = raw.try_i64(read)?.expect("a number") + 1;
            self.wait_at_the_brink();
            for statement in ["BEGIN", &count(n), &note(n), "COMMIT"] {
                raw.try_batch(statement)?;
            }
            return Ok(n);
        }
        let mut n = 0;
        transact(&mut |sql| {
            n = sql.number(read)? + 1;
            self.wait_at_the_brink();
            sql.run(&count(n))?;
            sql.run(&note(n))
        })?;
        Ok(n)
    }

    fn wait_at_the_brink(&self) {
        if self.waits.load(Ordering::Acquire) {
            say("brink");
            while self.waits.load(Ordering::Acquire) {
                thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// Locks, and notes from when to when, which counts if the server says at the end that it was so.
    fn lock_on(&self) {
        let locks = NamedLocks::builder()
            .keep_alive_interval(TIMINGS.renew)
            .keep_alive_timeout(TIMINGS.attempt)
            .release_timeout(TIMINGS.attempt)
            .build(&self.url)
            .unwrap();
        let mut random = Random::new(self.number as u64);
        let mut count = 0;
        while !self.stop.is_stopped() {
            thread::sleep(Duration::from_millis(50 + random.below(100)));
            let Ok(lock) = locks.acquire("chaos", Duration::from_secs(1)) else {
                continue;
            };
            let Ok(mut raw) = Raw::try_connect(self.engine, &self.url) else {
                continue;
            };
            count += 1;
            let id = self.number * 1_000_000 + count;
            let now = raw.now_expression();
            let begun = raw.try_execute(&format!("INSERT INTO locked VALUES ({id}, {now}, 0)"));
            thread::sleep(Duration::from_millis(random.below(100)));
            let Ok(Some(end)) = raw.try_i64(&format!("SELECT {now}")) else {
                continue;
            };
            if begun.is_ok() && lock.release().is_ok() {
                let end = format!("UPDATE locked SET to_ms = {end} WHERE id = {id}");
                // Without it there is no more to be said of this one.
                let _ = raw.try_execute(&end);
            }
        }
    }
}

/// Logs ticks, each with how many it sees of earlier terms: there must never be more of those.
fn lead(tenure: &Tenure, transact: &Transact) -> Result<(), BoxError> {
    let term = tenure.term();
    let mut random = Random::new(term);
    let earlier = format!("SELECT COUNT(*) FROM ticks WHERE term < {term}");
    for _ in 0..20 + random.below(40) {
        transact(&mut |sql| {
            let earlier = sql.number(&earlier)?;
            sql.run(&format!("INSERT INTO ticks VALUES ({term}, {earlier})"))
        })?;
        tenure.sleep(Duration::from_millis(50 + random.below(50)))?;
    }
    Ok(())
}

/// The work of a round: notes that it has run.
fn run_round(round: &Round<'_>, transact: &Transact) -> Result<(), BoxError> {
    let tenure = round.tenure().expect("a job of the cluster");
    let at = round.at();
    tenure.sleep(Duration::from_millis(
        at.timestamp().unsigned_abs() * 97 % 300,
    ))?;
    let note = format!(
        "INSERT INTO rounds VALUES ({}, {}, {})",
        at.timestamp_millis(),
        tenure.term(),
        i64::from(round.is_rerun())
    );
    transact(&mut |sql| sql.run(&note))
}

fn is_unknown(error: &(dyn std::error::Error + 'static)) -> bool {
    error
        .downcast_ref::<diesel::result::Error>()
        .is_some_and(|error| CommitUnknown::from_diesel(error).is_some())
}
