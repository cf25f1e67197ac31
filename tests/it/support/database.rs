//! An empty database for each test, gone with it.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::TempDir;

use super::raw::Raw;
use super::servers::{OwnServer, Server};
use super::url::Url;
use super::{Engine, LONG, eventually};

/// A database of its own: on a server, or a file for SQLite.
pub(crate) struct Database {
    engine: Engine,
    name: String,
    url: String,
    admin_url: String,
    place: Place,
}

enum Place {
    Folder {
        _folder: TempDir,
    },
    Shared(Server),
    /// It may stand still by now, and is thrown away with its databases.
    Own(Server),
    Lent(OwnServer),
}

/// What a transaction gets that asks for nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Isolation {
    ReadCommitted,
    RepeatableRead,
    Serializable,
}

impl Isolation {
    fn sql(self) -> &'static str {
        match self {
            Isolation::ReadCommitted => "READ COMMITTED",
            Isolation::RepeatableRead => "REPEATABLE READ",
            Isolation::Serializable => "SERIALIZABLE",
        }
    }
}

impl Database {
    /// On the server that all tests share.
    pub(crate) fn create(engine: Engine) -> Database {
        match engine {
            Engine::Sqlite => Database::file(),
            _ => {
                let server = Server::shared(engine);
                Database::at(&server, Place::Shared(server.clone()))
            }
        }
    }

    /// On a server that the test may disturb.
    pub(crate) fn on(server: &OwnServer) -> Database {
        Database::at(server, Place::Own(Server::clone(server)))
    }

    /// Where `isolation` is the default for every session.
    ///
    /// PostgreSQL keeps that per database. MySQL and MariaDB only know a default of the whole server,
    /// so there it takes an [`OwnServer`]. SQLite is always serializable.
    pub(crate) fn with_default_isolation(engine: Engine, isolation: Isolation) -> Database {
        let level = isolation.sql();
        match engine {
            Engine::Sqlite => Database::file(),
            Engine::Postgres => {
                let database = Database::create(engine);
                database.admin().batch(&format!(
                    "ALTER DATABASE {} SET default_transaction_isolation = '{level}'",
                    database.name
                ));
                database
            }
            Engine::Mysql | Engine::Mariadb => {
                let server = OwnServer::take(engine);
                server.configure(
                    &format!("SET GLOBAL TRANSACTION ISOLATION LEVEL {level}"),
                    "SET GLOBAL TRANSACTION ISOLATION LEVEL REPEATABLE READ",
                );
                let mut database = Database::on(&server);
                database.place = Place::Lent(server);
                database
            }
        }
    }

    fn file() -> Database {
        let folder = tempfile::Builder::new()
            .prefix("diesel-lease-")
            .tempdir()
            .expect("a temporary folder");
        let path = folder.path().join("lease.db");
        let path = path.to_str().expect("a path in UTF-8").to_owned();
        Database {
            engine: Engine::Sqlite,
            name: path.clone(),
            url: path.clone(),
            admin_url: path,
            place: Place::Folder { _folder: folder },
        }
    }

    fn at(server: &Server, place: Place) -> Database {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("lease_{}_{count}", process::id());
        let url = Url::parse(&server.url);
        let mut admin = server.admin();
        for statement in (server.engine.dialect().create)(&name, url.user) {
            admin.batch(&statement);
        }
        let admin_url = Url::parse(&server.admin_url);
        Database {
            engine: server.engine,
            url: url.with_database(&name),
            admin_url: admin_url.with_database(&name),
            place,
            name,
        }
    }

    pub(crate) fn engine(&self) -> Engine {
        self.engine
    }

    /// For SQLite the path of the file.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// As a user with all rights in this database, and none elsewhere.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// As a superuser, whose password stands in no other text (but for SQLite).
    pub(crate) fn admin_url(&self) -> &str {
        &self.admin_url
    }

    /// A session of the user.
    pub(crate) fn connect(&self) -> Raw {
        Raw::connect(self.engine, &self.url)
    }

    /// A session of the superuser.
    pub(crate) fn admin(&self) -> Raw {
        Raw::connect(self.engine, &self.admin_url)
    }

    /// The server's ids of the sessions here, of whatever program and user.
    pub(crate) fn sessions(&self) -> Vec<i64> {
        self.server().admin().all_i64(&self.sessions_query())
    }

    /// How many sessions there are. For SQLite: descriptors of the file, in this process (on Linux).
    pub(crate) fn session_count(&self) -> usize {
        match self.engine {
            Engine::Sqlite => fs::read_dir("/proc/self/fd")
                .expect("/proc")
                .flatten()
                .filter(|open| {
                    fs::read_link(open.path()).is_ok_and(|to| to == Path::new(&self.name))
                })
                .count(),
            _ => self.sessions().len(),
        }
    }

    /// Ends one session, and returns when it is gone.
    pub(crate) fn kill(&self, session: i64) {
        self.kill_all(&[session]);
    }

    /// Ends all sessions that there are, and returns when they are gone; how many they were.
    pub(crate) fn kill_sessions(&self) -> usize {
        let sessions = self.sessions();
        self.kill_all(&sessions);
        sessions.len()
    }

    fn kill_all(&self, sessions: &[i64]) {
        let mut admin = self.server().admin();
        for session in sessions {
            // it may have gone by itself
            let _ = admin.try_batch(&(self.engine.dialect().kill)(*session));
        }
        let query = self.sessions_query();
        eventually(LONG, "killed sessions are gone", || {
            let left = admin.all_i64(&query);
            !sessions.iter().any(|session| left.contains(session))
        });
    }

    fn sessions_query(&self) -> String {
        (self.engine.dialect().sessions)(&self.name)
    }

    fn server(&self) -> &Server {
        match &self.place {
            Place::Shared(server) | Place::Own(server) => server,
            Place::Lent(server) => server,
            Place::Folder { .. } => panic!("SQLite has no server"),
        }
    }

    /// Removes it, also when a failed test left a transaction open that would keep it.
    fn remove(&self, server: &Server) -> Result<(), Box<dyn Error>> {
        let dialect = self.engine.dialect();
        let mut admin = Raw::try_connect(self.engine, &server.admin_url)?;
        for session in admin.try_all_i64(&self.sessions_query())? {
            let _ = admin.try_batch(&(dialect.kill)(session));
        }
        for statement in (dialect.drop)(&self.name, Url::parse(&server.url).user) {
            admin.try_batch(&statement)?;
        }
        Ok(())
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if let Place::Shared(server) = &self.place
            && let Err(error) = self.remove(server)
        {
            eprintln!("{}: {} stays: {error}", self.engine, self.name);
        }
    }
}
