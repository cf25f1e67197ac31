//! Every act of the library, and the same SQL kept prepared on one connection, in turns.

use diesel_lease::{BoxError, Leases};

use crate::Effort;
use crate::support::engines::Engine;
use crate::support::record;
use crate::support::report::{Times, json, middle};

const ACTS: [&str; 3] = ["claim + release", "renew", "verify"];
const WARM_UP: usize = 50;

/// So many leases are renewed in turns: a row that is renewed twice in a millisecond is not changed
/// the second time, and nothing is written to disk.
const KEPT: usize = 50;

/// One run: of each act the times of both sides.
#[derive(Default)]
struct Run([(Times, Times); ACTS.len()]);

pub(crate) fn run(engine: &Engine, effort: Effort) -> Result<(), BoxError> {
    let runs = (0..effort.runs).map(|_| measure(engine, effort.rounds));
    let runs: Vec<Run> = runs.collect::<Result<_, _>>()?;

    let facts = engine.facts()?;
    println!(
        "\n{facts}; one client, {} runs of {} rounds",
        effort.runs, effort.rounds
    );
    println!("                   library         bare            ratio of medians");
    println!("act                median   p99    median   p99    middle run (all runs)   more");
    for (at, act) in ACTS.iter().enumerate() {
        let all = |of: fn(&(Times, Times)) -> f64| -> Vec<f64> {
            runs.iter().map(|run| of(&run.0[at])).collect()
        };
        let ratios = all(|(library, bare)| library.median() / bare.median());
        let [ours, ours_p99, bare, bare_p99] = [
            all(|(library, _)| library.median()),
            all(|(library, _)| library.p99()),
            all(|(_, bare)| bare.median()),
            all(|(_, bare)| bare.p99()),
        ]
        .map(|values| middle(&values));
        let more = middle(&all(|(library, bare)| library.median() - bare.median()));
        let ratio = middle(&ratios);
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        println!(
            "{act:16} {ours:7.1} {ours_p99:7.1}  {bare:7.1} {bare_p99:7.1}  {ratio:5.2}  ({least:.2} to {most:.2})  {more:7.1} µs"
        );
        json(
            &[
                ("bench", "acts"),
                ("engine", engine.name),
                ("server", &facts),
                ("act", act),
            ],
            &[
                ("runs", effort.runs as f64),
                ("rounds", effort.rounds as f64),
                ("library_median_us", ours),
                ("library_p99_us", ours_p99),
                ("bare_median_us", bare),
                ("bare_p99_us", bare_p99),
                ("ratio", ratio),
                ("ratio_least", least),
                ("ratio_most", most),
            ],
        );
    }
    Ok(())
}

/// Every run has connections and threads of its own: on which processors they are put makes much of
/// the difference between runs.
fn measure(engine: &Engine, rounds: usize) -> Result<Run, BoxError> {
    let leases = Leases::builder().connections(1).build(&engine.url)?;
    let mut acts = record::record(&engine.url)?;
    let mut bare = engine.connect()?;
    let [ours, theirs] =
        ["library", "bare"].map(|side| format!("bench:{side}:{}", std::process::id()));
    let mut run = Run::default();
    let [claims, renewals, verifications] = &mut run.0;

    for round in 0..WARM_UP + rounds {
        if round == WARM_UP {
            *claims = Default::default();
        }
        claims.0.time(|| {
            Ok(leases
                .try_claim(&ours)?
                .ok_or("the name is held")?
                .release()?)
        })?;
        acts.for_lease(&theirs, &holder(round), 0);
        claims.1.time(|| {
            bare.claim(&acts)?.ok_or("the name is held")?;
            one(bare.release(&acts)?)
        })?;
    }

    let mut kept = Vec::new();
    for at in 0..KEPT {
        let lease = leases
            .try_claim(&format!("{ours}:{at}"))?
            .ok_or("the name is held")?;
        acts.for_lease(&format!("{theirs}:{at}"), &holder(at), 0);
        let term = bare.claim(&acts)?.ok_or("the name is held")?;
        kept.push((lease, term));
    }
    for round in 0..rounds {
        let (lease, term) = &kept[round % KEPT];
        renewals.0.time(|| Ok(lease.renew()?))?;
        acts.for_lease(
            &format!("{theirs}:{}", round % KEPT),
            &holder(round % KEPT),
            *term,
        );
        renewals.1.time(|| one(bare.renew(&acts)?))?;
    }
    for round in 0..rounds {
        let (lease, term) = &kept[round % KEPT];
        verifications.0.time(|| Ok(lease.verify()?))?;
        acts.for_lease(
            &format!("{theirs}:{}", round % KEPT),
            &holder(round % KEPT),
            *term,
        );
        verifications.1.time(|| Ok(bare.verify(&acts).map(drop)?))?;
    }
    for (at, (lease, term)) in kept.into_iter().enumerate() {
        lease.release()?;
        acts.for_lease(&format!("{theirs}:{at}"), &holder(at), term);
        one(bare.release(&acts)?)?;
    }
    Ok(run)
}

fn holder(number: usize) -> String {
    format!("{number:032x}")
}

fn one(rows: usize) -> Result<(), BoxError> {
    if rows == 1 {
        Ok(())
    } else {
        Err(format!("{rows} rows where one was expected").into())
    }
}
