//! A pooler that hands statements to another session than the one before: what it locks there, nobody
//! would own.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use diesel_lease::Unsupported;
use diesel_lease::locks::{LockError, NamedLocks};
use parking_lot::Mutex;

use super::{locked_on, quick};
use crate::support::database::Database;
use crate::support::raw::Raw;
use crate::support::url::Url;
use crate::support::{Engine, LONG, engines};

engines! {
    servers:
        fn behind_a_pooler_nothing_is_locked,
        fn a_keep_alive_on_another_session_is_a_loss,
        fn a_release_on_another_session_is_none,
}

/// A connection to the server, and the client that its replies go to.
struct Upstream {
    requests: TcpStream,
    client: Arc<Mutex<TcpStream>>,
}

/// Passes everything on, until a statement comes that is marked: from then on the client that sent it
/// is answered by the session of the first client.
struct Pooler {
    addr: SocketAddr,
}

impl Pooler {
    fn start(server: SocketAddr, mark: &'static str) -> Pooler {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("an address");
        thread::spawn(move || {
            let first: Arc<Mutex<Option<Upstream>>> = Arc::default();
            for client in listener.incoming() {
                let client = client.expect("a client");
                let upstream = connect(server, &client);
                let requests = upstream.requests.try_clone().expect("a socket");
                let is_first = first.lock().is_none();
                if is_first {
                    *first.lock() = Some(upstream);
                }
                let first = Arc::clone(&first);
                thread::spawn(move || {
                    pass_on(client, requests, mark, (!is_first).then_some(first))
                });
            }
        });
        Pooler { addr }
    }
}

fn connect(server: SocketAddr, client: &TcpStream) -> Upstream {
    let requests = TcpStream::connect(server).expect("the server");
    let mut replies = requests.try_clone().expect("a socket");
    let client = Arc::new(Mutex::new(client.try_clone().expect("a socket")));
    let to = Arc::clone(&client);
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = replies.read(&mut bytes) {
            let _ = to.lock().write_all(&bytes[..count]);
        }
        let _ = to.lock().shutdown(Shutdown::Both);
    });
    Upstream { requests, client }
}

fn pass_on(
    mut client: TcpStream,
    mut requests: TcpStream,
    mark: &str,
    other: Option<Arc<Mutex<Option<Upstream>>>>,
) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = client.read(&mut bytes) {
        let request = &bytes[..count];
        let is_marked = request
            .windows(mark.len())
            .any(|window| window == mark.as_bytes());
        if let (true, Some(other)) = (is_marked, &other) {
            let other = other.lock();
            let other = other.as_ref().expect("a first client");
            *other.client.lock() = client.try_clone().expect("a socket");
            requests = other.requests.try_clone().expect("a socket");
        }
        // A client that goes does not take the session with it.
        let is_good_bye = [&b"X\0\0\0\x04"[..], b"\x01\0\0\0\x01"].contains(&request);
        if is_good_bye || requests.write_all(request).is_err() {
            break;
        }
    }
}

/// Locks behind a pooler, and the session that it hands statements to.
fn behind(database: &Database, marks: [&'static str; 2]) -> (NamedLocks, Raw) {
    let mark = marks[usize::from(database.engine().is_mysql_like())];
    let url = Url::parse(database.url());
    let pooler = Pooler::start(url.addr(), mark);
    let url = url.with_addr(pooler.addr);
    let other = Raw::connect(database.engine(), &url);
    (quick().build(&url).expect("locks"), other)
}

fn is_told(error: &LockError) -> bool {
    matches!(error, LockError::Unsupported(why) if matches!(**why, Unsupported::Pooler))
}

fn behind_a_pooler_nothing_is_locked(engine: Engine) {
    let database = Database::create(engine);
    let (locks, _other) = behind(&database, ["pg_try_advisory_lock", "GET_LOCK"]);
    let refused = locks.try_acquire("k").expect_err("it is no lock");
    assert!(is_told(&refused), "{refused:?}");
    assert_eq!(locked_on(&database, &["k".to_owned()]), [""; 0]);
}

fn a_keep_alive_on_another_session_is_a_loss(engine: Engine) {
    let database = Database::create(engine);
    let (locks, _other) = behind(&database, ["pg_locks", "IS_USED_LOCK"]);
    let lock = locks.acquire("k", LONG).expect("free");
    lock.lost().recv_timeout(LONG).expect_err("nothing is sent");
    assert!(lock.is_lost());
    let released = lock.release();
    assert!(
        matches!(released, Err(LockError::Lost { .. })),
        "{released:?}"
    );
}

fn a_release_on_another_session_is_none(engine: Engine) {
    let database = Database::create(engine);
    let (locks, _other) = behind(&database, ["pg_advisory_unlock", "RELEASE_LOCK"]);
    let lock = locks.acquire("k", LONG).expect("free");
    let released = lock.release().expect_err("it is still locked");
    assert!(is_told(&released), "{released:?}");
}
