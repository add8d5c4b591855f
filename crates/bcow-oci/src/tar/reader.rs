//! Reads the entries of a tar archive.

use std::collections::BTreeMap;

use bcow_erofs::tree::{DeviceNumber, Timestamp};
use tar_core::{EntryType, GNU_MAGIC, HEADER_SIZE, Header, USTAR_MAGIC, UstarHeader};

use super::number;
use super::pax::PaxHeader;
use super::sparse::{MAX_RUNS, MapReader, PaxSparse, SparseMap};
use crate::error::{
    ConvertError, Exceeded, LimitKind, TarPlace, TarProblem, Unplaced, check_limit,
};
use crate::stream::{CHUNK_BYTES, ChunkStream};

/// Largest size of the extension headers of one entry. Linux allows 64 KiB of extended attributes
/// per file.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;
/// Longest name in a GNU long-name header or PAX path. The length of paths in the image is checked
/// later.
const MAX_NAME_BYTES: u64 = 64 << 10;

/// One entry with all its extensions applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TarEntry {
    /// The name as the archive has it.
    pub path: Vec<u8>,
    /// Target of a link.
    pub link: Vec<u8>,
    pub kind: EntryKind,
    pub permissions: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Timestamp,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Bytes of data behind the header; 0 unless the entry is a regular file.
    pub stored: u64,
    /// The data runs of a file with holes.
    pub sparse: Option<SparseMap>,
}

/// The kind of object that an entry creates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EntryKind {
    Regular,
    Hardlink,
    Symlink,
    CharDevice(DeviceNumber),
    BlockDevice(DeviceNumber),
    Directory,
    Fifo,
}

/// How an archive ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// With the end-of-archive marker, two blocks of zeros. `followed` is true if a nonzero byte
    /// follows.
    Marker { followed: bool },
    /// With the first block of the marker only. No entry begins with zeros, so the writer had
    /// written all entries.
    HalfMarker,
    /// Behind an entry, or with no entry at all: the archive may be truncated.
    Nothing { offset: u64 },
}

/// Why an archive cannot be read, and the entry if it is known.
#[derive(Debug)]
pub(crate) struct TarError {
    pub entry: Option<Vec<u8>>,
    pub cause: Unplaced,
}

impl TarError {
    /// The error of the layer or archive `layer`.
    pub(crate) fn of(self, layer: &str) -> ConvertError {
        let place = TarPlace {
            layer: layer.to_owned(),
            entry: self.entry,
        };
        self.cause.at(place)
    }
}

/// Reads entries one by one. The data of an entry can be read or skipped before the next entry.
pub(crate) struct TarReader<'s> {
    input: ChunkStream<'s>,
    global: PaxHeader,
    /// Unread data of the current entry, in bytes.
    data_left: u64,
    /// Padding behind that data, in bytes.
    padding: u64,
    /// Name in the last header, for errors.
    context: Option<Vec<u8>>,
    end: Option<End>,
    skip_checksums: bool,
}

/// Extension headers that precede an entry.
#[derive(Default)]
struct Extensions {
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    pax: Option<PaxHeader>,
    bytes: u64,
}

impl<'s> TarReader<'s> {
    pub(crate) fn new(input: ChunkStream<'s>) -> Self {
        TarReader {
            input,
            global: PaxHeader::default(),
            data_left: 0,
            padding: 0,
            context: None,
            end: None,
            skip_checksums: false,
        }
    }

    #[cfg(feature = "testing")]
    /// Disables the check of header checksums, so that a fuzzer gets past them.
    pub(crate) fn without_checksums(mut self) -> Self {
        self.skip_checksums = true;
        self
    }

    /// The next entry; `None` at the end of the archive. Unread data of the previous entry is
    /// skipped.
    pub(crate) fn next_entry(&mut self) -> Result<Option<TarEntry>, TarError> {
        self.advance().map_err(|cause| TarError {
            entry: self.context.take(),
            cause,
        })
    }

    /// The next bytes of the current entry's data in two pieces: `wanted` bytes, or all that are
    /// left.
    pub(crate) fn data(&mut self, wanted: usize) -> Result<(&[u8], &[u8]), TarError> {
        let wanted = self.data_left.min(wanted as u64) as usize;
        let offset = self.input.position();
        let context = &self.context;
        let error = |cause| TarError {
            entry: context.clone(),
            cause,
        };
        let (first, second) = self.input.window(wanted).map_err(|e| error(e.into()))?;
        if first.len() + second.len() < wanted {
            return Err(error(truncated(offset, "an entry's data").into()));
        }
        Ok((first, second))
    }

