use std::sync::Weak;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::{Sender, bounded};

use super::super::testing::{
    Ask, Background, Database, NANO, Reply, at_once, background, secs, settle, soon,
};
use super::*;
use crate::loss::Signal;

const BOUND: Duration = secs(5);

struct Scene {
    pool: Arc<Pool>,
    clock: Clock,
    database: Database,
}

fn scene(size: usize) -> Scene {
    let clock = Clock::driven();
    let database = Database::new(&clock, false);
    let pool = Pool::new(database.connector(), clock.clone(), size);
    Scene {
        pool: Arc::new(pool),
        clock,
        database,
    }
}

/// A call whose worker is at it until the sender is dropped.
struct Stuck<T = ()> {
    asked: Background<Result<T, NoAnswer>>,
    let_go: Sender<()>,
}

impl Scene {
    fn ask<T: Send + 'static>(
        &self,
        bound: Duration,
        question: impl FnOnce(&mut Line) -> T + Send + 'static,
    ) -> Background<Result<T, NoAnswer>> {
        let pool = Arc::clone(&self.pool);
        background(move || pool.ask(bound, &[], question))
    }

    fn stick<T: Send + 'static>(&self, answer: T) -> Stuck<T> {
        let (let_go, gate) = bounded::<()>(0);
        let (begin, began) = bounded(1);
        let asked = self.ask(BOUND, move |_| {
            begin.send(()).unwrap();
            let _ = gate.recv();
            answer
        });
        soon(|| !began.is_empty());
        Stuck { asked, let_go }
    }

    /// A worker that is written off until the sender is dropped.
    fn write_one_off(&self) -> Sender<()> {
        let stuck = self.stick(());
        self.clock.advance(BOUND);
        assert!(matches!(stuck.asked.output(), Err(NoAnswer::TimedOut)));
        stuck.let_go
    }

    fn answers(&self) -> bool {
        let pool = Arc::clone(&self.pool);
        match at_once(move || pool.ask(BOUND, &[], |_| 1)) {
            Ok(1) => true,
            Err(NoAnswer::TimedOut) => false,
            _ => panic!("neither"),
        }
    }

    fn written_off(&self) -> usize {
        self.pool.0.state.lock().written_off
    }

    fn workers(&self) -> usize {
        self.pool.0.state.lock().workers
    }
}

#[test]
fn there_is_no_thread_before_the_first_call() {
    let scene = scene(2);
    settle();
    assert_eq!(Arc::strong_count(&scene.pool.0), 1);
    assert!(scene.answers());
    // Each worker has one as well.
    assert_eq!(Arc::strong_count(&scene.pool.0), 2);
}

