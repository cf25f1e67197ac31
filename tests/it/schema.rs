//! The table: made by any number of processes at once, as `src/schema.rs` has it, beside an
//! application's own; and what is said where it is missing.

#[path = "../../src/schema.rs"]
mod printed;

use std::any::TypeId;
use std::fs;
use std::path::Path;
use std::sync::Barrier;
use std::thread;

use diesel::query_source::{Column, Table};
use diesel::sql_types::{BigInt, SqlType, Text, is_nullable};
use diesel_lease::{Error, Lease, Leases};
use diesel_migrations::{EmbeddedMigrations, FileBasedMigrations, MigrationHarness};

use self::printed::diesel_leases;
use crate::support::database::Database;
use crate::support::process::{Child, Role};
use crate::support::raw::Raw;
use crate::support::{Engine, engines};

engines! {
    fn many_processes_may_migrate_at_once,
    fn many_threads_may_migrate_at_once,
    fn migrating_again_changes_nothing,
    fn the_table_is_as_the_schema_has_it,
    fn columns_hold_what_a_name_may_be,
    fn down_undoes_up,
    fn migrations_stand_beside_the_applications_own,
    fn a_missing_table_is_told_and_not_remembered,
    fn names_are_compared_by_bytes_whatever_the_database_default,
}

const ROUNDS: usize = 5;
const AT_ONCE: usize = 8;

const COUNT_MIGRATIONS: &str = "SELECT count(*) FROM __diesel_schema_migrations";

fn many_processes_may_migrate_at_once(engine: Engine) {
    let mut children: Vec<Child> = (0..AT_ONCE)
        .map(|_| Child::spawn("schema::migrate", &[]))
        .collect();
    for _ in 0..ROUNDS {
        let database = Database::create(engine);
        for child in &mut children {
            child.tell(database.url());
        }
        for child in &mut children {
            assert_eq!(child.hear(), "Ok(())", "{engine}");
        }
        assert_migrated(&database);
    }
}

/// Migrates each database that it is told of.
pub(crate) fn migrate(role: &Role) {
    loop {
        let url = role.hear();
        let leases = Leases::connect(&url).unwrap();
        role.say(&format!("{:?}", leases.migrate()));
    }
}

fn many_threads_may_migrate_at_once(engine: Engine) {
    for _ in 0..ROUNDS {
        let database = Database::create(engine);
        let barrier = Barrier::new(AT_ONCE);
        thread::scope(|scope| {
            for _ in 0..AT_ONCE {
                scope.spawn(|| {
                    let leases = Leases::connect(database.url()).unwrap();
                    barrier.wait();
                    leases.migrate().unwrap();
                });
            }
        });
        assert_migrated(&database);
    }
}

fn assert_migrated(database: &Database) {
    let mut raw = database.connect();
    assert_eq!(raw.one_i64(COUNT_MIGRATIONS), 1);
    assert_eq!(raw.one_i64("SELECT count(*) FROM diesel_leases"), 0);
    Leases::connect(database.url())
        .unwrap()
        .available()
        .unwrap();
}

fn migrating_again_changes_nothing(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    leases.migrate().unwrap();
    let lease = leases.claim("name").unwrap();
    let mut raw = database.connect();
    let row = raw.row("name");
    leases.migrate().unwrap();
    Leases::connect(database.url()).unwrap().migrate().unwrap();
    assert_eq!(raw.row("name"), row);
    assert_eq!(raw.one_i64(COUNT_MIGRATIONS), 1);
    lease.verify().unwrap();
    lease.release().unwrap();
}

/// A column as the schema has it and as a catalogue does.
#[derive(Debug, PartialEq)]
struct Described {
    name: String,
    is_text: bool,
    is_nullable: bool,
}

