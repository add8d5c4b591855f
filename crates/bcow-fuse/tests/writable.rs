//! What programs see in a mount with an upper: the same as in a plain directory.

mod support;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use bcow_fuse::stats::{Document, STATS_XATTR};
use rustix::fs::{FlockOperation, RenameFlags, XattrFlags};
use rustix::io::Errno;
use support::*;
use tempfile::TempDir;

/// cap_net_raw=ep, as setcap writes it.
const CAPABILITY: [u8; 20] = [
    1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// A mount with an upper, and a plain directory that holds the same.
struct Pair {
    sample: Sample,
    upper: TempDir,
    mounted: Mounted,
}

impl Pair {
    fn new(options: &str) -> Self {
        let sample = Sample::with(&[], |tree| {
            for name in ["file", "other", "d/inner"] {
                let path = tree.join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(&path, noise(1, 5000)).unwrap();
            }
            for (name, size) in [("capable", 9000), ("capable-and-large", 300_000)] {
                fs::write(tree.join(name), noise(2, size)).unwrap();
                set_xattr(&tree.join(name), "security.capability", &CAPABILITY);
            }
            fs::set_permissions(tree, fs::Permissions::from_mode(0o777)).unwrap();
        });
        let upper = TempDir::new().unwrap();
        let mounted = Mounted::writable(sample.open(), upper.path(), options);
        let pair = Pair {
            sample,
            upper,
            mounted,
        };
        open_the_way_to(pair.mounted.path());
        let around = pair.sample.directory();
        fs::set_permissions(around, fs::Permissions::from_mode(0o755)).unwrap();
        pair
    }

    fn path(&self, name: &str) -> PathBuf {
        self.mounted.path().join(name)
    }

    fn both(&self) -> [PathBuf; 2] {
        [self.sample.tree(), self.mounted.path().to_owned()]
    }

    /// Runs a script in both directories; it must print the same, and say that it did something.
    fn same(&self, script: &str) {
        let [plain, mounted] = self.both().map(|directory| run(script, &directory));
        assert_eq!(plain, mounted, "{script}");
        assert!(
            !plain.is_empty() && !plain.contains("Traceback"),
            "{script}: {plain}"
        );
    }

    /// Unmounts and mounts again.
    fn again(self, options: &str) -> Self {
        let Pair {
            sample,
            upper,
            mounted,
        } = self;
        bcow_fuse::unmount(mounted.path(), bcow_fuse::WhenBusy::Fail).unwrap();
        mounted.ended().unwrap();
        let mounted = Mounted::writable(sample.open(), upper.path(), options);
        open_the_way_to(mounted.path());
        Pair {
            sample,
            upper,
            mounted,
        }
    }
}

/// What a shell script prints in a directory; `nobody COMMAND` runs as an ordinary user.
fn run(script: &str, directory: &Path) -> String {
    let prelude =
        "umask 022; nobody() { setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"; }\n";
    let output = Command::new("sh")
        .args(["-c", &format!("{prelude}{script}")])
        .current_dir(directory)
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    format!("{}{error}", String::from_utf8_lossy(&output.stdout))
}

fn lacks_tools() -> bool {
    lacks_mounts()
        || lacks("setpriv", has_program("setpriv"))
        || lacks("setfacl", has_program("setfacl"))
        || lacks("setcap", has_program("setfattr"))
}

