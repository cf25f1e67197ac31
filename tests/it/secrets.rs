//! The password of a database URL is shown nowhere: in no error, `Debug` or log entry.

use std::error::Error as StdError;
use std::fmt::Debug;
use std::time::Duration;

use diesel_lease::{Error, Leases, Timings};
use log::Level;

use crate::support::database::Database;
use crate::support::log::{Captured, everything};
use crate::support::proxy::Proxy;
use crate::support::servers::Server;
use crate::support::url::Url;
use crate::support::watched::{Watch, managed};
use crate::support::{Engine, LONG, engines, eventually, unique};

engines! {
    servers:
    fn no_error_shows_a_password,
    fn no_error_shows_a_password_of_the_query,
    fn no_error_over_a_given_manager_shows_a_password,
    fn nothing_shows_the_password_of_a_session_that_works,
}

/// What passwords here are made of. None of it stands anywhere else.
const PIECES: [&str; 4] = ["kx7qa", "vw9zb", "jt3mc", "hq5pd"];

/// As they may stand in a URL, rightly and wrongly escaped.
const PASSWORDS: [&str; 16] = [
    "kx7qa",
    "kx7qa%40vw9zb%2Fjt3mc%3A%3F%23%25hq5pd",
    "kx7qa%c3%a9vw9zb%20",
    "kx7qa@vw9zb",
    "kx7qa:vw9zb",
    "kx7qa/vw9zb",
    "@kx7qa/@vw9zb:jt3mc/hq5pd@",
    "kx7qa@vw9zb/jt3mc:hq5pd",
    "kx7qa?vw9zb=jt3mc&hq5pd",
    "kx7qa#vw9zb",
    "kx7qa[vw9zb]jt3mc",
    "kx7qa vw9zb\"jt3mc'",
    "kx7qa%zzvw9zb",
    "kx7qa%",
    "kx7qa\0vw9zb",
    "kx7qa%00vw9zb",
];

#[track_caller]
fn assert_hides(url: &str, what: &str, text: &str) {
    let text = text.to_lowercase();
    for piece in PIECES {
        // Also as a list of bytes.
        let bytes = format!("{:?}", piece.as_bytes());
        let bytes = bytes.trim_matches(['[', ']']);
        assert!(
            !text.contains(piece) && !text.contains(bytes),
            "{what} of {url:?} shows {piece}: {text}"
        );
    }
}

#[track_caller]
fn assert_debug_hides(url: &str, value: &impl Debug) {
    assert_hides(url, "Debug", &format!("{value:?}"));
    assert_hides(url, "Debug", &format!("{value:#?}"));
}

#[track_caller]
fn assert_error_hides(url: &str, error: &Error) {
    let mut next: Option<&dyn StdError> = Some(error);
    while let Some(error) = next {
        assert_hides(url, "an error", &error.to_string());
        assert_debug_hides(url, &error);
        next = error.source();
    }
}

#[track_caller]
fn assert_logs_hide(engine: Engine) {
    for entry in everything() {
        let text = format!("{entry} {entry:?}");
        assert_hides(&engine.to_string(), "a log entry", &text);
    }
}

/// Whatever is tried with such leases fails, and shows nothing.
#[track_caller]
fn assert_fails_hidden(url: &str, built: Result<Leases, Error>) {
    let leases = match built {
        Ok(leases) => leases,
        Err(error) => return assert_error_hides(url, &error),
    };
    assert_debug_hides(url, &leases);
    for answer in [
        leases.try_claim("name").map(drop),
        leases.inspect("name").map(drop),
        leases.migrate(),
        leases.available(),
    ] {
        assert_error_hides(url, &answer.expect_err(url));
    }
    assert_debug_hides(url, &leases);
}

fn builder() -> diesel_lease::Builder {
    // A name that is not to be found may take its time.
    Leases::builder().timings(Timings {
        attempt: Duration::from_secs(2),
        ..Timings::default()
    })
}

/// URLs with which nothing can be done, each for another reason.
fn useless_urls(engine: Engine, password: &str) -> Vec<String> {
    let server = Server::shared(engine);
    let good = Url::parse(&server.url);
    let (scheme, user, host) = (good.scheme, good.user, good.host);
    let with = |scheme: &str, host: &str, rest: &str| {
        format!("{scheme}://{user}:{password}@{host}/{rest}")
    };
    let mut urls = vec![
        with(scheme, host, good.database),
        with(scheme, host, "nosuch"),
        with(scheme, "127.0.0.1:1", good.database),
        with(scheme, "127.0.0.1:notaport", good.database),
        with(scheme, "127.0.0.1:99999", good.database),
        with(scheme, "[::1", good.database),
        with(scheme, "", good.database),
        with(scheme, host, "a/b/c"),
        with(scheme, host, &format!("{}?nosuch=1", good.database)),
        with(
            scheme,
            host,
            &format!("{}?ssl_mode=nosuch&sslmode=nosuch", good.database),
        ),
        with(&scheme.to_uppercase(), host, good.database),
        with("oracle", host, good.database),
        with(&format!("jdbc:{scheme}"), host, good.database),
        format!("{scheme}:{user}:{password}@{host}/nosuch/nosuch"),
        format!("{scheme}:/{user}:{password}@{host}/nosuch/nosuch"),
        format!("{scheme}://:{password}@{host}/nosuch"),
        format!("sqlite://{user}:{password}@{host}/nosuch/nosuch"),
    ];
    if password == PASSWORDS[1] {
        urls.push(with(scheme, "nosuch.invalid", good.database));
    }
    urls
}

