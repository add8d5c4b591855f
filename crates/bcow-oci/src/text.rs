//! Formats names, lists and counts for messages.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Quotes a name from the input for a message. Escapes prevent control sequences in the name from
/// reaching a terminal. A name of more than 120 bytes is truncated; its length follows.
pub(crate) fn quoted(name: &[u8]) -> String {
    const SHOWN: usize = 120;
    let mut text = format!("{:?}", OsStr::from_bytes(&name[..name.len().min(SHOWN)]));
    if name.len() > SHOWN {
        text.pop();
        text.push_str(&format!("...\" ({} bytes)", name.len()));
    }
    text
}

/// The first 20 items of a list, separated by commas, and the number of other items.
pub(crate) fn listed(items: &[String]) -> String {
    const SHOWN: usize = 20;
    let mut text = items[..items.len().min(SHOWN)].join(", ");
    if items.len() > SHOWN {
        text.push_str(&format!(", and {} more", items.len() - SHOWN));
    }
    text
}

/// A count with its noun: `1 layer`, `2 layers`. The plural of the noun must end in `s`.
pub(crate) fn plural(count: u64, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        count => format!("{count} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_a_plural() {
        assert_eq!(plural(0, "time"), "0 times");
        assert_eq!(plural(1, "time"), "1 time");
        assert_eq!(plural(2, "time"), "2 times");
    }
}
