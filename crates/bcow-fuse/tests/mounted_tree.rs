//! What programs see in a mount.

mod support;

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bcow::BlockDevice;
use bcow_testkit::{has_program, lacks, noise};
use rustix::io::Errno;
use support::*;

#[test]
fn mounted_tree_equals_kernel_mount_and_source() {
    if lacks_mounts() {
        return;
    }
    for arguments in [&[][..], &["--chunksize=4096"], &["-Eforce-inode-extended"]] {
        let sample = Sample::new(arguments);
        let mounted = Mounted::new(sample.open());
        let ours = walk(mounted.path());
        let mut source = walk(&sample.tree());
        for (path, facts) in &mut source {
            // Directories have sizes of their own in every file system.
            if facts.mode & libc::S_IFMT == libc::S_IFDIR {
                facts.size = ours[path].size;
            }
        }
        assert_same(&ours, &source, "source");
        let Some(kernel) = KernelMount::new(&sample.image()) else {
            lacks("the kernel's file-backed EROFS", false);
            continue;
        };
        assert_same(&ours, &walk(kernel.path()), "kernel mount");
    }
}

fn assert_same(
    ours: &std::collections::BTreeMap<std::path::PathBuf, Facts>,
    other: &std::collections::BTreeMap<std::path::PathBuf, Facts>,
    what: &str,
) {
    let names = |tree: &std::collections::BTreeMap<_, _>| tree.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(ours), names(other), "{what} has other names");
    for (path, facts) in ours {
        let mut expected = other[path].clone();
        // Contents compared apart: a difference of a megabyte is no message.
        assert!(
            facts.content == expected.content,
            "{path:?} has other content than in {what}"
        );
        expected.content.clone_from(&facts.content);
        assert_eq!(facts, &expected, "{path:?} differs from {what}");
    }
}

#[test]
fn inode_numbers_are_the_same_in_every_mount_and_in_the_kernel() {
    let Some(sample) = sample() else { return };
    let (first, second) = (Mounted::new(sample.open()), Mounted::new(sample.open()));
    let trees = [&first, &second].map(|mounted| walk(mounted.path()));
    assert_same(&trees[0], &trees[1], "the other mount");
    let number = |root: &Path, name: &str| fs::symlink_metadata(root.join(name)).unwrap().ino();
    for name in ["original", "a/b", "link", "names/-dash"] {
        assert_eq!(number(first.path(), name), number(second.path(), name));
        if let Some(kernel) = KernelMount::new(&sample.image()) {
            assert_eq!(number(first.path(), name), number(kernel.path(), name));
        }
    }
    assert_eq!(number(first.path(), ""), 1, "the root");
}

#[test]
fn missing_name_is_enoent_and_stays_so() {
    let Some(mounted) = mounted("") else { return };
    for _ in 0..2 {
        let error = fs::metadata(mounted.path().join("missing")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
    let long = mounted.path().join("x".repeat(256));
    let error = fs::metadata(long).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::NAMETOOLONG));
}

#[test]
fn nothing_can_be_changed() {
    let Some(mounted) = mounted("") else { return };
    let at = |name: &str| mounted.path().join(name);
    let results = [
        fs::write(at("original"), "x"),
        fs::write(at("new"), "x"),
        fs::create_dir(at("new")),
        fs::remove_file(at("original")),
        fs::rename(at("original"), at("new")),
        fs::hard_link(at("original"), at("new")),
        fs::set_permissions(at("original"), fs::Permissions::from_mode(0o777)),
        File::options().append(true).open(at("original")).map(drop),
    ];
    for result in results {
        let errno = Errno::from_io_error(&result.unwrap_err());
        assert_eq!(errno, Some(Errno::ROFS));
    }
}

#[test]
fn statfs_tells_size_and_inodes() {
    let Some(sample) = sample() else { return };
    let mounted = Mounted::new(sample.open());
    let figures = rustix::fs::statvfs(mounted.path()).unwrap();
    let image_bytes = fs::metadata(sample.image()).unwrap().len();
    assert_eq!(figures.f_blocks * figures.f_frsize, image_bytes);
    assert_eq!((figures.f_bfree, figures.f_ffree), (0, 0));
    assert!(figures.f_files > 1500);
    assert_eq!(figures.f_namemax, 255);
}

#[test]
fn holes_are_found_and_take_no_space() {
    if lacks_mounts() {
        return;
    }
    let mounted = Mounted::new(open(Arc::new(written_image())));
    let path = mounted.path().join("sparse");
    let file = File::open(&path).unwrap();
    let seek = |from: rustix::fs::SeekFrom| rustix::fs::seek(&file, from);
    use rustix::fs::SeekFrom::{Data, Hole};
    assert_eq!(seek(Data(0)), Ok(4096));
    assert_eq!(seek(Hole(4096)), Ok(8192));
    assert_eq!(seek(Hole(0)), Ok(0));
    assert_eq!(seek(Data(8192)), Err(Errno::NXIO));
    assert_eq!(seek(Hole(3 * 4096)), Err(Errno::NXIO));
    assert_eq!(fs::metadata(&path).unwrap().blocks(), 4096 / 512);
    let content = fs::read(&path).unwrap();
    assert_eq!(content[4096..8192], noise(3, 4096));
    assert!(
        content[..4096]
            .iter()
            .chain(&content[8192..])
            .all(|&byte| byte == 0)
    );

    let whole = File::open(mounted.path().join("n".repeat(255))).unwrap();
    assert_eq!(rustix::fs::seek(&whole, Hole(100)), Ok(4096));
    assert_eq!(rustix::fs::seek(&whole, Data(100)), Ok(100));
}

