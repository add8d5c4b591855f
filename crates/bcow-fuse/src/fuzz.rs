//! What programs in a mount and the kernel send, for a fuzzer, as far as this crate reads its bytes
//! itself: values of attributes with IDs, names and numbers of hidden files, lines of the kernel's
//! lists.

use bcow_mount::HiddenName;
use bcow_union::unescape;

use crate::mountinfo;
use crate::owners::{IdMap, Owners};
use crate::shared::slots::SharedFile;

const ATTRIBUTES: [&[u8]; 3] = [
    b"system.posix_acl_access",
    b"system.posix_acl_default",
    b"security.capability",
];

/// Reads `bytes` as what the first of them says. Errors are expected; only a panic, or a property
/// that does not hold, is a finding.
pub fn fuzz_arguments(bytes: &[u8]) {
    let Some((&what, bytes)) = bytes.split_first() else {
        return;
    };
    match what % 3 {
        0 => map_ids(bytes),
        1 => read_names(bytes),
        _ => read_mounts(bytes),
    }
}

/// A line with ranges of IDs, and the value of an attribute.
fn map_ids(bytes: &[u8]) {
    let end = bytes.iter().position(|&byte| byte == b'\n').unwrap_or(0);
    let (ranges, value) = bytes.split_at(end);
    let value = value.get(1..).unwrap_or_default();
    let mut ids = IdMap::default();
    for range in String::from_utf8_lossy(ranges).split(',') {
        if ids.add(range).is_ok() {
            // As another mount gets it.
            let mut again = IdMap::default();
            let text = ids.to_string();
            assert!(text.split(',').all(|range| again.add(range).is_ok()));
            assert_eq!(again, ids);
        }
    }
    let owners = Owners {
        users: ids,
        groups: IdMap::default(),
    };
    for name in ATTRIBUTES {
        let shown = owners.shown_xattr(name, value.to_vec());
        assert!(shown.len().abs_diff(value.len()) <= 4);
        let Ok(stored) = owners.stored_xattr(name, value) else {
            continue;
        };
        // What a program has set, it reads again.
        let stored = stored.unwrap_or_else(|| value.to_vec());
        let again = owners.shown_xattr(name, stored);
        let is_capability = name == b"security.capability";
        if is_capability && value.len() != again.len() {
            // Without the root user 0, which is the same.
            let (short, long) = (value.len().min(again.len()), value.len().max(again.len()));
            assert_eq!((short, long), (20, 24));
            assert_eq!(value[4..20], again[4..20]);
            assert!(
                [value, &again]
                    .iter()
                    .all(|one| one[20..].iter().all(|&byte| byte == 0))
            );
        } else {
            assert_eq!(again, value);
        }
    }
}

/// The name of a hidden file, and the number of a node.
fn read_names(bytes: &[u8]) {
    if let Some(number) = bytes.first_chunk() {
        let number = u64::from_le_bytes(*number);
        if let Some(file) = SharedFile::of_number(number) {
            assert_eq!(file.number(), number);
            assert_eq!(SharedFile::parse(&file.name()), Some(file));
        }
    }
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Some(file) = SharedFile::parse(text) {
        assert_eq!(file.name(), text);
        assert_eq!(SharedFile::of_number(file.number()), Some(file));
    }
    if let Some(name) = HiddenName::parse(text) {
        assert_eq!(HiddenName::parse(&format!("/{name}")), Some(name));
    }
}

/// A list of mounts.
fn read_mounts(bytes: &[u8]) {
    assert!(unescape(bytes).len() <= bytes.len());
    for line in bytes.split(|&byte| byte == b'\n') {
        if let Some(entry) = mountinfo::parse(line) {
            let _ = entry.driver();
        }
    }
}
