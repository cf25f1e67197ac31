//! PostgreSQL's transaction builder, on a guarded connection.

use diesel::connection::{AnsiTransactionManager, TransactionManager};
use diesel::pg::PgConnection;
use diesel::result::Error as DieselError;

use super::connection::{GuardedConnection, GuardedTransactions};

impl GuardedConnection<PgConnection> {
    /// Begins a transaction with properties of its own, as
    /// [`PgConnection::build_transaction`] does ([BEGIN]).
    ///
    /// [BEGIN]: https://www.postgresql.org/docs/current/sql-begin.html
    pub fn build_transaction(&mut self) -> GuardedTransactionBuilder<'_> {
        GuardedTransactionBuilder {
            conn: self,
            isolation: "",
            access: "",
            deferrable: "",
        }
    }
}

/// Properties of a guarded transaction: see [`GuardedConnection::build_transaction`].
#[derive(Debug)]
#[must_use = "a transaction builder does nothing until `run` is called"]
pub struct GuardedTransactionBuilder<'a> {
    conn: &'a mut GuardedConnection<PgConnection>,
    isolation: &'static str,
    access: &'static str,
    deferrable: &'static str,
}

const READ_ONLY: &str = " READ ONLY";

impl GuardedTransactionBuilder<'_> {
    /// It only reads. There is nothing to fence then.
    pub fn read_only(mut self) -> Self {
        self.access = READ_ONLY;
        self
    }

    /// It may write.
    pub fn read_write(mut self) -> Self {
        self.access = " READ WRITE";
        self
    }

    /// It is deferrable, which matters if it is serializable and only reads.
    pub fn deferrable(mut self) -> Self {
        self.deferrable = " DEFERRABLE";
        self
    }

    /// It is not deferrable.
    pub fn not_deferrable(mut self) -> Self {
        self.deferrable = " NOT DEFERRABLE";
        self
    }

    /// At READ COMMITTED.
    pub fn read_committed(mut self) -> Self {
        self.isolation = " ISOLATION LEVEL READ COMMITTED";
        self
    }

    /// At REPEATABLE READ.
    pub fn repeatable_read(mut self) -> Self {
        self.isolation = " ISOLATION LEVEL REPEATABLE READ";
        self
    }

    /// At SERIALIZABLE.
    pub fn serializable(mut self) -> Self {
        self.isolation = " ISOLATION LEVEL SERIALIZABLE";
        self
    }

    /// Runs `work` in the transaction.
    ///
    /// # Errors
    ///
    /// As `transaction`; [`AlreadyInTransaction`](DieselError::AlreadyInTransaction) inside another.
    pub fn run<T, E, F>(&mut self, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut GuardedConnection<PgConnection>) -> Result<T, E>,
        E: From<DieselError>,
    {
        let sql = format!(
            "BEGIN TRANSACTION{}{}{}",
            self.isolation, self.access, self.deferrable
        );
        self.conn.begin(self.access == READ_ONLY, |conn| {
            AnsiTransactionManager::begin_transaction_sql(conn, &sql)
        })?;
        super::run(self.conn, work, GuardedTransactions::commit_transaction)
    }
}
