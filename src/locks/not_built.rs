//! An engine whose feature is off.

use std::sync::Arc;

use diesel::result::ConnectionError;

use super::error::LockError;
use super::session::LockSession;
use super::target::Target;

pub(super) fn open(_: &Target, _: &str) -> Result<Box<dyn LockSession>, LockError> {
    let why = "support for this engine is not built in: see the crate's features".to_owned();
    Err(LockError::Connect(Arc::new(
        ConnectionError::InvalidConnectionUrl(why),
    )))
}