fn no_error_shows_a_password(engine: Engine) {
    for password in PASSWORDS {
        for url in useless_urls(engine, password) {
            assert_fails_hidden(&url, builder().build(&url));
        }
    }
    assert_logs_hide(engine);
}

/// libpq takes them there. MySQL's URLs have none, and ignore what they do not know.
fn no_error_shows_a_password_of_the_query(engine: Engine) {
    let database = Database::create(engine);
    let good = Url::parse(database.url());
    // A `&` begins another parameter, however it is read.
    for password in PASSWORDS
        .into_iter()
        .filter(|password| !password.contains('&'))
    {
        for key in ["password", "sslpassword", "pass%77ord"] {
            for rest in [
                "",
                "&nosuch=1",
                "&sslmode=nosuch&ssl_mode=nosuch",
                "&port=%zz",
            ] {
                let (scheme, user, host) = (good.scheme, good.user, good.host);
                let url = format!("{scheme}://{user}@{host}/nosuch?{key}={password}{rest}");
                assert_fails_hidden(&url, builder().build(&url));
            }
        }
    }
    assert_logs_hide(engine);
}

/// Nothing is known of a manager's URL but what one looks like.
fn no_error_over_a_given_manager_shows_a_password(engine: Engine) {
    for password in &PASSWORDS[..3] {
        for url in useless_urls(engine, password) {
            if !url.contains("://") {
                continue;
            }
            let built = managed(builder(), engine, &url, "", &Watch::default());
            assert_fails_hidden(&url, built);
        }
    }
    assert_logs_hide(engine);
}

fn nothing_shows_the_password_of_a_session_that_works(engine: Engine) {
    let database = Database::create(engine);
    let user = User::create(&database, "kx7qa@vw9zb/jt3mc:?#%hq5pd");
    let proxy = Proxy::to(database.url());
    let url = proxy.url(&user.url("kx7qa%40vw9zb%2Fjt3mc%3A%3F%23%25hq5pd"));
    let often = Timings {
        renew: Duration::from_millis(50),
        attempt: Duration::from_secs(1),
        ..Timings::default()
    };
    let builder = Leases::builder().timings(often);
    assert_debug_hides(&url, &builder);
    let leases = builder.build(&url).unwrap();
    Leases::connect(database.url()).unwrap().migrate().unwrap();
    user.may_use_the_table();
    let name = unique("secret");
    let log = Captured::new(&name);
    let lease = leases.try_claim(&name).unwrap().expect("a free name");
    assert_debug_hides(&url, &(&leases, &lease, lease.tenure()));
    let held = lease.hold().unwrap();
    assert_debug_hides(&url, &held);

    proxy.refuse();
    proxy.drop_connections();
    eventually(LONG, "a renewal fails", || {
        log.has(Level::Warn, "renewal failed")
    });
    assert_error_hides(&url, &leases.inspect(&name).unwrap_err());
    assert_error_hides(&url, &held.tenure().verify().unwrap_err());
    assert_error_hides(&url, &leases.migrate().unwrap_err());
    let lease = held.stop();
    assert_error_hides(&url, &lease.renew().unwrap_err());
    assert_error_hides(&url, &lease.release().unwrap_err());
    proxy.accept();
    // The server's own errors.
    database.connect().batch("DROP TABLE diesel_leases");
    assert_error_hides(&url, &leases.inspect(&name).unwrap_err());
    database
        .connect()
        .batch("CREATE TABLE diesel_leases (name INT)");
    user.may_use_the_table();
    assert_error_hides(&url, &leases.inspect(&name).unwrap_err());
    assert_error_hides(&url, &leases.try_claim(&name).unwrap_err());
    assert_error_hides(&url, &leases.available().unwrap_err());
    assert_error_hides(&url, &leases.migrate().unwrap_err());
    assert_debug_hides(&url, &leases);
    assert_logs_hide(engine);
}

/// A user of the server's, gone with this.
struct User<'a> {
    database: &'a Database,
    name: String,
}

impl<'a> User<'a> {
    fn create(database: &'a Database, password: &str) -> User<'a> {
        let name = format!("user_{}", database.name());
        let create = match database.engine() {
            Engine::Postgres => format!("CREATE ROLE {name} LOGIN PASSWORD '{password}'"),
            _ => format!("CREATE USER '{name}'@'%' IDENTIFIED BY '{password}'"),
        };
        let drop = match database.engine() {
            Engine::Postgres => format!("DROP ROLE IF EXISTS {name}"),
            _ => format!("DROP USER IF EXISTS '{name}'@'%'"),
        };
        let mut admin = database.admin();
        admin.batch(&drop);
        admin.batch(&create);
        User { database, name }
    }

    fn url(&self, password: &str) -> String {
        let url = Url::parse(self.database.url());
        let (scheme, host, database) = (url.scheme, url.host, url.database);
        format!("{scheme}://{}:{password}@{host}/{database}", self.name)
    }

    fn may_use_the_table(&self) {
        let (table, name) = ("diesel_leases", &self.name);
        self.database.admin().batch(&match self.database.engine() {
            Engine::Postgres => format!("GRANT ALL ON {table} TO {name}"),
            _ => format!("GRANT ALL ON {table} TO '{name}'@'%'"),
        });
    }
}

impl Drop for User<'_> {
    fn drop(&mut self) {
        let name = &self.name;
        let mut admin = self.database.admin();
        let dropped = match self.database.engine() {
            Engine::Postgres => admin.try_batch(&format!("DROP OWNED BY {name}; DROP ROLE {name}")),
            _ => admin.try_batch(&format!("DROP USER '{name}'@'%'")),
        };
        if let Err(error) = dropped {
            eprintln!("{name} stays: {error}");
        }
    }
}
