//! Three processes that campaign for one name, or run work whenever it is free, while they are killed, stopped and restarted at random.
//!
//! The leader logs ticks, each in a transaction of its tenure and with the number of ticks of earlier
//! terms that it sees. Had such a term committed anything later, there would be more of them at the
//! end: so this says, by the order in which the database commits, that no two tenures overlap.
//!
//! It takes 20 s, or as many as `DIESEL_LEASE_CLUSTER_SECONDS` says.

use std::env;
use std::thread;
use std::time::{Duration, Instant};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_lease::{BoxError, Leases, StopToken, Tenure};

use crate::support::concrete::{connect, on_engine};
use crate::support::database::Database;
use crate::support::process::{Child, Role};
use crate::support::random::Random;
use crate::support::{Engine, LONG, TIMINGS, engines, eventually};

engines! {
    fn no_two_tenures_overlap_and_a_crashed_leader_is_followed,
    fn of_those_who_run_if_it_is_free_no_two_overlap,
}

const NAME: &str = "outbox";

const CAMPAIGN: &str = "campaign";
const TRY_RUN: &str = "try_run";

fn leases(url: &str, instance: &str) -> Leases {
    Leases::builder()
        .timings(TIMINGS)
        .instance(instance)
        // Whoever oversleeps goes on here: the database is to keep it out.
        .on_work_will_not_stop(|_| {})
        .build(url)
        .unwrap()
}

/// The role: one replica.
pub(crate) fn stand(role: &Role) {
    let url = role.argument("url");
    let engine = match url.split_once("://") {
        Some(("mysql", _)) => Engine::Mysql,
        Some(_) => Engine::Postgres,
        None => Engine::Sqlite,
    };
    let leases = leases(&url, &role.argument("instance"));
    if role.argument("by") == TRY_RUN {
        return run_if_free(role, engine, &url, &leases);
    }
    let leader = leases
        .campaign(NAME)
        .poll(Duration::from_millis(100))
        .pause(Duration::from_millis(300))
        .start(move |tenure| log_ticks(engine, &url, tenure, usize::MAX))
        .unwrap();
    role.say("campaigning");
    while role.hear() == "step down" {
        leader.step_down();
    }
    leader.stop(LONG).unwrap();
    role.say("stopped");
}

/// As [`stand`], by `try_run` again and again. Nobody is asked to step down.
fn run_if_free(role: &Role, engine: Engine, url: &str, leases: &Leases) {
    let stop = StopToken::new();
    let leases = leases.with_stop(&stop);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.is_stopped() {
                // Whatever came of it is seen by what it has logged.
                let _ = leases.try_run(NAME, |tenure| log_ticks(engine, url, tenure, 20));
                thread::sleep(Duration::from_millis(50));
            }
        });
        role.say("campaigning");
        while role.hear() == "step down" {}
        stop.stop();
    });
    role.say("stopped");
}

/// The work of the leader.
fn log_ticks(engine: Engine, url: &str, tenure: &Tenure, ticks: usize) -> Result<(), BoxError> {
    let term = tenure.term();
    let earlier = format!("SELECT COUNT(*) FROM ticks WHERE term < {term}");
    let mut random = Random::new(term);
    on_engine!(engine, C => {
        let mut connection = connect::<C>(engine, url);
        for _ in 0..ticks {
            tenure.transaction(&mut connection, |connection| {
                let earlier: i64 = sql::<BigInt>(&earlier).get_result(connection)?;
                diesel::sql_query(format!(
                    "INSERT INTO ticks (term, earlier, at_ms) VALUES ({term}, {earlier}, {})",
                    engine.dialect().now_ms
                ))
                .execute(connection)?;
                // Here it may be stopped.
                thread::sleep(Duration::from_millis(random.below(20)));
                QueryResult::Ok(())
            })?;
            tenure.sleep(Duration::from_millis(random.below(20)))?;
        }
        Ok(())
    })
}

struct Cluster<'a> {
    database: &'a Database,
    by: &'static str,
    replicas: Vec<Child>,
    random: Random,
}

