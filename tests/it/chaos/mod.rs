//! All of it at once: processes that write, lead, run rounds and lock, while they are killed, stopped
//! and cut off, and their server is paused, killed and restarted.
//!
//! Each [`worker`] reaches the server by a network of its own. What they did is in the database, what
//! they were told they say, and the [`checker`] finds whether one fits the other.
//!
//! It takes 10 s, or as many as `DIESEL_LEASE_CHAOS_SECONDS` says: `scripts/chaos`.

use std::env;
use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::Leases;

use self::checker::{History, Told};
use crate::support::database::Database;
use crate::support::process::Child;
use crate::support::proxy::Proxy;
use crate::support::random::Random;
use crate::support::servers::OwnServer;
use crate::support::{Engine, LONG, TIMINGS, engines, eventually};

mod checker;
pub(crate) mod worker;

engines! {
    fn whatever_happens_the_history_is_sound,
    fn a_writer_that_is_stopped_does_no_harm,
    fn a_writer_that_skips_the_fence_is_found,
}

const WORKERS: usize = 4;

/// The tables of the work, in which nothing is unique: what is written twice is to be seen.
const TABLES: [&str; 5] = [
    "CREATE TABLE counter (n BIGINT NOT NULL)",
    "CREATE TABLE writes (n BIGINT NOT NULL, term BIGINT NOT NULL, worker BIGINT NOT NULL)",
    "CREATE TABLE ticks (term BIGINT NOT NULL, earlier BIGINT NOT NULL)",
    "CREATE TABLE rounds (at_ms BIGINT NOT NULL, term BIGINT NOT NULL, is_rerun BIGINT NOT NULL)",
    "CREATE TABLE locked (id BIGINT NOT NULL, from_ms BIGINT NOT NULL, to_ms BIGINT NOT NULL)",
];

fn prepare(database: &Database) {
    Leases::connect(database.url()).unwrap().migrate().unwrap();
    let mut raw = database.connect();
    for table in TABLES {
        raw.batch(table);
    }
    raw.batch("CREATE INDEX ticks_by_term ON ticks (term)");
    raw.batch("CREATE INDEX locked_by_id ON locked (id)");
    raw.batch("INSERT INTO counter VALUES (0)");
}

/// What was done to workers and servers, how often.
#[derive(Debug, Default)]
struct Troubles {
    kills: u32,
    ends: u32,
    stops: u32,
    freezes: u32,
    resets: u32,
    pauses: u32,
    restarts: u32,
}

impl fmt::Display for Troubles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "workers killed {}, ended {}, stopped {}; networks frozen {}, reset {}; server paused {}, killed {}",
            self.kills,
            self.ends,
            self.stops,
            self.freezes,
            self.resets,
            self.pauses,
            self.restarts
        )
    }
}

/// What a worker waits for to be over.
enum State {
    Running,
    Stopped(Instant),
    Frozen(Instant),
    /// Until it has ended in peace, for which it may need what a stopped one has.
    Ending,
    Dead(Instant),
}

/// One of the workers, again and again.
struct Post {
    number: usize,
    network: Option<Proxy>,
    child: Child,
    state: State,
}

/// All that runs.
struct Run<'a> {
    database: &'a Database,
    server: Option<&'a OwnServer>,
    random: Random,
    posts: Vec<Post>,
    /// One for each process that ever was.
    told: Vec<Told>,
    troubles: Troubles,
}

