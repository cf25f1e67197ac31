//! What comes between the read and the write of a claim.

use diesel_lease::Leases;

use super::hooked::Gate;
use super::{found, is_lost, marks, migrated, minute, minute_ms, nothing_found, refused, won};
use crate::support::database::Database;
use crate::support::{Engine, engines};

engines! {
    fn an_instant_claimed_and_finished_meanwhile_is_not_claimed_again,
    fn a_first_instant_claimed_and_finished_meanwhile_is_not_claimed_again,
    fn a_finish_meanwhile_refuses_the_claim_and_nothing_is_given_up,
    fn a_finish_that_passes_an_instant_meanwhile_is_not_undone_by_the_claim,
    fn a_passed_instant_alone_refuses_the_claim,
    fn a_settled_mark_alone_refuses_the_claim,
    fn a_claim_of_any_kind_meanwhile_refuses_the_claim,
    fn a_name_forced_free_meanwhile_refuses_the_claim,
    fn what_moves_nothing_meanwhile_does_not_matter,
    fn a_finish_meanwhile_refuses_the_second_round,
}

const JOB: &str = "job";

/// A gate and leases behind it.
fn gated(database: &Database) -> (Gate, Leases) {
    let gate = Gate::default();
    let leases = gate.leases(Leases::builder(), database.engine(), database.url());
    (gate, leases)
}

fn an_instant_claimed_and_finished_meanwhile_is_not_claimed_again(engine: Engine) {
    let (database, leases) = migrated(engine);
    let (gate, slow) = gated(&database);
    won(leases.try_claim_slot(JOB, minute(1)))
        .finish(None)
        .unwrap();
    refused(gate.between(
        || slow.try_claim_slot(JOB, minute(2)),
        || {
            won(leases.try_claim_slot(JOB, minute(2)))
                .finish(None)
                .unwrap();
        },
    ));
    let row = database.connect().row(JOB).unwrap();
    assert_eq!((row.term, row.expires_at_ms), (2, 0));
    nothing_found(&leases, JOB);
}

fn a_first_instant_claimed_and_finished_meanwhile_is_not_claimed_again(engine: Engine) {
    let (database, leases) = migrated(engine);
    let (gate, slow) = gated(&database);
    refused(gate.between(
        || slow.try_claim_slot(JOB, minute(2)),
        || {
            won(leases.try_claim_slot(JOB, minute(1)))
                .finish(None)
                .unwrap();
        },
    ));
    assert_eq!(
        marks(&mut database.connect(), JOB),
        (minute_ms(1), 0, 0),
        "a row that was not there when it was read is left alone"
    );
    assert_eq!(won(slow.try_claim_slot(JOB, minute(2))).term(), 2);
}

/// The holder stood still until its lease ran out, and records its end now: its row still is its own.
fn a_finish_meanwhile_refuses_the_claim_and_nothing_is_given_up(engine: Engine) {
    let (database, leases) = migrated(engine);
    let (gate, other) = gated(&database);
    let mut raw = database.connect();
    let round = won(leases.try_claim_slot(JOB, minute(1)));
    raw.expire(JOB);
    refused(gate.between(
        || other.try_claim_slot(JOB, minute(2)),
        || round.finish(None).unwrap(),
    ));
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), 0, 0));
    let next = won(other.try_claim_slot(JOB, minute(2)));
    assert_eq!((next.term(), next.superseded()), (2, None));
}

fn a_finish_that_passes_an_instant_meanwhile_is_not_undone_by_the_claim(engine: Engine) {
    let (database, leases) = migrated(engine);
    let (gate, other) = gated(&database);
    let mut raw = database.connect();
    let round = won(leases.try_claim_slot(JOB, minute(1)));
    raw.expire(JOB);
    refused(gate.between(
        || other.try_claim_slot(JOB, minute(2)),
        || round.finish(Some(minute(3))).unwrap(),
    ));
    assert_eq!(marks(&mut raw, JOB), (minute_ms(3), 0, 0));
    refused(other.try_claim_slot(JOB, minute(2)));
    let next = won(other.try_claim_slot(JOB, minute(4)));
    assert_eq!((next.term(), next.superseded()), (2, None));
}

/// The mark was another's already, so that only the instant moves.
fn a_passed_instant_alone_refuses_the_claim(engine: Engine) {
    let (database, leases) = migrated(engine);
    let (gate, other) = gated(&database);
    let mut raw = database.connect();
    let round = won(leases.try_claim_slot(JOB, minute(1)));
    raw.execute("UPDATE diesel_leases SET unfinished_slot_ms = 0, expires_at_ms = 1");
    refused(gate.between(
        || other.try_claim_slot(JOB, minute(2)),
        || round.finish(Some(minute(3))).unwrap(),
    ));
    assert_eq!(marks(&mut raw, JOB), (minute_ms(3), 0, 0));
}