impl Cluster<'_> {
    fn start(&self, instance: usize) -> Child {
        let mut replica = Child::spawn(
            "campaign_cluster::stand",
            &[
                ("url", self.database.url()),
                ("instance", &instance.to_string()),
                ("by", self.by),
            ],
        );
        assert_eq!(replica.hear(), "campaigning");
        replica
    }

    /// Does something to one replica, the leader as often as not. It runs again afterwards.
    fn disturb(&mut self, leader: Option<usize>) -> &'static str {
        let at = match leader {
            Some(leader) if self.random.below(2) == 0 => leader,
            _ => self.random.below(3) as usize,
        };
        let a_while = Duration::from_millis(self.random.below(1000));
        let replica = &mut self.replicas[at];
        match self.random.below(4) {
            0 => {
                replica.kill();
                thread::sleep(a_while);
                self.replicas[at] = self.start(at);
                "killed"
            }
            1 => {
                replica.stop();
                // Half of them for longer than a lease.
                thread::sleep(a_while * 3);
                replica.cont();
                "stopped"
            }
            2 => {
                replica.tell("stop");
                assert_eq!(replica.hear(), "stopped");
                self.replicas[at] = self.start(at);
                "restarted"
            }
            _ => {
                replica.tell("step down");
                "asked to step down"
            }
        }
    }

    /// Kills the leader, if there is one, and waits for the next. False if there was none.
    fn crash_leader(&mut self, leader: Option<usize>) -> bool {
        let Some(at) = leader else { return false };
        let newest = "SELECT COALESCE(MAX(term), 0) FROM ticks";
        let mut session = self.database.connect();
        self.replicas[at].kill();
        let term = session.one_i64(newest);
        eventually(TIMINGS.lease + LONG / 4, "it is led again", || {
            session.one_i64(newest) > term
        });
        self.replicas[at] = self.start(at);
        true
    }
}

fn no_two_tenures_overlap_and_a_crashed_leader_is_followed(engine: Engine) {
    disturb_a_cluster(engine, CAMPAIGN);
}

fn of_those_who_run_if_it_is_free_no_two_overlap(engine: Engine) {
    disturb_a_cluster(engine, TRY_RUN);
}

fn disturb_a_cluster(engine: Engine, by: &'static str) {
    let database = Database::create(engine);
    let leases = leases(database.url(), "watch");
    leases.migrate().unwrap();
    let mut session = database.connect();
    session.batch(
        "CREATE TABLE ticks (term BIGINT NOT NULL, earlier BIGINT NOT NULL, at_ms BIGINT NOT NULL)",
    );
    session.batch("CREATE INDEX ticks_by_term ON ticks (term)");

    let seconds = env::var("DIESEL_LEASE_CLUSTER_SECONDS")
        .map_or(20, |seconds| seconds.parse().expect("a number of seconds"));
    let random = Random::from_environment();
    let mut cluster = Cluster {
        database: &database,
        by,
        replicas: Vec::new(),
        random,
    };
    cluster.replicas = (0..3).map(|instance| cluster.start(instance)).collect();
    let until = Instant::now() + Duration::from_secs(seconds);
    let (mut crashes, mut done) = (0, Vec::new());
    while Instant::now() < until {
        let a_while = cluster.random.below(600);
        thread::sleep(Duration::from_millis(a_while));
        let leader = leases
            .inspect(NAME)
            .ok()
            .flatten()
            .filter(|record| record.expires_in().is_some())
            .and_then(|record| record.instance().parse().ok());
        if cluster.random.below(4) == 0 {
            crashes += i64::from(cluster.crash_leader(leader));
        } else {
            done.push(cluster.disturb(leader));
        }
    }
    for replica in &mut cluster.replicas {
        replica.tell("stop");
    }
    for replica in &mut cluster.replicas {
        assert_eq!(replica.hear(), "stopped");
    }

    println!("{crashes} leaders crashed, and replicas were {done:?}");
    let terms = session.one_i64("SELECT COUNT(DISTINCT term) FROM ticks");
    assert!(terms > crashes, "{terms} terms");
    let overlaps = session.one_i64(
        "SELECT COUNT(*) FROM ticks t \
         WHERE earlier <> (SELECT COUNT(*) FROM ticks e WHERE e.term < t.term)",
    );
    assert_eq!(overlaps, 0, "terms fall in commit order");
    let backwards = session.one_i64(
        "SELECT COUNT(*) FROM ticks t \
         WHERE at_ms < (SELECT COALESCE(MAX(e.at_ms), 0) FROM ticks e WHERE e.term < t.term)",
    );
    assert_eq!(backwards, 0, "terms fall by the database's clock");
}
