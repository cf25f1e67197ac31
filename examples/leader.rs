//! Two replicas that campaign for one name: one relays the outbox, the other waits to follow it.
//!
//! ```sh
//! cargo run --example leader                    # SQLite, in a file of the temporary directory
//! cargo run --example leader -- postgres://user:password@host/database
//! ```
//!
//! Here both are in one process, and take turns for some seconds. Start it twice, and kill one, to see
//! the other process take over when the lease has run out.
#![allow(
    clippy::disallowed_methods,
    reason = "the library's own rules on clocks and threads"
)]

use std::time::Duration;

use diesel_lease::{BoxError, Leader, Leases, Tenure};

/// All that a service needs: the work, which goes on until its tenure ends …
fn relay(tenure: &Tenure) -> Result<(), BoxError> {
    for batch in 1.. {
        println!("    term {}: relayed batch {batch}", tenure.term());
        // Ends early, with an error to hand on, when this replica leads no more.
        tenure.sleep(Duration::from_millis(400))?;
    }
    Ok(())
}

/// … and a campaign for it, which runs beside everything else the service does.
fn campaign(url: &str, instance: &str) -> Result<Leader, BoxError> {
    let leases = Leases::builder().instance(instance).build(url)?;
    leases.migrate()?;
    Ok(leases
        .campaign("outbox")
        .pause(Duration::from_secs(2))
        .start(relay)?)
}

fn main() -> Result<(), BoxError> {
    let url = std::env::args().nth(1).unwrap_or_else(|| {
        let path = std::env::temp_dir().join("diesel-lease-leader.db");
        path.to_string_lossy().into_owned()
    });

    let ada = campaign(&url, "ada")?;
    let bob = campaign(&url, "bob")?;
    tell("ada", &ada)?;
    tell("bob", &bob)?;
    std::thread::sleep(Duration::from_secs(2));

    println!("both are asked to step down");
    ada.step_down();
    bob.step_down();
    std::thread::sleep(Duration::from_secs(5));

    println!("ada stops");
    ada.stop(Duration::from_secs(5))?;
    std::thread::sleep(Duration::from_secs(3));

    println!("bob stops");
    bob.stop(Duration::from_secs(5))?;
    Ok(())
}

/// Prints what a campaign tells, on a thread that ends with it.
fn tell(instance: &'static str, leader: &Leader) -> Result<(), BoxError> {
    let events = leader.events();
    std::thread::Builder::new()
        .name(instance.into())
        .spawn(move || {
            events
                .iter()
                .for_each(|event| println!("{instance}: {event:?}"))
        })?;
    Ok(())
}