impl<'a> Run<'a> {
    fn new(database: &'a Database, server: Option<&'a OwnServer>) -> Run<'a> {
        Run {
            database,
            server,
            random: Random::from_environment(),
            posts: Vec::new(),
            told: Vec::new(),
            troubles: Troubles::default(),
        }
    }

    fn add(&mut self, skips_the_fence: bool, waits_at_the_brink: bool) {
        let network = self
            .server
            .is_some()
            .then(|| Proxy::to(self.database.url()));
        let (number, child) = self.spawn(network.as_ref(), skips_the_fence, waits_at_the_brink);
        self.posts.push(Post {
            number,
            network,
            child,
            state: State::Running,
        });
    }

    fn spawn(&mut self, network: Option<&Proxy>, skips: bool, waits: bool) -> (usize, Child) {
        let number = self.told.len();
        self.told.push(Told::default());
        let url = self.database.url();
        let child = Child::spawn(
            "chaos::worker::work",
            &[
                (
                    "url",
                    &network.map_or(url.to_owned(), |network| network.url(url)),
                ),
                ("engine", &self.database.engine().to_string()),
                ("number", &number.to_string()),
                ("skips", &skips.to_string()),
                ("waits", &waits.to_string()),
            ],
        );
        (number, child)
    }

    /// Takes down what the workers say.
    fn hear(&mut self) {
        for post in &mut self.posts {
            while let Some(line) = post.child.hear_within(Duration::ZERO) {
                self.told[post.number].hear(&line);
            }
        }
    }

    fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.random.below(to - from))
    }

    /// Half of the time less than a lease, half of the time more.
    fn a_while(&mut self) -> Duration {
        let lease = TIMINGS.lease.as_millis() as u64;
        self.ms(lease / 5, lease * 2)
    }

    fn disturb(&mut self) {
        let at = self.random.below(self.posts.len() as u64) as usize;
        if !matches!(self.posts[at].state, State::Running) {
            return;
        }
        let until = Instant::now() + self.a_while();
        let kinds = if self.server.is_some() { 13 } else { 6 };
        let kind = self.random.below(kinds);
        let post = &mut self.posts[at];
        match kind {
            0 | 1 => {
                post.child.kill();
                self.told[post.number].was_killed = true;
                post.state = State::Dead(until);
                self.troubles.kills += 1;
            }
            2 => {
                post.child.tell("end");
                post.state = State::Ending;
                self.troubles.ends += 1;
            }
            3..=5 => {
                post.child.stop();
                post.state = State::Stopped(until);
                self.troubles.stops += 1;
            }
            6..=8 => {
                network(post).freeze();
                post.state = State::Frozen(until);
                self.troubles.freezes += 1;
            }
            9 | 10 => {
                network(post).drop_connections();
                self.troubles.resets += 1;
            }
            11 => {
                let paused = self.server.expect("a server").pause();
                thread::sleep(until - Instant::now());
                paused.resume();
                self.troubles.pauses += 1;
            }
            _ => {
                let server = self.server.expect("a server");
                server.kill();
                server.restart();
                self.troubles.restarts += 1;
            }
        }
    }

    /// Ends what has lasted long enough.
    fn go_on(&mut self) {
        for at in 0..self.posts.len() {
            let post = &mut self.posts[at];
            match post.state {
                State::Stopped(until) if Instant::now() >= until => post.child.cont(),
                State::Frozen(until) if Instant::now() >= until => {
                    // As a firewall that has forgotten the connection, or as one that was slow.
                    if self.random.below(2) == 0 {
                        network(post).drop_connections();
                    }
                    network(post).thaw();
                }
                State::Ending => {
                    if self.told[post.number].ended {
                        let status = post.child.wait();
                        assert!(status.success(), "{status}:\n{}", post.child.output());
                        post.state = State::Dead(Instant::now());
                    }
                    continue;
                }
                State::Dead(until) if Instant::now() >= until => {
                    let network = self.posts[at].network.take();
                    let (number, child) = self.spawn(network.as_ref(), false, false);
                    let post = &mut self.posts[at];
                    (post.number, post.child, post.network) = (number, child, network);
                }
                _ => continue,
            }
            self.posts[at].state = State::Running;
        }
    }

    /// Stops the first worker, and once more where that has something else in hand that the second needs.
    fn stop_until_the_next_one_writes(&mut self) {
        for _ in 0..10 {
            self.posts[0].child.stop();
            let end = Instant::now() + TIMINGS.lease * 3;
            while Instant::now() < end {
                self.hear();
                if self.told[1].done.len() > 2 {
                    return;
                }
                thread::sleep(Duration::from_millis(20));
            }
            self.posts[0].child.cont();
            thread::sleep(TIMINGS.renew);
        }
        panic!("the next one never writes");
    }

    /// Ends all workers; what they have done.
    fn history(mut self) -> (Troubles, History) {
        for post in &mut self.posts {
            match post.state {
                State::Stopped(_) => post.child.cont(),
                State::Frozen(_) => network(post).thaw(),
                State::Running | State::Ending | State::Dead(_) => continue,
            }
            post.state = State::Running;
        }
        for post in &mut self.posts {
            if matches!(post.state, State::Running) {
                post.child.tell("end");
                post.state = State::Ending;
            }
        }
        eventually(LONG * 2, "all end", || {
            self.hear();
            let is_ending = |post: &Post| matches!(post.state, State::Ending);
            !self
                .posts
                .iter()
                .any(|post| is_ending(post) && !self.told[post.number].ended)
        });
        self.posts.clear();
        if self.server.is_some() {
            eventually(LONG, "no session is left", || {
                self.database.session_count() == 0
            });
        }
        (self.troubles, History::of(self.database, self.told))
    }
}

