//! Campaigns: one replica leads for as long as possible, and another follows it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use diesel::prelude::*;
use diesel_lease::{
    BoxError, Builder, Campaign, Ending, Error, Leader, LeaderEvent, Leases, LossCause, Lost,
    StepDownReason, StopToken, Tenure, Timings, current,
};
use log::Level;
use parking_lot::Mutex;

use crate::support::concrete::{Statements, Watched, connect, on_engine};
use crate::support::database::Database;
use crate::support::log::Captured;
use crate::support::proxy::Proxy;
use crate::support::servers::OwnServer;
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    fn one_leads_and_another_follows_when_it_stops,
    fn work_sees_the_tenure_that_the_leader_shows,
    fn two_names_are_led_side_by_side,
    fn leader_whose_name_was_taken_is_told_and_leads_again_later,
    fn leader_whose_row_was_deleted_is_told_and_leads_again,
    fn both_campaigns_go_on_after_an_outage,
    fn back_off_begins_anew_after_a_good_look,
    fn work_that_ignores_the_loss_is_reported_and_not_run_twice,
    fn work_that_returns_is_started_again_after_a_pause,
    fn work_that_fails_is_logged_and_started_again,
    fn work_that_panics_is_logged_with_the_place_and_started_again,
    fn ending_that_did_not_come_is_a_failure_of_the_work,
    fn a_loss_that_only_the_release_finds_is_the_reason,
    fn stop_waits_for_the_work_and_gives_the_name_back,
    fn stop_ends_a_campaign_that_waits,
    fn stop_after_the_end_is_never_late,
    fn stop_that_is_late_lets_the_name_pass_on,
    fn dropped_leader_stops_without_waiting,
    fn parents_stop_ends_the_campaign,
    fn leader_that_steps_down_leaves_the_name_to_others,
    fn leader_that_steps_down_alone_leads_again_after_the_pause,
    fn leader_that_steps_down_slowly_keeps_the_name_until_its_work_has_returned,
    fn step_down_of_one_that_does_not_lead_does_nothing,
    fn candidate_that_abstains_claims_nothing,
    fn panic_in_only_if_abstains,
    fn every_receiver_hears_everything_from_its_own_call_on,
    fn waiting_candidate_reads_once_in_a_poll_and_writes_nothing,
    fn crashed_leader_is_followed_when_its_lease_ends,
    fn leader_that_stops_is_followed_within_a_poll,
    fn candidate_is_told_of_a_release_in_its_process,
    fn name_that_is_not_valid_is_refused_by_start,
    fn endless_times_are_fine;
    servers:
    fn campaigns_go_on_after_the_server_was_killed,
    fn leader_that_is_cut_off_commits_nothing_and_is_reported_before_its_lease_ends,
    fn candidate_stops_at_once_while_the_database_hangs,
}

const NAME: &str = "outbox";
const POLL: Duration = Duration::from_millis(50);
const PAUSE: Duration = Duration::from_millis(200);

/// Nothing is lost by accident, and what is lost is noticed soon.
const CALM: Timings = Timings {
    lease: Duration::from_secs(15),
    renew: Duration::from_millis(100),
    attempt: Duration::from_secs(5),
    deadline: Duration::from_secs(10),
    grace: Duration::from_millis(300),
};

/// The defaults in a fifth of the time, where a lease is to end.
const SHORT: Timings = Timings {
    lease: Duration::from_secs(3),
    renew: Duration::from_millis(400),
    attempt: Duration::from_secs(1),
    deadline: Duration::from_secs(2),
    grace: Duration::from_secs(1),
};

/// A migrated database.
fn migrated(engine: Engine) -> Database {
    let database = Database::create(engine);
    builder("migrate", CALM)
        .build(database.url())
        .unwrap()
        .migrate()
        .unwrap();
    database
}

fn builder(instance: &str, timings: Timings) -> Builder {
    Leases::builder()
        .timings(timings)
        .instance(instance)
        .on_work_will_not_stop(|_| {})
}

fn leases(database: &Database, instance: &str, timings: Timings) -> Leases {
    builder(instance, timings).build(database.url()).unwrap()
}

fn campaign(leases: &Leases, name: &str) -> Campaign {
    leases.campaign(name).poll(POLL).pause(PAUSE)
}

/// Leads until it is told to end.
fn lead(tenure: &Tenure) -> Result<(), BoxError> {
    Ok(tenure.sleep(Duration::MAX)?)
}

/// A campaign and what it tells.
struct Replica {
    leader: Leader,
    events: Receiver<LeaderEvent>,
}

/// Starts campaigns that are all heard from before one of them claims anything.
fn start_all<F>(campaigns: impl IntoIterator<Item = (Campaign, F)>) -> Vec<Replica>
where
    F: Fn(&Tenure) -> Result<(), BoxError> + Send + Sync + 'static,
{
    let open = Arc::new(AtomicBool::new(false));
    let replicas = campaigns
        .into_iter()
        .map(|(campaign, work)| {
            let gate = Arc::clone(&open);
            let leader = campaign
                .only_if(move || gate.load(Ordering::Relaxed))
                .start(work)
                .unwrap();
            let events = leader.events();
            Replica { leader, events }
        })
        .collect();
    open.store(true, Ordering::Relaxed);
    replicas
}

fn start(
    campaign: Campaign,
    work: impl Fn(&Tenure) -> Result<(), BoxError> + Send + Sync + 'static,
) -> Replica {
    start_all([(campaign, work)]).remove(0)
}

