//! Uppers on the host: creating, opening and refusing them; creating and removing files in them.

use std::ffi::CString;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use bcow_testkit::lacks;
use bcow_union::testing::upper::{
    Attribute, ImageName, Mark, Marks, Metacopy, Namespace, Origin, Provenance, XattrMode,
    is_whiteout,
};
use bcow_union::{Instance, UpperError, UpperReader};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use tempfile::TempDir;

const IMAGE: ImageName<'_> = ImageName {
    identity: [7; 32],
    name: "base.bcow",
};
const NOTE: &str = "a test, process 1";

fn begin(path: &Path) -> Instance {
    Instance::open(path, IMAGE, NOTE).unwrap()
}

fn refusal(path: &Path) -> UpperError {
    Instance::open(path, IMAGE, NOTE).unwrap_err()
}

fn count(path: &Path) -> usize {
    fs::read_dir(path).unwrap().count()
}

#[test]
fn a_missing_upper_is_created_for_its_owner_and_found_again() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("upper");
    let instance = begin(&path);
    assert_eq!(instance.provenance(), Provenance::Created);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o700);
    let meta = path.join(".bcow");
    assert_eq!(fs::metadata(&meta).unwrap().mode() & 0o7777, 0o700);
    drop(instance);

    let instance = begin(&path);
    assert_eq!(instance.provenance(), Provenance::Existing);
    assert_eq!(instance.record().identity(), Some([7; 32]));
    assert_eq!(instance.record().image_name, "base.bcow");
    let mut names: Vec<_> = fs::read_dir(&meta)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["index", "instance.json", "lock", "maps", "work"]);
}

const ACLS: [&str; 2] = ["system.posix_acl_default", "system.posix_acl_access"];

/// Gives user 1000 access to a directory and to files created in it.
fn share(path: &Path) {
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for (tag, id) in [(1_u16, !0_u32), (2, 1000), (4, !0), (16, !0), (32, !0)] {
        acl.extend(tag.to_le_bytes());
        acl.extend(7_u16.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    for name in ACLS {
        rustix::fs::setxattr(path, name, &acl, rustix::fs::XattrFlags::empty()).unwrap();
    }
}

/// The ACLs that a file has.
fn acls(path: &Path) -> Vec<&'static str> {
    let has = |name: &&str| rustix::fs::getxattr(path, *name, &mut [0; 256][..]).is_ok();
    ACLS.into_iter().filter(has).collect()
}

#[test]
fn acls_that_the_host_inherits_reach_nothing_that_is_made() {
    let dir = TempDir::new().unwrap();
    share(dir.path());
    let path = dir.path().join("upper");
    let ours = ["", "index", "maps", "work"].map(|name| path.join(".bcow").join(name));
    let check = |instance: &Instance| {
        for path in &ours {
            assert!(acls(path).is_empty(), "{}", path.display());
            assert_eq!(fs::metadata(path).unwrap().mode() & 0o7777, 0o700);
        }
        let (temporary, _) = instance.temporary_file(0o640).unwrap();
        let made = path.join(".bcow/work").join(temporary.at().1);
        assert!(acls(&made).is_empty());
        assert_eq!(fs::metadata(&made).unwrap().mode() & 0o777, 0o640);
        fs::write(path.join("made"), "").unwrap();
        assert!(acls(&path.join("made")).is_empty());
        fs::remove_file(path.join("made")).unwrap();
    };
    check(&begin(&path));
    for path in &ours {
        share(path);
    }
    check(&begin(&path));
    check(&Instance::open_existing(&path, NOTE).unwrap());
    // An existing empty directory.
    fs::remove_dir_all(&path).unwrap();
    fs::create_dir(&path).unwrap();
    check(&begin(&path));
    // ACLs of the root that were added after the start are left as they are.
    share(&path);
    assert_eq!(begin(&path).provenance(), Provenance::Existing);
    assert_eq!(acls(&path), ACLS);
    fs::remove_dir_all(path.join(".bcow")).unwrap();
    fs::write(path.join("theirs"), "").unwrap();
    assert_eq!(begin(&path).provenance(), Provenance::Adopted);
    assert_eq!(acls(&path), ACLS);
    for path in &ours {
        assert!(acls(path).is_empty(), "{}", path.display());
    }
}

#[test]
fn an_upper_without_a_record_is_adopted() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("file"), "x").unwrap();
    assert_eq!(begin(dir.path()).provenance(), Provenance::Adopted);
    assert_eq!(begin(dir.path()).provenance(), Provenance::Existing);
}

