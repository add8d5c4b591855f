//! Decides whether a request clears set-id bits, if fuser passes on no flag that says so.
//!
//! With FUSE_HANDLE_KILLPRIV_V2, the kernel leaves it to bcow to clear set-id bits when a file is
//! written or truncated, or gets another owner or group. In return, the kernel requests
//! `security.capability` once per file instead of before every write. (The kernel still removes
//! capabilities itself.)
//!
//! A flag in WRITE and in SETATTR says whether to clear the bits. fuser passes on the flag of
//! WRITE, but not that of SETATTR. This module derives the flag of SETATTR. The kernel sets it when
//! the owner or the group changes, and for a new size if the caller does not have CAP_FSETID.
//! FALLOCATE and COPY_FILE_RANGE have no such flag. They clear the bits if the caller does not have
//! CAP_FSETID.
//!
//! Before a write, fallocate, copy_file_range and similar calls of a caller without CAP_FSETID, the
//! kernel sends an empty SETATTR: one that changes no attribute. It sends an empty SETATTR in two
//! other cases too: for `chown(-1, -1)`, and after a write by root has removed a capability. bcow
//! cannot distinguish these cases by the request. An empty SETATTR therefore clears set-id bits
//! only if the caller does not have CAP_FSETID, and owns the file or may act as its owner. So a
//! caller that may not change a file cannot clear its set-id bits by `chown(-1, -1)`. If a caller
//! writes to a file of another owner, the WRITE, FALLOCATE or COPY_FILE_RANGE that follows the
//! empty SETATTR clears the bits.
//!
//! If the kernel writes to the file of the upper itself ([`super::sharing`]), no WRITE follows. An
//! empty SETATTR of another user then clears the bits if the mode lets others write to the file. (A
//! user that has only got a descriptor, of a file that others may not write to, does not clear
//! them.)
//!
//! The replies to WRITE, FALLOCATE and COPY_FILE_RANGE do not carry a mode. The kernel therefore
//! must not cache the mode of a file with set-id bits ([`validity`]); otherwise it would execute
//! the file with the cached bits.

use std::time::Duration;

use bcow_erofs::reader::FileType;
use bcow_union::NodeId;
use bcow_union::fs::{Attributes, Changes, UnionFs};
use fuser::{FileAttr, Request};
use rustix::io::Errno;

use super::{FOREVER, is_alias};
use crate::callers::Caller;
use crate::owners::Owners;

/// Number of the capability to act as the owner of every file (linux/capability.h).
const CAP_FOWNER: u32 = 3;
/// Number of the capability to keep set-id bits (linux/capability.h).
const CAP_FSETID: u32 = 4;

const SET_UID: u16 = 0o4000;
const SET_GID: u16 = 0o2000;
const GROUP_EXECUTES: u16 = 0o0010;
const OTHERS_WRITE: u16 = 0o0022;

/// How long the kernel may cache these attributes. Those of an alias have its number as the inode
/// number, so the kernel must ask again before a program sees them.
pub(super) fn validity(attributes: &FileAttr) -> Duration {
    let is_set_id = attributes.perm & (SET_UID | SET_GID) != 0;
    let has_mode = attributes.kind != fuser::FileType::Directory && is_set_id;
    if has_mode || is_alias(attributes.ino) { Duration::ZERO } else { FOREVER }
}

/// Adds permissions without set-id bits to `changes`, if a SETATTR with these changes must clear
/// the bits. Permissions that the caller sets stay.
pub(super) fn drop_set_id(
    fs: &UnionFs,
    owners: &Owners,
    request: &Request,
    node: NodeId,
    changes: &mut Changes,
) -> Result<(), Errno> {
    let given_away = changes.uid.is_some() || changes.gid.is_some();
    let resized = changes.size.is_some();
    let is_empty = *changes == Changes::default();
    if changes.permissions.is_some() || !(given_away || resized || is_empty) {
        return Ok(());
    }
    let Some(attributes) = set_id_attributes(fs, owners, node)? else {
        return Ok(());
    };
    let is_of_writer = owns(request, &attributes)
        || attributes.permissions & OTHERS_WRITE != 0 && fs.upper_backing(node).is_some();
    if is_empty && !is_of_writer || !given_away && may_keep_set_id(request) {
        return Ok(());
    }
    let is_member = is_in_group(request, attributes.gid);
    changes.permissions = Some(without_set_id(attributes.permissions, is_member));
    Ok(())
}

