//! Writes the entries of a tar archive.
//!
//! Headers have the ustar form. PAX records hold the values that do not fit: names over 100 bytes,
//! fractions of seconds, times before 1970 or after 2242, ids over 2097151, sizes from 8 GiB,
//! extended attributes (`SCHILY.xattr.*`, as in GNU tar and container engines), and holes (GNU
//! sparse format 1.0). Names and values are written byte for byte, in any encoding.

use std::io::{self, Write};

use bcow_erofs::reader::{DeviceNumber, Timestamp};
use data_encoding::BASE64_NOPAD;
use tar_core::{HEADER_SIZE, Header};

use super::Run;

/// Largest number in an octal field of eight bytes.
const MAX_OCTAL_8: u64 = 0o7_777_777;
/// Largest number in an octal field of twelve bytes.
const MAX_OCTAL_12: u64 = 0o77_777_777_777;
/// Longest name in a header field.
const NAME_BYTES: usize = 100;
/// Limit on the PAX records of one entry: the limit of Go's reader and of [`crate::tar::reader`].
pub(crate) const MAX_PAX_BYTES: usize = 1 << 20;

/// The header of an entry.
pub(crate) struct TarHeader<'e> {
    /// Path without a leading slash; the path of a directory ends with a slash.
    pub path: &'e [u8],
    pub kind: Kind<'e>,
    pub permissions: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Timestamp,
    /// Names and values.
    pub xattrs: &'e [(Vec<u8>, Vec<u8>)],
}

/// The kind of object that an entry creates.
pub(crate) enum Kind<'e> {
    /// `size` bytes of data follow.
    Regular {
        size: u64,
    },
    /// The data of the runs follows. There is at least one hole, and at most
    /// [`crate::tar::MAX_RUNS`] runs.
    Sparse {
        size: u64,
        runs: &'e [Run],
    },
    Hardlink {
        target: &'e [u8],
    },
    Symlink {
        target: &'e [u8],
    },
    CharDevice(DeviceNumber),
    BlockDevice(DeviceNumber),
    Directory,
    Fifo,
}

/// Why an entry could not be written.
#[derive(Debug)]
pub(crate) enum EntryError {
    /// The PAX records are longer than readers accept.
    PaxBytes(usize),
    Io(io::Error),
}

impl From<io::Error> for EntryError {
    fn from(error: io::Error) -> Self {
        EntryError::Io(error)
    }
}

/// Writes entries one by one, each followed by its data.
pub(crate) struct TarWriter<W> {
    out: W,
    /// Bytes of data that the current entry still lacks.
    data_left: u64,
    padding: usize,
}

impl<W: Write> TarWriter<W> {
    pub(crate) fn new(out: W) -> Self {
        TarWriter {
            out,
            data_left: 0,
            padding: 0,
        }
    }

    /// Starts an entry.
    pub(crate) fn entry(&mut self, entry: &TarHeader<'_>) -> Result<(), EntryError> {
        assert_eq!(self.data_left, 0, "the last entry lacks data");
        let map = match &entry.kind {
            Kind::Sparse { size, runs } => sparse_map(*size, runs),
            _ => Vec::new(),
        };
        let stored = match &entry.kind {
            Kind::Regular { size } => *size,
            Kind::Sparse { runs, .. } => {
                map.len() as u64 + runs.iter().map(|run| run.length).sum::<u64>()
            }
            _ => 0,
        };
        let records = pax_records(entry, stored);
        if records.len() > MAX_PAX_BYTES {
            return Err(EntryError::PaxBytes(records.len()));
        }
        if !records.is_empty() {
            let mut header = Header::new_ustar();
            let fields = header.as_ustar_mut();
            put(&mut fields.name, &beside(entry.path, b"PaxHeaders.0"));
            octal(&mut fields.mode, 0o644);
            octal(&mut fields.size, records.len() as u64);
            fields.typeflag = *b"x";
            self.header(header)?;
            self.out.write_all(&records)?;
            self.pad(records.len())?;
        }
        self.header(header(entry, stored))?;
        self.out.write_all(&map)?;
        self.data_left = stored - map.len() as u64;
        // The map fills whole blocks, so only the data needs padding.
        self.padding = padding(stored);
        Ok(())
    }

