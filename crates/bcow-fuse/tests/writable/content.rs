//! What is in files, and what of it is with the host.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;

use rustix::fs::{Mode, OFlags, SeekFrom};

use crate::pair::{Pair, count, lacks_python};

#[test]
fn appends_of_two_writers_do_not_overwrite_each_other() {
    for (_, pair) in Pair::with_each_cache() {
        let path = pair.path("log");
        let open = || {
            File::options()
                .append(true)
                .create(true)
                .open(&path)
                .unwrap()
        };
        let (mut one, mut two) = (open(), open());
        for _ in 0..100 {
            one.write_all(b"11111").unwrap();
            two.write_all(b"222").unwrap();
        }
        assert_eq!(fs::read(&path).unwrap(), b"11111222".repeat(100));
    }
}

#[test]
fn what_is_written_through_a_shared_mapping_is_in_the_file() {
    if lacks_python() {
        return;
    }
    let script = "/usr/bin/python3 - <<'EOF'
import mmap, os
for name in ('file', 'new'):
    fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, 3 * 4096)
    both = [mmap.mmap(fd, 3 * 4096), mmap.mmap(fd, 3 * 4096)]
    both[0][4090:4100] = b'0123456789'
    assert both[1][4090:4100] == b'0123456789'
    both[1][8000:8003] = b'abc'
    os.pwrite(fd, b'XYZ', 4094)
    assert both[0][4090:4100] == b'0123XYZ789'
    both[0].flush()
    print(os.pread(fd, 10, 4090), os.pread(fd, 3, 8000), os.fstat(fd).st_size)
EOF
cksum file new";
    for (options, pair) in Pair::with_each_cache() {
        pair.same(script);
        let pair = pair.again(options);
        pair.same("cksum file new");
    }
}

#[test]
fn what_was_just_written_is_no_hole() {
    for (options, pair) in Pair::with_each_cache() {
        let file = File::options()
            .write(true)
            .create_new(true)
            .open(pair.path("sparse"))
            .unwrap();
        file.set_len(10 << 20).unwrap();
        file.write_all_at(&[1; 8192], 4 << 20).unwrap();
        let hole = rustix::fs::seek(&file, SeekFrom::Hole(4 << 20)).unwrap();
        assert!(hole >= (4 << 20) + 8192, "{options}: {hole}");
        let data = rustix::fs::seek(&file, SeekFrom::Data(0)).unwrap();
        assert!(data <= 4 << 20, "{options}: {data}");
    }
}

#[test]
fn sync_mounts_and_synchronous_files_flush_every_write() {
    for (options, flags, expected) in [
        ("", OFlags::empty(), 0),
        ("", OFlags::DSYNC, 3),
        ("sync", OFlags::empty(), 3),
        ("sync,async", OFlags::empty(), 0),
    ] {
        let Some(pair) = Pair::new(options) else {
            return;
        };
        let flags = flags | OFlags::WRONLY;
        let mode = Mode::empty();
        let file = File::from(rustix::fs::open(pair.path("file"), flags, mode).unwrap());
        for at in 0..3 {
            file.write_all_at(b"x", at).unwrap();
        }
        pair.statistics_with(|document| count(document, "fsync") >= expected);
        let flushes = count(&pair.statistics(), "fsync");
        assert_eq!(flushes, expected, "{options:?} {flags:?}");
    }
}
