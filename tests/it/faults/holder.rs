//! The process that meets the faults: each act in a thread and a database of its own, all of them held
//! at the brink until it is told to go.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use chrono::DateTime;
use diesel::result::{Error as DieselError, QueryResult};
use diesel_lease::locks::{LockError, NamedLock, NamedLocks};
use diesel_lease::{CommitUnknown, Error, HeldLease, Leases, Lost};

use super::{KEY, NAME, TIMINGS};
use crate::guard::client;
use crate::guard::client::{Client, Entrance};
use crate::support::Engine;
use crate::support::process::Role;

/// What is under way when the fault comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Act {
    Claim,
    Renewal,
    Verify,
    Work,
    Fence,
    Commit,
    Release,
    Finish,
    Acquire,
    KeepAlive,
}

impl Act {
    pub(super) const ALL: [Act; 10] = [
        Act::Claim,
        Act::Renewal,
        Act::Verify,
        Act::Work,
        Act::Fence,
        Act::Commit,
        Act::Release,
        Act::Finish,
        Act::Acquire,
        Act::KeepAlive,
    ];

    /// Whether it is one of a named lock.
    pub(super) fn is_of_a_lock(self) -> bool {
        matches!(self, Act::Acquire | Act::KeepAlive)
    }

    /// The point in a transaction under a lease that it stands for.
    pub(super) fn is_in_a_transaction(self) -> bool {
        matches!(self, Act::Work | Act::Fence | Act::Commit)
    }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What it came to, for the one who asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Outcome {
    /// It went through, or the lease or lock is still held.
    Done,
    /// Another holds it.
    Held,
    Lost,
    /// A COMMIT that nobody answered.
    Unknown,
    TimedOut,
    /// The database or the connection said no.
    Failed,
    /// A table or a right that must be there is not, and is named.
    Refused,
    NoThread,
    Panicked,
}

impl Outcome {
    pub(super) const ALL: [Outcome; 9] = [
        Outcome::Done,
        Outcome::Held,
        Outcome::Lost,
        Outcome::Unknown,
        Outcome::TimedOut,
        Outcome::Failed,
        Outcome::Refused,
        Outcome::NoThread,
        Outcome::Panicked,
    ];

    fn of<T>(result: Result<T, Error>) -> Outcome {
        match result {
            Ok(_) => Outcome::Done,
            Err(Error::Lost(_)) => Outcome::Lost,
            Err(Error::TimedOut) => Outcome::TimedOut,
            Err(Error::Connect(_) | Error::Database { .. }) => Outcome::Failed,
            Err(Error::Unsupported(_) | Error::SchemaMissing) => Outcome::Refused,
            Err(Error::Spawn(_)) => Outcome::NoThread,
            Err(other) => panic!("{other:?}"),
        }
    }

    fn of_lock(error: &LockError) -> Outcome {
        match error {
            LockError::Lost { .. } => Outcome::Lost,
            LockError::Timeout => Outcome::TimedOut,
            LockError::Failed | LockError::Connect(_) | LockError::Database(_) => Outcome::Failed,
            LockError::Unsupported(_) => Outcome::Refused,
            LockError::Spawn(_) => Outcome::NoThread,
            other => panic!("{other:?}"),
        }
    }

    fn of_transaction(result: &QueryResult<()>) -> Outcome {
        match result {
            Ok(()) => Outcome::Done,
            Err(error) if Lost::find(error).is_some() => Outcome::Lost,
            Err(error) if CommitUnknown::from_diesel(error).is_some() => Outcome::Unknown,
            Err(DieselError::AlreadyInTransaction | DieselError::NotInTransaction) => {
                panic!("{result:?}")
            }
            Err(_) => Outcome::Failed,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Outcome::Done => "done",
            Outcome::Held => "held by another",
            Outcome::Lost => "lost",
            Outcome::Unknown => "unknown",
            Outcome::TimedOut => "timed out",
            Outcome::Failed => "error",
            Outcome::Refused => "refused",
            Outcome::NoThread => "no thread",
            Outcome::Panicked => "panic",
        })
    }
}

/// What is left of an act.
enum Kept {
    Nothing,
    Lease(HeldLease),
    Lock(NamedLock),
}