#[test]
fn places_that_cannot_be_uppers_are_refused_and_stay_as_they_are() {
    let dir = TempDir::new().unwrap();
    let refused = refusal(&dir.path().join("no/upper"));
    assert!(matches!(refused, UpperError::NoParent { .. }), "{refused}");

    let is_no_directory = |path: &Path| {
        let refused = refusal(path);
        let is_so = matches!(refused, UpperError::NotADirectory { .. });
        assert!(is_so, "{refused}");
    };
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    is_no_directory(&file);

    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let upper = dir.path().join("upper");
    fs::create_dir(&upper).unwrap();
    symlink(&elsewhere, upper.join(".bcow")).unwrap();
    is_no_directory(&upper);
    assert_eq!(count(&elsewhere), 0);

    let linked = dir.path().join("linked");
    fs::create_dir_all(linked.join(".bcow")).unwrap();
    symlink(&elsewhere, linked.join(".bcow/work")).unwrap();
    fs::write(elsewhere.join("precious"), "x").unwrap();
    is_no_directory(&linked);
    assert!(elsewhere.join("precious").exists());
}

#[test]
fn an_upper_of_another_image_is_refused_by_both_names() {
    let dir = TempDir::new().unwrap();
    drop(begin(dir.path()));
    let other = ImageName {
        identity: [0xab; 32],
        name: "other.bcow",
    };
    let refused = Instance::open(dir.path(), other, NOTE).unwrap_err();
    assert_eq!(
        refused.to_string(),
        format!(
            "{}: the upper belongs to the image base.bcow (070707070707), \
             not to other.bcow (abababababab)",
            dir.path().display()
        )
    );
    // The refused attempt has changed nothing.
    drop(begin(dir.path()));
}

#[test]
fn records_that_are_newer_or_damaged_are_refused() {
    let dir = TempDir::new().unwrap();
    drop(begin(dir.path()));
    let record = dir.path().join(".bcow/instance.json");
    let text = fs::read_to_string(&record).unwrap();
    let cases = [
        (
            text.replace("instance/1", "instance/9"),
            "unknown schema \"bcow.instance/9\"",
        ),
        (text.replace("0707", "07"), "its image is not an identity"),
        (text.replace("schema", "scheme"), "it names no schema"),
        (
            text.replace("image_name", "name"),
            "missing field `image_name`",
        ),
        (text[..40].to_string(), "EOF"),
        (" ".repeat(70_000), "longer than 65536 bytes"),
    ];
    for (text, expected) in cases {
        fs::write(&record, text).unwrap();
        let refused = refusal(dir.path()).to_string();
        assert!(refused.contains(expected), "{refused}");
        assert!(refused.contains("instance.json"), "{refused}");
        assert!(UpperReader::open(dir.path()).is_err());
    }
    fs::remove_file(&record).unwrap();
    fs::create_dir(&record).unwrap();
    let refused = refusal(dir.path()).to_string();
    assert!(refused.contains("not a regular file"), "{refused}");
}

#[test]
fn one_writer_or_many_readers() {
    let dir = TempDir::new().unwrap();
    let instance = begin(dir.path());
    let expected = format!("{}: it is being written by {NOTE}", dir.path().display());
    assert_eq!(refusal(dir.path()).to_string(), expected);
    let refused = UpperReader::open(dir.path()).unwrap_err();
    assert_eq!(refused.to_string(), expected);
    let refused = Instance::open_existing(dir.path(), NOTE).unwrap_err();
    assert_eq!(refused.to_string(), expected);
    drop(instance);

    let first = UpperReader::open(dir.path()).unwrap();
    let second = UpperReader::open(dir.path()).unwrap();
    assert_eq!(second.record().unwrap().image_name, "base.bcow");
    assert!(matches!(refusal(dir.path()), UpperError::InUse { .. }));
    drop((first, second));
    Instance::open_existing(dir.path(), NOTE).unwrap();
}