fn the_table_is_as_the_schema_has_it(engine: Engine) {
    fn described<C>(_: C) -> Described
    where
        C: Column,
        C::SqlType: SqlType,
    {
        let of = TypeId::of::<C::SqlType>();
        assert!(of == TypeId::of::<Text>() || of == TypeId::of::<BigInt>());
        let null = TypeId::of::<<C::SqlType as SqlType>::IsNull>();
        Described {
            name: C::NAME.to_owned(),
            is_text: of == TypeId::of::<Text>(),
            is_nullable: null == TypeId::of::<is_nullable::IsNullable>(),
        }
    }
    let (a, b, c, d, e, f, g, h) = diesel_leases::all_columns;
    let schema = [
        described(a),
        described(b),
        described(c),
        described(d),
        described(e),
        described(f),
        described(g),
        described(h),
    ];
    let key = described(diesel_leases::table.primary_key());

    let database = Database::create(engine);
    Leases::connect(database.url()).unwrap().migrate().unwrap();
    let mut raw = database.connect();
    let catalogue: Vec<Described> = columns(engine, &mut raw)
        .into_iter()
        .map(|[name, of, null]| Described {
            name,
            is_text: match of.to_lowercase().as_str() {
                "text" | "character varying" | "varchar" | "varbinary" => true,
                "bigint" => false,
                other => panic!("a column of type {other}"),
            },
            is_nullable: null == "YES",
        })
        .collect();
    assert_eq!(catalogue, schema);
    assert_eq!(primary_key(engine, &mut raw), [key.name]);

    // What an application leaves out is nothing.
    raw.execute("INSERT INTO diesel_leases (name) VALUES ('bare')");
    let row = raw.row("bare").unwrap();
    assert_eq!(
        (row.holder.as_str(), row.instance.as_str(), row.term),
        ("", "", 0)
    );
    assert_eq!(
        [
            row.expires_at_ms,
            row.slot_ms,
            row.unfinished_slot_ms,
            row.rerun_slot_ms
        ],
        [0; 4]
    );
}

/// Name, type and whether it may be null, in the order of the table.
fn columns(engine: Engine, raw: &mut Raw) -> Vec<[String; 3]> {
    let ask = |of: &str, at: usize| match engine {
        Engine::Sqlite => format!(
            "SELECT {} FROM pragma_table_info('diesel_leases') WHERE cid = {}",
            match of {
                "column_name" => "name",
                "data_type" => "type",
                _ => "CASE \"notnull\" WHEN 0 THEN 'YES' ELSE 'NO' END",
            },
            at - 1
        ),
        Engine::Postgres => format!(
            "SELECT {of}::text FROM information_schema.columns \
             WHERE table_name = 'diesel_leases' AND ordinal_position = {at}"
        ),
        _ => format!(
            "SELECT {of} FROM information_schema.columns WHERE table_schema = DATABASE() \
             AND table_name = 'diesel_leases' AND ordinal_position = {at}"
        ),
    };
    (1..)
        .map_while(|at| {
            let name = raw.maybe_text(&ask("column_name", at))?;
            let rest = ["data_type", "is_nullable"].map(|of| raw.one_text(&ask(of, at)));
            let [of, null] = rest;
            Some([name, of, null])
        })
        .collect()
}

fn primary_key(engine: Engine, raw: &mut Raw) -> Vec<String> {
    let ask = |at: usize| match engine {
        Engine::Sqlite => {
            format!("SELECT name FROM pragma_table_info('diesel_leases') WHERE pk = {at}")
        }
        Engine::Postgres => format!(
            "SELECT a.attname::text FROM pg_index i JOIN pg_attribute a \
             ON a.attrelid = i.indrelid AND a.attnum = i.indkey[{}] \
             WHERE i.indrelid = 'diesel_leases'::regclass AND i.indisprimary",
            at - 1
        ),
        _ => format!(
            "SELECT column_name FROM information_schema.statistics WHERE table_schema = DATABASE() \
             AND table_name = 'diesel_leases' AND index_name = 'PRIMARY' AND seq_in_index = {at}"
        ),
    };
    (1..).map_while(|at| raw.maybe_text(&ask(at))).collect()
}

