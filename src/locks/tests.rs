//! What no server can be brought to do at a given moment, by sessions that do as they are told.

use std::sync::atomic::AtomicUsize;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;

use super::*;
use crate::store::testing::{background, ms, secs, settle, soon};

/// What a session is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ask {
    Open,
    Acquire(Duration),
    IsOurs,
    Release,
    Close,
}

type Answer = Result<bool, LockError>;

/// What an answer is for.
type Question = fn(Ask) -> bool;

/// A server by script. Without one it says yes at once.
#[derive(Clone)]
struct Server {
    asked: Arc<Mutex<Vec<Ask>>>,
    /// What it answers next to a question for which there is something here.
    script: Arc<Mutex<Vec<(Question, Reply)>>>,
    clock: Clock,
}

#[derive(Clone)]
enum Reply {
    Now(Answer),
    /// When something is sent.
    Later(Receiver<Answer>),
}

struct Fake(Server);

impl Server {
    fn new() -> Server {
        Server {
            asked: Arc::default(),
            script: Arc::default(),
            clock: Clock::driven(),
        }
    }

    fn locks(&self) -> NamedLocks {
        self.locks_by(NamedLocks::builder())
    }

    fn locks_by(&self, builder: Builder) -> NamedLocks {
        let server = self.clone();
        let open: Open = Box::new(move |_| {
            server.answer(Ask::Open)?;
            Ok(Box::new(Fake(server.clone())))
        });
        builder.with(open, self.clock.clone())
    }

    fn on(&self, question: Question, reply: Reply) {
        self.script.lock().push((question, reply));
    }

    fn says(&self, question: Question, answer: Answer) {
        self.on(question, Reply::Now(answer));
    }

    /// Does not answer until something is sent.
    fn hangs(&self, question: Question) -> Sender<Answer> {
        let (answer, later) = unbounded();
        self.on(question, Reply::Later(later));
        answer
    }

    fn answer(&self, ask: Ask) -> Answer {
        self.asked.lock().push(ask);
        let mut script = self.script.lock();
        let at = script.iter().position(|(question, _)| question(ask));
        let reply = at.map(|at| script.remove(at).1);
        drop(script);
        match reply {
            None => Ok(true),
            Some(Reply::Now(answer)) => answer,
            Some(Reply::Later(later)) => later.recv().unwrap_or(Err(LockError::Failed)),
        }
    }

    fn asked(&self) -> Vec<Ask> {
        self.asked.lock().clone()
    }

    fn count(&self, ask: Ask) -> usize {
        self.asked().iter().filter(|asked| **asked == ask).count()
    }

    /// Moves the clock in steps, as time goes, until something is so.
    #[track_caller]
    fn pass_until(&self, step: Duration, mut holds: impl FnMut() -> bool) {
        soon(|| {
            self.clock.advance(step);
            holds()
        });
    }
}

impl LockSession for Fake {
    fn acquire(&mut self, timeout: Duration) -> Answer {
        let answer = self.0.answer(Ask::Acquire(timeout));
        if matches!(answer, Ok(false)) {
            self.0.clock.advance(timeout);
        }
        answer
    }

    fn is_ours(&mut self) -> Answer {
        self.0.answer(Ask::IsOurs)
    }

    fn release(&mut self) -> Answer {
        self.0.answer(Ask::Release)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.0.asked.lock().push(Ask::Close);
    }
}

fn acquire(ask: Ask) -> bool {
    matches!(ask, Ask::Acquire(_))
}

fn is_ours(ask: Ask) -> bool {
    ask == Ask::IsOurs
}

fn release(ask: Ask) -> bool {
    ask == Ask::Release
}

const DEFAULT: Duration = secs(10);

#[test]
fn a_lock_is_asked_for_once_and_given_back_once() {
    let server = Server::new();
    let lock = server.locks().acquire("k", secs(2)).unwrap();
    assert_eq!((lock.key(), lock.is_lost()), ("k", false));
    for _ in 0..2 {
        lock.release().unwrap();
    }
    drop(lock);
    soon(|| server.count(Ask::Close) == 1);
    let asked = [Ask::Open, Ask::Acquire(secs(2)), Ask::Release, Ask::Close];
    assert_eq!(server.asked(), asked);
}

#[test]
fn what_is_asked_wrongly_opens_no_session() {
    let server = Server::new();
    let locks = server.locks();
    for key in ["", &"k".repeat(65)] {
        let refused = locks.acquire(key, secs(1));
        assert!(
            matches!(refused, Err(LockError::InvalidKey(_))),
            "{refused:?}"
        );
    }
    let refused = locks.acquire("k", Duration::ZERO);
    assert!(
        matches!(refused, Err(LockError::InvalidTimeout)),
        "{refused:?}"
    );
    assert_eq!(server.asked(), []);
}

