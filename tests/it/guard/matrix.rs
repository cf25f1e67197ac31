//! Engine × isolation × entrance: what must hold in every cell.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use diesel_lease::Timings;
use log::Level;

use super::cell::{Cell, all, each};
use super::client::Entrance;
use super::{LOOK, PATIENT, Stage, assert_lost, insert, leases};
use crate::support::database::Database;
use crate::support::log::Captured;
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn renewals_pass_and_it_commits,
    fn work_outlasts_the_lease,
    fn lost_before_the_begin_no_work_runs,
    fn a_claim_before_the_commit_waits_for_it,
    fn past_the_deadline_nothing_commits;
    servers:
    fn taken_over_it_never_commits,
}

fn renewals_pass_and_it_commits(engine: Engine) {
    each(engine, &Entrance::ALL, |mut cell| {
        let name = unique("renewed");
        let log = Captured::new(&name);
        let held = cell.stage.leases.claim(&name).unwrap().hold().unwrap();
        let mut raw = cell.stage.database.connect();
        let mut expiry = || raw.row(&name).unwrap().expires_at_ms;
        let is_sqlite = cell.engine == Engine::Sqlite;
        let id = cell.id;
        let done = cell.client.transact(held.tenure(), &mut |sql| {
            if !is_sqlite {
                // the snapshot is from before the renewals
                sql.number(LOOK)?;
            }
            sql.run(&insert(id))?;
            if is_sqlite {
                // they wait for the file
                thread::sleep(3 * PATIENT.renew);
                return Ok(());
            }
            for _ in 0..3 {
                let before = expiry();
                eventually(3 * PATIENT.attempt, "a renewal", || expiry() > before);
            }
            Ok(())
        });
        done.unwrap_or_else(|error| panic!("{cell}: {error:?}"));
        assert_eq!(cell.stage.rows(id), 1);
        let before = expiry();
        eventually(LONG, "renewals go on", || expiry() > before);
        assert!(!log.has(Level::Warn, ""), "{:?}", log.entries());
        held.release().unwrap();
    });
}

/// SQLite keeps the renewals out too: there it is the deadline that limits the work.
fn work_outlasts_the_lease(engine: Engine) {
    const SHORT: Timings = Timings {
        lease: Duration::from_millis(4000),
        renew: Duration::from_millis(400),
        attempt: Duration::from_millis(1500),
        deadline: Duration::from_millis(3000),
        grace: Duration::from_millis(500),
    };
    fn scenario(mut cell: Cell<'_>) {
        let held = cell.stage.leases.claim(&unique("long")).unwrap();
        let held = held.hold().unwrap();
        let id = cell.id;
        let time = match cell.engine {
            Engine::Sqlite => (SHORT.deadline - SHORT.renew) * 3 / 5,
            _ => SHORT.lease * 5 / 4,
        };
        let done = cell.client.transact(held.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            thread::sleep(time);
            Ok(())
        });
        done.unwrap_or_else(|error| panic!("{cell}: {error:?}"));
        assert_eq!(cell.stage.rows(id), 1);
        held.release().unwrap();
    }
    let stage = Stage::with(Database::create(engine), SHORT);
    all(&stage, &Entrance::ALL, scenario);
    if engine == Engine::Sqlite {
        all(&stage, &Entrance::ALL, |mut cell| {
            let held = cell.stage.leases.claim(&unique("too-long")).unwrap();
            let held = held.hold().unwrap();
            let id = cell.id;
            let done = cell.client.transact(held.tenure(), &mut |sql| {
                sql.run(&insert(id))?;
                thread::sleep(SHORT.deadline * 5 / 4);
                Ok(())
            });
            assert_lost(&done, held.tenure());
            assert_eq!(cell.stage.rows(id), 0);
        });
    }
}