impl Replica {
    #[track_caller]
    fn next(&self) -> LeaderEvent {
        self.events
            .recv_timeout(LONG)
            .unwrap_or_else(|error| panic!("no event: {error}"))
    }

    #[track_caller]
    fn hears(&self, event: LeaderEvent) {
        assert_eq!(self.next(), event);
    }

    #[track_caller]
    fn is_elected(&self, term: u64) {
        self.hears(LeaderEvent::Elected { term });
    }

    #[track_caller]
    fn steps_down(&self, term: u64, reason: StepDownReason) {
        self.hears(LeaderEvent::SteppedDown { term, reason });
    }

    #[track_caller]
    fn sees(&self, instance: &str, term: u64) {
        let instance = instance.to_owned();
        self.hears(LeaderEvent::LeaderSeen { instance, term });
    }

    /// Stops it, and nothing is heard but perhaps that.
    #[track_caller]
    fn stop(self) {
        self.leader.stop(LONG).unwrap();
        let rest: Vec<_> = self.events.iter().collect();
        assert!(
            matches!(
                rest[..],
                [] | [LeaderEvent::SteppedDown {
                    reason: StepDownReason::Stopped,
                    ..
                }]
            ),
            "{rest:?}"
        );
    }
}

/// Counts those at work.
#[derive(Clone, Default)]
struct Office(Arc<[AtomicUsize; 2]>);

struct InOffice(Office);

impl Office {
    fn enter(&self) -> InOffice {
        let [now, most] = &*self.0;
        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        InOffice(self.clone())
    }

    /// Work that leads until it is told to end.
    fn lead(&self) -> impl Fn(&Tenure) -> Result<(), BoxError> + Send + Sync + use<> {
        let office = self.clone();
        move |tenure| {
            let _in_office = office.enter();
            lead(tenure)
        }
    }

    fn is_empty(&self) -> bool {
        self.0[0].load(Ordering::SeqCst) == 0
    }

    /// How many there were at once.
    fn most(&self) -> usize {
        self.0[1].load(Ordering::SeqCst)
    }
}

impl Drop for InOffice {
    fn drop(&mut self) {
        self.0.0[0].fetch_sub(1, Ordering::SeqCst);
    }
}

fn one_leads_and_another_follows_when_it_stops(engine: Engine) {
    let database = migrated(engine);
    let office = Office::default();
    let instances = ["a", "b", "c"];
    let mut replicas = start_all(instances.map(|instance| {
        let leases = leases(&database, instance, CALM);
        (campaign(&leases, NAME), office.lead())
    }));
    let mut instances = instances.to_vec();
    for term in 1..=3 {
        eventually(LONG, "somebody leads", || {
            replicas.iter().any(|replica| replica.leader.is_leading())
        });
        let at = replicas
            .iter()
            .position(|replica| replica.leader.is_leading())
            .unwrap();
        let (leading, instance) = (replicas.remove(at), instances.remove(at));
        leading.is_elected(term);
        for replica in &replicas {
            replica.sees(instance, term);
        }
        thread::sleep(5 * POLL);
        assert!(leading.leader.is_leading());
        assert!(replicas.iter().all(|replica| replica.events.is_empty()));
        leading.stop();
    }
    assert_eq!(office.most(), 1);
}

fn work_sees_the_tenure_that_the_leader_shows(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    let (say, said) = mpsc::channel();
    let replica = start(campaign(&leases, NAME), move |tenure| {
        let entered = current().expect("a tenure is entered");
        say.send((entered.name().to_owned(), entered.term(), tenure.term()))?;
        lead(tenure)
    });
    replica.is_elected(1);
    assert_eq!(said.recv_timeout(LONG).unwrap(), (NAME.to_owned(), 1, 1));
    let tenure = replica.leader.tenure().unwrap();
    assert_eq!((tenure.name(), tenure.term()), (NAME, 1));
    assert!(replica.leader.is_leading() && !tenure.is_lost());
    replica.stop();
    assert!(tenure.is_lost());
}

fn two_names_are_led_side_by_side(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    let replicas = ["first", "second"].map(|name| start(campaign(&leases, name), lead));
    for replica in &replicas {
        replica.is_elected(1);
    }
    replicas.into_iter().for_each(Replica::stop);
}

fn leader_whose_name_was_taken_is_told_and_leads_again_later(engine: Engine) {
    let database = migrated(engine);
    let name = unique("campaign-taken");
    let log = Captured::new(&name);
    let leases = leases(&database, "a", CALM);
    let (say, said) = mpsc::channel();
    let replica = start(campaign(&leases, &name), move |tenure| {
        tenure.ended().recv().unwrap_err();
        say.send(tenure.ending().unwrap())?;
        Ok(())
    });
    replica.is_elected(1);
    let taken = database.admin().take_over(&name);
    let cause = LossCause::TakenOrReleased;
    assert_eq!(said.recv_timeout(LONG).unwrap(), Ending::Lost(cause));
    replica.steps_down(1, StepDownReason::Lost(cause));
    assert!(!replica.leader.is_leading());
    replica.sees("by hand", 2);
    // A lost lease is not given back.
    assert_eq!(database.admin().row(&name), Some(taken));
    assert!(log.has(Level::Info, "leader stepped down, lease lost"));
    database.admin().expire(&name);
    replica.is_elected(3);
    replica.stop();
}

