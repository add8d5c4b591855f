//! Chains of disks: which ones open, and which ones are rejected with the name of the file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::chain::{
    ChainCause, ChainProblem, MAX_DEPTH, NoDigests, NoUrls, NoViews, Opener, Policy, Share,
};
use bcow::format::{BackingEntry, BackingName};
use bcow::{
    BlockDevice, CreateOptions, Disk, Error, Image, MemoryStorage, OpenOptions, WritableDevice,
};

const SIZE: u64 = 1 << 20;

fn policy(directories: &[PathBuf]) -> Policy<'_> {
    Policy {
        directories,
        digests: &NoDigests,
        urls: &NoUrls,
        views: &NoViews,
        share: Share::Lock,
        options: OpenOptions::default(),
    }
}

fn create_file(path: &Path) -> Arc<File> {
    let mut options = File::options();
    options.read(true).write(true).create_new(true);
    Arc::new(options.open(path).unwrap())
}

/// Creates a disk over `backing` and records the identity of the backing.
fn create(path: &Path, backing: Option<&Path>) -> Disk {
    let storage = create_file(path);
    let backing = backing.map(|backing| {
        let image = open(backing).unwrap();
        (entry(backing, &image), image as Arc<dyn BlockDevice>)
    });
    let options = OpenOptions::default();
    Disk::create(storage, &CreateOptions::disk(SIZE), backing, &options).unwrap()
}

fn entry(path: &Path, image: &Image) -> BackingEntry {
    BackingEntry {
        name: BackingName::FileName {
            name: path.file_name().unwrap().to_str().unwrap().to_owned(),
            identity: Some(image.identity_hash()),
        },
        size: image.size(),
    }
}

/// Opens a chain for reading; fails with the problems of the chain.
fn open(path: &Path) -> Result<Arc<Image>, Vec<Arc<ChainProblem>>> {
    open_with(path, &[])
}

fn open_with(path: &Path, directories: &[PathBuf]) -> Result<Arc<Image>, Vec<Arc<ChainProblem>>> {
    let opener = Opener::new(path, policy(directories));
    let file = Arc::new(File::open(path).unwrap());
    let options = OpenOptions::default();
    let image = Image::open_with_backings(file, &options, &opener).unwrap();
    match &opener.problems()[..] {
        [] => Ok(image),
        problems => Err(problems.to_vec()),
    }
}

fn problem(path: &Path) -> String {
    let problems = open(path).err().expect("a problem");
    let text = problems[0].to_string();
    let directory = path.parent().unwrap().canonicalize().unwrap();
    text.replace(directory.to_str().unwrap(), "DIR")
}

#[test]
fn a_disk_reads_through_its_chain() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for (index, name) in ["a", "b", "c"].iter().enumerate() {
        let below = index.checked_sub(1).map(|i| path(["a", "b", "c"][i]));
        let disk = create(&path(name), below.as_deref());
        disk.write_at(index as u64 * 4096, &[index as u8 + 1; 4096])
            .unwrap();
        disk.close().unwrap();
    }
    let opener = Opener::new(&path("c"), policy(&[]));
    let file = Arc::new(File::open(path("c")).unwrap());
    let image = Image::open_with_backings(file, &OpenOptions::default(), &opener).unwrap();
    let names: Vec<String> = opener.files().into_iter().map(|file| file.name).collect();
    assert_eq!(names, ["b", "a"]);
    let mut buf = [0; 3 * 4096];
    image.read_at(0, &mut buf).unwrap();
    assert_eq!([buf[0], buf[4096], buf[8192]], [1, 2, 3]);
    assert_eq!(image.status(0, 1).unwrap().depth, 3);
}

#[test]
fn a_backing_that_is_not_what_it_was_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    create(&path("base"), None).close().unwrap();
    create(&path("top"), Some(&path("base"))).close().unwrap();
    open(&path("top")).unwrap();

    let kept = std::fs::read(path("base")).unwrap();
    let disk = create(&path("other"), None);
    disk.write_at(0, &[1]).unwrap();
    disk.close().unwrap();
    std::fs::rename(path("other"), path("base")).unwrap();
    let changed = "backing base: DIR/base has changed since it was made the backing";
    assert_eq!(problem(&path("top")), changed);

    std::fs::remove_file(path("base")).unwrap();
    let disk = Disk::create_alone(create_file(&path("base")), &CreateOptions::disk(4096)).unwrap();
    disk.close().unwrap();
    assert_eq!(
        problem(&path("top")),
        "backing base: DIR/base has 4096 bytes, not 1048576 as when it was made the backing"
    );

    std::fs::write(path("base"), b"QFI\xfb something else").unwrap();
    assert!(problem(&path("top")).starts_with("backing base: cannot open DIR/base: "));

    std::fs::remove_file(path("base")).unwrap();
    assert_eq!(problem(&path("top")), "backing base is not in DIR");
    std::fs::create_dir(path("base")).unwrap();
    assert_eq!(
        problem(&path("top")),
        "backing base: DIR/base is a directory"
    );
    std::fs::remove_dir(path("base")).unwrap();
    std::fs::create_dir(path("elsewhere")).unwrap();
    std::fs::write(path("elsewhere/base"), kept).unwrap();
    std::os::unix::fs::symlink("elsewhere/base", path("base")).unwrap();
    assert_eq!(
        problem(&path("top")),
        "backing base: DIR/base is a symbolic link"
    );

    // The file is found in the directory of the user.
    std::fs::remove_file(path("base")).unwrap();
    open_with(&path("top"), &[path("elsewhere")]).unwrap();
}

