//! A good part of what Diesel offers, on a plain connection and on guarded ones: the same script sees the
//! same, with a tenure entered and without.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use diesel::connection::{CacheSize, DefaultLoadingMode, InstrumentationEvent, SimpleConnection};
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::{BigInt, Text};
use diesel_lease::{GuardedConnection, LeaseGuard};
use diesel_migrations::MigrationHarness;

use super::Stage;
use crate::schema::embedded;
use crate::support::concrete::{connect, on_engine};
use crate::support::database::Database;
use crate::support::{Engine, engines};

engines! {
    fn a_guarded_connection_is_used_as_a_plain_one,
    fn migrations_run_on_a_guarded_connection,
}

diesel::table! {
    authors (id) {
        id -> BigInt,
        name -> Text,
    }
}

diesel::table! {
    books (id) {
        id -> BigInt,
        author_id -> BigInt,
        title -> Text,
    }
}

diesel::joinable!(books -> authors (author_id));
diesel::allow_tables_to_appear_in_same_query!(authors, books);

#[derive(Debug, Clone, PartialEq, Queryable, Selectable, Insertable, Identifiable, AsChangeset)]
#[diesel(table_name = authors)]
struct Author {
    id: i64,
    name: String,
}

#[derive(Debug, Queryable, Selectable, Insertable, Identifiable, Associations)]
#[diesel(table_name = books, belongs_to(Author))]
struct Book {
    id: i64,
    author_id: i64,
    title: String,
}

#[derive(Debug, QueryableByName)]
struct Named {
    #[diesel(sql_type = Text)]
    #[expect(dead_code, reason = "it is printed")]
    name: String,
}

/// What is seen of a database by one connection, statement by statement. A macro, since Diesel's bounds
/// for a function would be longer than the script.
macro_rules! script {
    ($conn:expr, $engine:expr) => {{
        let conn = $conn;
        let mut seen: Vec<String> = Vec::new();
        macro_rules! see {
            ($what:expr) => {
                seen.push(format!("{:?}", $what))
            };
        }
        conn.batch_execute("DELETE FROM books").unwrap();
        conn.batch_execute("DELETE FROM authors").unwrap();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        conn.set_instrumentation(move |event: InstrumentationEvent<'_>| {
            if let InstrumentationEvent::StartQuery { .. } = event {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });

        let rows = ["Le Guin", "Lem", "O'Brien \\ \"%_"].into_iter().zip(1..);
        let rows = rows.map(|(name, id)| Author { id, name: name.to_owned() });
        let rows: Vec<Author> = rows.collect();
        see!(diesel::insert_into(authors::table).values(&rows).execute(conn));
        let books: Vec<Book> = (1..=4)
            .map(|id| Book { id, author_id: 1 + id % 2, title: format!("volume {id}") })
            .collect();
        see!(diesel::insert_into(books::table).values(&books).execute(conn));

        // reading
        let all = authors::table.select(Author::as_select()).order(authors::id);
        let found = all.load(conn).unwrap();
        see!(found);
        see!(authors::table.find(2).select(authors::name).first::<String>(conn));
        see!(authors::table.find(9).select(authors::name).first::<String>(conn).optional());
        see!(authors::table.find(9).select(authors::name).first::<String>(conn));
        see!(authors::table.filter(authors::name.like("L%")).count().get_result::<i64>(conn));
        let named = authors::table.filter(authors::name.eq("Lem")).into_boxed();
        see!(named.select(authors::id).load::<i64>(conn));
        let joined = books::table.inner_join(authors::table).order(books::id);
        see!(joined.select((books::title, authors::name)).load::<(String, String)>(conn));
        let of = Book::belonging_to(&found).select(Book::as_select()).order(books::id);
        see!(of.load(conn).unwrap().grouped_by(&found));
        for any in [vec![1_i64, 3], vec![2]] {
            let any = authors::table.filter(authors::id.eq_any(any)).order(authors::id);
            see!(any.select(authors::name).load::<String>(conn));
        }
        let iterated = authors::table.order(authors::id).select(authors::name);
        let iterated = iterated.load_iter::<String, DefaultLoadingMode>(conn).unwrap();
        see!(iterated.map(Result::unwrap).collect::<Vec<_>>());
        let placeholder = if $engine == Engine::Postgres { "$1" } else { "?" };
        let query = format!("SELECT name FROM authors WHERE id >= {placeholder} ORDER BY id");
        let query = diesel::sql_query(query).bind::<BigInt, _>(2);
        see!(query.load::<Named>(conn));

        // writing
        let changed = Author { id: 2, name: "Stanisław Lem".to_owned() };
        see!(changed.save_changes::<Author>(conn));
        let update = diesel::update(authors::table.find(3)).set(authors::name.eq("O"));
        see!(update.execute(conn));
        let again = diesel::insert_into(authors::table).values(&rows[0]);
        see!(again.on_conflict_do_nothing().execute(conn).is_ok());
        see!(diesel::delete(books::table.filter(books::id.gt(3))).execute(conn));
        conn.batch_execute("UPDATE authors SET name = 'P' WHERE id = 3").unwrap();
        see!(diesel::sql_query("UPDATE authors SET name = 'Q' WHERE id = 3").execute(conn));

        // transactions
        see!(conn.transaction(|conn| {
            diesel::delete(books::table).execute(conn)?;
            let inner = conn.transaction(|conn| {
                diesel::delete(authors::table).execute(conn)?;
                Err::<(), _>(DieselError::RollbackTransaction)
            });
            assert!(inner.is_err());
            authors::table.count().get_result::<i64>(conn)
        }));
        see!(conn.transaction(|conn| {
            diesel::delete(authors::table).execute(conn)?;
            Err::<(), _>(DieselError::RollbackTransaction)
        }));
        let twice = conn.transaction(|conn| {
            diesel::insert_into(authors::table).values(&rows[0]).execute(conn)
        });
        let is_violation = |error: &DieselError| {
            let kind = DatabaseErrorKind::UniqueViolation;
            matches!(error, DieselError::DatabaseError(found, _)
                if format!("{found:?}") == format!("{kind:?}"))
        };
        see!(twice.as_ref().is_err_and(is_violation));
        conn.test_transaction::<_, DieselError, _>(|conn| {
            diesel::delete(authors::table).execute(conn)?;
            Ok(())
        });
        see!(authors::table.count().get_result::<i64>(conn));

        // prepared statements
        conn.set_prepared_statement_cache_size(CacheSize::Disabled);
        for id in 1..3 {
            see!(authors::table.find(id).select(authors::name).first::<String>(conn));
        }
        conn.set_prepared_statement_cache_size(CacheSize::Unbounded);
        for id in 1..3 {
            see!(authors::table.find(id).select(authors::name).first::<String>(conn));
        }
        seen.push(format!("told of {} and more", count.load(Ordering::Relaxed).min(30)));
        seen
    }};
}