impl Kept {
    fn is_healthy(&self) -> bool {
        match self {
            Kept::Nothing => false,
            Kept::Lease(held) => !held.is_lost(),
            Kept::Lock(lock) => !lock.is_lost(),
        }
    }
}

/// Two rows that the transaction of an act writes, and one that must never be written.
pub(super) const ROWS: [i64; 2] = [1, 2];
pub(super) const HARM: i64 = 3;

pub(super) fn insert(id: i64) -> String {
    format!("INSERT INTO work (id) VALUES ({id})")
}

/// Where an act takes place, and what it needs to know.
struct Scene {
    engine: Engine,
    url: String,
    /// How long a lease or lock is watched.
    watch: Duration,
    panics: bool,
    brink: Arc<Brink>,
}

/// Where all acts wait for each other, and then for the word.
struct Brink {
    ready: Sender<()>,
    go: Barrier,
}

impl Brink {
    fn wait(&self) {
        self.ready.send(()).expect("the main thread");
        self.go.wait();
    }
}

impl Scene {
    fn leases(&self) -> Leases {
        let leases = Leases::builder().timings(TIMINGS).instance("holder");
        leases.build(&self.url).expect("leases")
    }

    fn locks(&self) -> NamedLocks {
        let locks = NamedLocks::builder()
            .keep_alive_interval(TIMINGS.renew)
            .keep_alive_timeout(TIMINGS.attempt)
            .release_timeout(TIMINGS.attempt);
        locks.build(&self.url).expect("locks")
    }

    fn client(&self, entrance: Entrance) -> Box<dyn Client> {
        let mut client = client::connect(self.engine, &self.url, entrance);
        if self.engine == Engine::Sqlite {
            client.sql().batch("PRAGMA busy_timeout = 1000").unwrap();
        }
        client
    }

    fn hold(&self) -> HeldLease {
        self.leases().claim(NAME).unwrap().hold().unwrap()
    }

    fn act(&self, act: Act) -> (Outcome, Kept) {
        match act {
            Act::Claim => {
                let leases = self.leases();
                // its connections are open, as with any but the first claim
                leases.inspect(NAME).unwrap();
                self.brink.wait();
                match leases.try_claim(NAME) {
                    Ok(None) => (Outcome::Held, Kept::Nothing),
                    Ok(Some(lease)) => match lease.hold() {
                        Ok(held) => (Outcome::Done, Kept::Lease(held)),
                        Err(error) => (Outcome::of::<()>(Err(error)), Kept::Nothing),
                    },
                    Err(error) => (Outcome::of::<()>(Err(error)), Kept::Nothing),
                }
            }
            Act::Renewal => {
                let held = self.hold();
                self.brink.wait();
                (self.watch(|| held.is_lost()), Kept::Lease(held))
            }
            Act::Verify => {
                let held = self.hold();
                self.brink.wait();
                (Outcome::of(held.tenure().verify()), Kept::Lease(held))
            }
            Act::Work => self.transact(act, Entrance::GuardedPool),
            Act::Fence => self.transact(act, Entrance::Plain),
            Act::Commit => self.transact(act, Entrance::Guarded),
            Act::Release => {
                let held = self.hold();
                self.brink.wait();
                (Outcome::of(held.release()), Kept::Nothing)
            }
            Act::Finish => {
                let slot = DateTime::from_timestamp(1_700_000_000, 0).expect("a time");
                let lease = self.leases().try_claim_slot(NAME, slot).unwrap();
                let held = lease.expect("a new slot").hold().unwrap();
                self.brink.wait();
                (Outcome::of(held.finish(None)), Kept::Nothing)
            }
            Act::Acquire => {
                let locks = self.locks();
                self.brink.wait();
                match locks.acquire(KEY, TIMINGS.attempt) {
                    Ok(lock) => (Outcome::Done, Kept::Lock(lock)),
                    Err(error) => (Outcome::of_lock(&error), Kept::Nothing),
                }
            }
            Act::KeepAlive => {
                let lock = self.locks().acquire(KEY, TIMINGS.lease).unwrap();
                self.brink.wait();
                (self.watch(|| lock.is_lost()), Kept::Lock(lock))
            }
        }
    }