#[test]
fn an_upper_inside_one_in_use_or_around_it_is_refused_by_both_names() {
    let dir = TempDir::new().unwrap();
    let used = dir.path().join("used");
    let inside = used.join("a/b");
    fs::create_dir_all(&inside).unwrap();
    let holder = format!("it is being written by {NOTE}");
    let instance = begin(&used);
    let link = dir.path().join("link");
    symlink(used.join("a"), &link).unwrap();
    let places = [
        used.join("new"),
        used.join("a"),
        inside.clone(),
        used.join(".bcow/work"),
        link.join("b"),
        link.join("new"),
    ];
    for path in &places {
        assert_eq!(
            refusal(path).to_string(),
            format!(
                "{}: inside the upper {}: {holder}",
                path.display(),
                used.display()
            )
        );
        assert!(!path.join(".bcow").exists(), "{}", path.display());
    }
    assert!(!used.join("new").exists());
    assert_eq!(
        refusal(dir.path()).to_string(),
        format!(
            "{}: contains the upper {}: {holder}",
            dir.path().display(),
            used.display()
        )
    );
    assert!(!dir.path().join(".bcow").exists());
    // A sibling directory is accepted, even if its name starts with the same characters.
    drop(begin(&dir.path().join("used-too")));
    drop(instance);
    // The inner upper is no longer in use.
    let instance = begin(&inside);
    let refused = refusal(&used);
    assert!(matches!(refused, UpperError::Around { .. }), "{refused}");
    drop(instance);
    drop(begin(&used));
}

#[test]
fn of_an_upper_and_one_inside_it_that_begin_together_one_is_refused() {
    for _ in 0..200 {
        let dir = TempDir::new().unwrap();
        let outer = dir.path().join("outer");
        let inner = outer.join("inner");
        let begun = std::thread::scope(|scope| {
            let outer_one = scope.spawn(|| Instance::open(&outer, IMAGE, NOTE).ok());
            let inner_one = scope.spawn(|| {
                let _ = fs::create_dir(&outer);
                Instance::open(&inner, IMAGE, NOTE).ok()
            });
            [outer_one.join().unwrap(), inner_one.join().unwrap()]
        });
        assert!(begun.iter().flatten().count() < 2);
    }
}

#[test]
fn work_directory_is_emptied_of_objects_of_each_type() {
    let dir = TempDir::new().unwrap();
    drop(begin(dir.path()));
    let work = dir.path().join(".bcow/work");
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("kept"), "x").unwrap();
    symlink(&outside, work.join("link")).unwrap();
    fs::write(work.join("file"), "x").unwrap();
    fs::write(work.join("up0"), "x").unwrap();
    // Deeper than the longest path.
    let mut at = rustix::fs::open(&work, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
    let name = "d".repeat(200);
    for _ in 0..60 {
        rustix::fs::mkdirat(&at, &*name, 0o755.into()).unwrap();
        let below = rustix::fs::openat(&at, &*name, OFlags::PATH, Mode::empty()).unwrap();
        rustix::fs::mknodat(&at, "white", FileType::CharacterDevice, 0.into(), 0).unwrap();
        rustix::fs::symlinkat(&outside, &at, "link2").unwrap();
        at = below;
    }
    fs::create_dir_all(work.join("wide/a/b")).unwrap();
    fs::create_dir_all(work.join("wide/c/b")).unwrap();
    fs::set_permissions(work.join("wide/a"), fs::Permissions::from_mode(0o0)).unwrap();
    let instance = begin(dir.path());
    assert_eq!(count(&work), 0);
    assert!(outside.join("kept").exists());
    drop(instance);
}