#[test]
fn set_id_bits_and_capabilities_go_when_a_file_is_changed_and_not_else() {
    if lacks_tools() {
        return;
    }
    for options in ["allow_other,suid", "allow_other,suid,writeback"] {
        let pair = Pair::new(options);
        for mode in ["6777", "2767", "4766", "0777"] {
            for who in ["", "nobody "] {
                let capability = match mode.ends_with("777") {
                    true => {
                        "setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 file"
                    }
                    false => "",
                };
                for change in [
                    "sh -c 'printf x >> file'",
                    "sh -c ': > file'",
                    "truncate -s 3 file",
                    "truncate -s 9999 file",
                    "fallocate -l 100 file",
                    "dd if=other of=file conv=notrunc status=none",
                    "cat file",
                    "chown :65534 file",
                    "touch file",
                ] {
                    pair.same(&format!(
                        "chown 65534:65534 file; chmod {mode} file
                         {capability}
                         {who}{change} > /dev/null; sync file
                         stat -c '%a %U' file; getfattr -m- file"
                    ));
                }
            }
            pair.same(&format!(
                "chmod {mode} file; chown 0:0 file; stat -c %a file"
            ));
            pair.same(&format!(
                "chmod {mode} file; chown 0 d; stat -c '%a %U' d file"
            ));
        }
    }
}