fn leader_whose_row_was_deleted_is_told_and_leads_again(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    let replica = start(campaign(&leases, NAME), |tenure| {
        // As work that hands the loss on.
        tenure.ended().recv().unwrap_err();
        Ok(tenure.check()?)
    });
    replica.is_elected(1);
    database.admin().execute("DELETE FROM diesel_leases");
    replica.steps_down(1, StepDownReason::Lost(LossCause::TakenOrReleased));
    replica.is_elected(1);
    replica.stop();
}

fn both_campaigns_go_on_after_an_outage(engine: Engine) {
    let database = migrated(engine);
    let name = unique("campaign-outage");
    let log = Captured::new(&name);
    let office = Office::default();
    let replicas = start_all(["a", "b"].map(|instance| {
        let leases = leases(&database, instance, SHORT);
        (campaign(&leases, &name), office.lead())
    }));
    let [leads, waits] = in_order(replicas);
    leads.is_elected(1);
    assert!(matches!(
        waits.next(),
        LeaderEvent::LeaderSeen { term: 1, .. }
    ));

    let start = Instant::now();
    let mut session = database.connect();
    session.batch("ALTER TABLE diesel_leases RENAME TO away");
    leads.steps_down(1, StepDownReason::Lost(LossCause::Unreachable));
    assert!(
        start.elapsed() < SHORT.lease,
        "the leader was told after {:?}",
        start.elapsed()
    );
    let failures = |instance| {
        let of_it = |entry: &crate::support::log::Entry| {
            entry.level == Level::Warn
                && entry.message.starts_with("leader campaign failed")
                && entry.get("instance") == Some(instance)
        };
        log.entries().iter().filter(|entry| of_it(entry)).count()
    };
    eventually(LONG, "both campaigns meet the outage", || {
        failures("a") >= 3 && failures("b") >= 3
    });
    let elapsed = start.elapsed();
    // 50, 100 and then 200 ms, each and a bit.
    let most = 2 + elapsed.as_millis() / PAUSE.as_millis() + 1;
    for instance in ["a", "b"] {
        let failures = failures(instance) as u128;
        assert!(failures <= most, "{failures} in {elapsed:?}");
    }

    let start = Instant::now();
    session.batch("ALTER TABLE away RENAME TO diesel_leases");
    let [leads, waits] = in_order(vec![leads, waits]);
    assert!(
        start.elapsed() < SHORT.lease + Duration::from_secs(1),
        "somebody led after {:?}",
        start.elapsed()
    );
    leads.is_elected(2);
    assert!(matches!(
        waits.next(),
        LeaderEvent::LeaderSeen { term: 2, .. }
    ));
    leads.stop();
    waits.is_elected(3);
    waits.stop();
    assert_eq!(office.most(), 1);
}

/// Waits until one of two leads: first that one, then the other.
#[track_caller]
fn in_order(replicas: Vec<Replica>) -> [Replica; 2] {
    eventually(LONG, "somebody leads", || {
        replicas.iter().any(|replica| replica.leader.is_leading())
    });
    let Ok([first, second]) = <[Replica; 2]>::try_from(replicas) else {
        panic!("two replicas")
    };
    if first.leader.is_leading() {
        [first, second]
    } else {
        [second, first]
    }
}

fn back_off_begins_anew_after_a_good_look(engine: Engine) {
    let database = migrated(engine);
    let name = unique("campaign-back-off");
    let log = Captured::new(&name);
    let other = leases(&database, "other", CALM);
    let lease = other.claim(&name).unwrap();
    let pause = Duration::from_secs(30);
    let candidate = start(
        campaign(&leases(&database, "a", CALM), &name).pause(pause),
        lead,
    );
    let failures = || {
        let of_it = |entry: &&crate::support::log::Entry| entry.level == Level::Warn;
        log.entries().iter().filter(of_it).count()
    };
    let mut session = database.connect();
    // The fifth wait is of 800 ms.
    for failed in [5, 10] {
        session.batch("ALTER TABLE diesel_leases RENAME TO away");
        let start = Instant::now();
        eventually(LONG, "the outage is met", || failures() >= failed);
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "failures {failed}: after {:?}",
            start.elapsed()
        );
        session.batch("ALTER TABLE away RENAME TO diesel_leases");
        // A new leader is seen: a good look.
        let term = database.admin().take_over(&name).term;
        eventually(LONG, "the candidate looks again", || {
            let seen = |event| matches!(event, LeaderEvent::LeaderSeen { term: t, .. } if t == term as u64);
            candidate.events.try_iter().any(seen)
        });
    }
    drop(lease);
    candidate.stop();
}

fn work_that_ignores_the_loss_is_reported_and_not_run_twice(engine: Engine) {
    let database = migrated(engine);
    let (told, overrun) = mpsc::channel();
    let leases = builder("a", CALM)
        .on_work_will_not_stop(move |lost| told.send(lost.clone()).unwrap())
        .build(database.url())
        .unwrap();
    let office = Office::default();
    let (at_work, let_go) = (office.clone(), Arc::new(AtomicBool::new(false)));
    let may_go = Arc::clone(&let_go);
    let replica = start(campaign(&leases, NAME), move |tenure| {
        let _in_office = at_work.enter();
        if tenure.term() > 1 {
            return lead(tenure);
        }
        eventually(LONG, "the work is let go", || {
            may_go.load(Ordering::Relaxed)
        });
        Ok(())
    });
    replica.is_elected(1);
    database.admin().take_over(NAME);
    let lost = overrun.recv_timeout(LONG).expect("it is reported");
    assert_eq!((lost.name(), lost.term()), (NAME, 1));
    // The name is free, and this replica has work that has not returned.
    database.admin().expire(NAME);
    thread::sleep(5 * POLL + 2 * PAUSE);
    assert!(replica.events.is_empty());
    assert!(!replica.leader.is_leading());
    let_go.store(true, Ordering::Relaxed);
    replica.steps_down(1, StepDownReason::Lost(LossCause::TakenOrReleased));
    replica.is_elected(3);
    replica.stop();
    assert_eq!(office.most(), 1);
    assert!(overrun.try_recv().is_err(), "it was reported twice");
}

