//! Leases that a test looks over the shoulder of: what they send, and a claim held up before its write.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use diesel::connection::{Connection, InstrumentationEvent};
use diesel::r2d2::ManageConnection;
use diesel::result::ConnectionError;
use diesel_lease::{Builder, Leases};
use parking_lot::Mutex;

use crate::support::Engine;

/// Hears each statement on the thread that sends it, before it is sent, and nothing when it is over.
type Hook = Arc<dyn Fn(Option<&str>) + Send + Sync>;

pub(super) fn hooked(
    builder: Builder,
    engine: Engine,
    url: &str,
    hook: impl Fn(Option<&str>) + Send + Sync + 'static,
) -> Leases {
    let (url, hook) = (url.to_owned(), Arc::new(hook));
    match engine {
        #[cfg(feature = "sqlite")]
        Engine::Sqlite => builder.build_with(Manager::<diesel::SqliteConnection>::new(url, hook)),
        #[cfg(feature = "postgres")]
        Engine::Postgres => builder.build_with(Manager::<diesel::PgConnection>::new(url, hook)),
        #[cfg(feature = "mysql")]
        Engine::Mysql | Engine::Mariadb => {
            builder.build_with(Manager::<diesel::MysqlConnection>::new(url, hook))
        }
        #[allow(
            unreachable_patterns,
            reason = "reached where an engine is not built in"
        )]
        _ => panic!("this build of the tests has no {engine}"),
    }
    .unwrap()
}

struct Manager<C> {
    url: String,
    hook: Hook,
    connection: PhantomData<fn() -> C>,
}

impl<C> Manager<C> {
    fn new(url: String, hook: Hook) -> Manager<C> {
        Manager {
            url,
            hook,
            connection: PhantomData,
        }
    }
}

impl<C: Connection + Send + 'static> ManageConnection for Manager<C> {
    type Connection = C;
    type Error = ConnectionError;

    fn connect(&self) -> Result<C, ConnectionError> {
        let mut connection = C::establish(&self.url)?;
        let hook = Arc::clone(&self.hook);
        connection.set_instrumentation(move |event: InstrumentationEvent<'_>| match event {
            InstrumentationEvent::StartQuery { query, .. } => hook(Some(&query.to_string())),
            InstrumentationEvent::FinishQuery { .. } => hook(None),
            _ => {}
        });
        Ok(connection)
    }

    fn is_valid(&self, _: &mut C) -> Result<(), ConnectionError> {
        Ok(())
    }

    fn has_broken(&self, _: &mut C) -> bool {
        false
    }
}

/// Holds up one claim of its leases between what it has read and what it is about to write.
#[derive(Clone, Default)]
pub(super) struct Gate(Arc<Mutex<Option<Closed>>>);

/// The gate as the thread that is to write comes to it.
struct Closed {
    reached: Sender<()>,
    /// Disconnects.
    go: Receiver<()>,
    /// Disconnects.
    written: Sender<()>,
}

thread_local! {
    static WRITING: Cell<Option<Sender<()>>> = const { Cell::new(None) };
}

impl Gate {
    pub(super) fn leases(&self, builder: Builder, engine: Engine, url: &str) -> Leases {
        let gate = self.clone();
        hooked(builder, engine, url, move |sql| match sql {
            Some(sql) if is_write_of_claim(sql) => {
                let closed = gate.0.lock().take();
                if let Some(closed) = closed {
                    let _ = closed.reached.send(());
                    let _ = closed.go.recv();
                    WRITING.set(Some(closed.written));
                }
            }
            Some(_) => {}
            None => WRITING.set(None),
        })
    }

    /// Makes a claim, and runs `then` when it is about to write. Without a write `then` is not run,
    /// and the answer is the error.
    pub(super) fn at_write<T: Send, R>(
        &self,
        claim: impl FnOnce() -> T + Send,
        then: impl FnOnce(HeldUp<'_, T>) -> R,
    ) -> Result<R, T> {
        let (reached, at_write) = mpsc::channel();
        let (let_go, go) = mpsc::channel();
        let (written, is_written) = mpsc::channel();
        *self.0.lock() = Some(Closed {
            reached,
            go,
            written,
        });
        thread::scope(|scope| {
            let (answers, answer) = mpsc::channel();
            scope.spawn(move || {
                let answer = claim();
                self.0.lock().take();
                let _ = answers.send(answer);
            });
            match at_write.recv() {
                Ok(()) => Ok(then(HeldUp {
                    let_go: Some(let_go),
                    answer: &answer,
                    is_written: &is_written,
                })),
                Err(_) => Err(answer.recv().expect("an answer")),
            }
        })
    }

    /// Makes a claim and runs `between` before its write, if it comes to that.
    pub(super) fn between<T: Send>(
        &self,
        claim: impl FnOnce() -> T + Send,
        between: impl FnOnce(),
    ) -> T {
        self.at_write(claim, |mut held_up| {
            between();
            held_up.let_go();
            held_up.answer()
        })
        .unwrap_or_else(|answer| answer)
    }
}

/// A claim that has not been let go yet. It goes when this is dropped.
pub(super) struct HeldUp<'a, T> {
    let_go: Option<Sender<()>>,
    answer: &'a Receiver<T>,
    is_written: &'a Receiver<()>,
}

impl<T> HeldUp<'_, T> {
    pub(super) fn let_go(&mut self) {
        self.let_go = None;
    }

    /// What the caller of the claim got.
    pub(super) fn answer(&self) -> T {
        self.answer.recv().expect("an answer")
    }

    /// Lets it go, and waits until the database has carried out its write or refused it.
    pub(super) fn write(mut self) {
        self.let_go();
        let _ = self.is_written.recv();
    }
}

fn is_write_of_claim(sql: &str) -> bool {
    let sql = sql.replace('"', "`");
    sql.starts_with("INSERT") || sql.contains(" SET `holder` = ")
}
