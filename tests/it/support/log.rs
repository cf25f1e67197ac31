//! What is logged in this process, kept in memory.
//!
//! There is one log for all tests of a process: a test sees its own entries by the name of a lease
//! that no other uses ([`unique`](super::unique)).

use std::fmt;
use std::sync::Once;

use log::kv::{Error, Key, Value, VisitSource};
use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::Mutex;

/// One log line with its key-values.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) level: Level,
    pub(crate) target: String,
    pub(crate) message: String,
    pub(crate) pairs: Vec<(String, String)>,
}

impl Entry {
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        let pair = self.pairs.iter().find(|(name, _)| name == key)?;
        Some(&pair.1)
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.level, self.target, self.message)?;
        self.pairs
            .iter()
            .try_for_each(|(key, value)| write!(f, " {key}={value}"))
    }
}

static ENTRIES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

struct Memory;

impl Log for Memory {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let mut pairs = Pairs(Vec::new());
        // our own visitor does not fail
        let _ = record.key_values().visit(&mut pairs);
        let entry = Entry {
            level: record.level(),
            target: record.target().to_owned(),
            message: record.args().to_string(),
            pairs: pairs.0,
        };
        ENTRIES.lock().push(entry);
    }

    fn flush(&self) {}
}

struct Pairs(Vec<(String, String)>);

impl<'kvs> VisitSource<'kvs> for Pairs {
    fn visit_pair(&mut self, key: Key<'kvs>, value: Value<'kvs>) -> Result<(), Error> {
        self.0.push((key.to_string(), value.to_string()));
        Ok(())
    }
}

/// Starts to keep everything; again does nothing.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&Memory).expect("no other logger");
        log::set_max_level(LevelFilter::Trace);
    });
}

/// Every entry of this process so far, of every crate.
pub(crate) fn everything() -> Vec<Entry> {
    ENTRIES.lock().clone()
}

/// What is logged of one lease, or with another pair that no other test logs, from here on.
pub(crate) struct Captured {
    key: &'static str,
    value: String,
    from: usize,
}

impl Captured {
    pub(crate) fn new(lease: &str) -> Captured {
        Captured::with("lease", lease)
    }

    pub(crate) fn with(key: &'static str, value: &str) -> Captured {
        install();
        Captured {
            key,
            value: value.to_owned(),
            from: ENTRIES.lock().len(),
        }
    }

    pub(crate) fn entries(&self) -> Vec<Entry> {
        let ours = |entry: &&Entry| entry.get(self.key) == Some(&self.value);
        let entries = ENTRIES.lock();
        entries[self.from..].iter().filter(ours).cloned().collect()
    }

    /// Whether there is an entry of that level with that text in its message.
    pub(crate) fn has(&self, level: Level, text: &str) -> bool {
        self.entries()
            .iter()
            .any(|entry| entry.level == level && entry.message.contains(text))
    }
}