    /// Appends data to the current entry.
    pub(crate) fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.data_left = self
            .data_left
            .checked_sub(bytes.len() as u64)
            .ok_or_else(|| io::Error::other("more data than the entry announced"))?;
        self.out.write_all(bytes)?;
        if self.data_left == 0 {
            let padding = std::mem::take(&mut self.padding);
            self.out.write_all(&[0; HEADER_SIZE][..padding])?;
        }
        Ok(())
    }

    /// Writes the end-of-archive marker and returns the stream.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        assert_eq!(self.data_left, 0, "the last entry lacks data");
        self.out.write_all(&[0; 2 * HEADER_SIZE])?;
        Ok(self.out)
    }

    fn header(&mut self, mut header: Header) -> io::Result<()> {
        let fields = header.as_ustar_mut();
        fields.cksum.fill(b' ');
        let sum: u64 = header.as_bytes().iter().map(|&b| u64::from(b)).sum();
        // Six digits, NUL, space: the form that all writers use.
        octal(&mut header.as_ustar_mut().cksum[..7], sum);
        self.out.write_all(header.as_bytes())
    }

    fn pad(&mut self, bytes: usize) -> io::Result<()> {
        self.out
            .write_all(&[0; HEADER_SIZE][..padding(bytes as u64)])
    }
}

fn padding(bytes: u64) -> usize {
    (bytes.next_multiple_of(HEADER_SIZE as u64) - bytes) as usize
}

/// Makes the header. A number that does not fit is 0 there, and has a PAX record.
fn header(entry: &TarHeader<'_>, stored: u64) -> Header {
    let mut header = Header::new_ustar();
    let fields = header.as_ustar_mut();
    match &entry.kind {
        // A reader without support for sparse files extracts the raw data under this separate name.
        Kind::Sparse { .. } => put(&mut fields.name, &beside(entry.path, b"GNUSparseFile.0")),
        _ => put(&mut fields.name, short(entry.path)),
    }
    octal(&mut fields.mode, entry.permissions.into());
    octal(&mut fields.uid, entry.uid.into());
    octal(&mut fields.gid, entry.gid.into());
    octal(&mut fields.size, stored);
    octal(
        &mut fields.mtime,
        entry.mtime.seconds.try_into().unwrap_or(0),
    );
    let no_device = DeviceNumber { major: 0, minor: 0 };
    let (kind, target, device) = match entry.kind {
        Kind::Regular { .. } | Kind::Sparse { .. } => (b'0', &[][..], no_device),
        Kind::Hardlink { target } => (b'1', target, no_device),
        Kind::Symlink { target } => (b'2', target, no_device),
        Kind::CharDevice(number) => (b'3', &[][..], number),
        Kind::BlockDevice(number) => (b'4', &[][..], number),
        Kind::Directory => (b'5', &[][..], no_device),
        Kind::Fifo => (b'6', &[][..], no_device),
    };
    fields.typeflag = [kind];
    put(
        &mut fields.linkname,
        &target[..target.len().min(NAME_BYTES)],
    );
    octal(&mut fields.dev_major, device.major.into());
    octal(&mut fields.dev_minor, device.minor.into());
    header
}

