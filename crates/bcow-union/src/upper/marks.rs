//! The extended attributes (marks) that describe what a file of an upper represents.
//!
//! Names and values are those of overlayfs (`fs/overlayfs/overlayfs.h`) where overlayfs has them.
//! docs/upper.md lists all of them.

use std::ops::Range;

use bcow_format::{crc32c, crc32c_matches};
use rustix::io::Errno;

use super::xattr::each_name;
use super::{
    Attribute, MarkError, Namespace, OVERRIDE, Override, ReadMarksError, TimesMark, XattrMode,
};
use crate::bytes::u64_at;

/// An attribute of bcow or of overlayfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// The directory hides the entries of the lower directory.
    Opaque,
    /// The path of the lower counterpart. Of a directory, that is the lower directory with which it
    /// is merged; of a file, the lower file with the data. See [`Redirect`].
    Redirect,
    /// The lower inode that this one was copied from: see [`Origin`].
    Origin,
    /// All data of the file, or a part of it, is in the lower file: see [`Metacopy`].
    Metacopy,
    /// The difference between the number of names in the union and the number of links: see
    /// [`NlinkDelta`].
    Nlink,
    /// The file is a partial file: see [`PartialMark`].
    Partial,
    /// Times that the host's file does not have: see [`TimesMark`].
    Times,
}

impl Mark {
    pub const ALL: [Mark; 7] = [
        Mark::Opaque,
        Mark::Redirect,
        Mark::Origin,
        Mark::Metacopy,
        Mark::Nlink,
        Mark::Partial,
        Mark::Times,
    ];

    /// The full name of the attribute.
    pub fn name(self, namespace: Namespace) -> &'static [u8] {
        let names: [&[u8]; 2] = match self {
            Mark::Opaque => [b"trusted.overlay.opaque", b"user.overlay.opaque"],
            Mark::Redirect => [b"trusted.overlay.redirect", b"user.overlay.redirect"],
            Mark::Origin => [b"trusted.overlay.origin", b"user.overlay.origin"],
            Mark::Metacopy => [b"trusted.overlay.metacopy", b"user.overlay.metacopy"],
            Mark::Nlink => [b"trusted.overlay.nlink", b"user.overlay.nlink"],
            Mark::Partial => [b"trusted.bcow.sketch", b"user.bcow.sketch"],
            Mark::Times => [b"trusted.overlay.bcow.times", b"user.overlay.bcow.times"],
        };
        match namespace {
            Namespace::Trusted => names[0],
            Namespace::User => names[1],
        }
    }

    /// Sets the mark on a file.
    pub fn set(self, at: Attribute<'_>, namespace: Namespace, value: &[u8]) -> Result<(), Errno> {
        at.set(self.name(namespace), value, XattrMode::Any)
    }

    /// Removes the mark from a file. Returns whether it existed.
    pub fn clear(self, at: Attribute<'_>, namespace: Namespace) -> Result<bool, Errno> {
        at.clear(self.name(namespace))
    }
}

/// The value of [`Mark::Opaque`].
pub const OPAQUE: &[u8] = b"y";

/// The values of all marks of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Marks {
    /// The directory hides the entries of the lower directory.
    pub opaque: bool,
    /// The path of the lower counterpart, if a mark gives it.
    pub redirect: Option<Redirect>,
    /// The lower inode that this one was copied from. `None` also for an origin that overlayfs
    /// wrote, because it names an inode of a host file system.
    pub origin: Option<Origin>,
    /// The source of the data.
    pub metacopy: Metacopy,
    /// The difference between the number of names in the union and the number of links.
    pub nlink: Option<NlinkDelta>,
    /// The fields of the partial file mark.
    pub partial: Option<PartialMark>,
    /// The times that the host's file does not have.
    pub times: Option<TimesMark>,
    /// The owner, mode and type that programs see. Used only with
    /// [`Ownership::Override`](super::Ownership::Override).
    pub owner: Option<Override>,
    /// The error, if the attribute of `owner` is damaged. Ignored with
    /// [`Ownership::Native`](super::Ownership::Native).
    pub owner_damage: Option<MarkError>,
}

