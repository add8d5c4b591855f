//! Uppers of the kernel driver on the host: beginning, continuing and refusing them.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use bcow_union::{
    DiskInstance, DiskReader, Driver, FileSystem, ImageName, Instance, SyncPolicy, UpperError,
    UpperReader, driver_of,
};
use tempfile::TempDir;

const IMAGE: ImageName<'_> = ImageName {
    identity: [7; 32],
    name: "base.bcow",
};
const NOTE: &str = "a test, process 1";
const SIZE: u64 = 8 << 20;

fn open(path: &Path) -> Result<DiskInstance, UpperError> {
    DiskInstance::open(path, IMAGE, NOTE)
}

fn refusal(path: &Path) -> UpperError {
    open(path).unwrap_err()
}

fn make_disk(instance: &mut DiskInstance, content: &[u8]) {
    let new = instance.new_disk().unwrap();
    new.file().write_all_at(content, 0).unwrap();
    new.file().set_len(4096).unwrap();
    instance.complete_disk(new, NOTE).unwrap();
}

fn begin(path: &Path) -> DiskInstance {
    let mut instance = open(path).unwrap();
    make_disk(&mut instance, b"disk");
    instance.complete(FileSystem::Ext4, SIZE, IMAGE).unwrap();
    instance
}

fn content(instance: &DiskInstance) -> Vec<u8> {
    let mut found = vec![0; 4];
    instance.disk().unwrap().read_at(0, &mut found).unwrap();
    found
}

#[test]
fn a_complete_upper_is_continued() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("upper");
    assert_eq!(driver_of(&path).unwrap(), None);
    drop(begin(&path));
    assert_eq!(driver_of(&path).unwrap(), Some(Driver::Kernel));
    for file in ["instance.json", "disk.bcow", "lock"] {
        let mode = fs::metadata(path.join(".bcow").join(file)).unwrap().mode();
        assert_eq!(mode & 0o7777, 0o600, "{file}");
    }
    let instance = open(&path).unwrap();
    let record = instance.record().unwrap();
    assert_eq!((record.size, record.fs), (SIZE, FileSystem::Ext4));
    assert_eq!(record.identity(), Some([7; 32]));
    assert_eq!(content(&instance), b"disk");
    drop(instance);
    let reader = DiskReader::open(&path).unwrap();
    assert_eq!(reader.record().image_name, "base.bcow");
    assert_eq!(reader.disk_path(), path.join(".bcow/disk.bcow"));
}

#[test]
fn an_interrupted_begin_is_completed_and_keeps_its_disk() {
    let dir = TempDir::new().unwrap();
    // Killed with the lock only: nothing says which driver it was.
    drop(open(dir.path()).unwrap());
    assert_eq!(driver_of(dir.path()).unwrap(), None);
    fs::write(dir.path().join(".bcow/.bcow-1-0.part"), "half").unwrap();
    // Killed before the record.
    let mut instance = open(dir.path()).unwrap();
    assert!(instance.disk().is_none());
    make_disk(&mut instance, b"kept");
    drop(instance);
    assert!(!dir.path().join(".bcow/.bcow-1-0.part").exists());
    assert_eq!(driver_of(dir.path()).unwrap(), Some(Driver::Kernel));
    let refused = DiskReader::open(dir.path()).unwrap_err();
    assert!(
        matches!(refused, UpperError::Incomplete { .. }),
        "{refused}"
    );
    let mut instance = open(dir.path()).unwrap();
    assert_eq!(instance.record(), None);
    assert_eq!(content(&instance), b"kept");
    instance.complete(FileSystem::Ext4, SIZE, IMAGE).unwrap();
    DiskReader::open(dir.path()).unwrap_err();
    drop(instance);
    DiskReader::open(dir.path()).unwrap();
}

#[test]
fn each_driver_refuses_the_uppers_of_the_other() {
    let dir = TempDir::new().unwrap();
    let (kernel, half, fuse) = (
        dir.path().join("kernel"),
        dir.path().join("half"),
        dir.path().join("fuse"),
    );
    drop(begin(&kernel));
    make_disk(&mut open(&half).unwrap(), b"disk");
    for path in [&kernel, &half] {
        let before = fs::read_dir(path.join(".bcow")).unwrap().count();
        let refusals = [
            Instance::open(path, IMAGE, NOTE).unwrap_err(),
            Instance::open_existing(path, NOTE).unwrap_err(),
            UpperReader::open(path).unwrap_err(),
        ];
        for refused in refusals {
            let expected = format!("{}: the upper belongs to the kernel driver", path.display());
            assert_eq!(refused.to_string(), expected);
        }
        assert_eq!(fs::read_dir(path.join(".bcow")).unwrap().count(), before);
    }
    drop(Instance::open(&fuse, IMAGE, NOTE).unwrap());
    let expected = format!("{}: the upper belongs to the FUSE driver", fuse.display());
    assert_eq!(refusal(&fuse).to_string(), expected);
    let refused = DiskReader::open(&fuse).unwrap_err();
    assert_eq!(refused.to_string(), expected);
    assert_eq!(driver_of(&fuse).unwrap(), Some(Driver::Fuse));
}

