//! The lease in one database, the work in another.

use std::sync::mpsc::channel;
use std::thread;

use diesel_lease::{CommitUnknown, Lease, Leases};

use super::client::{Client, Entrance};
use super::{PATIENT, Stage, assert_lost, assert_no_loss, insert, leases, make_table, next_id};
use crate::support::database::Database;
use crate::support::servers::OwnServer;
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn it_commits_while_renewals_pass,
    fn lost_before_the_begin_no_work_runs,
    fn taken_over_it_never_commits,
    fn a_claim_before_the_commit_is_refused,
    fn a_fence_by_hand_is_refused,
    fn one_entered_after_the_begin_is_fenced,
    fn of_two_each_is_checked_in_its_own,
    fn a_lock_that_ended_before_the_commit_is_told;
    servers:
    fn two_servers_of_one_kind_are_told_apart,
}

/// Where the leases are for work in a database of `engine`.
fn engines_of_leases(engine: Engine) -> Vec<Engine> {
    let all: &[Engine] = match engine {
        Engine::Sqlite => &[Engine::Sqlite, Engine::Postgres],
        Engine::Postgres => &[Engine::Sqlite, Engine::Postgres],
        Engine::Mysql => &[Engine::Postgres, Engine::Mysql, Engine::Mariadb],
        Engine::Mariadb => &[Engine::Mysql, Engine::Mariadb],
    };
    let is_built = |engine: &Engine| match engine {
        Engine::Sqlite => cfg!(feature = "sqlite"),
        Engine::Postgres => cfg!(feature = "postgres"),
        Engine::Mysql | Engine::Mariadb => cfg!(feature = "mysql"),
    };
    all.iter().copied().filter(is_built).collect()
}

/// Leases here, work there.
struct Pair {
    stage: Stage,
    work: Database,
    /// Leases of that database, if it has any.
    others: Option<Leases>,
}

impl Pair {
    fn each(engine: Engine, scenario: fn(&Pair)) {
        for leases in engines_of_leases(engine) {
            let work = Database::create(engine);
            make_table(&work);
            let mut pair = Pair {
                stage: Stage::new(leases),
                work,
                others: None,
            };
            scenario(&pair);
            // and with a lease table of its own in sight
            let others = self::leases(&pair.work, &PATIENT);
            others.migrate().unwrap();
            pair.others = Some(others);
            scenario(&pair);
        }
    }

    fn claim(&self) -> Lease {
        let lease = self.stage.claim();
        if let Some(others) = &self.others {
            // held there too, by somebody else
            let other = others.try_claim(lease.name()).unwrap().expect("a new name");
            std::mem::forget(other);
        }
        lease
    }

    fn client(&self, entrance: Entrance) -> Box<dyn Client> {
        super::client::connect(self.work.engine(), self.work.url(), entrance)
    }

    fn rows(&self, id: i64) -> i64 {
        super::rows(&mut self.work.connect(), id)
    }

    fn name(&self, entrance: Entrance) -> String {
        let (leases, work) = (self.stage.database.engine(), self.work.engine());
        let has = if self.others.is_some() {
            "with"
        } else {
            "without"
        };
        format!("{entrance}, leases in {leases}, work in {work} {has} a table")
    }
}

/// L11.
fn it_commits_while_renewals_pass(engine: Engine) {
    Pair::each(engine, |pair| {
        let held = pair.stage.leases.claim(&unique("beside")).unwrap();
        let held = held.hold().unwrap();
        let mut raw = pair.stage.database.connect();
        let mut expiry = || raw.row(held.tenure().name()).unwrap().expires_at_ms;
        for entrance in Entrance::WHOLE {
            let mut client = pair.client(entrance);
            for _ in 0..2 {
                // it may have set something for the next transaction
                client.sql().run(super::LOOK).unwrap();
                let id = next_id();
                let done = client.transact(held.tenure(), &mut |sql| {
                    sql.run(&insert(id))?;
                    let before = expiry();
                    eventually(LONG, "a renewal", || expiry() > before);
                    Ok(())
                });
                done.unwrap_or_else(|error| panic!("{}: {error:?}", pair.name(entrance)));
                assert_eq!(pair.rows(id), 1, "{}", pair.name(entrance));
            }
        }
        held.release().unwrap();
    });
}