#[test]
fn temporaries_take_their_place_or_go() {
    let dir = TempDir::new().unwrap();
    let instance = begin(dir.path());
    let (temporary, _file) = instance.temporary_file(0o600).unwrap();
    drop(temporary);
    let (temporary, _dir) = instance.temporary_directory().unwrap();
    drop(temporary);
    drop(instance.temporary_symlink(b"x").unwrap());
    drop(instance.temporary_node(FileType::Fifo, 0o600, 0).unwrap());
    let work = dir.path().join(".bcow/work");
    assert_eq!(count(&work), 0);

    let (temporary, _file) = instance.temporary_file(0o600).unwrap();
    temporary.place_new(instance.root(), b"a").unwrap();
    let (temporary, _file) = instance.temporary_file(0o600).unwrap();
    let placed = temporary.place_new(instance.root(), b"a");
    assert_eq!(placed.unwrap_err(), Errno::EXIST);
    assert_eq!(count(&work), 0);
    let (temporary, _file) = instance.temporary_file(0o600).unwrap();
    temporary.place(instance.root(), b"a").unwrap();
    assert!(dir.path().join("a").exists());
    assert_eq!(count(&work), 0);
}

#[test]
fn whiteouts_take_the_place_of_anything() {
    let dir = TempDir::new().unwrap();
    let instance = begin(dir.path());
    let root = instance.root();
    fs::write(dir.path().join("file"), "x").unwrap();
    fs::create_dir(dir.path().join("dir")).unwrap();
    rustix::fs::mknodat(root, "dir/white", FileType::CharacterDevice, 0.into(), 0).unwrap();
    let places = [
        ("nothing", None),
        ("file", Some(FileType::RegularFile)),
        ("dir", Some(FileType::Directory)),
    ];
    for (name, present) in places {
        instance
            .place_whiteout(root, name.as_bytes(), present)
            .unwrap();
        let stat = rustix::fs::statat(root, name, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        assert!(is_whiteout(&stat), "{name}");
        let metadata = fs::metadata(dir.path().join(name)).unwrap();
        assert!(metadata.file_type().is_char_device());
    }
    let work = dir.path().join(".bcow/work");
    // The whiteout that is kept for further links, and the spare one.
    assert_eq!(count(&work), 2);
    fs::create_dir(dir.path().join("gone")).unwrap();
    fs::write(dir.path().join("gone/file"), "x").unwrap();
    drop(
        instance
            .move_to_work(root, b"gone", FileType::Directory)
            .unwrap(),
    );
    assert!(!dir.path().join("gone").exists());
    assert_eq!(count(&work), 2);
    drop(instance);
    assert_eq!(count(&work), 0);
}

#[test]
fn whiteouts_share_an_inode_as_long_as_the_host_permits() {
    let dir = TempDir::new().unwrap();
    let instance = begin(dir.path());
    let root = instance.root();
    instance.prepare_whiteouts();
    let mut inodes = std::collections::HashSet::new();
    // More links than an inode of ext4 can have.
    for index in 0..65_100 {
        let name = format!("{index}");
        let present = match index % 1000 {
            0 => {
                fs::write(dir.path().join(&name), "x").unwrap();
                Some(FileType::RegularFile)
            }
            1 => {
                fs::create_dir(dir.path().join(&name)).unwrap();
                Some(FileType::Directory)
            }
            _ => None,
        };
        instance
            .place_whiteout(root, name.as_bytes(), present)
            .unwrap();
        let stat = rustix::fs::statat(root, &*name, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        assert!(is_whiteout(&stat));
        inodes.insert(stat.st_ino);
    }
    assert!(inodes.len() <= 2, "{}", inodes.len());
}

#[test]
fn marks_are_read_on_objects_of_each_type() {
    let dir = TempDir::new().unwrap();
    let instance = begin(dir.path());
    let (root, namespace) = (instance.root(), instance.namespace());
    let origin = Origin {
        uuid: [3; 16],
        nid: 99,
    };
    fs::write(dir.path().join("file"), "x").unwrap();
    fs::create_dir(dir.path().join("dir")).unwrap();
    symlink("nowhere", dir.path().join("link")).unwrap();
    for name in ["file", "dir", "link"] {
        if name == "link" && namespace == Namespace::User {
            continue;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = rustix::fs::openat(root, name, flags, Mode::empty()).unwrap();
        let at = Attribute::Path(path.as_fd());
        assert_eq!(Marks::read(at, namespace).unwrap(), Marks::default());
        Mark::Origin.set(at, namespace, &origin.encode()).unwrap();
        let value = Metacopy::Partial.encode().unwrap();
        Mark::Metacopy.set(at, namespace, value).unwrap();
        let expected = Marks {
            origin: Some(origin),
            metacopy: Metacopy::Partial,
            ..Marks::default()
        };
        assert_eq!(Marks::read(at, namespace).unwrap(), expected);
        let named = Attribute::Named(root, name.as_bytes());
        assert_eq!(Marks::read(named, namespace).unwrap(), expected);
        assert!(Mark::Metacopy.clear(named, namespace).unwrap());
        assert!(!Mark::Metacopy.clear(named, namespace).unwrap());
    }
    let file = fs::File::open(dir.path().join("file")).unwrap();
    let at = Attribute::Open(file.as_fd());
    assert_eq!(Marks::read(at, namespace).unwrap().origin, Some(origin));
    Mark::Partial.set(at, namespace, b"nonsense").unwrap();
    let error = Marks::read(at, namespace).unwrap_err().to_string();
    assert_eq!(error, "its attribute bcow.sketch is damaged: nonsense");
}

#[test]
fn attributes_of_any_length_are_read() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("file"), "x").unwrap();
    let root = fs::File::open(dir.path()).unwrap();
    let at = Attribute::Named(root.as_fd(), b"file");
    for length in [0usize, 1, 256, 257, 3000] {
        let value = vec![b'v'; length];
        at.set(b"user.long", &value, XattrMode::Any).unwrap();
        assert_eq!(at.get(b"user.long").unwrap(), Some(value));
    }
    at.remove(b"user.long").unwrap();
    let names: Vec<CString> = (0..12)
        .map(|n| CString::new(format!("user.{}{n}", "n".repeat(60))).unwrap())
        .collect();
    for name in &names {
        at.set(name.as_bytes(), b"", XattrMode::Create).unwrap();
    }
    let list = at.list().unwrap();
    assert_eq!(list.split(|&byte| byte == 0).count(), 13);
    assert_eq!(at.get(b"user.none").unwrap(), None);
    for name in [&b""[..], b".", b"..", b"a/b"] {
        let at = Attribute::Named(root.as_fd(), name);
        assert_eq!(at.get(b"user.x"), Err(Errno::INVAL));
    }
}

/// Runs `run` in a thread without the capability that `trusted.*` attributes need.
fn without_privilege<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut all = rustix::thread::capabilities(None).unwrap();
            all.effective.remove(CapabilitySet::SYS_ADMIN);
            all.permitted.remove(CapabilitySet::SYS_ADMIN);
            rustix::thread::set_capabilities(None, all).unwrap();
            run()
        });
        thread.join().unwrap()
    })
}