/// The PAX records of an entry, sorted by key, so that the output is deterministic.
fn pax_records(entry: &TarHeader<'_>, stored: u64) -> Vec<u8> {
    let mut records: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    let mut add = |key: &[u8], value: Vec<u8>| records.push((key.to_vec(), value));
    let number = |value: u64| value.to_string().into_bytes();
    match entry.kind {
        Kind::Sparse { size, .. } => {
            add(b"GNU.sparse.major", number(1));
            add(b"GNU.sparse.minor", number(0));
            add(b"GNU.sparse.name", entry.path.to_vec());
            add(b"GNU.sparse.realsize", number(size));
        }
        _ if entry.path.len() > NAME_BYTES => add(b"path", entry.path.to_vec()),
        _ => {}
    }
    match entry.kind {
        Kind::Hardlink { target } | Kind::Symlink { target } if target.len() > NAME_BYTES => {
            add(b"linkpath", target.to_vec());
        }
        _ => {}
    }
    if stored > MAX_OCTAL_12 {
        add(b"size", number(stored));
    }
    for (key, id) in [(b"uid", entry.uid), (b"gid", entry.gid)] {
        if u64::from(id) > MAX_OCTAL_8 {
            add(key, number(id.into()));
        }
    }
    let time = entry.mtime;
    let in_header = u64::try_from(time.seconds).is_ok_and(|seconds| seconds <= MAX_OCTAL_12);
    if !in_header || time.nanoseconds > 0 {
        add(b"mtime", decimal_time(time).into_bytes());
    }
    for (name, value) in entry.xattrs {
        if name.iter().any(|b| matches!(b, b'=' | 0)) {
            // A PAX key ends at an equals sign; the form of libarchive escapes such bytes.
            let key = [b"LIBARCHIVE.xattr.", &url_encoded(name)[..]].concat();
            // libarchive writes no padding.
            add(&key, BASE64_NOPAD.encode(value).into_bytes());
        } else {
            add(&[b"SCHILY.xattr.", &name[..]].concat(), value.clone());
        }
    }
    records.sort();
    let mut bytes = Vec::new();
    for (key, value) in &records {
        record(&mut bytes, key, value);
    }
    bytes
}

/// `LENGTH KEY=VALUE\n`, where LENGTH includes its own digits.
fn record(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // The space, the equals sign and the newline.
    let rest = key.len() + value.len() + 3;
    let digits = |length: usize| length.to_string().len();
    let mut length = rest + digits(rest);
    length = rest + digits(length);
    out.extend_from_slice(length.to_string().as_bytes());
    for part in [b" ", key, b"=", value, b"\n"] {
        out.extend_from_slice(part);
    }
}

/// Seconds since 1970 in PAX form. The fraction belongs to the signed number: -1.5 is half a second
/// before -1.
fn decimal_time(time: Timestamp) -> String {
    const NANO: i128 = 1_000_000_000;
    let all = i128::from(time.seconds) * NANO + i128::from(time.nanoseconds);
    let sign = if all < 0 { "-" } else { "" };
    let (seconds, fraction) = (all.abs() / NANO, all.abs() % NANO);
    match fraction {
        0 => format!("{sign}{seconds}"),
        _ => format!("{sign}{seconds}.{fraction:09}")
            .trim_end_matches('0')
            .to_owned(),
    }
}

/// The map in front of the data: the number of runs, then the offset and length of each run, one
/// number per line, padded to whole blocks.
fn sparse_map(size: u64, runs: &[Run]) -> Vec<u8> {
    use std::fmt::Write;
    let end = runs.last().map_or(0, |run| run.offset + run.length);
    // GNU tar ends the file at its last run, so a hole at the end is an empty run.
    let last = (end < size).then_some(Run {
        offset: size,
        length: 0,
    });
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{}", runs.len() + usize::from(last.is_some()));
    for run in runs.iter().chain(&last) {
        let _ = write!(text, "{}\n{}\n", run.offset, run.length);
    }
    let mut bytes = text.into_bytes();
    bytes.resize(bytes.len().next_multiple_of(HEADER_SIZE), 0);
    bytes
}

/// The part of a path that fits into a header, without a slash at its end: a slash marks a
/// directory.
fn short(path: &[u8]) -> &[u8] {
    if path.len() <= NAME_BYTES {
        return path;
    }
    without_slashes_at_end(&path[..NAME_BYTES])
}

/// The name of an auxiliary entry for `path`, in a directory beside `path` that only such entries
/// use.
fn beside(path: &[u8], directory: &[u8]) -> Vec<u8> {
    let path = without_slashes_at_end(path);
    let (parent, name) = match path.iter().rposition(|&b| b == b'/') {
        Some(slash) => path.split_at(slash + 1),
        None => (&[][..], path),
    };
    let mut all = [parent, directory, b"/", name].concat();
    if all.len() > NAME_BYTES {
        all = [directory, b"/", name].concat();
    }
    all.truncate(NAME_BYTES);
    all
}

