//! PostgreSQL: the network limits stand in the URL, unless they are there already.

use std::time::Duration;

use diesel::pg::PgConnection;

use super::{Connector, establish};
use crate::error::Error;

pub(super) fn connect(url: &str, attempt: Duration) -> Result<Connector, Error> {
    Ok(establish::<PgConnection>(self::url(url, attempt), attempt))
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
        let (sign, given) = match url[after_user(&url)..].split_once('?') {
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

/// Where the host begins. As libpq has it, an `@` before any `/` ends a user and password, in which a `?`
/// is one like any other character.
fn after_user(url: &str) -> usize {
    let start = url.find("://").map_or(0, |at| at + 3);
    match url[start..].find(['@', '/']) {
        Some(at) if url[start + at..].starts_with('@') => start + at,
        _ => start,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_stand_in_the_query() {
        let limits = "connect_timeout=5&tcp_user_timeout=5000&keepalives_idle=5\
                      &keepalives_interval=1&keepalives_count=3";
        for (given, sign) in [
            ("postgres://host/db", '?'),
            ("postgres://u:p@host/db?application_name=a", '&'),
            ("postgres://u:a?b@host/db", '?'),
            ("postgres://u:a?connect_timeout=1@host/db", '?'),
            ("postgres:///db?user=a@b", '&'),
        ] {
            let url = url(given, Duration::from_secs(5));
            assert_eq!(url, format!("{given}{sign}{limits}"));
        }
        let given = url(
            "postgres://host/db?connect_timeout=9",
            Duration::from_secs(5),
        );
        assert!(given.starts_with("postgres://host/db?connect_timeout=9&tcp_user"));
        assert_eq!(given.matches("connect_timeout").count(), 1);
    }
}