fn a_guarded_connection_is_used_as_a_plain_one(engine: Engine) {
    let stage = Stage::new(engine);
    let innodb = if engine.is_mysql_like() {
        "ENGINE=InnoDB CHARSET=utf8mb4"
    } else {
        ""
    };
    let mut raw = stage.database.connect();
    raw.batch(&format!(
        "CREATE TABLE authors (id BIGINT PRIMARY KEY, name VARCHAR(100) NOT NULL) {innodb}"
    ));
    raw.batch(&format!(
        "CREATE TABLE books (id BIGINT PRIMARY KEY, author_id BIGINT NOT NULL,
         title VARCHAR(100) NOT NULL) {innodb}"
    ));
    let lease = stage.claim();
    on_engine!(engine, C => {
        let url = stage.database.url();
        let plain = script!(&mut connect::<C>(engine, url), engine);
        let mut alone = GuardedConnection::new(connect::<C>(engine, url));
        assert_eq!(script!(&mut alone, engine), plain);
        let pool = Pool::builder()
            .max_size(1)
            .connection_customizer(Box::new(LeaseGuard::new()))
            .build(ConnectionManager::<GuardedConnection<C>>::new(url))
            .unwrap();
        assert_eq!(script!(&mut *pool.get().unwrap(), engine), plain);
        let tenure = lease.tenure();
        let _entered = tenure.enter();
        assert_eq!(script!(&mut alone, engine), plain);
        assert_eq!(script!(&mut *pool.get().unwrap(), engine), plain);
        assert!(plain.len() > 25, "{plain:?}");
    });
    lease.verify().unwrap();
}

fn migrations_run_on_a_guarded_connection(engine: Engine) {
    let stage = Stage::new(engine);
    let lease = stage.claim();
    let _entered = lease.tenure().enter();
    let database = Database::create(engine);
    on_engine!(engine, C => {
        let conn = &mut GuardedConnection::new(connect::<C>(engine, database.url()));
        let pending = conn.pending_migrations(embedded(engine)).unwrap().len();
        assert!(pending > 0);
        assert_eq!(conn.run_pending_migrations(embedded(engine)).unwrap().len(), pending);
        assert!(!conn.has_pending_migration(embedded(engine)).unwrap());
        assert_eq!(conn.applied_migrations().unwrap().len(), pending);
        assert_eq!(conn.revert_all_migrations(embedded(engine)).unwrap().len(), pending);
        assert!(conn.applied_migrations().unwrap().is_empty());
    });
    lease.verify().unwrap();
}