#[test]
fn held_and_failed_are_two_answers_and_neither_is_a_lock() {
    let server = Server::new();
    server.says(acquire, Ok(false));
    let held = server.locks().acquire("k", secs(1));
    assert!(matches!(held, Err(LockError::Timeout)), "{held:?}");
    server.says(acquire, Err(LockError::Failed));
    let failed = server.locks().acquire("k", secs(1));
    assert!(matches!(failed, Err(LockError::Failed)), "{failed:?}");
    // Not released, but closed with the session.
    soon(|| server.count(Ask::Close) == 2);
    assert_eq!(server.count(Ask::Release), 0);
}

#[test]
fn a_session_that_cannot_be_opened_is_no_lock() {
    let server = Server::new();
    server.says(|ask| ask == Ask::Open, Err(LockError::Failed));
    let failed = server.locks().acquire("k", secs(1));
    assert!(matches!(failed, Err(LockError::Failed)), "{failed:?}");
    assert_eq!(server.asked(), [Ask::Open]);
}

#[test]
fn a_long_wait_is_one_of_steps() {
    let server = Server::new();
    for _ in 0..3 {
        server.says(acquire, Ok(false));
    }
    let lock = server.locks().acquire("k", secs(34)).unwrap();
    let steps = [10, 10, 10, 4].map(|step| Ask::Acquire(secs(step)));
    assert_eq!(server.asked()[1..], steps);
    drop(lock);
}

#[test]
fn a_wait_without_limit_ends_when_the_server_hangs() {
    let server = Server::new();
    server.says(acquire, Ok(false));
    let answer = server.hangs(acquire);
    let locks = server.locks();
    let waiter = background(move || locks.acquire("k", Duration::MAX));
    soon(|| server.asked().len() == 3);
    server.clock.advance(DEFAULT * 2 - ms(1));
    settle();
    assert!(waiter.is_running());
    server.clock.advance(ms(1));
    let ended = waiter.output();
    assert!(matches!(ended, Err(LockError::Timeout)), "{ended:?}");
    // A grant that comes too late is given back with the session.
    answer.send(Ok(true)).unwrap();
    soon(|| server.count(Ask::Close) == 1);
}

#[test]
fn a_stop_ends_a_wait_whose_grant_is_given_back() {
    let server = Server::new();
    let answer = server.hangs(acquire);
    let (locks, token) = (server.locks(), StopToken::new());
    let options = AcquireOptions::new().stop(&token);
    let waiter = background(move || locks.acquire_with("k", Duration::MAX, options));
    soon(|| server.asked().len() == 2);
    token.stop();
    let ended = waiter.output();
    assert!(matches!(ended, Err(LockError::Stopped)), "{ended:?}");
    answer.send(Ok(true)).unwrap();
    soon(|| server.count(Ask::Close) == 1);
    assert_eq!(server.count(Ask::Release), 0);
}

#[test]
fn a_release_says_what_went_wrong_and_says_it_again() {
    let server = Server::new();
    for (answer, is_expected) in [
        (
            Ok(false),
            (|error| matches!(error, LockError::Lost { .. })) as fn(&LockError) -> bool,
        ),
        (Err(LockError::Failed), |error| {
            matches!(error, LockError::Failed)
        }),
    ] {
        let lock = server.locks().acquire("k", secs(1)).unwrap();
        server.says(release, answer);
        for _ in 0..2 {
            let error = lock.release().expect_err("it went wrong");
            assert!(is_expected(&error), "{error:?}");
        }
    }
    assert_eq!(server.count(Ask::Release), 2);
}

#[test]
fn a_release_is_bounded() {
    let server = Server::new();
    let builder = NamedLocks::builder().release_timeout(ms(20));
    let lock = server.locks_by(builder).acquire("k", secs(1)).unwrap();
    let _never = server.hangs(release);
    let releasing = background(move || lock.release());
    soon(|| server.count(Ask::Release) == 1);
    server.clock.advance(ms(20));
    let released = releasing.output();
    assert!(matches!(released, Err(LockError::Timeout)), "{released:?}");
}

#[test]
fn of_many_releases_one_is_sent() {
    let server = Server::new();
    let lock = server.locks().acquire("k", secs(1)).unwrap();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| lock.release().unwrap());
        }
    });
    assert_eq!(server.count(Ask::Release), 1);
}

/// How often each handler was called.
fn counted() -> (
    Arc<AtomicUsize>,
    impl Fn(&LockError) + Send + Sync + 'static,
) {
    let count = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&count);
    let handler = move |error: &LockError| {
        assert!(error.to_string().contains("\"k\""), "{error}");
        counts.fetch_add(1, Ordering::SeqCst);
    };
    (count, handler)
}

