//! The statements, built once for all engines.
//!
//! Invariant: what must be atomic is one statement, and the clock in it is the database's.
//! [`Now`] is that clock; its words, and the words between an insert and its update, stand in each
//! engine's file.
//!
//! Hazard: Diesel never keeps an `UPDATE` or a `DO UPDATE` prepared, so the server would parse and
//! plan every one anew. [`Write`] writes the few fixed words itself, lets the query builder write
//! what stands between them, and is kept under an id of its own: one id, one text.

use std::marker::PhantomData;

use diesel::backend::Backend;
use diesel::dsl::{AsExprOf, auto_type, case_when};
use diesel::expression::{
    AppearsOnTable, Expression, SelectableExpression, ValidGrouping, is_aggregate,
};
use diesel::prelude::*;
use diesel::query_builder::{AsChangeset, AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{BigInt, Text};

use super::Key;
use crate::schema::diesel_leases as leases;

/// The database's clock: whole milliseconds since 1970, in UTC.
#[derive(Debug, Clone, Copy, QueryId)]
pub(crate) struct Now;

impl Expression for Now {
    type SqlType = BigInt;
}
impl<QS> SelectableExpression<QS> for Now {}
impl<QS> AppearsOnTable<QS> for Now {}
impl<GB> ValidGrouping<GB> for Now {
    type IsAggregate = is_aggregate::Never;
}
diesel::numeric_expr!(Now);

/// What a read selects, in the order of [`Row`](super::Row).
#[auto_type]
pub(crate) fn row() -> _ {
    (
        leases::name,
        leases::holder,
        leases::instance,
        leases::term,
        leases::expires_at_ms - Now,
        leases::slot_ms,
        leases::unfinished_slot_ms,
        leases::rerun_slot_ms,
    )
}

/// Nobody holds it. The complement of [`live()`] in every millisecond.
#[auto_type]
pub(crate) fn free() -> _ {
    leases::expires_at_ms.le(Now)
}

#[auto_type]
pub(crate) fn live() -> _ {
    leases::expires_at_ms.gt(Now)
}

#[auto_type]
pub(crate) fn named<'a>(name: &'a str) -> _ {
    leases::name.eq(name)
}

#[auto_type]
pub(crate) fn named_and_live<'a>(name: &'a str) -> _ {
    leases::name.eq(name).and(live())
}

#[auto_type]
pub(crate) fn held_by<'a>(name: &'a str, holder: &'a str) -> _ {
    leases::name.eq(name).and(leases::holder.eq(holder))
}

/// Not claimed since, whatever the clock says.
#[auto_type]
pub(crate) fn held_as<'a>(name: &'a str, holder: &'a str, term: i64) -> _ {
    leases::name
        .eq(name)
        .and(leases::holder.eq(holder))
        .and(leases::term.eq(term))
}

/// Held by this claim, and still so: what renew and verify ask.
#[auto_type]
pub(crate) fn held_live<'a>(name: &'a str, holder: &'a str, term: i64) -> _ {
    leases::name
        .eq(name)
        .and(leases::holder.eq(holder))
        .and(leases::term.eq(term))
        .and(live())
}

/// Any of them: a holder is of one name, so no name can be matched with the holder of another.
#[auto_type]
pub(crate) fn any_held<'a>(keys: &'a [Key<'a>]) -> _ {
    let names: Vec<&'a str> = keys.iter().map(|key| key.name).collect();
    let holders: Vec<&'a str> = keys.iter().map(|key| key.holder).collect();
    leases::name
        .eq_any(names)
        .and(leases::holder.eq_any(holders))
}

#[auto_type]
pub(crate) fn any_held_live<'a>(keys: &'a [Key<'a>]) -> _ {
    let any: any_held<'a> = any_held(keys);
    any.and(live())
}

#[auto_type]
pub(crate) fn first<'a>(name: &'a str, holder: &'a str, instance: &'a str, lease_ms: i64) -> _ {
    (
        leases::name.eq(name),
        leases::holder.eq(holder),
        leases::instance.eq(instance),
        leases::term.eq(1_i64),
        leases::expires_at_ms.eq(Now + lease_ms),
    )
}

#[auto_type]
pub(crate) fn next<'a>(holder: &'a str, instance: &'a str, lease_ms: i64) -> _ {
    (
        leases::holder.eq(holder),
        leases::instance.eq(instance),
        leases::term.eq(leases::term + 1_i64),
        leases::expires_at_ms.eq(Now + lease_ms),
    )
}

