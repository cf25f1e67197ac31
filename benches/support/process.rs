//! What this process uses, as Linux tells it. Zero elsewhere.

use std::fs;

/// Processor time of all threads, in seconds.
pub(crate) fn cpu() -> f64 {
    // Fields 14 and 15 are user and system time in hundredths of a second; the second field is in
    // parentheses and may hold blanks (proc_pid_stat(5)).
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(11)
        .take(2);
    fields
        .filter_map(|field| field.parse::<f64>().ok())
        .sum::<f64>()
        / 100.0
}

/// Memory in use, in bytes.
pub(crate) fn resident() -> f64 {
    number("/proc/self/status", "VmRSS:") * 1024.0
}

/// Context switches of all living threads.
pub(crate) fn switches() -> f64 {
    let tasks = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let paths = tasks.map(|task| task.path().join("status"));
    let of = |path: std::path::PathBuf| {
        let path = path.to_string_lossy().into_owned();
        number(&path, "voluntary_ctxt_switches:") + number(&path, "nonvoluntary_ctxt_switches:")
    };
    paths.map(of).sum()
}

fn number(path: &str, key: &str) -> f64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let value = line.and_then(|line| line.split_whitespace().next());
    value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
}