/// The rule for names and the width of the columns cannot drift apart.
fn columns_hold_what_a_name_may_be(engine: Engine) {
    let database = Database::create(engine);
    Leases::connect(database.url()).unwrap().migrate().unwrap();
    let longest = "é".repeat(95) + "x";
    diesel_lease::validate_name(&longest).unwrap();
    diesel_lease::validate_name(&format!("{longest}x")).unwrap_err();
    let leases = Leases::builder()
        .instance(&longest)
        .build(database.url())
        .unwrap();
    let _lease = leases.claim(&longest).unwrap();
    let record = leases.inspect(&longest).unwrap().unwrap();
    assert_eq!(
        (record.name(), record.instance()),
        (longest.as_str(), longest.as_str())
    );
    let mut raw = database.connect();
    let width = |raw: &mut Raw, column: &str| match engine {
        Engine::Sqlite => None, // no width at all
        Engine::Postgres => raw.maybe_i64(&format!(
            "SELECT character_maximum_length::bigint FROM information_schema.columns \
             WHERE table_name = 'diesel_leases' AND column_name = '{column}'"
        )),
        _ => raw.maybe_i64(&format!(
            "SELECT CAST(character_maximum_length AS SIGNED) FROM information_schema.columns \
             WHERE table_schema = DATABASE() AND table_name = 'diesel_leases' \
             AND column_name = '{column}'"
        )),
    };
    for (column, wide) in [("name", 191), ("holder", 32), ("instance", 191)] {
        let expected = (engine != Engine::Sqlite).then_some(wide);
        assert_eq!(width(&mut raw, column), expected, "{column}");
    }
}

pub(crate) fn embedded(engine: Engine) -> EmbeddedMigrations {
    match engine {
        #[cfg(feature = "sqlite")]
        Engine::Sqlite => diesel_lease::migrations::SQLITE,
        #[cfg(feature = "postgres")]
        Engine::Postgres => diesel_lease::migrations::POSTGRES,
        #[cfg(feature = "mysql")]
        Engine::Mysql | Engine::Mariadb => diesel_lease::migrations::MYSQL,
        #[allow(
            unreachable_patterns,
            reason = "reached where an engine is not built in"
        )]
        _ => panic!("this build of the tests has no {engine}"),
    }
}

fn down_undoes_up(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    let mut raw = database.connect();
    for _ in 0..2 {
        raw.connection
            .run_pending_migrations(embedded(engine))
            .unwrap();
        // The application has run them, so there is nothing left to do but the WAL mode.
        leases.migrate().unwrap();
        assert_eq!(raw.one_i64(COUNT_MIGRATIONS), 1);
        leases.available().unwrap();
        leases.claim("name").unwrap().release().unwrap();
        raw.connection
            .revert_last_migration(embedded(engine))
            .unwrap();
        assert_eq!(raw.one_i64(COUNT_MIGRATIONS), 0);
        assert!(matches!(leases.available(), Err(Error::SchemaMissing)));
    }
    leases.migrate().unwrap();
    assert_eq!(leases.claim("name").unwrap().term(), 1);
}