#[test]
fn image_of_our_own_writer_equals_its_kernel_mount() {
    if lacks_mounts() {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), written_image()).unwrap();
    let mounted = Mounted::new(open(device(file.path())));
    let Some(kernel) = KernelMount::new(file.path()) else {
        lacks("the kernel's file-backed EROFS", false);
        return;
    };
    assert_same(&walk(mounted.path()), &walk(kernel.path()), "kernel mount");
}

#[test]
fn many_readers_read_right_at_once() {
    if lacks_mounts() {
        return;
    }
    let contents: Vec<_> = (0..8).map(|index| noise(index, 3_000_000)).collect();
    let sample = Sample::with(&[], |tree| {
        for (index, content) in contents.iter().enumerate() {
            fs::write(tree.join(index.to_string()), content).unwrap();
        }
    });
    let mounted = Mounted::new(sample.open());
    let (root, contents) = (mounted.path(), &contents);
    std::thread::scope(|scope| {
        for reader in 0..8 {
            scope.spawn(move || {
                for round in 0..40 {
                    let index = (reader + round) % 8;
                    let file = File::open(root.join(index.to_string())).unwrap();
                    let offset = round * 71_993;
                    let mut buf = vec![0; 100_000];
                    file.read_exact_at(&mut buf, offset as u64).unwrap();
                    assert!(buf == contents[index][offset..offset + buf.len()]);
                    if reader == 0 && round % 8 == 0 {
                        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
                    }
                }
            });
        }
    });
}

#[test]
fn mapped_file_can_be_executed() {
    if lacks_mounts() {
        return;
    }
    let sample = Sample::with(&[], |tree| {
        fs::copy("/bin/true", tree.join("true")).unwrap();
    });
    let mounted = Mounted::new(sample.open());
    let status = Command::new(mounted.path().join("true")).status().unwrap();
    assert!(status.success());
    let mounted = Mounted::with_options(sample.open(), "noexec").unwrap();
    let error = Command::new(mounted.path().join("true"))
        .status()
        .unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
}

/// A device with a place that cannot be read, which also counts reads.
struct Damaged {
    inner: Arc<dyn BlockDevice>,
    from: AtomicU64,
    to: AtomicU64,
}

impl BlockDevice for Damaged {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), bcow::Error> {
        let end = offset + buf.len() as u64;
        if offset < self.to.load(Ordering::Relaxed) && end > self.from.load(Ordering::Relaxed) {
            return Err(bcow::Error::Io {
                action: "read",
                offset,
                source: Errno::IO.into(),
            });
        }
        self.inner.read_at(offset, buf)
    }
}

#[test]
fn damage_fails_the_damaged_file_only() {
    let Some(sample) = sample() else { return };
    let content = noise(1_000_003, 1_000_003);
    let image = fs::read(sample.image()).unwrap();
    let start = image
        .windows(64)
        .position(|window| window == &content[..64])
        .unwrap() as u64;
    let damaged = Arc::new(Damaged {
        inner: device(&sample.image()),
        from: AtomicU64::new(start + 500_000),
        to: AtomicU64::new(start + 500_001),
    });
    let mounted = Mounted::new(open(damaged));
    let path = mounted.path().join("sizes/1000003");
    assert_eq!(fs::metadata(&path).unwrap().len(), 1_000_003);
    let error = fs::read(&path).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::IO));
    let mut head = vec![0; 4096];
    File::open(&path).unwrap().read_exact(&mut head).unwrap();
    assert_eq!(head, content[..4096]);
    let mut tail = Vec::new();
    let mut file = File::open(&path).unwrap();
    file.seek(SeekFrom::Start(900_000)).unwrap();
    file.read_to_end(&mut tail).unwrap();
    assert_eq!(tail, content[900_000..]);
    assert_eq!(
        fs::read(mounted.path().join("sizes/131072")).unwrap(),
        noise(131_072, 131_072)
    );
}

#[test]
fn damaged_inode_is_still_listed_beside_its_neighbours() {
    let Some(sample) = sample() else { return };
    let number = {
        let mounted = Mounted::new(sample.open());
        fs::metadata(mounted.path().join("sizes/4097"))
            .unwrap()
            .ino()
    };
    // mkfs.erofs puts the metadata at the start of the image, where the nid counts units of 32
    // bytes.
    let at = number * 32;
    let mut image = fs::read(sample.image()).unwrap();
    image[at as usize..at as usize + 32].fill(0xff);
    let mounted = Mounted::new(open(Arc::new(image)));
    let names: Vec<_> = fs::read_dir(mounted.path().join("sizes"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), 9);
    assert!(names.iter().any(|name| name == "4097"));
    let error = fs::metadata(mounted.path().join("sizes/4097")).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::IO));
    assert_eq!(
        fs::read(mounted.path().join("sizes/31")).unwrap(),
        noise(31, 31)
    );
}

