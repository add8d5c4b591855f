//! The bound of the cache of views.
//!
//! Views can be made again, so the ones that were not used for the longest time go first. A process
//! that has one open keeps its content.

use std::fs::{File, FileTimes};
use std::time::{Duration, SystemTime};

use rustix::fs::AtFlags;

use crate::entries;

/// The time of the last use is no more precise than this, so that most uses write nothing.
const PRECISION: Duration = Duration::from_secs(3600);

/// Records the use of a view: its modification time is that of the last use. Only the owner can; a
/// view of root in the directory of another user keeps its time.
pub(crate) fn record_use(view: &File) {
    let modified = view.metadata().and_then(|metadata| metadata.modified());
    let now = SystemTime::now();
    let is_recent = |modified: SystemTime| {
        let age = now.duration_since(modified);
        age.is_ok_and(|age| age < PRECISION)
    };
    if !modified.is_ok_and(is_recent) {
        let _ = view.set_times(FileTimes::new().set_modified(now));
    }
}

/// Removes the least recently used views, except `kept`, until all take at most `most_bytes` on the
/// disk. A view that cannot be removed does no harm.
pub(crate) fn evict(directory: &File, kept: &str, most_bytes: u64) {
    let mut views: Vec<_> = entries::views(directory)
        .unwrap_or_default()
        .into_iter()
        .map(|(name, found)| (found.st_mtime, entries::held_bytes(&found), name))
        .collect();
    views.sort_unstable();
    let mut held: u64 = views.iter().map(|(_, bytes, _)| bytes).sum();
    for (_, bytes, name) in views {
        if held <= most_bytes {
            break;
        }
        let is_removed =
            name != kept && rustix::fs::unlinkat(directory, &name, AtFlags::empty()).is_ok();
        if is_removed {
            held -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use super::*;

    fn name(number: u32) -> String {
        format!("{number:064x}-{}-1.bcow", 1 << 30)
    }

    fn make(directory: &Path, name: &str, age_days: u64) -> u64 {
        let path = directory.join(name);
        std::fs::write(&path, [7; 8192]).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let age = Duration::from_secs(age_days * 24 * 3600);
        file.set_times(FileTimes::new().set_modified(SystemTime::now() - age))
            .unwrap();
        file.sync_all().unwrap();
        file.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn views_that_were_used_last_stay() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let bytes: Vec<u64> = (0..5)
            .map(|n| make(at, &name(n), 10 - u64::from(n)))
            .collect();
        for other in ["notes.bcow", "0-0-0.bcow", "x"] {
            make(at, other, 100);
        }
        // A use counts, and so does the view that was just made.
        record_use(&File::open(at.join(name(1))).unwrap());
        let open = File::open(at).unwrap();
        evict(&open, &name(0), bytes[0] + bytes[1] + bytes[4]);
        let mut left: Vec<u32> = (0..5).filter(|&n| at.join(name(n)).exists()).collect();
        assert_eq!(left, [0, 1, 4]);
        assert_eq!(std::fs::read_dir(at).unwrap().count(), 6);
        evict(&open, &name(4), 0);
        left.retain(|&n| at.join(name(n)).exists());
        assert_eq!(left, [4]);
    }

    #[test]
    fn a_use_of_today_writes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        make(directory.path(), "view", 0);
        let file = File::open(directory.path().join("view")).unwrap();
        let before = file.metadata().unwrap().modified().unwrap();
        record_use(&file);
        assert_eq!(file.metadata().unwrap().modified().unwrap(), before);
    }
}