fn work_that_returns_is_started_again_after_a_pause(engine: Engine) {
    let database = migrated(engine);
    let name = unique("campaign-returns");
    let log = Captured::new(&name);
    let leases = leases(&database, "a", CALM);
    let starts = Arc::new(Mutex::new(Vec::new()));
    let started = Arc::clone(&starts);
    let replica = start(campaign(&leases, &name), move |_| {
        started.lock().push(Instant::now());
        Ok(())
    });
    for term in 1..=3 {
        replica.is_elected(term);
        replica.steps_down(term, StepDownReason::Returned);
    }
    drop(replica);
    let starts = starts.lock();
    let gaps = starts.windows(2).map(|pair| pair[1] - pair[0]);
    assert!(gaps.into_iter().all(|gap| gap >= PAUSE), "{starts:?}");
    assert!(log.has(Level::Info, "elected leader"));
    assert!(log.has(Level::Info, "leader stepped down, work returned"));
}

fn work_that_fails_is_logged_and_started_again(engine: Engine) {
    let database = migrated(engine);
    let name = unique("campaign-fails");
    let log = Captured::new(&name);
    let leases = leases(&database, "a", CALM);
    let replica = start(campaign(&leases, &name), |_| Err("no more cheese".into()));
    for term in 1..=3 {
        replica.is_elected(term);
        replica.steps_down(term, StepDownReason::Failed);
    }
    let text = "leader stepped down with error, work failed: no more cheese";
    assert!(log.has(Level::Error, text), "{:?}", log.entries());
}

fn work_that_panics_is_logged_with_the_place_and_started_again(engine: Engine) {
    let database = migrated(engine);
    let name = unique("campaign-panics");
    let log = Captured::new(&name);
    let leases = leases(&database, "a", CALM);
    let replica = start(campaign(&leases, &name), |_| panic!("out of cheese"));
    for term in 1..=3 {
        replica.is_elected(term);
        replica.steps_down(term, StepDownReason::Failed);
    }
    let text = format!("leader work panicked: out of cheese at {}:", file!());
    assert!(log.has(Level::Error, &text), "{:?}", log.entries());
}

fn ending_that_did_not_come_is_a_failure_of_the_work(engine: Engine) {
    let database = migrated(engine);
    let name = unique("campaign-no-ending");
    let log = Captured::new(&name);
    let leases = leases(&database, "a", CALM);
    let replica = start(campaign(&leases, &name), |_| Err(Ending::Stopped.into()));
    replica.is_elected(1);
    replica.steps_down(1, StepDownReason::Failed);
    let text = "leader stepped down with error, work failed: asked to stop";
    assert!(log.has(Level::Error, text), "{:?}", log.entries());
}

fn a_loss_that_only_the_release_finds_is_the_reason(engine: Engine) {
    let database = migrated(engine);
    let rarely = Timings {
        renew: CALM.deadline / 2,
        ..CALM
    };
    let (leave, may_leave) = crossbeam_channel::bounded::<()>(0);
    let replica = start(campaign(&leases(&database, "a", rarely), NAME), move |_| {
        Ok(may_leave.recv()?)
    });
    replica.is_elected(1);
    database.admin().take_over(NAME);
    leave.send(()).unwrap();
    replica.steps_down(1, StepDownReason::Lost(LossCause::TakenOrReleased));
    replica.sees("by hand", 2);
    replica.stop();
}

fn stop_waits_for_the_work_and_gives_the_name_back(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    let (say, said) = mpsc::channel();
    let replica = start(campaign(&leases, NAME), move |tenure| {
        tenure.ended().recv().unwrap_err();
        thread::sleep(Duration::from_millis(300));
        say.send((tenure.ending(), tenure.is_lost()))?;
        Ok(())
    });
    replica.is_elected(1);
    let Replica { leader, events } = replica;
    leader.stop(Duration::MAX).unwrap();
    assert_eq!(said.try_recv(), Ok((Some(Ending::Stopped), false)));
    let reason = StepDownReason::Stopped;
    assert_eq!(
        events.iter().collect::<Vec<_>>(),
        [LeaderEvent::SteppedDown { term: 1, reason }]
    );
    let lease = leases.try_claim(NAME).unwrap().expect("it is free");
    lease.release().unwrap();
}

