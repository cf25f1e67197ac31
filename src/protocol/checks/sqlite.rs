//! What SQLite says of the file and of the table.
//!
//! Hazard: whether the file can be written to is told by nothing but trying, so the check takes
//! the write lock for a moment and waits for it as long as the session's `busy_timeout`.

use diesel::connection::{LoadConnection, SimpleConnection};
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_query;
use diesel::sql_types::{Bool, Nullable, Text};
use diesel::sqlite::{Sqlite, SqliteConnection};

use super::{Column, Kind, Verdict};
use crate::unsupported::Unsupported;

/// [Without a schema](https://www.sqlite.org/pragma.html#pragma_table_info) the name means what it
/// means in a statement: something temporary first, then of the main database, then of the others.
const HAS_TABLE: &str = "EXISTS (SELECT 1 FROM pragma_table_info('diesel_leases'))";

/// The database that the table is in, or the main one. The file of one that is
/// [in memory or temporary](https://www.sqlite.org/pragma.html#pragma_database_list) has no name.
const DATABASE: &str = "SELECT d.name AS name, COALESCE(d.file, '') AS file, \
    EXISTS (SELECT 1 FROM pragma_table_info('diesel_leases', d.name)) AS found, \
    (SELECT journal_mode FROM pragma_journal_mode('main')) AS journal_mode, \
    (SELECT query_only FROM pragma_query_only) AS query_only, \
    (SELECT type FROM main.sqlite_master WHERE lower(name) = 'diesel_leases' \
        AND type IN ('table', 'view')) AS kind \
    FROM pragma_database_list AS d WHERE found OR d.name = 'main' \
    ORDER BY found DESC, d.name = 'temp' DESC, d.seq LIMIT 1";

/// The collation is that of the [index behind the primary key](https://www.sqlite.org/pragma.html#pragma_index_xinfo),
/// which a table without rowids has too. If the column's own differs, an upsert fails.
const COLUMNS: &str = "SELECT lower(t.name) AS name, t.type AS declared, t.\"notnull\" = 0 AS nullable, \
    t.pk > 0 AS keyed, \
    (SELECT x.coll FROM pragma_index_list('diesel_leases', 'main') AS i, pragma_index_xinfo(i.name, 'main') AS x \
        WHERE i.origin = 'pk' AND x.key AND x.cid = t.cid AND upper(x.coll) <> 'BINARY') AS folding \
    FROM pragma_table_info('diesel_leases', 'main') AS t ORDER BY t.pk";

const WRITES_NOTHING: &str = "UPDATE main.diesel_leases SET term = term WHERE 0";

#[derive(QueryableByName)]
struct Database {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    file: String,
    #[diesel(sql_type = Bool)]
    found: bool,
    #[diesel(sql_type = Text)]
    journal_mode: String,
    #[diesel(sql_type = Bool)]
    query_only: bool,
    #[diesel(sql_type = Nullable<Text>)]
    kind: Option<String>,
}

#[derive(QueryableByName)]
struct Described {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    declared: String,
    #[diesel(sql_type = Bool)]
    nullable: bool,
    #[diesel(sql_type = Bool)]
    keyed: bool,
    #[diesel(sql_type = Nullable<Text>)]
    folding: Option<String>,
}

/// Whether there is a table or view by the name of the lease table.
pub(crate) fn has_table<C: LoadConnection<Backend = Sqlite>>(conn: &mut C) -> QueryResult<bool> {
    diesel::select(sql::<Bool>(HAS_TABLE)).get_result(conn)
}

/// Whether this database can carry leases.
pub(crate) fn check(conn: &mut SqliteConnection) -> QueryResult<Verdict> {
    let database: Database = sql_query(DATABASE).get_result(conn)?;
    if let Some(reason) = place(&database) {
        return Ok(Verdict::Unsupported(reason));
    }
    if !database.found {
        return Ok(Verdict::SchemaMissing);
    }
    // Only now: a new file is in no mode of anybody's choice until the table is made.
    if database.journal_mode != "wal" {
        return Ok(Some(Unsupported::JournalMode {
            found: database.journal_mode,
        })
        .into());
    }
    let described: Vec<Described> = sql_query(COLUMNS).load(conn)?;
    let key = key(&described);
    let described: Vec<Column> = described.into_iter().map(Column::from).collect();
    let mut reason = super::columns(&described).or(key);
    if reason.is_none() && !writable(conn)? {
        reason = Some(Unsupported::ReadOnly {
            found: "its file, or the way it was opened".into(),
        });
    }
    Ok(reason.into())
}

