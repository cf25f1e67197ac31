//! SQLite: the path must name a file, and the same one for every connection.

use std::time::Duration;

use diesel::result::ConnectionError;
use diesel::sqlite::SqliteConnection;

use super::{Connector, establish, refused};
use crate::error::Error;
use crate::unsupported::Unsupported;

pub(super) fn connect(path: &str, attempt: Duration) -> Result<Connector, Error> {
    Ok(establish::<SqliteConnection>(self::path(path)?, attempt))
}

/// A SQLite path that every later connection finds again, whatever the working directory is then.
pub(crate) fn path(path: &str) -> Result<String, Error> {
    let name = path.strip_prefix("file:").unwrap_or(path);
    let (name, query) = name.split_once('?').unwrap_or((name, ""));
    let is_uri = path.starts_with("file:");
    if name.is_empty() || name == "//" || name == "///" {
        return Err(Error::Unsupported(Unsupported::InMemory));
    }
    if name == ":memory:"
        || (is_uri
            && query
                .split('&')
                .any(|pair| pair == "mode=memory" || pair == "vfs=memdb"))
    {
        return Err(Error::Unsupported(Unsupported::InMemory));
    }
    if is_uri || path.starts_with(':') {
        return Ok(path.to_owned());
    }
    match std::path::absolute(path) {
        Ok(absolute) => absolute
            .into_os_string()
            .into_string()
            .map_err(|_| refused("the path of the SQLite file is not UTF-8")),
        Err(error) => Err(Error::Connect(ConnectionError::BadConnection(
            error.to_string(),
        ))),
    }
}
