//! Extended attributes.

use std::ops::ControlFlow;

use zerocopy::FromBytes;

use super::{ErofsError, Filesystem, Inode, XattrProblem};
use crate::format::{XATTR_LONG_PREFIX, XATTR_PREFIXES, XattrEntry, XattrHeader, split_xattr_name};

const ENTRY: usize = size_of::<XattrEntry>();

/// Full names and values.
pub type XattrList = Vec<(Vec<u8>, Vec<u8>)>;

/// A stored attribute: the prefix index, the name behind the prefix, and the location of the value.
struct Stored<'b> {
    index: u8,
    rest: &'b [u8],
    value: Value<'b>,
}

enum Value<'b> {
    Inline(&'b [u8]),
    /// On the device.
    Shared {
        offset: u64,
        bytes: u16,
    },
}

impl Filesystem {
    /// All extended attributes by full name (`user.x`), in the order of the file system: at most
    /// 255 shared ones of 64 KiB, and 256 KiB of inline ones. Attributes with an unknown prefix are
    /// left out, as in the kernel.
    pub fn xattrs(&self, inode: &Inode) -> Result<XattrList, ErofsError> {
        let mut all = Vec::new();
        self.each_xattr(inode, &mut |stored| {
            let prefix = XATTR_PREFIXES
                .iter()
                .find(|&&(index, _)| index == stored.index);
            if let Some((_, prefix)) = prefix {
                all.push(([prefix, stored.rest].concat(), self.value(&stored.value)?));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(all)
    }

    /// One extended attribute by full name.
    pub fn xattr(&self, inode: &Inode, name: &[u8]) -> Result<Option<Vec<u8>>, ErofsError> {
        let Some((index, rest)) = split_xattr_name(name).filter(|_| inode.has_xattrs()) else {
            return Ok(None);
        };
        let mut found = None;
        self.each_xattr(inode, &mut |stored| {
            if stored.index != index || stored.rest != rest {
                return Ok(ControlFlow::Continue(()));
            }
            found = Some(self.value(&stored.value)?);
            Ok(ControlFlow::Break(()))
        })?;
        Ok(found)
    }

    /// Checks that all attributes are in range, without reading the shared values.
    pub(crate) fn check_xattrs(&self, inode: &Inode) -> Result<(), ErofsError> {
        self.each_xattr(inode, &mut |_| Ok(ControlFlow::Continue(())))
    }

    fn value(&self, value: &Value<'_>) -> Result<Vec<u8>, ErofsError> {
        match *value {
            Value::Inline(bytes) => Ok(bytes.to_vec()),
            Value::Shared { offset, bytes } => {
                let mut value = vec![0; bytes.into()];
                self.device_read(offset, &mut value)?;
                Ok(value)
            }
        }
    }

    /// Calls `each` for every attribute, inline ones first as in the kernel, until it breaks.
    fn each_xattr(
        &self,
        inode: &Inode,
        each: &mut dyn FnMut(Stored<'_>) -> Result<ControlFlow<()>, ErofsError>,
    ) -> Result<(), ErofsError> {
        if !inode.has_xattrs() {
            return Ok(());
        }
        let damaged = |problem| ErofsError::Xattr {
            nid: inode.nid,
            problem,
        };
        // `inode()` has checked that the area has at most 256 KiB and lies on the device.
        let mut bytes = vec![0; inode.xattr_bytes as usize];
        self.device_read(inode.xattr_offset, &mut bytes)?;
        let Ok((header, behind)) = XattrHeader::ref_from_prefix(&bytes) else {
            return Ok(());
        };
        let Some((ids, mut entries)) =
            behind.split_at_checked(4 * usize::from(header.shared_count))
        else {
            return Err(damaged(XattrProblem::SharedCount(header.shared_count)));
        };
        while !entries.is_empty() {
            let at = bytes.len() - entries.len();
            let passes_end = || damaged(XattrProblem::EntryRange(at));
            let (entry, behind) = XattrEntry::ref_from_prefix(entries).map_err(|_| passes_end())?;
            let name_bytes = usize::from(entry.name_bytes);
            let value_bytes = usize::from(entry.value_bytes.get());
            let padded = (ENTRY + name_bytes + value_bytes).next_multiple_of(4);
            if padded > entries.len() {
                return Err(passes_end());
            }
            self.refuse_long_prefix(inode, entry)?;
            let (rest, behind) = behind.split_at(name_bytes);
            let stored = Stored {
                index: entry.name_index,
                rest,
                value: Value::Inline(&behind[..value_bytes]),
            };
            if each(stored)?.is_break() {
                return Ok(());
            }
            entries = &entries[padded..];
        }
        for id in ids.chunks_exact(4) {
            let id = u32::from_le_bytes([id[0], id[1], id[2], id[3]]);
            if self.shared_xattr(inode, id, each)?.is_break() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn shared_xattr(
        &self,
        inode: &Inode,
        id: u32,
        each: &mut dyn FnMut(Stored<'_>) -> Result<ControlFlow<()>, ErofsError>,
    ) -> Result<ControlFlow<()>, ErofsError> {
        let out_of_range = || ErofsError::Xattr {
            nid: inode.nid,
            problem: XattrProblem::SharedRange(id),
        };
        // Both are below 2^44, so the sum does not overflow.
        let offset = self.superblock.xattr_offset + 4 * u64::from(id);
        if !self.on_device(offset, ENTRY as u64) {
            return Err(out_of_range());
        }
        // One read for the header and the longest name; the value is read only if needed.
        let mut buf = [0; ENTRY + u8::MAX as usize];
        let available = (self.device_bytes - offset).min(buf.len() as u64) as usize;
        self.device_read(offset, &mut buf[..available])?;
        let Ok((entry, behind)) = XattrEntry::ref_from_prefix(&buf) else {
            return Err(out_of_range());
        };
        let name_bytes = usize::from(entry.name_bytes);
        let value_offset = offset + (ENTRY + name_bytes) as u64;
        if !self.on_device(value_offset, entry.value_bytes.get().into()) {
            return Err(out_of_range());
        }
        self.refuse_long_prefix(inode, entry)?;
        each(Stored {
            index: entry.name_index,
            rest: &behind[..name_bytes],
            value: Value::Shared {
                offset: value_offset,
                bytes: entry.value_bytes.get(),
            },
        })
    }

    fn refuse_long_prefix(&self, inode: &Inode, entry: &XattrEntry) -> Result<(), ErofsError> {
        if entry.name_index & XATTR_LONG_PREFIX == 0 {
            return Ok(());
        }
        Err(ErofsError::UnsupportedInode {
            nid: inode.nid,
            feature: "an extended attribute with a long name prefix",
        })
    }
}
