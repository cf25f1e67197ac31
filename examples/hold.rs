//! Holds one name and works for as long as it is held: the smallest useful program.
//!
//! ```sh
//! cargo run --example hold                      # SQLite, in a file of the temporary directory
//! cargo run --example hold -- postgres://user:password@host/database
//! ```
//!
//! Start it twice: the second waits until the first ends or is killed.

use std::error::Error;
use std::time::Duration;

use diesel_lease::Leases;

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| {
        let path = std::env::temp_dir().join("diesel-lease-hold.db");
        path.to_string_lossy().into_owned()
    });
    let leases = Leases::connect(&url)?;
    leases.migrate()?;
    leases.available()?;

    println!("waiting for `nightly-report` …");
    let held = leases.claim("nightly-report")?.hold()?;
    let done = held.run(|tenure| {
        println!("{} holds it, term {}", leases.instance(), tenure.term());
        for page in 1..=5 {
            // Ends early when the lease is lost.
            tenure.sleep(Duration::from_millis(300))?;
            println!("page {page}");
        }
        Ok::<_, diesel_lease::Ending>(())
    });
    held.release()?;
    done?;
    println!("given back");
    Ok(())
}
