//! What the modes share.

pub(crate) mod bare;
pub(crate) mod engines;
pub(crate) mod process;
pub(crate) mod record;
pub(crate) mod report;