/// The first holder's late finish, after the second round was cut short too.
fn a_settled_mark_alone_refuses_the_claim(engine: Engine) {
    let (database, leases) = migrated(engine);
    let (gate, other) = gated(&database);
    let mut raw = database.connect();
    let first = won(leases.try_claim_slot(JOB, minute(1)));
    raw.expire(JOB);
    won(leases.try_claim_rerun(&found(&leases, JOB)))
        .release()
        .unwrap();
    refused(gate.between(
        || other.try_claim_slot(JOB, minute(2)),
        || is_lost(first.finish(None)),
    ));
    assert_eq!(marks(&mut raw, JOB), (minute_ms(1), 0, minute_ms(1)));
    let next = won(other.try_claim_slot(JOB, minute(2)));
    assert_eq!((next.term(), next.superseded()), (3, None));
}

fn a_claim_of_any_kind_meanwhile_refuses_the_claim(engine: Engine) {
    let (database, leases) = migrated(engine);
    let (gate, slow) = gated(&database);
    let mut raw = database.connect();
    won(leases.try_claim_slot(JOB, minute(1)))
        .release()
        .unwrap();
    refused(gate.between(
        || slow.try_claim_slot(JOB, minute(2)),
        || won(leases.try_claim(JOB)).release().unwrap(),
    ));
    refused(gate.between(
        || slow.try_claim_slot(JOB, minute(2)),
        || {
            let second = won(leases.try_claim_rerun(&found(&leases, JOB)));
            second.release().unwrap();
        },
    ));
    assert_eq!(
        marks(&mut raw, JOB),
        (minute_ms(1), minute_ms(1), minute_ms(1))
    );
    let next = won(slow.try_claim_slot(JOB, minute(2)));
    assert_eq!(next.term(), 4);
    assert!(next.superseded().expect("the second round").is_rerun());
}

fn a_name_forced_free_meanwhile_refuses_the_claim(engine: Engine) {
    let (database, leases) = migrated(engine);
    let (gate, slow) = gated(&database);
    let mut raw = database.connect();
    let round = won(leases.try_claim_slot(JOB, minute(1)));
    raw.expire(JOB);
    let cut_short = found(&leases, JOB);
    for _ in 0..2 {
        raw.expire(JOB);
        let force = || {
            let later = raw.now_ms() + 60_000;
            raw.execute(&format!(
                "UPDATE diesel_leases SET expires_at_ms = {later} WHERE name = '{JOB}'"
            ));
            assert!(leases.force_release(JOB).unwrap());
        };
        refused(gate.between(|| slow.try_claim_slot(JOB, minute(2)), force));
    }
    refused(leases.try_claim_rerun(&cut_short));
    is_lost(round.finish(None));
    assert_eq!(database.connect().row(JOB).unwrap().term, 3);
}

fn what_moves_nothing_meanwhile_does_not_matter(engine: Engine) {
    let (database, leases) = migrated(engine);
    let (gate, slow) = gated(&database);
    let round = won(leases.try_claim_slot(JOB, minute(1)));
    database.connect().expire(JOB);
    let next = won(gate.between(
        || slow.try_claim_slot(JOB, minute(2)),
        || {
            leases.unfinished_slots(&[JOB]).unwrap();
            leases.last_slot(JOB).unwrap();
            round.release().unwrap();
        },
    ));
    assert_eq!(next.term(), 2);
    assert_eq!(
        next.superseded().expect("the first round").slot(),
        minute(1)
    );
}

fn a_finish_meanwhile_refuses_the_second_round(engine: Engine) {
    let (database, leases) = migrated(engine);
    let (gate, other) = gated(&database);
    let mut raw = database.connect();
    for passed in [None, Some(minute(20))] {
        let round = won(leases.try_claim_slot(JOB, minute(10 + i64::from(passed.is_some()))));
        raw.expire(JOB);
        let cut_short = found(&other, JOB);
        refused(gate.between(
            || other.try_claim_rerun(&cut_short),
            || round.finish(passed).unwrap(),
        ));
    }
    assert_eq!(marks(&mut raw, JOB), (minute_ms(20), 0, 0));
    assert_eq!(raw.row(JOB).unwrap().term, 2);
}