#[test]
fn a_release_waits_for_a_keep_alive_and_nobody_is_told_of_a_loss() {
    let server = Server::new();
    let (told, handler) = counted();
    let options = AcquireOptions::new().on_lost(handler);
    let lock = server.locks().acquire_with("k", secs(1), options).unwrap();
    let answer = server.hangs(is_ours);
    server.pass_until(secs(1), || server.count(Ask::IsOurs) == 1);
    let releasing = background(move || lock.release());
    settle();
    assert_eq!(server.count(Ask::Release), 0);
    answer.send(Ok(true)).unwrap();
    releasing.output().unwrap();
    assert_eq!(server.asked()[2..4], [Ask::IsOurs, Ask::Release]);
    assert_eq!(told.load(Ordering::SeqCst), 0);
}

#[test]
fn a_keep_alive_that_fails_behind_a_release_is_no_loss() {
    let server = Server::new();
    let (told, handler) = counted();
    let options = AcquireOptions::new().on_lost(handler);
    let lock = server.locks().acquire_with("k", secs(1), options).unwrap();
    let answer = server.hangs(is_ours);
    server.pass_until(secs(1), || server.count(Ask::IsOurs) == 1);
    let releasing = background(move || (lock.release(), lock.is_lost()));
    settle();
    answer.send(Err(LockError::Failed)).unwrap();
    let (released, is_lost) = releasing.output();
    released.unwrap();
    assert!(!is_lost);
    settle();
    assert_eq!(told.load(Ordering::SeqCst), 0);
}

/// What a keep-alive is answered, and hangs is `None`.
#[track_caller]
fn is_a_loss(answer: Option<Answer>) {
    let server = Server::new();
    let (manager, of_manager) = counted();
    let (own, of_lock) = counted();
    let builder = NamedLocks::builder().on_keep_alive_error(move |error| {
        of_manager(error);
        panic!("on purpose");
    });
    let options = AcquireOptions::new().on_lost(of_lock);
    let locks = server.locks_by(builder);
    let lock = locks.acquire_with("k", secs(1), options).unwrap();
    let _never = match answer {
        Some(answer) => {
            server.says(is_ours, answer);
            None
        }
        None => Some(server.hangs(is_ours)),
    };
    server.pass_until(secs(1), || lock.is_lost());
    soon(|| own.load(Ordering::SeqCst) == 1);
    assert_eq!(manager.load(Ordering::SeqCst), 1);
    assert!(is_disconnected(lock.lost()));
    for _ in 0..2 {
        let released = lock.release();
        assert!(
            matches!(released, Err(LockError::Lost { .. })),
            "{released:?}"
        );
    }
    assert_eq!(server.count(Ask::Release), 0);
}

#[test]
fn an_error_of_a_keep_alive_is_a_loss() {
    is_a_loss(Some(Err(LockError::Failed)));
}

#[test]
fn a_keep_alive_that_says_no_is_a_loss() {
    is_a_loss(Some(Ok(false)));
}

#[test]
fn a_keep_alive_that_hangs_is_a_loss() {
    is_a_loss(None);
}

#[test]
fn a_lock_is_asked_after_once_in_an_interval() {
    let server = Server::new();
    let lock = server.locks().acquire("k", secs(1)).unwrap();
    settle();
    for count in 0..3 {
        server.clock.advance(secs(30) - ms(1));
        settle();
        assert_eq!(server.count(Ask::IsOurs), count);
        server.clock.advance(ms(1));
        soon(|| server.count(Ask::IsOurs) == count + 1);
        settle();
    }
    assert!(!lock.is_lost());
}

#[test]
fn a_handler_may_release_the_lock() {
    let server = Server::new();
    let place: Arc<OnceLock<NamedLock>> = Arc::default();
    let (of_handler, (say, said)) = (Arc::clone(&place), unbounded());
    let options = AcquireOptions::new().on_lost(move |_| {
        let lock = of_handler.get().expect("it is in its place");
        say.send(lock.release()).unwrap();
    });
    let lock = server.locks().acquire_with("k", secs(1), options).unwrap();
    place.set(lock).expect("set once");
    server.says(is_ours, Ok(false));
    let mut released = None;
    server.pass_until(secs(1), || {
        released = said.try_recv().ok();
        released.is_some()
    });
    assert!(matches!(released, Some(Err(LockError::Lost { .. }))));
}

#[test]
fn settings_of_zero_are_ignored() {
    let builder = NamedLocks::builder();
    let settings = |builder: &Builder| {
        [
            builder.keep_alive_interval,
            builder.keep_alive_timeout,
            builder.release_timeout,
        ]
    };
    assert_eq!(settings(&builder), [30, 10, 10].map(secs));
    let builder = builder
        .keep_alive_interval(secs(1))
        .keep_alive_timeout(secs(2))
        .release_timeout(secs(3));
    assert_eq!(settings(&builder), [1, 2, 3].map(secs));
    let builder = builder
        .keep_alive_interval(Duration::ZERO)
        .keep_alive_timeout(Duration::ZERO)
        .release_timeout(Duration::ZERO);
    assert_eq!(settings(&builder), [1, 2, 3].map(secs));
}