impl Marks {
    /// Reads the marks of a file. One system call lists the attributes, and one reads each mark. A
    /// long list or value needs a second call.
    pub fn read(at: Attribute<'_>, namespace: Namespace) -> Result<Marks, ReadMarksError> {
        let mut marks = Marks::default();
        let list = at.list()?;
        for name in each_name(&list) {
            if name == OVERRIDE {
                if let Some(value) = at.get(name)? {
                    match Override::decode(&value) {
                        Ok(owner) => marks.owner = Some(owner),
                        Err(error) => marks.owner_damage = Some(error),
                    }
                }
                continue;
            }
            let known = Mark::ALL
                .into_iter()
                .find(|mark| mark.name(namespace) == name);
            if let Some(mark) = known
                && let Some(value) = at.get(name)?
            {
                marks.apply(mark, &value)?;
            }
        }
        Ok(marks)
    }

    /// Decodes the value of a mark, and stores it in the mark's field.
    pub fn apply(&mut self, mark: Mark, value: &[u8]) -> Result<(), MarkError> {
        match mark {
            Mark::Opaque => self.opaque = value == OPAQUE,
            Mark::Redirect if value == REDIRECT_NOWHERE => {}
            Mark::Redirect => self.redirect = Some(Redirect::decode(value)?),
            Mark::Origin => self.origin = Origin::decode(value)?,
            Mark::Metacopy => self.metacopy = Metacopy::decode(value)?,
            Mark::Nlink => self.nlink = Some(NlinkDelta::decode(value)?),
            Mark::Partial => self.partial = Some(PartialMark::decode(value)?),
            Mark::Times => self.times = Some(TimesMark::decode(value)?),
        }
        Ok(())
    }
}

/// The place of the lower counterpart of a renamed directory or of a metadata copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Redirect {
    /// A path in the lower tree: components separated by slashes, without a leading slash.
    Path(Vec<u8>),
    /// A name in the lower directory of the parent directory.
    Sibling(Vec<u8>),
}

impl Redirect {
    /// The attribute's value. A path begins with a slash; a name contains none.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Redirect::Path(path) => [b"/", &path[..]].concat(),
            Redirect::Sibling(name) => name.clone(),
        }
    }

    /// Decodes a value. Each component must be a valid name of a directory entry.
    pub fn decode(value: &[u8]) -> Result<Redirect, MarkError> {
        let is_name = |name: &[u8]| {
            !matches!(name, b"" | b"." | b"..") && name.len() <= 255 && !name.contains(&0)
        };
        let bad = || MarkError::new("overlay.redirect", value);
        match value.strip_prefix(b"/") {
            Some(path) if path.split(|&byte| byte == b'/').all(is_name) => {
                Ok(Redirect::Path(path.to_vec()))
            }
            None if is_name(value) && !value.contains(&b'/') => {
                Ok(Redirect::Sibling(value.to_vec()))
            }
            _ => Err(bad()),
        }
    }
}

/// The lower inode that an object was copied from, in the form of overlayfs's `struct ovl_fb`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The UUID in the superblock of the image's file system.
    pub uuid: [u8; 16],
    /// The inode number in the image.
    pub nid: u64,
}

/// The size of `struct ovl_fb` in bytes, without a file handle and with bcow's file handle.
const ORIGIN_HEAD: usize = 21;
const ORIGIN_BYTES: usize = ORIGIN_HEAD + 8;
/// `OVL_FH_VERSION`, `OVL_FH_MAGIC`.
const ORIGIN_VERSION: u8 = 0;
const ORIGIN_MAGIC: u8 = 0xfb;
/// The type of bcow's file handles. No file system of Linux uses it, so overlayfs finds no inode by
/// it and ignores the origin.
const ORIGIN_TYPE: u8 = 0xbc;

impl Origin {
    /// The attribute's value.
    pub fn encode(&self) -> [u8; ORIGIN_BYTES] {
        let mut bytes = [0; ORIGIN_BYTES];
        bytes[0] = ORIGIN_VERSION;
        bytes[1] = ORIGIN_MAGIC;
        bytes[2] = ORIGIN_BYTES as u8;
        // Byte 3 holds the flags. Zero means that the handle is little-endian and that its inode is
        // a lower one (neither `OVL_FH_FLAG_BIG_ENDIAN` nor `OVL_FH_FLAG_PATH_UPPER`).
        bytes[4] = ORIGIN_TYPE;
        bytes[5..ORIGIN_HEAD].copy_from_slice(&self.uuid);
        bytes[ORIGIN_HEAD..].copy_from_slice(&self.nid.to_le_bytes());
        bytes
    }