/// What the kernel asks for is nothing, whether a file is about to be written or given to nobody in particular; the latter
/// takes no right to write.
#[test]
fn only_who_may_change_a_file_takes_its_set_id_bits_away() {
    if lacks_tools() || lacks("python3", Path::new("/usr/bin/python3").exists()) {
        return;
    }
    let pair = Pair::new("allow_other,suid");
    const CHOWN: &str = "/usr/bin/python3 -c '
import os
try: os.chown(\"file\", -1, -1); print(\"done\")
except OSError as error: print(error.errno)'";
    let somebody = "setpriv --reuid=65534 --regid=65534 --groups=7";
    for mode in ["4755", "2755", "6755", "2745", "0755", "6750"] {
        for owner in ["0:0", "0:7", "0:65534", "65534:0"] {
            for who in ["", "nobody", somebody] {
                pair.same(&format!(
                    "chown {owner} file; chmod {mode} file; {who} {CHOWN}; stat -c %a file"
                ));
            }
            // Somebody else may be handed the file open.
            for change in [
                "printf x >&3",
                "fallocate -l 100 /dev/fd/3",
                "head -c 3 /dev/zero >&3",
            ] {
                pair.same(&format!(
                    "chown {owner} file; chmod {mode} file; exec 3<>file; nobody sh -c \"{change}\"; exec 3>&-; stat -c %a file"
                ));
            }
        }
    }
    // Whoever may write takes them away by writing.
    for (rights, who) in [
        ("chown 0:65534 file; chmod 6775 file", "nobody"),
        ("chown 0:7 file; chmod 6775 file", somebody),
        ("chown 0:0 file; chmod 6757 file", "nobody"),
        (
            "chown 0:0 file; setfacl -m u:65534:rw file; chmod u+s,g+s file",
            "nobody",
        ),
        (
            "chown 0:0 file; setfacl -b -m g:7:rw file; chmod u+s,g+s file",
            somebody,
        ),
        (
            "chown 0:0 file; setfacl -b -m g:7:rw,o::rw,m::r file; chmod u+s,g+s file",
            somebody,
        ),
    ] {
        pair.same(&format!(
            "{rights}; {who} fallocate -l 100 file; stat -c %a file"
        ));
    }
    pair.same("setfacl -b file; chown 0:7 file; chmod 6755 file; nobody fallocate -l 9 file; stat -c %a file");
}

#[test]
fn default_acls_are_inherited_instead_of_the_umask() {
    if lacks_tools() {
        return;
    }
    let pair = Pair::new("allow_other");
    for setup in [
        "setfacl -m d:u:65534:rwx,d:g::r,d:o::- d",
        "setfacl -b d; chmod 2775 d; chown 0:65534 d",
        "setfacl -m d:m::r d",
    ] {
        pair.same(setup_and_list(setup).as_str());
    }
    // Whoever is not in the group of a file loses its set-group-ID with a new ACL.
    pair.same(
        "touch g; chown 65534:7 g; chmod 2755 g; nobody setfacl -m u:1:r g; stat -c %a g
         chown 65534:65534 g; chmod 2755 g; nobody setfacl -m u:2:r g; stat -c %a g
         chown 65534:7 g; chmod 2755 g; setfacl -m u:3:r g; stat -c %a g",
    );
    pair.same(
        "/usr/bin/python3 - <<'EOF'
import os
for name in ('d', 'g'):
    for acl in ('system.posix_acl_access', 'system.posix_acl_default', 'user.missing', 'security.missing'):
        for _ in range(2):
            try: os.removexattr(name, acl); print(name, acl)
            except OSError as error: print(name, acl, error.errno)
EOF",
    );
    pair.same("setfacl -b g; chmod 640 g; setfacl -m u:9:rw g; chmod 604 g; getfacl -n g");
}

fn setup_and_list(setup: &str) -> String {
    format!(
        "{setup}; umask 027
         rm -rf d/*; mkdir d/sub; : > d/new; mkfifo d/pipe; ln -s x d/link; cp other d/copy
         nobody mkdir d/theirs; stat -c '%n %a %g' d d/* d/*/; getfacl -nR d"
    )
}

#[test]
fn appends_of_two_writers_do_not_overwrite_each_other() {
    if lacks_mounts() {
        return;
    }
    for options in ["", "writeback"] {
        let pair = Pair::new(options);
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
    if lacks_mounts() || lacks("python3", Path::new("/usr/bin/python3").exists()) {
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
    for options in ["", "writeback"] {
        let pair = Pair::new(options);
        pair.same(script);
        let pair = pair.again(options);
        pair.same("cksum file new");
    }
}

#[test]
fn capabilities_stay_when_the_kernel_writes_back_what_was_written_before() {
    if lacks_tools() || lacks("python3", Path::new("/usr/bin/python3").exists()) {
        return;
    }
    // A store through a mapping takes no capabilities away, a write does; neither does what comes of it later.
    let script = "/usr/bin/python3 - <<'EOF'
import mmap, os
NAME = 'security.capability'
CAPABILITY = bytes.fromhex('0100000200200000' + 24 * '0')
def show(name):
    try: print(name, os.getxattr(name, NAME) == CAPABILITY)
    except OSError as error: print(name, error.errno)
for name in ('file', 'capable', 'capable-and-large'):
    fd = os.open(name, os.O_RDWR)
    for at in (0, 4096):
        mapping = mmap.mmap(fd, 4096, offset=0 if name == 'file' else at)
        mapping[5:6] = b'x'
        if name == 'file':
            os.setxattr(fd, NAME, CAPABILITY)
        mapping.flush()
        show(name)
        mapping.close()
    os.pwrite(fd, b'y', 3)
    os.fsync(fd)
    show(name)
    os.pwrite(fd, b'z', 4)
    os.setxattr(fd, NAME, CAPABILITY)
    os.close(fd)
    fd = os.open(name, os.O_RDWR)
    os.fsync(fd)
    show(name)
    os.pwrite(fd, b'z', 4)
    os.removexattr(fd, NAME) if NAME in os.listxattr(fd) else None
    os.fsync(fd)
    show(name)
    os.setxattr(fd, NAME, CAPABILITY)
EOF
getfattr -n security.capability -e hex file capable*; cksum file capable*";
    for options in ["", "writeback"] {
        let pair = Pair::new(options);
        pair.same(script);
        let pair = pair.again(options);
        pair.same("getfattr -n security.capability -e hex file capable*; cksum file capable*");
    }
}

#[test]
fn locks_hold_between_processes_and_end_with_them() {
    if lacks_mounts() || lacks("flock", has_program("flock")) {
        return;
    }
    let pair = Pair::new("");
    let file = File::open(pair.path("file")).unwrap();
    rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
    let try_lock = || {
        run(
            "flock -n file echo got it || echo refused",
            pair.mounted.path(),
        )
    };
    assert_eq!(try_lock(), "refused\n");
    drop(file);
    assert_eq!(try_lock(), "got it\n");
    let file = File::options().write(true).open(pair.path("file")).unwrap();
    rustix::fs::fcntl_lock(&file, FlockOperation::LockExclusive).unwrap();
    let script = "/usr/bin/python3 -c 'import fcntl; fcntl.lockf(open(\"file\", \"r+\"), fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>&1 | tail -1";
    assert!(run(script, pair.mounted.path()).contains("BlockingIOError"));
    drop(file);
    assert_eq!(run(script, pair.mounted.path()), "");
}

#[test]
fn file_without_a_name_lives_until_it_is_closed() {
    if lacks_mounts() {
        return;
    }
    let pair = Pair::new("");
    for name in ["file", "new"] {
        let path = pair.path(name);
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .unwrap();
        fs::remove_file(&path).unwrap();
        assert!(!path.exists());
        file.write_all_at(b"still here", 5).unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o600))
            .unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!(
            (metadata.nlink(), metadata.mode()),
            (0, 0o100_600),
            "{name}"
        );
        let mut content = Vec::new();
        file.read_to_end(&mut content).unwrap();
        assert_eq!(&content[5..15], b"still here");
        fs::write(&path, "another").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"another");
        file.sync_all().unwrap();
    }
    let pair = pair.again("");
    assert_eq!(fs::read(pair.path("file")).unwrap(), b"another");
}

