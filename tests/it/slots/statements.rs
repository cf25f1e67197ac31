//! How many statements an act is, and which.

use std::sync::Arc;

use diesel_lease::Leases;
use parking_lot::Mutex;

use super::hooked::hooked;
use super::{found, is_lost, migrated, minute, refused, won};
use crate::support::database::Database;
use crate::support::{Engine, engines};

engines! {
    fn an_act_is_its_statements,
    fn a_search_is_one_statement_for_many_names_and_none_for_none,
}

// As MySQL writes them, with NOW for the clock.

const READ: &str = "SELECT `diesel_leases`.`name`, `diesel_leases`.`holder`, \
    `diesel_leases`.`instance`, `diesel_leases`.`term`, (`diesel_leases`.`expires_at_ms` - NOW), \
    `diesel_leases`.`slot_ms`, `diesel_leases`.`unfinished_slot_ms`, \
    `diesel_leases`.`rerun_slot_ms` FROM `diesel_leases` WHERE (`diesel_leases`.`name` = ?)";

const FIRST: &str = "INSERT INTO `diesel_leases` (`name`, `holder`, `instance`, `term`, \
    `expires_at_ms`, `slot_ms`, `unfinished_slot_ms`) VALUES (?, ?, ?, ?, (NOW + ?), ?, ?) \
    ON CONFLICT DO NOTHING";

const FIRST_MYSQL: &str = "INSERT INTO `diesel_leases` (`name`, `holder`, `instance`, `term`, \
    `expires_at_ms`, `slot_ms`, `unfinished_slot_ms`) VALUES (?, ?, ?, ?, (NOW + ?), ?, ?) \
    ON DUPLICATE KEY UPDATE `diesel_leases`.`name` = `diesel_leases`.`name`";

const NEXT: &str = "UPDATE `diesel_leases` SET `holder` = ?, `instance` = ?, \
    `term` = (`diesel_leases`.`term` + ?), `expires_at_ms` = (NOW + ?), `slot_ms` = ?, \
    `unfinished_slot_ms` = ? WHERE (((((`diesel_leases`.`name` = ?) \
    AND (`diesel_leases`.`term` = ?)) AND (`diesel_leases`.`slot_ms` = ?)) \
    AND (`diesel_leases`.`unfinished_slot_ms` = ?)) AND (`diesel_leases`.`expires_at_ms` <= NOW))";

const RERUN: &str = "UPDATE `diesel_leases` SET `holder` = ?, `instance` = ?, \
    `term` = (`diesel_leases`.`term` + ?), `expires_at_ms` = (NOW + ?), \
    `rerun_slot_ms` = `diesel_leases`.`slot_ms` WHERE ((((`diesel_leases`.`name` = ?) \
    AND (`diesel_leases`.`term` = ?)) AND (`diesel_leases`.`slot_ms` = ?)) AND \
    (((`diesel_leases`.`unfinished_slot_ms` = `diesel_leases`.`slot_ms`) \
    AND (`diesel_leases`.`rerun_slot_ms` < `diesel_leases`.`slot_ms`)) \
    AND (`diesel_leases`.`expires_at_ms` <= NOW)))";

/// MySQL assigns from left to right: the instant is read before it is written, and nothing after.
const FINISH: &str = "UPDATE `diesel_leases` SET `slot_ms` = \
    CASE WHEN (((`diesel_leases`.`slot_ms` < ?) AND (NOW >= ?))) THEN (?) \
    ELSE (`diesel_leases`.`slot_ms`) END, `unfinished_slot_ms` = ?, `expires_at_ms` = ? \
    WHERE ((`diesel_leases`.`name` = ?) AND (`diesel_leases`.`holder` = ?))";

/// PostgreSQL tells those who wait that the name is free.
const TELLING: &str = "RETURNING pg_notify('diesel_leases', `name`)";

const SETTLE: &str = "UPDATE `diesel_leases` SET `unfinished_slot_ms` = ? \
    WHERE ((`diesel_leases`.`name` = ?) AND (`diesel_leases`.`unfinished_slot_ms` = ?))";

const FIND: &str = "SELECT `diesel_leases`.`name`, `diesel_leases`.`term`, \
    `diesel_leases`.`slot_ms` FROM `diesel_leases` WHERE ((`diesel_leases`.`name` NAMED) \
    AND (((`diesel_leases`.`unfinished_slot_ms` = `diesel_leases`.`slot_ms`) \
    AND (`diesel_leases`.`rerun_slot_ms` < `diesel_leases`.`slot_ms`)) \
    AND (`diesel_leases`.`expires_at_ms` <= NOW)))";

