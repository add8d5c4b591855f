//! POSIX ACLs, in the form of system calls and in that of ext4.

/// Version of the form of system calls.
const CALL_VERSION: u32 = 2;
/// Version of ext4's form.
const DISK_VERSION: u32 = 1;

const USER_OBJECT: u16 = 0x1;
const USER: u16 = 0x2;
const GROUP_OBJECT: u16 = 0x4;
const GROUP: u16 = 0x8;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// Converts an ACL, or returns `None` for one that the kernel would refuse: entries must be in
/// order, complete, and without repetition.
pub(crate) fn to_disk(value: &[u8]) -> Option<Vec<u8>> {
    let (version, entries) = value.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*version) != CALL_VERSION || entries.len() % 8 != 0 {
        return None;
    }
    let mut disk = DISK_VERSION.to_le_bytes().to_vec();
    let mut seen = 0;
    let mut last = None;
    for entry in entries.chunks_exact(8) {
        let half = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
        let (tag, permissions) = (half(0), half(2));
        let id = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        let is_named = matches!(tag, USER | GROUP);
        let is_known = is_named || matches!(tag, USER_OBJECT | GROUP_OBJECT | MASK | OTHER);
        if !is_known || permissions > 7 || (is_named && id == u32::MAX) {
            return None;
        }
        let place = (tag, if is_named { id } else { 0 });
        if last.is_some_and(|last| last >= place) {
            return None;
        }
        last = Some(place);
        seen |= tag;
        disk.extend_from_slice(&entry[..4]);
        if is_named {
            disk.extend_from_slice(&id.to_le_bytes());
        }
    }
    let needed = USER_OBJECT | GROUP_OBJECT | OTHER;
    let has_named = seen & (USER | GROUP) != 0;
    (seen & needed == needed && (!has_named || seen & MASK != 0)).then_some(disk)
}

/// Converts an ACL of ext4. `None` if it is damaged.
pub(crate) fn from_disk(value: &[u8]) -> Option<Vec<u8>> {
    let (version, mut rest) = value.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*version) != DISK_VERSION {
        return None;
    }
    let mut call = CALL_VERSION.to_le_bytes().to_vec();
    while !rest.is_empty() {
        let (head, behind) = rest.split_first_chunk::<4>()?;
        let tag = u16::from_le_bytes([head[0], head[1]]);
        let (id, behind) = match tag {
            USER | GROUP => behind.split_first_chunk::<4>()?,
            USER_OBJECT | GROUP_OBJECT | MASK | OTHER => (&[0xff; 4], behind),
            _ => return None,
        };
        call.extend_from_slice(head);
        call.extend_from_slice(id);
        rest = behind;
    }
    Some(call)
}

#[cfg(test)]
mod tests {
    use super::{from_disk, to_disk};

    fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut value = 2u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            value.extend(tag.to_le_bytes());
            value.extend(permissions.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        value
    }

    const NONE: u32 = u32::MAX;

    #[test]
    fn only_named_entries_have_an_id_on_disk() {
        let value = acl(&[
            (1, 7, NONE),
            (2, 6, 1000),
            (4, 5, NONE),
            (0x10, 7, NONE),
            (0x20, 4, NONE),
        ]);
        let expected = [
            1, 0, 0, 0, 1, 0, 7, 0, 2, 0, 6, 0, 0xe8, 3, 0, 0, 4, 0, 5, 0, 0x10, 0, 7, 0, 0x20, 0,
            4, 0,
        ];
        assert_eq!(to_disk(&value).as_deref(), Some(&expected[..]));
        assert_eq!(from_disk(&expected), Some(value));
        for length in 1..expected.len() {
            // An entry is missing, or a part of one.
            assert_ne!(from_disk(&expected[..length]), from_disk(&expected));
        }
    }

    #[test]
    fn incomplete_and_unordered_lists_are_refused() {
        for entries in [
            &[(1, 7, NONE), (4, 5, NONE)][..],
            &[(1, 7, NONE), (2, 6, 1000), (4, 5, NONE), (0x20, 4, NONE)],
            &[(4, 5, NONE), (1, 7, NONE), (0x20, 4, NONE)],
            &[(1, 8, NONE), (4, 5, NONE), (0x20, 4, NONE)],
            &[(1, 7, NONE), (3, 7, NONE), (4, 5, NONE), (0x20, 4, NONE)],
        ] {
            assert_eq!(to_disk(&acl(entries)), None, "{entries:?}");
        }
        assert_eq!(to_disk(b""), None);
        assert_eq!(to_disk(&[1, 0, 0, 0]), None);
    }
}
