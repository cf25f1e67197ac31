//! What MySQL and MariaDB say of themselves and of the table.
//!
//! Everything is asked so that a user who may only use its own database is answered too, with one
//! exception: MySQL tells only those who may read `performance_schema.replication_connection_status`
//! that it replicates from elsewhere.

use diesel::connection::LoadConnection;
use diesel::dsl::sql;
use diesel::mysql::{Mysql, MysqlConnection};
use diesel::prelude::*;
use diesel::sql_query;
use diesel::sql_types::{BigInt, Nullable, Text};

use super::{Column, Kind, Verdict};
use crate::unsupported::Unsupported;

/// [`TABLES`](https://dev.mysql.com/doc/refman/9.4/en/information-schema-tables-table.html) leaves
/// out temporary tables. A library session makes none.
const HAS_TABLE: &str = "EXISTS (SELECT 1 FROM information_schema.TABLES \
    WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'diesel_leases')";

/// [`SHOW VARIABLES`](https://dev.mysql.com/doc/refman/9.4/en/show-variables.html) needs no
/// privilege and leaves out what this server does not have. The session's value is what counts
/// for `transaction_read_only`; the others have none of their own, or we leave them alone.
const VARIABLES: &str = "SHOW VARIABLES WHERE Variable_name IN \
    ('wsrep_on', 'group_replication_single_primary_mode', 'read_only', 'super_read_only', \
    'innodb_read_only', 'transaction_read_only', 'tx_read_only')";

/// How many replication connections run, on
/// [MariaDB](https://mariadb.com/docs/server/ha-and-performance/standard-replication/replication-and-binary-log-status-variables#slaves_running).
const SLAVES_RUNNING: &str = "SHOW GLOBAL STATUS LIKE 'Slaves_running'";

/// The same on
/// [MySQL](https://dev.mysql.com/doc/refman/9.4/en/performance-schema-replication-connection-status-table.html);
/// the channels of Group Replication run on its primary too.
const CHANNELS_RUNNING: &str = "(SELECT COUNT(*) FROM performance_schema.replication_connection_status \
    WHERE SERVICE_STATE = 'ON' AND CHANNEL_NAME NOT LIKE 'group_replication_%')";

/// [`STATISTICS`](https://dev.mysql.com/doc/refman/9.4/en/information-schema-statistics-table.html):
/// `SUB_PART` is the length of a prefix, if not the whole column is in the index.
const TABLE: &str = "SELECT TABLE_TYPE AS kind, ENGINE AS engine, \
    (SELECT GROUP_CONCAT(LOWER(COLUMN_NAME), IFNULL(CONCAT('(', SUB_PART, ')'), '') \
        ORDER BY SEQ_IN_INDEX SEPARATOR ', ') FROM information_schema.STATISTICS \
        WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'diesel_leases' AND INDEX_NAME = 'PRIMARY') \
    AS primary_key \
    FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'diesel_leases'";

/// [`COLUMNS`](https://dev.mysql.com/doc/refman/9.4/en/information-schema-columns-table.html).
const COLUMNS: &str = "SELECT LOWER(COLUMN_NAME) AS name, DATA_TYPE AS base, COLUMN_TYPE AS declared, \
    CHARACTER_MAXIMUM_LENGTH AS width, IS_NULLABLE AS nullable, COLLATION_NAME AS collation \
    FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'diesel_leases'";

#[derive(QueryableByName)]
struct Setting {
    #[diesel(sql_type = Text, column_name = "Variable_name")]
    name: String,
    #[diesel(sql_type = Text, column_name = "Value")]
    value: String,
}

#[derive(QueryableByName)]
struct Table {
    #[diesel(sql_type = Text)]
    kind: String,
    #[diesel(sql_type = Nullable<Text>)]
    engine: Option<String>,
    #[diesel(sql_type = Nullable<Text>)]
    primary_key: Option<String>,
}

#[derive(QueryableByName)]
struct Described {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    base: String,
    #[diesel(sql_type = Text)]
    declared: String,
    #[diesel(sql_type = Nullable<BigInt>)]
    width: Option<i64>,
    #[diesel(sql_type = Text)]
    nullable: String,
    #[diesel(sql_type = Nullable<Text>)]
    collation: Option<String>,
}

