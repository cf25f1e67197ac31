//! What PostgreSQL says of itself and of the table. Version 12 or newer: older ones have no
//! `pg_collation.collisdeterministic` and answer with an error.
//!
//! All that is named here except the table is named with its schema, so that the session's
//! `search_path` decides about the table and about nothing else.

use diesel::connection::LoadConnection;
use diesel::dsl::sql;
use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::sql_query;
use diesel::sql_types::{Bool, Integer, Nullable, Oid, Text};

use super::{Column, Kind, Verdict};
use crate::unsupported::Unsupported;

/// [`to_regclass`](https://www.postgresql.org/docs/current/functions-info.html#FUNCTIONS-INFO-CATALOG)
/// finds what the name means in this session, be it a temporary table or a view.
const HAS_TABLE: &str = "pg_catalog.to_regclass('diesel_leases') IS NOT NULL";

/// [`pg_is_in_recovery`](https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-RECOVERY-CONTROL)
/// is true on every kind of standby.
/// [`transaction_read_only`](https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-TRANSACTION-READ-ONLY)
/// is what a role, a database or a server sets by default.
const SERVER: &str = "SELECT pg_catalog.pg_is_in_recovery() AS in_recovery, \
    pg_catalog.current_setting('transaction_read_only') = 'on' AS read_only";

/// A table in
/// [`pg_subscription_rel`](https://www.postgresql.org/docs/current/catalog-pg-subscription-rel.html)
/// receives the rows of another database. An index key (`indkey`, counted from 0) that is
/// deferrable cannot
/// [decide a conflict](https://www.postgresql.org/docs/current/sql-insert.html#SQL-ON-CONFLICT).
const TABLE: &str = "SELECT c.relkind::text AS kind, c.relpersistence::text AS persistence, \
    EXISTS (SELECT FROM pg_catalog.pg_subscription_rel AS s WHERE s.srrelid = c.oid) AS subscribed, \
    EXISTS (SELECT FROM pg_catalog.pg_index AS i \
        JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] \
        WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid AND i.indimmediate \
        AND i.indnkeyatts = 1 AND a.attname = 'name') AS keyed, \
    (SELECT pg_catalog.pg_get_constraintdef(p.oid) FROM pg_catalog.pg_constraint AS p \
        WHERE p.conrelid = c.oid AND p.contype = 'p') AS primary_key \
    FROM pg_catalog.pg_class AS c WHERE c.oid = pg_catalog.to_regclass('diesel_leases')";

/// Only a [non-deterministic collation](https://www.postgresql.org/docs/current/collation.html#COLLATION-NONDETERMINISTIC)
/// takes texts of different bytes for equal. A `varchar`'s modifier is its width and 4.
const COLUMNS: &str = "SELECT a.attname::text AS name, a.atttypid AS type_oid, \
    pg_catalog.format_type(a.atttypid, a.atttypmod) AS declared, \
    NULLIF(a.atttypmod, -1) - 4 AS width, NOT a.attnotnull AS nullable, \
    (SELECT o.collname::text FROM pg_catalog.pg_collation AS o \
        WHERE o.oid = a.attcollation AND NOT o.collisdeterministic) AS folding \
    FROM pg_catalog.pg_attribute AS a \
    WHERE a.attrelid = pg_catalog.to_regclass('diesel_leases') AND a.attnum > 0 AND NOT a.attisdropped";

/// [`pg_index`](https://www.postgresql.org/docs/current/catalog-pg-index.html): the columns of an
/// index are its keys first (`indnkeyatts` of them), then those that are only included.
const HAS_FENCE_INDEX: &str = "EXISTS (SELECT FROM pg_catalog.pg_index AS i \
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attname = 'holder' \
    WHERE i.indrelid = pg_catalog.to_regclass('diesel_leases') \
    AND i.indisunique AND i.indisvalid AND i.indisready AND i.indislive AND i.indimmediate \
    AND i.indpred IS NULL AND i.indexprs IS NULL \
    AND a.attnum = ANY ((i.indkey::pg_catalog.int2[])[0:i.indnkeyatts - 1]))";

// The numbers of these types are fixed: https://www.postgresql.org/docs/current/catalog-pg-type.html
const INT8: u32 = 20;
const TEXT: u32 = 25;
const VARCHAR: u32 = 1043;