#[test]
fn owner_only_mount_is_closed_to_others() {
    let Some(mounted) = mounted("") else { return };
    open_the_way_to(mounted.path());
    let output = as_ordinary_user("cat", &[&mounted.path().join("original")]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("Permission denied"));
}

#[test]
fn allow_other_lets_others_read_what_the_mode_allows() {
    let Some(mounted) = mounted("allow_other") else {
        return;
    };
    open_the_way_to(mounted.path());
    // Root's reading must not open the cache to others.
    fs::read(mounted.path().join("secret")).unwrap();
    let output = as_ordinary_user("cat", &[&mounted.path().join("original")]);
    assert_eq!(output.stdout, b"linked");
    let output = as_ordinary_user("cat", &[&mounted.path().join("secret")]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("Permission denied"));
}

#[test]
fn allow_other_honours_acls() {
    if lacks_mounts() || lacks("setfacl", has_program("setfacl")) {
        return;
    }
    let sample = Sample::with(&[], |tree| {
        for (name, entry) in [("granted", "u:65534:r"), ("denied", "u:65534:-")] {
            let path = tree.join(name);
            fs::write(&path, name).unwrap();
            let mode = if name == "granted" { 0o640 } else { 0o644 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let status = Command::new("setfacl")
                .args(["-m", entry])
                .arg(&path)
                .status();
            assert!(status.unwrap().success());
        }
    });
    let mounted = Mounted::with_options(sample.open(), "allow_other").unwrap();
    open_the_way_to(mounted.path());
    let output = as_ordinary_user("cat", &[&mounted.path().join("granted")]);
    assert_eq!(output.stdout, b"granted");
    let output = as_ordinary_user("cat", &[&mounted.path().join("denied")]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("Permission denied"));
    assert_eq!(
        xattrs(&mounted.path().join("granted")),
        xattrs(&sample.tree().join("granted"))
    );
}

#[test]
fn trusted_attributes_are_listed_for_root_only() {
    if lacks_mounts() || lacks("getfattr", has_program("getfattr")) {
        return;
    }
    let mounted = Mounted::with_options(Sample::new(&[]).open(), "allow_other").unwrap();
    open_the_way_to(mounted.path());
    let path = mounted.path().join("attributed");
    assert!(xattrs(&path).contains_key(&b"trusted.secret"[..]));
    let output = as_ordinary_user("getfattr", &[Path::new("-m-"), &path]);
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(names.contains("user.text"), "{names}");
    assert!(!names.contains("trusted"), "{names}");
}

#[test]
fn file_without_execute_bit_is_no_program() {
    let Some(mounted) = mounted("") else { return };
    let may = |name: &str, access| rustix::fs::access(mounted.path().join(name), access);
    use rustix::fs::Access;
    assert_eq!(may("original", Access::EXEC_OK), Err(Errno::ACCESS));
    assert_eq!(may("owned", Access::EXEC_OK), Ok(()));
    assert_eq!(may("a", Access::EXEC_OK), Ok(()));
    assert_eq!(may("original", Access::READ_OK), Ok(()));
    assert_eq!(may("original", Access::WRITE_OK), Err(Errno::ROFS));
}

#[test]
fn device_node_opens_only_with_the_dev_option() {
    let Some(sample) = sample() else { return };
    let mounted = Mounted::new(sample.open());
    let error = File::open(mounted.path().join("null")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    let mounted = Mounted::with_options(sample.open(), "dev").unwrap();
    assert_eq!(fs::read(mounted.path().join("null")).unwrap(), b"");
}

#[test]
fn mount_options_reach_the_kernel() {
    let Some(sample) = sample() else { return };
    for (options, source, shown) in [
        ("", "", " fuse.bcow ro,nosuid,nodev,"),
        (
            "suid,noexec,noatime,fsname=what is it",
            "what\\040is\\040it ",
            " fuse.bcow ro,nodev,noexec,noatime,",
        ),
    ] {
        let mounted = Mounted::with_options(sample.open(), options).unwrap();
        let list = fs::read_to_string("/proc/self/mounts").unwrap();
        let mut lines = list.lines();
        let line = lines.find(|line| line.contains(mounted.path().to_str().unwrap()));
        let line = line.unwrap();
        assert!(line.starts_with(source) && line.contains(shown), "{line}");
    }
}

#[test]
fn unmount_ends_the_server() {
    let Some(mounted) = mounted("") else { return };
    bcow_fuse::unmount(mounted.path(), bcow_fuse::WhenBusy::Fail).unwrap();
    mounted.ended().unwrap();
}
