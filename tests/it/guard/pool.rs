//! `LeaseGuard`: a pool whose connections can be guarded, or none.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use diesel::connection::LoadConnection;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Error as PoolError, R2D2Connection};
use diesel::result::Error as DieselError;
use diesel_lease::{GuardedConnection, LeaseBackend, LeaseGuard, TenureRequired};
use r2d2::Pool;

use super::client::{Entrance, Sent, Sql, connect};
use super::{LOOK, Stage, assert_lost, assert_no_loss, insert, next_id};
use crate::support::url::Url;
use crate::support::{Engine, LONG, engines, eventually};

engines! {
    fn a_required_tenure_is_missed_before_anything_is_sent,
    fn the_applications_customizer_is_kept,
    fn a_connection_comes_back_clean,
    fn a_pool_from_before_the_table_is_guarded;
    servers:
    fn a_role_that_may_not_lock_is_told_so,
}

/// A pool of one guarded connection, and whoever is told of each.
pub(super) trait Pooling: Send {
    fn with(&self, work: &mut dyn FnMut(&mut dyn Sql));
}

struct Guarded<C: R2D2Connection + Send + 'static>(Pool<ConnectionManager<GuardedConnection<C>>>)
where
    C: LoadConnection,
    C::Backend: LeaseBackend;

impl<C> Pooling for Guarded<C>
where
    C: LoadConnection + R2D2Connection + Send + 'static,
    C::Backend: LeaseBackend,
    GuardedConnection<C>: Sql,
{
    fn with(&self, work: &mut dyn FnMut(&mut dyn Sql)) {
        work(&mut *self.0.get().expect("its one connection"));
    }
}

/// The application's own.
#[derive(Clone, Debug, Default)]
struct Counting(Arc<AtomicUsize>);

