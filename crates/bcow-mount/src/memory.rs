//! Memory of a process that serves a mount, and through which the kernel may write dirty pages
//! back.
//!
//! When a process of the second kind allocates memory, the kernel may wait for the writeback of
//! pages, which only this process can do. Two rules of the kernel prevent the deadlock: a process
//! that has declared itself (PR_SET_IO_FLUSHER) never waits, and only the reclaim of a limited
//! group of version 1 of the memory controller waits at all.

use std::path::{Path, PathBuf};

/// Declares that the kernel writes dirty pages back through this thread and the threads that it
/// starts later. That needs `CAP_SYS_RESOURCE`. Without it, the kernel can deadlock with this
/// process if its memory group has a limit: the result is that limit, in bytes.
pub fn serve_writeback() -> Option<u64> {
    if rustix::process::configure_io_flusher_behavior(true).is_ok() {
        return None;
    }
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let group = legacy_group(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
    let limit = group.and_then(|group| {
        hierarchical_limit(&std::fs::read_to_string(group.join("memory.stat")).ok()?)
    });
    // Without a limit, the kernel shows a number that no machine has.
    let machine = rustix::system::sysinfo();
    let machine_bytes = u64::from(machine.mem_unit) * machine.totalram as u64;
    limit.filter(|&limit| limit < machine_bytes)
}

/// Memory of which a thread needs the pages only at times.
#[derive(Debug, Clone, Copy)]
pub struct Pages {
    start: usize,
    bytes: usize,
}

impl Pages {
    /// The pages of `bytes` bytes from `start`.
    pub fn of<T>(start: &T, bytes: usize) -> Self {
        let start = std::ptr::from_ref(start).addr();
        let page = start & !(rustix::param::page_size() - 1);
        Pages {
            start: page,
            bytes: start - page + bytes,
        }
    }

    /// The same without the first ones, which have `bytes` bytes or more.
    pub fn after(self, bytes: usize) -> Self {
        let bytes = bytes
            .next_multiple_of(rustix::param::page_size())
            .min(self.bytes);
        Pages {
            start: self.start + bytes,
            bytes: self.bytes - bytes,
        }
    }

    /// Makes the pages present, so that the kernel can write to them without a page fault
    /// (MADV_POPULATE_WRITE). Their content stays. Before Linux 5.14, and without memory, nothing
    /// happens.
    pub fn make_present(self) {
        // SAFETY: the call changes no content and no mapping. It fails for pages that are not
        // mapped.
        #[allow(unsafe_code)]
        unsafe {
            self.advise(rustix::mm::Advice::LinuxPopulateWrite);
        }
    }

    /// Returns the pages to the kernel. Their content becomes zeros.
    ///
    /// # Safety
    ///
    /// Nothing may rely on the content of the pages.
    #[allow(unsafe_code)]
    pub unsafe fn release(self) {
        // SAFETY: the caller's condition.
        unsafe { self.advise(rustix::mm::Advice::LinuxDontNeed) }
    }

    #[allow(unsafe_code)]
    unsafe fn advise(self, advice: rustix::mm::Advice) {
        let start = std::ptr::without_provenance_mut(self.start);
        // SAFETY: as the callers say.
        let _ = unsafe { rustix::mm::madvise(start, self.bytes, advice) };
    }
}

/// Runs `release`, and returns the memory that it and others have freed to the kernel. The
/// allocator of glibc keeps such memory otherwise, above all that of threads.
pub fn release_heap(release: impl FnOnce()) {
    /// The end of a thread's heap is returned if it has this length in bytes.
    const SHORT: i32 = 64 << 10;
    /// As long as requests come, memory is used again soon.
    const LONG: i32 = 32 << 20;
    set_trim_threshold(SHORT);
    release();
    #[cfg(target_env = "gnu")]
    #[allow(unsafe_code)]
    // SAFETY: the function takes no pointer, and other threads may allocate meanwhile.
    unsafe {
        libc::malloc_trim(0);
    }
    set_trim_threshold(LONG);
}

#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
fn set_trim_threshold(bytes: i32) {
    // SAFETY: the function takes no pointer, and other threads may allocate meanwhile. If it fails,
    // the threshold stays as it was.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, bytes);
    }
}

#[cfg(not(target_env = "gnu"))]
fn set_trim_threshold(_: i32) {}

/// The directory of the process's group in version 1 of the memory controller.
fn legacy_group(groups: &str, mounts: &str) -> Option<PathBuf> {
    let group = groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let has_memory = fields.next()?.split(',').any(|name| name == "memory");
        has_memory.then(|| fields.next()).flatten()
    })?;
    mounts.lines().find_map(|line| {
        let (before, behind) = line.split_once(" - ")?;
        let mut behind = behind.split(' ');
        let is_legacy = behind.next() == Some("cgroup");
        let has_memory = behind.nth(1)?.split(',').any(|option| option == "memory");
        if !is_legacy || !has_memory {
            return None;
        }
        let mut fields = before.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        // In a container, the mount may show the group itself as its root.
        let below = Path::new(group).strip_prefix(root).unwrap_or(Path::new(""));
        Some(Path::new(place).join(below))
    })
}

/// The limit of a group and of the groups above it, in bytes.
fn hierarchical_limit(statistics: &str) -> Option<u64> {
    let prefix = "hierarchical_memory_limit ";
    let mut lines = statistics.lines();
    lines.find_map(|line| line.strip_prefix(prefix)?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_of_the_old_controller_is_found() {
        let mounts = "30 25 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                      35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup \
                      rw,memory\n";
        let group = |groups| legacy_group(groups, mounts);
        assert_eq!(
            group("5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/c\n"),
            Some("/sys/fs/cgroup/memory/a/b".into())
        );
        // Only version 2.
        assert_eq!(group("0::/user.slice\n"), None);
        assert_eq!(legacy_group("4:memory:/a\n", ""), None);
        let contained = mounts.replace("0:32 / ", "0:32 /docker/1 ");
        assert_eq!(
            legacy_group("4:memory:/docker/1\n", &contained),
            Some("/sys/fs/cgroup/memory/".into())
        );
    }

    #[test]
    fn limit_is_that_of_the_whole_hierarchy() {
        let statistics = "cache 7\nhierarchical_memory_limit 67108864\nrss 1\n";
        assert_eq!(hierarchical_limit(statistics), Some(64 << 20));
        assert_eq!(hierarchical_limit("cache 7\n"), None);
    }
}
