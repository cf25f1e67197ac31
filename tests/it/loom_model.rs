//! The word that says whether a lease is lost, under every interleaving of a few threads.
//!
//! `src/loss/deadline.rs` takes its atomics from the module it is in, so the very code of the library
//! runs here on those of [loom], which tries every order and every value a load may see. What is
//! around the word is modelled after `Tenure` and `Lease`: a channel that is disconnected by taking
//! its sender out of a mutex, a release that is counted.
//!
//! [loom]: https://docs.rs/loom

use loom::cell::UnsafeCell;
use loom::sync::atomic::{self, AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

#[path = "../../src/loss/deadline.rs"]
mod deadline;

use deadline::{CAUSES, Code, Deadline};

const TAKEN: Code = 0;
const EXPIRED: Code = 1;
const UNREACHABLE: Code = 2;

/// Before the first deadline, at it, and the one after a renewal.
const BEFORE: u64 = CAUSES + 9;
const AT: u64 = CAUSES + 10;
const EXTENDED: u64 = CAUSES + 20;

/// Loom's, with a write to a neighbour before each load, which orders nothing but has loom try every
/// order. Of all accesses so far loom 0.7 keeps but the last in mind: when that was a load of the same
/// thread, it does not see that a write may go ahead of another thread's load.
struct AtomicU64 {
    word: atomic::AtomicU64,
    neighbour: AtomicBool,
}

impl AtomicU64 {
    fn new(word: u64) -> AtomicU64 {
        AtomicU64 {
            word: atomic::AtomicU64::new(word),
            neighbour: AtomicBool::new(false),
        }
    }

    fn load(&self, order: Ordering) -> u64 {
        self.neighbour.store(true, Ordering::Relaxed);
        self.word.load(order)
    }

    fn compare_exchange(
        &self,
        old: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.word.compare_exchange(old, new, success, failure)
    }

    fn fetch_update(
        &self,
        success: Ordering,
        failure: Ordering,
        mut update: impl FnMut(u64) -> Option<u64>,
    ) -> Result<u64, u64> {
        let mut old = self.load(failure);
        while let Some(new) = update(old) {
            match self.compare_exchange(old, new, success, failure) {
                Ok(old) => return Ok(old),
                Err(other) => old = other,
            }
        }
        Err(old)
    }
}

/// Three threads have too many orders for a test, so no more than so many switches of a thread that
/// could go on are tried. Two threads go through all of theirs.
const SWITCHES: usize = 3;

fn three_threads(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(SWITCHES);
    builder.check(model);
}

/// A tenure as the library has it, with the release that is sent for it.
struct Tenure {
    deadline: Deadline,
    channel: Mutex<Option<()>>,
    releases: AtomicUsize,
}

impl Tenure {
    fn new() -> Arc<Tenure> {
        Arc::new(Tenure {
            deadline: Deadline::new(AT),
            channel: Mutex::new(Some(())),
            releases: AtomicUsize::new(0),
        })
    }

    fn look(&self, now: u64) -> Result<u64, Code> {
        let answer = self.deadline.look(now, EXPIRED);
        if answer.is_err() {
            self.disconnect();
        }
        answer
    }

    fn extend(&self, now: u64) -> Result<(), Code> {
        let answer = self.deadline.extend(now, EXTENDED, EXPIRED);
        if answer.is_err() {
            self.disconnect();
        }
        answer
    }

    fn lose(&self, cause: Code) -> bool {
        let first = self.deadline.lose(cause);
        self.disconnect();
        first
    }

    /// What a drop and a release do.
    fn give_back(&self, now: u64) -> bool {
        let sent = self.look(now).is_ok() && self.lose(TAKEN);
        if sent {
            self.releases.fetch_add(1, Ordering::Relaxed);
        }
        sent
    }

    fn disconnect(&self) {
        *self.channel.lock().expect("no thread panicked") = None;
    }

    fn has_ended(&self) -> bool {
        self.channel.lock().expect("no thread panicked").is_none()
    }
}

fn on<T: 'static>(
    tenure: &Arc<Tenure>,
    act: impl FnOnce(&Tenure) -> T + 'static,
) -> thread::JoinHandle<T> {
    let tenure = Arc::clone(tenure);
    thread::spawn(move || act(&tenure))
}

