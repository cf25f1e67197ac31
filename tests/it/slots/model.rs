//! All acts on the instants of one name, by several processes in any order, against a small model.
//!
//! A failure is shrunk and printed with its seed. `PROPTEST_RNG_SEED` runs that seed again,
//! `PROPTEST_CASES` more or fewer cases.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::mem;

use chrono::{DateTime, Utc};
use diesel_lease::{Error, Lease, Leases, StopToken, Timings, Unfinished};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use super::hooked::Gate;
use super::minute_ms;
use crate::support::database::Database;
use crate::support::raw::Raw;
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn any_order_of_acts_is_as_the_model_says,
}

const PROCESSES: usize = 3;
const CASES: u32 = 200;

/// An instant that is still to come when this is read.
const FAR: i64 = 1_000_000_000;

/// Nothing runs out in the time that a case takes, unless an act lets it.
const TIMINGS: Timings = Timings {
    lease: std::time::Duration::from_secs(80_000),
    renew: std::time::Duration::from_secs(5),
    attempt: std::time::Duration::from_secs(60),
    deadline: std::time::Duration::from_secs(40_000),
    grace: std::time::Duration::from_secs(5),
};

#[derive(Clone, Debug)]
enum Act {
    Claim(usize, Claim),
    /// Another act comes between what the claim reads and what it writes.
    Interrupted(usize, Claim, Box<Act>),
    /// Nobody is there any more when the claim gets its answer.
    Abandoned(usize, Claim),
    Find(usize),
    LastSlot(usize),
    Finish(Which, Passed),
    Release(Which),
    Drop(Which),
    Renew(Which),
    ForceRelease(usize),
    Expire,
}

#[derive(Clone, Debug)]
enum Claim {
    Name,
    /// So many minutes after the last instant.
    Slot(i64),
    Rerun(Which),
}

/// One of the leases or rounds that were got, counted from the last.
type Which = usize;

#[derive(Clone, Copy, Debug)]
enum Passed {
    Nothing,
    /// So many minutes after the last instant.
    Minutes(i64),
    Far,
}

fn claims() -> impl Strategy<Value = Claim> {
    prop_oneof![
        1 => Just(Claim::Name),
        5 => (-1_i64..4).prop_map(Claim::Slot),
        3 => (0_usize..3).prop_map(Claim::Rerun),
    ]
}

fn passed() -> impl Strategy<Value = Passed> {
    prop_oneof![
        3 => Just(Passed::Nothing),
        3 => (-2_i64..4).prop_map(Passed::Minutes),
        1 => Just(Passed::Far),
    ]
}

fn single_acts() -> impl Strategy<Value = Act> {
    let who = || 0..PROCESSES;
    let which = || prop_oneof![3 => Just(0_usize), 2 => 0_usize..4];
    prop_oneof![
        6 => (who(), claims()).prop_map(|(who, claim)| Act::Claim(who, claim)),
        3 => who().prop_map(Act::Find),
        1 => who().prop_map(Act::LastSlot),
        4 => (which(), passed()).prop_map(|(which, passed)| Act::Finish(which, passed)),
        3 => which().prop_map(Act::Release),
        1 => which().prop_map(Act::Drop),
        1 => which().prop_map(Act::Renew),
        1 => who().prop_map(Act::ForceRelease),
        4 => Just(Act::Expire),
    ]
}

fn acts() -> impl Strategy<Value = Act> {
    let who = || 0..PROCESSES;
    let interrupted = (who(), claims(), single_acts())
        .prop_map(|(who, claim, act)| Act::Interrupted(who, claim, Box::new(act)));
    prop_oneof![
        8 => single_acts(),
        2 => interrupted,
        1 => (who(), claims()).prop_map(|(who, claim)| Act::Abandoned(who, claim)),
    ]
}