#[test]
fn there_are_never_more_workers_than_allowed() {
    let scene = scene(2);
    let (at_it, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (let_go, gate) = bounded::<()>(0);
    let asked: Vec<_> = (0..6)
        .map(|n| {
            let (at_it, most, gate) = (Arc::clone(&at_it), Arc::clone(&most), gate.clone());
            scene.ask(BOUND, move |_| {
                let now = at_it.fetch_add(1, Ordering::SeqCst) + 1;
                most.fetch_max(now, Ordering::SeqCst);
                let _ = gate.recv();
                at_it.fetch_sub(1, Ordering::SeqCst);
                n
            })
        })
        .collect();
    soon(|| at_it.load(Ordering::SeqCst) == 2);
    settle();
    assert_eq!(at_it.load(Ordering::SeqCst), 2);
    drop(let_go);
    for (n, asked) in asked.into_iter().enumerate() {
        assert!(matches!(asked.output(), Ok(answer) if answer == n));
    }
    assert_eq!(most.load(Ordering::SeqCst), 2);
    assert_eq!(scene.workers(), 2);
}

#[test]
fn a_second_worker_is_started_only_when_the_first_is_at_work() {
    let scene = scene(2);
    for _ in 0..20 {
        assert!(scene.answers());
        soon(|| scene.pool.0.state.lock().waiting == 1);
    }
    assert_eq!(scene.workers(), 1);
    let stuck = scene.stick(());
    assert!(scene.answers());
    assert_eq!(scene.workers(), 2);
    drop(stuck);
}

#[test]
fn nobody_waits_longer_than_the_bound() {
    let scene = scene(1);
    let stuck = scene.stick(());
    scene.clock.advance(BOUND - NANO);
    settle();
    assert!(stuck.asked.is_running());
    scene.clock.advance(NANO);
    assert!(matches!(stuck.asked.output(), Err(NoAnswer::TimedOut)));
}

#[test]
fn a_worker_that_does_not_come_back_is_written_off_and_replaced() {
    let scene = scene(1);
    let stuck = scene.stick(());
    let waiting = scene.ask(secs(60), |_| 2);
    settle();
    assert!(waiting.is_running());
    scene.clock.advance(BOUND);
    assert!(matches!(stuck.asked.output(), Err(NoAnswer::TimedOut)));
    // Who waited in the queue is served by the next one.
    assert!(matches!(waiting.output(), Ok(2)));
    assert_eq!((scene.written_off(), scene.workers()), (1, 1));

    drop(stuck.let_go);
    soon(|| scene.written_off() == 0);
    assert!(scene.answers());
    assert_eq!(scene.workers(), 1);
}

#[test]
fn what_a_written_off_worker_has_is_thrown_away() {
    struct Dropped(Sender<()>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.send(()).unwrap();
        }
    }
    let scene = scene(1);
    let hung = scene.database.hang(Ask::HasTable);
    let (drops, dropped) = bounded(1);
    let asked = scene.ask(BOUND, move |line| {
        let answer = line.ask_once(|session| session.has_table());
        (answer.is_ok(), Dropped(drops))
    });
    hung.arrived();
    scene.clock.advance(BOUND);
    assert!(matches!(asked.output(), Err(NoAnswer::TimedOut)));
    assert_eq!(scene.database.sessions(), 1);
    hung.reply(Reply::Yes);
    soon(|| !dropped.is_empty());
    soon(|| scene.database.sessions() == 0);
    soon(|| Arc::strong_count(&scene.pool.0) == 1);
}

#[test]
fn a_worker_that_is_late_but_not_missed_goes_on() {
    let scene = scene(1);
    let (let_go, gate) = bounded::<()>(0);
    let told = scene.pool.tell(BOUND, move |line| {
        let _ = line.ask_once(|session| session.has_table());
        let _ = gate.recv();
    });
    assert!(told.is_ok());
    soon(|| scene.database.count(Ask::HasTable) == 1);
    scene.clock.advance(secs(60));
    drop(let_go);
    soon(|| scene.pool.0.state.lock().waiting == 1);
    assert_eq!((scene.written_off(), scene.workers()), (0, 1));
    assert_eq!(scene.database.sessions(), 1);
}

#[test]
fn beyond_eight_that_hang_calls_fail_at_once_and_one_more_a_minute_is_let_through() {
    let scene = scene(1);
    let mut hung: Vec<_> = (0..WRITTEN_OFF).map(|_| scene.write_one_off()).collect();
    assert_eq!((scene.written_off(), scene.workers()), (8, 0));

    // The first that is let through beyond them.
    let probed = scene.clock.now();
    hung.push(scene.write_one_off());
    assert!(!scene.answers());
    assert!(!scene.answers());
    scene.clock.advance(PROBE - BOUND - NANO);
    assert_eq!(scene.clock.now().since(probed), PROBE - NANO);
    assert!(!scene.answers());
    assert_eq!((scene.written_off(), scene.workers()), (9, 0));
    assert!(scene.pool.0.state.lock().jobs.is_empty());

    // A minute later another, and no second one.
    scene.clock.advance(NANO);
    hung.push(scene.write_one_off());
    assert_eq!(scene.written_off(), 10);
    assert!(!scene.answers());

    // One that finds the network back serves the others.
    scene.clock.advance(PROBE);
    assert!(scene.answers());
    assert!(scene.answers());
    assert_eq!((scene.written_off(), scene.workers()), (10, 1));
}

