//! PAX extended headers.
//!
//! The parser is strict: tar-core's iterator ends without an error at a record whose length is
//! malformed. If one reader skips a record that another one applies, the archive has two meanings.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use bcow_erofs::tree::Timestamp;
use data_encoding::{BASE64_NOPAD, Encoding};

use super::number;
use super::sparse::SparseRecords;
use crate::error::TarProblem;

/// The values of PAX records for an entry.
#[derive(Debug, Clone, Default)]
pub(crate) struct PaxHeader {
    pub path: Option<Vec<u8>>,
    pub linkpath: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u64>,
    pub gid: Option<u64>,
    pub mtime: Option<Timestamp>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub sparse: SparseRecords,
}

impl PaxHeader {
    /// Applies the records of one header block to `defaults`, the values of a global header.
    pub(crate) fn parse(records: &[u8], defaults: &PaxHeader) -> Result<PaxHeader, TarProblem> {
        let mut header = defaults.clone();
        for record in Records(records) {
            let (key, value) = record?;
            header.apply(key, value)?;
        }
        Ok(header)
    }

    /// Parses a global header: defaults for all following entries. Only records that make sense for
    /// many entries, and that are cheap to apply to each, are allowed.
    pub(crate) fn parse_global(
        records: &[u8],
        before: &PaxHeader,
    ) -> Result<PaxHeader, TarProblem> {
        let header = PaxHeader::parse(records, before)?;
        let has_file_records = header.path.is_some()
            || header.linkpath.is_some()
            || header.size.is_some()
            || !header.xattrs.is_empty()
            || header.sparse != SparseRecords::default();
        if has_file_records {
            Err(bad(
                "a global header with path, size, holes or attributes of a file",
            ))
        } else {
            Ok(header)
        }
    }

    fn apply(&mut self, key: &[u8], value: &[u8]) -> Result<(), TarProblem> {
        // POSIX: an empty value removes the value of a global header. An extended attribute,
        // however, may be empty.
        match key {
            b"path" => self.path = name(value)?,
            b"linkpath" => self.linkpath = name(value)?,
            b"size" => self.size = optional(value, number::decimal, "size")?,
            b"uid" => self.uid = optional(value, number::decimal, "uid")?,
            b"gid" => self.gid = optional(value, number::decimal, "gid")?,
            b"mtime" => self.mtime = optional(value, number::time, "mtime")?,
            b"RHT.security.selinux" => self.set_xattr(b"security.selinux", value)?,
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.set_xattr(name, value)?;
                } else if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
                    let name = url_decoded(name).ok_or_else(|| bad("LIBARCHIVE.xattr name"))?;
                    let value = base64(value).ok_or_else(|| bad("LIBARCHIVE.xattr value"))?;
                    self.set_xattr(&name, &value)?;
                } else if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                    self.sparse.apply(key, value)?;
                }
            }
        }
        Ok(())
    }

    /// Later records win; bsdtar writes each attribute twice, in the forms of both vendors.
    fn set_xattr(&mut self, name: &[u8], value: &[u8]) -> Result<(), TarProblem> {
        let problem = match () {
            () if name.is_empty() => "the name is empty",
            () if name.contains(&0) => "the name contains a zero byte",
            () if name.len() > 255 => "the name has more than 255 bytes",
            () if value.len() > 65_536 => "the value has more than 65536 bytes",
            () => "",
        };
        if !problem.is_empty() {
            return Err(TarProblem::BadXattr {
                name: name.to_vec(),
                problem,
            });
        }
        self.xattrs.insert(name.to_vec(), value.to_vec());
        Ok(())
    }
}

fn bad(problem: &str) -> TarProblem {
    TarProblem::BadPax {
        problem: problem.to_owned(),
    }
}

fn name(value: &[u8]) -> Result<Option<Vec<u8>>, TarProblem> {
    match value {
        [] => Ok(None),
        value if value.contains(&0) => Err(TarProblem::ZeroInName),
        value => Ok(Some(value.to_vec())),
    }
}

fn optional<T>(
    value: &[u8],
    parse: impl Fn(&[u8]) -> Option<T>,
    key: &str,
) -> Result<Option<T>, TarProblem> {
    match value {
        [] => Ok(None),
        value => parse(value)
            .map(Some)
            .ok_or_else(|| bad(&format!("{key} is not a number"))),
    }
}

/// `LENGTH KEY=VALUE\n`, where LENGTH is the length of the whole record.
struct Records<'d>(&'d [u8]);

impl<'d> Iterator for Records<'d> {
    type Item = Result<(&'d [u8], &'d [u8]), TarProblem>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let record = split_record(self.0);
        self.0 = match &record {
            Ok((_, _, rest)) => rest,
            Err(_) => &[],
        };
        Some(record.map(|(key, value, _)| (key, value)))
    }
}

type Split<'d> = (&'d [u8], &'d [u8], &'d [u8]);

fn split_record(data: &[u8]) -> Result<Split<'_>, TarProblem> {
    let space = data
        .iter()
        .take(20)
        .position(|&b| b == b' ')
        .ok_or_else(|| bad("a record does not begin with its length"))?;
    let length = number::decimal(&data[..space])
        .and_then(|n| usize::try_from(n).ok())
        .ok_or_else(|| bad("a record does not begin with its length"))?;
    if length > data.len() {
        return Err(bad("a record is longer than the header"));
    }
    let body = data
        .get(space + 1..length)
        .and_then(|body| body.strip_suffix(b"\n"))
        .ok_or_else(|| bad("a record does not end where its length says"))?;
    let equals = body
        .iter()
        .position(|&b| b == b'=')
        .ok_or_else(|| bad("a record has no value"))?;
    if equals == 0 {
        return Err(bad("a record has no key"));
    }
    Ok((&body[..equals], &body[equals + 1..], &data[length..]))
}

