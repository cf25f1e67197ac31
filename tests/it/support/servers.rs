//! The servers behind the tests.
//!
//! [`Server::shared`] is one that the environment names: ordinary tests run on it side by side, each
//! in a [`Database`](super::database::Database) of its own, and nothing disturbs it. A test that
//! pauses or kills a server, or changes what holds for all of it, takes an [`OwnServer`]: one per
//! engine that this process starts for itself when first needed (1 to 3 s) and lends to one test at a
//! time. So a test that stops the world stops nobody else's, and the time limits of the others stand.
//! (A lock over one common server would make every such test wait for all others, and would not reach
//! across the processes of cargo-nextest.)
//!
//! A process may end in any way, and no destructor then runs. So a shell waits at the end of a pipe
//! that the process holds, and removes its servers when the pipe closes.

use std::env;
use std::fs::{self, Permissions};
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{self, Child, Command, Stdio};
use std::sync::OnceLock;

use parking_lot::{Mutex, MutexGuard};

use super::Engine;
use super::raw::Raw;

/// The path of the script that starts and disturbs servers.
const SCRIPT: &str = "DIESEL_LEASE_SERVERS_CMD";

/// A server and how to reach it.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) engine: Engine,
    /// As a user with all rights in its database, and none elsewhere.
    pub(crate) url: String,
    /// As a superuser.
    pub(crate) admin_url: String,
}

impl Server {
    /// The one that the environment names.
    pub(crate) fn shared(engine: Engine) -> Server {
        Server::named(engine, |variable| {
            env::var(variable).unwrap_or_else(|_| {
                panic!("{variable} is not set: scripts/test-all brings the servers")
            })
        })
    }

    fn named(engine: Engine, get: impl Fn(&str) -> String) -> Server {
        let prefix = format!("DIESEL_LEASE_{}", script_name(engine).to_uppercase());
        Server {
            engine,
            url: get(&format!("{prefix}_URL")),
            admin_url: get(&format!("{prefix}_ADMIN_URL")),
        }
    }

    /// A session of the superuser.
    pub(crate) fn admin(&self) -> Raw {
        Raw::connect(self.engine, &self.admin_url)
    }
}

/// A server that this test may do anything to. The next test gets it whole again.
pub(crate) struct OwnServer {
    server: Server,
    undo: Mutex<Vec<String>>,
    _mine: MutexGuard<'static, ()>,
}

impl OwnServer {
    /// Waits until no test has it, so also not this one, and starts it if need be.
    pub(crate) fn take(engine: Engine) -> OwnServer {
        static SERVERS: [Mutex<()>; 3] = [const { Mutex::new(()) }; 3];
        let name = script_name(engine);
        let mine = SERVERS[["pg", "mysql", "mariadb"]
            .iter()
            .position(|n| *n == name)
            .expect("a name of the script")]
        .lock();
        watch();
        let exports = script("up", name, &["--fast"]);
        let server = Server::named(engine, |variable| {
            exports
                .lines()
                .filter_map(|line| line.strip_prefix("export ")?.split_once('='))
                .find_map(|(key, value)| (key == variable).then(|| value.to_owned()))
                .unwrap_or_else(|| panic!("no {variable} from the script"))
        });
        OwnServer {
            server,
            undo: Mutex::default(),
            _mine: mine,
        }
    }

    /// Stops every process of the server, as SIGSTOP does; it stands still when this returns.
    pub(crate) fn pause(&self) -> Paused<'_> {
        self.script("pause");
        Paused(self)
    }

    /// Kills it with SIGKILL. Only [`OwnServer::restart`] brings it back, on the same port.
    pub(crate) fn kill(&self) {
        self.script("kill");
    }

    /// Starts it, after an orderly stop if it runs; it answers when this returns.
    pub(crate) fn restart(&self) {
        self.script("restart");
    }

    /// Changes it for all sessions to come, until the end of this test.
    pub(crate) fn configure(&self, change: &str, undo: &str) {
        self.undo.lock().push(undo.to_owned());
        self.admin().batch(change);
    }

    fn script(&self, verb: &str) {
        script(verb, script_name(self.engine), &[]);
    }
}

impl Deref for OwnServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        let undo = std::mem::take(self.undo.get_mut());
        if undo.is_empty() {
            return;
        }
        let undone = Raw::try_connect(self.engine, &self.admin_url).is_ok_and(|mut admin| {
            undo.iter()
                .rev()
                .all(|statement| admin.try_batch(statement).is_ok())
        });
        if !undone {
            self.script("down");
        }
    }
}

/// A server that stands still, and goes on when this is dropped.
#[must_use = "the server goes on when this is dropped"]
pub(crate) struct Paused<'a>(&'a OwnServer);

impl Paused<'_> {
    pub(crate) fn resume(self) {}
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.script("resume");
    }
}

fn script_name(engine: Engine) -> &'static str {
    match engine {
        Engine::Postgres => "pg",
        Engine::Mysql => "mysql",
        Engine::Mariadb => "mariadb",
        Engine::Sqlite => panic!("SQLite has no server"),
    }
}

fn script_path() -> String {
    env::var(SCRIPT)
        .unwrap_or_else(|_| panic!("{SCRIPT} is not set: scripts/test-all sets it where it can"))
}

/// Where this process's own servers live.
fn folder() -> PathBuf {
    env::temp_dir().join(format!("diesel-lease-it-{}", process::id()))
}

/// Where one of them keeps its temporary tables. Not where others do: a MySQL that starts deletes all that it
/// finds, and a MariaDB whose tables are deleted under it fails or ends.
fn scratch(name: &str) -> PathBuf {
    let scratch = folder().join(format!("tmp-{name}"));
    fs::create_dir_all(&scratch).expect("a folder");
    for (folder, mode) in [(folder(), 0o711), (scratch.clone(), 0o1777)] {
        fs::set_permissions(folder, Permissions::from_mode(mode)).expect("a folder of ours");
    }
    scratch
}

/// Runs the script and gives back what it prints.
fn script(verb: &str, name: &str, options: &[&str]) -> String {
    let output = Command::new("bash")
        .arg(script_path())
        .arg(verb)
        .args(options)
        .arg(name)
        .env("DIESEL_LEASE_SERVERS", folder())
        .env("TMPDIR", scratch(name))
        .stdin(Stdio::null())
        .process_group(0) // what ^C cuts short here, the watcher could not clean up
        .output()
        .expect("bash");
    assert!(
        output.status.success(),
        "servers {verb} {name}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Sees to it that this process's servers end with it.
fn watch() {
    static WATCHER: OnceLock<Child> = OnceLock::new();
    const WAIT: &str = r#"trap '' HUP INT TERM
read -r _
bash "$0" down && rm -rf -- "$DIESEL_LEASE_SERVERS""#;
    WATCHER.get_or_init(|| {
        Command::new("bash")
            .args(["-c", WAIT, &script_path()])
            .env("DIESEL_LEASE_SERVERS", folder())
            .stdin(Stdio::piped()) // never written to: it closes with this process
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("bash")
    });
}
