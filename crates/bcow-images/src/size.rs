//! Sizes as users write them (`4K`, `1MiB`) and as users read them (`1.5 MiB`).

use std::fmt;

use bcow::format::{MAX_ADDRESS, SECTOR_BYTES};

use crate::error::CommandError;

/// Parses a size in bytes: a number with an optional unit. Units are powers of 1024, spelt `K`,
/// `KB` or `KiB`, as in qemu-img: block sizes are powers of two. A number with a unit may have a
/// fraction; the part of a byte that is left is dropped.
pub fn parse(text: &str) -> Result<u64, String> {
    let rest = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let (number, unit) = text.split_at(text.len() - rest.len());
    let invalid = || "a size is a number with an optional unit: 4096, 4K, 1MiB, 1.5G".to_owned();
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) => (whole, format!("0.{fraction}")),
        None => (number, "0".to_owned()),
    };
    let fraction: f64 = fraction.parse().map_err(|_| invalid())?;
    let whole: u64 = match whole.parse() {
        Ok(whole) => whole,
        Err(_) if whole.is_empty() => return Err(invalid()),
        Err(_) => return Err("the number does not fit 64 bits".to_owned()),
    };
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" if fraction > 0.0 => return Err("a byte has no fractions".to_owned()),
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        "p" | "pb" | "pib" => 50,
        _ => return Err(format!("unknown unit {unit:?}; use K, M, G, T or P")),
    };
    let unit_bytes = 1u64 << shift;
    whole
        .checked_mul(unit_bytes)
        .and_then(|bytes| bytes.checked_add((fraction * unit_bytes as f64) as u64))
        .ok_or_else(|| "the size does not fit 64 bits".to_owned())
}

/// Bytes with three significant digits and a binary unit.
#[derive(Debug, Clone, Copy)]
pub struct Human(pub u64);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        // 1023.95 would print as 1024.0.
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text = if value.fract() == 0.0 {
            format!("{value} {}", UNITS[unit])
        } else {
            let decimals = if value < 9.995 { 2 } else { 1 };
            format!("{value:.decimals$} {}", UNITS[unit])
        };
        f.pad(&text)
    }
}

/// A count with separated thousands: `12,345`.
#[derive(Debug, Clone, Copy)]
pub struct Count(pub u64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        let mut text = String::with_capacity(digits.len() + digits.len() / 3);
        for (i, digit) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        f.pad(&text)
    }
}

/// `1 block`, `2 blocks`, `2 entries`, `2 partial files`; for words with a regular plural.
pub fn plural(count: u64, word: &str) -> String {
    let (stem, ending) = match word {
        _ if count == 1 => (word, ""),
        _ if word.ends_with("ch") => (word, "es"),
        _ => match word.strip_suffix('y') {
            Some(stem) => (stem, "ies"),
            None => (word, "s"),
        },
    };
    format!("{} {stem}{ending}", Count(count))
}

/// Returns `size`, if a disk can have this size.
pub fn disk_size(size: u64) -> Result<u64, CommandError> {
    if size.is_multiple_of(SECTOR_BYTES) {
        return Ok(size);
    }
    let next = size.checked_next_multiple_of(SECTOR_BYTES);
    let error = CommandError::usage(format!(
        "a disk of {}: the size must be a multiple of {SECTOR_BYTES}",
        plural(size, "byte")
    ));
    Err(match next.filter(|next| *next <= MAX_ADDRESS) {
        Some(next) => error.hint(format!("the next multiple is {next}")),
        None => error.hint(format!("the greatest size is {MAX_ADDRESS}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024_however_spelt() {
        for text in ["4096", "4096b", "4K", "4k", "4KB", "4KiB", "4kib"] {
            assert_eq!(parse(text), Ok(4096), "{text}");
        }
        assert_eq!(parse("1M"), Ok(1 << 20));
        assert_eq!(parse("1GiB"), Ok(1 << 30));
        assert_eq!(parse("2T"), Ok(2 << 40));
        assert_eq!(parse("1.5G"), Ok(3 << 29));
        assert_eq!(parse("0.1k"), Ok(102));
    }

    #[test]
    fn invalid_sizes_are_refused() {
        for text in [
            "",
            "K",
            "-1",
            "4 K",
            "4Q",
            "1.5",
            "1.5.2G",
            ".5G",
            "99999999999999999999",
            "16384P",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_read_well() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.50 KiB"),
            (4 << 20, "4 MiB"),
            (1_375_000_000, "1.28 GiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(Human(bytes).to_string(), text, "{bytes}");
        }
        assert_eq!(Count(0).to_string(), "0");
        assert_eq!(Count(1234567).to_string(), "1,234,567");
        assert_eq!(Count(123).to_string(), "123");
    }

    #[test]
    fn counts_have_the_plural_of_their_word() {
        for (count, word, text) in [
            (0, "block", "0 blocks"),
            (1, "entry", "1 entry"),
            (2, "directory", "2 directories"),
            (1234, "partial file", "1,234 partial files"),
        ] {
            assert_eq!(plural(count, word), text);
        }
    }

    #[test]
    fn size_that_is_no_multiple_gets_a_hint_that_a_disk_can_have() {
        let hint = |size| disk_size(size).unwrap_err().hint_text().map(str::to_owned);
        assert_eq!(hint(5000), Some("the next multiple is 8192".to_owned()));
        let greatest = Some(format!("the greatest size is {MAX_ADDRESS}"));
        assert_eq!(
            hint(MAX_ADDRESS - 1),
            Some(format!("the next multiple is {MAX_ADDRESS}"))
        );
        assert_eq!(hint(MAX_ADDRESS + 1), greatest);
        assert_eq!(hint(u64::MAX), greatest);
        assert_eq!(disk_size(8192).unwrap(), 8192);
    }
}