fn stop_ends_a_campaign_that_waits(engine: Engine) {
    let database = migrated(engine);
    let _lease = leases(&database, "other", CALM).claim(NAME).unwrap();
    let candidate = leases(&database, "a", CALM)
        .campaign(NAME)
        .poll(LONG)
        .start(|_| panic!("it ran"))
        .unwrap();
    let events = candidate.events();
    // It has looked, or is about to.
    let _ = events.recv_timeout(Duration::from_millis(100));
    let start = Instant::now();
    candidate.stop(LONG).unwrap();
    assert!(start.elapsed() < LONG / 4, "{:?}", start.elapsed());
    assert!(
        !events
            .iter()
            .any(|event| matches!(event, LeaderEvent::Elected { .. }))
    );
}

fn stop_after_the_end_is_never_late(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    for _ in 0..30 {
        let parent = StopToken::new();
        let replica = start(campaign(&leases.with_stop(&parent), NAME), lead);
        assert!(matches!(replica.next(), LeaderEvent::Elected { .. }));
        parent.stop();
        let ended = replica.events.iter().last();
        assert!(matches!(ended, Some(LeaderEvent::SteppedDown { .. })));
        assert!(replica.leader.events().recv().is_err());
        replica.leader.stop(Duration::ZERO).unwrap();
    }
}

fn stop_that_is_late_lets_the_name_pass_on(engine: Engine) {
    let database = migrated(engine);
    database
        .connect()
        .batch("CREATE TABLE writes (term BIGINT NOT NULL)");
    let (told, overrun) = mpsc::channel();
    let stubborn = builder("a", SHORT)
        .on_work_will_not_stop(move |lost| told.send(lost.cause()).unwrap())
        .build(database.url())
        .unwrap();
    let (leave, may_leave) = crossbeam_channel::bounded::<()>(0);
    let url = database.url().to_owned();
    let (say, said) = mpsc::channel();
    let replica = start(campaign(&stubborn, NAME), move |tenure| {
        may_leave.recv()?;
        on_engine!(engine, C => {
            let mut connection = connect::<C>(engine, &url);
            let write = tenure.transaction(&mut connection, |connection| {
                diesel::sql_query("INSERT INTO writes VALUES (1)").execute(connection)
            });
            say.send(write)?;
        });
        Ok(())
    });
    replica.is_elected(1);
    let next = start(campaign(&leases(&database, "b", SHORT), NAME), lead);
    let tenure = replica.leader.tenure().unwrap();

    let Replica { leader, events } = replica;
    let begin = Instant::now();
    let stopped = leader.stop(Duration::from_millis(100));
    let given_up = Instant::now();
    assert!(matches!(stopped, Err(Error::TimedOut)), "{stopped:?}");
    assert!(given_up - begin < SHORT.renew * 3, "{:?}", given_up - begin);
    assert_eq!(tenure.ending(), Some(Ending::Lost(LossCause::Abandoned)));
    assert_eq!(overrun.recv_timeout(LONG), Ok(LossCause::Abandoned));

    // The name passes on beside work that has not returned.
    let elected = LeaderEvent::Elected { term: 2 };
    eventually(LONG, "the next one is elected", || {
        next.events.try_iter().any(|event| event == elected)
    });
    let passed_on = given_up.elapsed();
    assert!(
        passed_on < SHORT.lease + Duration::from_secs(1),
        "{passed_on:?}"
    );

    leave.send(()).unwrap();
    let refused = said.recv_timeout(LONG).unwrap().expect_err("it is refused");
    let lost = Lost::from_diesel(&refused).expect("a loss");
    assert_eq!((lost.term(), lost.cause()), (1, LossCause::Abandoned));
    let reason = StepDownReason::Lost(LossCause::Abandoned);
    assert_eq!(
        events.iter().collect::<Vec<_>>(),
        [LeaderEvent::SteppedDown { term: 1, reason }]
    );
    assert_eq!(database.connect().one_i64("SELECT COUNT(*) FROM writes"), 0);
    // What the next one holds was not given back.
    next.leader.tenure().unwrap().verify().unwrap();
    next.stop();
}

fn dropped_leader_stops_without_waiting(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    let office = Office::default();
    let at_work = office.clone();
    let (leave, may_leave) = crossbeam_channel::bounded::<()>(0);
    let (say, said) = mpsc::channel();
    let Replica { leader, events } = start(campaign(&leases, NAME), move |tenure| {
        let _in_office = at_work.enter();
        tenure.ended().recv().unwrap_err();
        say.send(tenure.ending())?;
        Ok(may_leave.recv()?)
    });
    assert_eq!(
        events.recv_timeout(LONG),
        Ok(LeaderEvent::Elected { term: 1 })
    );
    drop(leader);
    assert_eq!(said.recv_timeout(LONG).unwrap(), Some(Ending::Stopped));
    assert!(!office.is_empty());
    assert!(leases.try_claim(NAME).unwrap().is_none());
    leave.send(()).unwrap();
    let reason = StepDownReason::Stopped;
    assert_eq!(
        events.iter().collect::<Vec<_>>(),
        [LeaderEvent::SteppedDown { term: 1, reason }]
    );
    assert!(leases.try_claim(NAME).unwrap().is_some());
}

fn parents_stop_ends_the_campaign(engine: Engine) {
    let database = migrated(engine);
    let parent = StopToken::new();
    let leases = leases(&database, "a", CALM);
    let Replica { leader, events } = start(campaign(&leases.with_stop(&parent), NAME), lead);
    assert_eq!(
        events.recv_timeout(LONG),
        Ok(LeaderEvent::Elected { term: 1 })
    );
    parent.stop();
    let reason = StepDownReason::Stopped;
    assert_eq!(
        events.iter().collect::<Vec<_>>(),
        [LeaderEvent::SteppedDown { term: 1, reason }]
    );
    assert!(!leader.is_leading());
    assert!(leases.try_claim(NAME).unwrap().is_some());
    // Under a parent that is stopped nothing is claimed.
    let late = leases
        .with_stop(&parent)
        .campaign(NAME)
        .start(|_| panic!("it ran"));
    assert!(late.unwrap().events().recv().is_err());
}

