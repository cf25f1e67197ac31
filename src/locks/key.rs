//! What a key may be, and how the engines' locks are named after it.
//!
//! Invariant: the same key is the same lock, and different keys never meet, on every engine. The
//! encodings here are for ever: two versions of this crate exclude each other by them.
//!
//! | engine | scope | the lock is named |
//! |---|---|---|
//! | MySQL, MariaDB | database | the SHA-256 of `diesel-lease:lock`, NUL, the database's name, NUL, the key; in 64 lower case hex digits, which are as many characters as MySQL allows, and which it cannot fold |
//! | MySQL, MariaDB | server | the key as it is; 64 characters of up to three bytes are what MariaDB's 192 bytes take, and MySQL's names have no others |
//! | PostgreSQL | database | the first 8 bytes of the SHA-256 of `diesel-lease:lock`, NUL, the key; as a signed big-endian integer |
//! | SQLite | database | the database's file name, `-lock-` and the first 16 bytes of the SHA-256 of `diesel-lease:lock`, NUL, the key, in 32 lower case hex digits |
//!
//! All texts are UTF-8.

use sha2::{Digest, Sha256};

use super::LockScope;

/// In characters.
const MAX_CHARS: usize = 64;

const NAMESPACE: &[u8] = b"diesel-lease:lock\0";

/// Why a text cannot be the key of a lock.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidKey {
    /// It has no characters.
    #[error("a key must not be empty")]
    Empty,
    /// It has too many characters.
    #[error("a key of {chars} characters is longer than the {MAX_CHARS} that are allowed")]
    TooLong {
        /// How many it has.
        chars: usize,
    },
    /// It has a control character.
    #[error("the key {key:?} has a control character")]
    ControlCharacter {
        /// The key.
        key: String,
    },
    /// It has a character that MySQL's names of locks cannot have, and whose bytes are too many for
    /// MariaDB's: one above U+FFFF. Only in [`LockScope::Server`].
    #[error(
        "the key {key:?} has a character above U+FFFF, which the name of a server's lock cannot have"
    )]
    NotForServer {
        /// The key.
        key: String,
    },
    /// It begins or ends with white space.
    #[error("the key {key:?} begins or ends with white space")]
    OuterWhiteSpace {
        /// The key.
        key: String,
    },
}

pub(super) fn validate(key: &str, scope: LockScope) -> Result<(), InvalidKey> {
    if key.is_empty() {
        return Err(InvalidKey::Empty);
    }
    let chars = key.chars().count();
    if chars > MAX_CHARS {
        return Err(InvalidKey::TooLong { chars });
    }
    if key.chars().any(char::is_control) {
        return Err(InvalidKey::ControlCharacter {
            key: key.to_owned(),
        });
    }
    if key.trim() != key {
        return Err(InvalidKey::OuterWhiteSpace {
            key: key.to_owned(),
        });
    }
    if scope == LockScope::Server && key.chars().any(|c| c > '\u{ffff}') {
        return Err(InvalidKey::NotForServer {
            key: key.to_owned(),
        });
    }
    Ok(())
}

fn digest(parts: &[&str]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(NAMESPACE);
    for (at, part) in parts.iter().enumerate() {
        if at > 0 {
            hash.update(b"\0");
        }
        hash.update(part.as_bytes());
    }
    hash.finalize().into()
}

/// The name of a lock that belongs to `database` on a server whose locks are the server's.
#[cfg_attr(not(feature = "mysql"), allow(dead_code))]
pub(super) fn on_server(database: &str, key: &str) -> String {
    crate::name::hex(&digest(&[database, key]))
}

/// The number of a lock in a database.
#[cfg_attr(not(feature = "postgres"), allow(dead_code))]
pub(super) fn number(key: &str) -> i64 {
    let [a, b, c, d, e, f, g, h, ..] = digest(&[key]);
    i64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// What follows the name of the database's file.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
pub(super) fn file_suffix(key: &str) -> String {
    format!("-lock-{}", crate::name::hex(&digest(&[key])[..16]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_counts_characters() {
        assert_eq!(validate(&"é".repeat(64), LockScope::Database), Ok(()));
        assert_eq!(validate(&"🔒".repeat(64), LockScope::Database), Ok(()));
        assert_eq!(
            validate(&"é".repeat(65), LockScope::Database),
            Err(InvalidKey::TooLong { chars: 65 })
        );
        assert_eq!(validate("", LockScope::Database), Err(InvalidKey::Empty));
        assert!(matches!(
            validate("a\n", LockScope::Database),
            Err(InvalidKey::ControlCharacter { .. })
        ));
        assert!(matches!(
            validate(" a", LockScope::Database),
            Err(InvalidKey::OuterWhiteSpace { .. })
        ));
    }

    #[test]
    fn the_names_of_a_server_are_within_what_both_servers_take() {
        let longest = "中".repeat(64);
        assert_eq!(longest.len(), 192);
        assert_eq!(validate(&longest, LockScope::Server), Ok(()));
        assert_eq!(
            validate("a🔒", LockScope::Server),
            Err(InvalidKey::NotForServer {
                key: "a🔒".to_owned()
            })
        );
    }

    #[test]
    fn the_encodings_never_change() {
        assert_eq!(
            on_server("app", "k"),
            "c1f4f3abc3d0e4d6fbd99567fc20266860da77acb574ab12688a4898eef7d5fc"
        );
        assert_eq!(number("k"), -1252556099376110999);
        assert_eq!(file_suffix("k"), "-lock-ee9e06dd2b7022690afc561ecf197176");
    }
}
