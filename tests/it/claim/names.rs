//! Names: which there are, and that they are compared byte by byte.

use diesel_lease::{Error, InvalidName, Lease, Leases, validate_name};

use super::{another, claimed, migrated};
use crate::support::database::Database;
use crate::support::{Engine, engines};

engines! {
    fn an_invalid_name_is_refused_before_anything_is_sent,
    fn every_valid_name_is_a_lease_of_its_own,
    fn an_instance_is_kept_byte_by_byte,
}

/// 191 bytes, the most there can be.
fn longest() -> [String; 2] {
    ["x".repeat(191), format!("{}y", "é".repeat(95))]
}

fn an_invalid_name_is_refused_before_anything_is_sent(engine: Engine) {
    let database = Database::create(engine);
    let leases = Leases::connect(database.url()).unwrap();
    let too_long = ["x".repeat(192), "é".repeat(96), "x".repeat(300)];
    let wrong = [
        "",
        " ",
        " x",
        "x ",
        "x\u{3000}",
        "a\nb",
        "a\0b",
        "\u{7f}",
        "a\u{85}b",
    ];
    for name in wrong.into_iter().chain(too_long.iter().map(String::as_str)) {
        let rule = validate_name(name).expect_err(name);
        let answers = [
            leases.try_claim(name).map(drop),
            leases.claim(name).map(drop),
            leases.claim_timeout(name, crate::support::LONG).map(drop),
            leases.inspect(name).map(drop),
            leases.force_release(name).map(drop),
        ];
        for answer in answers {
            match answer {
                Err(Error::InvalidName(why)) => assert_eq!(why, rule, "{name:?}"),
                other => panic!("{name:?}: {other:?}"),
            }
        }
        let instance = Leases::builder().instance(name).build(database.url());
        assert!(matches!(instance, Err(Error::InvalidInstance(why)) if why == rule));
    }
    assert_eq!(validate_name(""), Err(InvalidName::Empty));
    assert_eq!(
        validate_name(&too_long[0]),
        Err(InvalidName::TooLong { bytes: 192 })
    );
    assert_eq!(database.session_count(), 0);
}

fn every_valid_name_is_a_lease_of_its_own(engine: Engine) {
    let (database, leases) = migrated(engine);
    let longest = longest();
    let mut names = vec![
        "job",
        "Job",
        "JOB",
        "jób",
        "jo\u{301}b",
        "job.",
        "jo b",
        "ß",
        "ss",
        "ı",
        "i",
        "I",
        "İ",
        "it's",
        "\"quoted\"",
        "`ticked`",
        "back\\slash",
        "\\",
        "100%",
        "_",
        "%",
        "$1",
        "?",
        ":x",
        "--",
        "/* */",
        "';--",
        "NULL",
        "0",
        "00",
        "0x30",
        "🔒",
        "🔒🔓",
        "名前",
        "имя",
        "a\u{200b}b",
        "\u{fe0f}x",
        "\u{10ffff}",
    ];
    names.extend(longest.iter().map(String::as_str));
    let held: Vec<Lease> = names.iter().map(|name| claimed(&leases, name)).collect();
    let other = another(&database);
    for (name, lease) in names.iter().zip(&held) {
        assert_eq!((lease.name(), lease.term()), (*name, 1));
        assert!(other.try_claim(name).unwrap().is_none(), "{name}");
        assert_eq!(other.inspect(name).unwrap().unwrap().name(), *name);
        lease.verify().unwrap();
        lease.renew().unwrap();
    }
    let records = other.list().unwrap();
    let listed: Vec<&str> = records.iter().map(|record| record.name()).collect();
    let mut sorted = names.clone();
    sorted.sort_unstable();
    assert_eq!(listed, sorted);
    // One given back frees that one alone.
    for lease in held {
        let name = lease.name().to_owned();
        lease.release().unwrap();
        let free = other.list().unwrap();
        let free: Vec<_> = free
            .iter()
            .filter(|record| record.expires_in().is_none())
            .collect();
        assert_eq!(free.len(), 1, "{name}");
        assert_eq!(free[0].name(), name);
        std::mem::forget(claimed(&other, &name));
    }
}

fn an_instance_is_kept_byte_by_byte(engine: Engine) {
    let database = Database::create(engine);
    Leases::connect(database.url()).unwrap().migrate().unwrap();
    let [ascii, accents] = longest();
    for instance in ["Büro-🖥-1", "it's \\ \"here\" 100%", &ascii, &accents] {
        let leases = Leases::builder()
            .instance(instance)
            .build(database.url())
            .unwrap();
        assert_eq!(leases.instance(), instance);
        let lease = claimed(&leases, "name");
        let record = leases.inspect("name").unwrap().unwrap();
        assert_eq!(record.instance(), instance);
        lease.release().unwrap();
    }
}