fn leader_that_steps_down_leaves_the_name_to_others(engine: Engine) {
    let database = migrated(engine);
    let office = Office::default();
    let replicas = start_all(["a", "b"].map(|instance| {
        let campaign = campaign(&leases(&database, instance, CALM), NAME);
        // It stays away for longer than the other needs.
        (campaign.pause(Duration::from_secs(2)), office.lead())
    }));
    let [first, second] = in_order(replicas);
    first.is_elected(1);
    assert!(matches!(
        second.next(),
        LeaderEvent::LeaderSeen { term: 1, .. }
    ));
    first.leader.step_down();
    first.steps_down(1, StepDownReason::Asked);
    second.is_elected(2);
    assert!(matches!(
        first.next(),
        LeaderEvent::LeaderSeen { term: 2, .. }
    ));
    first.stop();
    second.stop();
    assert_eq!(office.most(), 1);
}

fn leader_that_steps_down_alone_leads_again_after_the_pause(engine: Engine) {
    let database = migrated(engine);
    let replica = start(campaign(&leases(&database, "a", CALM), NAME), lead);
    replica.is_elected(1);
    let start = Instant::now();
    replica.leader.step_down();
    replica.steps_down(1, StepDownReason::Asked);
    replica.is_elected(2);
    assert!(start.elapsed() >= PAUSE, "{:?}", start.elapsed());
    // The next tenure has not been asked to.
    thread::sleep(2 * POLL);
    assert!(replica.leader.is_leading());
    assert_eq!(replica.leader.tenure().unwrap().ending(), None);
    replica.stop();
}

fn leader_that_steps_down_slowly_keeps_the_name_until_its_work_has_returned(engine: Engine) {
    let database = migrated(engine);
    let runs = Arc::new(Mutex::new(Vec::new()));
    let replicas = start_all(["a", "b"].map(|instance| {
        let runs = Arc::clone(&runs);
        let work = move |tenure: &Tenure| {
            let begin = Instant::now();
            tenure.ended().recv().unwrap_err();
            // Longer than a lease.
            thread::sleep(SHORT.lease + SHORT.grace);
            runs.lock().push((begin, Instant::now()));
            Ok(())
        };
        (campaign(&leases(&database, instance, SHORT), NAME), work)
    }));
    let [first, second] = in_order(replicas);
    first.is_elected(1);
    first.leader.step_down();
    assert!(matches!(
        second.next(),
        LeaderEvent::LeaderSeen { term: 1, .. }
    ));
    // Not a loss: the renewals have gone on.
    first.steps_down(1, StepDownReason::Asked);
    second.is_elected(2);
    second.leader.stop(LONG).unwrap();
    let runs = runs.lock();
    assert!(runs[0].1 <= runs[1].0, "{runs:?}");
}

fn step_down_of_one_that_does_not_lead_does_nothing(engine: Engine) {
    let database = migrated(engine);
    let lease = leases(&database, "other", CALM).claim(NAME).unwrap();
    let candidate = start(campaign(&leases(&database, "a", CALM), NAME), lead);
    candidate.leader.step_down();
    lease.release().unwrap();
    eventually(LONG, "it leads all the same", || {
        candidate.leader.is_leading()
    });
    thread::sleep(2 * POLL);
    assert_eq!(candidate.leader.tenure().unwrap().ending(), None);
}

fn candidate_that_abstains_claims_nothing(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    let (asked, is_willing) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let (count, will) = (Arc::clone(&asked), Arc::clone(&is_willing));
    let leader = campaign(&leases, NAME)
        .only_if(move || {
            count.fetch_add(1, Ordering::SeqCst);
            will.load(Ordering::SeqCst)
        })
        .start(lead)
        .unwrap();
    let events = leader.events();
    eventually(LONG, "it is asked at every look", || {
        asked.load(Ordering::SeqCst) >= 3
    });
    assert!(leases.inspect(NAME).unwrap().is_none());
    // It is not asked about a name that is held.
    let lease = leases.claim(NAME).unwrap();
    assert!(matches!(
        events.recv_timeout(LONG),
        Ok(LeaderEvent::LeaderSeen { term: 1, .. })
    ));
    let before = asked.load(Ordering::SeqCst);
    thread::sleep(5 * POLL);
    assert_eq!(asked.load(Ordering::SeqCst), before);
    is_willing.store(true, Ordering::SeqCst);
    lease.release().unwrap();
    assert_eq!(
        events.recv_timeout(LONG),
        Ok(LeaderEvent::Elected { term: 2 })
    );
}

fn panic_in_only_if_abstains(engine: Engine) {
    let database = migrated(engine);
    let asked = AtomicUsize::new(0);
    let leader = campaign(&leases(&database, "a", CALM), NAME)
        .only_if(move || {
            assert!(asked.fetch_add(1, Ordering::SeqCst) > 1, "not yet");
            true
        })
        .start(lead)
        .unwrap();
    eventually(LONG, "it leads after all", || leader.is_leading());
    leader.stop(LONG).unwrap();
}