#[test]
fn a_deadline_that_passes_and_a_renewal_that_succeeds_never_both_win() {
    loom::model(|| {
        let tenure = Tenure::new();
        let passes = on(&tenure, |tenure| tenure.look(AT));
        let succeeds = tenure.extend(BEFORE);
        match passes.join().unwrap() {
            Ok(deadline) => {
                assert_eq!((deadline, succeeds), (EXTENDED, Ok(())));
                assert_eq!(tenure.look(AT), Ok(EXTENDED));
                assert!(!tenure.has_ended());
            }
            Err(cause) => {
                assert_eq!((cause, succeeds), (EXPIRED, Err(EXPIRED)));
                assert_eq!(tenure.look(BEFORE), Err(EXPIRED));
                assert!(tenure.has_ended());
            }
        }
    });
}

#[test]
fn a_renewal_that_succeeds_too_late_never_wins() {
    loom::model(|| {
        let tenure = Tenure::new();
        let late = on(&tenure, |tenure| tenure.extend(AT));
        let _ = tenure.look(BEFORE);
        assert_eq!(late.join().unwrap(), Err(EXPIRED));
        assert_eq!(tenure.look(BEFORE), Err(EXPIRED));
    });
}

#[test]
fn two_renewals_leave_the_later_deadline() {
    loom::model(|| {
        let tenure = Tenure::new();
        let other = on(&tenure, |tenure| {
            tenure.deadline.extend(BEFORE, EXTENDED + 5, EXPIRED)
        });
        assert_eq!(tenure.extend(BEFORE), Ok(()));
        assert_eq!(other.join().unwrap(), Ok(()));
        assert_eq!(tenure.look(BEFORE), Ok(EXTENDED + 5));
    });
}

#[test]
fn of_two_losses_one_cause_wins_and_all_see_the_same() {
    three_threads(|| {
        let tenure = Tenure::new();
        let look = |tenure: &Tenure| tenure.deadline.look(BEFORE, EXPIRED);
        let reader = on(&tenure, move |tenure| look(tenure).err());
        let other = on(&tenure, move |tenure| {
            (tenure.deadline.lose(UNREACHABLE), look(tenure))
        });
        let (first, seen) = (tenure.deadline.lose(TAKEN), look(&tenure));
        let (other_first, other_seen) = other.join().unwrap();
        assert!(first != other_first, "both won, or neither");
        let cause = if first { TAKEN } else { UNREACHABLE };
        assert_eq!((seen, other_seen), (Err(cause), Err(cause)));
        assert!(reader.join().unwrap().is_none_or(|seen| seen == cause));
    });
}

#[test]
fn a_passing_deadline_and_a_loss_have_one_cause() {
    loom::model(|| {
        let tenure = Tenure::new();
        let passes = on(&tenure, |tenure| tenure.look(AT));
        let first = tenure.lose(TAKEN);
        let cause = if first { TAKEN } else { EXPIRED };
        assert_eq!(passes.join().unwrap(), Err(cause));
        assert_eq!(tenure.look(BEFORE), Err(cause));
    });
}

#[test]
fn a_renewal_never_revives_what_was_lost() {
    loom::model(|| {
        let tenure = Tenure::new();
        let succeeds = on(&tenure, |tenure| tenure.extend(BEFORE));
        assert!(tenure.lose(TAKEN));
        assert_eq!(tenure.look(BEFORE), Err(TAKEN));
        assert!(matches!(succeeds.join().unwrap(), Ok(()) | Err(TAKEN)));
        assert_eq!(tenure.look(BEFORE), Err(TAKEN));
    });
}

#[test]
fn who_saw_it_lost_never_sees_it_live_again() {
    three_threads(|| {
        let tenure = Tenure::new();
        let renewals = on(&tenure, |tenure| tenure.extend(BEFORE));
        let loser = on(&tenure, |tenure| tenure.lose(UNREACHABLE));
        let seen = [tenure.look(BEFORE), tenure.look(BEFORE)];
        if let [Err(cause), then] = seen {
            assert_eq!(then, Err(cause));
        }
        if let [Ok(deadline), Ok(then)] = seen {
            assert!(deadline <= then, "it was brought forward");
        }
        renewals.join().unwrap().ok();
        assert!(loser.join().unwrap());
        assert_eq!(tenure.look(BEFORE), Err(UNREACHABLE));
    });
}