fn any_order_of_acts_is_as_the_model_says(engine: Engine) {
    let database = Database::create(engine);
    let processes: Vec<Process> = (0..PROCESSES).map(|n| Process::new(&database, n)).collect();
    processes[0].leases.migrate().unwrap();

    let mut config = Config {
        cases: CASES,
        failure_persistence: None,
        max_shrink_iters: 300,
        ..Config::default()
    };
    if let Ok(cases) = std::env::var("PROPTEST_CASES") {
        config.cases = cases.parse().unwrap();
    }
    let seed = match config.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => RandomState::new().hash_one(engine as usize),
    };
    config.rng_seed = RngSeed::Fixed(seed);
    let outcome = TestRunner::new(config).run(&prop::collection::vec(acts(), 1..40), |acts| {
        let mut world = World::new(&database, &processes);
        for act in &acts {
            world.act(act);
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{engine}, PROPTEST_RNG_SEED={seed}: {failure}");
    }
}

struct Process {
    gate: Gate,
    leases: Leases,
}

impl Process {
    fn new(database: &Database, n: usize) -> Process {
        let gate = Gate::default();
        let builder = Leases::builder()
            .timings(TIMINGS)
            .instance(format!("process {n}"));
        let leases = gate.leases(builder, database.engine(), database.url());
        Process { gate, leases }
    }
}

/// The row of a name, as far as instants go.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Model {
    term: i64,
    /// Which of the leases that were ever got was the last.
    holder: Option<usize>,
    is_held: bool,
    slot: i64,
    unfinished: i64,
    rerun: i64,
}

impl Model {
    /// Can its last round be run again?
    fn is_cut_short(&self) -> bool {
        self.slot > 0 && self.unfinished == self.slot && self.rerun < self.slot && !self.is_held
    }
}

/// What is known of an instant, whatever the row says.
#[derive(Default)]
struct Instant {
    first_rounds: usize,
    second_rounds: usize,
    is_finished: bool,
}

struct Held {
    id: usize,
    lease: Lease,
    slot: Option<i64>,
    /// Its holder knows.
    is_known_lost: bool,
}

/// What was found, and in which term.
struct Found {
    round: Unfinished,
    slot: i64,
    term: i64,
}

/// A claim after its read.
enum Pending {
    Name,
    Slot { slot: i64, read: Option<Model> },
    Rerun { slot: i64, term: i64 },
}

struct World<'a> {
    processes: &'a [Process],
    raw: Raw,
    name: String,
    row: Option<Model>,
    instants: BTreeMap<i64, Instant>,
    leases: Vec<Held>,
    found: Vec<Found>,
    last_id: usize,
}

impl<'a> World<'a> {
    fn new(database: &Database, processes: &'a [Process]) -> World<'a> {
        World {
            processes,
            raw: database.connect(),
            name: unique("model"),
            row: None,
            instants: BTreeMap::new(),
            leases: Vec::new(),
            found: Vec::new(),
            last_id: 0,
        }
    }

    fn act(&mut self, act: &Act) {
        let slot = self.slot();
        match act {
            Act::Claim(who, claim) => self.claim(*who, claim, None),
            Act::Interrupted(who, claim, act) => self.claim(*who, claim, Some(act)),
            Act::Abandoned(who, claim) => self.abandoned(*who, claim),
            Act::Find(who) => self.find(*who),
            Act::LastSlot(who) => {
                let last = self.leases_of(*who).last_slot(&self.name).unwrap();
                assert_eq!(last.map_or(0, ms), slot);
            }
            Act::Finish(which, passed) => self.finish(*which, *passed),
            Act::Release(which) => self.release(*which),
            Act::Drop(which) => self.drop(*which),
            Act::Renew(which) => self.renew(*which),
            Act::ForceRelease(who) => self.force_release(*who),
            Act::Expire => {
                if let Some(row) = &mut self.row {
                    self.raw.expire(&self.name);
                    row.is_held = false;
                }
            }
        }
        assert!(self.slot() >= slot, "the last instant went back");
        self.compare();
    }

    fn leases_of(&self, who: usize) -> &'a Leases {
        &self.processes[who].leases
    }

    fn slot(&self) -> i64 {
        self.row.as_ref().map_or(0, |row| row.slot)
    }

    /// That many minutes after the last instant.
    fn later(&self, minutes: i64) -> i64 {
        match self.slot() {
            0 => minute_ms(minutes),
            slot => slot + minutes * 60_000,
        }
    }

