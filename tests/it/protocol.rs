//! What is sent: the exact statements of every act, how many they are, and that they stay prepared.

use std::thread;
use std::time::Duration;

use diesel_lease::{Leases, Timings};

use crate::support::database::Database;
use crate::support::watched::{Sent, Watch};
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    fn an_act_is_its_statements_and_they_stay_prepared,
    fn a_lost_lease_is_told_by_one_statement,
    fn what_is_known_locally_is_not_asked,
    fn a_waiter_reads_and_writes_nothing,
    fn of_the_waiters_of_a_process_one_asks,
    fn a_renewal_thread_sends_nothing_but_renewals,
}

// As MySQL writes them, with NOW for the clock. PostgreSQL has its own quotes and numbers its values.

const READ: &str = "SELECT `diesel_leases`.`name`, `diesel_leases`.`holder`, \
    `diesel_leases`.`instance`, `diesel_leases`.`term`, (`diesel_leases`.`expires_at_ms` - NOW), \
    `diesel_leases`.`slot_ms`, `diesel_leases`.`unfinished_slot_ms`, \
    `diesel_leases`.`rerun_slot_ms` FROM `diesel_leases` \
    WHERE (`diesel_leases`.`name` = ?)";

const LIST: &str = "SELECT `diesel_leases`.`name`, `diesel_leases`.`holder`, \
    `diesel_leases`.`instance`, `diesel_leases`.`term`, (`diesel_leases`.`expires_at_ms` - NOW), \
    `diesel_leases`.`slot_ms`, `diesel_leases`.`unfinished_slot_ms`, \
    `diesel_leases`.`rerun_slot_ms` FROM `diesel_leases` \
    ORDER BY `diesel_leases`.`name`";

const CLAIM: &str = "INSERT INTO `diesel_leases` (`name`, `holder`, `instance`, `term`, \
    `expires_at_ms`) VALUES (?, ?, ?, ?, (NOW + ?)) ON CONFLICT (`name`) DO UPDATE \
    SET `holder` = ?, `instance` = ?, `term` = (`diesel_leases`.`term` + ?), \
    `expires_at_ms` = (NOW + ?) WHERE (`diesel_leases`.`expires_at_ms` <= NOW) RETURNING `term`";

/// `expires_at_ms`, which all of them read, is assigned last.
const CLAIM_MYSQL: &str = "INSERT INTO `diesel_leases` (`name`, `holder`, `instance`, `term`, \
    `expires_at_ms`) VALUES (?, ?, ?, ?, (NOW + ?)) ON DUPLICATE KEY UPDATE \
    `holder` = CASE WHEN ((`diesel_leases`.`expires_at_ms` <= NOW)) \
    THEN (?) ELSE (`diesel_leases`.`holder`) END, \
    `instance` = CASE WHEN ((`diesel_leases`.`expires_at_ms` <= NOW)) \
    THEN (?) ELSE (`diesel_leases`.`instance`) END, \
    `term` = CASE WHEN ((`diesel_leases`.`expires_at_ms` <= NOW)) \
    THEN ((`diesel_leases`.`term` + ?)) ELSE (`diesel_leases`.`term`) END, \
    `expires_at_ms` = CASE WHEN ((`diesel_leases`.`expires_at_ms` <= NOW)) \
    THEN ((NOW + ?)) ELSE (`diesel_leases`.`expires_at_ms`) END";

const RENEW: &str = "UPDATE `diesel_leases` SET `expires_at_ms` = (NOW + ?) \
    WHERE ((((`diesel_leases`.`name` = ?) AND (`diesel_leases`.`holder` = ?)) \
    AND (`diesel_leases`.`term` = ?)) AND (`diesel_leases`.`expires_at_ms` > NOW))";

const VERIFY: &str = "SELECT `diesel_leases`.`term` FROM `diesel_leases` \
    WHERE ((((`diesel_leases`.`name` = ?) AND (`diesel_leases`.`holder` = ?)) \
    AND (`diesel_leases`.`term` = ?)) AND (`diesel_leases`.`expires_at_ms` > NOW))";

const RELEASE: &str = "UPDATE `diesel_leases` SET `expires_at_ms` = ? \
    WHERE ((`diesel_leases`.`name` = ?) AND (`diesel_leases`.`holder` = ?))";

const FORCE_RELEASE: &str = "UPDATE `diesel_leases` SET `holder` = ?, `instance` = ?, \
    `term` = (`diesel_leases`.`term` + ?), `expires_at_ms` = ? \
    WHERE ((`diesel_leases`.`name` = ?) AND (`diesel_leases`.`expires_at_ms` > NOW))";

/// What tells those who listen, on PostgreSQL, and what they listen by.
const TELLING: &str = " RETURNING pg_notify('diesel_leases', `name`)";
const LISTEN: &str = "LISTEN diesel_leases";

