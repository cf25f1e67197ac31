//! A forked child has copies of its parent's leases and sessions, and must leave both alone.
//!
//! The fork is made in a process of its own, with few threads: what they had locked is locked in
//! the child for good.

use std::process;
use std::thread;
use std::time::Duration;

use diesel::connection::{Connection, LoadConnection};
#[cfg(feature = "mysql")]
use diesel::mysql::MysqlConnection;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
#[cfg(feature = "sqlite")]
use diesel::sqlite::SqliteConnection;
use diesel_lease::locks::{LockError, NamedLocks};
use diesel_lease::{LeaseBackend, Leases, Tenure, Timings};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::support::database::Database;
use crate::support::process::{Child, Role};
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    fn a_forked_child_releases_nothing_and_closes_nothing,
}

const NAMES: [&str; 4] = ["dropped", "held", "released", "run"];

fn a_forked_child_releases_nothing_and_closes_nothing(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    leases.migrate().unwrap();
    drop(leases);
    eventually(LONG, "its sessions end", || database.session_count() == 0);
    let elsewhere = Database::create(engine);
    let urls = [("url", database.url()), ("elsewhere", elsewhere.url())];
    let mut parent = Child::spawn("fork::parent", &urls);
    assert_eq!(parent.hear(), "holding");
    let mut raw = database.connect();
    let rows = NAMES.map(|name| raw.row(name).expect("a row"));
    let sessions = (engine != Engine::Sqlite).then(|| database.sessions());

    parent.tell("fork");
    assert_eq!(parent.hear(), "the child ended with Some(0)");
    assert_eq!(parent.hear(), "still held");
    if let Some(sessions) = sessions {
        let now = database.sessions();
        assert!(
            sessions.iter().all(|session| now.contains(session)),
            "{sessions:?} {now:?}"
        );
    }
    let now = raw.now_ms();
    for (name, before) in NAMES.into_iter().zip(rows) {
        let after = raw.row(name).expect("a row");
        assert_eq!(
            (&after.holder, after.term),
            (&before.holder, before.term),
            "{name}"
        );
        assert!(after.expires_at_ms > now, "{name} was given back");
    }
    parent.tell("end");
    assert!(parent.wait().success());
}

/// Holds some names, forks, and says how that went.
pub(crate) fn parent(role: &Role) {
    let often = Timings {
        renew: Duration::from_millis(100),
        ..Timings::default()
    };
    let build = || {
        let builder = Leases::builder().timings(often.clone());
        builder.build(&role.argument("url")).unwrap()
    };
    // The threads of those that are held keep theirs alive in the child too.
    let (leases, of_held) = (build(), build());
    let [dropped, released] = ["dropped", "released"].map(|name| leases.claim(name).unwrap());
    let [held, run] = ["held", "run"].map(|name| of_held.claim(name).unwrap().hold().unwrap());
    // A session that has locked a row for a commit elsewhere is kept too.
    commit(&role.argument("elsewhere"), &dropped.tenure());
    let locks = NamedLocks::connect(&role.argument("url")).unwrap();
    let [lock, dropped_lock] = ["lock", "dropped"].map(|key| locks.acquire(key, LONG).unwrap());
    role.say("holding");
    role.hear();
    let Some(child) = fork() else {
        drop(dropped_lock);
        let is_forked = matches!(lock.release(), Err(LockError::Forked));
        drop(lock);
        drop(dropped);
        drop(held);
        let explicit = released.release();
        // A panic of the work gives a lease back as well.
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            run.run(|_| std::panic::resume_unwind(Box::new(())))
        }));
        drop(run);
        drop((leases, of_held));
        // Time for whatever was set off.
        thread::sleep(Duration::from_millis(300));
        let is_wrong = explicit.is_ok() || panicked.is_ok() || !is_forked;
        process::exit(i32::from(is_wrong));
    };
    let status = waitpid(Some(child), WaitOptions::empty()).unwrap();
    let status = status.and_then(|(_, status)| status.exit_status());
    role.say(&format!("the child ended with {status:?}"));
    for lease in [&dropped, &released] {
        lease.verify().unwrap();
        lease.renew().unwrap();
    }
    for held in [&held, &run] {
        held.tenure().verify().unwrap();
        held.tenure().check().unwrap();
    }
    for lock in [&lock, &dropped_lock] {
        assert!(locks.try_acquire(lock.key()).unwrap().is_none());
        assert!(!lock.is_lost());
    }
    role.say("still held");
    role.hear();
    lock.release().unwrap();
    dropped_lock.release().unwrap();
    dropped.release().unwrap();
    held.release().unwrap();
    released.release().unwrap();
    run.release().unwrap();
}

fn commit(url: &str, tenure: &Tenure) {
    match url.split_once("://") {
        #[cfg(feature = "postgres")]
        Some(("postgres", _)) => commit_on(PgConnection::establish(url).unwrap(), tenure),
        #[cfg(feature = "mysql")]
        Some(("mysql", _)) => commit_on(MysqlConnection::establish(url).unwrap(), tenure),
        #[cfg(feature = "sqlite")]
        None => commit_on(SqliteConnection::establish(url).unwrap(), tenure),
        _ => panic!("a URL of an engine that is not in this build"),
    }
}

fn commit_on<C>(mut connection: C, tenure: &Tenure)
where
    C: LoadConnection<Backend: LeaseBackend>,
{
    let work = |connection: &mut C| connection.batch_execute("CREATE TABLE work (id BIGINT)");
    tenure
        .transaction::<C, (), diesel::result::Error>(&mut connection, work)
        .unwrap();
}

/// `None` in the child, where this thread is the only one.
#[expect(
    unsafe_code,
    reason = "there is no safe fork, and forking is what is tested"
)]
fn fork() -> Option<Pid> {
    unsafe extern "C" {
        fn fork() -> i32;
    }
    // SAFETY: it takes nothing, and the child uses no lock that another thread may have had.
    let pid = unsafe { fork() };
    assert!(pid >= 0, "no fork: {}", std::io::Error::last_os_error());
    Pid::from_raw(pid)
}