fn place(database: &Database) -> Option<Unsupported> {
    let found = match (database.name.as_str(), database.kind.as_deref()) {
        ("temp", _) => "temporary".into(),
        ("main", Some("view")) => "a view".into(),
        ("main", _) if database.file.is_empty() => return Some(Unsupported::InMemory),
        ("main", _) if database.query_only => {
            return Some(Unsupported::ReadOnly {
                found: "query_only is on".into(),
            });
        }
        ("main", _) => return None,
        (attached, _) => format!("in the attached database {attached}"),
    };
    Some(Unsupported::NotATable { found })
}

fn key(columns: &[Described]) -> Option<Unsupported> {
    let names: Vec<&str> = columns
        .iter()
        .filter(|column| column.keyed)
        .map(|column| column.name.as_str())
        .collect();
    match names.as_slice() {
        ["name"] => None,
        [] => Some(Unsupported::PrimaryKey {
            found: "missing".into(),
        }),
        names => Some(Unsupported::PrimaryKey {
            found: format!("({})", names.join(", ")),
        }),
    }
}

/// [`BEGIN IMMEDIATE`](https://www.sqlite.org/lang_transaction.html) gets the write lock, or fails
/// because somebody else has it (an error, and no answer), or passes without it because nothing
/// can be written through this connection. So what fails behind it, fails for that last reason.
fn writable(conn: &mut SqliteConnection) -> QueryResult<bool> {
    conn.immediate_transaction(|conn| Ok(conn.batch_execute(WRITES_NOTHING).is_ok()))
}

/// The rules of [type affinity](https://www.sqlite.org/datatype3.html#determination_of_column_affinity),
/// in their order. A declared width means nothing here.
fn kind(declared: &str) -> Kind {
    let declared = declared.to_ascii_uppercase();
    if declared.contains("INT") {
        Kind::Integer
    } else if ["CHAR", "CLOB", "TEXT"]
        .iter()
        .any(|text| declared.contains(text))
    {
        Kind::Text { width: None }
    } else {
        Kind::Other
    }
}

impl From<Described> for Column {
    fn from(found: Described) -> Self {
        Self {
            kind: kind(&found.declared),
            name: found.name,
            declared: found.declared,
            nullable: found.nullable,
            folding: found.folding,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UP: &str =
        include_str!("../../../migrations/sqlite/2026-11-30-000000_create_diesel_leases/up.sql");

    /// A file with the table, after `sql` was run on the same connection.
    fn checked(sql: &str) -> (bool, Verdict) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut conn = SqliteConnection::establish(file.path().to_str().unwrap()).unwrap();
        conn.batch_execute("PRAGMA journal_mode = WAL").unwrap();
        conn.batch_execute(UP).unwrap();
        conn.batch_execute(sql).unwrap();
        (has_table(&mut conn).unwrap(), check(&mut conn).unwrap())
    }

    #[test]
    fn the_bare_name_means_what_it_means_in_a_statement() {
        assert!(matches!(checked(""), (true, Verdict::Carries)));
        let attached = "ATTACH ':memory:' AS other; CREATE TABLE other.diesel_leases (name);";
        assert!(matches!(checked(attached), (true, Verdict::Carries)));
        let only_attached = format!("{attached} DROP TABLE main.diesel_leases");
        let (true, Verdict::Unsupported(reason)) = checked(&only_attached) else {
            panic!()
        };
        assert!(
            reason
                .to_string()
                .contains("in the attached database other"),
            "{reason}"
        );
        let hidden = "CREATE TEMP TABLE diesel_leases AS SELECT * FROM main.diesel_leases";
        let (true, Verdict::Unsupported(reason)) = checked(hidden) else {
            panic!()
        };
        assert!(reason.to_string().contains("temporary"), "{reason}");
        let gone = "CREATE TEMP TABLE other (name); DROP TABLE diesel_leases";
        assert!(matches!(checked(gone), (false, Verdict::SchemaMissing)));
    }

    #[test]
    fn a_session_that_only_reads_is_told_from_one_that_is_held_up() {
        let (_, verdict) = checked("PRAGMA query_only = ON");
        assert!(matches!(
            verdict,
            Verdict::Unsupported(Unsupported::ReadOnly { .. })
        ));

        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        let [mut busy, mut conn] = [(); 2].map(|()| SqliteConnection::establish(path).unwrap());
        busy.batch_execute("PRAGMA journal_mode = WAL").unwrap();
        busy.batch_execute(UP).unwrap();
        busy.batch_execute("BEGIN IMMEDIATE").unwrap();
        assert!(check(&mut conn).is_err());
        busy.batch_execute("COMMIT").unwrap();
        assert!(matches!(check(&mut conn), Ok(Verdict::Carries)));
    }
}