#[test]
fn a_backing_that_is_written_is_refused_and_one_that_is_read_is_not_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    create(&path("base"), None).close().unwrap();
    create(&path("top"), Some(&path("base"))).close().unwrap();
    let mut options = File::options();
    let file = options.read(true).write(true).open(path("base")).unwrap();
    let lock = bcow::lock::FileLock::exclusive(&file, "bcow serve, process 7").unwrap();
    assert_eq!(
        problem(&path("top")),
        "backing base: cannot read DIR/base: it is being written by bcow serve, process 7"
    );
    drop((lock, file));
    let image = open(&path("top")).unwrap();
    let file = options.open(path("base")).unwrap();
    assert!(bcow::lock::FileLock::exclusive(&file, "x").is_err());
    drop(image);
    bcow::lock::FileLock::exclusive(&file, "x").unwrap();
}

/// Opens and reads the longest chain in a thread with a small stack, as a server has them.
#[test]
fn chains_end_at_the_limit_and_in_no_circle() {
    let directory = tempfile::tempdir().unwrap();
    let path = |index: u32| directory.path().join(format!("disk-{index}"));
    let name = |index: u32| format!("disk-{index}");
    let mut disk = Arc::new(create(&path(0), None));
    disk.write_at(4096, &[7; 4096]).unwrap();
    for index in 1..=MAX_DEPTH {
        disk.checkpoint().unwrap();
        let storage = create_file(&path(index));
        disk = Arc::new(disk.create_over(name(index - 1), storage, None).unwrap());
    }
    // As a disk that got snapshots while it was served, and as one that is opened.
    let is_right = |device: &dyn BlockDevice| {
        let mut found = [0; 8192];
        device.read_at(0, &mut found).unwrap();
        assert!(found[..4096] == [0; 4096] && found[4096..] == [7; 4096]);
        assert_eq!(device.status(4096, 1).unwrap().depth, MAX_DEPTH + 1);
    };
    let with_small_stack = |bytes, work: &(dyn Fn() + Sync)| {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(bytes);
            thread.spawn_scoped(scope, work).unwrap().join().unwrap();
        });
    };
    with_small_stack(512 << 10, &|| is_right(&*disk));
    drop(disk);
    let image = open(&path(MAX_DEPTH)).unwrap();
    with_small_stack(512 << 10, &|| is_right(&*image));
    // One more file exceeds the limit. Creating this disk does not open its backing.
    let below = Arc::new(vec![0u8; SIZE as usize]);
    let backing = (
        entry(&path(MAX_DEPTH), &image),
        below as Arc<dyn BlockDevice>,
    );
    drop(image);
    let storage = create_file(&path(MAX_DEPTH + 1));
    let options = OpenOptions::default();
    let disk = Disk::create(storage, &CreateOptions::disk(SIZE), Some(backing), &options).unwrap();
    disk.close().unwrap();
    let problems = open(&path(MAX_DEPTH + 1)).err().unwrap();
    assert!(matches!(problems[0].cause, ChainCause::TooDeep));

    let circle = directory.path().join("circle");
    let nameless = BackingEntry {
        name: BackingName::FileName {
            name: "circle".into(),
            identity: None,
        },
        size: SIZE,
    };
    let below = Arc::new(vec![0u8; SIZE as usize]) as Arc<dyn BlockDevice>;
    let storage = create_file(&circle);
    let backing = Some((nameless, below));
    Disk::create(storage, &CreateOptions::disk(SIZE), backing, &options)
        .and_then(Disk::close)
        .unwrap();
    let problems = open(&circle).err().unwrap();
    assert!(matches!(problems[0].cause, ChainCause::TooDeep));
}

#[test]
fn a_chain_without_its_end_fails_only_where_that_is_needed() {
    let storage = Arc::new(MemoryStorage::default());
    let below = Arc::new(vec![1u8; SIZE as usize]) as Arc<dyn BlockDevice>;
    let entry = BackingEntry {
        name: BackingName::Digest([1; 32]),
        size: SIZE,
    };
    let options = OpenOptions::default();
    let made = CreateOptions::disk(SIZE);
    let disk = Disk::create(storage.clone(), &made, Some((entry, below)), &options).unwrap();
    disk.write_at(0, &[2; 4096]).unwrap();
    disk.close().unwrap();
    let opener = Opener::new(Path::new("nowhere"), policy(&[]));
    let image = Image::open_with_backings(storage, &options, &opener).unwrap();
    assert!(matches!(opener.problems()[0].cause, ChainCause::NoDigest));
    image.read_at(0, &mut [0; 4096]).unwrap();
    let error = image.read_at(4096, &mut [0; 4096]).unwrap_err();
    assert!(matches!(error, Error::MissingBacking { .. }));
}
