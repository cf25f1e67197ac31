//! Many threads that all want one name, in one process and in four: how often it changes hands, and how
//! evenly. Beside the library the bare statements, by threads that each look every 10 ms.
//!
//! A turn is a claim; it is a hand-over when another thread had the name before.
//!
//! Each side runs in processes of its own, which begin at one word and say what each thread got.

use std::env;
use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::{BoxError, Leases, Timings};

use crate::Effort;
use crate::support::engines::Engine;
use crate::support::record::{self, Acts};
use crate::support::report::json;

const NAME: &str = "bench:contended";
const POLL: Duration = Duration::from_millis(10);
const VARIABLE: &str = "DIESEL_LEASE_BENCH_PART";

const THREADS: [usize; 2] = [16, 100];
const HOLD: [Duration; 2] = [Duration::ZERO, Duration::from_millis(1)];
const PROCESSES: [usize; 2] = [1, 4];

pub(crate) fn run(engine: &Engine, effort: Effort) -> Result<(), BoxError> {
    let time = Duration::from_secs(effort.seconds.min(5));
    Leases::connect(&engine.url)?.migrate()?;
    let facts = engine.facts()?;
    println!("\n{facts}; {} s each", time.as_secs());
    println!(
        "                             library                                          bare, looking every 10 ms"
    );
    println!("threads processes held   hand-overs/s turns/s busiest/slowest longest wait");
    for processes in PROCESSES {
        for threads in THREADS {
            for hold in HOLD {
                let [ours, bare] = [Side::Library, Side::Bare].map(|side| {
                    let part = Part {
                        side,
                        engine: engine.name.to_owned(),
                        url: engine.url.clone(),
                        threads: threads / processes,
                        hold,
                        time,
                    };
                    Outcome::of(&part, processes)
                });
                let (ours, bare) = (ours?, bare?);
                println!(
                    "{threads:7} {processes:9} {:2} ms  {ours}  {bare}",
                    hold.as_millis()
                );
                for (side, outcome) in [("library", ours), ("bare", bare)] {
                    json(
                        &[
                            ("bench", "contend"),
                            ("engine", engine.name),
                            ("server", &facts),
                            ("side", side),
                        ],
                        &[
                            ("threads", threads as f64),
                            ("processes", processes as f64),
                            ("hold_ms", hold.as_secs_f64() * 1e3),
                            ("hand_overs_per_second", outcome.hand_overs),
                            ("turns_per_second", outcome.turns),
                            ("busiest_to_slowest", outcome.unevenness),
                            ("longest_wait_ms", outcome.longest_wait.as_secs_f64() * 1e3),
                        ],
                    );
                }
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Library,
    Bare,
}

/// What one process does.
pub(crate) struct Part {
    side: Side,
    engine: String,
    url: String,
    threads: usize,
    hold: Duration,
    time: Duration,
}

impl Part {
    /// What the environment says, if this process is one of those.
    pub(crate) fn of_this_process() -> Option<Part> {
        let part = env::var(VARIABLE).ok()?;
        Some(part.parse().expect("written by this bench"))
    }

    fn start(&self) -> Result<Child, BoxError> {
        let side = match self.side {
            Side::Library => "library",
            Side::Bare => "bare",
        };
        let part = format!(
            "{side}\n{}\n{}\n{}\n{}\n{}",
            self.engine,
            self.url,
            self.threads,
            self.hold.as_micros(),
            self.time.as_micros()
        );
        let child = Command::new(env::current_exe()?)
            .env(VARIABLE, part)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        Ok(child)
    }

    /// Says `ready`, waits for a line, and says for each thread how long it waited at the most and which
    /// terms it had.
    pub(crate) fn play(&self) -> Result<(), BoxError> {
        let mut said = Vec::new();
        let turns = match self.side {
            Side::Library => {
                let leases = self.leases()?;
                self.contend(|_| {
                    let leases = leases.clone();
                    Ok(move || {
                        let lease = leases.claim(NAME)?;
                        let term = lease.term();
                        thread::sleep(self.hold);
                        lease.release()?;
                        Ok(term)
                    })
                })?
            }
            Side::Bare => {
                let acts = record::record(&self.url)?;
                self.contend(|number| self.looker(acts.clone(), number))?
            }
        };
        for Turns { longest, terms } in turns {
            write!(said, "{}", longest.as_micros())?;
            for term in terms {
                write!(said, " {term}")?;
            }
            writeln!(said)?;
        }
        Ok(stdout().write_all(&said)?)
    }

    fn leases(&self) -> Result<Leases, BoxError> {
        let leases = Leases::builder().timings(Timings::default());
        let leases = leases.build(&self.url)?;
        leases.inspect(NAME)?;
        Ok(leases)
    }

    /// A thread that looks at the name by bare statements.
    fn looker(
        &self,
        mut acts: Acts,
        number: usize,
    ) -> Result<impl FnMut() -> Result<u64, BoxError> + use<'_>, BoxError> {
        let engine = Engine::all(std::slice::from_ref(&self.engine))?.pop();
        let mut bare = engine.ok_or("no engine")?.connect_to(&self.url)?;
        let holder = format!("{:016x}{number:016x}", std::process::id());
        acts.for_lease(NAME, &holder, 0);
        Ok(move || {
            let term = loop {
                match bare.claim(&acts)? {
                    Some(term) => break term,
                    None => thread::sleep(POLL),
                }
            };
            thread::sleep(self.hold);
            bare.release(&acts)?;
            Ok(term.unsigned_abs())
        })
    }

    fn contend<A>(
        &self,
        prepare: impl Fn(usize) -> Result<A, BoxError> + Sync,
    ) -> Result<Vec<Turns>, BoxError>
    where
        A: FnMut() -> Result<u64, BoxError>,
    {
        let (begin, begins) = crossbeam_channel::bounded::<()>(0);
        let (ready, are_ready) = crossbeam_channel::bounded(self.threads);
        thread::scope(|scope| {
            let (prepare, begins) = (&prepare, &begins);
            let workers: Vec<_> = (0..self.threads)
                .map(|number| {
                    let ready = ready.clone();
                    scope.spawn(move || -> Result<_, BoxError> {
                        let act = prepare(number);
                        ready.send(())?;
                        let mut act = act?;
                        let _ = begins.recv();
                        let end = Instant::now() + self.time;
                        let mut turns = Turns::default();
                        loop {
                            let start = Instant::now();
                            if start >= end {
                                return Ok(turns);
                            }
                            turns.terms.push(act()?);
                            turns.longest = turns.longest.max(start.elapsed());
                        }
                    })
                })
                .collect();
            for _ in 0..self.threads {
                are_ready.recv()?;
            }
            println!("ready");
            stdin().read_line(&mut String::new())?;
            drop(begin);
            let turns = workers
                .into_iter()
                .map(|worker| worker.join().expect("no panic"));
            turns.collect()
        })
    }
}

impl FromStr for Part {
    type Err = BoxError;

    fn from_str(text: &str) -> Result<Part, BoxError> {
        let lines: Vec<&str> = text.lines().collect();
        let [side, engine, url, threads, hold, time] = lines[..] else {
            return Err("six lines are a part".into());
        };
        Ok(Part {
            side: if side == "bare" {
                Side::Bare
            } else {
                Side::Library
            },
            engine: engine.to_owned(),
            url: url.to_owned(),
            threads: threads.parse()?,
            hold: Duration::from_micros(hold.parse()?),
            time: Duration::from_micros(time.parse()?),
        })
    }
}

/// What one thread got.
#[derive(Default)]
struct Turns {
    longest: Duration,
    terms: Vec<u64>,
}

/// What all threads got.
struct Outcome {
    hand_overs: f64,
    turns: f64,
    unevenness: f64,
    longest_wait: Duration,
}

impl Outcome {
    fn of(part: &Part, processes: usize) -> Result<Outcome, BoxError> {
        let mut children = Vec::new();
        for _ in 0..processes {
            let mut child = part.start()?;
            let mut said = BufReader::new(child.stdout.take().ok_or("no stdout")?);
            let mut line = String::new();
            said.read_line(&mut line)?;
            if line.trim() != "ready" {
                return Err(format!("a part of the bench said {line:?}").into());
            }
            children.push((child, said));
        }
        for (child, _) in &mut children {
            child.stdin.as_mut().ok_or("no stdin")?.write_all(b"\n")?;
        }
        let mut threads: Vec<Turns> = Vec::new();
        for (mut child, said) in children {
            for line in said.lines() {
                let line = line?;
                let mut numbers = line.split(' ').map(str::parse::<u64>);
                let longest = numbers.next().ok_or("a time")??;
                threads.push(Turns {
                    longest: Duration::from_micros(longest),
                    terms: numbers.collect::<Result<_, _>>()?,
                });
            }
            child.wait()?;
        }
        let counts = || threads.iter().map(|turns| turns.terms.len());
        let busiest = counts().max().unwrap_or(0) as f64;
        let slowest = counts().min().unwrap_or(0) as f64;
        let mut turns: Vec<(u64, usize)> = Vec::new();
        for (thread, had) in threads.iter().enumerate() {
            turns.extend(had.terms.iter().map(|term| (*term, thread)));
        }
        turns.sort_unstable();
        let passed_on = turns.windows(2).filter(|turns| turns[0].1 != turns[1].1);
        let seconds = part.time.as_secs_f64();
        Ok(Outcome {
            hand_overs: passed_on.count() as f64 / seconds,
            turns: turns.len() as f64 / seconds,
            unevenness: busiest / slowest,
            longest_wait: threads
                .iter()
                .map(|turns| turns.longest)
                .max()
                .unwrap_or_default(),
        })
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:12.0} {:7.0} {:15.1} {:9.0} ms",
            self.hand_overs,
            self.turns,
            self.unevenness,
            self.longest_wait.as_secs_f64() * 1e3
        )
    }
}