    /// Consumes `bytes` bytes of the current entry's data.
    pub(crate) fn consume(&mut self, bytes: usize) {
        self.data_left -= bytes as u64;
        self.input.consume(bytes);
    }

    /// Offset of the current entry's data in the stream. Valid only before data is consumed.
    pub(crate) fn position(&self) -> u64 {
        self.input.position()
    }

    /// How the archive ends; `None` before [`TarReader::finish`].
    pub(crate) fn end(&self) -> Option<End> {
        self.end
    }

    /// Reads the bytes behind the archive's end, because the layer's digest covers them.
    pub(crate) fn finish(&mut self) -> Result<(), ConvertError> {
        loop {
            let (first, second) = self.input.window(CHUNK_BYTES)?;
            let length = first.len() + second.len();
            if length == 0 {
                return Ok(());
            }
            if let Some(End::Marker { followed }) = &mut self.end {
                *followed = *followed || first.iter().chain(second).any(|&b| b != 0);
            }
            self.input.consume(length);
        }
    }

    fn advance(&mut self) -> Result<Option<TarEntry>, Unplaced> {
        let at = self.input.position();
        if self.input.skip(self.data_left)? > 0 {
            return Err(truncated(at, "an entry's data").into());
        }
        // Missing padding at the very end is accepted: no data is lost, and other readers accept
        // it.
        self.input.skip(self.padding)?;
        (self.data_left, self.padding) = (0, 0);
        self.context = None;
        let mut extensions = Extensions::default();
        loop {
            let offset = self.input.position();
            let Some(block) = self.block("a header")? else {
                if !extensions.is_empty() {
                    return Err(TarProblem::OrphanExtension.into());
                }
                self.end = Some(End::Nothing { offset });
                return Ok(None);
            };
            if is_zero(&block) {
                if !extensions.is_empty() {
                    return Err(TarProblem::OrphanExtension.into());
                }
                // At a single zero block GNU tar stops with a warning, and Go returns an error. The
                // entries behind the block would be lost, so this reader returns an error.
                self.end = match self.block("the end mark")? {
                    Some(block) if is_zero(&block) => Some(End::Marker { followed: false }),
                    Some(_) => return Err(TarProblem::LoneZeroBlock { offset }.into()),
                    None => Some(End::HalfMarker),
                };
                return Ok(None);
            }
            let header = Header::from_bytes(&block);
            if !self.skip_checksums {
                check_sum(&block, offset)?;
            }
            self.context = Some(terminated(&header.as_ustar().name).to_vec());
            if let Some(entry) = self.header(header, &mut extensions)? {
                return Ok(Some(entry));
            }
        }
    }

    /// Processes one header; `None` if it is an extension of the next entry.
    fn header(
        &mut self,
        header: &Header,
        extensions: &mut Extensions,
    ) -> Result<Option<TarEntry>, Unplaced> {
        let fields = header.as_ustar();
        let size = unsigned(&fields.size, "size")?;
        // Before ustar, these type letters have no meaning.
        let extended = fields.magic == *USTAR_MAGIC || fields.magic == *GNU_MAGIC;
        match (fields.typeflag[0], extended) {
            (b'x' | b'X', true) => {
                let data = self.extension(size, extensions, MAX_EXTENSION_BYTES)?;
                let pax = PaxHeader::parse(&data, &self.global)?;
                set_once(&mut extensions.pax, pax, "PAX")?;
                return Ok(None);
            }
            (b'g', _) => {
                if !extensions.is_empty() {
                    return Err(TarProblem::OrphanExtension.into());
                }
                let data = self.extension(size, &mut Extensions::default(), MAX_EXTENSION_BYTES)?;
                self.global = PaxHeader::parse_global(&data, &self.global)?;
                return Ok(None);
            }
            (b'L', true) => {
                let data = self.extension(size, extensions, MAX_NAME_BYTES)?;
                let name = terminated(&data).to_vec();
                set_once(&mut extensions.long_name, name, "GNU long-name")?;
                return Ok(None);
            }
            (b'K', true) => {
                let data = self.extension(size, extensions, MAX_NAME_BYTES)?;
                let name = terminated(&data).to_vec();
                set_once(&mut extensions.long_link, name, "GNU long-link")?;
                return Ok(None);
            }
            // A volume label does not create a file.
            (b'V', true) => return Ok(None),
            (b'M', true) => return Err(TarProblem::MultiVolume.into()),
            _ => {}
        }
        self.entry(header, size, std::mem::take(extensions))
            .map(Some)
    }

