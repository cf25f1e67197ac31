//! MySQL and MariaDB. Diesel's connection can set no network limit: a session that hangs is written
//! off, and exists until TCP gives it up.

use std::time::Duration;

use diesel::mysql::MysqlConnection;

use super::{Connector, establish};
use crate::error::Error;

pub(super) fn connect(url: &str, attempt: Duration) -> Result<Connector, Error> {
    Ok(establish::<MysqlConnection>(url.to_owned(), attempt))
}
