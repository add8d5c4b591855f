//! The mount as a whole: read-only mounts, statistics, times and locks.

use std::fs::{self, File};
use std::path::Path;

use bcow_fuse::stats::STATS_XATTR;
use bcow_testkit::{has_program, lacks};
use rustix::fs::{FlockOperation, XattrFlags};
use rustix::io::Errno;

use crate::pair::{Pair, count, lacks_python, run};
use crate::support::xattrs;

#[test]
fn a_mount_with_an_upper_can_be_read_only() {
    let Some(pair) = Pair::new("") else { return };
    fs::write(pair.path("file"), "changed").unwrap();
    let pair = pair.again("ro");
    assert_eq!(fs::read(pair.path("file")).unwrap(), b"changed");
    let error = fs::write(pair.path("file"), "again").unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::ROFS));
}

#[test]
fn statistics_are_read_from_the_root_and_nowhere_listed() {
    let Some(pair) = Pair::new("") else { return };
    fs::write(pair.path("file"), "changed").unwrap();
    let root = pair.root();
    let document = pair.statistics_with(|document| {
        count(document, "write") == 1 && count(document, "lookup") >= 1
    });
    assert_eq!(document.schema, "bcow.stats/1");
    let upper = document.upper.as_ref().unwrap();
    assert_eq!(Path::new(&upper.path), pair.upper());
    assert_eq!(upper.sync, "strict");
    for figures in &document.operations {
        let counted: u64 = figures.histogram.iter().map(|bucket| bucket.count).sum();
        assert_eq!(counted, figures.count, "{figures:?}");
        assert!(figures.p50_ns <= figures.p99_ns, "{figures:?}");
    }
    assert!(!xattrs(root).contains_key(STATS_XATTR.as_bytes()));
    let set = rustix::fs::setxattr(root, STATS_XATTR, b"mine", XattrFlags::empty());
    assert_eq!(set, Err(Errno::PERM));
    assert_eq!(rustix::fs::removexattr(root, STATS_XATTR), Err(Errno::PERM));
    let elsewhere = rustix::fs::getxattr(pair.path("d"), STATS_XATTR, &mut [0_u8; 64]);
    assert_eq!(elsewhere, Err(Errno::NODATA));
}

#[test]
fn times_are_kept_to_the_nanosecond_also_those_before_1970() {
    let Some(pair) = Pair::new("") else { return };
    for time in [
        "@0",
        "@1.5",
        "@-1.25",
        "@-100000.000000001",
        "@4000000000.123456789",
    ] {
        for name in ["file", "d", "new"] {
            pair.same(&format!("touch -d {time} {name}; stat -c '%x %y' {name}"));
        }
    }
    let pair = pair.again("");
    pair.same("stat -c '%n %x %y' file d new");
}

#[test]
fn locks_hold_between_processes_and_end_with_them() {
    if lacks("flock", has_program("flock")) || lacks_python() {
        return;
    }
    let Some(pair) = Pair::new("") else { return };
    let file = File::open(pair.path("file")).unwrap();
    rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
    let try_lock = || run("flock -n file echo got it || echo refused", pair.root());
    assert_eq!(try_lock(), "refused\n");
    drop(file);
    assert_eq!(try_lock(), "got it\n");
    let file = File::options().write(true).open(pair.path("file")).unwrap();
    rustix::fs::fcntl_lock(&file, FlockOperation::LockExclusive).unwrap();
    let script = "/usr/bin/python3 -c 'import fcntl
fcntl.lockf(open(\"file\", \"r+\"), fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>&1 | tail -1";
    assert!(run(script, pair.root()).contains("BlockingIOError"));
    drop(file);
    assert_eq!(run(script, pair.root()), "");
}