    /// Reads the data of an extension header.
    fn extension(
        &mut self,
        size: u64,
        extensions: &mut Extensions,
        allowed: u64,
    ) -> Result<Vec<u8>, Unplaced> {
        extensions.bytes = extensions.bytes.saturating_add(size);
        if extensions.bytes > allowed.max(MAX_EXTENSION_BYTES) || size > allowed {
            return Err(Unplaced::Limit(Exceeded {
                kind: LimitKind::ExtensionBytes,
                value: extensions.bytes,
                allowed,
            }));
        }
        let offset = self.input.position();
        let padded = size.next_multiple_of(HEADER_SIZE as u64) as usize;
        let (first, second) = self.input.window(padded)?;
        let mut data = [first, second].concat();
        if (data.len() as u64) < size {
            return Err(truncated(offset, "an extension header").into());
        }
        self.input.consume(data.len());
        data.truncate(size as usize);
        Ok(data)
    }

    fn entry(
        &mut self,
        header: &Header,
        size: u64,
        extensions: Extensions,
    ) -> Result<TarEntry, Unplaced> {
        let fields = header.as_ustar();
        let has_pax = extensions.pax.is_some();
        let pax = extensions.pax.unwrap_or_else(|| self.global.clone());
        let is_gnu_sparse = fields.typeflag[0] == b'S' && fields.magic == *GNU_MAGIC;
        let path = match (pax.sparse.name.as_ref(), pax.path, extensions.long_name) {
            (Some(name), _, _) => name.clone(),
            (None, Some(path), _) => path,
            (None, None, Some(name)) => name,
            (None, None, None) => header_name(header, is_gnu_sparse),
        };
        self.context = Some(path.clone());
        let link = match (pax.linkpath, extensions.long_link) {
            (Some(link), _) => link,
            (None, Some(link)) => link,
            (None, None) => terminated(&fields.linkname).to_vec(),
        };
        let kind = entry_kind(header, &path)?;
        // As in Go, only regular files have data. Some old writers recorded the size of a directory
        // in the size field.
        let mut size = pax.size.unwrap_or(size);
        if kind != EntryKind::Regular && header.entry_type() != EntryType::Other(b'D') {
            size = 0;
        }
        // File offsets are signed in most systems; the limit also prevents an overflow of the
        // padded size.
        if size > i64::MAX as u64 - HEADER_SIZE as u64 {
            return Err(TarProblem::OutOfRange {
                field: "size",
                value: size.to_string(),
            }
            .into());
        }
        self.data_left = size;
        self.padding = size.next_multiple_of(HEADER_SIZE as u64) - size;
        let sparse = match kind {
            EntryKind::Regular if is_gnu_sparse => Some(self.gnu_sparse(header)?),
            EntryKind::Regular if has_pax => match pax.sparse.resolve()? {
                PaxSparse::No => None,
                PaxSparse::InRecords { size, runs } => {
                    Some(SparseMap::new(size, runs, self.data_left)?)
                }
                PaxSparse::InData { size } => Some(self.sparse_map_in_data(size)?),
            },
            _ => None,
        };
        let mtime = match pax.mtime {
            Some(mtime) => mtime,
            None => Timestamp {
                seconds: number::field(&fields.mtime)
                    .ok_or(TarProblem::BadNumber { field: "mtime" })?,
                nanoseconds: 0,
            },
        };
        Ok(TarEntry {
            path,
            link,
            kind,
            permissions: (unsigned(&fields.mode, "mode")? & 0o7777) as u16,
            uid: identifier(pax.uid, &fields.uid, "uid")?,
            gid: identifier(pax.gid, &fields.gid, "gid")?,
            mtime,
            xattrs: pax.xattrs,
            stored: self.data_left,
            sparse,
        })
    }