    fn holder(&self) -> Option<usize> {
        self.row.as_ref().and_then(|row| row.holder)
    }

    fn take(&mut self, which: Which) -> Option<Held> {
        let at = self.leases.len().checked_sub(which + 1)?;
        Some(self.leases.remove(at))
    }

    /// The database and the model.
    fn compare(&mut self) {
        let row = self.raw.row(&self.name);
        let Some((row, model)) = row.as_ref().zip(self.row.as_ref()) else {
            assert!(row.is_none() && self.row.is_none(), "{row:?}");
            return;
        };
        let is_held = row.expires_at_ms > 1;
        assert_eq!((row.term, is_held), (model.term, model.is_held), "{row:?}");
        assert_eq!(row.slot_ms, model.slot, "{row:?}");
        assert_eq!(row.unfinished_slot_ms, model.unfinished, "{row:?}");
        // Only of the last instant does it matter.
        let (is, should_be) = (
            row.rerun_slot_ms == row.slot_ms,
            model.rerun == model.slot && model.slot > 0,
        );
        assert_eq!(is && row.slot_ms > 0, should_be, "{row:?}");
    }

    /// The claim as it is sent, and as the model reads for it. None when there is nothing to claim.
    fn begin(&self, claim: &Claim) -> Option<(Sent, Option<Pending>)> {
        Some(match claim {
            Claim::Name => (Sent::Name, Some(Pending::Name)),
            Claim::Slot(minutes) => {
                let slot = self.later(*minutes);
                let is_refused = self
                    .row
                    .as_ref()
                    .is_some_and(|row| row.is_held || row.slot >= slot);
                let read = self.row.clone();
                let pending = (!is_refused).then_some(Pending::Slot { slot, read });
                (Sent::Slot(slot), pending)
            }
            Claim::Rerun(which) => {
                let at = self.found.len().checked_sub(which + 1)?;
                let Found { round, slot, term } = &self.found[at];
                let (slot, term) = (*slot, *term);
                (
                    Sent::Rerun(round.clone()),
                    Some(Pending::Rerun { slot, term }),
                )
            }
        })
    }

    /// The model's write. The round that is given up by it, if it is carried out.
    fn write(&mut self, pending: &Pending, id: usize) -> Option<Option<(i64, bool)>> {
        let row = self.row.as_ref();
        let is_carried_out = match pending {
            Pending::Name => row.is_none_or(|row| !row.is_held),
            Pending::Slot { read: None, .. } => row.is_none(),
            Pending::Slot {
                read: Some(read), ..
            } => row.is_some_and(|row| {
                !row.is_held
                    && (row.term, row.slot, row.unfinished)
                        == (read.term, read.slot, read.unfinished)
            }),
            Pending::Rerun { slot, term } => {
                row.is_some_and(|row| row.is_cut_short() && (row.slot, row.term) == (*slot, *term))
            }
        };
        if !is_carried_out {
            return None;
        }
        let row = self.row.get_or_insert(Model {
            term: 0,
            holder: None,
            is_held: false,
            slot: 0,
            unfinished: 0,
            rerun: 0,
        });
        row.term += 1;
        row.holder = Some(id);
        row.is_held = true;
        let mut given_up = None;
        match pending {
            Pending::Name => {}
            Pending::Slot { slot, .. } => {
                if row.slot > 0 && row.unfinished == row.slot {
                    given_up = Some((row.slot, row.rerun == row.slot));
                }
                (row.slot, row.unfinished) = (*slot, *slot);
            }
            Pending::Rerun { slot, .. } => row.rerun = *slot,
        }
        Some(given_up)
    }

