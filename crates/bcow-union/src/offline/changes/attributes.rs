//! Owners, modes, types and extended attributes.

use std::collections::BTreeMap;

use bcow_erofs::tree::{Attributes, DeviceNumber, Xattrs};
use rustix::fs::Stat;

use super::{Kind, Reader};
use crate::offline::error::Problem;
use crate::upper::xattr::each_name;
use crate::upper::{ACCESS_ACL, Attribute, MarkError, Marks, OverrideKind, Ownership, modified};

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
            mtime: marks
                .times
                .filter(|times| times.applies_to(modified(stat)))
                .map_or(modified(stat), |times| times.mtime),
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
            if !self.builder.keeps_xattr(&name) {
                continue;
            }
            if let Some(value) = at.get(stored)? {
                all.insert(name.into_owned(), value);
            }
        }
        Ok(self.builder.share(all))
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
        Ok(self.builder.share(all))
    }
}