/// L12.
fn lost_before_the_begin_no_work_runs(engine: Engine) {
    Pair::each(engine, |pair| {
        for entrance in Entrance::WHOLE {
            let lease = pair.claim();
            let _next = pair.stage.hand_over(lease.name());
            let mut client = pair.client(entrance);
            let done = client.transact(&lease.tenure(), &mut |_| panic!("the work was run"));
            assert_lost(&done, &lease.tenure());
        }
    });
}

fn taken_over_it_never_commits(engine: Engine) {
    Pair::each(engine, |pair| {
        for entrance in Entrance::WHOLE {
            let mut client = pair.client(entrance);
            let known = pair.claim();
            for lease in [pair.claim(), known] {
                let id = next_id();
                let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
                done.unwrap_or_else(|error| panic!("{}: {error:?}", pair.name(entrance)));
                let lost = next_id();
                let mut next = None;
                let done = client.transact(&lease.tenure(), &mut |sql| {
                    sql.run(&insert(lost))?;
                    next = Some(pair.stage.hand_over(lease.name()));
                    Ok(())
                });
                assert_lost(&done, &lease.tenure());
                assert_eq!(pair.rows(lost), 0, "{}", pair.name(entrance));
                // no lock is left on the row
                next.expect("it has run").renew().unwrap();
            }
        }
    });
}

fn a_claim_before_the_commit_is_refused(engine: Engine) {
    Pair::each(engine, |pair| {
        if pair.stage.database.engine() == Engine::Sqlite {
            return; // it waits for the file
        }
        let entrance = match pair.others {
            Some(_) => Entrance::Plain,
            None => Entrance::GuardedPool,
        };
        {
            let mut client = pair.client(entrance);
            let lease = pair.claim();
            let (rival, name) = (pair.stage.rival.clone(), lease.name().to_owned());
            let (tell, told) = channel();
            // On PostgreSQL this passes through the fence, in InnoDB it must come before.
            let passes = pair.stage.database.engine() == Engine::Postgres;
            let mut raw = pair.stage.database.connect();
            client.before_commit(move || {
                if passes {
                    raw.expire(&name);
                }
                tell.send(rival.try_claim(&name)).unwrap();
            });
            let id = next_id();
            let done = client.transact(&lease.tenure(), &mut |sql| {
                if !passes {
                    pair.stage.database.connect().expire(lease.name());
                }
                sql.run(&insert(id))
            });
            done.unwrap_or_else(|error| panic!("{}: {error:?}", pair.name(entrance)));
            let answer = told.recv().unwrap();
            let answer = answer.unwrap_or_else(|error| panic!("{error:?}"));
            assert!(answer.is_none(), "a claim came through the fence");
            assert_eq!(pair.rows(id), 1);
            // and the lock is gone with the COMMIT
            let next = pair.stage.rival.try_claim(lease.name()).unwrap();
            assert_eq!(next.expect("free").term(), 2);
        }
    });
}

fn a_fence_by_hand_is_refused(engine: Engine) {
    Pair::each(engine, |pair| {
        let mut client = pair.client(Entrance::ByHand);
        let lease = pair.claim();
        let id = next_id();
        let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
        assert_no_loss(done, &lease);
        assert_eq!(pair.rows(id), 0);
        let _next = pair.stage.hand_over(lease.name());
        let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
        assert_lost(&done, &lease.tenure());
        assert_eq!(pair.rows(id), 0);
    });
}

fn one_entered_after_the_begin_is_fenced(engine: Engine) {
    Pair::each(engine, |pair| {
        for entrance in Entrance::GUARDED {
            for is_lost in [false, true] {
                // nothing is known of where its leases are
                let mut client = pair.client(entrance);
                let lease = pair.claim();
                let tenure = lease.tenure();
                let id = next_id();
                let mut next = None;
                let done = client.sql().transact(&mut |sql| {
                    sql.run(&insert(id))?;
                    let _entered = tenure.enter();
                    sql.run(&insert(next_id()))?;
                    if is_lost {
                        next = Some(pair.stage.hand_over(lease.name()));
                    }
                    Ok(())
                });
                if is_lost {
                    assert_lost(&done, &tenure);
                } else {
                    done.unwrap_or_else(|error| panic!("{}: {error:?}", pair.name(entrance)));
                }
                assert_eq!(pair.rows(id), i64::from(!is_lost));
            }
        }
    });
}