/// Whether there is a table or view by the name of the lease table in the session's database.
pub(crate) fn has_table<C: LoadConnection<Backend = Mysql>>(conn: &mut C) -> QueryResult<bool> {
    Ok(diesel::select(sql::<BigInt>(HAS_TABLE)).get_result::<i64>(conn)? != 0)
}

/// Why this server is none to write to, or not the only one.
pub(crate) fn server(conn: &mut MysqlConnection) -> QueryResult<Option<Unsupported>> {
    let settings: Vec<Setting> = sql_query(VARIABLES).load(conn)?;
    if let Some(reason) = settings.into_iter().find_map(forbids) {
        return Ok(Some(reason));
    }
    let found = "it replicates from another server";
    Ok(replicates(conn)?.then_some(Unsupported::Replica { found }))
}

/// Whether this database can carry leases.
pub(crate) fn check(conn: &mut MysqlConnection) -> QueryResult<Verdict> {
    if let Some(reason) = server(conn)? {
        return Ok(Verdict::Unsupported(reason));
    }
    let Some(table) = sql_query(TABLE).get_result::<Table>(conn).optional()? else {
        return Ok(Verdict::SchemaMissing);
    };
    if table.kind != "BASE TABLE" {
        return Ok(Some(Unsupported::NotATable {
            found: format!("of type {}", table.kind),
        })
        .into());
    }
    let described: Vec<Described> = sql_query(COLUMNS).load(conn)?;
    let described: Vec<Column> = described.into_iter().map(Column::from).collect();
    Ok(super::columns(&described).or_else(|| storage(table)).into())
}

/// A group may be told to have several primaries before it is started, so the setting counts, not
/// whether a group runs. [`read_only`](https://mariadb.com/docs/server/server-management/variables-and-modes/server-system-variables#read_only)
/// has more values than `ON` in new versions of MariaDB.
fn forbids(setting: Setting) -> Option<Unsupported> {
    let off = setting.value == "OFF";
    match setting.name.as_str() {
        "wsrep_on" => (!off).then_some(Unsupported::Galera),
        "group_replication_single_primary_mode" => off.then_some(Unsupported::MultiPrimary),
        name => (!off).then(|| Unsupported::ReadOnly {
            found: format!("{name} is {}", setting.value),
        }),
    }
}

/// A replica that can be written to would grant what its source grants too. A source that
/// replicates from its own standby cannot be told from it and is refused as well.
fn replicates(conn: &mut MysqlConnection) -> QueryResult<bool> {
    if let Some(running) = sql_query(SLAVES_RUNNING)
        .get_result::<Setting>(conn)
        .optional()?
    {
        return Ok(running.value != "0");
    }
    // Ordinary users are refused this one; then it is not known, and the rest is asked.
    let running = diesel::select(sql::<BigInt>(CHANNELS_RUNNING)).get_result::<i64>(conn);
    Ok(running.is_ok_and(|running| running > 0))
}

fn storage(table: Table) -> Option<Unsupported> {
    match (table.engine, table.primary_key) {
        (Some(engine), Some(key)) if engine == "InnoDB" && key == "name" => None,
        (Some(engine), key) if engine == "InnoDB" => Some(Unsupported::PrimaryKey {
            found: key.map_or_else(|| "missing".into(), |key| format!("({key})")),
        }),
        (engine, _) => Some(Unsupported::Engine {
            found: engine.unwrap_or_else(|| "nothing".into()),
        }),
    }
}

impl From<Described> for Column {
    fn from(found: Described) -> Self {
        Self {
            kind: match found.base.as_str() {
                // BINARY is left out: it pads with zero bytes.
                "char" | "varchar" | "tinytext" | "text" | "mediumtext" | "longtext"
                | "varbinary" => Kind::Text { width: found.width },
                // An unsigned one fails when a later time is taken from an earlier one.
                "bigint" if !found.declared.contains("unsigned") => Kind::Integer,
                _ => Kind::Other,
            },
            name: found.name,
            declared: found.declared,
            nullable: found.nullable == "YES",
            // Nearly all of them fold something, and which ones do not is not written anywhere
            // on MariaDB: only no collation at all is certain.
            folding: found.collation,
        }
    }
}
