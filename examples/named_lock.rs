//! Two threads that want one named lock.
//!
//! ```sh
//! cargo run --example named_lock                # SQLite, a locked file of the temporary directory
//! cargo run --example named_lock --all-features -- mysql://user:password@host/database
//! ```
#![allow(
    clippy::disallowed_methods,
    reason = "the library's own rules on clocks and threads"
)]

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use diesel_lease::locks::{LockError, NamedLocks};

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| {
        let path = std::env::temp_dir().join("diesel-lease-named-lock.db");
        path.to_string_lossy().into_owned()
    });
    let locks = NamedLocks::connect(&url)?;

    let first = locks.acquire("rebuild-index", Duration::from_secs(5))?;
    println!("first:  has the lock");
    match locks.acquire("rebuild-index", Duration::from_millis(300)) {
        Err(LockError::Timeout) => println!("second: not within 300 ms"),
        other => return Err(format!("two have the lock: {other:?}").into()),
    }

    let waiting = {
        let locks = locks.clone();
        thread::spawn(move || -> Result<(), LockError> {
            let start = Instant::now();
            let second = locks.acquire("rebuild-index", Duration::from_secs(5))?;
            println!("second: has the lock after {:.1?}", start.elapsed());
            second.release()
        })
    };
    thread::sleep(Duration::from_millis(500));
    first.release()?;
    println!("first:  has released it");
    waiting.join().expect("the waiting thread panicked")?;
    Ok(())
}
