//! Whether two ever held the name at once: by the machine's clock, and by the database's.

use std::process::ExitCode;

use crate::cluster::Hold;
use crate::counter::Increment;

pub(crate) fn judge(holds: &[Hold], increments: &[Increment]) -> ExitCode {
    println!("term  replica  held for  increments  taken over after  then");
    for hold in holds {
        let Hold {
            term,
            replica,
            increments,
            ended,
            ..
        } = hold;
        let held = (hold.last_held - hold.claimed).as_secs_f64();
        let taken_over = match hold.taken_over_after {
            Some(after) => format!("{:.3} s", after.as_secs_f64()),
            None => "-".to_owned(),
        };
        println!("{term:4}  {replica:7}  {held:6.2} s  {increments:10}  {taken_over:>16}  {ended}");
    }
    let counter = increments.iter().map(|increment| increment.value).max();
    let overlaps = overlapping_holds(holds) + misplaced_increments(increments);
    println!();
    println!(
        "increments: {}, counter: {}",
        increments.len(),
        counter.unwrap_or(0)
    );
    println!("overlaps found: {overlaps}");
    if overlaps == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A hold lasts from the answer to the claim to the last moment at which the holder was told that
/// it holds the name. A replica that stands still asks nothing; the first answer it gets afterwards
/// must be that it has lost.
fn overlapping_holds(holds: &[Hold]) -> usize {
    let pairs = holds
        .iter()
        .enumerate()
        .flat_map(|(at, hold)| holds[at + 1..].iter().map(move |later| (hold, later)));
    pairs
        .filter(|(hold, later)| later.claimed < hold.last_held)
        .count()
}

/// Each increment is the one before plus one, under the same term or a higher one. A replica that
/// went on counting beside its successor would repeat a value, or write under a lower term.
fn misplaced_increments(increments: &[Increment]) -> usize {
    let follows =
        |pair: &&[Increment]| pair[1].value == pair[0].value + 1 && pair[1].term >= pair[0].term;
    let pairs = increments.windows(2);
    pairs.filter(|pair| !follows(pair)).count()
}