#[test]
fn who_finds_the_channel_disconnected_finds_the_word_saying_why() {
    three_threads(|| {
        let tenure = Tenure::new();
        let loser = on(&tenure, |tenure| tenure.lose(TAKEN));
        let passes = on(&tenure, |tenure| tenure.look(AT));
        if tenure.has_ended() {
            assert!(tenure.look(BEFORE).is_err());
        }
        loser.join().unwrap();
        assert!(passes.join().unwrap().is_err());
        assert!(tenure.has_ended());
    });
}

#[test]
fn who_finds_the_channel_disconnected_by_a_late_renewal_finds_the_word() {
    loom::model(|| {
        let tenure = Tenure::new();
        let late = on(&tenure, |tenure| tenure.extend(AT));
        if tenure.has_ended() {
            assert_eq!(tenure.look(BEFORE), Err(EXPIRED));
        }
        assert_eq!(late.join().unwrap(), Err(EXPIRED));
        assert!(tenure.has_ended());
    });
}

#[test]
fn who_sees_the_loss_sees_all_that_came_before_it() {
    loom::model(|| {
        let tenure = Tenure::new();
        // Loom finds an access to it that is not ordered after the other.
        let before = Arc::new(UnsafeCell::new(()));
        let loser = {
            let (tenure, before) = (Arc::clone(&tenure), Arc::clone(&before));
            thread::spawn(move || {
                before.with_mut(|_| ());
                tenure.deadline.lose(TAKEN)
            })
        };
        if tenure.deadline.look(BEFORE, EXPIRED).is_err() {
            before.with(|_| ());
        }
        assert!(loser.join().unwrap());
    });
}

#[test]
fn a_stop_is_no_loss_whatever_the_attempt_comes_to() {
    loom::model(|| {
        let tenure = Tenure::new();
        let stopped = Arc::new(AtomicBool::new(false));
        let keeper = {
            let (tenure, stopped) = (Arc::clone(&tenure), Arc::clone(&stopped));
            thread::spawn(move || {
                // An answer that is there is counted, with or without a stop.
                if stopped.load(Ordering::Acquire) {
                    return None;
                }
                Some(tenure.extend(BEFORE))
            })
        };
        stopped.store(true, Ordering::Release);
        // Whoever stopped it has a lease that is good until its deadline.
        assert!(tenure.look(BEFORE).is_ok());
        let deadline = match keeper.join().unwrap() {
            None => AT,
            Some(Ok(())) => EXTENDED,
            Some(Err(cause)) => panic!("a stop became the loss {cause}"),
        };
        assert_eq!(tenure.look(BEFORE), Ok(deadline));
        assert!(!tenure.has_ended());
    });
}

#[test]
fn a_release_with_a_renewal_in_flight_is_sent_once_and_latches() {
    loom::model(|| {
        let tenure = Tenure::new();
        let renewal = on(&tenure, |tenure| tenure.extend(BEFORE));
        assert!(tenure.give_back(BEFORE));
        assert_eq!(tenure.look(BEFORE), Err(TAKEN));
        let renewed = renewal.join().unwrap();
        assert!(matches!(renewed, Ok(()) | Err(TAKEN)));
        assert_eq!(tenure.look(BEFORE), Err(TAKEN));
        assert_eq!(tenure.releases.load(Ordering::Relaxed), 1);
        assert!(tenure.has_ended());
    });
}

#[test]
fn a_release_is_sent_exactly_when_its_latch_was_the_loss() {
    three_threads(|| {
        let tenure = Tenure::new();
        let passes = on(&tenure, |tenure| tenure.deadline.look(AT, EXPIRED));
        let loser = on(&tenure, |tenure| tenure.deadline.lose(UNREACHABLE));
        let sent = tenure.give_back(BEFORE);
        let passed = passes.join().unwrap();
        let lost = loser.join().unwrap();
        let cause = tenure.look(BEFORE).unwrap_err();
        assert_eq!(sent, cause == TAKEN);
        assert_eq!(lost, cause == UNREACHABLE);
        assert_eq!(passed, Err(cause));
        assert_eq!(
            tenure.releases.load(Ordering::Relaxed),
            usize::from(cause == TAKEN)
        );
    });
}

#[test]
fn of_two_releases_one_is_sent() {
    loom::model(|| {
        let tenure = Tenure::new();
        let other = on(&tenure, |tenure| tenure.give_back(BEFORE));
        let sent = tenure.give_back(BEFORE);
        assert!(sent != other.join().unwrap());
        assert_eq!(tenure.releases.load(Ordering::Relaxed), 1);
    });
}
