//! The guard: verify at the begin, the fence before the COMMIT, and a process that is paused anywhere.
//!
//! No clock is in it. A lease expires at any moment, and no local check ever refuses, so that what holds
//! here holds whatever the clocks do and whatever a process believes. Each step of a process is its
//! own, and between any two it can be paused while others claim, work and commit.
//!
//! A lock lives in the session that took it. A session ends when the server finds that its process is
//! gone, or that it was idle for longer than its limit, which can befall a process that is only paused.

use stateright::{Model, Property};

use super::row::{Holder, NOBODY, Row, Term};
use super::{Fault, Named};

/// A lease is live, or it has expired.
const LIVE: u8 = 1;

pub(super) const IN_ORDER: Named = "no commit follows one under a higher term";
pub(super) const TOLD_IN_ORDER: Named = "no commit out of order is told as done";
pub(super) const NO_LOCK_AT_WORK: Named = "no lock is held while the work runs";
pub(super) const NOT_BLOCKED: Named = "whoever keeps trying claims in the end";

/// How the guard checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Engine {
    /// The fence locks the row in the work's own transaction: `FOR KEY SHARE`, which others may have
    /// too.
    Postgres,
    /// MySQL and MariaDB: the same, but `FOR UPDATE`.
    InnoDb,
    /// SQLite: the transaction becomes the one writer first, and verifies under that lock.
    OneWriter,
    /// The lease is in another database: the fence is on a session of the library's, from before the
    /// COMMIT to after it.
    Beside,
}

