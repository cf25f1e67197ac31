//! Claims, renewals and releases: who believes in a lease, and for how long.
//!
//! The row is the database's; a process knows it from answers only. Every statement is sent, lands
//! and is answered in steps of their own, in any order with those of others, so that each can be
//! late, lost, or carried out with its answer lost. Nothing is said about how long a step takes: a
//! process that takes none is paused.
//!
//! Time goes by in ticks of the database's clock. A local clock may run at any rate, and change it,
//! but of the ticks of one lease it misses at most [`MISSED`]. So a local deadline passes at the latest
//! so many ticks later than a perfect clock would have it, which is what is kept of it here; and, as a
//! clock may be fast, at any moment before, so that a lease can end at any moment. Times are kept as what
//! is left of them, and so there is no end of time.

use stateright::{Model, Property};

use super::row::{Holder, NOBODY, Row, Term};
use super::{Fault, Named};

/// The ticks of the database's clock that a local clock can miss in one lease, and the margin between
/// deadline and lease.
const MISSED: u8 = 1;

pub(super) const ONE_HEALTHY: Named = "at most one holder is healthy";
pub(super) const LOST_STAYS_LOST: Named = "a lost lease stays lost";
pub(super) const TERMS_RISE: Named = "terms only rise";
pub(super) const FREE_UNTIL_CLAIMED: Named = "what is free stays free until it is claimed";
pub(super) const OWN_RENEWAL: Named = "a renewal extends its own claim only";
pub(super) const HOLDER_ONCE: Named = "a holder claims once";
pub(super) const CLAIMABLE: Named = "whoever keeps trying claims within one lease of the last word";