#[test]
fn a_directory_with_files_is_no_new_upper_and_stays_as_it_is() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("file"), "content").unwrap();
    let refused = refusal(dir.path());
    assert!(matches!(refused, UpperError::NotEmpty { .. }), "{refused}");
    assert!(!dir.path().join(".bcow").exists());
    assert_eq!(driver_of(dir.path()).unwrap(), None);
}

#[test]
fn one_writer_or_many_readers() {
    let dir = TempDir::new().unwrap();
    let instance = begin(dir.path());
    let expected = format!("{}: it is being written by {NOTE}", dir.path().display());
    assert_eq!(refusal(dir.path()).to_string(), expected);
    let refused = DiskReader::open(dir.path()).unwrap_err();
    assert_eq!(refused.to_string(), expected);
    drop(instance);
    let readers = [
        DiskReader::open(dir.path()).unwrap(),
        DiskReader::open(dir.path()).unwrap(),
    ];
    assert!(matches!(refusal(dir.path()), UpperError::InUse { .. }));
    drop(readers);
    // A program that has only the disk open.
    let disk = fs::File::open(dir.path().join(".bcow/disk.bcow")).unwrap();
    bcow::lock::FileLock::shared(&disk).unwrap();
    assert!(matches!(refusal(dir.path()), UpperError::InUse { .. }));
    drop(disk);
    open(dir.path()).unwrap();
}

#[test]
fn another_image_and_damage_are_refused() {
    let dir = TempDir::new().unwrap();
    drop(begin(dir.path()));
    let other = ImageName {
        identity: [8; 32],
        name: "other.bcow",
    };
    let refused = DiskInstance::open(dir.path(), other, NOTE).unwrap_err();
    assert!(
        matches!(refused, UpperError::AnotherImage { .. }),
        "{refused}"
    );
    let meta = dir.path().join(".bcow");
    let (disk, record) = (meta.join("disk.bcow"), meta.join("instance.json"));
    let good = fs::read_to_string(&record).unwrap();
    for (text, expected) in [
        (good.replace("instance/2", "instance/3"), "unknown schema"),
        (
            good.replace("\"kernel\"", "\"fuse\""),
            "its driver has another schema",
        ),
        (good.replace("ext4", "xfs"), "unknown variant"),
        (good.replace("0707", "x707"), "not an identity"),
        ("{".to_owned(), "EOF"),
    ] {
        fs::write(&record, &text).unwrap();
        let refused = refusal(dir.path()).to_string();
        assert!(refused.contains(expected), "{refused}");
        UpperReader::open(dir.path()).unwrap_err();
    }
    fs::write(&record, good).unwrap();
    let away = dir.path().join("away");
    fs::rename(&disk, &away).unwrap();
    assert!(refusal(dir.path()).to_string().contains("it is missing"));
    // Links are not followed.
    symlink(&away, &disk).unwrap();
    let refused = refusal(dir.path()).to_string();
    assert!(refused.contains("not a regular file"), "{refused}");
    DiskReader::open(dir.path()).unwrap_err();
    fs::rename(&away, &disk).unwrap();
    open(dir.path()).unwrap();
}

#[test]
fn a_disk_that_others_can_have_written_is_refused_for_writing_only() {
    let dir = TempDir::new().unwrap();
    drop(begin(dir.path()));
    for name in [".bcow", ".bcow/disk.bcow"] {
        let path = dir.path().join(name);
        let mode = fs::metadata(&path).unwrap().permissions();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode.mode() | 0o020)).unwrap();
        let refused = refusal(dir.path());
        assert!(matches!(refused, UpperError::Foreign { .. }), "{refused}");
        DiskReader::open(dir.path()).unwrap();
        fs::set_permissions(&path, mode).unwrap();
    }
    open(dir.path()).unwrap();
}

#[test]
fn a_volatile_use_that_a_reboot_cut_short_is_lost() {
    let dir = TempDir::new().unwrap();
    let note = dir.path().join(".bcow/volatile");
    let instance = begin(dir.path());
    instance
        .refuse_after_volatile(SyncPolicy::Volatile)
        .unwrap();
    assert!(note.exists());
    drop(instance);
    // Killed: the host still has all data.
    assert!(!DiskReader::open(dir.path()).unwrap().is_lost().unwrap());
    let instance = open(dir.path()).unwrap();
    instance.refuse_after_volatile(SyncPolicy::Strict).unwrap();
    assert!(!note.exists());
    instance
        .refuse_after_volatile(SyncPolicy::Volatile)
        .unwrap();
    instance.forget_volatile().unwrap();
    assert!(!note.exists());
    fs::write(&note, "another boot").unwrap();
    let refused = instance
        .refuse_after_volatile(SyncPolicy::Strict)
        .unwrap_err();
    assert!(matches!(refused, UpperError::Volatile { .. }), "{refused}");
    drop(instance);
    assert!(DiskReader::open(dir.path()).unwrap().is_lost().unwrap());
}
