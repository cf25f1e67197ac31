//! Slots: an instant is claimed, its round run and finished, or cut short and run once more.
//!
//! No clock is in it: a lease expires at any moment. Only that a claim whose answer comes after the local
//! deadline is not taken is kept from the model of leases: a round begins only under a lease that is
//! still live. From there on it can be paused for as long as it likes.

use stateright::{Model, Property};

use super::row::{Holder, NOBODY, Row, Slot, Term};
use super::{Fault, Named};

/// A lease is live, or it has expired.
const LIVE: u8 = 1;

pub(super) const ONCE: Named = "an instant begins once as a first round";
pub(super) const RERUN_ONCE: Named = "an instant runs at most twice, the second time as a rerun";
pub(super) const RERUN_OF_CUT_SHORT: Named = "a round that was finished is not run again";
pub(super) const RERUN_OF_LAST: Named = "a rerun is of the last instant that began or passed";
pub(super) const RERUN_NOT_HELD_SINCE: Named = "a rerun is refused once the name was held since";
pub(super) const NEVER_BACK: Named = "a slot never goes back";
pub(super) const FORWARD: Named = "no instant begins after a later one began or passed";
pub(super) const STAYS_MARKED: Named = "a round that was cut short is found";
pub(super) const SUPERSEDED: Named = "only what was cut short is told as superseded";

#[derive(Clone, Debug)]
pub(super) struct Slots {
    pub(super) processes: usize,
    pub(super) terms: Term,
    pub(super) instants: Slot,
    /// How many statements can be under way that nobody waits for.
    pub(super) adrift: usize,
    pub(super) fault: Fault,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    row: Row,
    /// The instants that have come, by the database's clock.
    now: Slot,
    /// In no order: none of them is special.
    processes: Vec<Process>,
    adrift: Vec<Statement>,
    seen: Seen,
}

