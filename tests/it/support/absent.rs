//! What stands for the module of an engine that is not in this build.

use super::raw::Dialect;

pub(crate) const DIALECT: Option<Dialect> = None;
