//! Can this database carry leases?
//!
//! A check reads the catalogue on the connection that would carry the leases, and looks at the
//! table that the bare name `diesel_leases` means there. A refusal is always something that the
//! database said; a question that it could not answer is an error, and no answer. (The one
//! exception is a replica that can be written to, which an ordinary user may not be told of.)
//!
//! The answer holds for the moment it was given, and for the server that gave it.

#[cfg(feature = "mysql")]
pub(crate) mod mysql;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;

use crate::name::MAX_BYTES;
use crate::unsupported::Unsupported;

/// The answer of a check.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Nothing speaks against leases here.
    Carries,
    /// There is nothing by the name `diesel_leases`.
    SchemaMissing,
    /// The first reason found why not.
    Unsupported(Unsupported),
}

impl From<Option<Unsupported>> for Verdict {
    fn from(reason: Option<Unsupported>) -> Self {
        reason.map_or(Self::Carries, Self::Unsupported)
    }
}

/// A column as the catalogue describes it.
struct Column {
    name: String,
    /// Its type as the catalogue writes it, for people.
    declared: String,
    kind: Kind,
    nullable: bool,
    /// Its collation, where that may take two texts that differ for one.
    folding: Option<String>,
}

/// What a type is to the statements of this crate.
enum Kind {
    /// Text that comes back as it was stored; `None`: of any width.
    Text {
        width: Option<i64>,
    },
    /// An integer of 64 bits with a sign.
    Integer,
    Other,
}

enum Need {
    Name,
    Text { width: i64 },
    Integer,
}

const NAME_WIDTH: i64 = MAX_BYTES as i64;

const COLUMNS: [(&str, Need); 8] = [
    ("name", Need::Name),
    ("holder", Need::Text { width: 32 }),
    ("instance", Need::Text { width: NAME_WIDTH }),
    ("term", Need::Integer),
    ("expires_at_ms", Need::Integer),
    ("slot_ms", Need::Integer),
    ("unfinished_slot_ms", Need::Integer),
    ("rerun_slot_ms", Need::Integer),
];

/// The first thing wrong with the columns of the table, if any.
fn columns(found: &[Column]) -> Option<Unsupported> {
    COLUMNS.iter().find_map(|(column, need)| {
        match found.iter().find(|found| found.name == *column) {
            Some(found) => unfit(column, need, found),
            None => Some(Unsupported::ColumnMissing { column }),
        }
    })
}

fn unfit(column: &'static str, need: &Need, found: &Column) -> Option<Unsupported> {
    let (needed, width) = match need {
        Need::Name => ("VARCHAR or TEXT (MySQL and MariaDB: VARBINARY)", NAME_WIDTH),
        Need::Text { width } => ("VARCHAR or TEXT", *width),
        Need::Integer => ("BIGINT", 0),
    };
    let declared = || found.declared.clone();
    match (need, &found.kind, &found.folding) {
        (Need::Name, _, Some(collation)) => {
            return Some(Unsupported::NameCollation {
                found: collation.clone(),
            });
        }
        (
            Need::Name | Need::Text { .. },
            Kind::Text {
                width: Some(narrow),
            },
            _,
        ) if *narrow < width => {
            return Some(Unsupported::ColumnTooNarrow {
                column,
                found: declared(),
                needed: width,
            });
        }
        (Need::Name | Need::Text { .. }, Kind::Text { .. }, _)
        | (Need::Integer, Kind::Integer, _) => {}
        _ => {
            return Some(Unsupported::ColumnType {
                column,
                found: declared(),
                needed,
            });
        }
    }
    // The name is the primary key, which says it all.
    (found.nullable && !matches!(need, Need::Name))
        .then_some(Unsupported::ColumnNullable { column })
}