    /// Old GNU sparse files: four runs in the header, and 21 in each following block.
    fn gnu_sparse(&mut self, header: &Header) -> Result<SparseMap, Unplaced> {
        let gnu = header.as_gnu();
        let mut runs = Vec::new();
        collect_runs(&header.as_bytes()[386..482], &mut runs)?;
        let mut more = gnu.isextended[0] != 0;
        while more {
            let block = self.next_block("a sparse header")?;
            collect_runs(&block[..504], &mut runs)?;
            check_limit(LimitKind::SparseRuns, runs.len() as u64, MAX_RUNS as u64)?;
            more = block[504] != 0;
        }
        let size = unsigned(&gnu.realsize, "realsize")?;
        Ok(SparseMap::new(size, runs, self.data_left)?)
    }

    /// PAX sparse files, version 1.0: the data begins with the map, in whole blocks.
    fn sparse_map_in_data(&mut self, size: u64) -> Result<SparseMap, Unplaced> {
        let mut map = MapReader::default();
        loop {
            if self.data_left < HEADER_SIZE as u64 {
                let problem = "the map is longer than the data";
                return Err(TarProblem::BadSparse { problem }.into());
            }
            let block = self.next_block("a sparse map")?;
            self.data_left -= HEADER_SIZE as u64;
            if map.read_block(&block)? {
                return Ok(SparseMap::new(size, map.runs(), self.data_left)?);
            }
        }
    }

    /// The next 512 bytes, which must be there.
    fn next_block(&mut self, what: &'static str) -> Result<[u8; HEADER_SIZE], Unplaced> {
        let offset = self.input.position();
        let block = self.block(what)?;
        block.ok_or_else(|| truncated(offset, what).into())
    }

    /// The next 512 bytes; `None` at the end of the input.
    fn block(&mut self, what: &'static str) -> Result<Option<[u8; HEADER_SIZE]>, Unplaced> {
        let offset = self.input.position();
        let (first, second) = self.input.window(HEADER_SIZE)?;
        let read = first.len() + second.len();
        let mut block = [0; HEADER_SIZE];
        block[..first.len()].copy_from_slice(first);
        block[first.len()..read].copy_from_slice(second);
        match read {
            0 => Ok(None),
            HEADER_SIZE => {
                self.input.consume(HEADER_SIZE);
                Ok(Some(block))
            }
            _ if offset == 0 => Err(TarProblem::NotTar { offset }.into()),
            _ => Err(truncated(offset, what).into()),
        }
    }
}

impl Extensions {
    fn is_empty(&self) -> bool {
        self.long_name.is_none() && self.long_link.is_none() && self.pax.is_none()
    }
}

fn truncated(offset: u64, what: &'static str) -> TarProblem {
    TarProblem::Truncated { offset, what }
}

fn set_once<T>(slot: &mut Option<T>, value: T, what: &'static str) -> Result<(), TarProblem> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(TarProblem::DuplicateExtension { what }),
    }
}

fn is_zero(block: &[u8; HEADER_SIZE]) -> bool {
    block.iter().fold(0, |all, byte| all | byte) == 0
}

/// The field up to its first zero byte.
fn terminated(field: &[u8]) -> &[u8] {
    match field.iter().position(|&b| b == 0) {
        Some(end) => &field[..end],
        None => field,
    }
}

/// Checks the sum of the header's bytes, where the checksum field counts as spaces. Old writers
/// summed signed bytes.
fn check_sum(block: &[u8; HEADER_SIZE], offset: u64) -> Result<(), TarProblem> {
    let header: &UstarHeader = Header::from_bytes(block).as_ustar();
    let field: i64 = header.cksum.iter().map(|&b| i64::from(b)).sum();
    let signed_field: i64 = header.cksum.iter().map(|&b| i64::from(b as i8)).sum();
    let spaces = 8 * i64::from(b' ');
    let unsigned = block.iter().map(|&b| u32::from(b)).sum::<u32>();
    let signed = block.iter().map(|&b| i32::from(b as i8)).sum::<i32>();
    let found = i64::from(unsigned) - field + spaces;
    let found_signed = i64::from(signed) - signed_field + spaces;
    match number::field(&header.cksum) {
        Some(expected) if expected == found || expected == found_signed => Ok(()),
        // The first block has neither a valid checksum nor a tar magic: the file is not a tar
        // archive.
        _ if offset == 0 && header.magic != *USTAR_MAGIC && header.magic != *GNU_MAGIC => {
            Err(TarProblem::NotTar { offset })
        }
        expected => Err(TarProblem::Checksum {
            offset,
            found: found.unsigned_abs(),
            expected: expected.unwrap_or_default().unsigned_abs(),
        }),
    }
}

