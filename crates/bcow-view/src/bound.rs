//! The bound of the cache of views.
//!
//! Views can be made again, so the least recently used ones are removed. A process that has a
//! removed view open can still read it.

use std::fs::{File, FileTimes};
use std::time::{Duration, SystemTime};

use rustix::fs::AtFlags;

use crate::entries;

/// The time of the last use is no more precise than this, so that most uses write nothing.
const PRECISION: Duration = Duration::from_secs(3600);

/// Records the use of a view: its modification time is that of the last use. The time stays if root
/// made the view in the directory of another user, and a process of that user uses it.
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

/// Removes the least recently used views, except `kept`, until the rest take at most `limit_bytes`
/// on the disk. Errors are ignored: views that stay take space only.
///
/// A view that is larger than the limit does not count, because it would evict all others. Of such
/// views, only `kept` or the most recently used one stays.
pub(crate) fn evict(directory: &File, kept: &str, limit_bytes: u64) {
    let mut views = entries::views(directory).unwrap_or_default();
    views.sort_by_cached_key(|(name, found)| (name == kept, found.st_mtime, name.clone()));
    let (mut large, others): (Vec<_>, Vec<_>) = views
        .into_iter()
        .map(|(name, found)| (name, entries::held_bytes(&found)))
        .partition(|(_, bytes)| *bytes > limit_bytes);
    let remove = |name: &str| rustix::fs::unlinkat(directory, name, AtFlags::empty()).is_ok();
    large.pop();
    for (name, _) in large {
        remove(&name);
    }
    let mut held: u64 = others.iter().map(|(_, bytes)| bytes).sum();
    for (name, bytes) in others {
        if held <= limit_bytes || name == kept {
            break;
        }
        if remove(&name) {
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
        make_of(directory, name, age_days, 8192)
    }

    fn make_of(directory: &Path, name: &str, age_days: u64, bytes: usize) -> u64 {
        let path = directory.join(name);
        std::fs::write(&path, vec![7; bytes]).unwrap();
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
    fn a_view_larger_than_the_limit_evicts_only_other_large_ones() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let small: u64 = (0..3).map(|n| make(at, &name(n), 10)).sum();
        for large in [7, 8, 9] {
            make_of(at, &name(large), 10 - u64::from(large), 1 << 20);
        }
        let left = || -> Vec<u32> { (0..10).filter(|&n| at.join(name(n)).exists()).collect() };
        let open = File::open(at).unwrap();
        evict(&open, &name(8), small);
        assert_eq!(left(), [0, 1, 2, 8]);
        // The next view is small: the large one stays, and does not count.
        make(at, &name(3), 0);
        evict(&open, &name(3), small);
        assert_eq!(left(), [1, 2, 3, 8]);
    }

    #[test]
    fn a_use_within_an_hour_of_the_last_one_writes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        make(directory.path(), "view", 0);
        let file = File::open(directory.path().join("view")).unwrap();
        let before = file.metadata().unwrap().modified().unwrap();
        record_use(&file);
        assert_eq!(file.metadata().unwrap().modified().unwrap(), before);
    }
}