fn migrations_stand_beside_the_applications_own(engine: Engine) {
    let folder = tempfile::tempdir().unwrap();
    let migration = |version: &str, up: &str, down: &str| {
        let folder = folder.path().join(format!("{version}_own"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("up.sql"), up).unwrap();
        fs::write(folder.join("down.sql"), down).unwrap();
    };
    let own = |path: &Path| FileBasedMigrations::from_path(path).unwrap();
    let run = |raw: &mut Raw| {
        let own = own(folder.path());
        raw.connection.run_pending_migrations(own).unwrap().len()
    };
    // One sorts before the library's, one after.
    migration(
        "2001-01-01-000000",
        "CREATE TABLE early (id BIGINT);",
        "DROP TABLE early;",
    );
    let [application_first, library_first] = [true, false].map(|first| {
        let database = Database::create(engine);
        let leases = Leases::connect(database.url()).unwrap();
        let mut raw = database.connect();
        if first {
            assert_eq!(run(&mut raw), 1);
            leases.migrate().unwrap();
        } else {
            leases.migrate().unwrap();
            assert_eq!(run(&mut raw), 1);
        }
        (database, leases, raw)
    });
    migration(
        "2999-01-01-000000",
        "CREATE TABLE late (id BIGINT);",
        "DROP TABLE late;",
    );
    for (_database, leases, mut raw) in [application_first, library_first] {
        let lease = leases.claim("name").unwrap();
        assert_eq!(run(&mut raw), 1);
        assert_eq!(run(&mut raw), 0);
        leases.migrate().unwrap();
        assert_eq!(raw.one_i64(COUNT_MIGRATIONS), 3);
        // The latest is the application's, so it can be reverted; then the library's is.
        let own = || own(folder.path());
        raw.connection.revert_last_migration(own()).unwrap();
        raw.connection.revert_last_migration(own()).unwrap_err();
        assert_eq!(raw.one_i64(COUNT_MIGRATIONS), 2);
        lease.verify().unwrap();
        lease.release().unwrap();
    }
}

fn a_missing_table_is_told_and_not_remembered(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    let mut raw = database.connect();
    let mut old: Vec<Lease> = Vec::new();
    for _ in 0..2 {
        let answers = [
            leases.try_claim("name").map(drop),
            leases.claim("name").map(drop),
            leases.claim_timeout("name", crate::support::LONG).map(drop),
            leases.inspect("name").map(drop),
            leases.list().map(drop),
            leases.force_release("name").map(drop),
            leases.available(),
        ];
        let of_old = old
            .drain(..)
            .flat_map(|lease| [lease.renew(), lease.verify(), lease.release()]);
        for (at, answer) in answers.into_iter().chain(of_old).enumerate() {
            let error = answer.unwrap_err();
            assert!(matches!(error, Error::SchemaMissing), "{at}: {error:?}");
            assert!(!error.is_transient() && !error.is_lost());
        }
        Leases::connect(database.url()).unwrap().migrate().unwrap();
        let lease = leases.try_claim("name").unwrap().expect("a free name");
        assert_eq!(lease.term(), 1);
        assert!(leases.try_claim("name").unwrap().is_none());
        lease.renew().unwrap();
        lease.verify().unwrap();
        old.push(lease);
        // And again with statements that are prepared.
        raw.batch("DROP TABLE diesel_leases; DELETE FROM __diesel_schema_migrations");
    }
}

/// The default of a PostgreSQL database cannot fold, and SQLite has none.
fn names_are_compared_by_bytes_whatever_the_database_default(engine: Engine) {
    for charset in ["utf8mb4", "latin1", "ascii"] {
        let database = Database::create(engine);
        if engine.is_mysql_like() {
            let name = database.name();
            database.admin().batch(&format!(
                "ALTER DATABASE {name} CHARACTER SET {charset} COLLATE {charset}_general_ci"
            ));
        }
        let leases = Leases::connect(database.url()).unwrap();
        leases.migrate().unwrap();
        leases.available().unwrap();
        let names = ["job", "Job", "jób", "JOB", "名前"];
        let held = names.map(|name| leases.try_claim(name).unwrap().expect("a free name"));
        for lease in &held {
            assert_eq!(lease.term(), 1, "{}", lease.name());
            assert!(leases.try_claim(lease.name()).unwrap().is_none());
            lease.verify().unwrap();
        }
        assert_eq!(leases.list().unwrap().len(), names.len());
    }
}

#[cfg(feature = "sqlite")]
#[test]
fn a_sqlite_file_ends_in_wal_mode() {
    let database = Database::create(Engine::Sqlite);
    let leases = Leases::connect(database.url()).unwrap();
    let mut raw = database.connect();
    // Also when the table is there, and while somebody writes.
    raw.connection
        .run_pending_migrations(embedded(Engine::Sqlite))
        .unwrap();
    assert_eq!(raw.one_text("PRAGMA journal_mode"), "delete");
    raw.batch("BEGIN IMMEDIATE");
    assert_eq!(raw.one_i64("SELECT count(*) FROM diesel_leases"), 0);
    thread::scope(|scope| {
        let migrating = scope.spawn(|| leases.migrate());
        thread::sleep(std::time::Duration::from_millis(200));
        raw.batch("COMMIT");
        migrating.join().unwrap().unwrap();
    });
    // A session sees that when it next reads.
    assert_eq!(raw.one_i64("SELECT count(*) FROM diesel_leases"), 0);
    assert_eq!(raw.one_text("PRAGMA journal_mode"), "wal");
    drop((leases, raw));
    let mut later = database.connect();
    assert_eq!(later.one_text("PRAGMA journal_mode"), "wal");
}
