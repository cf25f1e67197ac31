//! What is measured.

pub(crate) mod acts;
pub(crate) mod contend;
pub(crate) mod guard;
pub(crate) mod leases;
pub(crate) mod locks;
pub(crate) mod takeover;
pub(crate) mod threads;