/// [`next`] for an engine whose upsert has no `WHERE`. Assignments run left to right, so the column
/// that the conditions read comes last.
#[auto_type]
pub(crate) fn next_if_free<'a>(holder: &'a str, instance: &'a str, lease_ms: i64) -> _ {
    let holder: AsExprOf<&'a str, Text> = holder.into_sql::<Text>();
    let instance: AsExprOf<&'a str, Text> = instance.into_sql::<Text>();
    (
        leases::holder.eq(case_when(free(), holder).otherwise(leases::holder)),
        leases::instance.eq(case_when(free(), instance).otherwise(leases::instance)),
        leases::term.eq(case_when(free(), leases::term + 1_i64).otherwise(leases::term)),
        leases::expires_at_ms
            .eq(case_when(free(), Now + lease_ms).otherwise(leases::expires_at_ms)),
    )
}

#[auto_type]
pub(crate) fn first_for_slot<'a>(
    name: &'a str,
    holder: &'a str,
    instance: &'a str,
    lease_ms: i64,
    slot_ms: i64,
) -> _ {
    (
        leases::name.eq(name),
        leases::holder.eq(holder),
        leases::instance.eq(instance),
        leases::term.eq(1_i64),
        leases::expires_at_ms.eq(Now + lease_ms),
        leases::slot_ms.eq(slot_ms),
        leases::unfinished_slot_ms.eq(slot_ms),
    )
}

#[auto_type]
pub(crate) fn next_for_slot<'a>(
    holder: &'a str,
    instance: &'a str,
    lease_ms: i64,
    slot_ms: i64,
) -> _ {
    (
        leases::holder.eq(holder),
        leases::instance.eq(instance),
        leases::term.eq(leases::term + 1_i64),
        leases::expires_at_ms.eq(Now + lease_ms),
        leases::slot_ms.eq(slot_ms),
        leases::unfinished_slot_ms.eq(slot_ms),
    )
}

/// Still as it was read, and free. The term alone would not do: a finish moves the slot without it.
#[auto_type]
pub(crate) fn free_as_read<'a>(
    name: &'a str,
    term: i64,
    slot_ms: i64,
    unfinished_slot_ms: i64,
) -> _ {
    leases::name
        .eq(name)
        .and(leases::term.eq(term))
        .and(leases::slot_ms.eq(slot_ms))
        .and(leases::unfinished_slot_ms.eq(unfinished_slot_ms))
        .and(free())
}

#[auto_type]
pub(crate) fn next_for_rerun<'a>(holder: &'a str, instance: &'a str, lease_ms: i64) -> _ {
    (
        leases::holder.eq(holder),
        leases::instance.eq(instance),
        leases::term.eq(leases::term + 1_i64),
        leases::expires_at_ms.eq(Now + lease_ms),
        leases::rerun_slot_ms.eq(leases::slot_ms),
    )
}

/// Nobody is at it, its last instant's round was cut short, and that has not been run again.
#[auto_type]
pub(crate) fn cut_short() -> _ {
    leases::unfinished_slot_ms
        .eq(leases::slot_ms)
        .and(leases::rerun_slot_ms.lt(leases::slot_ms))
        .and(free())
}

#[auto_type]
pub(crate) fn cut_short_as_found<'a>(name: &'a str, term: i64, slot_ms: i64) -> _ {
    leases::name
        .eq(name)
        .and(leases::term.eq(term))
        .and(leases::slot_ms.eq(slot_ms))
        .and(cut_short())
}

/// Given back with its round at its end. The schedule may have passed other instants meanwhile, up
/// to the database's now.
#[auto_type]
pub(crate) fn finished(passed_ms: i64) -> _ {
    let passed: AsExprOf<i64, BigInt> = passed_ms.into_sql::<BigInt>();
    (
        leases::slot_ms.eq(
            case_when(leases::slot_ms.lt(passed_ms).and(Now.ge(passed_ms)), passed)
                .otherwise(leases::slot_ms),
        ),
        leases::unfinished_slot_ms.eq(0_i64),
        leases::expires_at_ms.eq(0_i64),
    )
}

#[auto_type]
pub(crate) fn settled() -> _ {
    leases::unfinished_slot_ms.eq(0_i64)
}

#[auto_type]
pub(crate) fn unfinished_at<'a>(name: &'a str, slot_ms: i64) -> _ {
    leases::name
        .eq(name)
        .and(leases::unfinished_slot_ms.eq(slot_ms))
}

/// As it was before a claim for a slot that nobody got to use.
#[auto_type]
pub(crate) fn slot_undone(slot_ms: i64, unfinished_slot_ms: i64) -> _ {
    (
        leases::slot_ms.eq(slot_ms),
        leases::unfinished_slot_ms.eq(unfinished_slot_ms),
        leases::expires_at_ms.eq(0_i64),
    )
}

/// As it was before a claim for a rerun that nobody got to use, as far as it matters.
#[auto_type]
pub(crate) fn rerun_undone() -> _ {
    (
        leases::rerun_slot_ms.eq(0_i64),
        leases::expires_at_ms.eq(0_i64),
    )
}