#[derive(Clone, Debug)]
pub(super) struct Guard {
    pub(super) engine: Engine,
    /// Whether processes are killed, and sessions ended under those that are paused for too long.
    pub(super) sessions_end: bool,
    pub(super) processes: usize,
    pub(super) terms: Term,
    pub(super) fault: Fault,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    row: Row,
    /// In no order: none of them is special.
    processes: Vec<Process>,
    /// The terms under which something was committed, as bits.
    committed: u16,
    is_out_of_order: bool,
    told_out_of_order: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Process {
    at: At,
    holder: Holder,
    term: Term,
    /// Whether a session of its has the row locked; on SQLite, the file.
    locks: bool,
    /// Whether what it has committed came too late.
    is_stale: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum At {
    Idle,
    /// It has claimed. No transaction is open.
    Held,
    /// SQLite: it is the writer, and looks next.
    Writer,
    /// Verified, with BEGIN to come.
    Verified,
    Working,
    /// It works in a transaction that was begun before the tenure was entered.
    WorkingLate,
    /// The fence has passed.
    Fenced,
    /// The COMMIT is sent.
    Committing,
    /// Beside: committed, and the other session is ended next.
    Committed,
    /// The server has ended its session and rolled back, which it does not know.
    RolledBack,
    /// The process is gone, which the server does not know.
    Gone,
    /// The same, with its COMMIT on the way.
    GoneCommitting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Expire,
    /// One that waited for a lock while the lease expired.
    Renew(usize),
    ForceRelease,
    Claim(usize),
    Release(usize),
    /// A transaction of other means, in which the tenure is entered late.
    BeginLate(usize),
    /// What comes next in its transaction.
    Step(usize),
    /// The server ends the session of the work.
    EndSession(usize),
    /// The server ends the session beside.
    EndBeside(usize),
    Kill(usize),
}

const IDLE: Process = Process {
    at: At::Idle,
    holder: NOBODY,
    term: 0,
    locks: false,
    is_stale: false,
};

impl State {
    fn is_locked(&self) -> bool {
        self.processes.iter().any(|process| process.locks)
    }

    fn mint(&self) -> Holder {
        let known = self.processes.iter().map(|process| process.holder);
        let known = known.chain([NOBODY, self.row.holder]);
        known
            .fold(0_u32, |known, holder| known | 1 << holder)
            .trailing_ones() as Holder
    }

    fn commit(&mut self, i: usize) {
        let process = &mut self.processes[i];
        process.is_stale = self.committed >> process.term > 1;
        self.is_out_of_order |= process.is_stale;
        self.committed |= 1 << process.term;
    }

    /// The caller is told that it is done.
    fn told(&mut self, i: usize) {
        self.told_out_of_order |= self.processes[i].is_stale;
        self.end_transaction(i);
    }

    fn end_transaction(&mut self, i: usize) {
        let process = &mut self.processes[i];
        process.at = At::Held;
        process.locks = false;
        process.is_stale = false;
    }
}

impl Guard {
    fn claim(&self, state: &mut State, holder: Holder) -> Option<Term> {
        let waits = state.is_locked() && self.fault != Fault::ClaimPassesTheLock;
        if waits {
            return None;
        }
        state.row.claim(holder, LIVE, self.fault)
    }

    /// `None` as long as it waits for somebody's lock.
    fn step(&self, state: &mut State, i: usize) -> Option<()> {
        let process = state.processes[i];
        let at = match (process.at, self.engine) {
            (At::Held, Engine::OneWriter) | (At::WorkingLate, Engine::OneWriter) => {
                let locks = self.fault != Fault::VerifyBeforeWriteLock;
                if state.is_locked() && locks {
                    return None;
                }
                state.processes[i].locks = locks;
                At::Writer
            }
            (At::Held | At::Writer, engine) => {
                let is_mine = state.row.verify(process.holder, process.term);
                match engine {
                    _ if !is_mine && self.fault != Fault::NoVerify => {
                        state.processes[i] = IDLE;
                        return Some(());
                    }
                    Engine::OneWriter => At::Working,
                    // In autocommit, or in the transaction, it locks nothing.
                    _ => At::Verified,
                }
            }
            (At::Verified, _) if self.fault == Fault::FenceBeforeTheWork => {
                self.fence(state, i, At::Working)?
            }
            (At::Verified, _) => At::Working,
            (At::Working, Engine::OneWriter) => At::Committing,
            (At::Working, _) if process.locks => At::Committing,
            (At::Working | At::WorkingLate, _) => self.fence(state, i, At::Fenced)?,
            (At::Fenced, _) => At::Committing,
            (At::Committing, Engine::Beside) => {
                state.commit(i);
                At::Committed
            }
            (At::Committing, _) => {
                state.commit(i);
                state.told(i);
                At::Held
            }
            // With its lock, the row was kept from the fence until now.
            (At::Committed, _) if process.locks || self.fault == Fault::EndOfBesideIgnored => {
                state.told(i);
                At::Held
            }
            // Without, it is told as `CommitUnknown`.
            (At::Committed | At::RolledBack, _) => {
                state.end_transaction(i);
                At::Held
            }
            (At::GoneCommitting, _) => {
                state.commit(i);
                state.processes[i] = IDLE;
                At::Idle
            }
            (At::Idle | At::Gone, _) => return None,
        };
        if state.processes[i] != IDLE {
            state.processes[i].at = at;
        }
        Some(())
    }

    fn fence(&self, state: &mut State, i: usize, then: At) -> Option<At> {
        if self.fault == Fault::VerifyOnlyAtBegin {
            return Some(then);
        }
        if state.is_locked() && self.engine == Engine::InnoDb {
            return None;
        }
        let process = &mut state.processes[i];
        if !state.row.fence(process.holder, process.term, self.fault) {
            *process = IDLE;
            return Some(At::Idle);
        }
        process.locks = self.fault != Fault::FenceWithoutLock;
        Some(then)
    }

    /// With every process standing still from here on. The server ends their sessions in time; a file
    /// has no server, and is locked until its process goes on or is killed.
    fn is_claimable(&self, state: &State) -> bool {
        let mut state = state.clone();
        let locked = (0..state.processes.len()).filter(|&i| state.processes[i].locks);
        for i in locked.collect::<Vec<_>>() {
            let _ = self.end_session(&mut state, i);
            let _ = self.end_beside(&mut state, i);
            state.processes[i].locks &= self.engine != Engine::OneWriter;
        }
        state.row.left = 0;
        self.claim(&mut state, NOBODY).is_some()
    }

    fn end_session(&self, state: &mut State, i: usize) -> Option<()> {
        if self.fault == Fault::SessionsHaveNoLimit {
            return None;
        }
        let process = &mut state.processes[i];
        match process.at {
            At::Gone | At::GoneCommitting => *process = IDLE,
            _ if self.engine == Engine::OneWriter => return None,
            At::Working | At::WorkingLate | At::Fenced | At::Committing => {
                process.at = At::RolledBack;
                process.locks &= self.engine == Engine::Beside;
            }
            _ => return None,
        }
        Some(())
    }

    fn end_beside(&self, state: &mut State, i: usize) -> Option<()> {
        let process = &mut state.processes[i];
        let ends = self.engine == Engine::Beside && process.locks;
        let ends = ends && self.fault != Fault::SessionsHaveNoLimit;
        ends.then(|| process.locks = false)
    }
}

impl Model for Guard {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            row: Row::default(),
            processes: vec![IDLE; self.processes],
            committed: 0,
            is_out_of_order: false,
            told_out_of_order: false,
        }]
    }

    fn actions(&self, _: &State, actions: &mut Vec<Action>) {
        actions.extend([Action::Expire, Action::ForceRelease]);
        for i in 0..self.processes {
            actions.extend([
                Action::Renew(i),
                Action::Claim(i),
                Action::Release(i),
                Action::BeginLate(i),
                Action::Step(i),
            ]);
            if self.sessions_end {
                actions.extend([Action::EndSession(i), Action::EndBeside(i), Action::Kill(i)]);
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Expire if !state.row.is_free() => state.row.left = 0,
            Action::Expire => return None,
            Action::Renew(i) => {
                let Process { holder, term, .. } = state.processes[i];
                let waited = state.row.is_free() && state.row.fence(holder, term, Fault::None);
                if holder == NOBODY || !waited {
                    return None;
                }
                state.row.left = LIVE;
            }
            Action::ForceRelease => {
                if state.row.is_free() || state.is_locked() {
                    return None;
                }
                state.row.force_release();
            }
            Action::Claim(i) => {
                if state.processes[i].at != At::Idle {
                    return None;
                }
                let holder = state.mint();
                let term = self.claim(&mut state, holder)?;
                state.processes[i] = Process {
                    at: At::Held,
                    holder,
                    term,
                    ..IDLE
                };
            }
            Action::Release(i) => {
                if state.processes[i].at != At::Held || state.is_locked() {
                    return None;
                }
                state.row.release(state.processes[i].holder, self.fault);
                state.processes[i] = IDLE;
            }
            Action::BeginLate(i) => {
                if state.processes[i].at != At::Held {
                    return None;
                }
                state.processes[i].at = At::WorkingLate;
            }
            Action::Step(i) => self.step(&mut state, i)?,
            Action::EndSession(i) => self.end_session(&mut state, i)?,
            Action::EndBeside(i) => self.end_beside(&mut state, i)?,
            Action::Kill(i) => {
                let process = &mut state.processes[i];
                match process.at {
                    At::Idle | At::Gone | At::GoneCommitting => return None,
                    At::Committing => process.at = At::GoneCommitting,
                    // The system gives the locks of a file back at once.
                    _ if self.engine == Engine::OneWriter || !process.locks => *process = IDLE,
                    _ => process.at = At::Gone,
                }
            }
        }
        state.processes.sort_unstable();
        Some(state)
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.row.term <= self.terms
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(IN_ORDER, |_, state: &State| !state.is_out_of_order),
            Property::always(TOLD_IN_ORDER, |_, state: &State| !state.told_out_of_order),
            Property::always(NOT_BLOCKED, |model: &Self, state: &State| {
                model.is_claimable(state)
            }),
            Property::sometimes("every term commits", |model: &Self, state: &State| {
                state.committed.count_ones() == u32::from(model.terms)
            }),
            Property::sometimes(
                "a paused holder comes back after a take-over",
                |_, state: &State| {
                    state.processes.iter().any(|process| {
                        let works = matches!(process.at, At::Working | At::WorkingLate);
                        works && process.term < state.row.term
                    })
                },
            ),
            Property::sometimes(
                "a holder commits after its lease expired",
                |_, state: &State| {
                    state.row.is_free() && state.committed >> state.row.term & 1 == 1
                },
            ),
        ];
        if self.engine != Engine::OneWriter {
            properties.push(Property::always(NO_LOCK_AT_WORK, |_, state: &State| {
                let mut working = state.processes.iter().filter(|p| p.at == At::Working);
                working.all(|process| !process.locks)
            }));
        }
        properties
    }
}