fn every_receiver_hears_everything_from_its_own_call_on(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    let (next, may_return) = crossbeam_channel::bounded::<()>(0);
    let replica = start(campaign(&leases, NAME), move |tenure| {
        crossbeam_channel::select! {
            recv(may_return) -> _ => Ok(()),
            recv(tenure.ended()) -> _ => Ok(()),
        }
    });
    replica.is_elected(1);
    let deaf = replica.leader.events();
    let later = replica.leader.events();
    drop(deaf);
    next.send(()).unwrap();
    replica.steps_down(1, StepDownReason::Returned);
    replica.is_elected(2);
    replica.leader.stop(LONG).unwrap();
    let stopped = LeaderEvent::SteppedDown {
        term: 2,
        reason: StepDownReason::Stopped,
    };
    assert_eq!(
        replica.events.iter().collect::<Vec<_>>(),
        std::slice::from_ref(&stopped)
    );
    let returned = LeaderEvent::SteppedDown {
        term: 1,
        reason: StepDownReason::Returned,
    };
    assert_eq!(
        later.iter().collect::<Vec<_>>(),
        [returned, LeaderEvent::Elected { term: 2 }, stopped]
    );
}

fn waiting_candidate_reads_once_in_a_poll_and_writes_nothing(engine: Engine) {
    let database = migrated(engine);
    let _held = leases(&database, "other", CALM)
        .claim(NAME)
        .unwrap()
        .hold()
        .unwrap();
    let statements = Statements::default();
    let watched = on_engine!(engine, C => {
        builder("a", CALM)
            .build_with(Watched::<C>::new(&database, &statements))
            .unwrap()
    });
    let candidate = start(campaign(&watched, NAME), lead);
    let mut seen = Vec::new();
    eventually(LONG, "it looks", || {
        seen.extend(statements.take());
        seen.iter().any(|sent| sent.contains("diesel_leases"))
    });
    let start = Instant::now();
    thread::sleep(20 * POLL);
    let sent: Vec<_> = statements
        .take()
        .into_iter()
        .filter(|sent| sent.contains("diesel_leases") && !sent.starts_with("LISTEN"))
        .collect();
    // A poll is up to a quarter shorter, at random.
    let most = start.elapsed().as_millis() / (POLL * 3 / 4).as_millis() + 1;
    assert!(
        !sent.is_empty() && sent.len() as u128 <= most,
        "{}",
        sent.len()
    );
    let kinds: HashSet<_> = sent.iter().map(|sent| sent.split('-').next()).collect();
    assert!(kinds.len() == 1, "{kinds:?}");
    assert!(sent[0].starts_with("SELECT"), "{}", sent[0]);
    assert!(!sent[0].contains(" FOR "), "{}", sent[0]);
    candidate.leader.stop(LONG).unwrap();
}

fn crashed_leader_is_followed_when_its_lease_ends(engine: Engine) {
    let database = migrated(engine);
    // It looks rarely, but knows when the lease ends.
    let candidate = leases(&database, "a", SHORT)
        .campaign(NAME)
        .poll(LONG * 10)
        .only_if(|| true);
    let start = Instant::now();
    let lease = leases(&database, "other", SHORT).claim(NAME).unwrap();
    // As by a crash: neither renewed nor given back.
    std::mem::forget(lease);
    let candidate = candidate.start(lead).unwrap();
    eventually(LONG, "it leads", || candidate.is_leading());
    let after = start.elapsed();
    assert!(
        SHORT.lease <= after && after < SHORT.lease + Duration::from_secs(1),
        "{after:?}"
    );
    assert_eq!(candidate.tenure().unwrap().term(), 2);
}

fn leader_that_stops_is_followed_within_a_poll(engine: Engine) {
    let database = migrated(engine);
    let poll = Duration::from_millis(300);
    let replicas = start_all(["a", "b"].map(|instance| {
        let leases = leases(&database, instance, CALM);
        (leases.campaign(NAME).poll(poll), lead)
    }));
    let [first, second] = in_order(replicas);
    first.leader.stop(LONG).unwrap();
    let start = Instant::now();
    eventually(LONG, "the next one leads", || second.leader.is_leading());
    let after = start.elapsed();
    assert!(after < poll + Duration::from_millis(500), "{after:?}");
}

fn candidate_is_told_of_a_release_in_its_process(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    let lease = leases.claim(NAME).unwrap();
    let candidate = leases.campaign(NAME).poll(LONG).start(lead).unwrap();
    // By then it has looked, and would look again when the lease can end.
    thread::sleep(Duration::from_millis(500));
    lease.release().unwrap();
    let start = Instant::now();
    eventually(LONG, "it leads", || candidate.is_leading());
    assert!(start.elapsed() < CALM.lease / 2, "{:?}", start.elapsed());
    candidate.stop(LONG).unwrap();
}

fn name_that_is_not_valid_is_refused_by_start(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    for name in ["", " ", "a\0", &"n".repeat(192)] {
        let refused = leases.campaign(name).start(|_| panic!("it ran"));
        assert!(matches!(refused, Err(Error::InvalidName(_))), "{refused:?}");
    }
}

fn endless_times_are_fine(engine: Engine) {
    let database = migrated(engine);
    let leases = leases(&database, "a", CALM);
    let campaign = leases
        .campaign(NAME)
        .poll(Duration::MAX)
        .pause(Duration::MAX);
    let leader = campaign.start(|_| Ok(())).unwrap();
    let mut session = database.connect();
    eventually(LONG, "it has led", || {
        session.row(NAME).is_some_and(|row| row.expires_at_ms == 0)
    });
    leader.stop(LONG).unwrap();
}