fn of_two_each_is_checked_in_its_own(engine: Engine) {
    Pair::each(engine, |pair| {
        let Some(others) = &pair.others else { return };
        let rival = leases(&pair.work, &PATIENT);
        for entrance in Entrance::GUARDED {
            let mut client = pair.client(entrance);
            let inside = || others.try_claim(&unique("inside")).unwrap().expect("new");
            for lost in [None, Some(true), Some(false)] {
                let (beside, inside) = (pair.stage.claim(), inside());
                let (id, mut next) = (next_id(), None);
                if lost == Some(false) && pair.work.engine() == Engine::Sqlite {
                    // nobody can take it over later
                    pair.work.connect().expire(inside.name());
                    next = rival.try_claim(inside.name()).unwrap();
                }
                let (beside, inside) = (beside.tenure(), inside.tenure());
                let done = {
                    let _entered = (beside.enter(), inside.enter());
                    client.sql().transact(&mut |sql| {
                        sql.run(&insert(id))?;
                        match lost {
                            Some(true) => next = Some(pair.stage.hand_over(beside.name())),
                            Some(false) if next.is_none() => {
                                pair.work.connect().expire(inside.name());
                                next = rival.try_claim(inside.name()).unwrap();
                            }
                            _ => {}
                        }
                        Ok(())
                    })
                };
                match lost {
                    None => {
                        done.unwrap_or_else(|e| panic!("{}: {e:?}", pair.name(entrance)));
                    }
                    Some(true) => assert_lost(&done, &beside),
                    Some(false) => assert_lost(&done, &inside),
                }
                assert_eq!(pair.rows(id), i64::from(lost.is_none()));
                assert_eq!(beside.is_lost(), lost == Some(true));
                assert_eq!(inside.is_lost(), lost == Some(false));
            }
        }
    });
}

/// Whether a claim came between is not known then, and it says so.
fn a_lock_that_ended_before_the_commit_is_told(engine: Engine) {
    Pair::each(engine, |pair| {
        if pair.stage.database.engine() == Engine::Sqlite {
            return;
        }
        for entrance in Entrance::WHOLE {
            let mut client = pair.client(entrance);
            let lease = pair.claim();
            let ((ask, asked), (tell, told)) = (channel(), channel());
            client.before_commit(move || {
                ask.send(()).unwrap();
                told.recv().unwrap();
            });
            let id = next_id();
            let done = thread::scope(|scope| {
                scope.spawn(move || {
                    asked.recv().unwrap();
                    pair.stage.database.kill_sessions();
                    tell.send(()).unwrap();
                });
                client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)))
            });
            let error = done.expect_err("it is not known");
            let unknown = CommitUnknown::from_diesel(&error);
            assert!(unknown.is_some(), "{}: {error:?}", pair.name(entrance));
            assert_eq!(pair.rows(id), 1);
            // and the next one locks by another session
            let id = next_id();
            let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
            done.unwrap_or_else(|error| panic!("{}: {error:?}", pair.name(entrance)));
        }
    });
}

/// Even where the database has the same name and a table like it.
fn two_servers_of_one_kind_are_told_apart(engine: Engine) {
    let server = OwnServer::take(engine);
    let stage = Stage::with(Database::on(&server), PATIENT);
    let work = Database::create(engine);
    make_table(&work);
    leases(&work, &PATIENT).migrate().unwrap();
    for entrance in Entrance::WHOLE {
        let mut client = super::client::connect(engine, work.url(), entrance);
        let lease = stage.claim();
        let (id, lost) = (next_id(), next_id());
        let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
        done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        let done = client.transact(&lease.tenure(), &mut |sql| {
            sql.run(&insert(lost))?;
            let _next = stage.hand_over(lease.name());
            Ok(())
        });
        assert_lost(&done, &lease.tenure());
        let mut raw = work.connect();
        assert_eq!(super::rows(&mut raw, id), 1, "{entrance}");
        assert_eq!(super::rows(&mut raw, lost), 0, "{entrance}");
    }
}