fn taken_over_it_never_commits(engine: Engine) {
    each(engine, &Entrance::ALL, |mut cell| {
        let lease = cell.stage.claim();
        let (id, mut next) = (cell.id, None);
        let stage = cell.stage;
        let done = cell.client.transact(&lease.tenure(), &mut |sql| {
            sql.number(LOOK)?;
            sql.run(&insert(id))?;
            next = Some(stage.hand_over(lease.name()));
            Ok(())
        });
        assert_lost(&done, &lease.tenure());
        assert_eq!(stage.rows(id), 0, "{cell}");
        // and no lock is left on the row of the successor
        let next = next.expect("the work has run");
        assert_eq!(next.term(), lease.term() + 1);
        next.renew().unwrap();
        // the connection is as good as new
        let done = cell
            .client
            .transact(&next.tenure(), &mut |sql| sql.run(&insert(id)));
        done.unwrap_or_else(|error| panic!("{cell}: {error:?}"));
        assert_eq!(stage.rows(id), 1, "{cell}");
        next.release().unwrap();
    });
}

fn lost_before_the_begin_no_work_runs(engine: Engine) {
    each(engine, &Entrance::WHOLE, |mut cell| {
        let lease = cell.stage.claim();
        let next = cell.stage.hand_over(lease.name());
        assert!(!lease.is_lost(), "known already");
        let done = cell.client.transact(&lease.tenure(), &mut |_| {
            panic!("the work was run");
        });
        assert_lost(&done, &lease.tenure());
        // and once more, now that it is known: nothing is sent at all
        let sent = cell.client.sent();
        let done = cell.client.transact(&lease.tenure(), &mut |_| {
            panic!("the work was run");
        });
        assert_lost(&done, &lease.tenure());
        assert_eq!(sent.take(), [""; 0], "{cell}");
        next.release().unwrap();
    });
    // By hand it is only the end that is checked.
    each(engine, &[Entrance::ByHand], |mut cell| {
        let lease = cell.stage.claim();
        let next = cell.stage.hand_over(lease.name());
        let id = cell.id;
        let done = cell
            .client
            .transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
        assert_lost(&done, &lease.tenure());
        assert_eq!(cell.stage.rows(id), 0, "{cell}");
        next.release().unwrap();
    });
}

/// The lease has expired, and only the fence keeps the claim out.
fn a_claim_before_the_commit_waits_for_it(engine: Engine) {
    each(engine, &Entrance::ALL, |mut cell| {
        let lease = cell.stage.claim();
        let name = lease.name().to_owned();
        let (id, engine) = (cell.id, cell.engine);
        let (rival, claimed) = (leases(&cell.stage.database, &PATIENT), name.clone());
        rival.list().unwrap(); // connected
        let (tell, told) = mpsc::channel();
        cell.client.before_commit(move || {
            let claim = thread::Builder::new().spawn(move || {
                let answer = rival.try_claim(&claimed);
                tell.send(answer).unwrap();
            });
            let claim = claim.unwrap();
            if engine == Engine::Sqlite {
                // it waits for the file
                thread::sleep(PATIENT.renew);
                assert!(!claim.is_finished(), "the claim did not wait");
            } else {
                claim.join().unwrap();
            }
        });
        let stage = cell.stage;
        let done = cell.client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            if engine != Engine::Sqlite {
                stage.database.connect().expire(lease.name());
            }
            Ok(())
        });
        done.unwrap_or_else(|error| panic!("{cell}: {error:?}"));
        assert_eq!(stage.rows(id), 1, "{cell}");
        // An error would say that it took longer than `attempt`, which is two seconds.
        let answer = told.recv_timeout(LONG).unwrap();
        let answer = answer.unwrap_or_else(|error| panic!("{cell}: {error:?}"));
        assert!(answer.is_none(), "{cell}: a claim came through the fence");
        if engine != Engine::Sqlite {
            let next = stage.rival.try_claim(&name).unwrap();
            assert_eq!(next.expect("free").term(), lease.term() + 1, "{cell}");
        }
    });
}

/// Nobody else has come, and it is over all the same.
fn past_the_deadline_nothing_commits(engine: Engine) {
    let timings = Timings {
        lease: Duration::from_millis(2500),
        deadline: Duration::from_millis(2000),
        grace: Duration::from_millis(500),
        ..PATIENT
    };
    let stage = Stage::with_timings(engine, timings);
    all(&stage, &Entrance::ALL, |mut cell| {
        let lease = cell.stage.claim();
        let id = cell.id;
        let done = cell.client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(id))?;
            thread::sleep(cell.stage.timings().deadline);
            Ok(())
        });
        assert_lost(&done, &lease.tenure());
        assert_eq!(cell.stage.rows(id), 0);
        cell.stage.succeed(&lease);
    });
}