/// Listing shows the name of what is damaged, and does not take it from whoever has it open.
#[test]
fn open_file_that_is_damaged_on_the_host_is_listed_and_stays_open() {
    if lacks_mounts() {
        return;
    }
    const MARK: &str = "trusted.overlay.metacopy";
    let pair = Pair::new("");
    let file = File::create(pair.path("new")).unwrap();
    set_xattr(&pair.upper.path().join("new"), MARK, b"bad");
    for _ in 0..3 {
        let names = fs::read_dir(pair.mounted.path()).unwrap();
        let shown = names
            .filter(|name| name.as_ref().unwrap().file_name() == "new")
            .count();
        assert_eq!(shown, 1);
    }
    rustix::fs::lremovexattr(pair.upper.path().join("new"), MARK).unwrap();
    file.set_permissions(fs::Permissions::from_mode(0o600))
        .unwrap();
}

#[test]
fn renames_exchange_and_spare_what_is_there() {
    if lacks_mounts() {
        return;
    }
    let pair = Pair::new("");
    for directory in pair.both() {
        let rename = |from: &str, to: &str, flags| {
            rustix::fs::renameat_with(
                rustix::fs::CWD,
                directory.join(from),
                rustix::fs::CWD,
                directory.join(to),
                flags,
            )
        };
        assert_eq!(
            rename("file", "other", RenameFlags::NOREPLACE),
            Err(Errno::EXIST)
        );
        rename("d", "file", RenameFlags::EXCHANGE).unwrap();
        rename("other", "fresh", RenameFlags::NOREPLACE).unwrap();
    }
    // The whiteout would be hidden at once, so there is none to be had.
    let whiteout = rustix::fs::renameat_with(
        rustix::fs::CWD,
        pair.path("fresh"),
        rustix::fs::CWD,
        pair.path("elsewhere"),
        RenameFlags::WHITEOUT,
    );
    assert_eq!(whiteout, Err(Errno::INVAL));
    let pair = pair.again("");
    pair.same("find . | sort; cat d file/inner fresh | cksum");
}