/// A statement in an engine's words.
fn in_words_of(engine: Engine, statement: &str) -> String {
    let now = match engine {
        Engine::Sqlite => "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)",
        Engine::Postgres => "CAST(FLOOR(EXTRACT(EPOCH FROM clock_timestamp()) * 1000) AS BIGINT)",
        Engine::Mysql | Engine::Mariadb => {
            "(CAST(UNIX_TIMESTAMP() AS SIGNED) * 1000 + MICROSECOND(NOW(3)) DIV 1000)"
        }
    };
    let statement = statement.replace("NOW", now);
    if engine != Engine::Postgres {
        return statement;
    }
    let mut parts = statement.split('?');
    let mut numbered = parts.next().unwrap_or_default().to_owned();
    for (at, part) in parts.enumerate() {
        numbered.push_str(&format!("${}{part}", at + 1));
    }
    numbered.replace('`', "\"")
}

struct Statements {
    claim: Vec<String>,
    read: String,
    list: String,
    renew: String,
    verify: String,
    release: String,
    force_release: String,
}

impl Statements {
    fn of(engine: Engine) -> Statements {
        let words = |statement: &str| in_words_of(engine, statement);
        let freeing = |statement: &str| {
            let telling = if engine == Engine::Postgres {
                TELLING
            } else {
                ""
            };
            words(&format!("{statement}{telling}"))
        };
        Statements {
            claim: if engine.is_mysql_like() {
                vec![words(CLAIM_MYSQL), words(READ)]
            } else {
                vec![words(CLAIM)]
            },
            read: words(READ),
            list: words(LIST),
            renew: words(RENEW),
            verify: words(VERIFY),
            release: freeing(RELEASE),
            force_release: freeing(FORCE_RELEASE),
        }
    }
}

/// Leases on one session that has been made, with nothing recorded of that.
fn watched(database: &Database, timings: Timings) -> (Leases, Watch) {
    let watch = Watch::default();
    let builder = Leases::builder().connections(1).timings(timings);
    let leases = watch.build(builder, database);
    leases.migrate().unwrap();
    leases.inspect("warm").unwrap();
    watch.take();
    (leases, watch)
}

fn an_act_is_its_statements_and_they_stay_prepared(engine: Engine) {
    let database = Database::create(engine);
    let (leases, watch) = watched(&database, Timings::default());
    let expected = Statements::of(engine);
    let claim: Vec<&String> = expected.claim.iter().collect();
    let mut kept = vec![expected.read.clone()];
    for _ in 0..2 {
        let mut sent_for = |act: &str, statements: &[&String]| {
            let mut ran = Vec::new();
            for sent in watch.take() {
                match sent {
                    Sent::Ran(statement) => ran.push(statement),
                    Sent::Kept(statement) => {
                        assert!(!kept.contains(&statement), "prepared anew: {statement}");
                        kept.push(statement);
                    }
                }
            }
            let ran: Vec<&String> = ran.iter().collect();
            assert_eq!(ran, statements, "{act}");
        };
        let lease = leases.try_claim("name").unwrap().expect("a free name");
        sent_for("a claim that wins", &claim);
        assert!(leases.try_claim("name").unwrap().is_none());
        sent_for("a claim that is refused", &claim);
        lease.renew().unwrap();
        sent_for("renew", &[&expected.renew]);
        lease.verify().unwrap();
        sent_for("verify", &[&expected.verify]);
        lease.tenure().verify().unwrap();
        sent_for("verify by a tenure", &[&expected.verify]);
        leases.inspect("name").unwrap();
        sent_for("inspect", &[&expected.read]);
        leases.list().unwrap();
        sent_for("list", &[&expected.list]);
        lease.release().unwrap();
        sent_for("release", &[&expected.release]);
        assert!(!leases.force_release("name").unwrap());
        sent_for("force_release", &[&expected.force_release]);
        drop(leases.try_claim("name").unwrap().expect("a free name"));
        leases.inspect("name").unwrap();
        let mut dropped = claim.clone();
        dropped.extend([&expected.release, &expected.read]);
        sent_for("a claim and a drop", &dropped);
    }
    kept.sort();
    let mut all = expected.claim;
    all.extend([
        expected.list,
        expected.renew,
        expected.verify,
        expected.release,
        expected.force_release,
    ]);
    if !engine.is_mysql_like() {
        all.push(expected.read);
    }
    all.sort();
    assert_eq!(kept, all, "every statement is kept, once");
}

fn a_lost_lease_is_told_by_one_statement(engine: Engine) {
    let database = Database::create(engine);
    let (leases, watch) = watched(&database, Timings::default());
    let expected = Statements::of(engine);
    let mut raw = database.connect();
    for (act, statement) in [
        ("renew", &expected.renew),
        ("verify", &expected.verify),
        ("release", &expected.release),
    ] {
        let lease = leases.try_claim(act).unwrap().expect("a free name");
        raw.take_over(act);
        watch.take();
        let answer = match act {
            "renew" => lease.renew(),
            "verify" => lease.verify(),
            _ => lease.release(),
        };
        assert!(answer.unwrap_err().is_lost(), "{act}");
        assert_eq!(watch.take_ran(), [statement.as_str()], "{act}");
    }
}