/// What is sent, in words that are the same for all engines.
#[derive(Clone)]
struct Sent {
    engine: Engine,
    statements: Arc<Mutex<Vec<String>>>,
}

impl Sent {
    /// Leases with one connection, made.
    fn by_leases_in(database: &Database) -> (Sent, Leases) {
        let engine = database.engine();
        let sent = Sent {
            engine,
            statements: Arc::default(),
        };
        let log = sent.clone();
        let builder = Leases::builder().connections(1);
        let leases = hooked(builder, engine, database.url(), move |sql| {
            if let Some(sql) = sql {
                log.hear(sql);
            }
        });
        leases.last_slot("warm up").unwrap();
        sent.take();
        (sent, leases)
    }

    fn hear(&self, sql: &str) {
        let now = match self.engine {
            Engine::Sqlite => "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)",
            Engine::Postgres => {
                "CAST(FLOOR(EXTRACT(EPOCH FROM clock_timestamp()) * 1000) AS BIGINT)"
            }
            Engine::Mysql | Engine::Mariadb => {
                "(CAST(UNIX_TIMESTAMP() AS SIGNED) * 1000 + MICROSECOND(NOW(3)) DIV 1000)"
            }
        };
        let sql = sql.split(" -- binds: ").next().unwrap_or_default();
        let mut words = sql.replace(now, "NOW").replace('"', "`").replace("  ", " ");
        if self.engine == Engine::Postgres {
            let mut parts = words.split('$');
            let mut unnumbered = parts.next().unwrap_or_default().to_owned();
            for part in parts {
                unnumbered.push('?');
                unnumbered.push_str(part.trim_start_matches(|digit: char| digit.is_ascii_digit()));
            }
            words = unnumbered;
        }
        self.statements.lock().push(words.trim().to_owned());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.statements.lock())
    }

    #[track_caller]
    fn are(&self, expected: &[&str]) {
        assert_eq!(self.take(), expected, "{}", self.engine);
    }
}

fn an_act_is_its_statements(engine: Engine) {
    const JOB: &str = "job";
    let first = if engine.is_mysql_like() {
        FIRST_MYSQL
    } else {
        FIRST
    };
    let finish = if engine == Engine::Postgres {
        format!("{FINISH} {TELLING}")
    } else {
        FINISH.to_owned()
    };
    let (database, others) = migrated(engine);
    let mut raw = database.connect();
    let (sent, leases) = Sent::by_leases_in(&database);

    let lease = won(leases.try_claim_slot(JOB, minute(1)));
    sent.are(&[READ, first, READ]);
    refused(leases.try_claim_slot(JOB, minute(2)));
    sent.are(&[READ]);
    lease.finish(Some(minute(2))).unwrap();
    sent.are(&[&finish]);
    refused(leases.try_claim_slot(JOB, minute(2)));
    sent.are(&[READ]);

    let lease = won(leases.try_claim_slot(JOB, minute(3)));
    sent.are(&[READ, NEXT]);
    raw.expire(JOB);
    let cut_short = found(&others, JOB);
    assert_eq!(leases.last_slot(JOB).unwrap(), Some(minute(3)));
    sent.are(&[READ]);
    let second = won(leases.try_claim_rerun(&cut_short));
    sent.are(&[RERUN]);
    refused(leases.try_claim_rerun(&cut_short));
    sent.are(&[RERUN]);

    // Another's by now.
    is_lost(lease.finish(None));
    sent.are(&[&finish, SETTLE]);
    // Known to be lost.
    raw.take_over(JOB);
    is_lost(second.renew());
    sent.take();
    is_lost(second.finish(Some(minute(4))));
    sent.are(&[SETTLE]);
}

fn a_search_is_one_statement_for_many_names_and_none_for_none(engine: Engine) {
    let (database, _others) = migrated(engine);
    let (sent, leases) = Sent::by_leases_in(&database);
    let find = |count: usize| {
        let named = match engine {
            Engine::Postgres => "= ANY(?)".to_owned(),
            _ => format!("IN ({})", vec!["?"; count].join(", ")),
        };
        FIND.replace("NAMED", &named)
    };
    for (count, chunks) in [
        (0, vec![]),
        (1, vec![1]),
        (900, vec![900]),
        (901, vec![900, 1]),
    ] {
        leases.unfinished_slots(&vec!["job"; count]).unwrap();
        let expected: Vec<String> = chunks.into_iter().map(find).collect();
        assert_eq!(sent.take(), expected, "{count} names");
    }
}
