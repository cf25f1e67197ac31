//! What `available` says of a database that can carry leases, and of each kind that cannot.

use diesel_lease::locks::{LockError, NamedLocks};
use diesel_lease::{Error, Leases, Unsupported};

use crate::support::database::Database;
use crate::support::servers::OwnServer;
use crate::support::{Engine, engines};

engines! {
    fn a_database_is_ready_once_it_is_migrated,
    fn every_flaw_of_the_table_is_named,
    fn what_does_no_harm_is_let_pass;
    servers: fn a_server_that_takes_no_writes_is_refused,
}

/// What is done to a migrated database, and whether a reason is the right one for it.
type Flaw = (&'static str, fn(&Unsupported) -> bool);

macro_rules! flaws {
    ($($sql:expr => $pattern:pat),* $(,)?) => {
        &[$(($sql, |reason| matches!(reason, $pattern))),*]
    };
}

fn a_database_is_ready_once_it_is_migrated(engine: Engine) {
    let database = Database::create(engine);
    let leases = leases(database.url());
    assert!(matches!(leases.available(), Err(Error::SchemaMissing)));
    leases.migrate().unwrap();
    leases.available().unwrap();
    database.connect().batch("DROP TABLE diesel_leases");
    assert!(matches!(leases.available(), Err(Error::SchemaMissing)));
}

fn every_flaw_of_the_table_is_named(engine: Engine) {
    let flaws = match engine {
        Engine::Postgres => POSTGRES_FLAWS,
        Engine::Mysql | Engine::Mariadb => MYSQL_FLAWS,
        Engine::Sqlite => SQLITE_FLAWS,
    };
    for (sql, is_named) in flaws {
        let database = altered(engine, sql);
        let answer = leases(database.url()).available();
        match &answer {
            Err(Error::Unsupported(reason)) if is_named(reason) => {}
            _ => panic!("{engine:?}, {sql}: {answer:?}"),
        }
    }
}

fn what_does_no_harm_is_let_pass(engine: Engine) {
    let changes = match engine {
        Engine::Postgres => POSTGRES_HARMLESS,
        Engine::Mysql | Engine::Mariadb => MYSQL_HARMLESS,
        Engine::Sqlite => SQLITE_HARMLESS,
    };
    for sql in changes {
        let database = altered(engine, sql);
        let answer = leases(database.url()).available();
        assert!(answer.is_ok(), "{engine:?}, {sql}: {answer:?}");
    }
}

const POSTGRES_FLAWS: &[Flaw] = flaws! {
    "ALTER TABLE diesel_leases RENAME term TO terms"
        => Unsupported::ColumnMissing { column: "term" },
    "ALTER TABLE diesel_leases ALTER name TYPE varchar(190)"
        => Unsupported::ColumnTooNarrow { column: "name", needed: 191, .. },
    "ALTER TABLE diesel_leases ALTER holder TYPE varchar(31)"
        => Unsupported::ColumnTooNarrow { column: "holder", needed: 32, .. },
    "ALTER TABLE diesel_leases ALTER instance TYPE varchar(32)"
        => Unsupported::ColumnTooNarrow { column: "instance", needed: 191, .. },
    // Trailing blanks do not count in it.
    "ALTER TABLE diesel_leases ALTER name TYPE char(191)"
        => Unsupported::ColumnType { column: "name", .. },
    "CREATE EXTENSION citext; ALTER TABLE diesel_leases ALTER name TYPE citext"
        => Unsupported::ColumnType { column: "name", .. },
    "ALTER TABLE diesel_leases ALTER slot_ms TYPE integer"
        => Unsupported::ColumnType { column: "slot_ms", .. },
    "ALTER TABLE diesel_leases ALTER rerun_slot_ms DROP NOT NULL"
        => Unsupported::ColumnNullable { column: "rerun_slot_ms" },
    "CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level1', deterministic = false); \
     ALTER TABLE diesel_leases ALTER name TYPE varchar(191) COLLATE blind"
        => Unsupported::NameCollation { .. },
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_pkey"
        => Unsupported::PrimaryKey { .. },
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_pkey, ADD PRIMARY KEY (name, term)"
        => Unsupported::PrimaryKey { .. },
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_pkey, ADD PRIMARY KEY (name) DEFERRABLE"
        => Unsupported::PrimaryKey { .. },
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_name_holder_key"
        => Unsupported::FenceIndex,
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_name_holder_key; \
     CREATE INDEX ON diesel_leases (name, holder)"
        => Unsupported::FenceIndex,
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_name_holder_key; \
     CREATE UNIQUE INDEX ON diesel_leases (name, holder) WHERE term > 0"
        => Unsupported::FenceIndex,
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_name_holder_key; \
     CREATE UNIQUE INDEX ON diesel_leases (name, lower(holder))"
        => Unsupported::FenceIndex,
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_name_holder_key; \
     CREATE UNIQUE INDEX ON diesel_leases (name, holder, lower(instance))"
        => Unsupported::FenceIndex,
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_name_holder_key; \
     CREATE UNIQUE INDEX ON diesel_leases (name) INCLUDE (holder)"
        => Unsupported::FenceIndex,
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_name_holder_key, \
     ADD UNIQUE (name, holder) DEFERRABLE"
        => Unsupported::FenceIndex,
    "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'diesel_leases_name_holder_key'::regclass"
        => Unsupported::FenceIndex,
    "ALTER TABLE diesel_leases SET UNLOGGED"
        => Unsupported::Unlogged,
    "ALTER TABLE diesel_leases RENAME TO kept; CREATE VIEW diesel_leases AS TABLE kept"
        => Unsupported::NotATable { .. },
    // Found first, because of the search path.
    "CREATE SCHEMA other; CREATE VIEW other.diesel_leases AS TABLE public.diesel_leases; \
     GRANT USAGE ON SCHEMA other TO PUBLIC; \
     DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = other, public', current_database()); END $$"
        => Unsupported::NotATable { .. },
    "ALTER TABLE diesel_leases RENAME TO kept; \
     CREATE TABLE diesel_leases (LIKE kept INCLUDING INDEXES) PARTITION BY HASH (name)"
        => Unsupported::NotATable { .. },
    "ALTER TABLE diesel_leases RENAME TO kept; \
     CREATE FOREIGN DATA WRAPPER elsewhere; CREATE SERVER elsewhere FOREIGN DATA WRAPPER elsewhere; \
     CREATE FOREIGN TABLE diesel_leases (name text) SERVER elsewhere"
        => Unsupported::NotATable { .. },
    "INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) VALUES (1, 'diesel_leases'::regclass, 'r')"
        => Unsupported::Replica { .. },
};

const POSTGRES_HARMLESS: &[&str] = &[
    "ALTER TABLE diesel_leases ALTER name TYPE text",
    "ALTER TABLE diesel_leases ALTER name TYPE varchar COLLATE \"default\"",
    "ALTER TABLE diesel_leases ADD note text, DROP CONSTRAINT diesel_leases_pkey, ADD PRIMARY KEY (name) INCLUDE (term)",
    "ALTER TABLE diesel_leases DROP CONSTRAINT diesel_leases_name_holder_key, ADD UNIQUE (holder, name) INCLUDE (term)",
    // In another schema than the one it was made in.
    "CREATE SCHEMA other; ALTER TABLE diesel_leases SET SCHEMA other; GRANT USAGE ON SCHEMA other TO PUBLIC; \
     DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = other', current_database()); END $$",
];

const MYSQL_FLAWS: &[Flaw] = flaws! {
    "ALTER TABLE diesel_leases CHANGE term terms BIGINT NOT NULL"
        => Unsupported::ColumnMissing { column: "term" },
    "ALTER TABLE diesel_leases MODIFY name VARBINARY(190)"
        => Unsupported::ColumnTooNarrow { column: "name", needed: 191, .. },
    "ALTER TABLE diesel_leases MODIFY holder VARCHAR(31) NOT NULL"
        => Unsupported::ColumnTooNarrow { column: "holder", needed: 32, .. },
    "ALTER TABLE diesel_leases MODIFY instance VARCHAR(32) NOT NULL"
        => Unsupported::ColumnTooNarrow { column: "instance", needed: 191, .. },
    // It is filled up with zero bytes.
    "ALTER TABLE diesel_leases MODIFY name BINARY(191)"
        => Unsupported::ColumnType { column: "name", .. },
    "ALTER TABLE diesel_leases MODIFY expires_at_ms INT NOT NULL"
        => Unsupported::ColumnType { column: "expires_at_ms", .. },
    "ALTER TABLE diesel_leases MODIFY expires_at_ms BIGINT UNSIGNED NOT NULL"
        => Unsupported::ColumnType { column: "expires_at_ms", .. },
    "ALTER TABLE diesel_leases MODIFY slot_ms BIGINT NULL"
        => Unsupported::ColumnNullable { column: "slot_ms" },
    "ALTER TABLE diesel_leases MODIFY name VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
        => Unsupported::NameCollation { .. },
    // Even this one leaves out trailing blanks.
    "ALTER TABLE diesel_leases MODIFY name VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        => Unsupported::NameCollation { .. },
    "ALTER TABLE diesel_leases DROP PRIMARY KEY"
        => Unsupported::PrimaryKey { .. },
    // Shown as the primary key by DESCRIBE.
    "ALTER TABLE diesel_leases DROP PRIMARY KEY, ADD UNIQUE (name)"
        => Unsupported::PrimaryKey { .. },
    "ALTER TABLE diesel_leases DROP PRIMARY KEY, ADD PRIMARY KEY (name, term)"
        => Unsupported::PrimaryKey { .. },
    "ALTER TABLE diesel_leases DROP PRIMARY KEY, ADD PRIMARY KEY (name(20))"
        => Unsupported::PrimaryKey { .. },
    "ALTER TABLE diesel_leases ENGINE = MyISAM"
        => Unsupported::Engine { .. },
    "ALTER TABLE diesel_leases ENGINE = MEMORY"
        => Unsupported::Engine { .. },
    "RENAME TABLE diesel_leases TO kept; CREATE VIEW diesel_leases AS SELECT * FROM kept"
        => Unsupported::NotATable { .. },
};

const MYSQL_HARMLESS: &[&str] = &[
    "ALTER TABLE diesel_leases MODIFY name VARBINARY(255)",
    "ALTER TABLE diesel_leases MODIFY holder CHAR(32) NOT NULL, MODIFY instance TEXT NOT NULL, ADD note TEXT",
    "ALTER TABLE diesel_leases PARTITION BY KEY (name) PARTITIONS 3",
];

const SQLITE_FLAWS: &[Flaw] = flaws! {
    "ALTER TABLE diesel_leases RENAME term TO terms"
        => Unsupported::ColumnMissing { column: "term" },
    "DROP TABLE diesel_leases; CREATE TABLE diesel_leases (name BLOB PRIMARY KEY, holder TEXT NOT NULL)"
        => Unsupported::ColumnType { column: "name", .. },
    "DROP TABLE diesel_leases; CREATE TABLE diesel_leases (name INTEGER PRIMARY KEY, holder TEXT NOT NULL)"
        => Unsupported::ColumnType { column: "name", .. },
    "DROP TABLE diesel_leases; CREATE TABLE diesel_leases (name TEXT COLLATE NOCASE PRIMARY KEY)"
        => Unsupported::NameCollation { .. },
    "DROP TABLE diesel_leases; \
     CREATE TABLE diesel_leases (name TEXT NOT NULL, PRIMARY KEY (name COLLATE RTRIM)) WITHOUT ROWID"
        => Unsupported::NameCollation { .. },
    "DROP TABLE diesel_leases; CREATE TABLE diesel_leases (name TEXT PRIMARY KEY, holder TEXT)"
        => Unsupported::ColumnNullable { column: "holder" },
    "CREATE TABLE made AS SELECT * FROM diesel_leases; DROP TABLE diesel_leases; ALTER TABLE made RENAME TO diesel_leases"
        => Unsupported::ColumnNullable { .. },
    "DROP TABLE diesel_leases; CREATE TABLE diesel_leases (name TEXT UNIQUE, holder TEXT NOT NULL, \
     instance TEXT NOT NULL, term BIGINT NOT NULL, expires_at_ms BIGINT NOT NULL, slot_ms BIGINT NOT NULL, \
     unfinished_slot_ms BIGINT NOT NULL, rerun_slot_ms BIGINT NOT NULL)"
        => Unsupported::PrimaryKey { .. },
    "DROP TABLE diesel_leases; CREATE TABLE diesel_leases (name TEXT, holder TEXT NOT NULL, \
     instance TEXT NOT NULL, term BIGINT NOT NULL, expires_at_ms BIGINT NOT NULL, slot_ms BIGINT NOT NULL, \
     unfinished_slot_ms BIGINT NOT NULL, rerun_slot_ms BIGINT NOT NULL, PRIMARY KEY (name, holder))"
        => Unsupported::PrimaryKey { .. },
    "ALTER TABLE diesel_leases RENAME TO kept; CREATE VIEW diesel_leases AS SELECT * FROM kept"
        => Unsupported::NotATable { .. },
    "PRAGMA journal_mode = DELETE"
        => Unsupported::JournalMode { .. },
};

const SQLITE_HARMLESS: &[&str] = &[
    "ALTER TABLE diesel_leases RENAME TO made; ALTER TABLE made RENAME TO Diesel_Leases",
    "DROP TABLE diesel_leases; CREATE TABLE diesel_leases (NAME TEXT PRIMARY KEY COLLATE binary, holder TEXT NOT NULL, \
     instance TEXT NOT NULL, term INTEGER NOT NULL, expires_at_ms INTEGER NOT NULL, slot_ms INT NOT NULL DEFAULT 0, \
     unfinished_slot_ms INT NOT NULL DEFAULT 0, rerun_slot_ms INT NOT NULL DEFAULT 0) STRICT, WITHOUT ROWID",
    "DROP TABLE diesel_leases; CREATE TABLE diesel_leases (name TEXT PRIMARY KEY, holder VARCHAR(32) NOT NULL, \
     instance TEXT NOT NULL, term INTEGER NOT NULL, expires_at_ms INTEGER NOT NULL, slot_ms INT NOT NULL DEFAULT 0, \
     unfinished_slot_ms INT NOT NULL DEFAULT 0, rerun_slot_ms INT NOT NULL DEFAULT 0)",
];

fn a_server_that_takes_no_writes_is_refused(engine: Engine) {
    let server = OwnServer::take(engine);
    let settings: &[[&str; 2]] = match engine {
        Engine::Postgres => &[[
            "ALTER ROLE lease SET default_transaction_read_only = on",
            "ALTER ROLE lease RESET default_transaction_read_only",
        ]],
        Engine::Mysql => &[
            ["SET GLOBAL read_only = 1", "SET GLOBAL read_only = 0"],
            ["SET GLOBAL super_read_only = 1", "SET GLOBAL read_only = 0"],
            [
                "SET GLOBAL transaction_read_only = 1",
                "SET GLOBAL transaction_read_only = 0",
            ],
        ],
        Engine::Mariadb => &[
            ["SET GLOBAL read_only = 1", "SET GLOBAL read_only = 0"],
            ["SET GLOBAL tx_read_only = 1", "SET GLOBAL tx_read_only = 0"],
        ],
        Engine::Sqlite => unreachable!(),
    };
    let database = Database::on(&server);
    leases(database.url()).migrate().unwrap();
    for [change, undo] in settings {
        server.configure(change, undo);
        let answer = leases(database.url()).available();
        assert!(
            matches!(
                &answer,
                Err(Error::Unsupported(Unsupported::ReadOnly { .. }))
            ),
            "{change}: {answer:?}"
        );
        server.admin().batch(undo);
        leases(database.url()).available().unwrap();
    }
}

#[cfg(feature = "mysql")]
mod clusters {
    use super::*;

    #[test]
    fn a_group_with_several_primaries_is_refused() {
        let server = OwnServer::take(Engine::Mysql);
        let database = Database::on(&server);
        leases(database.url()).migrate().unwrap();
        server.configure(
            "INSTALL PLUGIN group_replication SONAME 'group_replication.so'",
            "UNINSTALL PLUGIN group_replication",
        );
        leases(database.url()).available().unwrap();
        server
            .admin()
            .batch("SET GLOBAL group_replication_single_primary_mode = OFF");
        let answer = leases(database.url()).available();
        assert!(
            matches!(answer, Err(Error::Unsupported(Unsupported::MultiPrimary))),
            "{answer:?}"
        );
    }

    #[test]
    #[ignore = "needs a node of a Galera cluster: DIESEL_LEASE_GALERA_1_URL"]
    fn a_node_of_galera_is_refused() {
        let url = std::env::var("DIESEL_LEASE_GALERA_1_URL").expect("DIESEL_LEASE_GALERA_1_URL");
        let answer = leases(&url).available();
        assert!(
            matches!(answer, Err(Error::Unsupported(Unsupported::Galera))),
            "{answer:?}"
        );
        // Its locks are a node's.
        let locks = NamedLocks::connect(&url).expect("a URL");
        let refused = locks.try_acquire("k");
        assert!(
            matches!(&refused, Err(LockError::Unsupported(why)) if matches!(**why, Unsupported::Galera)),
            "{refused:?}"
        );
    }
}

#[cfg(feature = "sqlite")]
mod files {
    use super::*;

    #[test]
    fn a_database_that_is_no_file_is_refused() {
        for url in [
            ":memory:",
            "",
            "sqlite://",
            "sqlite://:memory:",
            "file::memory:?cache=shared",
            "file:x?mode=memory",
        ] {
            let answer = Leases::connect(url).and_then(|leases| leases.available());
            assert!(
                matches!(answer, Err(Error::Unsupported(Unsupported::InMemory))),
                "{url:?}: {answer:?}"
            );
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_to_is_refused() {
        let database = Database::create(Engine::Sqlite);
        leases(database.url()).migrate().unwrap();
        let answer = leases(&format!("file:{}?mode=ro", database.url())).available();
        assert!(
            matches!(
                answer,
                Err(Error::Unsupported(Unsupported::ReadOnly { .. }))
            ),
            "{answer:?}"
        );
    }
}

/// A migrated database to which something was done, by somebody who may do anything there.
fn altered(engine: Engine, sql: &str) -> Database {
    let database = Database::create(engine);
    leases(database.url()).migrate().unwrap();
    database.admin().batch(sql);
    database
}

fn leases(url: &str) -> Leases {
    Leases::connect(url).unwrap()
}