fn url_decoded(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        if first == b'%' {
            let digits = std::str::from_utf8(tail.get(..2)?).ok()?;
            if !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
                return None;
            }
            out.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &tail[2..];
        } else {
            out.push(first);
            rest = tail;
        }
    }
    Some(out)
}

/// Base64 without padding, as libarchive writes it. Bits behind the last byte may have any value.
static BASE64: LazyLock<Option<Encoding>> = LazyLock::new(|| {
    let mut form = BASE64_NOPAD.specification();
    form.check_trailing_bits = false;
    form.encoding().ok()
});

/// Base64 with or without padding.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let mut digits = text;
    for _ in 0..2 {
        digits = digits.strip_suffix(b"=").unwrap_or(digits);
    }
    BASE64.as_ref()?.decode(digits).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(records: &[u8]) -> Result<PaxHeader, String> {
        PaxHeader::parse(records, &PaxHeader::default()).map_err(|e| e.to_string())
    }

    fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
        let body = [b" ", key, b"=", value, b"\n"].concat();
        let length = (body.len()..)
            .find(|n| n.to_string().len() + body.len() == *n)
            .unwrap();
        [length.to_string().as_bytes(), &body].concat()
    }

    #[test]
    fn values_may_hold_any_byte() {
        let value = b"a\n=b\0c\xff 9 path=x\n";
        let records = [
            record(b"SCHILY.xattr.user.x", value),
            record(b"path", b"name\nwith=newline"),
        ];
        let header = parse(&records.concat()).unwrap();
        assert_eq!(
            header.xattrs,
            BTreeMap::from([(b"user.x".to_vec(), value.to_vec())])
        );
        assert_eq!(header.path.as_deref(), Some(&b"name\nwith=newline"[..]));
    }

    #[test]
    fn libarchive_attributes_are_decoded() {
        let header = parse(&record(b"LIBARCHIVE.xattr.user.a%3Db", b"AAEC")).unwrap();
        assert_eq!(
            header.xattrs,
            BTreeMap::from([(b"user.a=b".to_vec(), vec![0, 1, 2])])
        );
        assert_eq!(base64(b"YQ"), Some(b"a".to_vec()));
        assert_eq!(base64(b"YQ=="), Some(b"a".to_vec()));
        assert_eq!(base64(b"YWI"), Some(b"ab".to_vec()));
        assert_eq!(base64(b""), Some(vec![]));
        assert_eq!(base64(b"Y"), None);
        assert_eq!(base64(b"Y?=="), None);
        assert_eq!(url_decoded(b"a%2"), None);
        assert_eq!(url_decoded(b"%+1"), None);
    }

    #[test]
    fn malformed_records_are_refused() {
        assert!(parse(b"11 path=ab\n").is_ok());
        let (begin, end) = (
            "a record does not begin with its length",
            "a record does not end where its length says",
        );
        for (records, problem) in [
            (&b"10 path=ab\n"[..], end),
            (b"12 path=ab\n", "a record is longer than the header"),
            (b"1 path=ab\n", end),
            (b"-9 path=ab\n", begin),
            (b"path=ab\n", begin),
            (b"18446744073709551616 a=b\n", begin),
            (b"18446744073709551615 a=b\n", begin),
            (b"7 path\n", "a record has no value"),
            (b"8 path\n", "a record is longer than the header"),
            (b"5 =a\n", "a record has no key"),
            (b"11 path=ab\n\0\0\0", begin),
            (&record(b"size", b"x"), "size is not a number"),
            (&record(b"size", b"-1"), "size is not a number"),
            (&record(b"mtime", b"1e9"), "mtime is not a number"),
        ] {
            let message = format!("malformed PAX record: {problem}");
            assert_eq!(parse(records).unwrap_err(), message);
        }
        for (key, value, message) in [
            (&b"path"[..], &b"a\0b"[..], "the name contains a zero byte"),
            (
                b"SCHILY.xattr.",
                b"a",
                r#"extended attribute "": the name is empty"#,
            ),
            (
                b"GNU.sparse.what",
                b"1",
                "malformed sparse map: an unknown record",
            ),
        ] {
            assert_eq!(parse(&record(key, value)).unwrap_err(), message);
        }
    }

    #[test]
    fn an_empty_value_removes_the_global_one() {
        let global = [record(b"uid", b"55"), record(b"gid", b"66")].concat();
        let global = PaxHeader::parse_global(&global, &PaxHeader::default()).unwrap();
        let header = PaxHeader::parse(&record(b"uid", b""), &global).unwrap();
        assert_eq!((header.uid, header.gid), (None, Some(66)));
    }

    #[test]
    fn a_global_header_cannot_name_a_file() {
        for (key, value) in [
            ("path", "a"),
            ("size", "5"),
            ("linkpath", "a"),
            ("GNU.sparse.size", "5"),
        ] {
            let records = record(key.as_bytes(), value.as_bytes());
            assert!(PaxHeader::parse_global(&records, &PaxHeader::default()).is_err());
        }
    }
}
