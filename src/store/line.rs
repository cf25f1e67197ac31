//! A worker's line to the database: a session when there is one, a new one when there is none.
//!
//! Invariant: on any error the session is hung up. What an error has left on it is not known, and a
//! new one costs little beside that.
//!
//! Hazard: a session that was kept since an earlier call may have died without a word. So the first
//! error on a kept session is no answer yet: the question is asked again on a new one, if it is one
//! that may be asked twice.

use diesel::result::{ConnectionError, DatabaseErrorKind, Error as DieselError, QueryResult};

use super::connect::Connector;
use crate::clock::{Clock, Moment};
use crate::protocol::Session;

/// Why a question got no answer.
pub(crate) enum Failure {
    SchemaMissing,
    /// Another has the row locked for longer than the lock limit.
    Locked,
    TooLate,
    Connect(ConnectionError),
    Database(diesel::result::Error),
}

impl Failure {
    /// The same for somebody else. Diesel's errors cannot be cloned; kind and text are kept.
    pub(crate) fn copy(&self) -> Failure {
        match self {
            Failure::SchemaMissing => Failure::SchemaMissing,
            Failure::Locked => Failure::Locked,
            Failure::TooLate => Failure::TooLate,
            Failure::Connect(error) => {
                Failure::Connect(ConnectionError::BadConnection(error.to_string()))
            }
            Failure::Database(error) => {
                let kind = match error {
                    DieselError::DatabaseError(kind, _) => *kind,
                    _ => DatabaseErrorKind::Unknown,
                };
                Failure::Database(DieselError::DatabaseError(
                    kind,
                    Box::new(error.to_string()),
                ))
            }
        }
    }
}

pub(crate) struct Line {
    connector: Connector,
    clock: Clock,
    session: Option<Box<dyn Session>>,
    due: Moment,
}

impl Line {
    pub(crate) fn new(connector: Connector, clock: Clock) -> Line {
        Line {
            connector,
            clock,
            session: None,
            due: Moment::FIRST,
        }
    }

    /// A job begins, whose answer nobody waits for after `due`.
    pub(crate) fn begin(&mut self, due: Moment) {
        self.due = due;
    }

    pub(crate) fn is_overdue(&self) -> bool {
        self.clock.now() >= self.due
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.session.is_some()
    }

    pub(crate) fn hang_up(&mut self) {
        self.session = None;
    }

    /// A session beside the one of this line.
    pub(crate) fn another_session(&self) -> Result<Box<dyn Session>, Failure> {
        self.connector.connect().map_err(Failure::Connect)
    }

    /// Asks once.
    pub(crate) fn ask_once<T>(
        &mut self,
        question: impl FnOnce(&mut dyn Session) -> QueryResult<T>,
    ) -> Result<T, Failure> {
        let session = match &mut self.session {
            Some(session) => session,
            empty => empty.insert(self.connector.connect().map_err(Failure::Connect)?),
        };
        question(session.as_mut()).map_err(|error| {
            self.hang_up();
            Failure::Database(error)
        })
    }

    /// Asks what may be asked twice.
    pub(crate) fn ask<T>(
        &mut self,
        question: impl Fn(&mut dyn Session) -> QueryResult<T>,
    ) -> Result<T, Failure> {
        let kept = self.is_connected();
        let answer = self.ask_once(&question);
        let answer = match answer {
            Err(Failure::Database(_)) if kept && !self.is_overdue() => self.ask_once(&question),
            answer => answer,
        };
        answer.map_err(|failure| self.explain(failure))
    }

    /// Asks for a change, and whether there was anything to change. A second "no" proves nothing: it
    /// may be the work of a first time whose answer was lost.
    pub(crate) fn ask_to_change(
        &mut self,
        question: impl Fn(&mut dyn Session) -> QueryResult<bool>,
    ) -> Result<bool, Failure> {
        let kept = self.is_connected();
        let answer = match self.ask_once(&question) {
            Err(Failure::Database(error)) if kept && !self.is_overdue() => {
                match self.ask_once(&question) {
                    Ok(false) => Err(Failure::Database(error)),
                    answer => answer,
                }
            }
            answer => answer,
        };
        answer.map_err(|failure| self.explain(failure))
    }

    /// A missing table is told by asking for it, and not by an error's text.
    pub(crate) fn explain(&mut self, failure: Failure) -> Failure {
        match failure {
            // What its caller says of it by then, whichever comes first.
            Failure::Database(_) if self.is_overdue() => Failure::TooLate,
            Failure::Database(_) => match self.ask_once(|session| session.has_table()) {
                Ok(false) => Failure::SchemaMissing,
                _ => failure,
            },
            other => other,
        }
    }
}
