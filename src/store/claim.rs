//! A claim, and what is done when its answer is an error or is never taken.
//!
//! Invariant: a holder is sent in one claim only. Sent twice, the first could land after the second
//! was given back. So a claim that failed is *read*: the row of a claim that was carried out names
//! its holder. A claim that was won and that nobody takes is undone: of an instant it claimed, no
//! trace is left.
//!
//! Hazard: a claim that was carried out and cannot be read blocks the name for one lease.

use std::sync::Arc;

use super::Store;
use super::line::{Failure, Line};
use crate::clock::Moment;
use crate::lease::{Lease, Round};
use crate::loss::StopToken;
use crate::name::mint_holder;
use crate::protocol::{Key, NewClaim, Row};
use crate::slot::Unfinished;
use crate::tenure::Tenure;

/// What is claimed.
#[derive(Debug, Clone)]
pub(crate) enum What {
    Name(String),
    Slot(String, i64),
    Rerun(Unfinished),
}

impl What {
    fn name(&self) -> &str {
        match self {
            What::Name(name) | What::Slot(name, _) => name,
            What::Rerun(found) => found.name(),
        }
    }
}

/// How a claim is taken back.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Undo {
    Name,
    Slot {
        slot_ms: i64,
        unfinished_slot_ms: i64,
    },
    Rerun,
}

impl Undo {
    fn ask(self, line: &mut Line, key: Key<'_>) -> Result<bool, Failure> {
        line.ask(|session| match self {
            Undo::Name => session.release(key, true),
            Undo::Slot {
                slot_ms,
                unfinished_slot_ms,
            } => session.undo_slot(key, slot_ms, unfinished_slot_ms),
            Undo::Rerun => session.undo_rerun(key),
        })
    }
}

/// A lease on its way to the one who asked for it.
pub(crate) struct Untaken {
    lease: Option<Lease>,
    undo: Undo,
}

impl Untaken {
    pub(crate) fn take(mut self) -> Lease {
        self.lease.take().expect("BUG: a lease was taken twice")
    }
}

impl Drop for Untaken {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            let undo = self.undo;
            lease.give_back_by(move |line, tenure| undo.ask(line, tenure.key()));
        }
    }
}

/// Claims, if it can be had.
pub(super) fn claim(
    line: &mut Line,
    store: &Arc<Store>,
    what: &What,
    stops: &[StopToken],
) -> Result<Option<Untaken>, Failure> {
    let kept = line.is_connected();
    let won = match try_once(line, store, what) {
        // The session may have died long before; the row is free, so a new claim is none too many.
        Err(Failure::Database(_)) if kept && !line.is_overdue() => try_once(line, store, what),
        outcome => outcome,
    }
    .map_err(|failure| line.explain(failure))?;
    let Some(won) = won else { return Ok(None) };
    let tenure = Tenure::new(
        what.name().to_owned(),
        won.holder,
        won.term,
        won.slot_ms,
        won.sent,
        stops.to_vec(),
        Arc::clone(store),
    );
    if tenure.is_lost() {
        // So late an answer leaves nothing to hold.
        won.undo.ask(line, tenure.key())?;
        return Err(Failure::TooLate);
    }
    let untaken = Untaken {
        lease: Some(Lease::new(tenure.clone(), won.round)),
        undo: won.undo,
    };
    // After that: a logger that panics must not keep the name.
    log::debug!(lease = tenure.name(), term = tenure.term(), instance = store.instance(); "lease claimed");
    Ok(Some(untaken))
}

struct Won {
    holder: String,
    term: i64,
    slot_ms: Option<i64>,
    sent: Moment,
    round: Round,
    undo: Undo,
}

fn try_once(line: &mut Line, store: &Store, what: &What) -> Result<Option<Won>, Failure> {
    let claim = NewClaim {
        name: what.name().to_owned(),
        holder: mint_holder(),
        instance: store.instance().to_owned(),
        lease_ms: store.timings().lease_ms(),
    };
    let mut before: Option<Row> = None;
    if let What::Slot(name, slot_ms) = what {
        before = line.ask(|session| session.read(name))?;
        if before
            .as_ref()
            .is_some_and(|row| !row.is_free() || row.slot_ms >= *slot_ms)
        {
            return Ok(None);
        }
    }
    let clock = store.clock();
    let mut sent = clock.now();
    let answer = line.ask_once(|session| {
        // Connecting is over by now.
        sent = clock.now();
        match what {
            What::Name(_) => session.claim(&claim),
            What::Slot(_, slot_ms) => session.claim_slot(&claim, *slot_ms, before.as_ref()),
            What::Rerun(found) => session.claim_rerun(&claim, found.slot_ms(), found.term()),
        }
    });
    let term = match answer {
        Ok(term) => term,
        Err(Failure::Database(error)) => match read_back(line, &claim) {
            Some(term) => term,
            None => return Err(Failure::Database(error)),
        },
        Err(failure) => return Err(failure),
    };
    let Some(term) = term else { return Ok(None) };
    let (slot_ms, round, undo) = match what {
        What::Name(_) => (None, Round::default(), Undo::Name),
        What::Slot(name, slot_ms) => {
            let superseded = before
                .as_ref()
                .and_then(|row| Unfinished::superseded(name, row));
            let undo = Undo::Slot {
                slot_ms: before.as_ref().map_or(0, |row| row.slot_ms),
                unfinished_slot_ms: before.as_ref().map_or(0, |row| row.unfinished_slot_ms),
            };
            (Some(*slot_ms), Round { superseded }, undo)
        }
        What::Rerun(found) => (Some(found.slot_ms()), Round::default(), Undo::Rerun),
    };
    Ok(Some(Won {
        holder: claim.holder,
        term,
        slot_ms,
        sent,
        round,
        undo,
    }))
}

/// What became of a claim that failed: its term, or held by another. `None` when that is not known.
fn read_back(line: &mut Line, claim: &NewClaim) -> Option<Option<i64>> {
    match line.ask_once(|session| session.read(&claim.name)) {
        Ok(Some(row)) if row.holder == claim.holder && !row.is_free() => Some(Some(row.term)),
        Ok(Some(row)) if !row.is_free() => Some(None),
        // Somebody is fencing a commit or claiming.
        Ok(Some(_)) if is_locked(line, &claim.name) => Some(None),
        _ => None,
    }
}

pub(super) fn is_locked(line: &mut Line, name: &str) -> bool {
    matches!(line.ask_once(|session| session.is_locked(name)), Ok(true))
}