#[test]
fn the_count_falls_back_as_they_return() {
    let scene = scene(1);
    let mut hung: Vec<_> = (0..=WRITTEN_OFF).map(|_| scene.write_one_off()).collect();
    assert!(!scene.answers());
    hung.pop();
    soon(|| scene.written_off() == 8);
    assert!(!scene.answers(), "that is still the most");
    hung.pop();
    soon(|| scene.written_off() == 7);
    assert!(scene.answers());
    // Should they become eight again, one more is let through at once, as the first time.
    hung.push(scene.write_one_off());
    assert_eq!((scene.written_off(), scene.workers()), (8, 0));
    assert!(scene.answers());
    hung.clear();
    soon(|| scene.written_off() == 0);
    // All but the one in use are gone.
    soon(|| Arc::strong_count(&scene.pool.0) == 2);
    assert!(scene.answers());
}

#[test]
fn what_is_not_waited_for_fails_at_once_as_well() {
    let scene = scene(1);
    let hung: Vec<_> = (0..=WRITTEN_OFF).map(|_| scene.write_one_off()).collect();
    let told = scene.pool.tell(BOUND, |_| ());
    assert!(matches!(told, Err(NoAnswer::TimedOut)));
    assert!(scene.pool.0.state.lock().jobs.is_empty());
    drop(hung);
}

#[test]
fn a_job_whose_time_was_up_before_it_began_is_not_run() {
    let scene = scene(1);
    let stuck = scene.stick(3);
    let run = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&run);
    let overdue = scene.ask(secs(1), move |_| counts.fetch_add(1, Ordering::SeqCst));
    soon(|| scene.pool.0.state.lock().jobs.len() == 1);
    scene.clock.advance(secs(1));
    assert!(matches!(overdue.output(), Err(NoAnswer::TimedOut)));
    drop(stuck.let_go);
    assert!(matches!(stuck.asked.output(), Ok(3)));
    // The job is gone, and with it what it owned.
    soon(|| Arc::strong_count(&run) == 1);
    assert_eq!(run.load(Ordering::SeqCst), 0);
    assert!(scene.answers());
}