fn campaigns_go_on_after_the_server_was_killed(engine: Engine) {
    let server = OwnServer::take(engine);
    let database = Database::on(&server);
    leases(&database, "migrate", CALM).migrate().unwrap();
    let office = Office::default();
    let replicas = start_all(["a", "b"].map(|instance| {
        let leases = leases(&database, instance, SHORT);
        (campaign(&leases, NAME), office.lead())
    }));
    let [leads, waits] = in_order(replicas);
    leads.is_elected(1);
    assert!(matches!(
        waits.next(),
        LeaderEvent::LeaderSeen { term: 1, .. }
    ));
    server.kill();
    leads.steps_down(1, StepDownReason::Lost(LossCause::Unreachable));
    server.restart();
    let start = Instant::now();
    let [leads, waits] = in_order(vec![leads, waits]);
    let after = start.elapsed();
    // The lease, and one try that meets the server as it starts.
    assert!(
        after < SHORT.lease + SHORT.attempt + Duration::from_secs(1),
        "{after:?}"
    );
    leads.is_elected(2);
    assert!(matches!(
        waits.next(),
        LeaderEvent::LeaderSeen { term: 2, .. }
    ));
    leads.stop();
    waits.is_elected(3);
    waits.stop();
    assert_eq!(office.most(), 1);
}

fn leader_that_is_cut_off_commits_nothing_and_is_reported_before_its_lease_ends(engine: Engine) {
    const TIMINGS: Timings = Timings {
        lease: Duration::from_secs(5),
        grace: Duration::from_millis(500),
        ..SHORT
    };
    let database = migrated(engine);
    database
        .connect()
        .batch("CREATE TABLE writes (term BIGINT NOT NULL)");
    let proxy = Proxy::to(database.url());
    let (told, overrun) = mpsc::channel();
    let cut_off = builder("a", TIMINGS)
        .on_work_will_not_stop(move |lost| told.send((Instant::now(), lost.cause())).unwrap())
        .build(&proxy.url(database.url()))
        .unwrap();
    let url = database.url().to_owned();
    let (say, said) = mpsc::channel();
    let let_go = Arc::new(AtomicBool::new(false));
    let may_go = Arc::clone(&let_go);
    // It ignores its end, and its own connection is fine.
    let replica = start(campaign(&cut_off, NAME), move |tenure| {
        on_engine!(engine, C => {
            let mut connection = connect::<C>(engine, &url);
            while !may_go.load(Ordering::Relaxed) {
                let is_lost = tenure.is_lost();
                let write = tenure.transaction(&mut connection, |connection| {
                    diesel::sql_query("INSERT INTO writes VALUES (1)").execute(connection)
                });
                say.send((is_lost, write))?;
                thread::sleep(Duration::from_millis(50));
            }
        });
        Ok(())
    });
    replica.is_elected(1);
    let tenure = replica.leader.tenure().unwrap();
    assert_eq!(said.recv_timeout(LONG).unwrap(), (false, Ok(1)));
    let next = start(campaign(&leases(&database, "b", TIMINGS), NAME), lead);
    next.sees("a", 1);

    let start = Instant::now();
    proxy.freeze();
    tenure.ended().recv_timeout(LONG).unwrap_err();
    let told = start.elapsed();
    assert!(told < TIMINGS.deadline + Duration::from_secs(1), "{told:?}");
    assert_eq!(tenure.ending(), Some(Ending::Lost(LossCause::Unreachable)));
    let (reported, cause) = overrun.recv_timeout(LONG).expect("it is reported");
    assert_eq!(cause, LossCause::Unreachable);
    next.is_elected(2);
    assert!(reported < Instant::now());
    let tenure = next.leader.tenure().unwrap();
    let led_for = TIMINGS.deadline - tenure.remaining();
    assert!(
        reported + led_for < Instant::now(),
        "it was reported after the next one came"
    );
    thread::sleep(Duration::from_millis(200));
    let_go.store(true, Ordering::Relaxed);
    replica.steps_down(1, StepDownReason::Lost(LossCause::Unreachable));
    let (late, good): (Vec<_>, Vec<_>) = said.try_iter().partition(|(is_lost, _)| *is_lost);
    assert!(good.iter().any(|(_, write)| write.is_ok()));
    assert!(late.len() > 3, "{}", late.len());
    for (_, write) in late {
        let refused = write.expect_err("it is refused");
        assert!(Lost::from_diesel(&refused).is_some(), "{refused}");
    }
    next.stop();
}

fn candidate_stops_at_once_while_the_database_hangs(engine: Engine) {
    let database = migrated(engine);
    let _held = leases(&database, "other", CALM)
        .claim(NAME)
        .unwrap()
        .hold()
        .unwrap();
    let proxy = Proxy::to(database.url());
    let cut_off = builder("a", CALM)
        .build(&proxy.url(database.url()))
        .unwrap();
    let candidate = campaign(&cut_off, NAME).start(lead).unwrap();
    proxy.freeze();
    thread::sleep(4 * POLL);
    let start = Instant::now();
    candidate.stop(LONG).unwrap();
    assert!(start.elapsed() < CALM.attempt / 2, "{:?}", start.elapsed());
}
