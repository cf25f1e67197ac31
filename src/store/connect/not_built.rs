//! An engine whose feature is off.
#![allow(dead_code, reason = "each engine has its part of this")]

use std::time::Duration;

use super::{Connector, refused};
use crate::error::Error;

pub(super) fn connect(_: &str, _: Duration) -> Result<Connector, Error> {
    Err(refused(
        "support for this engine is not built in: see the crate's features",
    ))
}

pub(crate) fn url(url: &str, _: Duration) -> String {
    url.to_owned()
}

pub(crate) fn path(path: &str) -> Result<String, Error> {
    Ok(path.to_owned())
}