    fn claim(&mut self, who: usize, claim: &Claim, meanwhile: Option<&Act>) {
        let Some((sent, pending)) = self.begin(claim) else {
            return;
        };
        let process = &self.processes[who];
        let name = self.name.clone();
        let make = || sent.make(&process.leases, &name);
        let answer = match meanwhile {
            None => make(),
            Some(act) => {
                let is_written = pending.is_some();
                let mut was_written = false;
                let answer = process.gate.between(make, || {
                    was_written = true;
                    self.act(act);
                });
                assert_eq!(was_written, is_written, "refused by what was read");
                answer
            }
        };
        self.last_id += 1;
        let id = self.last_id;
        let written = pending.as_ref().and_then(|pending| self.write(pending, id));
        match (answer.unwrap(), written, &pending) {
            (None, None, _) => {}
            (Some(lease), Some(given_up), Some(pending)) => {
                let term = self.row.as_ref().map(|row| row.term);
                assert_eq!(Some(lease.term() as i64), term);
                let told = lease
                    .superseded()
                    .map(|round| (ms(round.slot()), round.is_rerun()));
                assert_eq!(told, given_up, "given up");
                let slot = self.begin_round(pending);
                assert_eq!(lease.slot().map(ms), slot);
                self.leases.push(Held {
                    id,
                    lease,
                    slot,
                    is_known_lost: false,
                });
            }
            (lease, written, _) => panic!("{sent:?}: {lease:?}, the model says {written:?}"),
        }
    }

    /// What holds of rounds whatever the row says.
    fn begin_round(&mut self, pending: &Pending) -> Option<i64> {
        match pending {
            Pending::Name => None,
            Pending::Slot { slot, .. } => {
                let last = self.instants.last_key_value();
                assert!(last.is_none_or(|(last, _)| last < slot), "an instant again");
                self.instants.entry(*slot).or_default().first_rounds += 1;
                Some(*slot)
            }
            Pending::Rerun { slot, .. } => {
                let instant = self.instants.entry(*slot).or_default();
                instant.second_rounds += 1;
                let rounds = (instant.first_rounds, instant.second_rounds);
                assert_eq!(rounds, (1, 1), "rounds of an instant");
                assert!(!instant.is_finished, "it had come to its end");
                Some(*slot)
            }
        }
    }

    fn abandoned(&mut self, who: usize, claim: &Claim) {
        let Some((sent, pending)) = self.begin(claim) else {
            return;
        };
        let process = &self.processes[who];
        let token = StopToken::new();
        let leases = process.leases.with_stop(&token);
        let name = self.name.clone();
        let make = || sent.make(&leases, &name);
        let outcome = process.gate.at_write(make, |held_up| {
            token.stop();
            let answer = held_up.answer();
            held_up.write();
            answer
        });
        let before = self.row.clone();
        match (outcome, &pending) {
            (Ok(answer), Some(pending)) => {
                assert!(matches!(answer, Err(Error::Stopped)), "{answer:?}");
                if self.write(pending, 0).is_none() {
                    return;
                }
            }
            (Err(answer), None) => {
                assert!(answer.unwrap().is_none(), "{sent:?}");
                return;
            }
            (outcome, _) => panic!("{sent:?}: {outcome:?}"),
        }
        let row = self.row.as_mut().expect("a row");
        row.is_held = false;
        let (slot, unfinished, rerun) = before.map_or((0, 0, 0), |row| {
            // A mark below the last instant says nothing, so it need not come back.
            let rerun = if row.rerun == row.slot { row.rerun } else { 0 };
            (row.slot, row.unfinished, rerun)
        });
        (row.slot, row.unfinished, row.rerun) = (slot, unfinished, rerun);
        let term = row.term;
        eventually(LONG, "the claim is undone", || {
            let row = self.raw.row(&self.name);
            row.is_some_and(|row| row.term == term && row.expires_at_ms == 0)
        });
    }

    fn find(&mut self, who: usize) {
        let found = self
            .leases_of(who)
            .unfinished_slots(&["other", &self.name])
            .unwrap();
        let expected = self.row.as_ref().filter(|row| row.is_cut_short());
        assert_eq!(found.len(), usize::from(expected.is_some()), "{found:?}");
        for (round, row) in found.into_iter().zip(expected) {
            assert_eq!((round.name(), ms(round.slot())), (&*self.name, row.slot));
            assert!(!round.is_rerun());
            self.found.push(Found {
                round,
                slot: row.slot,
                term: row.term,
            });
        }
    }