/// What the properties ask for. Instants as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Seen {
    began: u8,
    began_again: u8,
    finished: u8,
    /// The last that began or was passed.
    last: Slot,
    broken: Option<Named>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Process {
    #[default]
    Idle,
    /// It has read the row, which was free, to claim this instant.
    Read(Slot, Row),
    /// It has found a round that was cut short.
    Found(Row),
    /// Its claim was carried out. The answer is on its way.
    Won(Round, Row),
    Running(Round),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Round {
    holder: Holder,
    slot: Slot,
    is_rerun: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Statement {
    /// The round, and the last instant that came by meanwhile, or none.
    Finish(Round, Slot),
    Settle(Slot),
    Release(Holder),
    /// The claim, and the row as it was before.
    Undo(Round, Row),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The next instant comes.
    Time,
    Expire,
    ForceRelease,
    Read(usize, Slot),
    /// The sweep.
    Find(usize),
    Claim(usize),
    /// The answer of a claim arrives, and the round begins.
    Begin(usize),
    /// It does not, or too late: the claim is undone.
    Undo(usize),
    /// The round has come to its end. `passed` is the last instant that it took up.
    Finish(usize, Slot),
    /// The same when the lease is known to be lost.
    FinishLost(usize),
    Release(usize),
    Kill(usize),
    Land(usize),
    Lose(usize),
}

fn bit(slot: Slot) -> u8 {
    1 << slot
}

impl Process {
    fn holder(&self) -> Holder {
        match self {
            Process::Won(round, _) | Process::Running(round) => round.holder,
            _ => NOBODY,
        }
    }
}

impl Statement {
    fn holder(&self) -> Holder {
        match self {
            Statement::Finish(round, _) | Statement::Undo(round, _) => round.holder,
            Statement::Release(holder) => *holder,
            Statement::Settle(_) => NOBODY,
        }
    }
}

impl Seen {
    fn begin(&mut self, round: Round) {
        let began = if round.is_rerun {
            &mut self.began_again
        } else {
            &mut self.began
        };
        let is_again = *began & bit(round.slot) != 0;
        *began |= bit(round.slot);
        if round.is_rerun {
            if is_again {
                self.broken = Some(RERUN_ONCE);
            }
            if round.slot < self.last {
                self.broken = Some(RERUN_OF_LAST);
            }
        } else if is_again {
            self.broken = Some(ONCE);
        } else if round.slot <= self.last {
            self.broken = Some(FORWARD);
        }
        self.last = self.last.max(round.slot);
    }
}

impl State {
    fn mint(&self) -> Holder {
        let known = self.processes.iter().map(Process::holder);
        let known = known.chain(self.adrift.iter().map(Statement::holder));
        let known = known.chain([NOBODY, self.row.holder]);
        known
            .fold(0_u32, |known, holder| known | 1 << holder)
            .trailing_ones() as Holder
    }

    fn claim(&mut self, i: usize, fault: Fault) {
        let holder = self.mint();
        let before = self.row;
        let as_read = match self.processes[i] {
            Process::Read(_, read) | Process::Found(read) => read,
            _ => return,
        };
        let seen = &mut self.seen;
        let won = match self.processes[i] {
            Process::Read(slot, read) => {
                let won = self.row.claim_slot(holder, slot, &read, LIVE, fault);
                let superseded = read.slot > 0 && read.unfinished == read.slot;
                if won.is_some() && superseded && before.unfinished != read.slot {
                    seen.broken = Some(SUPERSEDED);
                }
                won.map(|_| (slot, false))
            }
            Process::Found(found) => {
                let won = self.row.claim_rerun(holder, &found, LIVE, fault);
                if won.is_some() {
                    if before.term != found.term {
                        seen.broken = Some(RERUN_NOT_HELD_SINCE);
                    }
                    if seen.finished & bit(found.slot) != 0 {
                        seen.broken = Some(RERUN_OF_CUT_SHORT);
                    }
                }
                won.map(|_| (found.slot, true))
            }
            _ => None,
        };
        self.processes[i] = match won {
            Some((slot, is_rerun)) => Process::Won(
                Round {
                    holder,
                    slot,
                    is_rerun,
                },
                Row { term: 0, ..as_read },
            ),
            None => Process::Idle,
        };
    }

    fn land(&mut self, statement: Statement, fault: Fault) -> Option<Statement> {
        match statement {
            Statement::Finish(round, passed) => {
                let is_mine = self.row.holder == round.holder;
                if !self.row.finish(round.holder, passed, self.now, fault) {
                    return Some(Statement::Settle(round.slot));
                }
                if is_mine {
                    self.seen.finished |= bit(round.slot);
                    // The database ignores one that it has yet to see come.
                    let passed = if passed <= self.now { passed } else { 0 };
                    self.seen.last = self.seen.last.max(passed);
                }
            }
            Statement::Settle(slot) => {
                // It is recorded unless a later instant was claimed.
                if self.row.unfinished == slot {
                    self.seen.finished |= bit(slot);
                }
                self.row.settle(slot, fault);
            }
            Statement::Release(holder) => self.row.release(holder, fault),
            Statement::Undo(round, _) if round.is_rerun => {
                self.row.undo_rerun(round.holder, fault);
            }
            Statement::Undo(round, before) => self.row.undo_slot(round.holder, &before, fault),
        }
        None
    }

    /// The last instant that was claimed for a round that began, has not ended, and was not passed.
    fn is_marked(&self) -> bool {
        let Seen {
            began,
            finished,
            last,
            ..
        } = self.seen;
        let is_open = began & bit(last) != 0 && finished & bit(last) == 0;
        !is_open || self.row.slot != last || self.row.unfinished == last
    }
}

impl Slots {
    fn push(&self, state: &mut State, statement: Statement) {
        if state.adrift.len() < self.adrift {
            state.adrift.push(statement);
        }
    }
}

impl Model for Slots {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            row: Row::default(),
            now: 1,
            processes: vec![Process::Idle; self.processes],
            adrift: Vec::new(),
            seen: Seen::default(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now < self.instants {
            actions.push(Action::Time);
        }
        if !state.row.is_free() {
            actions.extend([Action::Expire, Action::ForceRelease]);
        }
        for (i, process) in state.processes.iter().enumerate() {
            match process {
                Process::Idle => {
                    let next = state.row.slot + 1..=state.now;
                    if state.row.is_free() {
                        actions.extend(next.map(|slot| Action::Read(i, slot)));
                    }
                    if state.row.is_cut_short() {
                        actions.push(Action::Find(i));
                    }
                }
                Process::Read(..) | Process::Found(_) => actions.push(Action::Claim(i)),
                Process::Won(round, _) => {
                    let is_live = state.row.holder == round.holder && !state.row.is_free();
                    if is_live {
                        actions.push(Action::Begin(i));
                    }
                    actions.push(Action::Undo(i));
                }
                Process::Running(round) => {
                    let passed = round.slot + 1..=self.instants;
                    actions.extend(passed.chain([0]).map(|passed| Action::Finish(i, passed)));
                    actions.extend([Action::FinishLost(i), Action::Release(i)]);
                }
            }
            if *process != Process::Idle {
                actions.push(Action::Kill(i));
            }
        }
        for at in 0..state.adrift.len() {
            actions.extend([Action::Land(at), Action::Lose(at)]);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Time => state.now += 1,
            Action::Expire => state.row.left = 0,
            Action::ForceRelease => state.row.force_release(),
            Action::Read(i, slot) => state.processes[i] = Process::Read(slot, state.row.as_read()),
            Action::Find(i) => state.processes[i] = Process::Found(state.row.as_read()),
            Action::Claim(i) => state.claim(i, self.fault),
            Action::Begin(i) => {
                if let Process::Won(round, _) = state.processes[i] {
                    state.seen.begin(round);
                    state.processes[i] = Process::Running(round);
                }
            }
            Action::Undo(i) => {
                if let Process::Won(round, before) = state.processes[i] {
                    self.push(&mut state, Statement::Undo(round, before));
                }
                state.processes[i] = Process::Idle;
            }
            Action::Finish(i, passed) => {
                if let Process::Running(round) = state.processes[i] {
                    self.push(&mut state, Statement::Finish(round, passed));
                }
                state.processes[i] = Process::Idle;
            }
            Action::FinishLost(i) => {
                if let Process::Running(round) = state.processes[i] {
                    self.push(&mut state, Statement::Settle(round.slot));
                }
                state.processes[i] = Process::Idle;
            }
            Action::Release(i) => {
                let holder = state.processes[i].holder();
                self.push(&mut state, Statement::Release(holder));
                state.processes[i] = Process::Idle;
            }
            Action::Kill(i) => state.processes[i] = Process::Idle,
            Action::Land(at) => {
                let statement = state.adrift.remove(at);
                if let Some(next) = state.land(statement, self.fault) {
                    self.push(&mut state, next);
                }
            }
            Action::Lose(at) => {
                state.adrift.remove(at);
            }
        }
        if state.row.slot < state.seen.last {
            state.seen.broken = Some(NEVER_BACK);
        }
        state.processes.sort_unstable();
        state.adrift.sort_unstable();
        Some(state)
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.row.term <= self.terms
    }

    fn properties(&self) -> Vec<Property<Self>> {
        macro_rules! never_broken {
            ($($name:ident)*) => { vec![$(
                Property::always($name, |_, state: &State| state.seen.broken != Some($name)),
            )*] };
        }
        let mut properties = never_broken![
            ONCE RERUN_ONCE RERUN_OF_CUT_SHORT RERUN_OF_LAST RERUN_NOT_HELD_SINCE NEVER_BACK FORWARD SUPERSEDED
        ];
        properties.extend([
            Property::always(STAYS_MARKED, |_, state: &State| state.is_marked()),
            Property::sometimes("a rerun begins", |_, state: &State| {
                state.seen.began_again != 0
            }),
            Property::sometimes("two instants are finished", |_, state: &State| {
                state.seen.finished.count_ones() == 2
            }),
            Property::sometimes("a round goes on beside its rerun", |_, state: &State| {
                let running = |process: &&Process| matches!(process, Process::Running(_));
                state.processes.iter().filter(running).count() == 2
            }),
            Property::sometimes("an instant is passed", |_, state: &State| {
                state.seen.began & bit(state.seen.last) == 0 && state.seen.last > 0
            }),
            Property::sometimes(
                "a claim that nobody got to use is undone",
                |_, state: &State| {
                    state.row.term == 1 && state.row.slot == 0 && state.row.is_free()
                },
            ),
        ]);
        properties
    }
}
