//! The integration tests: one binary, a module per concept, every scenario one function that runs on
//! every engine that is built in.
#![cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests wait, and fail by panicking"
)]

mod api;
mod available;
mod campaign;
mod campaign_cluster;
#[cfg(all(
    feature = "guarded-connection",
    feature = "scheduler",
    feature = "test-util"
))]
mod chaos;
mod claim;
mod contention;
#[cfg(feature = "guarded-connection")]
mod faults;
mod fork;
#[cfg(feature = "guarded-connection")]
mod guard;
mod hold;
mod hostile;
mod locks;
mod loom_model;
mod model;
mod network;
mod protocol;
mod renewals;
#[cfg(all(feature = "scheduler", feature = "test-util"))]
mod scheduler;
mod schema;
mod secrets;
mod slots;
mod support;
mod try_run;

support::process::roles! {
    campaign_cluster::stand,
    #[cfg(all(feature = "guarded-connection", feature = "scheduler", feature = "test-util"))]
    chaos::worker::work,
    #[cfg(feature = "guarded-connection")]
    faults::holder::hold,
    fork::parent,
    #[cfg(feature = "guarded-connection")]
    guard::stopped::write,
    hold::come_and_go,
    hold::stand_still,
    hold::will_not_stop,
    locks::hold,
    network::ask_in_rounds,
    network::drop_and_exit,
    #[cfg(all(feature = "scheduler", feature = "test-util"))]
    scheduler::cluster::replica,
    schema::migrate,
    slots::processes::run_rounds,
}
