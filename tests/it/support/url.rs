//! A database URL in parts, so that a test can change one of them.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};

/// `scheme://user:password@host/database?query`
#[derive(Clone, Copy)]
pub(crate) struct Url<'a> {
    pub(crate) scheme: &'a str,
    pub(crate) user: &'a str,
    pub(crate) password: &'a str,
    /// With its port, if the URL has one.
    pub(crate) host: &'a str,
    pub(crate) database: &'a str,
    query: Option<&'a str>,
}

impl<'a> Url<'a> {
    pub(crate) fn parse(url: &'a str) -> Url<'a> {
        let (scheme, rest) = url.split_once("://").expect("a URL with a scheme");
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
        let (who, host) = authority.rsplit_once('@').unwrap_or(("", authority));
        let (user, password) = who.split_once(':').unwrap_or((who, ""));
        Url {
            scheme,
            user,
            password,
            host,
            database,
            query,
        }
    }

    /// The same for another database of the server.
    pub(crate) fn with_database(self, database: &str) -> String {
        Url { database, ..self }.to_string()
    }

    /// The same by another way to the server.
    pub(crate) fn with_addr(self, addr: SocketAddr) -> String {
        let host = &addr.to_string();
        Url { host, ..self }.to_string()
    }

    /// Where the server listens.
    pub(crate) fn addr(&self) -> SocketAddr {
        let port = if self.scheme == "mysql" { 3306 } else { 5432 };
        self.host
            .to_socket_addrs()
            .or_else(|_| (self.host, port).to_socket_addrs())
            .ok()
            .and_then(|mut addrs| addrs.next())
            .unwrap_or_else(|| panic!("no address for {}", self.host))
    }
}

impl fmt::Display for Url<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.user)?;
        if !self.password.is_empty() {
            write!(f, ":{}", self.password)?;
        }
        write!(f, "@{}/{}", self.host, self.database)?;
        self.query.map_or(Ok(()), |query| write!(f, "?{query}"))
    }
}