fn network(post: &Post) -> &Proxy {
    post.network.as_ref().expect("a network")
}

fn on<T>(engine: Engine, test: impl FnOnce(&Database, Option<&OwnServer>) -> T) -> T {
    let server = (engine != Engine::Sqlite).then(|| OwnServer::take(engine));
    let database = match &server {
        Some(server) => Database::on(server),
        None => Database::create(engine),
    };
    prepare(&database);
    test(&database, server.as_ref())
}

fn whatever_happens_the_history_is_sound(engine: Engine) {
    let seconds = env::var("DIESEL_LEASE_CHAOS_SECONDS")
        .map_or(10, |seconds| seconds.parse().expect("a number of seconds"));
    on(engine, |database, server| {
        let mut run = Run::new(database, server);
        for _ in 0..WORKERS {
            run.add(false, false);
        }
        let end = Instant::now() + Duration::from_secs(seconds);
        let mut next = Instant::now() + run.ms(1_000, 2_000);
        while Instant::now() < end {
            thread::sleep(Duration::from_millis(20));
            run.hear();
            run.go_on();
            if Instant::now() >= next {
                run.disturb();
                next = Instant::now() + run.ms(200, 900);
            }
        }
        let (troubles, history) = run.history();
        println!("{engine}: {troubles}: {}", history.summary());
        history.check().unwrap_or_else(|fault| panic!("{fault}"));
        history.assert_progress(seconds);
    });
}

/// Stops a writer between what it reads and what it writes, until another has written.
fn stop_at_the_brink(engine: Engine, skips_the_fence: bool) -> History {
    on(engine, |database, server| {
        let mut run = Run::new(database, server);
        run.add(skips_the_fence, true);
        eventually(LONG, "it is at the brink", || {
            run.hear();
            run.told[0].is_at_the_brink
        });
        run.add(false, false);
        if engine == Engine::Sqlite && !skips_the_fence {
            // It has the file, and nobody else writes.
            run.posts[0].child.stop();
            thread::sleep(TIMINGS.lease * 2);
        } else {
            run.stop_until_the_next_one_writes();
        }
        run.posts[0].child.cont();
        run.posts[0].child.tell("go on");
        eventually(LONG, "it has gone on", || {
            run.hear();
            run.told[0].attempts() > 0 && run.told[1].done.len() > 2
        });
        run.history().1
    })
}

fn a_writer_that_is_stopped_does_no_harm(engine: Engine) {
    let history = stop_at_the_brink(engine, false);
    assert_eq!(history.check(), Ok(()));
}

fn a_writer_that_skips_the_fence_is_found(engine: Engine) {
    let history = stop_at_the_brink(engine, true);
    let fault = history.check().expect_err("a fault");
    assert!(fault.contains("written twice"), "{fault}");
}
