//! POSIX ACLs in the binary form of extended attributes (`linux/posix_acl_xattr.h`): a version,
//! then entries of tag, permissions and id, all little-endian.

use rustix::io::Errno;

const VERSION: u32 = 2;
const HEAD_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;

const USER_OBJ: u16 = 0x01;
const GROUP_OBJ: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// What a new inode inherits from its directory's default ACL: its mode, and an access ACL if the
/// mode does not express the whole ACL.
///
/// As `posix_acl_create` in the kernel: the entries of owner, mask (or group) and others are
/// limited to the requested mode. `EIO` for a malformed ACL, here and in the functions below.
pub(super) fn inherited(default: &[u8], permissions: u16) -> Result<(Option<Vec<u8>>, u16), Errno> {
    let (acl, mode, is_more_than_a_mode) =
        changed(default, permissions, |allowed, bits| allowed & bits)?;
    Ok((is_more_than_a_mode.then_some(acl), mode))
}

/// The permission bits that correspond to an access ACL.
pub(super) fn mode_of(acl: &[u8]) -> Result<u16, Errno> {
    let everything = inherited(acl, 0o777)?;
    Ok(everything.1)
}

/// An access ACL, updated for a new mode.
pub(super) fn with_mode(acl: &[u8], permissions: u16) -> Result<Vec<u8>, Errno> {
    let (acl, ..) = changed(acl, permissions, |_, bits| bits)?;
    Ok(acl)
}

/// An ACL whose entries of owner, mask (or group) and others get new bits, which `change` takes
/// from the old ones and from those of a mode. Gives also the mode with the new bits, and whether
/// the ACL says more than the mode.
fn changed(
    acl: &[u8],
    permissions: u16,
    change: fn(u16, u16) -> u16,
) -> Result<(Vec<u8>, u16, bool), Errno> {
    let tags: Vec<u16> = checked(acl)?.chunks_exact(ENTRY_BYTES).map(tag).collect();
    let has_mask = tags.contains(&MASK);
    let mut is_more_than_a_mode = has_mask;
    let mut mode = permissions & !0o777;
    let mut acl = acl.to_vec();
    for (index, &tag) in tags.iter().enumerate() {
        let at = HEAD_BYTES + index * ENTRY_BYTES + 2;
        let Some(shift) = shift_of(tag, has_mask) else {
            is_more_than_a_mode |= tag != GROUP_OBJ;
            continue;
        };
        let before = u16::from_le_bytes([acl[at], acl[at + 1]]);
        let bits = change(before, (permissions >> shift) & 0o7);
        acl[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        mode |= bits << shift;
    }
    Ok((acl, mode, is_more_than_a_mode))
}

fn checked(acl: &[u8]) -> Result<&[u8], Errno> {
    match acl.split_at_checked(HEAD_BYTES) {
        Some((head, entries))
            if head == VERSION.to_le_bytes() && entries.len().is_multiple_of(ENTRY_BYTES) =>
        {
            Ok(entries)
        }
        _ => Err(Errno::IO),
    }
}

/// The position in the mode of an entry's bits; `None` for entries that the mode does not contain.
fn shift_of(tag: u16, has_mask: bool) -> Option<u32> {
    match tag {
        USER_OBJ => Some(6),
        MASK => Some(3),
        GROUP_OBJ if !has_mask => Some(3),
        OTHER => Some(0),
        _ => None,
    }
}

fn tag(entry: &[u8]) -> u16 {
    u16::from_le_bytes([entry[0], entry[1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: u16 = 0x02;

    fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(permissions.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn mode_is_masked_by_the_default_acl() {
        let default = acl(&[(USER_OBJ, 7, !0), (GROUP_OBJ, 5, !0), (OTHER, 0, !0)]);
        assert_eq!(inherited(&default, 0o666), Ok((None, 0o640)));
    }

    #[test]
    fn mask_takes_the_place_of_the_group() {
        let default = acl(&[
            (USER_OBJ, 7, !0),
            (USER, 7, 1000),
            (GROUP_OBJ, 5, !0),
            (MASK, 7, !0),
            (OTHER, 5, !0),
        ]);
        let (access, mode) = inherited(&default, 0o640).unwrap();
        assert_eq!(mode, 0o640);
        let expected = acl(&[
            (USER_OBJ, 6, !0),
            (USER, 7, 1000),
            (GROUP_OBJ, 5, !0),
            (MASK, 4, !0),
            (OTHER, 0, !0),
        ]);
        assert_eq!(access, Some(expected.clone()));
        assert_eq!(mode_of(&expected), Ok(0o640));
        let changed = with_mode(&expected, 0o751).unwrap();
        assert_eq!(mode_of(&changed), Ok(0o751));
    }

    #[test]
    fn nonsense_is_an_error() {
        for bytes in [&b""[..], b"\x02\0\0", b"\x01\0\0\0", b"\x02\0\0\0x"] {
            assert_eq!(inherited(bytes, 0o777), Err(Errno::IO));
        }
    }
}
