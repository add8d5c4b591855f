//! Names of pools.

use std::fmt;
use std::str::FromStr;

/// Longest name of a pool in bytes.
const MAX_BYTES: usize = 64;

/// The name of a pool: letters, digits, `.`, `_` and `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoolName(String);

impl FromStr for PoolName {
    type Err = String;

    /// The name becomes the name of a file.
    fn from_str(text: &str) -> Result<Self, String> {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        match text {
            "" => Err("a name is missing".to_owned()),
            _ if text.len() > MAX_BYTES => {
                Err(format!("a name has at most {MAX_BYTES} characters"))
            }
            _ if text.starts_with(['.', '-']) || !text.chars().all(is_allowed) => Err(
                "a name consists of letters, digits, '.', '_' and '-', and begins with none of '.' \
                 and '-'"
                    .to_owned(),
            ),
            _ => Ok(PoolName(text.to_owned())),
        }
    }
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_plain_files() {
        for name in ["a", "tenant-1", "Web_2.old"] {
            assert_eq!(name.parse(), Ok(PoolName(name.to_owned())));
        }
        let long = "a".repeat(MAX_BYTES + 1);
        for name in ["", ".", "..", ".a", "-a", "a/b", "a b", "ä", "a\n", &long] {
            assert!(name.parse::<PoolName>().is_err(), "{name:?}");
        }
    }
}