    fn watch(&self, is_lost: impl Fn() -> bool) -> Outcome {
        let start = Instant::now();
        while start.elapsed() < self.watch {
            if is_lost() {
                return Outcome::Lost;
            }
            thread::sleep(Duration::from_millis(10));
        }
        Outcome::Done
    }

    /// A transaction that writes [`ROWS`], by a connection that is the only one of its pool where there
    /// is a pool.
    fn transact(&self, act: Act, entrance: Entrance) -> (Outcome, Kept) {
        let mut client = self.client(entrance);
        let held = self.hold();
        let brink = || {
            self.brink.wait();
            assert!(!self.panics, "in the work");
        };
        if act == Act::Commit {
            let (brink, panics) = (Arc::clone(&self.brink), self.panics);
            client.before_commit(move || {
                brink.wait();
                assert!(!panics, "before the commit");
            });
        }
        let done = catch_unwind(AssertUnwindSafe(|| {
            client.transact(held.tenure(), &mut |sql| {
                sql.run(&insert(ROWS[0]))?;
                if act == Act::Work {
                    brink();
                }
                sql.run(&insert(ROWS[1]))?;
                if act == Act::Fence {
                    brink();
                }
                Ok(())
            })
        }));
        let outcome = done.map_or(Outcome::Panicked, |done| Outcome::of_transaction(&done));
        (outcome, Kept::Lease(held))
    }

    /// Writes under a lease that is lost, or says why it was not let.
    fn harm(&self, held: &HeldLease) -> Outcome {
        let mut client = self.client(Entrance::Guarded);
        Outcome::of_transaction(&client.transact(held.tenure(), &mut |sql| sql.run(&insert(HARM))))
    }
}

/// Says `ready`; after `go` an outcome for each act; and then answers, until `end`:
///
/// - `healthy`: the acts whose lease or lock it takes for held.
/// - `harm`: tries to write under each lease that is lost.
pub(crate) fn hold(role: &Role) {
    let engine = role.argument("engine");
    let engines = [
        Engine::Sqlite,
        Engine::Postgres,
        Engine::Mysql,
        Engine::Mariadb,
    ];
    let engine = engines.into_iter().find(|one| one.to_string() == engine);
    let engine = engine.expect("an engine");
    let watch = Duration::from_millis(role.argument("watch").parse().expect("a number"));
    let panics = role.argument("panics") == "true";
    let urls = role.argument("urls");
    let (ready, is_ready) = channel();
    let brink = Arc::new(Brink {
        ready,
        go: Barrier::new(Act::ALL.len() + 1),
    });
    let (tell, told) = channel();
    for (act, url) in Act::ALL.into_iter().zip(urls.split('\n')) {
        let scene = Scene {
            engine,
            url: url.to_owned(),
            watch,
            panics,
            brink: Arc::clone(&brink),
        };
        let tell = tell.clone();
        thread::spawn(move || {
            let (outcome, kept) = scene.act(act);
            let _ = tell.send((act, outcome, scene, kept));
        });
    }
    for _ in Act::ALL {
        is_ready.recv().expect("an act");
    }
    role.say("ready");
    assert_eq!(role.hear(), "go");
    brink.go.wait();
    let mut all = Vec::new();
    for _ in Act::ALL {
        let (act, outcome, scene, kept) = told.recv().expect("an act");
        role.say(&format!("{act}={outcome}"));
        all.push((act, scene, kept));
    }
    loop {
        match role.hear().as_str() {
            "healthy" => {
                let healthy = all.iter().filter(|(.., kept)| kept.is_healthy());
                let acts: Vec<String> = healthy.map(|(act, ..)| act.to_string()).collect();
                role.say(&acts.join(" "));
            }
            "harm" => {
                for (act, scene, kept) in &all {
                    if let Kept::Lease(held) = kept
                        && held.is_lost()
                    {
                        let outcome = scene.harm(held);
                        assert_eq!(outcome, Outcome::Lost, "{act}");
                    }
                }
                role.say("none");
            }
            "end" => break,
            other => panic!("{other}"),
        }
    }
    drop(all);
    role.say("ended");
}
