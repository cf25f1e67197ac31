//! The r2d2 customizer that prepares the connections of a guarded pool.
//!
//! Invariant: a pool whose connections could not be guarded is never built.

use diesel::connection::LoadConnection;
use diesel::r2d2::{CustomizeConnection, Error as PoolError, R2D2Connection};
use diesel::result::Error as DieselError;
use r2d2::NopConnectionCustomizer;

use super::LeaseBackend;
use super::connection::GuardedConnection;
use crate::protocol::Engine;

/// Prepares every connection of an r2d2 pool of [`GuardedConnection`]s.
///
/// As each connection is made it looks whether the lease table is in sight, so that the guard knows
/// beforehand where to fence, and whether this role may lock its rows.
///
/// # Errors
///
/// r2d2 fails to build a pool whose connections cannot be made, after its
/// [`connection_timeout`](r2d2::Builder::connection_timeout). That is so where the lease table is in
/// sight and this role may not lock its rows (PostgreSQL: SELECT and UPDATE on it), and where the
/// index is missing that the fence of PostgreSQL rests on. r2d2 logs the reason and keeps its text.
///
/// # Examples
///
/// See [`GuardedConnection`].
#[derive(Debug, Clone, Copy)]
#[must_use = "give it to `connection_customizer` of a pool's builder"]
pub struct LeaseGuard<Next = NopConnectionCustomizer> {
    require_tenure: bool,
    next: Next,
}

impl LeaseGuard {
    /// Guards transactions that have a tenure, and leaves others alone.
    pub fn new() -> LeaseGuard {
        LeaseGuard {
            require_tenure: false,
            next: NopConnectionCustomizer,
        }
    }
}

impl Default for LeaseGuard {
    fn default() -> LeaseGuard {
        LeaseGuard::new()
    }
}

impl<Next> LeaseGuard<Next> {
    /// Refuses to begin a transaction without a tenure, by [`TenureRequired`](crate::TenureRequired).
    pub fn require_tenure(mut self) -> LeaseGuard<Next> {
        self.require_tenure = true;
        self
    }

    /// Has `customizer` prepare each connection too, after this. It replaces one given before.
    pub fn then<Other>(self, customizer: Other) -> LeaseGuard<Other> {
        LeaseGuard {
            require_tenure: self.require_tenure,
            next: customizer,
        }
    }
}

impl<C, Next> CustomizeConnection<GuardedConnection<C>, PoolError> for LeaseGuard<Next>
where
    C: LoadConnection + R2D2Connection + 'static,
    C::Backend: LeaseBackend,
    Next: CustomizeConnection<GuardedConnection<C>, PoolError>,
{
    fn on_acquire(&self, conn: &mut GuardedConnection<C>) -> Result<(), PoolError> {
        let (inner, guard) = conn.parts();
        if C::Backend::has_table(inner).map_err(PoolError::QueryError)? {
            let refused = C::Backend::refuses_fence(inner).map_err(PoolError::QueryError)?;
            if let Some(why) = refused {
                return Err(PoolError::QueryError(DieselError::QueryBuilderError(
                    Box::new(why),
                )));
            }
        }
        guard.require_tenure = self.require_tenure;
        self.next.on_acquire(conn)
    }

    fn on_release(&self, conn: GuardedConnection<C>) {
        self.next.on_release(conn);
    }
}
