//! The library's own statements, read off its connections by Diesel's instrumentation, so that the
//! bare side runs the same SQL by construction.

use std::marker::PhantomData;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use diesel::backend::Backend;
use diesel::connection::{Instrumentation, InstrumentationEvent, set_default_instrumentation};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::serialize::ToSql;
use diesel::sql_types::{BigInt, HasSqlType, Text};
use diesel_lease::{BoxError, Leases};

static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());
static COUNT: AtomicU64 = AtomicU64::new(0);

fn recorder() -> Option<Box<dyn Instrumentation>> {
    Some(Box::new(|event: InstrumentationEvent<'_>| {
        if let InstrumentationEvent::StartQuery { query, .. } = event {
            SEEN.lock()
                .expect("nobody panics with it")
                .push(query.to_string());
        }
    }))
}

fn counter() -> Option<Box<dyn Instrumentation>> {
    Some(Box::new(|event: InstrumentationEvent<'_>| {
        if let InstrumentationEvent::StartQuery { .. } = event {
            COUNT.fetch_add(1, Ordering::Relaxed);
        }
    }))
}

/// From now on new connections count their statements.
pub(crate) fn count_statements() -> Result<(), BoxError> {
    Ok(set_default_instrumentation(counter)?)
}

/// How many statements there were on connections that count them.
pub(crate) fn statements() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// One statement as it was sent: its text around the binds, and the binds.
#[derive(Debug, Clone)]
pub(crate) struct Sent {
    text: Vec<String>,
    binds: Vec<Bind>,
}

#[derive(Debug, Clone, PartialEq)]
enum Bind {
    Text(String),
    Int(i64),
}

/// What each act sends. `claim` is two statements on MySQL and MariaDB.
#[derive(Debug, Clone)]
pub(crate) struct Acts {
    pub(crate) claim: Vec<Sent>,
    pub(crate) renew: Sent,
    pub(crate) verify: Sent,
    pub(crate) release: Sent,
    name: String,
    pub(crate) holder: String,
    term: i64,
}

/// Does every act once and keeps what was sent.
pub(crate) fn record(url: &str) -> Result<Acts, BoxError> {
    set_default_instrumentation(recorder)?;
    let leases = Leases::builder().connections(1).build(url)?;
    leases.migrate()?;
    let name = format!("bench:recorded:{}", std::process::id());
    // The term is found again among the binds, so it must not be one of the statements' constants.
    while leases
        .inspect(&name)?
        .is_none_or(|record| record.term() < 7)
    {
        leases.claim(&name)?.release()?;
    }
    take_seen();
    let lease = leases.claim(&name)?;
    let claim: Vec<Sent> = take_seen().iter().map(|sent| Sent::parse(sent)).collect();
    lease.renew()?;
    let renew = the_one(take_seen())?;
    lease.verify()?;
    let verify = the_one(take_seen())?;
    let term = lease.term() as i64;
    lease.release()?;
    let release = the_one(take_seen())?;
    set_default_instrumentation(|| None)?;
    let holder = release.binds.iter().find_map(|bind| match bind {
        Bind::Text(text) if text.len() == 32 && *text != name => Some(text.clone()),
        _ => None,
    });
    let holder = holder.ok_or("a release without a holder")?;
    Ok(Acts {
        claim,
        renew,
        verify,
        release,
        name,
        holder,
        term,
    })
}

fn take_seen() -> Vec<String> {
    std::mem::take(&mut SEEN.lock().expect("nobody panics with it"))
}

fn the_one(sent: Vec<String>) -> Result<Sent, BoxError> {
    match sent.as_slice() {
        [one] => Ok(Sent::parse(one)),
        _ => Err(format!("one statement was expected, and not {sent:?}").into()),
    }
}

impl Acts {
    /// The same statements for another lease.
    pub(crate) fn for_lease(&mut self, name: &str, holder: &str, term: i64) {
        let to = [
            (Bind::Text(self.name.clone()), Bind::Text(name.to_owned())),
            (
                Bind::Text(self.holder.clone()),
                Bind::Text(holder.to_owned()),
            ),
            (Bind::Int(self.term), Bind::Int(term)),
        ];
        let others = [&mut self.renew, &mut self.verify, &mut self.release];
        for sent in self.claim.iter_mut().chain(others) {
            for bind in &mut sent.binds {
                if let Some((_, new)) = to.iter().find(|(old, _)| old == bind) {
                    *bind = new.clone();
                }
            }
        }
        (self.name, self.holder, self.term) = (name.to_owned(), holder.to_owned(), term);
    }
}

impl Sent {
    /// Reads `SQL -- binds: [..]`, as Diesel displays a statement.
    fn parse(sent: &str) -> Sent {
        let (sql, binds) = sent.rsplit_once(" -- binds: ").unwrap_or((sent, "[]"));
        let binds = binds
            .trim_matches(['[', ']'])
            .split(", ")
            .filter(|bind| !bind.is_empty());
        let binds = binds.map(|bind| match bind.parse() {
            Ok(number) => Bind::Int(number),
            Err(_) => Bind::Text(bind.trim_matches('"').to_owned()),
        });
        // A placeholder is `?` or `$1`, and neither sign is anywhere else.
        let text = sql.split(['?', '$']).enumerate().map(|(at, part)| {
            let numbered = at > 0 && sql.contains('$');
            if numbered {
                part.trim_start_matches(|c: char| c.is_ascii_digit())
            } else {
                part
            }
        });
        Sent {
            text: text.map(str::to_owned).collect(),
            binds: binds.collect(),
        }
    }

    /// As a statement that stays prepared under `Id`, and answers with `Answer`.
    pub(crate) fn kept<Id, Answer>(&self) -> Kept<'_, Id, Answer> {
        Kept(self, PhantomData)
    }
}

pub(crate) struct Kept<'a, Id, Answer>(&'a Sent, PhantomData<(Id, Answer)>);

impl<DB, Id, Answer> QueryFragment<DB> for Kept<'_, Id, Answer>
where
    DB: Backend + HasSqlType<Text> + HasSqlType<BigInt>,
    String: ToSql<Text, DB>,
    i64: ToSql<BigInt, DB>,
{
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        for (at, text) in self.0.text.iter().enumerate() {
            out.push_sql(text);
            match self.0.binds.get(at) {
                Some(Bind::Text(text)) => out.push_bind_param::<Text, _>(text)?,
                Some(Bind::Int(number)) => out.push_bind_param::<BigInt, _>(number)?,
                None => {}
            }
        }
        Ok(())
    }
}

impl<Id: 'static, Answer: 'static> QueryId for Kept<'_, Id, Answer> {
    type QueryId = (Id, Answer);
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl<Id, Answer> Query for Kept<'_, Id, Answer> {
    type SqlType = Answer;
}

impl<Conn, Id, Answer> RunQueryDsl<Conn> for Kept<'_, Id, Answer> {}
