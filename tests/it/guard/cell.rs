//! The cells of the matrix: engine × isolation × entrance.

use std::fmt;
use std::thread;

use super::client::{Client, Entrance};
use super::{Stage, next_id};
use crate::support::Engine;

/// How a transaction is isolated, by the settings of its session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    level: Option<&'static str>,
    /// MariaDB's `innodb_snapshot_isolation`.
    snapshot: Option<bool>,
}

impl Setting {
    pub(super) fn all(engine: Engine) -> Vec<Setting> {
        let levels = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];
        let snapshots: &[Option<bool>] = match engine {
            Engine::Sqlite => {
                let (level, snapshot) = (None, None);
                return vec![Setting { level, snapshot }];
            }
            Engine::Postgres | Engine::Mysql => &[None],
            Engine::Mariadb => &[Some(false), Some(true)],
        };
        let with = |level| {
            snapshots.iter().map(move |&snapshot| Setting {
                level: Some(level),
                snapshot,
            })
        };
        levels.into_iter().flat_map(with).collect()
    }

    /// Where a row that has changed since ends the whole transaction.
    pub(super) fn has_isolated_snapshots(self) -> bool {
        self.snapshot == Some(true) && self.level != Some("READ COMMITTED")
    }

    pub(super) fn is_serializable(self) -> bool {
        matches!(self.level, None | Some("SERIALIZABLE"))
    }

    /// For the client's transactions to come.
    pub(super) fn apply(self, engine: Engine, client: &mut dyn Client) {
        let sql = client.sql();
        if let Some(level) = self.level {
            let whose = match engine {
                Engine::Postgres => "SESSION CHARACTERISTICS AS",
                _ => "SESSION",
            };
            let set = format!("SET {whose} TRANSACTION ISOLATION LEVEL {level}");
            sql.batch(&set).unwrap();
        }
        if let Some(on) = self.snapshot {
            let on = if on { "ON" } else { "OFF" };
            let set = format!("SET SESSION innodb_snapshot_isolation = {on}");
            sql.batch(&set).unwrap();
        }
        // One transaction without a tenure: nothing is pending for the next one.
        sql.transact(&mut |_| Ok(())).unwrap();
    }
}

/// One cell, ready for a transaction.
pub(super) struct Cell<'a> {
    pub(super) engine: Engine,
    pub(super) setting: Setting,
    pub(super) entrance: Entrance,
    pub(super) stage: &'a Stage,
    pub(super) client: Box<dyn Client>,
    /// The row that it writes.
    pub(super) id: i64,
}

impl fmt::Display for Cell<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.engine, self.entrance)?;
        if let Some(level) = self.setting.level {
            write!(f, " {level}")?;
        }
        match self.setting.snapshot {
            Some(true) => f.write_str(" snapshot"),
            _ => Ok(()),
        }
    }
}

/// Runs `scenario` in every cell of an engine with these entrances, the settings one by one.
pub(super) fn each(engine: Engine, entrances: &[Entrance], scenario: fn(Cell<'_>)) {
    let stage = Stage::new(engine);
    for setting in Setting::all(engine) {
        run(&stage, &[setting], entrances, scenario);
    }
}

/// As [`each`], all cells at once: for those that mostly sleep.
pub(super) fn all(stage: &Stage, entrances: &[Entrance], scenario: fn(Cell<'_>)) {
    let settings = Setting::all(stage.database.engine());
    run(stage, &settings, entrances, scenario);
}

fn run(stage: &Stage, settings: &[Setting], entrances: &[Entrance], scenario: fn(Cell<'_>)) {
    let engine = stage.database.engine();
    // There is one writer in a file, and a cell is not about others.
    let own = || (engine == Engine::Sqlite).then(|| Stage::with_timings(engine, stage.timings()));
    thread::scope(|scope| {
        for (&setting, &entrance) in settings
            .iter()
            .flat_map(|setting| entrances.iter().map(move |entrance| (setting, entrance)))
        {
            let run = move || {
                let own = own();
                let stage = own.as_ref().unwrap_or(stage);
                let mut client = stage.bare_client(entrance);
                setting.apply(engine, client.as_mut());
                scenario(Cell {
                    engine,
                    setting,
                    entrance,
                    stage,
                    client,
                    id: next_id(),
                });
            };
            thread::Builder::new()
                .name(format!("{engine} {entrance} {setting:?}"))
                .spawn_scoped(scope, run)
                .unwrap();
        }
    });
}
