//! What must be so of a history, whatever happened.

use std::collections::{BTreeMap, BTreeSet};

use diesel::prelude::*;
use diesel::sql_types::BigInt;

use crate::support::database::Database;

/// What one process was told, as far as it could say so.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// The numbers that it was told it has written.
    pub(super) done: Vec<i64>,
    pub(super) unknown: u32,
    pub(super) refused: u32,
    pub(super) was_killed: bool,
    pub(super) is_at_the_brink: bool,
    /// In peace, with no thread left.
    pub(super) ended: bool,
}

impl Told {
    pub(super) fn hear(&mut self, line: &str) {
        match line.split_once(' ') {
            Some(("done", n)) => self.done.push(n.parse().expect("a number")),
            _ => match line {
                "unknown" => self.unknown += 1,
                "refused" => self.refused += 1,
                "brink" => self.is_at_the_brink = true,
                "ended" => self.ended = true,
                other => panic!("{other}"),
            },
        }
    }

    pub(super) fn attempts(&self) -> usize {
        self.done.len() + (self.unknown + self.refused) as usize
    }
}

#[derive(Clone, Debug, QueryableByName)]
pub(super) struct Write {
    #[diesel(sql_type = BigInt)]
    n: i64,
    #[diesel(sql_type = BigInt)]
    term: i64,
    #[diesel(sql_type = BigInt)]
    worker: i64,
}

#[derive(Clone, Debug, QueryableByName)]
pub(super) struct Ran {
    #[diesel(sql_type = BigInt)]
    at_ms: i64,
    #[diesel(sql_type = BigInt)]
    term: i64,
    #[diesel(sql_type = BigInt)]
    is_rerun: i64,
}

/// A lock that was held by the word of the server.
#[derive(Clone, Debug, QueryableByName)]
pub(super) struct Locked {
    #[diesel(sql_type = BigInt)]
    from_ms: i64,
    #[diesel(sql_type = BigInt)]
    to_ms: i64,
}

#[derive(Debug)]
pub(super) struct History {
    counter: i64,
    /// By number.
    writes: Vec<Write>,
    leaders: i64,
    /// Ticks of a leader after which one of an earlier term was committed.
    overlaps: i64,
    /// By instant and term.
    rounds: Vec<Ran>,
    /// By their begin.
    locked: Vec<Locked>,
    /// By the number of the worker.
    told: Vec<Told>,
}

impl History {
    pub(super) fn of(database: &Database, told: Vec<Told>) -> History {
        let mut raw = database.connect();
        let overlaps = "SELECT COUNT(*) FROM ticks t \
             WHERE earlier <> (SELECT COUNT(*) FROM ticks e WHERE e.term < t.term)";
        History {
            counter: raw.one_i64("SELECT n FROM counter"),
            leaders: raw.one_i64("SELECT COUNT(DISTINCT term) FROM ticks"),
            overlaps: raw.one_i64(overlaps),
            writes: diesel::sql_query("SELECT * FROM writes ORDER BY n, term")
                .load(&mut raw.connection)
                .unwrap(),
            rounds: diesel::sql_query("SELECT * FROM rounds ORDER BY at_ms, term")
                .load(&mut raw.connection)
                .unwrap(),
            locked: diesel::sql_query(
                "SELECT from_ms, to_ms FROM locked WHERE to_ms > 0 ORDER BY from_ms",
            )
            .load(&mut raw.connection)
            .unwrap(),
            told,
        }
    }

    pub(super) fn summary(&self) -> String {
        let sum = |count: fn(&Told) -> u32| self.told.iter().map(count).sum::<u32>();
        let instants: BTreeSet<_> = self.rounds.iter().map(|round| round.at_ms).collect();
        format!(
            "{} writes, {} told as unknown, {} as refused; {} leaders; {} instants, {} in a second try; \
             {} locks held; {} processes",
            self.counter,
            sum(|told| told.unknown),
            sum(|told| told.refused),
            self.leaders,
            instants.len(),
            self.rounds
                .iter()
                .filter(|round| round.is_rerun > 0)
                .count(),
            self.locked.len(),
            self.told.len(),
        )
    }

    /// What is wrong with it.
    pub(super) fn check(&self) -> Result<(), String> {
        self.check_writes()?;
        self.check_told()?;
        if self.overlaps > 0 {
            return Err(format!("leaders overlap: {} ticks", self.overlaps));
        }
        self.check_rounds()?;
        match self
            .locked
            .windows(2)
            .find(|pair| pair[1].from_ms < pair[0].to_ms)
        {
            Some(pair) => Err(format!("two had the lock: {pair:?}")),
            None => Ok(()),
        }
    }

