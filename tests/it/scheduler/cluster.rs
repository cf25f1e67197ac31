//! Three processes with a job that is due every second, while they are killed, frozen, stopped and
//! restarted.
//!
//! Each round is noted in a table, by the database's clock. Whatever happens to the replicas, no
//! instant is run twice unless its first round was cut short, none more than twice, and none is lost
//! but while an earlier round, or the lease that a dead one has left, still has the name.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::error::Error as StdError;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use chrono::DateTime;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_lease::Leases;
use diesel_lease::scheduler::{Round, Scheduler};
use log::Level;

use crate::support::database::Database;
use crate::support::process::{Child, Role};
use crate::support::raw::Raw;
use crate::support::{Engine, LONG, TIMINGS, engines, log as logs};

engines! {
    fn no_instant_is_lost_or_run_twice_whatever_happens_to_the_replicas,
}

const REPLICAS: usize = 3;
const LEASE: &str = "cron:tick";

/// How long the trouble lasts, in seconds, unless the environment says otherwise.
const SECONDS: (&str, u64) = ("DIESEL_LEASE_CLUSTER_SECONDS", 20);

/// The rounds take up to this long, one in ten longer than until the next instant.
const SHORT: u64 = 300;
const OVERRUN: u64 = 1300;

/// How long a round that came to no end can keep the name.
const LONGEST: i64 = OVERRUN as i64 + TIMINGS.lease.as_millis() as i64;

/// What a statement, and a thread that is not scheduled, may take here.
const SLACK: i64 = 400;

const TABLE: &str = "CREATE TABLE rounds (term BIGINT NOT NULL PRIMARY KEY, at_ms BIGINT NOT NULL, \
     is_rerun BIGINT NOT NULL, begun_ms BIGINT NOT NULL, done_ms BIGINT NOT NULL)";

/// A round as it was noted.
#[derive(Debug, QueryableByName)]
struct Noted {
    #[diesel(sql_type = BigInt)]
    #[expect(dead_code, reason = "shown when the test fails")]
    term: i64,
    #[diesel(sql_type = BigInt)]
    at_ms: i64,
    #[diesel(sql_type = BigInt)]
    is_rerun: i64,
    #[diesel(sql_type = BigInt)]
    begun_ms: i64,
    /// Zero if it did not come to its end.
    #[diesel(sql_type = BigInt)]
    done_ms: i64,
}

/// A replica: says `ready`, and whatever is logged of trouble.
pub(crate) fn replica(role: &Role) {
    let url = role.argument("url");
    let engine = [
        Engine::Sqlite,
        Engine::Postgres,
        Engine::Mysql,
        Engine::Mariadb,
    ]
    .into_iter()
    .find(|engine| engine.to_string() == role.argument("engine"))
    .expect("an engine");
    let leases = Leases::builder()
        .timings(TIMINGS)
        .instance(role.argument("instance"))
        .on_work_will_not_stop(|_| {})
        .build(&url)
        .unwrap();
    let job = move |round: &Round<'_>| {
        let mut raw = Raw::try_connect(engine, &url)?;
        note(&mut raw, round)?;
        let second = round.at().timestamp().unsigned_abs();
        let work = if second % 10 == 0 {
            OVERRUN
        } else {
            second * 97 % SHORT
        };
        round.tenure().unwrap().sleep(Duration::from_millis(work))?;
        note_end(&mut raw, round)
    };
    let running = Scheduler::new(&leases)
        .job("tick", "* * * * * *", job)
        .sweep_every(Duration::from_millis(100))
        .start()
        .unwrap();
    role.say("ready");
    thread::scope(|scope| {
        let (end, ended) = crossbeam_channel::bounded::<()>(0);
        scope.spawn(move || {
            let mut told = 0;
            loop {
                let is_over = ended.recv_timeout(Duration::from_millis(50)).is_ok();
                let entries = logs::everything();
                for entry in &entries[told..] {
                    if entry.level <= Level::Warn && entry.get("job").is_some() {
                        let at = entry.get("at").unwrap_or("-");
                        role.say(&format!("{at} {}", entry.message));
                    }
                }
                told = entries.len();
                if is_over {
                    break;
                }
            }
        });
        assert_eq!(role.hear(), "end");
        running.stop(LONG).unwrap();
        end.send(()).unwrap();
    });
}

fn note(raw: &mut Raw, round: &Round<'_>) -> QueryResult<usize> {
    let now = raw.now_expression();
    raw.try_execute(&format!(
        "INSERT INTO rounds VALUES ({}, {}, {}, {now}, 0)",
        round.tenure().unwrap().term(),
        round.at().timestamp_millis(),
        i64::from(round.is_rerun()),
    ))
}