    /// Decodes a value; `None` for an origin that overlayfs wrote, which can be empty.
    pub fn decode(value: &[u8]) -> Result<Option<Origin>, MarkError> {
        let bad = || MarkError::new("overlay.origin", value);
        if value.is_empty() {
            return Ok(None);
        }
        let head = value.first_chunk::<ORIGIN_HEAD>().ok_or_else(bad)?;
        if head[1] != ORIGIN_MAGIC || usize::from(head[2]) != value.len() {
            return Err(bad());
        }
        if head[4] != ORIGIN_TYPE || head[0] != ORIGIN_VERSION {
            return Ok(None);
        }
        let handle = value[ORIGIN_HEAD..].try_into().map_err(|_| bad())?;
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&head[5..]);
        Ok(Some(Origin {
            uuid,
            nid: u64::from_le_bytes(handle),
        }))
    }
}

/// The source of the data of an upper file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Metacopy {
    /// The upper file.
    #[default]
    None,
    /// The lower file: only metadata was copied.
    Whole,
    /// Both: the file is a partial file. overlayfs refuses a file with this value and with
    /// [`REDIRECT_NOWHERE`]. Otherwise it would show the holes of the partial file as zeros.
    Partial,
}

/// The value of [`Metacopy::Partial`]. It is shorter than `struct ovl_metacopy`, so overlayfs
/// treats it as damage (`ovl_check_metacopy_xattr`, since Linux 6.6).
const PARTIAL_METACOPY: [u8; 1] = [0xbc];

/// The redirect of a partial file: a path that no image is expected to have. overlayfs of any
/// version finds no file at this path, and returns EIO instead of the lower file's content. bcow
/// ignores this redirect.
pub const REDIRECT_NOWHERE: &[u8] = b"/.bcow/sketch";

impl Metacopy {
    /// The attribute's value; `None` if the file has no such attribute.
    pub fn encode(self) -> Option<&'static [u8]> {
        match self {
            Metacopy::None => None,
            Metacopy::Whole => Some(&[]),
            Metacopy::Partial => Some(&PARTIAL_METACOPY),
        }
    }

    /// Decodes a value. It ignores a digest that overlayfs stored in the value (`verity=on`).
    pub fn decode(value: &[u8]) -> Result<Metacopy, MarkError> {
        match value {
            [] => Ok(Metacopy::Whole),
            [0, length, ..] if value.len() >= 4 && usize::from(*length) == value.len() => {
                Ok(Metacopy::Whole)
            }
            _ if value == PARTIAL_METACOPY => Ok(Metacopy::Partial),
            _ => Err(MarkError::new("overlay.metacopy", value)),
        }
    }
}

/// The number of names of a file in the union, as a difference to the number of links of its host
/// file or its lower file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NlinkDelta {
    /// The difference to the links of the upper's host file.
    Upper(i32),
    /// The difference to the links of the lower file. Used during an operation that changes either
    /// the links of the host file or the names, but not both (docs/upper.md, "Link count").
    Lower(i32),
}

impl NlinkDelta {
    /// The attribute's value.
    pub fn encode(self) -> String {
        match self {
            NlinkDelta::Upper(delta) => format!("U{delta:+}"),
            NlinkDelta::Lower(delta) => format!("L{delta:+}"),
        }
    }

    pub fn decode(value: &[u8]) -> Result<NlinkDelta, MarkError> {
        let bad = || MarkError::new("overlay.nlink", value);
        let text = std::str::from_utf8(value).map_err(|_| bad())?;
        let form = match text.get(..1) {
            Some("U") => NlinkDelta::Upper,
            Some("L") => NlinkDelta::Lower,
            _ => return Err(bad()),
        };
        let signed = Some(&text[1..]).filter(|delta| delta.starts_with(['+', '-']));
        let delta = signed.and_then(|delta| delta.parse().ok());
        delta.map(form).ok_or_else(bad)
    }
}

/// The value of [`Mark::Partial`], an attribute of the partial file's host file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartialMark {
    /// The partial file's number in this upper. It is also the name of its map.
    pub id: u64,
    /// log2 of the block size in bytes, 9..=30.
    pub block_shift: u8,
    /// Whether the map exists. If not, the partial file stores no block.
    pub map_exists: bool,
    /// The bytes of the lower file, from its start, that are visible where no block is stored.
    pub lower_limit: u64,
}

