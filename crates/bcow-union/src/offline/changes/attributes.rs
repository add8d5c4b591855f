//! Owners, modes, types and extended attributes.

use std::collections::BTreeMap;
use std::sync::Arc;

use bcow_erofs::reader::Inode;
use bcow_erofs::tree::{Attributes, DeviceNumber, Timestamp, Xattrs};
use rustix::fs::Stat;

use super::{Kind, Reader};
use crate::offline::error::Problem;
use crate::upper::xattr::each_name;
use crate::upper::{ACCESS_ACL, Attribute, MarkError, Marks, OverrideKind, Ownership};

impl Reader<'_> {
    pub(super) fn kind(&self, stat: &Stat, marks: &Marks) -> Result<Kind, MarkError> {
        let kept = match (self.names.ownership, &marks.owner) {
            (Ownership::Override, Some(owner)) => owner.kind_over(stat)?,
            _ => None,
        };
        let number = |major, minor| DeviceNumber { major, minor };
        let host = DeviceNumber {
            major: rustix::fs::major(stat.st_rdev),
            minor: rustix::fs::minor(stat.st_rdev),
        };
        match kept {
            Some(OverrideKind::Directory) => return Ok(Kind::Directory),
            Some(OverrideKind::Symlink) => return Ok(Kind::Symlink),
            Some(OverrideKind::Pipe) => return Ok(Kind::Fifo),
            Some(OverrideKind::Socket) => return Ok(Kind::Socket),
            Some(OverrideKind::Block { major, minor }) => {
                return Ok(Kind::Block(number(major, minor)));
            }
            Some(OverrideKind::Char { major, minor }) => {
                return Ok(Kind::Char(number(major, minor)));
            }
            Some(OverrideKind::File) | None => {}
        }
        Ok(match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::Directory => Kind::Directory,
            rustix::fs::FileType::RegularFile => Kind::Regular,
            rustix::fs::FileType::Symlink => Kind::Symlink,
            rustix::fs::FileType::CharacterDevice => Kind::Char(host),
            rustix::fs::FileType::BlockDevice => Kind::Block(host),
            rustix::fs::FileType::Fifo => Kind::Fifo,
            _ => Kind::Socket,
        })
    }

    pub(super) fn attributes(
        &mut self,
        stat: &Stat,
        marks: &Marks,
        at: Attribute<'_>,
        kind: Kind,
    ) -> Result<Attributes, Problem> {
        let mut attributes = Attributes {
            permissions: (stat.st_mode & 0o7777) as u16,
            uid: stat.st_uid,
            gid: stat.st_gid,
            mtime: Timestamp {
                seconds: stat.st_mtime,
                nanoseconds: stat.st_mtime_nsec as u32,
            },
            xattrs: self.xattrs_above(at)?,
        };
        if let (Ownership::Override, Some(owner)) = (self.names.ownership, &marks.owner)
            && kind != Kind::Symlink
        {
            (attributes.uid, attributes.gid) = (owner.uid, owner.gid);
            attributes.permissions = owner.permissions;
        }
        Ok(attributes)
    }

    pub(super) fn xattrs_above(&mut self, at: Attribute<'_>) -> Result<Option<Xattrs>, Problem> {
        let mut all = BTreeMap::new();
        let list = at.list()?;
        for stored in each_name(&list) {
            let Some(name) = self.names.shown_name(stored) else {
                continue;
            };
            if !fits_an_image(&name) {
                *self.dropped_xattrs.entry(name.into_owned()).or_default() += 1;
                continue;
            }
            if let Some(value) = at.get(stored)? {
                all.insert(name.into_owned(), value);
            }
        }
        Ok(self.share(all))
    }

    /// The attributes of the root of an instance. The container's access ACL of the root is not the
    /// one of the host's directory.
    pub(super) fn with_acl_of_root(
        &mut self,
        shown: Option<Xattrs>,
        at: Attribute<'_>,
    ) -> Result<Option<Xattrs>, Problem> {
        let mut all = shown.map_or_else(BTreeMap::new, |shown| (*shown).clone());
        all.remove(ACCESS_ACL);
        if let Some(acl) = at.get(&self.names.stored_name_at_root(ACCESS_ACL))? {
            all.insert(ACCESS_ACL.to_vec(), acl);
        }
        Ok(self.share(all))
    }

    pub(super) fn lower_attributes(&mut self, inode: &Inode) -> Result<Attributes, Problem> {
        let mut all = BTreeMap::new();
        if inode.has_xattrs() {
            for (name, value) in self.lower.xattrs(inode)? {
                if fits_an_image(&name) {
                    all.insert(name, value);
                }
            }
        }
        Ok(Attributes {
            permissions: inode.permissions,
            uid: inode.uid,
            gid: inode.gid,
            mtime: inode.mtime,
            xattrs: self.share(all),
        })
    }

    pub(super) fn share(&mut self, all: BTreeMap<Vec<u8>, Vec<u8>>) -> Option<Xattrs> {
        if all.is_empty() {
            return None;
        }
        if let Some(xattrs) = self.xattrs.get(&all) {
            return Some(xattrs.clone());
        }
        let xattrs = Arc::new(all.clone());
        self.xattrs.insert(all, xattrs.clone());
        Some(xattrs)
    }
}

/// Whether an attribute can be in an image. Attributes of overlayfs and of bcow are excluded,
/// because they would act as marks there.
fn fits_an_image(name: &[u8]) -> bool {
    const KNOWN: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    const ACLS: [&[u8]; 2] = [ACCESS_ACL, b"system.posix_acl_default"];
    const MARKS: [&[u8]; 3] = [b"trusted.overlay.", b"user.overlay.", b"trusted.bcow."];
    let is_known = ACLS.contains(&name)
        || KNOWN
            .iter()
            .any(|prefix| name.len() > prefix.len() && name.starts_with(prefix));
    is_known && !MARKS.iter().any(|prefix| name.starts_with(prefix))
}
