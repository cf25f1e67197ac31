//! Other processes: this test binary once more, in a role.
//!
//! A role is a function that `main.rs` lists in [`roles!`]. That makes the test `child_role`, which
//! does nothing unless the environment names a role; a [`Child`] is the test binary run with just this
//! test and such an environment. So it needs no program of its own, and works under `cargo test` as
//! under cargo-nextest.
//!
//! Both sides talk in lines over the child's stdin and stdout. The test harness writes to stdout too:
//! what a role says bears a mark, and anything else is only kept for the report of a failure. A child
//! is killed when its [`Child`] is dropped, and ends by itself when its parent is gone.

use std::env;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{self, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use super::{LONG, eventually};

const ROLE: &str = "DIESEL_LEASE_TEST_ROLE";
const ARGUMENT: &str = "DIESEL_LEASE_TEST_ARG_";
const MARK: &str = "##";

/// A process in a role, as its parent sees it.
pub(crate) struct Child {
    process: process::Child,
    stdin: ChildStdin,
    said: Receiver<String>,
    output: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

impl Child {
    /// Starts a role of [`roles!`] with arguments by name.
    pub(crate) fn spawn(role: &str, arguments: &[(&str, &str)]) -> Child {
        // A write beyond a limit is an error, and not the end of the process.
        let mut process = Command::new("sh")
            .args(["-c", r#"trap '' XFSZ; exec "$0" "$@""#])
            .arg(env::current_exe().expect("this program"))
            .args(["--exact", "child_role", "--nocapture"])
            .env(ROLE, role)
            .envs(
                arguments
                    .iter()
                    .map(|(name, value)| (format!("{ARGUMENT}{name}"), value)),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this program once more");
        let output = Arc::default();
        let (says, said) = mpsc::channel();
        let stdout = process.stdout.take().expect("stdout");
        let stderr = process.stderr.take().expect("stderr");
        let (deaf, _) = mpsc::channel();
        Child {
            stdin: process.stdin.take().expect("stdin"),
            readers: vec![read(stdout, &output, says), read(stderr, &output, deaf)],
            process,
            said,
            output,
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Says a line to it.
    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").expect("a child that listens");
    }

    /// The next line that it says.
    #[track_caller]
    pub(crate) fn hear(&mut self) -> String {
        self.hear_within(LONG)
            .unwrap_or_else(|| panic!("the child says nothing; its output:\n{}", self.output()))
    }

    /// The next line that it says in this time.
    pub(crate) fn hear_within(&mut self, limit: Duration) -> Option<String> {
        self.said.recv_timeout(limit).ok()
    }

    /// All that it and its threads have written so far.
    pub(crate) fn output(&self) -> String {
        self.output.lock().clone()
    }

    /// SIGSTOP; all its threads stand still when this returns.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(self.pid()), options)
            .expect("a child")
            .expect("a change");
        assert!(status.stopped(), "the child has ended:\n{}", self.output());
    }

    /// SIGCONT.
    pub(crate) fn cont(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGTERM.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// SIGKILL; it is gone when this returns.
    pub(crate) fn kill(&mut self) {
        // fails when it has ended by itself
        let _ = self.process.kill();
        self.process.wait().expect("a child");
    }

    /// Waits until it has ended by itself and all its output is read.
    #[track_caller]
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        eventually(LONG, "the child ends", || {
            status = self.process.try_wait().expect("a child");
            status.is_some()
        });
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        status.expect("a status")
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("a child");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if thread::panicking() {
            eprintln!("output of child {}:\n{}", self.id(), self.output());
        }
    }
}

/// Keeps what comes, and hands on what a role says.
fn read(
    from: impl Read + Send + 'static,
    output: &Arc<Mutex<String>>,
    says: Sender<String>,
) -> JoinHandle<()> {
    let output = Arc::clone(output);
    let read = move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            output.lock().extend([line.as_str(), "\n"]);
            // the harness may have begun the line
            if let Some((_, line)) = line.split_once(MARK) {
                let _ = says.send(line.to_owned());
            }
        }
    };
    thread::Builder::new()
        .name("test-child".to_owned())
        .spawn(read)
        .expect("a thread")
}

/// A process in a role, as its code sees it.
pub(crate) struct Role {
    told: Mutex<Receiver<String>>,
}

impl Role {
    /// An argument that it was given.
    pub(crate) fn argument(&self, name: &str) -> String {
        env::var(format!("{ARGUMENT}{name}")).unwrap_or_else(|_| panic!("no argument {name}"))
    }

    /// Says a line to the parent.
    pub(crate) fn say(&self, line: &str) {
        say(line);
    }

    /// The next line that the parent says. Waits for as long as there is a parent.
    pub(crate) fn hear(&self) -> String {
        self.told.lock().recv().expect("a parent")
    }
}

/// As [`Role::say`], where there is no role at hand.
pub(crate) fn say(line: &str) {
    let mut stdout = io::stdout().lock();
    // nobody listens: the parent is gone, and so is this process at once
    let _ = writeln!(stdout, "{MARK}{line}").and_then(|()| stdout.flush());
}

/// The code of a role.
pub(crate) type Part = fn(&Role);

/// Plays the role that the environment names, if it does: what the test `child_role` is.
pub(crate) fn play(roles: &[(&str, Part)]) {
    let Ok(wanted) = env::var(ROLE) else { return };
    let (_, role) = roles
        .iter()
        .find(|(name, _)| *name == wanted)
        .unwrap_or_else(|| panic!("no role {wanted}"));
    let (tells, told) = mpsc::channel();
    thread::Builder::new()
        .name("test-parent".to_owned())
        .spawn(move || {
            for line in io::stdin().lines().map_while(Result::ok) {
                let _ = tells.send(line);
            }
            process::exit(1);
        })
        .expect("a thread");
    super::log::install();
    role(&Role {
        told: Mutex::new(told),
    });
}

/// Lists the roles for [`Child::spawn`], each a `fn(&Role)` by its path. Stands in `main.rs`, once.
///
/// ```text
/// roles! { hold::keep_holding, guard::commit_late }
/// ```
macro_rules! roles {
    ($($(#[$on:meta])* $role:path),* $(,)?) => {
        #[test]
        fn child_role() {
            $crate::support::process::play(&[$($(#[$on])* (stringify!($role), $role)),*]);
        }
    };
}
pub(crate) use roles;