/// Clears the set-id bits of a file whose content the caller changes by FALLOCATE or
/// COPY_FILE_RANGE, unless the caller may keep them.
pub(super) fn drop_set_id_of_content(
    fs: &UnionFs,
    owners: &Owners,
    request: &Request,
    node: NodeId,
) -> Result<(), Errno> {
    let Some(attributes) = set_id_attributes(fs, owners, node)? else {
        return Ok(());
    };
    if may_keep_set_id(request) {
        return Ok(());
    }
    let is_member = is_in_group(request, attributes.gid);
    let kept = without_set_id(attributes.permissions, is_member);
    if kept == attributes.permissions {
        return Ok(());
    }
    let changes = Changes {
        permissions: Some(kept),
        ..Changes::default()
    };
    fs.with_room(|fs| fs.set_attributes(node, &changes))
        .map(drop)
}

/// The attributes of a file that has set-id bits, with the IDs of the host, as those of requests;
/// `None` for other files and for directories.
fn set_id_attributes(
    fs: &UnionFs,
    owners: &Owners,
    node: NodeId,
) -> Result<Option<Attributes>, Errno> {
    if !fs.may_be_privileged(node)? {
        return Ok(None);
    }
    let attributes = owners.shown(fs.attributes(node)?);
    let is_set_id = attributes.permissions & (SET_UID | SET_GID) != 0;
    Ok((attributes.kind != FileType::Directory && is_set_id).then_some(attributes))
}

/// Whether the caller owns the file, is root, or has CAP_FOWNER.
fn owns(request: &Request, attributes: &Attributes) -> bool {
    let user = request.uid();
    user == 0
        || user == attributes.uid
        || caller(request).is_some_and(|caller| caller.has(CAP_FOWNER))
}

/// Clears set-group-ID after a new ACL, unless the caller is in the file's group or has CAP_FSETID.
pub(super) fn drop_set_gid(
    fs: &UnionFs,
    owners: &Owners,
    request: &Request,
    node: NodeId,
) -> Result<(), Errno> {
    let attributes = owners.shown(fs.attributes(node)?);
    if attributes.permissions & SET_GID == 0 || is_in_group(request, attributes.gid) {
        return Ok(());
    }
    let changes = Changes {
        permissions: Some(attributes.permissions & !SET_GID),
        ..Changes::default()
    };
    fs.set_attributes(node, &changes).map(drop)
}

/// The permissions after the kernel's rule for clearing set-id bits. Set-group-ID without group
/// execute is not a privilege but an old mark for mandatory locking. It stays if the caller counts
/// as a member of the file's group before the change, as one that has CAP_FSETID does.
fn without_set_id(permissions: u16, is_member: bool) -> u16 {
    let kept = permissions & !SET_UID;
    if kept & GROUP_EXECUTES == 0 && is_member { kept } else { kept & !SET_GID }
}

/// Whether the caller is root and has CAP_FSETID in the initial user namespace. The kernel accepts
/// the capability in no other user namespace. `false` if this cannot be determined.
fn may_keep_set_id(request: &Request) -> bool {
    if request.uid() != 0 {
        // Only root is checked: the capability without uid 0 is rare, and clearing the bits is the
        // safe choice.
        return false;
    }
    caller(request).is_some_and(|caller| caller.has(CAP_FSETID))
}

/// Whether the caller is in the group or may keep set-id bits.
fn is_in_group(request: &Request, group: u32) -> bool {
    request.gid() == group
        || may_keep_set_id(request)
        || caller(request).is_some_and(|caller| caller.groups.contains(&group))
}

fn caller(request: &Request) -> Option<Caller> {
    Caller::of(request.pid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_id_bits_go_as_in_the_kernel() {
        for (before, same, another) in [
            (0o6777, 0o0777, 0o0777),
            (0o4600, 0o0600, 0o0600),
            (0o2644, 0o2644, 0o0644),
            (0o6644, 0o2644, 0o0644),
            (0o2654, 0o0654, 0o0654),
            (0o1777, 0o1777, 0o1777),
        ] {
            assert_eq!(without_set_id(before, true), same, "{before:o}");
            assert_eq!(without_set_id(before, false), another, "{before:o}");
        }
    }
}
