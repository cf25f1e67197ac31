//! What a name may be: one rule for every engine, checked before any statement is sent.

use std::fmt;

/// The longest name and the longest instance, in bytes; the width of their columns.
pub(crate) const MAX_BYTES: usize = 191;

/// Why a text cannot be a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidName {
    /// It has no characters.
    #[error("a name must not be empty")]
    Empty,
    /// It has more bytes of UTF-8 than fit.
    #[error("a name of {bytes} bytes is longer than the {MAX_BYTES} that are allowed")]
    TooLong {
        /// How many it has.
        bytes: usize,
    },
    /// It has a control character.
    #[error("the name {name:?} has a control character")]
    ControlCharacter {
        /// The name.
        name: String,
    },
    /// It begins or ends with white space.
    #[error("the name {name:?} begins or ends with white space")]
    OuterWhiteSpace {
        /// The name.
        name: String,
    },
}

/// Checks a name: 1 to 191 bytes of UTF-8, no control characters, no white space at either end.
///
/// Names are compared byte by byte on every engine: `job`, `Job` and `jób` are three names. The
/// rule keeps out what one engine or another would cut, fold or refuse.
///
/// # Errors
///
/// [`InvalidName`] says which part of the rule is broken.
///
/// # Examples
///
/// ```
/// assert!(diesel_lease::validate_name("billing:nightly").is_ok());
/// assert!(diesel_lease::validate_name(" billing").is_err());
/// ```
pub fn validate_name(name: &str) -> Result<(), InvalidName> {
    if name.is_empty() {
        return Err(InvalidName::Empty);
    }
    if name.len() > MAX_BYTES {
        return Err(InvalidName::TooLong { bytes: name.len() });
    }
    if name.chars().any(char::is_control) {
        return Err(InvalidName::ControlCharacter {
            name: name.to_owned(),
        });
    }
    if name.trim() != name {
        return Err(InvalidName::OuterWhiteSpace {
            name: name.to_owned(),
        });
    }
    Ok(())
}

/// 128 random bits as 32 hex digits: the token of one claim.
///
/// Panics when the system has no random numbers to give, which leaves nothing safe to do.
pub(crate) fn mint_holder() -> String {
    hex(&random::<16>())
}

/// The name of this machine and eight random hex digits.
pub(crate) fn default_instance() -> String {
    let mut host: String = gethostname::gethostname()
        .to_string_lossy()
        .trim()
        .chars()
        .filter(|c| !c.is_control())
        .collect();
    while host.len() > MAX_BYTES - 9 {
        host.pop();
    }
    format!("{host}-{}", hex(&random::<4>()))
}

/// From 0 to below 1, for waits that must not fall together.
pub(crate) fn random_fraction() -> f64 {
    f64::from(u32::from_ne_bytes(random())) / (f64::from(u32::MAX) + 1.0)
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the system gave no random numbers");
    bytes
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    struct Hex<'a>(&'a [u8]);
    impl fmt::Display for Hex<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
        }
    }
    Hex(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_counts_bytes() {
        assert_eq!(validate_name(""), Err(InvalidName::Empty));
        assert_eq!(validate_name(&"x".repeat(191)), Ok(()));
        assert_eq!(validate_name(&"é".repeat(95)), Ok(()));
        assert_eq!(
            validate_name(&"é".repeat(96)),
            Err(InvalidName::TooLong { bytes: 192 })
        );
        assert!(matches!(
            validate_name("a\tb"),
            Err(InvalidName::ControlCharacter { .. })
        ));
        assert!(matches!(
            validate_name("a\u{85}b"),
            Err(InvalidName::ControlCharacter { .. })
        ));
        assert!(matches!(
            validate_name("a "),
            Err(InvalidName::OuterWhiteSpace { .. })
        ));
        assert!(matches!(
            validate_name("\u{a0}a"),
            Err(InvalidName::OuterWhiteSpace { .. })
        ));
        assert_eq!(validate_name("a b"), Ok(()));
    }

    #[test]
    fn holders_are_32_hex_digits_and_never_equal() {
        let holders: std::collections::HashSet<String> =
            (0..1_000).map(|_| mint_holder()).collect();
        assert_eq!(holders.len(), 1_000);
        assert!(
            holders
                .iter()
                .all(|h| h.len() == 32 && h.chars().all(|c| c.is_ascii_hexdigit()))
        );
    }

    #[test]
    fn the_default_instance_is_a_valid_name() {
        assert_eq!(validate_name(&default_instance()), Ok(()));
    }
}