#[test]
fn times_are_kept_to_the_nanosecond_also_those_before_1970() {
    if lacks_mounts() {
        return;
    }
    let pair = Pair::new("");
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
fn statistics_are_read_from_the_root_and_nowhere_listed() {
    if lacks_mounts() {
        return;
    }
    let pair = Pair::new("");
    fs::write(pair.path("file"), "changed").unwrap();
    let mut value = vec![0; 64 << 10];
    let root = pair.mounted.path();
    let count = |document: &Document, name: &str| {
        let found = document.operations.iter().find(|one| one.operation == name);
        found.map_or(0, |one| one.count)
    };
    // A request is counted shortly after it was answered.
    let start = std::time::Instant::now();
    let document = loop {
        let length = rustix::fs::getxattr(root, STATS_XATTR, &mut value).unwrap();
        let document: Document = serde_json::from_slice(&value[..length]).unwrap();
        if count(&document, "write") == 1 && count(&document, "lookup") >= 1 {
            break document;
        }
        assert!(start.elapsed().as_secs() < 10, "{document:?}");
    };
    assert_eq!(document.schema, "bcow.stats/1");
    let upper = document.upper.as_ref().unwrap();
    assert_eq!(Path::new(&upper.path), pair.upper.path());
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
    let elsewhere = rustix::fs::getxattr(pair.path("d"), STATS_XATTR, &mut value);
    assert_eq!(elsewhere, Err(Errno::NODATA));
}

#[test]
fn a_mount_with_an_upper_can_be_read_only() {
    if lacks_mounts() {
        return;
    }
    let pair = Pair::new("");
    fs::write(pair.path("file"), "changed").unwrap();
    let pair = pair.again("ro");
    assert_eq!(fs::read(pair.path("file")).unwrap(), b"changed");
    let error = fs::write(pair.path("file"), "again").unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::ROFS));
}

#[test]
fn nameless_files_are_refused_as_not_supported() {
    if lacks_mounts() {
        return;
    }
    let pair = Pair::new("");
    let opened = rustix::fs::open(
        pair.mounted.path(),
        rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR,
        rustix::fs::Mode::RUSR,
    );
    assert_eq!(opened.map(drop), Err(Errno::OPNOTSUPP));
}

#[test]
fn sync_mounts_and_synchronous_files_flush_every_write() {
    if lacks_mounts() {
        return;
    }
    let flushes = |pair: &Pair| {
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::getxattr(pair.mounted.path(), STATS_XATTR, &mut value).unwrap();
        let document: Document = serde_json::from_slice(&value[..length]).unwrap();
        let found = document
            .operations
            .iter()
            .find(|one| one.operation == "fsync");
        found.map_or(0, |one| one.count)
    };
    for (options, flags, expected) in [
        ("", rustix::fs::OFlags::empty(), 0),
        ("", rustix::fs::OFlags::DSYNC, 3),
        ("sync", rustix::fs::OFlags::empty(), 3),
        ("sync,async", rustix::fs::OFlags::empty(), 0),
    ] {
        let pair = Pair::new(options);
        let flags = flags | rustix::fs::OFlags::WRONLY;
        let mode = rustix::fs::Mode::empty();
        let file = File::from(rustix::fs::open(pair.path("file"), flags, mode).unwrap());
        for at in 0..3 {
            file.write_all_at(b"x", at).unwrap();
        }
        // A request is counted shortly after it was answered.
        let start = std::time::Instant::now();
        while flushes(&pair) < expected {
            assert!(start.elapsed().as_secs() < 10, "{options:?} {flags:?}");
        }
        assert_eq!(flushes(&pair), expected, "{options:?} {flags:?}");
    }
}

#[test]
fn what_was_just_written_is_no_hole() {
    if lacks_mounts() {
        return;
    }
    for options in ["", "writeback"] {
        let pair = Pair::new(options);
        let file = File::options()
            .write(true)
            .create_new(true)
            .open(pair.path("sparse"))
            .unwrap();
        file.set_len(10 << 20).unwrap();
        file.write_all_at(&[1; 8192], 4 << 20).unwrap();
        let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(4 << 20)).unwrap();
        assert!(hole >= (4 << 20) + 8192, "{options}: {hole}");
        let data = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)).unwrap();
        assert!(data <= 4 << 20, "{options}: {data}");
    }
}