/// The end counts while the lease is held.
fn note_end(raw: &mut Raw, round: &Round<'_>) -> Result<(), Box<dyn StdError + Send + Sync>> {
    let now = raw.now_expression();
    let term = round.tenure().unwrap().term();
    let noted = raw.try_execute(&format!(
        "UPDATE rounds SET done_ms = {now} WHERE term = {term} AND EXISTS \
         (SELECT 1 FROM diesel_leases WHERE name = '{LEASE}' AND term = {term} AND expires_at_ms > {now})"
    ))?;
    if noted == 0 {
        round.tenure().unwrap().verify()?;
    }
    Ok(())
}

/// What a replica is at.
enum State {
    Running,
    /// Until it is let go on.
    Frozen(Instant),
    /// Until it is restarted.
    Dead(Instant),
}

struct Replica {
    number: usize,
    starts: usize,
    child: Child,
    state: State,
}

impl Replica {
    fn spawn(database: &Database, number: usize, starts: usize) -> Child {
        let mut child = Child::spawn(
            "scheduler::cluster::replica",
            &[
                ("url", database.url()),
                ("engine", &database.engine().to_string()),
                ("instance", &format!("replica {number}.{starts}")),
            ],
        );
        assert_eq!(child.hear(), "ready");
        child
    }

    fn start(database: &Database, number: usize) -> Replica {
        Replica {
            number,
            starts: 1,
            child: Replica::spawn(database, number, 1),
            state: State::Running,
        }
    }

    fn restart(&mut self, database: &Database) {
        self.starts += 1;
        self.child = Replica::spawn(database, self.number, self.starts);
        self.state = State::Running;
    }

    fn instance(&self) -> String {
        format!("replica {}.{}", self.number, self.starts)
    }

    /// As often for less time than its lease lasts as for more.
    fn freeze(&mut self, time: Duration) {
        self.child.stop();
        self.state = State::Frozen(Instant::now() + time);
    }

    fn kill(&mut self, stay_away: Duration) {
        self.child.kill();
        self.state = State::Dead(Instant::now() + stay_away);
    }

    /// Stops it in peace.
    fn end(&mut self, stay_away: Duration) {
        self.child.tell("end");
        let status = self.child.wait();
        assert!(status.success(), "{status}: {}", self.child.output());
        self.state = State::Dead(Instant::now() + stay_away);
    }

    fn is_running(&self) -> bool {
        matches!(self.state, State::Running)
    }
}

/// What is known of the time while the replicas were in trouble.
#[derive(Debug, Default)]
struct Trouble {
    /// Instants whose round may have been cut short.
    cut: BTreeSet<i64>,
    /// When the name was left held by nobody who runs.
    left: Vec<(i64, i64)>,
    /// Instants that were claimed and not run, or that the database could not be asked for.
    given_up: BTreeSet<i64>,
    said: Vec<String>,
}

impl Trouble {
    /// Looks what a replica that does not run any more has left behind.
    fn look(&mut self, raw: &mut Raw, instance: &str) {
        // Its last statement may still be on the way.
        thread::sleep(Duration::from_millis(30));
        let now = raw.now_ms();
        let row = raw.row(LEASE).expect("a row");
        if row.instance == instance && row.unfinished_slot_ms == row.slot_ms {
            self.cut.insert(row.slot_ms);
        }
        if row.instance == instance && row.expires_at_ms > now {
            self.left.push((now - SLACK, row.expires_at_ms + SLACK));
        }
    }

    fn hear(&mut self, child: &mut Child) {
        while let Some(line) = child.hear_within(Duration::ZERO) {
            let (at, message) = line.split_once(' ').expect("an instant and a message");
            if let Ok(at) = DateTime::parse_from_rfc3339(at) {
                let at = at.timestamp_millis();
                let gave_up = message.starts_with("cronjob gave up");
                if gave_up || message.starts_with("cronjob could not claim") {
                    self.given_up.insert(at);
                } else if message.starts_with("cronjob could not") {
                    self.cut.insert(at);
                }
            }
            self.said.push(line);
        }
    }
}

/// Numbers without a pattern (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from))
    }
}