    fn finish(&mut self, which: Which, passed: Passed) {
        let Some(held) = self.take(which) else { return };
        let passed = match passed {
            Passed::Nothing => None,
            Passed::Minutes(minutes) => Some(self.later(minutes)),
            Passed::Far => Some(minute_ms(FAR)),
        };
        let Some(slot) = held.slot else {
            let (id, is_known_lost) = (held.id, held.is_known_lost);
            let answer = held.lease.finish(passed.map(instant));
            assert!(matches!(answer, Err(Error::NotASlot)), "{answer:?}");
            self.given_back(id, is_known_lost);
            return;
        };
        let is_holder = !held.is_known_lost && self.holder() == Some(held.id);
        let answer = held.lease.finish(passed.map(instant));
        match &answer {
            Ok(()) => assert!(is_holder),
            Err(error) => assert!(error.is_lost() && !is_holder, "{error:?}"),
        }
        let Some(row) = &mut self.row else { return };
        if is_holder {
            row.is_held = false;
            row.unfinished = 0;
            if let Some(passed) = passed
                && passed < minute_ms(FAR)
            {
                row.slot = row.slot.max(passed);
            }
            let instant = self.instants.entry(slot).or_default();
            assert!(!mem::replace(&mut instant.is_finished, true), "twice");
        } else if row.unfinished == slot {
            row.unfinished = 0;
        }
    }

    fn release(&mut self, which: Which) {
        let Some(held) = self.take(which) else { return };
        let is_holder = !held.is_known_lost && self.holder() == Some(held.id);
        match held.lease.release() {
            Ok(()) => assert!(is_holder),
            Err(error) => assert!(error.is_lost() && !is_holder, "{error:?}"),
        }
        if let Some(row) = &mut self.row
            && is_holder
        {
            row.is_held = false;
        }
    }

    fn drop(&mut self, which: Which) {
        let Some(held) = self.take(which) else { return };
        drop(held.lease);
        self.given_back(held.id, held.is_known_lost);
    }

    /// Waits for what a thread does after a drop.
    fn given_back(&mut self, id: usize, is_known_lost: bool) {
        if is_known_lost || self.holder() != Some(id) {
            return;
        }
        if let Some(row) = &mut self.row {
            row.is_held = false;
        }
        eventually(LONG, "it is given back", || {
            let row = self.raw.row(&self.name);
            row.is_some_and(|row| row.expires_at_ms == 0)
        });
    }

    fn renew(&mut self, which: Which) {
        let Some(at) = self.leases.len().checked_sub(which + 1) else {
            return;
        };
        let holder = self.holder();
        let held = &mut self.leases[at];
        let is_held = self.row.as_ref().is_some_and(|row| row.is_held);
        let is_holder = !held.is_known_lost && holder == Some(held.id) && is_held;
        match held.lease.renew() {
            Ok(()) => assert!(is_holder),
            Err(error) => {
                assert!(error.is_lost() && !is_holder, "{error:?}");
                held.is_known_lost = true;
            }
        }
        assert_eq!(held.lease.is_lost(), held.is_known_lost);
    }

    fn force_release(&mut self, who: usize) {
        let forced = self.leases_of(who).force_release(&self.name).unwrap();
        let held = self.row.as_mut().filter(|row| row.is_held);
        assert_eq!(forced, held.is_some());
        if let Some(row) = held {
            row.term += 1;
            row.holder = None;
            row.is_held = false;
        }
    }
}

#[derive(Debug)]
enum Sent {
    Name,
    Slot(i64),
    Rerun(Unfinished),
}

impl Sent {
    fn make(&self, leases: &Leases, name: &str) -> Result<Option<Lease>, Error> {
        match self {
            Sent::Name => leases.try_claim(name),
            Sent::Slot(slot) => leases.try_claim_slot(name, instant(*slot)),
            Sent::Rerun(round) => leases.try_claim_rerun(round),
        }
    }
}

fn instant(ms: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_millis(ms).expect("an instant")
}

fn ms(at: DateTime<Utc>) -> i64 {
    at.timestamp_millis()
}