#[test]
fn jobs_are_done_in_the_order_they_came() {
    let scene = scene(1);
    let stuck = scene.stick(());
    let (done, order) = crossbeam_channel::unbounded();
    for n in 0..5 {
        let done = done.clone();
        let told = scene.pool.tell(BOUND, move |_| done.send(n).unwrap());
        assert!(told.is_ok());
    }
    drop((stuck, done));
    soon(|| order.len() == 5);
    assert_eq!(order.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
}

#[test]
fn a_panic_in_a_job_ends_neither_the_caller_nor_the_worker() {
    let scene = scene(1);
    let pool = Arc::clone(&scene.pool);
    let panicked: Result<(), NoAnswer> = at_once(move || {
        pool.ask(BOUND, &[], |line| {
            let _ = line.ask_once(|session| session.has_table());
            std::panic::resume_unwind(Box::new("the job panics"))
        })
    });
    assert!(matches!(panicked, Err(NoAnswer::TimedOut)));
    // What the panic has left on the session is not known.
    soon(|| scene.database.sessions() == 0);
    assert!(scene.answers());
    assert_eq!((scene.written_off(), scene.workers()), (0, 1));
}

#[test]
fn a_signal_ends_the_wait_and_not_the_job() {
    let scene = scene(1);
    let (let_go, gate) = bounded::<()>(0);
    let signal = Signal::new();
    let receiver = signal.receiver().clone();
    let pool = Arc::clone(&scene.pool);
    let asked = background(move || {
        pool.ask(
            BOUND,
            &[&crossbeam_channel::never(), &receiver],
            move |_| {
                let _ = gate.recv();
            },
        )
    });
    settle();
    assert!(asked.is_running());
    signal.disconnect();
    assert!(matches!(asked.output(), Err(NoAnswer::Cancelled)));
    assert_eq!((scene.written_off(), scene.workers()), (0, 1));
    drop(let_go);
    assert!(scene.answers());
}

/// Says when it is dropped whether the pool's lock was free.
struct Locksmith {
    shared: Weak<Shared>,
    found: Sender<bool>,
}

impl Locksmith {
    fn try_lock(&self) {
        let free = match self.shared.upgrade() {
            Some(shared) => shared.state.try_lock_for(secs(1)).is_some(),
            None => true,
        };
        self.found.send(free).unwrap();
    }
}

impl Drop for Locksmith {
    fn drop(&mut self) {
        self.try_lock();
    }
}

#[test]
fn no_job_and_nothing_of_a_job_is_run_or_dropped_under_the_lock() {
    let scene = scene(1);
    let (found, free) = crossbeam_channel::unbounded();
    let locksmith = || Locksmith {
        shared: Arc::downgrade(&scene.pool.0),
        found: found.clone(),
    };
    let all_free = |times| {
        soon(|| free.len() == times);
        assert!(free.try_iter().all(|free| free), "it was locked");
    };

    // Run, and dropped after that.
    let smith = locksmith();
    assert!(scene.pool.tell(BOUND, move |_| smith.try_lock()).is_ok());
    all_free(2);

    // An answer that is late.
    let stuck = scene.stick(locksmith());
    scene.clock.advance(BOUND);
    assert!(stuck.asked.output().is_err());
    drop(stuck.let_go);
    all_free(1);

    // A job that is overdue.
    let stuck = scene.stick(());
    let smith = locksmith();
    assert!(scene.pool.tell(secs(1), move |_| smith.try_lock()).is_ok());
    scene.clock.advance(secs(1));
    drop(stuck);
    all_free(1);

    // A job that is refused.
    let hung: Vec<_> = (0..=WRITTEN_OFF).map(|_| scene.write_one_off()).collect();
    let smith = locksmith();
    assert!(scene.pool.tell(BOUND, move |_| smith.try_lock()).is_err());
    all_free(1);
    drop(hung);
}

#[test]
fn a_job_can_ask_the_pool_it_runs_in() {
    let scene = scene(2);
    let (done, inner) = bounded(1);
    let weak = Arc::downgrade(&scene.pool);
    let outer = scene.ask(BOUND, move |_| {
        let pool = weak.upgrade().unwrap();
        pool.tell(BOUND, move |_| done.send(()).unwrap()).is_ok()
    });
    assert!(matches!(outer.output(), Ok(true)));
    soon(|| !inner.is_empty());
}

#[test]
fn workers_end_when_the_pool_is_dropped_and_the_jobs_are_done() {
    let Scene { pool, database, .. } = scene(2);
    let (let_go, gate) = bounded::<()>(0);
    let (done, did) = bounded(3);
    for _ in 0..3 {
        let (gate, done) = (gate.clone(), done.clone());
        let told = pool.tell(BOUND, move |line| {
            let _ = line.ask_once(|session| session.has_table());
            let _ = gate.recv();
            done.send(()).unwrap();
        });
        assert!(told.is_ok());
    }
    soon(|| database.sessions() == 2);
    let shared = Arc::downgrade(&pool.0);
    drop(pool);
    settle();
    assert_eq!(did.len(), 0);
    drop(let_go);
    soon(|| did.len() == 3);
    soon(|| shared.strong_count() == 0);
    assert_eq!(database.sessions(), 0);
}

#[test]
fn workers_that_wait_end_when_the_pool_is_dropped() {
    let scene = scene(2);
    let stuck = scene.stick(());
    assert!(scene.answers());
    drop(stuck);
    soon(|| scene.pool.0.state.lock().waiting == 2);
    let shared = Arc::downgrade(&scene.pool.0);
    soon(|| Arc::strong_count(&scene.pool) == 1);
    drop(scene);
    soon(|| shared.strong_count() == 0);
}
