//! The floor: the library's statements, kept prepared, on one connection of Diesel's and nothing
//! else.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::record::Acts;

pub(crate) trait Bare {
    /// The term. `None`: it is held.
    fn claim(&mut self, acts: &Acts) -> QueryResult<Option<i64>>;
    fn renew(&mut self, acts: &Acts) -> QueryResult<usize>;
    fn verify(&mut self, acts: &Acts) -> QueryResult<i64>;
    fn release(&mut self, acts: &Acts) -> QueryResult<usize>;
    /// One row with one text, named `answer`.
    fn ask(&mut self, question: &str) -> QueryResult<String>;
}

struct Claim;
#[cfg(feature = "mysql")]
struct Read;
struct Renew;
struct Verify;
struct Release;

#[cfg(feature = "mysql")]
type Row = (Text, Text, Text, BigInt, BigInt, BigInt, BigInt);
#[cfg(feature = "mysql")]
type Values = (String, String, String, i64, i64, i64, i64);

#[derive(QueryableByName)]
struct Answer {
    #[diesel(sql_type = Text)]
    answer: String,
}

macro_rules! bare {
    ($connection:ty, |$conn:ident, $acts:ident| $claim:expr) => {
        impl Bare for $connection {
            fn claim(&mut self, $acts: &Acts) -> QueryResult<Option<i64>> {
                let $conn = self;
                $claim
            }

            fn renew(&mut self, acts: &Acts) -> QueryResult<usize> {
                acts.renew.kept::<Renew, ()>().execute(self)
            }

            fn verify(&mut self, acts: &Acts) -> QueryResult<i64> {
                acts.verify.kept::<Verify, BigInt>().get_result(self)
            }

            fn release(&mut self, acts: &Acts) -> QueryResult<usize> {
                acts.release.kept::<Release, ()>().execute(self)
            }

            fn ask(&mut self, question: &str) -> QueryResult<String> {
                let answer: Answer = diesel::sql_query(question).get_result(self)?;
                Ok(answer.answer)
            }
        }
    };
}

#[cfg(feature = "postgres")]
bare!(PgConnection, |conn, acts| acts.claim[0]
    .kept::<Claim, BigInt>()
    .get_result(conn)
    .optional());

#[cfg(feature = "sqlite")]
bare!(SqliteConnection, |conn, acts| acts.claim[0]
    .kept::<Claim, BigInt>()
    .get_result(conn)
    .optional());

#[cfg(feature = "mysql")]
bare!(MysqlConnection, |conn, acts| {
    acts.claim[0].kept::<Claim, ()>().execute(conn)?;
    let row: Values = acts.claim[1].kept::<Read, Row>().get_result(conn)?;
    Ok((row.1 == acts.holder).then_some(row.3))
});