#[derive(Clone, Debug)]
pub(super) struct Leases {
    pub(super) processes: usize,
    pub(super) terms: Term,
    /// In ticks of the database's clock. The deadline is shorter by [`MISSED`] ticks of the local one.
    pub(super) lease: u8,
    /// How many statements can be under way that nobody waits for.
    pub(super) adrift: usize,
    pub(super) fault: Fault,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    row: Row,
    /// In no order: none of them is special.
    processes: Vec<Process>,
    /// Statements that may still land, whose answers are wanted by nobody.
    adrift: Vec<Statement>,
    /// Those that have held the row, of the holders that are still known anywhere.
    have_held: u32,
    /// The highest term there ever was.
    highest: Term,
    /// Whether the row has been free in this term.
    was_free: bool,
    broken: Option<Named>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Process {
    tenure: Option<Tenure>,
    /// The statement that it waits for.
    call: Option<Call>,
}

/// What the process knows of its lease. It is healthy as long as something is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Tenure {
    holder: Holder,
    term: Term,
    /// Until the local deadline, at the latest.
    left: u8,
    was_lost: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Call {
    statement: Statement,
    /// Until the deadline that its success gives, counted from before it was sent.
    left: u8,
    answer: Option<Answer>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Statement {
    Claim(Holder),
    /// Of a row that a claim with this holder may have taken.
    Read(Holder),
    Renew(Holder, Term),
    Release(Holder),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Answer {
    Won(Term),
    Held,
    Renewed,
    NotYours,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The clocks go on.
    Tick,
    Claim(usize),
    Renew(usize),
    /// The statement that is waited for is carried out.
    Land(usize),
    /// Its answer arrives.
    Answer(usize),
    /// It failed or took too long. Unless it was lost it may land later.
    GiveUp(usize, bool, Then),
    /// A statement that nobody waits for is carried out. A claim that it won may be given back.
    LandAdrift(usize, bool),
    LoseAdrift(usize),
    Release(usize),
    /// The lease is lost and its work has returned, or the process is killed and started again.
    End(usize),
}

/// What follows a statement whose answer did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    Nothing,
    /// The worker that is left with what was won gives it back.
    GiveBack,
    Read,
    SendAgain,
}

impl Process {
    fn is_healthy(&self) -> bool {
        self.tenure.is_some_and(|tenure| tenure.left > 0)
    }

    fn holders_mut(&mut self) -> impl Iterator<Item = &mut Holder> {
        let tenure = self.tenure.as_mut().map(|tenure| &mut tenure.holder);
        let call = self.call.as_mut().map(|call| call.statement.holder_mut());
        tenure.into_iter().chain(call)
    }

    fn holders(&self) -> impl Iterator<Item = Holder> {
        let tenure = self.tenure.map(|tenure| tenure.holder);
        let call = self.call.map(|call| call.statement.holder());
        tenure.into_iter().chain(call)
    }

    fn tick(&mut self) {
        if let Some(tenure) = &mut self.tenure {
            tenure.left = tenure.left.saturating_sub(1);
            tenure.was_lost |= tenure.left == 0;
        }
        if let Some(call) = &mut self.call {
            call.left = call.left.saturating_sub(1);
        }
    }
}

impl Statement {
    fn holder_mut(&mut self) -> &mut Holder {
        match self {
            Statement::Claim(holder)
            | Statement::Read(holder)
            | Statement::Renew(holder, _)
            | Statement::Release(holder) => holder,
        }
    }

    fn holder(self) -> Holder {
        match self {
            Statement::Claim(holder)
            | Statement::Read(holder)
            | Statement::Renew(holder, _)
            | Statement::Release(holder) => holder,
        }
    }
}

impl State {
    fn holders(&self) -> impl Iterator<Item = Holder> {
        let known = self.processes.iter().flat_map(Process::holders);
        let adrift = self.adrift.iter().map(|statement| statement.holder());
        known.chain(adrift).chain([NOBODY, self.row.holder])
    }

    /// The least that nobody knows: as good as one that was never used, and there is no end of them.
    fn mint(&self) -> Holder {
        let known = self
            .holders()
            .fold(0_u32, |known, holder| known | 1 << holder);
        known.trailing_ones() as Holder
    }

    /// One state for all that differ in nothing but which process is which and what a holder is called.
    fn canonical(mut self) -> State {
        let row_holder = self.row.holder;
        self.processes.sort_by_cached_key(|process| {
            let mut process = process.clone();
            for holder in process.holders_mut() {
                *holder = (*holder == row_holder).into();
            }
            process
        });
        self.adrift.sort_unstable();
        let (mut names, mut known, have_held) = ([NOBODY; 32], NOBODY, self.have_held);
        self.have_held = 0;
        let processes = self.processes.iter_mut().flat_map(Process::holders_mut);
        let adrift = self.adrift.iter_mut().map(Statement::holder_mut);
        for holder in [&mut self.row.holder]
            .into_iter()
            .chain(processes)
            .chain(adrift)
        {
            let name = &mut names[usize::from(*holder)];
            if *holder != NOBODY && *name == NOBODY {
                known += 1;
                *name = known;
                self.have_held |= (have_held >> *holder & 1) << known;
            }
            *holder = *name;
        }
        self.adrift.sort_unstable();
        self
    }

    fn land(&mut self, statement: Statement, model: &Leases) -> Option<Answer> {
        let &Leases { lease, fault, .. } = model;
        let before = self.row;
        let answer = match statement {
            Statement::Claim(holder) => match self.row.claim(holder, lease, fault) {
                Some(term) => {
                    if self.have_held & 1 << holder != 0 {
                        self.broken = Some(HOLDER_ONCE);
                    }
                    self.have_held |= 1 << holder;
                    Some(Answer::Won(term))
                }
                None => Some(Answer::Held),
            },
            Statement::Read(holder) => {
                let is_won = self.row.holder == holder && !self.row.is_free();
                Some(if is_won {
                    Answer::Won(self.row.term)
                } else {
                    Answer::Held
                })
            }
            Statement::Renew(holder, term) => {
                let renewed = self.row.renew(holder, term, lease, fault);
                if renewed && self.row.holder != holder {
                    self.broken = Some(OWN_RENEWAL);
                }
                Some(if renewed {
                    Answer::Renewed
                } else {
                    Answer::NotYours
                })
            }
            Statement::Release(holder) => {
                self.row.release(holder, fault);
                None
            }
        };
        if self.row.term != before.term {
            self.was_free = false;
        }
        self.watch();
        answer
    }

    /// Keeps what the properties ask for.
    fn watch(&mut self) {
        self.was_free |= self.row.is_free();
        if self.was_free && !self.row.is_free() {
            self.broken = Some(FREE_UNTIL_CLAIMED);
        }
        if self.row.term < self.highest {
            self.broken = Some(TERMS_RISE);
        }
        self.highest = self.highest.max(self.row.term);
    }

    fn healthy(&self) -> usize {
        self.processes.iter().filter(|p| p.is_healthy()).count()
    }

    /// With every process standing still from here on, and nothing under way landing any more.
    fn is_claimable(&self, model: &Leases) -> bool {
        let &Leases { lease, fault, .. } = model;
        let mut row = self.row;
        (0..lease).for_each(|_| row.tick(fault));
        row.claim(NOBODY, lease, fault).is_some()
    }
}

impl Leases {
    /// The ticks of the database's clock that a local deadline lasts, at the most.
    fn deadline(&self) -> u8 {
        let missed = MISSED + u8::from(self.fault == Fault::ClockTooSlow);
        let deadline = match self.fault {
            Fault::NoMargin => self.lease,
            _ => self.lease - MISSED,
        };
        deadline + missed
    }

    fn send(&self, process: &mut Process, statement: Statement) {
        process.call = Some(Call {
            statement,
            left: self.deadline(),
            answer: None,
        });
    }

    /// The process `i` waits no longer for what it has sent, which may land all the same.
    fn cast_adrift(&self, state: &mut State, i: usize, lost: bool) {
        if let Some(call) = state.processes[i].call.take()
            && call.answer.is_none()
            && !lost
        {
            self.push_adrift(state, call.statement);
        }
    }

    fn push_adrift(&self, state: &mut State, statement: Statement) {
        // A read that nobody waits for does nothing.
        if !matches!(statement, Statement::Read(_)) && state.adrift.len() < self.adrift {
            state.adrift.push(statement);
        }
    }

    fn answer(&self, state: &mut State, i: usize) {
        let process = &mut state.processes[i];
        let Some(call) = process.call.take() else {
            return;
        };
        let left = match self.fault {
            Fault::DeadlineFromReply => self.deadline(),
            _ => call.left,
        };
        match call.answer {
            Some(Answer::Won(_)) if left == 0 => {
                self.push_adrift(state, Statement::Release(call.statement.holder()));
            }
            Some(Answer::Won(term)) => {
                process.tenure = Some(Tenure {
                    holder: call.statement.holder(),
                    term,
                    left,
                    was_lost: false,
                });
            }
            Some(Answer::Renewed) => {
                if let Some(tenure) = &mut process.tenure
                    && (tenure.left > 0 || self.fault == Fault::LateSuccessRevives)
                {
                    tenure.left = tenure.left.max(left);
                }
            }
            Some(Answer::NotYours) => {
                if let Some(tenure) = &mut process.tenure {
                    tenure.left = 0;
                    tenure.was_lost = true;
                }
            }
            Some(Answer::Held) | None => {}
        }
    }
}

impl Model for Leases {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            row: Row::default(),
            processes: vec![Process::default(); self.processes],
            adrift: Vec::new(),
            have_held: 0,
            highest: 0,
            was_free: true,
            broken: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.push(Action::Tick);
        for (i, process) in state.processes.iter().enumerate() {
            match (&process.tenure, &process.call) {
                (None, None) => actions.push(Action::Claim(i)),
                (Some(tenure), None) if tenure.left > 0 => actions.push(Action::Renew(i)),
                (_, Some(call)) if call.answer.is_none() => actions.push(Action::Land(i)),
                (_, Some(_)) => actions.push(Action::Answer(i)),
                _ => {}
            }
            if let Some(call) = &process.call {
                for lost in [false, true] {
                    actions.push(Action::GiveUp(i, lost, Then::Nothing));
                    match call.statement {
                        Statement::Claim(_) if self.fault == Fault::HolderSentAgain => {
                            actions.push(Action::GiveUp(i, lost, Then::SendAgain));
                        }
                        Statement::Claim(_) => actions.push(Action::GiveUp(i, lost, Then::Read)),
                        _ => {}
                    }
                    if matches!(call.answer, Some(Answer::Won(_))) {
                        actions.push(Action::GiveUp(i, lost, Then::GiveBack));
                    }
                }
            }
            match process.tenure {
                Some(tenure) if tenure.left > 0 => {
                    actions.extend([Action::Release(i), Action::End(i)]);
                }
                Some(_) => actions.push(Action::End(i)),
                None => {}
            }
        }
        for (at, statement) in state.adrift.iter().enumerate() {
            actions.extend([Action::LandAdrift(at, false), Action::LoseAdrift(at)]);
            // A claim is given back only by whoever does not read it back.
            let mut known = state.processes.iter().flat_map(Process::holders);
            if matches!(statement, Statement::Claim(holder) if known.all(|known| known != *holder))
            {
                actions.push(Action::LandAdrift(at, true));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Tick => {
                state.row.tick(self.fault);
                state.watch();
                state.processes.iter_mut().for_each(Process::tick);
            }
            Action::Claim(i) => {
                let statement = Statement::Claim(state.mint());
                self.send(&mut state.processes[i], statement);
            }
            Action::Renew(i) => {
                let tenure = state.processes[i].tenure?;
                let statement = Statement::Renew(tenure.holder, tenure.term);
                self.send(&mut state.processes[i], statement);
            }
            Action::Land(i) => {
                let statement = state.processes[i].call?.statement;
                let answer = state.land(statement, self);
                state.processes[i].call.as_mut()?.answer = answer;
            }
            Action::Answer(i) => self.answer(&mut state, i),
            Action::GiveUp(i, lost, then) => {
                let call = state.processes[i].call?;
                self.cast_adrift(&mut state, i, lost);
                let holder = call.statement.holder();
                let statement = match then {
                    Then::Nothing => None,
                    Then::GiveBack => {
                        self.push_adrift(&mut state, Statement::Release(holder));
                        None
                    }
                    Then::Read => Some(Statement::Read(holder)),
                    Then::SendAgain => Some(Statement::Claim(holder)),
                };
                state.processes[i].call = statement.map(|statement| Call {
                    statement,
                    answer: None,
                    ..call
                });
            }
            Action::LandAdrift(at, give_back) => {
                let statement = state.adrift.remove(at);
                let answer = state.land(statement, self);
                if give_back && matches!(answer, Some(Answer::Won(_))) {
                    self.push_adrift(&mut state, Statement::Release(statement.holder()));
                }
            }
            Action::LoseAdrift(at) => {
                state.adrift.remove(at);
            }
            Action::Release(i) => {
                // Latched as lost first, whatever is in flight.
                let tenure = state.processes[i].tenure.take()?;
                self.push_adrift(&mut state, Statement::Release(tenure.holder));
                self.cast_adrift(&mut state, i, false);
            }
            Action::End(i) => {
                state.processes[i].tenure = None;
                self.cast_adrift(&mut state, i, false);
            }
        }
        Some(state.canonical())
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.row.term <= self.terms
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn taken_over(state: &State) -> impl Iterator<Item = &Tenure> {
            let tenures = state.processes.iter().filter_map(|p| p.tenure.as_ref());
            tenures.filter(|tenure| tenure.term < state.row.term)
        }
        vec![
            Property::always(ONE_HEALTHY, |_, state: &State| state.healthy() <= 1),
            Property::always(LOST_STAYS_LOST, |_, state: &State| {
                let mut tenures = state.processes.iter().filter_map(|p| p.tenure);
                tenures.all(|tenure| tenure.left == 0 || !tenure.was_lost)
            }),
            Property::always(TERMS_RISE, |_, state: &State| {
                state.broken != Some(TERMS_RISE)
            }),
            Property::always(FREE_UNTIL_CLAIMED, |_, state: &State| {
                state.broken != Some(FREE_UNTIL_CLAIMED)
            }),
            Property::always(OWN_RENEWAL, |_, state: &State| {
                state.broken != Some(OWN_RENEWAL)
            }),
            Property::always(HOLDER_ONCE, |_, state: &State| {
                state.broken != Some(HOLDER_ONCE)
            }),
            Property::always(CLAIMABLE, |model, state: &State| state.is_claimable(model)),
            Property::sometimes(
                "a holder is healthy in the last term",
                |model, state: &State| state.row.term == model.terms && state.healthy() == 1,
            ),
            Property::sometimes(
                "a paused holder comes back after a take-over",
                |_, state: &State| taken_over(state).next().is_some(),
            ),
            Property::sometimes("a renewal lands after a take-over", |_, state: &State| {
                state.adrift.iter().any(|statement| {
                    matches!(statement, Statement::Renew(_, term) if *term < state.row.term)
                })
            }),
            Property::sometimes(
                "a claim without an answer is won by reading",
                |_, state: &State| {
                    state.processes.iter().any(|process| {
                        process.call.is_some_and(|call| {
                            matches!(call.statement, Statement::Read(_))
                                && matches!(call.answer, Some(Answer::Won(_)))
                                && call.left > 0
                        })
                    })
                },
            ),
            Property::sometimes(
                "a claim that nobody waits for blocks the name",
                |_, state: &State| {
                    let mut holders = state.processes.iter().flat_map(Process::holders);
                    !state.row.is_free() && holders.all(|holder| holder != state.row.holder)
                },
            ),
        ]
    }
}
