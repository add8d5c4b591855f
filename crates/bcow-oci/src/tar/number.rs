//! Numbers in tar headers and PAX records.
//!
//! tar-core reads them without a sign; times before 1970 need one.

use bcow_erofs::tree::Timestamp;

/// A numeric header field: octal digits between white space and zero bytes, or GNU's base-256. An
/// empty field is 0.
pub(crate) fn field(bytes: &[u8]) -> Option<i64> {
    match bytes.first() {
        Some(first) if first & 0x80 != 0 => base_256(bytes),
        _ => octal(bytes),
    }
}

fn octal(bytes: &[u8]) -> Option<i64> {
    let blank = |b: &u8| matches!(b, b' ' | 0 | b'\t'..=b'\r');
    let start = match bytes.iter().position(|b| !blank(b)) {
        Some(start) => start,
        None => return Some(0),
    };
    let digits = &bytes[start..];
    let end = digits.iter().position(blank).unwrap_or(digits.len());
    // Only padding may follow the number. Readers disagree on a field with two numbers.
    if digits[end..].iter().any(|b| !blank(b)) {
        return None;
    }
    // `from_str_radix` takes a sign too.
    let text = std::str::from_utf8(&digits[..end]).ok()?;
    let is_unsigned = text.starts_with(|c: char| c.is_ascii_digit());
    i64::from_str_radix(text, 8).ok().filter(|_| is_unsigned)
}

/// Big-endian two's complement; the top bit is the marker, the next one the sign.
fn base_256(bytes: &[u8]) -> Option<i64> {
    let negative = bytes[0] & 0x40 != 0;
    // For a negative number the marker bit continues the sign; otherwise it is cleared.
    let marker = if negative { 0 } else { 0x80 };
    let mut value: i64 = if negative { -1 } else { 0 };
    for (i, &byte) in bytes.iter().enumerate() {
        let byte = if i == 0 { byte & !marker } else { byte };
        value = value.checked_mul(256)? | i64::from(byte);
    }
    Some(value)
}

/// A decimal number of a PAX record: digits only.
pub(crate) fn decimal(bytes: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(bytes).ok()?;
    let is_unsigned = text.starts_with(|c: char| c.is_ascii_digit());
    text.parse().ok().filter(|_| is_unsigned)
}

/// A time of a PAX record: `[-]SECONDS[.FRACTION]`. Digits below nanoseconds are dropped.
pub(crate) fn time(bytes: &[u8]) -> Option<Timestamp> {
    let (negative, digits) = match bytes {
        [b'-', rest @ ..] => (true, rest),
        _ => (false, bytes),
    };
    let (whole, fraction) = match digits.iter().position(|&b| b == b'.') {
        Some(dot) => (&digits[..dot], &digits[dot + 1..]),
        None => (digits, &[][..]),
    };
    let seconds = i128::from(decimal(whole)?);
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let nanoseconds = (0..9).fold(0u32, |value, i| {
        value * 10 + fraction.get(i).map_or(0, |d| u32::from(d - b'0'))
    });
    let (seconds, nanoseconds) = match (negative, nanoseconds) {
        (false, nanoseconds) => (seconds, nanoseconds),
        (true, 0) => (-seconds, 0),
        // -1.25 is three quarters of a second after -2.
        (true, nanoseconds) => (-seconds - 1, 1_000_000_000 - nanoseconds),
    };
    Some(Timestamp {
        seconds: i64::try_from(seconds).ok()?,
        nanoseconds,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octal_fields_may_be_padded_on_either_side() {
        for (text, value) in [
            (&b"0000644\0"[..], Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"        ", Some(0)),
            (b"77777777777\0", Some(0o77777777777)),
            (b"777777777777", Some(0o777777777777)),
            (b"644 123\0", None),
            (b"0000648\0", None),
            (b"-000644\0", None),
            (b"0x1\0", None),
        ] {
            assert_eq!(field(text), value, "{text:?}");
        }
    }

    #[test]
    fn base_256_fields_are_signed() {
        let of = |value: i128| {
            let mut bytes = value.to_be_bytes()[4..].to_vec();
            bytes[0] |= 0x80;
            field(&bytes)
        };
        for value in [
            0,
            1,
            8 << 30,
            i128::from(i64::MAX),
            -1,
            -2,
            -1 << 40,
            i128::from(i64::MIN),
        ] {
            assert_eq!(of(value), Some(value as i64), "{value}");
        }
        for value in [i128::from(i64::MAX) + 1, i128::from(i64::MIN) - 1, 1 << 90] {
            assert_eq!(of(value), None, "{value}");
        }
        assert_eq!(field(&[0x80, 0, 0, 0, 0, 0, 0x10, 0]), Some(4096));
        assert_eq!(field(&[0xff; 8]), Some(-1));
    }

    #[test]
    fn times_before_1970_count_nanoseconds_upwards() {
        let at = |seconds, nanoseconds| {
            Some(Timestamp {
                seconds,
                nanoseconds,
            })
        };
        assert_eq!(
            time(b"1700000000.123456789"),
            at(1_700_000_000, 123_456_789)
        );
        assert_eq!(
            time(b"1700000000.1234567899"),
            at(1_700_000_000, 123_456_789)
        );
        assert_eq!(time(b"5."), at(5, 0));
        assert_eq!(time(b"-1"), at(-1, 0));
        assert_eq!(time(b"-1.25"), at(-2, 750_000_000));
        assert_eq!(time(b"-0.5"), at(-1, 500_000_000));
        assert_eq!(time(b"-9223372036854775808"), at(i64::MIN, 0));
        assert_eq!(time(b"-9223372036854775807.9"), at(i64::MIN, 100_000_000));
        assert_eq!(time(b"-9223372036854775808.1"), None);
        assert_eq!(time(b"9223372036854775807.1"), at(i64::MAX, 100_000_000));
        for bad in [
            &b""[..],
            b"-",
            b".5",
            b"+5",
            b"1e3",
            b"1.-5",
            b" 1",
            b"99999999999999999999",
        ] {
            assert_eq!(time(bad), None, "{bad:?}");
        }
    }
}