#[derive(QueryableByName)]
struct Server {
    #[diesel(sql_type = Bool)]
    in_recovery: bool,
    #[diesel(sql_type = Bool)]
    read_only: bool,
}

#[derive(QueryableByName)]
struct Table {
    #[diesel(sql_type = Text)]
    kind: String,
    #[diesel(sql_type = Text)]
    persistence: String,
    #[diesel(sql_type = Bool)]
    subscribed: bool,
    #[diesel(sql_type = Bool)]
    keyed: bool,
    #[diesel(sql_type = Nullable<Text>)]
    primary_key: Option<String>,
}

#[derive(QueryableByName)]
struct Described {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Oid)]
    type_oid: u32,
    #[diesel(sql_type = Text)]
    declared: String,
    #[diesel(sql_type = Nullable<Integer>)]
    width: Option<i32>,
    #[diesel(sql_type = Bool)]
    nullable: bool,
    #[diesel(sql_type = Nullable<Text>)]
    folding: Option<String>,
}

/// Whether there is anything by the name of the lease table. Not in a transaction that has
/// failed: PostgreSQL answers nothing there.
pub(crate) fn has_table<C: LoadConnection<Backend = Pg>>(conn: &mut C) -> QueryResult<bool> {
    diesel::select(sql::<Bool>(HAS_TABLE)).get_result(conn)
}

/// Whether the table in sight has the unique index that the fence rests on.
pub(crate) fn has_fence_index<C: LoadConnection<Backend = Pg>>(conn: &mut C) -> QueryResult<bool> {
    diesel::select(sql::<Bool>(HAS_FENCE_INDEX)).get_result(conn)
}

/// Why this server is none to write to.
pub(crate) fn server(conn: &mut PgConnection) -> QueryResult<Option<Unsupported>> {
    let server: Server = sql_query(SERVER).get_result(conn)?;
    if server.in_recovery {
        let found = "the server is in recovery";
        return Ok(Some(Unsupported::Replica { found }));
    }
    let found = "transaction_read_only is on".to_owned();
    Ok(server.read_only.then_some(Unsupported::ReadOnly { found }))
}

/// Whether this database can carry leases.
pub(crate) fn check(conn: &mut PgConnection) -> QueryResult<Verdict> {
    if let Some(reason) = server(conn)? {
        return Ok(Verdict::Unsupported(reason));
    }
    let Some(table) = sql_query(TABLE).get_result::<Table>(conn).optional()? else {
        return Ok(Verdict::SchemaMissing);
    };
    let described: Vec<Described> = sql_query(COLUMNS).load(conn)?;
    let described: Vec<Column> = described.into_iter().map(Column::from).collect();
    let mut reason = relation(&table)
        .or_else(|| super::columns(&described))
        .or_else(|| key(table));
    if reason.is_none() && !has_fence_index(conn)? {
        reason = Some(Unsupported::FenceIndex);
    }
    Ok(reason.into())
}

/// [`pg_class`](https://www.postgresql.org/docs/current/catalog-pg-class.html). A partitioned
/// table is refused because each partition may be unlogged, or on another server.
fn relation(table: &Table) -> Option<Unsupported> {
    let found = match (table.kind.as_str(), table.persistence.as_str()) {
        ("r", "p") if table.subscribed => {
            return Some(Unsupported::Replica {
                found: "a subscription writes to the table",
            });
        }
        ("r", "p") => return None,
        ("r", "u") => return Some(Unsupported::Unlogged),
        (_, "t") => "temporary",
        ("v", _) => "a view",
        ("m", _) => "a materialized view",
        ("f", _) => "a foreign table",
        ("p", _) => "a partitioned table",
        _ => "not a table",
    };
    Some(Unsupported::NotATable {
        found: found.into(),
    })
}

fn key(table: Table) -> Option<Unsupported> {
    (!table.keyed).then(|| Unsupported::PrimaryKey {
        found: table.primary_key.unwrap_or_else(|| "missing".into()),
    })
}

impl From<Described> for Column {
    fn from(found: Described) -> Self {
        Self {
            kind: match found.type_oid {
                TEXT | VARCHAR => Kind::Text {
                    width: found.width.map(i64::from),
                },
                INT8 => Kind::Integer,
                _ => Kind::Other,
            },
            name: found.name,
            declared: found.declared,
            nullable: found.nullable,
            folding: found.folding,
        }
    }
}