impl<C> CustomizeConnection<C, PoolError> for Counting {
    fn on_acquire(&self, _: &mut C) -> Result<(), PoolError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A pool, or why there is none.
pub(super) fn try_build(
    engine: Engine,
    url: &str,
    require_tenure: bool,
) -> Result<Box<dyn Pooling>, r2d2::Error> {
    build(engine, url, require_tenure, Counting::default())
}

fn build(
    engine: Engine,
    url: &str,
    require: bool,
    counting: Counting,
) -> Result<Box<dyn Pooling>, r2d2::Error> {
    match engine {
        #[cfg(feature = "sqlite")]
        Engine::Sqlite => build_of::<diesel::SqliteConnection>(url, require, counting),
        #[cfg(feature = "postgres")]
        Engine::Postgres => build_of::<diesel::PgConnection>(url, require, counting),
        #[cfg(feature = "mysql")]
        Engine::Mysql | Engine::Mariadb => {
            build_of::<diesel::MysqlConnection>(url, require, counting)
        }
        #[allow(unreachable_patterns, reason = "none with all engines")]
        _ => panic!("this build of the tests has no {engine}"),
    }
}

fn build_of<C>(
    url: &str,
    require_tenure: bool,
    counting: Counting,
) -> Result<Box<dyn Pooling>, r2d2::Error>
where
    C: LoadConnection + R2D2Connection + Send + 'static,
    C::Backend: LeaseBackend,
    GuardedConnection<C>: Sql,
{
    let guard = match require_tenure {
        true => LeaseGuard::new().require_tenure(),
        false => LeaseGuard::new(),
    };
    let pool = Pool::builder()
        .max_size(1)
        .connection_timeout(Duration::from_secs(2))
        .connection_customizer(Box::new(guard.then(counting)))
        .build(ConnectionManager::<GuardedConnection<C>>::new(url))?;
    Ok(Box::new(Guarded(pool)))
}

fn a_required_tenure_is_missed_before_anything_is_sent(engine: Engine) {
    let stage = Stage::new(engine);
    let pool = try_build(engine, stage.database.url(), true).unwrap();
    let sent = Sent::default();
    pool.with(&mut |sql| {
        sql.note(&sent);
        let begun = sql.transact(&mut |_| panic!("the work was run"));
        match begun {
            Err(DieselError::QueryBuilderError(error)) => {
                assert!(error.is::<TenureRequired>(), "{error:?}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(sent.take(), [""; 0]);
        // a statement needs none
        sql.run(&insert(next_id())).unwrap();
    });
    let lease = stage.claim();
    let (tenure, id) = (lease.tenure(), next_id());
    let _entered = tenure.enter();
    pool.with(&mut |sql| {
        sql.transact(&mut |sql| sql.run(&insert(id))).unwrap();
    });
    assert_eq!(stage.rows(id), 1);
}

fn the_applications_customizer_is_kept(engine: Engine) {
    let stage = Stage::new(engine);
    let counting = Counting::default();
    let pool = build(engine, stage.database.url(), false, counting.clone()).unwrap();
    pool.with(&mut |sql| {
        sql.number(LOOK).unwrap();
    });
    assert_eq!(counting.0.load(Ordering::SeqCst), 1);
}

/// Or it is thrown away; either way the next one to have it has a transaction of its own.
fn a_connection_comes_back_clean(engine: Engine) {
    let stage = Stage::new(engine);
    let counting = Counting::default();
    let pool = build(engine, stage.database.url(), false, counting.clone()).unwrap();
    let lost = next_id();
    let tenure = {
        let lease = stage.claim();
        let tenure = lease.tenure();
        let _entered = tenure.enter();
        let mut lease = Some(lease);
        pool.with(&mut |sql| {
            let done = sql.transact(&mut |sql| {
                sql.run(&insert(lost))?;
                drop(lease.take());
                sql.run(&insert(next_id()))
            });
            assert_lost(&done, &tenure);
        });
        // It is handed out under a lost tenure, which is of no use but to hand it back.
        pool.with(&mut |sql| assert_lost(&sql.number(LOOK).map(drop), &tenure));
        tenure.clone()
    };
    assert!(tenure.is_lost());
    let kept = next_id();
    // SQLite's file is busy while the lease is given back
    pool.with(&mut |sql| eventually(LONG, "it writes", || sql.run(&insert(kept)).is_ok()));
    assert_eq!((stage.rows(lost), stage.rows(kept)), (0, 1));
    assert_eq!(counting.0.load(Ordering::SeqCst), 1, "it is the same one");
}

/// The lease was looked for elsewhere; it is found all the same.
fn a_pool_from_before_the_table_is_guarded(engine: Engine) {
    let database = crate::support::database::Database::create(engine);
    let pool = try_build(engine, database.url(), false).unwrap();
    let stage = Stage::with(database, super::PATIENT);
    let lease = stage.claim();
    let tenure = lease.tenure();
    let (id, lost) = (next_id(), next_id());
    {
        let _entered = tenure.enter();
        pool.with(&mut |sql| {
            sql.transact(&mut |sql| sql.run(&insert(id))).unwrap();
        });
    }
    assert_eq!(stage.rows(id), 1);
    let _next = stage.hand_over(lease.name());
    let _entered = tenure.enter();
    pool.with(&mut |sql| {
        let done = sql.transact(&mut |sql| sql.run(&insert(lost)));
        assert_lost(&done, &tenure);
    });
    assert_eq!(stage.rows(lost), 0);
}

/// A role that may read the leases and write its own rows, gone with this.
struct Reader<'a> {
    stage: &'a Stage,
    name: String,
}

impl<'a> Reader<'a> {
    fn create(stage: &'a Stage) -> Reader<'a> {
        let database = &stage.database;
        let name = format!("reader_{}_{}", std::process::id(), next_id());
        let mut admin = database.admin();
        let (role, tables) = match database.engine() {
            Engine::Postgres => {
                admin.batch(&format!("CREATE ROLE {name} LOGIN PASSWORD 'reader'"));
                (name.clone(), String::new())
            }
            _ => {
                let role = format!("'{name}'@'%'");
                admin.batch(&format!("CREATE USER {role} IDENTIFIED BY 'reader'"));
                (role, format!("{}.", database.name()))
            }
        };
        admin.batch(&format!("GRANT SELECT ON {tables}diesel_leases TO {role}"));
        admin.batch(&format!("GRANT SELECT, INSERT ON {tables}work TO {role}"));
        Reader { stage, name }
    }

    fn url(&self) -> String {
        let url = Url::parse(self.stage.database.url());
        format!(
            "{}://{}:reader@{}/{}",
            url.scheme, self.name, url.host, url.database
        )
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        let Reader { stage, name } = self;
        let mut admin = stage.database.admin();
        let _ = match stage.database.engine() {
            Engine::Postgres => admin.try_batch(&format!("DROP OWNED BY {name}; DROP ROLE {name}")),
            _ => admin.try_batch(&format!("DROP USER '{name}'@'%'")),
        };
    }
}

/// By the pool when it is built, else by the transaction. MariaDB lets whoever may read lock, too.
fn a_role_that_may_not_lock_is_told_so(engine: Engine) {
    let stage = Stage::new(engine);
    let reader = Reader::create(&stage);
    let url = reader.url();
    let may_lock = engine == Engine::Mariadb;
    let pool = try_build(engine, &url, false);
    assert_eq!(pool.is_ok(), may_lock, "{:?}", pool.err());
    for entrance in [Entrance::Plain, Entrance::ByHand, Entrance::Guarded] {
        let mut client = connect(engine, &url, entrance);
        let lease = stage.claim();
        let id = next_id();
        let done = client.transact(&lease.tenure(), &mut |sql| sql.run(&insert(id)));
        if may_lock {
            done.unwrap_or_else(|error| panic!("{entrance}: {error:?}"));
        } else {
            assert_no_loss(done, &lease);
            assert_eq!(stage.rows(id), 0, "{entrance}");
        }
    }
}
