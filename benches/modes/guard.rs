//! A transaction of two inserts and an update: plain, on a guarded connection without a tenure, and on
//! one with a tenure; in turns, and on one connection, since how fast that is depends on where the server
//! runs its side of it. A run has a connection of its own.

use std::time::Instant;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_lease::{BoxError, GuardedConnection, Leases};

use crate::Effort;
use crate::support::engines::Engine;
use crate::support::report::{Times, json};

diesel::table! {
    lease_bench (id) {
        id -> BigInt,
        count -> BigInt,
    }
}

const SIDES: [&str; 3] = ["plain", "no tenure", "guarded"];
const WARM_UP: usize = 20;

macro_rules! measure {
    ($Connection:ty, $engine:expr, $effort:expr) => {{
        let leases = Leases::connect(&$engine.url)?;
        leases.migrate()?;
        macro_rules! work {
            ($conn:expr, $id:expr) => {
                $conn.transaction(|conn| {
                    for id in [$id, $id + 1] {
                        diesel::insert_into(lease_bench::table)
                            .values((lease_bench::id.eq(id), lease_bench::count.eq(0_i64)))
                            .execute(conn)?;
                    }
                    diesel::update(lease_bench::table.find($id))
                        .set(lease_bench::count.eq(1_i64))
                        .execute(conn)
                })
            };
        }
        let held = leases.claim("bench:guard")?.hold()?;
        let mut times: [Times; 3] = Default::default();
        for _ in 0..$effort.runs {
            let mut guarded = GuardedConnection::new(<$Connection>::establish(&$engine.url)?);
            guarded.batch_execute("DROP TABLE IF EXISTS lease_bench")?;
            guarded.batch_execute(
                "CREATE TABLE lease_bench (id BIGINT PRIMARY KEY, count BIGINT NOT NULL)",
            )?;
            if $engine.name == "sqlite" {
                guarded.batch_execute("PRAGMA busy_timeout = 5000")?;
                guarded.batch_execute("PRAGMA synchronous = FULL")?;
            }
            let mut id = 0_i64;
            for round in 0..WARM_UP + $effort.rounds {
                for (side, times) in times.iter_mut().enumerate() {
                    id += 2;
                    let entered = (side == 2).then(|| held.tenure().enter());
                    let start = Instant::now();
                    if side == 0 {
                        work!(guarded.unguarded(), id)?;
                    } else {
                        work!(guarded, id)?;
                    }
                    if round >= WARM_UP {
                        times.push(start.elapsed());
                    }
                    drop(entered);
                }
            }
            guarded.batch_execute("DROP TABLE lease_bench")?;
        }
        held.release()?;
        times
    }};
}

pub(crate) fn run(engine: &Engine, effort: Effort) -> Result<(), BoxError> {
    let times = match engine.name {
        #[cfg(feature = "sqlite")]
        "sqlite" => measure!(diesel::SqliteConnection, engine, effort),
        #[cfg(feature = "postgres")]
        "postgres" => measure!(diesel::PgConnection, engine, effort),
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => measure!(diesel::MysqlConnection, engine, effort),
        other => return Err(format!("{other} is not built in").into()),
    };
    let facts = engine.facts()?;
    println!(
        "\n{facts}; one client, {} runs of {} rounds",
        effort.runs, effort.rounds
    );
    println!("transaction        median     p99   ratio     more");
    let floor = times[0].median();
    for (side, times) in SIDES.iter().zip(&times) {
        let (median, p99) = (times.median(), times.p99());
        let (ratio, more) = (median / floor, median - floor);
        println!("{side:16} {median:8.1} {p99:7.1}  {ratio:6.2} {more:7.1} µs");
        json(
            &[
                ("bench", "guard"),
                ("engine", engine.name),
                ("server", &facts),
                ("side", side),
            ],
            &[
                ("median_us", median),
                ("p99_us", p99),
                ("ratio", ratio),
                ("more_us", more),
            ],
        );
    }
    Ok(())
}