fn what_is_known_locally_is_not_asked(engine: Engine) {
    let database = Database::create(engine);
    let (leases, watch) = watched(&database, Timings::default());
    let lease = leases.try_claim("name").unwrap().expect("a free name");
    database.connect().take_over("name");
    assert!(lease.verify().unwrap_err().is_lost());
    watch.take();
    assert!(lease.renew().unwrap_err().is_lost());
    assert!(lease.verify().unwrap_err().is_lost());
    assert!(lease.release().unwrap_err().is_lost());
    assert!(leases.try_claim(" name").is_err());
    assert!(leases.inspect("").is_err());
    // after whatever a drop would have sent
    leases.inspect("name").unwrap();
    assert_eq!(watch.take_ran(), [Statements::of(engine).read]);
}

/// What was sent since, but for what makes a session and has it listen.
fn by_who_waits(watch: &Watch) -> Vec<String> {
    let mut ran = watch.take_ran();
    ran.retain(|ran| ran.contains("diesel_leases") && ran != LISTEN);
    ran
}

fn a_waiter_reads_and_writes_nothing(engine: Engine) {
    let database = Database::create(engine);
    let often = Timings {
        renew: Duration::from_millis(200),
        ..Timings::default()
    };
    let (leases, watch) = watched(&database, often.clone());
    let expected = Statements::of(engine);
    let holder = Leases::connect(database.url()).unwrap();
    let lease = holder.try_claim("name").unwrap().expect("a free name");
    let before = database.connect().row("name");

    let timeout = often.renew * 4;
    assert!(leases.claim_timeout("name", timeout).unwrap().is_none());
    let ran = by_who_waits(&watch);
    let (first, rest) = ran.split_at(expected.claim.len());
    assert_eq!(first, expected.claim);
    assert!(!rest.is_empty(), "it looks");
    assert!(rest.iter().all(|ran| *ran == expected.read), "{rest:#?}");
    // Some soon, and then about twice in a renewal interval.
    assert!(rest.len() <= 4 + 10, "{}", rest.len());
    assert_eq!(database.connect().row("name"), before);

    let waiter = thread::spawn(move || leases.claim_timeout("name", LONG).unwrap());
    eventually(LONG, "it waits", || {
        by_who_waits(&watch).last() == Some(&expected.read)
    });
    lease.release().unwrap();
    let claimed = waiter.join().unwrap().expect("a free name");
    assert_eq!(claimed.term(), 2);
    let ran = by_who_waits(&watch);
    let (reads, last) = ran.split_at(ran.len() - expected.claim.len());
    assert_eq!(last, expected.claim);
    assert!(reads.iter().all(|ran| *ran == expected.read), "{reads:#?}");
}

fn of_the_waiters_of_a_process_one_asks(engine: Engine) {
    let database = Database::create(engine);
    let (leases, watch) = watched(&database, Timings::default());
    let expected = Statements::of(engine);
    let holder = Leases::connect(database.url()).unwrap();
    let _lease = holder.try_claim("name").unwrap().expect("a free name");
    let timeout = Duration::from_millis(500);
    thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| assert!(leases.claim_timeout("name", timeout).unwrap().is_none()));
        }
    });
    let (reads, claims): (Vec<_>, Vec<_>) = by_who_waits(&watch)
        .into_iter()
        .partition(|ran| *ran == expected.read);
    // The first one looks after 10, 20, 40 ms and so on. When it leaves, the next one is the first.
    assert!(!reads.is_empty() && reads.len() <= 40, "{}", reads.len());
    assert!(claims.len() <= 20 * expected.claim.len(), "{claims:#?}");
}

fn a_renewal_thread_sends_nothing_but_renewals(engine: Engine) {
    let database = Database::create(engine);
    let often = Timings {
        renew: Duration::from_millis(20),
        ..Timings::default()
    };
    let (leases, watch) = watched(&database, often.clone());
    let expected = Statements::of(engine);
    let held = leases.claim("name").unwrap().hold().unwrap();
    let mut ran = Vec::new();
    eventually(LONG, "it renews", || {
        ran.extend(watch.take_ran());
        ran.len() > expected.claim.len() + 3
    });
    held.release().unwrap();
    ran.extend(watch.take_ran());
    let renewals = &ran[expected.claim.len()..ran.len() - 1];
    assert!(
        renewals.iter().all(|ran| *ran == expected.renew),
        "{renewals:#?}"
    );
    assert_eq!(ran.last(), Some(&expected.release));
    // Nothing is sent after it.
    thread::sleep(often.renew * 5);
    assert_eq!(watch.take(), []);
}