fn no_instant_is_lost_or_run_twice_whatever_happens_to_the_replicas(engine: Engine) {
    let (variable, seconds) = SECONDS;
    let seconds = env::var(variable).map_or(seconds, |text| text.parse().expect(variable));
    let database = Database::create(engine);
    Leases::connect(database.url()).unwrap().migrate().unwrap();
    let mut raw = database.connect();
    raw.batch(TABLE);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let mut random = Random(since.as_nanos() as u64 | 1);
    let mut trouble = Trouble::default();
    let mut replicas: Vec<_> = (1..=REPLICAS)
        .map(|number| Replica::start(&database, number))
        .collect();
    crate::support::eventually(LONG, "a first round", || raw.row(LEASE).is_some());

    let end = Instant::now() + Duration::from_secs(seconds);
    let mut next = Instant::now();
    while Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
        for replica in &mut replicas {
            match replica.state {
                State::Frozen(until) if Instant::now() >= until => {
                    replica.child.cont();
                    replica.state = State::Running;
                }
                State::Dead(until) if Instant::now() >= until => replica.restart(&database),
                _ => {}
            }
            trouble.hear(&mut replica.child);
        }
        // One is always up.
        let running = replicas
            .iter()
            .filter(|replica| replica.is_running())
            .count();
        if Instant::now() < next || running < 2 {
            continue;
        }
        next = Instant::now() + random.ms(200, 1500);
        let victim = random.below(REPLICAS as u64) as usize;
        let replica = &mut replicas[victim];
        if !replica.is_running() {
            continue;
        }
        let (freeze, stay_away) = (random.ms(200, 3000), random.ms(200, 1500));
        match random.below(3) {
            0 => replica.freeze(freeze),
            1 => replica.kill(stay_away),
            _ => replica.end(stay_away),
        }
        if !matches!(replica.state, State::Frozen(_)) {
            trouble.hear(&mut replica.child);
        }
        trouble.look(&mut raw, &replica.instance());
    }
    for mut replica in replicas {
        match replica.state {
            State::Running => {}
            State::Frozen(_) => replica.child.cont(),
            State::Dead(_) => continue,
        }
        replica.end(Duration::ZERO);
        trouble.hear(&mut replica.child);
    }
    let rounds: Vec<Noted> = diesel::sql_query("SELECT * FROM rounds ORDER BY term")
        .load(&mut raw.connection)
        .unwrap();
    judge(engine, &rounds, &trouble);
}

fn judge(engine: Engine, rounds: &[Noted], trouble: &Trouble) {
    let mut instants = BTreeMap::<i64, Vec<&Noted>>::new();
    for round in rounds {
        instants.entry(round.at_ms).or_default().push(round);
    }
    let mut twice = 0;
    for (at, rounds) in &instants {
        match rounds[..] {
            [_] => {}
            [first, second] => {
                twice += 1;
                assert!(
                    (first.is_rerun, second.is_rerun) == (0, 1),
                    "{at} is run twice as a first round: {rounds:?}"
                );
                assert!(
                    first.done_ms == 0 || trouble.cut.contains(at),
                    "{at} is run twice, and its first round was not cut short: {rounds:?}\n{trouble:?}"
                );
            }
            _ => panic!("{at} is run more than twice: {rounds:?}"),
        }
    }

    let done: Vec<_> = rounds.iter().filter(|round| round.done_ms > 0).collect();
    for (one, next) in done.iter().zip(&done[1..]) {
        assert!(next.begun_ms >= one.done_ms, "{one:?} and {next:?} overlap");
    }

    // The name was not to be had for long after each round, and after those that came to no end.
    let mut held = trouble.left.clone();
    held.extend(rounds.iter().enumerate().map(|(index, round)| {
        let to = match (round.done_ms, rounds.get(index + 1)) {
            (0, Some(next)) => (round.begun_ms + LONGEST).min(next.begun_ms),
            (0, None) => round.begun_ms + LONGEST,
            (done, _) => done,
        };
        // One that was due in time may have begun late.
        let from = if round.is_rerun == 0 {
            round.at_ms
        } else {
            round.begun_ms
        };
        (from, to + SLACK)
    }));
    let (first, last) = (rounds[0].at_ms, rounds.last().unwrap().at_ms);
    let mut missing = 0;
    for at in (first..=last).step_by(1000) {
        if instants.contains_key(&at) {
            continue;
        }
        missing += 1;
        let is_excused = held.iter().any(|(from, to)| (*from..=*to).contains(&at))
            || trouble.cut.contains(&at)
            || trouble.given_up.contains(&at);
        assert!(is_excused, "{at} is lost\n{rounds:?}\n{trouble:?}");
    }
    let all = instants.len();
    println!(
        "{engine}: {all} instants run, {twice} of them twice, {missing} passed while the name was held"
    );
    assert!(all > 5, "{rounds:?}\n{trouble:?}");
}
