//! The row of a name and the statements on it, as section 2 of the architecture has them.
//!
//! A fault changes one statement, where the word of the fault stands.

use super::Fault;

/// A token that is minted for each claim. [`NOBODY`] holds what was never claimed.
pub(super) type Holder = u8;
pub(super) type Term = u8;
pub(super) type Slot = u8;

pub(super) const NOBODY: Holder = 0;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Row {
    pub(super) holder: Holder,
    pub(super) term: Term,
    /// `expires_at_ms` less the database's now, never below zero.
    pub(super) left: u8,
    pub(super) slot: Slot,
    pub(super) unfinished: Slot,
    pub(super) rerun: Slot,
}

impl Row {
    /// `expires_at_ms <= now`
    pub(super) fn is_free(&self) -> bool {
        self.left == 0
    }

    /// The database's clock goes on.
    pub(super) fn tick(&mut self, fault: Fault) {
        if fault != Fault::DatabaseClockStandsStill {
            self.left = self.left.saturating_sub(1);
        }
    }

    /// What a claim of a slot or a rerun compares later.
    pub(super) fn as_read(&self) -> Row {
        Row {
            term: self.term,
            slot: self.slot,
            unfinished: self.unfinished,
            ..Row::default()
        }
    }

    /// `name AND holder AND term`
    fn is_held_as(&self, holder: Holder, term: Term) -> bool {
        self.holder == holder && self.term == term
    }

    fn hand_over(&mut self, holder: Holder, lease: u8) -> Term {
        self.holder = holder;
        self.term += 1;
        self.left = lease;
        self.term
    }

    /// `… ON CONFLICT DO UPDATE holder, term = term + 1, expires = now + lease WHERE expires <= now`
    pub(super) fn claim(&mut self, holder: Holder, lease: u8, fault: Fault) -> Option<Term> {
        let is_free = self.is_free() || fault == Fault::ClaimWithoutExpiry;
        is_free.then(|| self.hand_over(holder, lease))
    }

    /// `UPDATE expires = now + lease WHERE name AND holder AND term AND expires > now`
    pub(super) fn renew(&mut self, holder: Holder, term: Term, lease: u8, fault: Fault) -> bool {
        let is_mine = self.is_held_as(holder, term) || fault == Fault::RenewByNameOnly;
        let is_live = !self.is_free() || fault == Fault::RenewWithoutExpiry;
        let matched = is_mine && is_live;
        if matched {
            self.left = lease;
        }
        matched
    }

    /// `SELECT term WHERE name AND holder AND term AND expires > now`
    pub(super) fn verify(&self, holder: Holder, term: Term) -> bool {
        self.is_held_as(holder, term) && !self.is_free()
    }

    /// `SELECT term WHERE name AND holder AND term`, and a lock on the row, which is the guard's.
    pub(super) fn fence(&self, holder: Holder, term: Term, fault: Fault) -> bool {
        self.is_held_as(holder, term) || fault == Fault::FenceByNameOnly
    }

    /// `UPDATE expires = 0 WHERE name AND holder`
    pub(super) fn release(&mut self, holder: Holder, fault: Fault) {
        if self.holder == holder || fault == Fault::ReleaseByNameOnly {
            self.left = 0;
            if fault == Fault::ReleaseDeletesTheRow {
                *self = Row::default();
            }
        }
    }

    /// `UPDATE holder = '', term = term + 1, expires = 0 WHERE name AND expires > now`
    pub(super) fn force_release(&mut self) {
        if !self.is_free() {
            self.hand_over(NOBODY, 0);
        }
    }

    /// `UPDATE … slot = unfinished = :slot WHERE name AND term, slot and unfinished as read AND
    /// expires <= now`
    pub(super) fn claim_slot(
        &mut self,
        holder: Holder,
        slot: Slot,
        read: &Row,
        lease: u8,
        fault: Fault,
    ) -> Option<Term> {
        let is_as_read = self.term == read.term
            && (self.slot == read.slot || fault == Fault::SlotClaimWithoutSlot)
            && (self.unfinished == read.unfinished || fault == Fault::SlotClaimWithoutMark);
        (is_as_read && self.is_free()).then(|| {
            self.slot = slot;
            self.unfinished = slot;
            self.hand_over(holder, lease)
        })
    }

    /// `unfinished = slot AND rerun < slot AND expires <= now`
    pub(super) fn is_cut_short(&self) -> bool {
        self.unfinished == self.slot && self.rerun < self.slot && self.is_free()
    }

    /// `UPDATE … rerun = slot WHERE name AND term = found AND slot = found AND` [cut
    /// short](Row::is_cut_short)
    pub(super) fn claim_rerun(
        &mut self,
        holder: Holder,
        found: &Row,
        lease: u8,
        fault: Fault,
    ) -> Option<Term> {
        let is_as_found = match fault {
            Fault::RerunWithoutTerm => self.slot == found.slot,
            Fault::RerunWithoutSlot => self.term == found.term,
            Fault::RerunWithoutEither => true,
            _ => self.term == found.term && self.slot == found.slot,
        };
        (is_as_found && self.is_cut_short()).then(|| {
            if fault != Fault::RerunNotMarked {
                self.rerun = self.slot;
            }
            self.hand_over(holder, lease)
        })
    }

    /// `UPDATE expires = 0, unfinished = 0, slot = :passed if slot < :passed <= now WHERE name AND
    /// holder`
    pub(super) fn finish(&mut self, holder: Holder, passed: Slot, now: Slot, fault: Fault) -> bool {
        let matched = self.holder == holder || fault == Fault::FinishByNameOnly;
        if matched {
            self.left = 0;
            if fault != Fault::FinishLeavesTheMark {
                self.unfinished = 0;
            }
            if self.slot < passed && passed <= now || fault == Fault::FinishDoesNotCompare {
                self.slot = passed;
            }
        }
        matched
    }

    /// `UPDATE unfinished = 0 WHERE name AND unfinished = :slot`
    pub(super) fn settle(&mut self, slot: Slot, fault: Fault) {
        if self.unfinished == slot || fault == Fault::SettleDoesNotCompare {
            self.unfinished = 0;
        }
    }

    /// `UPDATE slot, unfinished = as before, expires = 0 WHERE name AND holder`
    pub(super) fn undo_slot(&mut self, holder: Holder, before: &Row, fault: Fault) {
        if self.holder == holder || fault == Fault::UndoByNameOnly {
            self.slot = before.slot;
            self.unfinished = before.unfinished;
            self.left = 0;
        }
    }

    /// `UPDATE rerun = 0, expires = 0 WHERE name AND holder`
    pub(super) fn undo_rerun(&mut self, holder: Holder, fault: Fault) {
        if self.holder == holder || fault == Fault::UndoByNameOnly {
            self.rerun = 0;
            self.left = 0;
        }
    }
}