fn unsigned(field: &[u8], name: &'static str) -> Result<u64, TarProblem> {
    number::field(field)
        .and_then(|value| u64::try_from(value).ok())
        .ok_or(TarProblem::BadNumber { field: name })
}

fn identifier(pax: Option<u64>, field: &[u8], name: &'static str) -> Result<u32, TarProblem> {
    let value = match pax {
        Some(value) => i128::from(value),
        None => number::field(field)
            .ok_or(TarProblem::BadNumber { field: name })?
            .into(),
    };
    match u32::try_from(value) {
        // chown(2) takes this id as "do not change", so no file can have it.
        Err(_) | Ok(u32::MAX) => Err(TarProblem::OutOfRange {
            field: name,
            value: value.to_string(),
        }),
        Ok(value) => Ok(value),
    }
}

/// The name in the header, with the prefix of ustar and star.
fn header_name(header: &Header, is_gnu_sparse: bool) -> Vec<u8> {
    let fields = header.as_ustar();
    let name = terminated(&fields.name);
    let prefix = if fields.magic == *USTAR_MAGIC {
        // star stores two times in the last 24 bytes of the prefix, and ends the header with
        // "tar\0".
        match &header.as_bytes()[508..512] {
            b"tar\0" => terminated(&fields.prefix[..131]),
            _ => terminated(&fields.prefix),
        }
    } else if fields.magic == *GNU_MAGIC && !is_gnu_sparse {
        // Go before 1.9 wrote prefixes into GNU headers, where GNU tar stores times; such layers
        // exist.
        let gnu = header.as_gnu();
        let times = number::field(&gnu.atime).and(number::field(&gnu.ctime));
        match times {
            None if terminated(&fields.prefix).is_ascii() => terminated(&fields.prefix),
            _ => &[],
        }
    } else {
        &[]
    };
    match prefix {
        [] => name.to_vec(),
        prefix => [prefix, b"/", name].concat(),
    }
}

fn entry_kind(header: &Header, path: &[u8]) -> Result<EntryKind, TarProblem> {
    let fields = header.as_ustar();
    let device = || -> Result<DeviceNumber, TarProblem> {
        let part = |field: &[u8], name, end: i64| {
            let value = number::field(field).ok_or(TarProblem::BadNumber { field: name })?;
            match value {
                // The range of a Linux device number.
                0.. if value < end => Ok(value as u32),
                _ => Err(TarProblem::OutOfRange {
                    field: name,
                    value: value.to_string(),
                }),
            }
        };
        Ok(DeviceNumber {
            major: part(&fields.dev_major, "device major", 1 << 12)?,
            minor: part(&fields.dev_minor, "device minor", 1 << 20)?,
        })
    };
    Ok(match fields.typeflag[0] {
        // Before ustar, a directory was an entry whose name ends with a slash.
        b'0' | 0 if path.ends_with(b"/") => EntryKind::Directory,
        b'0' | 0 | b'7' => EntryKind::Regular,
        b'S' if fields.magic == *GNU_MAGIC => EntryKind::Regular,
        b'1' => EntryKind::Hardlink,
        b'2' => EntryKind::Symlink,
        b'3' => EntryKind::CharDevice(device()?),
        b'4' => EntryKind::BlockDevice(device()?),
        b'5' | b'D' => EntryKind::Directory,
        b'6' => EntryKind::Fifo,
        other => {
            return Err(TarProblem::UnknownType { kind: other.into() });
        }
    })
}

/// Slots with twelve bytes of offset and twelve of length. A slot that begins with a zero byte ends
/// the list.
fn collect_runs(slots: &[u8], runs: &mut Vec<(u64, u64)>) -> Result<(), TarProblem> {
    for slot in slots.chunks_exact(24).take_while(|slot| slot[0] != 0) {
        runs.push((
            unsigned(&slot[..12], "sparse offset")?,
            unsigned(&slot[12..], "sparse length")?,
        ));
    }
    Ok(())
}