    /// Every number once, up to the counter, under terms that never fall.
    fn check_writes(&self) -> Result<(), String> {
        for pair in self.writes.windows(2) {
            if pair[0].n == pair[1].n {
                return Err(format!("written twice: {pair:?}"));
            }
            if pair[0].term > pair[1].term {
                return Err(format!("committed after a later term: {pair:?}"));
            }
        }
        let numbers = self.writes.iter().map(|write| write.n);
        if !numbers.eq(1..=self.counter) {
            let count = self.writes.len();
            return Err(format!("{count} writes and a counter of {}", self.counter));
        }
        Ok(())
    }

    /// What was told as done is there, and nothing is that was not told as done or unknown.
    fn check_told(&self) -> Result<(), String> {
        let mut written = BTreeMap::<i64, BTreeSet<i64>>::new();
        for write in &self.writes {
            written.entry(write.worker).or_default().insert(write.n);
        }
        for (worker, told) in (0..).zip(&self.told) {
            let written = written.remove(&worker).unwrap_or_default();
            let done = BTreeSet::from_iter(told.done.iter().copied());
            if let Some(n) = done.difference(&written).next() {
                return Err(format!("{n} was told as done and is not there"));
            }
            // One that was killed may have had no time to say so.
            let excused = told.unknown as usize + usize::from(told.was_killed);
            let untold = written.difference(&done).count();
            if untold > excused {
                return Err(format!("{untold} untold writes of a process: {told:?}"));
            }
        }
        Ok(())
    }

    /// Each instant once, or once more as a rerun.
    fn check_rounds(&self) -> Result<(), String> {
        for rounds in self.rounds.chunk_by(|one, next| one.at_ms == next.at_ms) {
            let are_fine = match rounds {
                [_] => true,
                [first, second] => (first.is_rerun, second.is_rerun) == (0, 1),
                _ => false,
            };
            if !are_fine {
                return Err(format!("an instant beyond the rule: {rounds:?}"));
            }
        }
        for pair in self.rounds.windows(2) {
            if pair[0].term >= pair[1].term {
                return Err(format!("an instant after a later one: {pair:?}"));
            }
        }
        Ok(())
    }

    /// Whether there was anything to go wrong.
    pub(super) fn assert_progress(&self, seconds: u64) {
        let seconds = seconds as usize;
        let summary = self.summary();
        assert!(self.writes.len() > seconds, "{summary}");
        assert!(self.leaders > 0, "{summary}");
        assert!(self.rounds.len() > seconds / 5, "{summary}");
        assert!(self.locked.len() > seconds / 5, "{summary}");
    }
}

fn sound() -> History {
    let write = |n, term, worker| Write { n, term, worker };
    let ran = |at_ms, term, is_rerun| Ran {
        at_ms,
        term,
        is_rerun,
    };
    let locked = |from_ms, to_ms| Locked { from_ms, to_ms };
    let told = |done: &[i64], unknown, was_killed| Told {
        done: done.to_vec(),
        unknown,
        was_killed,
        ..Told::default()
    };
    History {
        counter: 5,
        writes: vec![
            write(1, 1, 0),
            write(2, 1, 0),
            write(3, 4, 1),
            write(4, 4, 1),
            write(5, 5, 0),
        ],
        leaders: 1,
        overlaps: 0,
        rounds: vec![
            ran(1_000, 1, 0),
            ran(2_000, 2, 0),
            ran(2_000, 3, 1),
            ran(4_000, 5, 1),
        ],
        locked: vec![locked(10, 20), locked(20, 35), locked(40, 50)],
        told: vec![told(&[1, 2], 1, false), told(&[3], 0, true)],
    }
}

#[track_caller]
fn finds(fault: &str, change: impl FnOnce(&mut History)) {
    let mut history = sound();
    change(&mut history);
    let found = history.check().expect_err("a fault");
    assert!(found.contains(fault), "{found}");
}

#[test]
fn a_sound_history_is_fine() {
    assert_eq!(sound().check(), Ok(()));
}

#[test]
fn each_fault_is_found() {
    finds("written twice", |history| history.writes[3].n = 3);
    finds("after a later term", |history| history.writes[1].term = 9);
    finds("a counter of 6", |history| history.counter = 6);
    finds("a counter of 5", |history| {
        history.writes.remove(2);
    });
    finds("told as done and is not there", |history| {
        history.told[1].done.push(6);
    });
    finds("told as done and is not there", |history| {
        history.told[1].done.push(2);
    });
    finds("1 untold writes", |history| history.told[0].unknown = 0);
    finds("1 untold writes", |history| {
        history.told[1].was_killed = false
    });
    finds("leaders overlap", |history| history.overlaps = 1);
    finds("beyond the rule", |history| history.rounds[2].is_rerun = 0);
    finds("beyond the rule", |history| history.rounds[3].at_ms = 2_000);
    finds("after a later one", |history| history.rounds[3].term = 2);
    finds("two had the lock", |history| history.locked[2].from_ms = 34);
}