fn without_slashes_at_end(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&b| b != b'/').map_or(0, |at| at + 1);
    &path[..end]
}

fn put(field: &mut [u8], bytes: &[u8]) {
    field[..bytes.len()].copy_from_slice(bytes);
}

/// Octal digits with leading zeros, then a NUL; 0 if the number does not fit.
fn octal(field: &mut [u8], value: u64) {
    let digits = field.len() - 1;
    let fits = value >> (3 * digits) == 0;
    let text = format!("{:0digits$o}\0", if fits { value } else { 0 });
    field.copy_from_slice(text.as_bytes());
}

fn url_encoded(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    for &byte in name {
        match byte {
            b'=' | b'%' | 0..=b' ' | 0x7f.. => {
                out.extend_from_slice(format!("%{byte:02X}").as_bytes());
            }
            _ => out.push(byte),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stream::{ChunkStream, MemorySource};
    use crate::tar::{self, EntryKind, TarReader};

    /// The entries of an archive and their data, as [`TarReader`] reads them.
    fn read_back(archive: &[u8]) -> Vec<(tar::TarEntry, Vec<u8>)> {
        let stream = ChunkStream::new(Box::new(MemorySource::new(archive, 1000)));
        let mut reader = TarReader::new(stream);
        let mut all = Vec::new();
        while let Some(entry) = reader.next_entry().unwrap() {
            let length = entry.stored as usize;
            let (first, second) = reader.data(length).unwrap();
            let data = [first, second].concat();
            reader.consume(length);
            all.push((entry, data));
        }
        all
    }

    fn plain<'e>(path: &'e [u8], kind: Kind<'e>) -> TarHeader<'e> {
        TarHeader {
            path,
            kind,
            permissions: 0o644,
            uid: 0,
            gid: 0,
            mtime: Timestamp::default(),
            xattrs: &[],
        }
    }

    fn archive(entry: &TarHeader<'_>, data: &[u8]) -> Vec<u8> {
        let mut tar = TarWriter::new(Vec::new());
        tar.entry(entry).unwrap();
        tar.data(data).unwrap();
        tar.finish().unwrap()
    }

    #[test]
    fn a_small_entry_is_one_header_that_every_tar_reads() {
        let entry = plain(b"etc/motd", Kind::Regular { size: 3 });
        let bytes = archive(&entry, b"abc");
        assert_eq!(bytes.len(), 4 * 512);
        assert_eq!(&bytes[..9], b"etc/motd\0");
        assert_eq!(
            &bytes[100..136],
            b"0000644\x000000000\x000000000\x0000000000003\0"
        );
        assert_eq!(&bytes[148..157], b"010637\0 0");
        assert_eq!(&bytes[257..265], b"ustar\x0000");
        assert_eq!(&bytes[512..516], b"abc\0");
    }

    #[test]
    fn a_record_counts_its_own_digits() {
        for length in [
            1, 2, 3, 89, 90, 91, 92, 93, 94, 988, 989, 990, 991, 9980, 9990,
        ] {
            let mut bytes = Vec::new();
            record(&mut bytes, b"k", &vec![b'v'; length]);
            let text = bytes.split(|&b| b == b' ').next().unwrap();
            let claimed: usize = std::str::from_utf8(text).unwrap().parse().unwrap();
            assert_eq!(claimed, bytes.len(), "{length}");
        }
    }

    #[test]
    fn sparse_files_are_read_back_with_their_holes() {
        let run = |offset, length| Run { offset, length };
        for (size, runs) in [
            (10_000, vec![]),
            (10_000, vec![run(0, 100)]),
            (10_000, vec![run(9_000, 1_000)]),
            (
                1 << 40,
                vec![run(4096, 4096), run(1 << 30, 5), run((1 << 40) - 1, 1)],
            ),
            (1 << 40, (0..1000).map(|i| run(i << 20, 1)).collect()),
        ] {
            let stored: u64 = runs.iter().map(|run| run.length).sum();
            let data: Vec<u8> = (0..stored).map(|i| (i % 251) as u8).collect();
            let long = [b'n'; 150];
            let entry = plain(&long, Kind::Sparse { size, runs: &runs });
            let mut back = read_back(&archive(&entry, &data));
            let (entry, read) = back.pop().unwrap();
            assert!(back.is_empty());
            assert_eq!(entry.path, long);
            let map = entry.sparse.unwrap();
            assert_eq!((map.size, map.runs), (size, runs));
            assert!(read == data);
        }
    }

    #[test]
    fn large_sizes_go_into_a_record() {
        let mut tar = TarWriter::new(Vec::new());
        let size = (8 << 30) + 1;
        tar.entry(&plain(b"large", Kind::Regular { size })).unwrap();
        let stream = ChunkStream::new(Box::new(MemorySource::new(&tar.out, 512)));
        let entry = TarReader::new(stream).next_entry().unwrap().unwrap();
        assert_eq!(entry.stored, size);
    }

    #[test]
    fn attributes_that_no_reader_takes_are_refused() {
        let xattrs: Vec<_> = (0..20)
            .map(|i| (format!("user.{i}").into_bytes(), vec![0; 60_000]))
            .collect();
        let entry = TarHeader {
            xattrs: &xattrs,
            ..plain(b"f", Kind::Fifo)
        };
        let mut tar = TarWriter::new(Vec::new());
        assert!(matches!(tar.entry(&entry), Err(EntryError::PaxBytes(_))));
        assert!(tar.out.is_empty());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            path in prop::collection::vec(1u8.., 1..300),
            target in prop::collection::vec(1u8.., 1..300),
            permissions in 0u16..0o10_000,
            (uid, gid) in (any::<u32>(), any::<u32>()),
            seconds in prop_oneof![any::<i64>(), -5i64..5, (1i64 << 33) - 2..(1 << 33) + 2],
            nanoseconds in prop_oneof![Just(0u32), 0u32..1_000_000_000],
            xattrs in prop::collection::btree_map(
                prop::collection::vec(1u8.., 1..50),
                prop::collection::vec(any::<u8>(), 0..300),
                0..4,
            ),
            device in (0u32..4096, 0u32..1 << 20),
            which in 0..6,
            data in prop::collection::vec(any::<u8>(), 0..2000),
        ) {
            // A slash at the end would make the entry a directory.
            let mut path = path;
            path.push(b'x');
            let number = DeviceNumber { major: device.0, minor: device.1 };
            let (kind, expected) = match which {
                0 => (Kind::Regular { size: data.len() as u64 }, EntryKind::Regular),
                1 => (Kind::Hardlink { target: &target }, EntryKind::Hardlink),
                2 => (Kind::Symlink { target: &target }, EntryKind::Symlink),
                3 => (Kind::CharDevice(number), EntryKind::CharDevice(number)),
                4 => (Kind::BlockDevice(number), EntryKind::BlockDevice(number)),
                _ => (Kind::Fifo, EntryKind::Fifo),
            };
            let data = if which == 0 { &data[..] } else { &[] };
            let xattrs: Vec<_> = xattrs.into_iter().collect();
            let mtime = Timestamp { seconds, nanoseconds };
            let path = &path[..];
            let entry = TarHeader { path, kind, permissions, uid, gid, mtime, xattrs: &xattrs };
            let back = read_back(&archive(&entry, data));
            prop_assert_eq!(back.len(), 1);
            let (read, read_data) = &back[0];
            prop_assert_eq!(&read.path[..], path);
            prop_assert_eq!(read.kind, expected);
            if matches!(which, 1 | 2) {
                prop_assert_eq!(&read.link, &target);
            }
            prop_assert_eq!(
                (read.permissions, read.uid, read.gid, read.mtime),
                (permissions, uid, gid, mtime)
            );
            prop_assert!(read.xattrs.iter().eq(xattrs.iter().map(|(name, value)| (name, value))));
            prop_assert_eq!(read_data, data);
        }
    }
}