#[auto_type]
pub(crate) fn extended(lease_ms: i64) -> _ {
    leases::expires_at_ms.eq(Now + lease_ms)
}

#[auto_type]
pub(crate) fn given_back() -> _ {
    leases::expires_at_ms.eq(0_i64)
}

#[auto_type]
pub(crate) fn forced() -> _ {
    (
        leases::holder.eq(""),
        leases::instance.eq(""),
        leases::term.eq(leases::term + 1_i64),
        leases::expires_at_ms.eq(0_i64),
    )
}

/// A write of fixed text, kept prepared: `start changes end`.
#[derive(Debug)]
pub(crate) struct Write<Id, Start, Changes, End> {
    start: Start,
    changes: Changes,
    end: End,
    id: PhantomData<Id>,
}

impl<Id, Changes, Filter> Write<Id, Update, Changes, Where<Filter>> {
    pub(crate) fn update<C>(id: Id, changes: C, filter: Filter) -> Self
    where
        C: AsChangeset<Target = leases::table, Changeset = Changes>,
    {
        Write::of(id, Update, changes, Where(filter))
    }
}

impl<Id, Start, Changes, End> Write<Id, Start, Changes, End> {
    pub(crate) fn of<C>(_: Id, start: Start, changes: C, end: End) -> Self
    where
        C: AsChangeset<Target = leases::table, Changeset = Changes>,
    {
        Write {
            start,
            changes: changes.as_changeset(),
            end,
            id: PhantomData,
        }
    }
}

impl<Id, Values, Changes, End> Write<Id, InsertOr<Values>, Changes, End> {
    pub(crate) fn upsert<C>(id: Id, values: Values, changes: C, end: End) -> Self
    where
        C: AsChangeset<Target = leases::table, Changeset = Changes>,
    {
        Write::of(id, InsertOr(values), changes, end)
    }
}

impl<DB, Id, Start, Changes, End> QueryFragment<DB> for Write<Id, Start, Changes, End>
where
    DB: Backend,
    Start: QueryFragment<DB>,
    Changes: QueryFragment<DB>,
    End: QueryFragment<DB>,
{
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        self.start.walk_ast(out.reborrow())?;
        self.changes.walk_ast(out.reborrow())?;
        self.end.walk_ast(out)
    }
}

impl<Id: 'static, Start, Changes, End> QueryId for Write<Id, Start, Changes, End> {
    type QueryId = Id;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl<Id, Start, Changes, Filter, C: Column> Query
    for Write<Id, Start, Changes, WhereReturning<Filter, C>>
{
    type SqlType = C::SqlType;
}

impl<Conn, Id, Start, Changes, End> RunQueryDsl<Conn> for Write<Id, Start, Changes, End> {}

/// `UPDATE diesel_leases SET `
#[derive(Debug)]
pub(crate) struct Update;

impl<DB: Backend> QueryFragment<DB> for Update {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        out.push_sql("UPDATE ");
        out.push_identifier("diesel_leases")?;
        out.push_sql(" SET ");
        Ok(())
    }
}

/// An insert, and the words that lead to what is changed when the name is there already.
#[derive(Debug)]
pub(crate) struct InsertOr<Values>(Values);

impl<DB, Values> QueryFragment<DB> for InsertOr<Values>
where
    DB: Backend,
    Values: QueryFragment<DB>,
    OrUpdate: QueryFragment<DB>,
{
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        self.0.walk_ast(out.reborrow())?;
        OrUpdate.walk_ast(out)
    }
}

/// The engine's words between an insert and its update.
#[derive(Debug)]
pub(crate) struct OrUpdate;

/// ` WHERE filter`
#[derive(Debug)]
pub(crate) struct Where<Filter>(pub(crate) Filter);

impl<DB: Backend, Filter: QueryFragment<DB>> QueryFragment<DB> for Where<Filter> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        out.push_sql(" WHERE ");
        self.0.walk_ast(out)
    }
}

/// ` WHERE filter RETURNING column`
#[derive(Debug)]
pub(crate) struct WhereReturning<Filter, Column>(pub(crate) Filter, pub(crate) Column);

impl<DB, Filter, C> QueryFragment<DB> for WhereReturning<Filter, C>
where
    DB: Backend,
    Filter: QueryFragment<DB>,
    C: Column,
{
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        out.push_sql(" WHERE ");
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(" RETURNING ");
        out.push_identifier(C::NAME)
    }
}

/// Nothing more.
#[derive(Debug)]
pub(crate) struct End;

impl<DB: Backend> QueryFragment<DB> for End {
    fn walk_ast<'b>(&'b self, _: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        Ok(())
    }
}
