//! Measures the content of an upper when it is opened.

use rustix::fs::{Dir, FileType};
use rustix::io::Errno;

use super::host;
use crate::account::Account;
use crate::host::{errno_of, stored_bytes};
use crate::upper::beneath::open_directory_beneath;
use crate::upper::{Instance, META, SNAPSHOTS, is_whiteout, parse_entry_name};

/// Counts the bytes and inodes that an upper stores, as `du` does, without its snapshots. The
/// inodes of an empty upper do not count, and no whiteout: whiteouts are links to shared inodes.
pub(super) fn count_stored(upper: &Instance, account: &Account) -> Result<(), Errno> {
    // By path: there may be more directories than descriptors.
    let mut todo = vec![Vec::new()];
    while let Some(path) = todo.pop() {
        let directory = open_directory_beneath(upper.root(), &path)?;
        let measure = |stat: &rustix::fs::Stat| {
            account
                .measure(stat.st_ino, || Ok(stored_bytes(stat)))
                .map_err(|error| errno_of(&error))
        };
        measure(&rustix::fs::fstat(&directory)?)?;
        let is_meta = path == META.as_bytes();
        let above = path.iter().rposition(|&byte| byte == b'/');
        if path.is_empty() || is_meta || above.is_some_and(|at| path[..at] == *META.as_bytes()) {
            account.exempt_inode();
        }
        let holds_maps =
            above.is_some_and(|at| path[..at] == *META.as_bytes() && path[at + 1..] == *b"maps");
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            let Some(stat) = host::stat_at(&directory, name)? else {
                continue;
            };
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                // The limits are those of the tree.
                if is_meta && name == SNAPSHOTS.as_bytes() {
                    continue;
                }
                todo.push(match path.as_slice() {
                    [] => name.to_vec(),
                    path => [path, b"/", name].concat(),
                });
            } else if holds_maps && let Some(id) = parse_entry_name(name) {
                account
                    .measure_map(id, || Ok(stored_bytes(&stat)))
                    .map_err(|error| errno_of(&error))?;
            } else if !is_whiteout(&stat) {
                measure(&stat)?;
                if is_meta {
                    account.exempt_inode();
                }
            }
        }
    }
    Ok(())
}
