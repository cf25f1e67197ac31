//! PostgreSQL: the network limits stand in the URL, unless they are there already.

use std::time::Duration;

use diesel::pg::PgConnection;

use super::{Connect, establish};
use crate::error::Error;

pub(super) fn connect(url: &str, attempt: Duration) -> Result<Connect, Error> {
    Ok(establish::<PgConnection>(self::url(url, attempt)))
}

/// `connect_timeout` and `keepalives_*` in seconds, `tcp_user_timeout` in milliseconds ([libpq]).
/// All are as long as an attempt: what lasts longer is an attempt that failed.
///
/// [libpq]: https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS
pub(crate) fn url(url: &str, attempt: Duration) -> String {
    let seconds = attempt.as_secs().max(1);
    let mut url = url.to_owned();
    for (key, value) in [
        ("connect_timeout", seconds.max(2).to_string()),
        ("tcp_user_timeout", attempt.as_millis().max(1).to_string()),
        ("keepalives_idle", seconds.to_string()),
        ("keepalives_interval", "1".to_owned()),
        ("keepalives_count", "3".to_owned()),
    ] {
        let (sign, given) = match url.split_once('?') {
            Some((_, query)) => (
                '&',
                query
                    .split('&')
                    .any(|pair| pair.split('=').next() == Some(key)),
            ),
            None => ('?', false),
        };
        if !given {
            url.push(sign);
            url.push_str(key);
            url.push('=');
            url.push_str(&value);
        }
    }
    url
}