/// The length of an encoded [`PartialMark`], in bytes.
pub const PARTIAL_MARK_BYTES: usize = 40;
const PARTIAL_VERSION: u8 = 1;
/// The kind: each block at its own offset in the host file.
const SPARSE: u8 = 1;
/// The kind of development versions that stored the blocks in a BCoW file.
const PACKED: u8 = 2;
const MAP_EXISTS: u8 = 1;
/// log2 of the block size in bytes.
const SUPPORTED_BLOCK_SHIFT: u8 = 12;
/// The reserved bytes, which are 0.
const PARTIAL_RESERVED: [Range<usize>; 2] = [4..8, 24..36];
/// The offset of the checksum.
const PARTIAL_CRC: usize = PARTIAL_MARK_BYTES - 4;

impl PartialMark {
    /// The attribute's value.
    pub fn encode(&self) -> [u8; PARTIAL_MARK_BYTES] {
        let mut bytes = [0; PARTIAL_MARK_BYTES];
        bytes[0] = PARTIAL_VERSION;
        bytes[1] = SPARSE;
        bytes[2] = self.block_shift;
        bytes[3] = if self.map_exists { MAP_EXISTS } else { 0 };
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.lower_limit.to_le_bytes());
        let crc = crc32c(&bytes[..PARTIAL_CRC]);
        bytes[PARTIAL_CRC..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes a value. Checks its length, checksum and version, the limits of each field, and that
    /// reserved bytes are 0. [`has_supported_blocks`](Self::has_supported_blocks) is a separate
    /// check, because another block size is not damage.
    pub fn decode(value: &[u8]) -> Result<PartialMark, MarkError> {
        let bad = || MarkError::new("bcow.sketch", value);
        let bytes: &[u8; PARTIAL_MARK_BYTES] = value.try_into().map_err(|_| bad())?;
        let mut crc = [0; 4];
        crc.copy_from_slice(&bytes[PARTIAL_CRC..]);
        let intact = crc32c_matches(u32::from_le_bytes(crc), crc32c(&bytes[..PARTIAL_CRC]));
        if intact && bytes[0] == PARTIAL_VERSION && bytes[1] == PACKED {
            return Err(MarkError::PackedPartial);
        }
        let mark = PartialMark {
            id: u64_at(bytes, 8),
            block_shift: bytes[2],
            map_exists: bytes[3] & MAP_EXISTS != 0,
            lower_limit: u64_at(bytes, 16),
        };
        let mut reserved = PARTIAL_RESERVED.into_iter().flatten();
        let within_limits = bytes[0] == PARTIAL_VERSION
            && bytes[1] == SPARSE
            && bytes[3] & !MAP_EXISTS == 0
            && reserved.all(|at| bytes[at] == 0)
            && (9..=30).contains(&mark.block_shift)
            && i64::try_from(mark.lower_limit).is_ok();
        if intact && within_limits { Ok(mark) } else { Err(bad()) }
    }

    /// Whether this version of bcow reads blocks of this size.
    pub fn has_supported_blocks(&self) -> bool {
        self.block_shift == SUPPORTED_BLOCK_SHIFT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn redirects_round_trip_and_invalid_names_are_refused() {
        for text in ["/a", "/a/b c/\u{fc}", "name"] {
            let redirect = Redirect::decode(text.as_bytes()).unwrap();
            assert_eq!(redirect.encode(), text.as_bytes());
        }
        let long = [b"/", &[b'x'; 256][..]].concat();
        let bad: [&[u8]; 12] = [
            b"", b"/", b"//a", b"/a/", b"/a//b", b"/../a", b"/a/.", b"..", b".", b"a/b", b"a\0b",
            &long,
        ];
        for text in bad {
            assert!(Redirect::decode(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn origins_have_the_form_of_overlayfs() {
        let origin = Origin {
            uuid: *b"0123456789abcdef",
            nid: 0x0102,
        };
        let bytes = origin.encode();
        assert_eq!(bytes[..5], [0, 0xfb, 29, 0, 0xbc]);
        assert_eq!(bytes[21..], [2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Origin::decode(&bytes), Ok(Some(origin)));
        // The origin that overlayfs writes for an inode of ext4: handle type 1, eight bytes.
        let mut of_overlayfs = bytes;
        of_overlayfs[4] = 1;
        assert_eq!(Origin::decode(&of_overlayfs), Ok(None));
        assert_eq!(Origin::decode(b""), Ok(None));
        assert!(Origin::decode(&bytes[..28]).is_err());
        assert!(Origin::decode(&[bytes.to_vec(), vec![0]].concat()).is_err());
        let mut short = bytes[..25].to_vec();
        short[2] = 25;
        assert!(Origin::decode(&short).is_err());
    }

    #[test]
    fn metadata_copies_and_partials_are_distinct() {
        for form in [Metacopy::Whole, Metacopy::Partial] {
            assert_eq!(Metacopy::decode(form.encode().unwrap()), Ok(form));
        }
        assert_eq!(Metacopy::None.encode(), None);
        assert_eq!(Metacopy::Partial.encode(), Some(&[0xbc][..]));
        assert_eq!(Metacopy::decode(&[0, 4, 0, 0]), Ok(Metacopy::Whole));
        for bad in [&[1, 4, 0, 0][..], &[0], &[0, 5, 0, 0], &[0xbc, 4, 0, 1]] {
            assert!(Metacopy::decode(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn redirect_of_a_partial_is_ignored() {
        let mut marks = Marks::default();
        marks.apply(Mark::Redirect, b"/.bcow/sketch").unwrap();
        assert_eq!(marks, Marks::default());
    }

    #[test]
    fn link_counts_have_the_form_of_overlayfs() {
        for (text, delta) in [
            ("U+2", NlinkDelta::Upper(2)),
            ("U-1", NlinkDelta::Upper(-1)),
            ("L+0", NlinkDelta::Lower(0)),
        ] {
            assert_eq!(delta.encode(), text);
            assert_eq!(NlinkDelta::decode(text.as_bytes()), Ok(delta));
        }
        for bad in ["", "U", "U2", "X+1", "U+", "U+99999999999", "\u{fc}+1"] {
            assert!(NlinkDelta::decode(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    fn partial() -> PartialMark {
        PartialMark {
            id: 0x1122_3344_5566_7788,
            block_shift: 12,
            map_exists: true,
            lower_limit: 1 << 40,
        }
    }

    #[test]
    fn partial_mark_round_trips_and_each_flipped_bit_is_refused() {
        let bytes = partial().encode();
        assert_eq!(bytes[..4], [1, 1, 12, 1]);
        assert_eq!(PartialMark::decode(&bytes), Ok(partial()));
        for bit in 0..PARTIAL_MARK_BYTES * 8 {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(PartialMark::decode(&bytes).is_err(), "bit {bit}");
        }
        assert!(PartialMark::decode(&bytes[..39]).is_err());
    }

    #[test]
    fn reserved_bytes_of_a_partial_must_be_zero() {
        for at in [4, 7, 24, 32, 35] {
            let bytes = with_byte(at, 1);
            assert!(PartialMark::decode(&bytes).is_err(), "byte {at}");
        }
    }

    /// A mark with another byte, and a checksum that matches.
    fn with_byte(at: usize, value: u8) -> [u8; PARTIAL_MARK_BYTES] {
        let mut bytes = partial().encode();
        bytes[at] = value;
        let crc = crc32c(&bytes[..PARTIAL_CRC]);
        bytes[PARTIAL_CRC..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    #[test]
    fn packed_partial_of_an_earlier_version_is_refused_by_its_name() {
        let decoded = PartialMark::decode(&with_byte(1, 2));
        assert_eq!(decoded, Err(MarkError::PackedPartial));
        for kind in [0, 3] {
            let error = PartialMark::decode(&with_byte(1, kind)).unwrap_err();
            assert!(matches!(error, MarkError::Damaged { .. }), "kind {kind}");
        }
    }

    #[test]
    fn fields_out_of_their_limits_are_refused() {
        let changes: [fn(&mut PartialMark); 3] = [
            |mark| mark.block_shift = 8,
            |mark| mark.block_shift = 31,
            |mark| mark.lower_limit = 1 << 63,
        ];
        for (index, change) in changes.into_iter().enumerate() {
            let mut mark = partial();
            change(&mut mark);
            assert!(
                PartialMark::decode(&mark.encode()).is_err(),
                "change {index}"
            );
        }
    }

    #[test]
    fn errors_show_a_value_that_can_be_printed() {
        let error = MarkError::new("overlay.redirect", &[0x1b; 100]).to_string();
        assert!(error.starts_with("its attribute overlay.redirect is damaged: \\x1b\\x1b"));
        assert!(error.ends_with("..."));
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut marks = Marks::default();
            for mark in Mark::ALL {
                let _ = marks.apply(mark, &bytes);
            }
            let _ = Override::decode(&bytes);
        }
    }
}
