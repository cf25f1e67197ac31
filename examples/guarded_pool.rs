//! A worker moves money from one account to another under a lease, by two rows in a ledger, through a
//! guarded pool, and is frozen between its last statement and its COMMIT. A successor takes over, finds
//! nothing moved, and moves the money. When the worker goes on, its COMMIT is refused.
//!
//! ```sh
//! cargo run --example guarded_pool              # SQLite, in a temporary file
//! cargo run --example guarded_pool --all-features -- --database-url postgres://user:password@host/database
//! ```
//!
//! On SQLite a frozen writer keeps everybody from writing. There the successor comes after it.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use diesel::connection::{LoadConnection, SimpleConnection};
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool, R2D2Connection};
use diesel_lease::{GuardedConnection, LeaseBackend, LeaseGuard, Leases, Lost, Timings};
use rustix::process::{Pid, Signal, getpid, kill_process};

type Fallible<T> = Result<T, Box<dyn Error>>;
type GuardedPool<C> = Pool<ConnectionManager<GuardedConnection<C>>>;

const NAME: &str = "example-bank";
const LEASE: Duration = Duration::from_millis(1_500);

fn main() -> Fallible<()> {
    let argument = |name| {
        std::env::args()
            .skip_while(|argument| argument != name)
            .nth(1)
    };
    let directory = tempfile::tempdir()?;
    let file = directory
        .path()
        .join("bank.db")
        .to_string_lossy()
        .into_owned();
    let is_worker = argument("--worker").is_some();
    let url = argument("--worker")
        .or(argument("--database-url"))
        .unwrap_or(file);
    match url.split_once("://") {
        #[cfg(feature = "postgres")]
        Some(("postgres" | "postgresql", _)) => play::<diesel::PgConnection>(&url, is_worker),
        #[cfg(feature = "mysql")]
        Some(("mysql", _)) => play::<diesel::MysqlConnection>(&url, is_worker),
        #[cfg(feature = "sqlite")]
        None => play::<diesel::SqliteConnection>(&url, is_worker),
        _ => Err("this build has no support for that engine".into()),
    }
}

fn play<C>(url: &str, is_worker: bool) -> Fallible<()>
where
    C: LoadConnection + R2D2Connection + 'static,
    C::Backend: LeaseBackend,
{
    let leases = Leases::builder().timings(timings()).build(url)?;
    if is_worker {
        return be_frozen(&leases, &guarded_pool::<C>(url)?);
    }
    leases.migrate()?;
    let pool = guarded_pool::<C>(url)?;
    let run = |sql: &str| -> Fallible<()> { Ok(pool.get()?.batch_execute(sql)?) };
    run("DROP TABLE IF EXISTS example_ledger")?;
    run("CREATE TABLE example_ledger (account INT, cents INT)")?;
    succeed(url, &leases, &pool)?;
    // Fails if the money was moved twice.
    run("CREATE UNIQUE INDEX example_moved_once ON example_ledger (account)")?;
    run("DROP TABLE example_ledger")
}

/// Moves 30 cents.
fn transfer<C>(pool: &GuardedPool<C>, before_commit: impl FnOnce()) -> Fallible<()>
where
    C: LoadConnection + R2D2Connection + 'static,
    C::Backend: LeaseBackend,
{
    pool.get()?.transaction(|conn| {
        conn.batch_execute("INSERT INTO example_ledger VALUES (1, -30)")?;
        conn.batch_execute("INSERT INTO example_ledger VALUES (2, 30)")?;
        before_commit();
        Ok(())
    })
}

/// The worker: a process of its own, which freezes itself.
fn be_frozen<C>(leases: &Leases, pool: &GuardedPool<C>) -> Fallible<()>
where
    C: LoadConnection + R2D2Connection + 'static,
    C::Backend: LeaseBackend,
{
    let held = leases.claim(NAME)?.hold()?;
    let outcome = held.run(|tenure| {
        println!(
            "has moved 30 cents under term {}, and is frozen before its COMMIT",
            tenure.term()
        );
        transfer(pool, || {
            kill_process(getpid(), Signal::STOP).expect("a process can stop itself")
        })
    });
    let error = outcome.expect_err("it committed beside its successor");
    let lost = Lost::find(error.as_ref()).ok_or("it was refused for another reason")?;
    println!("goes on, and is refused: {lost}");
    Ok(())
}

fn succeed<C>(url: &str, leases: &Leases, pool: &GuardedPool<C>) -> Fallible<()>
where
    C: LoadConnection + R2D2Connection + 'static,
    C::Backend: LeaseBackend,
{
    let mut worker = Command::new(std::env::current_exe()?)
        .args(["--worker", url])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(worker.stdout.take().ok_or("no output")?).lines();
    println!("worker:    {}", lines.next().ok_or("the worker ended")??);

    let take_over = |lease: diesel_lease::Lease| -> Fallible<()> {
        let held = lease.hold()?;
        held.run(|tenure| {
            transfer(pool, || ())?;
            println!(
                "successor: has moved 30 cents under term {}, and committed",
                tenure.term()
            );
            Ok::<_, Box<dyn Error>>(())
        })?;
        Ok(held.release()?)
    };
    let resume = || kill_process(Pid::from_child(&worker), Signal::CONT);
    match leases.claim_timeout(NAME, 4 * LEASE) {
        Ok(Some(lease)) => {
            take_over(lease)?;
            resume()?;
            println!("worker:    {}", lines.next().ok_or("the worker ended")??);
        }
        // Nobody can write before the worker has ended its transaction.
        _ => {
            println!("successor: cannot write before the worker has ended its transaction");
            resume()?;
            println!("worker:    {}", lines.next().ok_or("the worker ended")??);
            take_over(leases.claim(NAME)?)?;
        }
    }
    if worker.wait()?.success() {
        Ok(())
    } else {
        Err("the worker failed".into())
    }
}

fn guarded_pool<C>(url: &str) -> Fallible<GuardedPool<C>>
where
    C: LoadConnection + R2D2Connection + 'static,
    C::Backend: LeaseBackend,
{
    let pool = Pool::builder()
        .max_size(2)
        .connection_customizer(Box::new(LeaseGuard::new()));
    Ok(pool.build(ConnectionManager::new(url))?)
}

fn timings() -> Timings {
    Timings {
        lease: LEASE,
        renew: Duration::from_millis(200),
        attempt: Duration::from_millis(1_000),
        deadline: Duration::from_millis(1_000),
        grace: Duration::from_millis(500),
    }
}
