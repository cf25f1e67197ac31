//! The reasons why a database cannot carry leases.
//!
//! Every reason is something that the database itself said of its state or of the table; none is
//! read from the text of an error. Where there are several reasons the first one found is named,
//! so repairing one may bring up the next.

/// Why a database cannot carry leases.
///
/// Each of these would let two processes hold one name, let a stale holder commit, or make every
/// claim fail. What the messages ask for is what
/// [`Leases::migrate`](crate::Leases::migrate) creates.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Unsupported {
    /// What the name `diesel_leases` means to the library's session is not an ordinary table of
    /// the database.
    ///
    /// Behind a view, a foreign or a partitioned table the keys are not the name's own; a
    /// temporary table is seen by one session only, so every process would win its own.
    #[error("`diesel_leases` is {found}; an ordinary table is needed")]
    NotATable {
        /// What it is.
        found: String,
    },

    /// A column is missing.
    #[error("`diesel_leases` has no column `{column}`")]
    ColumnMissing {
        /// The column.
        column: &'static str,
    },

    /// A column is of a type that does not keep, or does not compare, what is stored in it.
    #[error("column `{column}` of `diesel_leases` is {found}; {needed} is needed")]
    ColumnType {
        /// The column.
        column: &'static str,
        /// Its type, as the database writes it.
        found: String,
        /// The types that will do.
        needed: &'static str,
    },

    /// A column is too narrow for what is stored in it.
    #[error("column `{column}` of `diesel_leases` is {found}; a width of {needed} is needed")]
    ColumnTooNarrow {
        /// The column.
        column: &'static str,
        /// Its type, as the database writes it.
        found: String,
        /// The width that is needed.
        needed: i64,
    },

    /// A column may be null, and a null compares as neither earlier nor later.
    #[error("column `{column}` of `diesel_leases` may be null; NOT NULL is needed")]
    ColumnNullable {
        /// The column.
        column: &'static str,
    },

    /// Names are compared by a collation that may take two of them for one: by folding case,
    /// accents or trailing blanks.
    #[error(
        "column `name` of `diesel_leases` has collation {found}; \
         names must be compared byte by byte (on MySQL and MariaDB: VARBINARY)"
    )]
    NameCollation {
        /// The collation.
        found: String,
    },

    /// The primary key is not the name, the whole name and nothing but the name, checked at once.
    #[error(
        "the primary key of `diesel_leases` is {found}; one on (name), neither in part nor deferrable, is needed"
    )]
    PrimaryKey {
        /// The primary key, as far as the database describes it.
        found: String,
    },

    /// The index is missing that makes a claim a key update, which the fence rests on
    /// ([PostgreSQL](https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS):
    /// `FOR KEY SHARE` holds up an update only if it changes a column of a unique index).
    #[error(
        "no unique index of `diesel_leases` that is valid, immediate, not partial and over plain \
         columns contains `holder`; UNIQUE (name, holder) is needed"
    )]
    FenceIndex,

    /// The table is unlogged: a crash of the server
    /// [empties it](https://www.postgresql.org/docs/current/sql-createtable.html#SQL-CREATETABLE-UNLOGGED),
    /// so a name that is held could be granted again, and terms would begin anew.
    #[error("`diesel_leases` is unlogged; a table that survives a crash is needed")]
    Unlogged,

    /// The table is not kept by InnoDB: without
    /// [row locks and transactions](https://dev.mysql.com/doc/refman/9.4/en/innodb-introduction.html)
    /// there is no fence.
    #[error("`diesel_leases` is kept by {found}; InnoDB is needed")]
    Engine {
        /// The storage engine.
        found: String,
    },

    /// Nothing can be written here.
    #[error("the database is read-only: {found}; one that can be written to is needed")]
    ReadOnly {
        /// What says so.
        found: String,
    },

    /// What is written here is not seen by the primary, or is overwritten by it.
    #[error("the database is a copy of another: {found}; the primary is needed")]
    Replica {
        /// What says so.
        found: &'static str,
    },

    /// The server is a node of a Galera cluster, where
    /// [a row lock does not reach the other nodes](https://mariadb.com/docs/galera-cluster/reference/mariadb-galera-cluster-known-limitations).
    #[error(
        "the server is a node of a Galera cluster; a server whose row locks reach all writers is needed"
    )]
    Galera,

    /// The server belongs to a group with several primaries, where
    /// [a row lock does not reach the other members](https://dev.mysql.com/doc/refman/9.4/en/group-replication-limitations.html).
    #[error(
        "the server is set up for several primaries; Group Replication with a single primary is needed"
    )]
    MultiPrimary,

    /// The database is [in memory, or a temporary file](https://www.sqlite.org/inmemorydb.html)
    /// (an empty path): each connection has one of its own, so every process would win.
    #[error("the SQLite database is in memory or temporary; a file is needed")]
    InMemory,

    /// The file is not in [WAL mode](https://www.sqlite.org/wal.html): in any other a reader can
    /// make a commit fail.
    #[error("the journal mode of the SQLite database is {found}; wal is needed")]
    JournalMode {
        /// The journal mode.
        found: String,
    },

    /// Named locks: the session is another from one statement to the next, as behind a pooler that
    /// gives out sessions for a transaction only. A lock would stay on a session that is not ours.
    #[error(
        "the session changes between statements; a connection that keeps its session is needed"
    )]
    Pooler,

    /// Named locks: [`LockScope::Server`](crate::locks::LockScope::Server) is for MySQL and MariaDB.
    #[error("locks of the whole server are those of MySQL and MariaDB only")]
    Scope,

    /// The server speaks the protocol of a supported one but does not do what leases rest on.
    #[error("the server does not do what leases need of it: {what}")]
    Statement {
        /// What it was asked to do.
        what: &'static str,
        /// What it answered.
        source: diesel::result::Error,
    },
}
