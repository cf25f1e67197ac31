//! The replicas as processes, and what is heard of them.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use diesel_lease::BoxError;
use rustix::process::{Pid, Signal, kill_process};

use crate::{NAME, now, timings};

const REPLICAS: usize = 3;

/// What a replica printed: a moment of its clock, what happened, under which term, and why.
struct Event {
    replica: usize,
    at: Duration,
    what: String,
    term: i64,
    why: String,
}

/// One term, as far as it was heard of.
pub(crate) struct Hold {
    pub(crate) term: i64,
    pub(crate) replica: usize,
    pub(crate) claimed: Duration,
    /// The last moment at which the holder was told that it holds the name.
    pub(crate) last_held: Duration,
    pub(crate) increments: usize,
    /// How long the name was without a living holder before.
    pub(crate) taken_over_after: Option<Duration>,
    pub(crate) ended: &'static str,
}

pub(crate) struct Cluster {
    replicas: Vec<(Child, Option<ChildStdin>)>,
    events: Receiver<Event>,
    holds: Vec<Hold>,
    started: Duration,
    holder_gone: Option<Duration>,
}

impl Cluster {
    pub(crate) fn start(url: &str) -> Result<Cluster, BoxError> {
        let (sender, events) = channel();
        let mut cluster = Cluster {
            replicas: Vec::new(),
            events,
            holds: Vec::new(),
            started: now(),
            holder_gone: None,
        };
        for replica in 1..=REPLICAS {
            let mut child = Command::new(env::current_exe()?)
                .args(["--replica", &replica.to_string()])
                .env("DATABASE_URL", url)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let output = child.stdout.take().expect("it is piped");
            let input = child.stdin.take();
            cluster.replicas.push((child, input));
            cluster.say(replica, "started");
            let sender = sender.clone();
            thread::Builder::new()
                .name(format!("replica {replica}"))
                .spawn(move || listen(replica, BufReader::new(output), &sender))?;
        }
        Ok(cluster)
    }

    /// By term.
    pub(crate) fn holds(&mut self) -> &[Hold] {
        self.holds.sort_by_key(|hold| hold.term);
        &self.holds
    }

    pub(crate) fn say(&self, replica: usize, what: &str) {
        let seconds = (now() - self.started).as_secs_f64();
        println!("{seconds:7.3} s  replica {replica} {what}");
    }

    pub(crate) fn wait_for_claim(&mut self) -> Result<usize, BoxError> {
        self.wait_for("claimed", |_| true)
    }

    pub(crate) fn wait_for_loss(&mut self, of: usize) -> Result<usize, BoxError> {
        self.wait_for("lost", |event| event.replica == of)
    }

    pub(crate) fn wait_for_release(&mut self, by: usize) -> Result<usize, BoxError> {
        self.wait_for("released", |event| event.replica == by)
    }

    /// Waits until the present holder has counted so often.
    pub(crate) fn wait_for_increments(&mut self, times: usize) -> Result<usize, BoxError> {
        loop {
            let replica = self.wait_for("counted", |_| true)?;
            let holder = self.holds.last().expect("only a holder counts");
            if holder.replica == replica && holder.increments >= times {
                return Ok(replica);
            }
        }
    }

    /// Notes whatever is said until this is.
    fn wait_for(&mut self, what: &str, is: impl Fn(&Event) -> bool) -> Result<usize, BoxError> {
        // A lease that nobody renews ends, and a waiter notices it.
        let until = now() + timings().lease * 2;
        loop {
            let event = self.events.recv_timeout(until.saturating_sub(now()));
            let event = event.map_err(|_| format!("no replica has {what} in time"))?;
            self.note(&event);
            if event.what == what && is(&event) {
                return Ok(event.replica);
            }
        }
    }

    fn note(&mut self, event: &Event) {
        let Event {
            replica,
            at,
            ref what,
            term,
            ref why,
        } = *event;
        match what.as_str() {
            "claimed" => {
                self.say(replica, &format!("holds `{NAME}`, term {term}"));
                let gone = self.holder_gone.take();
                self.holds.push(Hold {
                    term,
                    replica,
                    claimed: at,
                    last_held: at,
                    increments: 0,
                    taken_over_after: gone.map(|gone| at.saturating_sub(gone)),
                    ended: "lost",
                });
            }
            "counted" => {
                if let Some(hold) = self.holds.iter_mut().find(|hold| hold.term == term) {
                    hold.last_held = hold.last_held.max(at);
                    hold.increments += 1;
                }
            }
            "lost" => self.say(replica, &format!("knows: {why}, term {term}")),
            _ => self.say(replica, &format!("has {what} it, term {term}")),
        }
    }

    pub(crate) fn kill(&mut self, replica: usize) -> Result<(), BoxError> {
        self.signal(replica, Signal::KILL)?;
        self.holder_ends(replica, "killed by SIGKILL");
        Ok(())
    }

    pub(crate) fn freeze(&mut self, replica: usize) -> Result<(), BoxError> {
        self.signal(replica, Signal::STOP)?;
        self.holder_ends(replica, "frozen by SIGSTOP");
        Ok(())
    }

    pub(crate) fn wake(&self, replica: usize) -> Result<(), BoxError> {
        self.say(replica, "goes on, by SIGCONT");
        self.signal(replica, Signal::CONT)
    }

    fn signal(&self, replica: usize, signal: Signal) -> Result<(), BoxError> {
        let (child, _) = &self.replicas[replica - 1];
        Ok(kill_process(Pid::from_child(child), signal)?)
    }

    /// A replica stops when its input ends.
    pub(crate) fn ask_to_stop(&mut self, replica: usize) {
        let (_, input) = &mut self.replicas[replica - 1];
        *input = None;
        self.holder_ends(replica, "asked to stop");
    }

    fn holder_ends(&mut self, replica: usize, how: &'static str) {
        self.holder_gone = Some(now());
        self.say(replica, &format!("is {how}"));
        if let Some(hold) = self.holds.last_mut() {
            hold.ended = how;
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for (child, _) in &mut self.replicas {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Hands on what a replica prints, until it ends.
fn listen(replica: usize, output: impl BufRead, events: &Sender<Event>) -> Option<()> {
    for line in output.lines() {
        let line = line.ok()?;
        let mut words = line.splitn(4, ' ');
        let event = Event {
            replica,
            at: Duration::from_nanos(words.next()?.parse().ok()?),
            what: words.next()?.to_owned(),
            term: words.next()?.parse().ok()?,
            why: words.next().unwrap_or_default().to_owned(),
        };
        events.send(event).ok()?;
    }
    None
}