#[test]
fn marks_that_this_user_cannot_see_are_not_taken_for_missing() {
    if lacks("root", rustix::process::geteuid().is_root()) {
        return;
    }
    let dir = TempDir::new().unwrap();
    let bare = UpperReader::open(dir.path()).unwrap();
    assert_eq!(bare.names().namespace, Namespace::Trusted);
    // The names that overlayfs uses for this user.
    let bare = without_privilege(|| UpperReader::open(dir.path()).unwrap());
    assert_eq!(bare.names().namespace, Namespace::User);
    drop(bare);
    assert_eq!(begin(dir.path()).namespace(), Namespace::Trusted);
    UpperReader::open(dir.path()).unwrap();
    let refused = without_privilege(|| UpperReader::open(dir.path()).unwrap_err());
    assert!(
        matches!(refused, UpperError::NamespaceDenied { .. }),
        "{refused}"
    );
}

#[test]
fn object_at_the_name_of_the_temporary_record_is_replaced() {
    let dir = TempDir::new().unwrap();
    let meta = dir.path().join(".bcow");
    fs::create_dir(&meta).unwrap();
    let kind = FileType::Fifo;
    let mode = Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(CWD, meta.join("instance.json.new"), kind, mode, 0).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let path = dir.path().to_owned();
    std::thread::spawn(move || sender.send(Instance::open(&path, IMAGE, NOTE).map(drop)));
    let opened = receiver.recv_timeout(Duration::from_secs(20));
    opened.expect("it hangs").unwrap();
    assert_eq!(begin(dir.path()).provenance(), Provenance::Existing);
}
