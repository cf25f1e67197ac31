//! No part of a password gets through, whatever the URL.

use proptest::prelude::*;

use super::*;

/// None of it stands anywhere else.
const PIECES: [&str; 4] = ["kx7qa", "vw9zb", "jt3mc", "hq5pd"];

/// A password as it may stand in a URL, rightly and wrongly escaped.
fn password() -> impl Strategy<Value = String> {
    let between = prop::sample::select(vec![
        "", "@", ":", "/", "?", "#", "[", "]", "&", "=", "%40", "%2F", "%zz", "%", " ", "\"", "'",
        "é", "%c3%a9", "🔒", "+", ".",
    ]);
    let part = (prop::sample::select(&PIECES[..]), between);
    prop::collection::vec(part, 1..5).prop_map(|parts| {
        let parts = parts
            .into_iter()
            .map(|(piece, between)| format!("{piece}{between}"));
        parts.collect()
    })
}

/// A URL with the password in it, where there may be one.
fn url() -> impl Strategy<Value = String> {
    let scheme = prop::sample::select(vec!["postgres", "postgresql", "mysql", "sqlite", "x"]);
    let user = prop::sample::select(vec!["", "user", "us%65r", "ü"]);
    let host = prop::sample::select(vec!["", "host", "[::1]", "127.0.0.1:5432", "%2Ftmp"]);
    let tail = prop::sample::select(vec!["", "/", "/db", "/db?sslmode=require", "?a=b"]);
    (scheme, user, host, tail, password(), 0..3_u8).prop_map(
        |(scheme, user, host, tail, password, place)| {
            let with = |key: &str| {
                let and = if tail.contains('?') { '&' } else { '?' };
                // A delimiter of the query ends a value there.
                let password = password.replace(['&', '#'], "");
                format!("{scheme}://{user}@{host}{tail}{and}{key}={password}")
            };
            match place {
                0 => format!("{scheme}://{user}:{password}@{host}{tail}"),
                1 => with("password"),
                _ => with("sslpassword"),
            }
        },
    )
}

#[track_caller]
fn assert_hides(text: &str, url: &str) {
    for piece in PIECES {
        assert!(!text.contains(piece), "{url:?} shows {piece}: {text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_error_that_repeats_the_url_shows_no_password(url in url()) {
        let why = format!("could not reach {url}, sorry");
        let hidden = without(&secrets(&url), ConnectionError::BadConnection(why));
        assert_hides(&hidden.to_string(), &url);
    }

    #[test]
    fn nor_does_that_of_a_manager_whose_url_is_not_known(url in url()) {
        assert_hides(&without_url(&format!("could not reach {url}, sorry")), &url);
    }

    #[test]
    fn any_text_is_taken_apart(text in any::<String>()) {
        secrets(&text);
        without_url(&text);
        // Nothing is connected to.
        let _ = Connector::from_url(&text, Duration::from_secs(1));
    }
}
