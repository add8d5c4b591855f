//! Operations on whole disks, as a program calls them: commit into the backing, rebase, rewrite,
//! compare; with power cuts, cancellation and failing hosts.

use std::cell::Cell;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use bcow::chain::{ChainCause, MAX_DEPTH, NoDigests, NoUrls, NoViews, Opener, Policy, Share};
use bcow::format::{BackingEntry, BackingName};
use bcow::operation::{
    CommitError, CompareError, Monitor, NameError, OperationError, Phase, RewriteOptions,
    SnapshotError, absorb_backing, commit, commit_into_backing, compare, name_backing, open_over,
    rebase, rebase_reference, rewrite, snapshot,
};
use bcow::{
    BackingResolver, BlockDevice, Compression, CreateOptions, Disk, Error, Image, Keep, Layout,
    LockFileError, LockedFile, MemoryStorage, NewFile, NewFileError, OneBacking, OpenOptions,
    Space, Storage, UnreadBackings, WritableDevice, snapshot_time,
};
use bcow_testkit::{Fault, Faulty, On, PowerCut, Random, Window, assert_sound, changed, content};

const KIB: u64 = 1024;

fn options() -> OpenOptions {
    OpenOptions::default()
}

fn create(size: u64, layout: Layout) -> CreateOptions {
    CreateOptions {
        layout,
        // A small log, which makes small files.
        log_bytes: 256 << 10,
        ..CreateOptions::disk(size)
    }
}

fn named(identity: Option<[u8; 32]>, size: u64) -> BackingEntry {
    BackingEntry {
        name: BackingName::FileName {
            name: "base".into(),
            identity,
        },
        size,
    }
}

/// Opens two storages for a commit.
fn open_both(base: Arc<dyn Storage>, top: Arc<dyn Storage>) -> (Disk, Arc<Disk>) {
    let open = || Disk::open(base, &options(), &UnreadBackings).map_err(CommitError::Disk);
    open_over(top, &options(), open).unwrap()
}

/// The end of the writer of a base.
#[derive(Clone, Copy)]
enum End {
    Close,
    /// The writer is killed, so that the log has records.
    Kill,
}

/// A disk over a writable one, and what it shows.
struct Pair {
    base: Vec<u8>,
    top: Vec<u8>,
    shown: Vec<u8>,
}

/// The top has data, zeros and parts of blocks of its own, some of them behind the end of the base.
fn pair(base_bytes: u64, top_bytes: u64, layout: Layout) -> Pair {
    pair_over(base_bytes, top_bytes, layout, End::Close)
}

fn pair_over(base_bytes: u64, top_bytes: u64, layout: Layout, end: End) -> Pair {
    let storage = Arc::new(MemoryStorage::default());
    let base = Disk::create_alone(storage.clone(), &create(base_bytes, layout)).unwrap();
    base.write_at(0, &vec![1; base_bytes as usize - 20_000])
        .unwrap();
    match end {
        End::Close => base.close().unwrap(),
        End::Kill => base.flush().unwrap(),
    }
    let image = Image::open_storage(storage.clone(), &options()).unwrap();
    let entry = named(Some(image.identity_hash()), base_bytes);
    let backing = Some((entry, image as Arc<dyn BlockDevice>));
    let top_storage = Arc::new(MemoryStorage::default());
    let made = create(top_bytes, layout);
    let top = Disk::create(top_storage.clone(), &made, backing, &options()).unwrap();
    top.write_at(5000, &[2; 100]).unwrap();
    top.write_at(40 * KIB, &vec![3; 20 << 10]).unwrap();
    top.write_zeroes(80 * KIB, 16 * KIB, Space::Free).unwrap();
    top.write_at(top_bytes - 8192, &[4; 4096]).unwrap();
    top.flush().unwrap();
    let shown = content(&top);
    top.close().unwrap();
    Pair {
        base: storage.to_vec(),
        top: top_storage.to_vec(),
        shown,
    }
}

/// A storage whose operations have a place in the order of the operations of several storages.
pub(crate) struct Ordered {
    pub(crate) cut: PowerCut,
    pub(crate) number: usize,
    pub(crate) order: Arc<Mutex<Vec<usize>>>,
}

impl Ordered {
    fn in_order<T>(&self, operation: impl FnOnce() -> T) -> T {
        let mut order = self.order.lock().unwrap();
        order.push(self.number);
        operation()
    }

    /// The window of a cut after `count` operations, and the durable content at its start.
    fn window(&self, windows: &[(Window, Vec<u8>)], count: usize) -> (Window, Vec<u8>) {
        let last = windows.iter().rfind(|(w, _)| w.operations.start <= count);
        let (window, durable) = last.expect("the first window starts at 0").clone();
        let end = window.operations.end.min(count);
        let operations = window.operations.start..end;
        (Window { operations }, durable)
    }

    fn windows(&self) -> Vec<(Window, Vec<u8>)> {
        let mut windows = Vec::new();
        self.cut
            .walk(|window, durable| windows.push((window.clone(), durable.to_vec())));
        windows
    }
}

impl Storage for Ordered {
    bcow_testkit::forward!(cut: len, read_at);

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.in_order(|| self.cut.write_at(offset, bytes))
    }
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.in_order(|| self.cut.set_len(bytes))
    }
    fn sync(&self) -> io::Result<()> {
        self.in_order(|| self.cut.sync())
    }
    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.in_order(|| self.cut.punch(offset, bytes))
    }
}

/// Two storages with a common order of their operations.
fn ordered(files: [PowerCut; 2]) -> [Arc<Ordered>; 2] {
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut number = 0;
    files.map(|cut| {
        number += 1;
        Arc::new(Ordered {
            cut,
            number: number - 1,
            order: order.clone(),
        })
    })
}

/// Calls `look` with what a power cut at each moment leaves of two files, and with the number of
/// operations before it. At the start, the files had `counts` operations.
fn at_each_cut(
    files: &[Arc<Ordered>; 2],
    mut counts: [usize; 2],
    random: &mut Random,
    mut look: impl FnMut(usize, [&[u8]; 2], &mut Random),
) {
    let order = files[0].order.lock().unwrap().clone();
    let windows = [files[0].windows(), files[1].windows()];
    for (done, number) in order.iter().map(Some).chain([None]).enumerate() {
        // What a cut leaves at another moment, a cut before the next sync may leave too.
        let is_sync = number.is_none_or(|&number| {
            let is_end = |(window, _): &(Window, _)| window.operations.end == counts[number];
            windows[number].iter().any(is_end)
        });
        if is_sync {
            let [one, other] = [0, 1].map(|file| {
                let (window, durable) = files[file].window(&windows[file], counts[file]);
                let fates = files[file].cut.fates(&window, 2, 6, random);
                let after = |fates: &Vec<_>| files[file].cut.after(&durable, &window, fates);
                fates.iter().map(after).collect::<Vec<_>>()
            });
            for index in 0..one.len().max(other.len()) {
                let one = one.get(index).unwrap_or_else(|| random.pick(&one));
                let other = other.get(index).unwrap_or_else(|| random.pick(&other));
                look(done, [one, other], random);
            }
        }
        if let Some(&number) = number {
            counts[number] += 1;
        }
    }
}

/// Commits a disk with a power cut at each moment. The disk shows the same content after each of
/// them, and a second commit completes the first one. Returns the number of cuts between the growth
/// of the base and its record in the top.
fn cut_commits(pair: &Pair) -> u64 {
    let files = ordered([&pair.base, &pair.top].map(|bytes| PowerCut::new(bytes.clone())));
    let counts = [0, 1].map(|file: usize| files[file].cut.operations());
    let (disk, backing) = open_both(files[0].clone(), files[1].clone());
    assert!(commit(disk, &backing, &()).unwrap() > 0);
    Arc::into_inner(backing).expect("alone").close().unwrap();
    let (mut cuts, mut behind) = (0, 0);
    let look_again = |_, [base, top]: [&[u8]; 2], random: &mut Random| {
        let again = random.one_in(8);
        behind += u64::from(look(base, top, &pair.shown, again));
        cuts += 1;
    };
    at_each_cut(&files, counts, &mut Random::new(1), look_again);
    println!("{cuts} power cuts, {behind} of them between the two sizes");
    behind
}

/// Checks two files that a power cut left. Returns whether the size of the base is not yet recorded
/// in the top.
fn look(base: &[u8], top: &[u8], shown: &[u8], again: bool) -> bool {
    let base_storage = Arc::new(MemoryStorage::new(base.to_vec()));
    let top_storage = Arc::new(MemoryStorage::new(top.to_vec()));
    let base = Image::open_storage(base_storage.clone(), &options()).unwrap();
    let image = Image::open_with_backings(top_storage.clone(), &options(), &UnreadBackings);
    let image = image.unwrap();
    let entry = image.disk_backing().expect("a backing").clone();
    let BackingName::FileName { identity, .. } = entry.name else {
        panic!("a name");
    };
    assert!(identity.is_none_or(|identity| identity == base.identity_hash()));
    let behind = entry.size != base.size();
    if !behind {
        let resolver = OneBacking(Some(base));
        let disk = Image::open_with_backings(top_storage.clone(), &options(), &resolver).unwrap();
        assert!(content(&*disk) == shown);
    }
    if behind || again {
        let (disk, backing) = open_both(base_storage.clone(), top_storage.clone());
        assert!(content(&disk) == shown);
        commit(disk, &backing, &()).unwrap();
        assert!(content(&*backing)[..shown.len()] == *shown);
        Arc::into_inner(backing).expect("alone").close().unwrap();
        assert_sound(base_storage);
        assert_sound(top_storage);
    }
    behind
}

#[test]
fn a_power_cut_in_a_commit_changes_no_content() {
    for layout in [Layout::Space, Layout::Performance, Layout::Auto] {
        assert_eq!(cut_commits(&pair(256 * KIB, 256 * KIB, layout)), 0);
    }
}

#[test]
fn a_power_cut_in_a_commit_into_a_backing_with_a_log_changes_no_content() {
    let pair = pair_over(256 * KIB, 256 * KIB, Layout::Space, End::Kill);
    assert_eq!(cut_commits(&pair), 0);
}

#[test]
fn a_power_cut_while_the_backing_grows_is_completed_by_the_next_commit() {
    assert!(cut_commits(&pair(192 * KIB, 256 * KIB, Layout::Space)) > 0);
}

#[test]
fn a_power_cut_in_a_snapshot_changes_no_content() {
    for layout in [Layout::Space, Layout::Performance, Layout::Auto] {
        let base = pair(256 * KIB, 256 * KIB, layout).base;
        let files = ordered([PowerCut::new(base), PowerCut::default()]);
        let counts = [0, 1].map(|file: usize| files[file].cut.operations());
        let done = || files[0].order.lock().unwrap().len();
        let disk = Disk::open(files[0].clone(), &options(), &UnreadBackings);
        let disk = Arc::new(disk.unwrap());
        disk.write_at(5000, &[7; 9000]).unwrap();
        disk.flush().unwrap();
        let (flushed, shown) = (done(), content(&*disk));
        disk.checkpoint().unwrap();
        let over = disk.create_over("top@one".into(), files[1].clone(), None);
        // Here the files exchange their names.
        let exchanged = done();
        let mut cuts = 0;
        let look = |count, [old, new]: [&[u8]; 2], _: &mut Random| {
            if count < flushed {
                return;
            }
            let [old, new] = [old, new].map(|bytes| Arc::new(MemoryStorage::new(bytes.to_vec())));
            let old = Image::open_storage(old, &options()).unwrap();
            assert!(content(&*old) == shown);
            if count >= exchanged {
                let expected = Some(old.identity_hash());
                let image = Image::open_with_backings(new, &options(), &OneBacking(Some(old)));
                let image = image.unwrap();
                let name = &image.disk_backing().expect("a backing").name;
                let is_named = |name: &str| name == "top@one";
                assert!(matches!(name, BackingName::FileName { name, identity }
                        if is_named(name) && *identity == expected));
                assert!(content(&*image) == shown);
            }
            cuts += 1;
        };
        at_each_cut(&files, counts, &mut Random::new(1), look);
        assert!(cuts > 10, "{cuts}");
        drop(over.unwrap());
    }
}

#[test]
fn a_disk_takes_the_blocks_of_a_snapshot_without_the_image_below() {
    const SIZE: u64 = 8 << 20;
    let image: Arc<dyn BlockDevice> = Arc::new(vec![5; SIZE as usize]);
    let over = |device| Some((named(None, SIZE), device));
    let files = [(); 2].map(|()| Arc::new(MemoryStorage::default()));
    let new = create(SIZE, Layout::Auto);
    let disk = Disk::create(files[0].clone(), &new, over(image.clone()), &options());
    let disk = Arc::new(disk.unwrap());
    disk.write_at(12 * KIB, &[1; 4096]).unwrap();
    disk.checkpoint().unwrap();
    let top = disk.create_over("top@one".into(), files[1].clone(), None);
    let top = top.unwrap();
    // A region whose first write has this length gets large blocks.
    top.write_at(256 * KIB, &[2; 256 << 10]).unwrap();
    top.write_at(4 << 20, &[3; 256 << 10]).unwrap();
    let shown = content(&top);
    top.close().unwrap();
    drop(disk);
    let one = Image::open_with_backings(files[0].clone(), &options(), &UnreadBackings).unwrap();
    let unread = UnreadBackings.resolve(&named(None, SIZE)).unwrap();
    let top = Disk::open(files[1].clone(), &options(), &OneBacking(Some(one))).unwrap();
    assert_eq!(absorb_backing(&top, SIZE, SIZE, &()).unwrap(), 4096);
    top.set_backing(over(unread.expect("a device"))).unwrap();
    top.close().unwrap();
    let top = Image::open_with_backings(files[1].clone(), &options(), &OneBacking(Some(image)));
    assert!(content(&*top.unwrap()) == shown);
}

#[test]
fn a_grown_backing_with_data_in_its_new_part_is_refused() {
    let pair = pair(192 * KIB, 256 * KIB, Layout::Space);
    let storage = Arc::new(MemoryStorage::new(pair.base));
    let backing = Disk::open(storage, &options(), &UnreadBackings).unwrap();
    let top = Arc::new(MemoryStorage::new(pair.top));
    let disk = Disk::open(top.clone(), &options(), &UnreadBackings).unwrap();
    let device: Arc<dyn BlockDevice> = Arc::new(vec![0; 192 << 10]);
    disk.set_backing(Some((named(None, 192 * KIB), device)))
        .unwrap();
    disk.close().unwrap();
    backing.resize(256 * KIB).unwrap();
    backing.write_at(250 * KIB, &[9]).unwrap();
    let refused = open_over(top, &options(), || Ok(backing)).err();
    let Some(CommitError::Disk(Error::WrongBacking { .. })) = refused else {
        panic!("it is not refused");
    };
}

#[test]
fn a_disk_without_a_backing_or_over_a_digest_is_not_committed() {
    let new = |backing| {
        let storage = Arc::new(MemoryStorage::default());
        Disk::create(storage, &CreateOptions::disk(4096), backing, &options()).unwrap()
    };
    let backing = Arc::new(new(None));
    let digest = BackingEntry {
        name: BackingName::Digest([7; 32]),
        size: 4096,
    };
    let over_digest = new(Some((digest, backing.clone() as Arc<dyn BlockDevice>)));
    for disk in [new(None), over_digest] {
        let refused = commit(disk, &backing, &()).unwrap_err();
        let OperationError::Write(Error::Unsupported(_)) = refused else {
            panic!("{refused}");
        };
    }
}

/// Cancels an operation after some steps, and records its phases.
#[derive(Default)]
struct Impatient {
    steps: Cell<Option<u32>>,
    phases: Cell<Vec<Phase>>,
    announced: Cell<u64>,
    done: Cell<u64>,
}

impl Impatient {
    fn after(steps: u32) -> Self {
        Impatient {
            steps: Cell::new(Some(steps)),
            ..Impatient::default()
        }
    }
}

impl Monitor for Impatient {
    fn phase(&self, phase: Phase, total: Option<u64>) {
        let mut phases = self.phases.take();
        phases.push(phase);
        self.phases.set(phases);
        self.announced
            .set(self.announced.get() + total.unwrap_or(0));
    }
    fn advance(&self, bytes: u64) {
        self.done.set(self.done.get() + bytes);
    }
    fn is_cancelled(&self) -> bool {
        match self.steps.get() {
            Some(0) => true,
            left => {
                self.steps.set(left.map(|left| left - 1));
                false
            }
        }
    }
}

#[test]
fn a_cancelled_commit_changes_no_content_and_can_run_again() {
    let pair = pair(256 * KIB, 256 * KIB, Layout::Space);
    let base = Arc::new(MemoryStorage::new(pair.base));
    let top = Arc::new(MemoryStorage::new(pair.top));
    for steps in [0, 1, 5] {
        let (disk, backing) = open_both(base.clone(), top.clone());
        let stopped = commit(disk, &backing, &Impatient::after(steps)).unwrap_err();
        assert!(matches!(stopped, OperationError::Cancelled));
        drop(backing);
        let (disk, _) = open_both(base.clone(), top.clone());
        assert!(content(&disk) == pair.shown);
    }
    let (disk, backing) = open_both(base.clone(), top.clone());
    let monitor = Impatient::default();
    commit(disk, &backing, &monitor).unwrap();
    assert_eq!(monitor.phases.take(), [Phase::Commit, Phase::Sync]);
    assert_eq!(monitor.done.get(), monitor.announced.get());
    assert!(content(&*backing) == pair.shown);
    let disk = Image::open_with_backings(top, &options(), &OneBacking(Some(backing))).unwrap();
    assert_eq!(disk.extents().count(), 1, "it has no data of its own");
}

pub(super) fn policy<'a>() -> Policy<'a> {
    Policy {
        directories: &[],
        digests: &NoDigests,
        urls: &NoUrls,
        views: &NoViews,
        share: Share::Lock,
        options: options(),
    }
}

/// Writes the files of a pair into a directory, as disks.
fn files(directory: &Path) -> Vec<u8> {
    let new = |name: &str, size, backing| {
        let new = NewFile::create_new(&directory.join(name)).unwrap();
        let file = Arc::new(new.file().try_clone().unwrap());
        let disk = Disk::create(file, &CreateOptions::disk(size), backing, &options()).unwrap();
        (new, disk)
    };
    let (file, base) = new("base", 64 * KIB, None);
    base.write_at(0, &[1; 40_000]).unwrap();
    base.close().unwrap();
    file.complete().unwrap();
    let path = directory.join("base");
    let image = Image::open(&path, &options()).unwrap();
    let top = directory.join("top");
    let entry = name_backing(&top, &path, &image, &policy()).unwrap();
    let (file, disk) = new("top", 64 * KIB, Some((entry, image)));
    disk.write_at(4096, &[2; 4096]).unwrap();
    let shown = content(&disk);
    disk.close().unwrap();
    file.complete().unwrap();
    shown
}

#[test]
fn a_commit_of_files_names_the_backing_that_it_wrote() {
    let directory = tempfile::tempdir().unwrap();
    let shown = files(directory.path());
    let file = LockedFile::open(&directory.path().join("top"), "a test").unwrap();
    let committed = commit_into_backing(&file, &policy(), "a test", &()).unwrap();
    assert_eq!(committed.bytes, 4096);
    assert_eq!(committed.backing.file_name(), Some("base".as_ref()));
    let base = Image::open(&committed.backing, &options()).unwrap();
    assert!(content(&*base) == shown);
    let again = commit_into_backing(&file, &policy(), "a test", &()).unwrap();
    assert_eq!(again.bytes, 0);
}

#[test]
fn a_commit_that_cannot_be_says_why_by_its_kind() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    files(directory.path());
    let lock = |name: &str| LockedFile::open(&path(name), "a test").unwrap();
    let refused = |file: &LockedFile| {
        commit_into_backing(file, &policy(), "a test", &()).expect_err("it is refused")
    };
    let base = lock("base");
    assert!(matches!(refused(&base), CommitError::NoBacking));
    let top = lock("top");
    // A writer keeps readers away too, so the check of the backing meets the lock.
    let CommitError::Chain(problem) = refused(&top) else {
        panic!("a problem of the chain");
    };
    assert!(matches!(problem.cause, ChainCause::InUse(..)), "{problem}");
    let forced = changed(policy(), |new| new.share = Share::Force);
    let locked = commit_into_backing(&top, &forced, "a test", &()).unwrap_err();
    let CommitError::Lock { source, .. } = &locked else {
        panic!("{locked}");
    };
    assert!(matches!(source, LockFileError::Lock(_)), "{source}");
    drop(base);
    std::fs::rename(path("base"), path("moved")).unwrap();
    assert!(matches!(refused(&top), CommitError::Chain(_)));
    let digest = BackingEntry {
        name: BackingName::Digest([7; 32]),
        size: 64 * KIB,
    };
    let device: Arc<dyn BlockDevice> = Arc::new(vec![0; 64 << 10]);
    rebase_reference(top.storage(), Some((digest, device)), &options()).unwrap();
    assert!(matches!(refused(&top), CommitError::BackingByDigest));
}

#[test]
fn a_file_is_locked_only_as_a_writable_disk() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    files(directory.path());
    let lock = |name: &str| LockedFile::open(&path(name), "a test");
    assert!(matches!(lock("missing"), Err(LockFileError::Open(_))));
    let top = lock("top").unwrap();
    let refused = lock("top").unwrap_err();
    assert_eq!(refused.to_string(), "it is being written by a test");
    let image = Image::open_with_backings(top.storage(), &options(), &UnreadBackings).unwrap();
    let sealed = Arc::new(std::fs::File::create_new(path("sealed")).unwrap());
    let form = RewriteOptions {
        verify: false,
        ..RewriteOptions::sealed(&image, Keep::Own)
    };
    rewrite(&*image, sealed, form, &()).unwrap();
    assert!(matches!(lock("sealed"), Err(LockFileError::Sealed)));
    drop((image, top));
    lock("top").unwrap();
    // A file of an earlier version.
    let partial = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fixtures/vectors/valid/use-sketch-writable.bcow"
    );
    std::fs::copy(partial, path("sketch")).unwrap();
    assert!(matches!(lock("sketch"), Err(LockFileError::Partial)));
}

/// Opens the disk of this name in a directory, with the number of files below it.
fn open_named(directory: &Path, name: &str) -> (Arc<Disk>, LockedFile, u32) {
    let file = LockedFile::open(&directory.join(name), "a test").unwrap();
    let opener = Opener::new(file.path(), policy());
    let disk = Disk::open(file.storage(), &options(), &opener).unwrap();
    (Arc::new(disk), file, opener.height())
}

#[test]
fn a_snapshot_never_changes_and_the_disk_over_it_continues() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let lock = |name: &str| LockedFile::open(&path(name), "a test");
    let shown = files(directory.path());
    let (disk, file, height) = open_named(directory.path(), "top");
    assert_eq!(height, 1);
    let taken = snapshot(&disk, &file, "one", height, "a test", None).unwrap();
    assert_eq!(taken.path.file_name(), Some("top@one".as_ref()));
    let refused = lock("top").unwrap_err();
    assert_eq!(refused.to_string(), "it is being written by a test");
    assert!(content(&taken.disk) == shown);
    taken.disk.write_at(0, &[9; 5000]).unwrap();
    let changed = content(&taken.disk);
    taken.disk.close().unwrap();
    drop((taken.file, disk, file));
    assert!(matches!(lock("top@one"), Err(LockFileError::Snapshot)));
    // A copy is a disk of its own.
    std::fs::copy(path("top@one"), path("copy")).unwrap();
    drop(lock("copy").unwrap());
    let (disk, file, height) = open_named(directory.path(), "top");
    assert_eq!(height, 2);
    assert!(content(&*disk) == changed);
    let again = |name: &str, height| {
        snapshot(&disk, &file, name, height, "a test", None)
            .err()
            .unwrap()
    };
    assert!(matches!(again("one", height), SnapshotError::Exists(_)));
    for name in ["", "-one", ".one", "a/b", "a b", "one@two", "ü"] {
        assert!(matches!(again(name, height), SnapshotError::Name), "{name}");
    }
    let long = "x".repeat(255);
    assert!(matches!(again(&long, height), SnapshotError::FileName));
    assert!(matches!(again("two", MAX_DEPTH), SnapshotError::TooDeep));
    assert!(content(&*disk) == changed);
    drop((disk, file));
    let opener = Opener::new(&path("top"), policy());
    let image = std::fs::File::open(path("top@one")).unwrap();
    let image = Image::open_with_backings(Arc::new(image), &options(), &opener).unwrap();
    assert!(content(&*image) == shown);
}

#[test]
fn a_file_that_an_interrupted_snapshot_left_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let shown = files(directory.path());
    let (disk, file, height) = open_named(directory.path(), "top");
    // As after a crash in front of the exchange.
    let unfinished = Arc::new(std::fs::File::create_new(path("top@one")).unwrap());
    drop(
        disk.create_over("top@one".into(), unfinished, None)
            .unwrap(),
    );
    let file_there = std::fs::File::open(path("top@one")).unwrap();
    assert_eq!(snapshot_time(&file_there, &path("top@one")), None);
    let opener = Opener::new(&path("top@one"), policy());
    Image::open_with_backings(Arc::new(file_there), &options(), &opener).unwrap();
    assert!(matches!(opener.problems()[0].cause, ChainCause::TooDeep));
    let taken = snapshot(&disk, &file, "one", height, "a test", None).unwrap();
    assert!(content(&taken.disk) == shown);
}

#[test]
fn a_backing_is_named_only_where_the_disk_finds_it() {
    let directory = tempfile::tempdir().unwrap();
    files(directory.path());
    let base = directory.path().join("base");
    let image = Image::open(&base, &options()).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let disk = elsewhere.path().join("disk");
    let refused = name_backing(&disk, &base, &image, &policy()).unwrap_err();
    let NameError::OutOfReach { searched, .. } = &refused else {
        panic!("{refused}");
    };
    assert_eq!(searched, elsewhere.path());
    let directories = [directory.path().to_owned()];
    let allowed = changed(policy(), |new| new.directories = &directories);
    let entry = name_backing(&disk, &base, &image, &allowed).unwrap();
    assert_eq!(entry.name.to_string(), "base");
    std::fs::write(elsewhere.path().join("base"), "another file").unwrap();
    let refused = name_backing(&disk, &base, &image, &allowed).unwrap_err();
    assert!(matches!(refused, NameError::Chain(_)), "{refused}");
}

#[test]
fn a_new_file_appears_complete_or_not_at_all() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let entries = || std::fs::read_dir(&directory).unwrap().count();
    drop(NewFile::create_new(&path).unwrap());
    assert_eq!(entries(), 0);
    let (one, two) = (NewFile::create_new(&path), NewFile::create_new(&path));
    one.unwrap().complete().unwrap();
    assert!(matches!(two.unwrap().complete(), Err(NewFileError::Exists)));
    assert!(matches!(
        NewFile::create_new(&path),
        Err(NewFileError::Exists)
    ));
    NewFile::create(&path).unwrap().complete().unwrap();
    assert_eq!(entries(), 1);
    let refused = NewFile::create(directory.path()).unwrap_err();
    assert!(matches!(refused, NewFileError::Directory));
    let refused = NewFile::create(&directory.path().join("..")).unwrap_err();
    assert!(matches!(refused, NewFileError::NoName));
    let refused = NewFile::create(Path::new("/dev/null")).unwrap_err();
    assert!(matches!(refused, NewFileError::NoRegularFile));
}

#[test]
fn a_rebased_disk_shows_the_same_even_if_it_was_cancelled_before() {
    let pair = pair(256 * KIB, 256 * KIB, Layout::Space);
    let base = Arc::new(MemoryStorage::new(pair.base));
    let base = Image::open_storage(base, &options()).unwrap();
    let top = Arc::new(MemoryStorage::new(pair.top));
    let open = || Disk::open(top.clone(), &options(), &OneBacking(Some(base.clone()))).unwrap();
    // Shorter than the disk, with the same data at first.
    let mut other = content(&*base);
    other.truncate(128 << 10);
    other[100 << 10..].fill(9);
    let other: Arc<dyn BlockDevice> = Arc::new(other);
    let new = || Some((named(None, other.size()), other.clone()));
    let cancelled = rebase(open(), new(), &Impatient::after(1)).unwrap_err();
    assert!(matches!(cancelled, OperationError::Cancelled));
    assert!(content(&open()) == pair.shown);
    let monitor = Impatient::default();
    // The changed 28 KiB, and 112 KiB of the old backing behind the end of the new one.
    assert_eq!(rebase(open(), new(), &monitor).unwrap(), 140 * KIB);
    assert_eq!(monitor.phases.take(), [Phase::Compare]);
    assert_eq!(monitor.done.get(), 256 * KIB);
    let over = OneBacking(Some(other.clone()));
    let disk = Disk::open(top.clone(), &options(), &over).unwrap();
    assert!(content(&disk) == pair.shown);
    rebase(disk, None, &()).unwrap();
    let alone = Image::open_storage(top.clone(), &options()).unwrap();
    assert!(alone.disk_backing().is_none());
    assert!(content(&*alone) == pair.shown);
    assert_sound(top);
}

/// Ways to a disk without a backing that shows zeros where it stores nothing.
#[derive(Clone, Copy, Debug)]
enum Empty {
    Created,
    Discarded,
    Grown,
    WithoutBacking,
    Compacted,
}

#[test]
fn zeros_of_a_disk_without_a_backing_stay_zeros_over_a_new_one() {
    const BYTES: u64 = 5 << 20;
    let ways = [
        Empty::Created,
        Empty::Discarded,
        Empty::Grown,
        Empty::WithoutBacking,
        Empty::Compacted,
    ];
    for layout in [Layout::Space, Layout::Performance, Layout::Auto] {
        for way in ways {
            let storage = Arc::new(MemoryStorage::default());
            let size = if matches!(way, Empty::Grown) { 4096 } else { BYTES };
            let disk = Disk::create_alone(storage.clone(), &create(size, layout)).unwrap();
            disk.write_at(100, &[1; 100]).unwrap();
            let (storage, disk) = emptied(storage, disk, way, BYTES);
            let shown = content(&disk);
            // Longer than the disk, shorter than it, and shorter by a part of a block.
            for bytes in [BYTES + 8192, 4 << 20, 20480] {
                let new: Arc<dyn BlockDevice> = Arc::new(vec![9; bytes as usize]);
                let over = OneBacking(Some(new.clone()));
                let copy = Arc::new(MemoryStorage::new(storage.to_vec()));
                let disk = Disk::open(copy.clone(), &options(), &UnreadBackings).unwrap();
                rebase(disk, Some((named(None, bytes), new)), &()).unwrap();
                let image = Image::open_with_backings(copy.clone(), &options(), &over).unwrap();
                assert!(content(&*image) == shown, "{layout:?}, {way:?}, {bytes}");
                assert_sound(copy);
            }
        }
    }
}

/// Brings a disk with a little data to zeros on the given way, and flushes it.
fn emptied(
    storage: Arc<MemoryStorage>,
    disk: Disk,
    way: Empty,
    bytes: u64,
) -> (Arc<MemoryStorage>, Disk) {
    let (storage, disk) = match way {
        Empty::Created => (storage, disk),
        Empty::Discarded => {
            disk.write_at(0, &vec![2; bytes as usize]).unwrap();
            disk.flush().unwrap();
            disk.discard(8192, bytes / 2).unwrap();
            (storage, disk)
        }
        Empty::Grown => {
            disk.resize(bytes).unwrap();
            (storage, disk)
        }
        Empty::WithoutBacking => {
            let short: Arc<dyn BlockDevice> = Arc::new(vec![3; 12288]);
            rebase(disk, Some((named(None, 12288), short.clone())), &()).unwrap();
            let over = OneBacking(Some(short));
            let disk = Disk::open(storage.clone(), &options(), &over).unwrap();
            rebase(disk, None, &()).unwrap();
            let disk = Disk::open(storage.clone(), &options(), &UnreadBackings).unwrap();
            (storage, disk)
        }
        Empty::Compacted => {
            disk.close().unwrap();
            let image = Image::open_storage(storage, &options()).unwrap();
            let form = RewriteOptions::compacted(&image, Compression::None).unwrap();
            let storage = Arc::new(MemoryStorage::default());
            rewrite(&*image, storage.clone(), form, &()).unwrap();
            let disk = Disk::open(storage.clone(), &options(), &UnreadBackings).unwrap();
            (storage, disk)
        }
    };
    disk.flush().unwrap();
    (storage, disk)
}

#[test]
fn a_rewrite_keeps_the_content_in_every_form() {
    let pair = pair(192 * KIB, 256 * KIB, Layout::Space);
    let base = Arc::new(MemoryStorage::new(pair.base));
    let over = OneBacking(Some(Image::open_storage(base, &options()).unwrap()));
    let top = Arc::new(MemoryStorage::new(pair.top));
    let image = Image::open_with_backings(top, &options(), &over).unwrap();
    let zstd = Compression::Zstd { level: 1 };
    for (form, is_sealed) in [
        (RewriteOptions::sealed(&image, Keep::Own), true),
        (RewriteOptions::sealed(&image, Keep::All), true),
        (RewriteOptions::compacted(&image, zstd).unwrap(), false),
        (
            RewriteOptions::compacted(&image, Compression::None).unwrap(),
            false,
        ),
    ] {
        let storage = Arc::new(MemoryStorage::default());
        let has_backing = form.form.backing.is_some();
        let written = rewrite(&*image, storage.clone(), form, &()).unwrap();
        assert_eq!(written.header.merkle.is_some(), is_sealed);
        let new = Image::open_with_backings(storage.clone(), &options(), &over).unwrap();
        assert_eq!(new.disk_backing().is_some(), has_backing);
        assert!(content(&*new) == pair.shown);
        assert_sound(storage);
    }
}

#[test]
fn a_rewrite_that_ends_early_says_whether_it_read_or_wrote() {
    let pair = pair(256 * KIB, 256 * KIB, Layout::Space);
    let top = Arc::new(Faulty::new(pair.top));
    let image = Image::open_with_backings(top.clone(), &options(), &UnreadBackings).unwrap();
    let seal = |monitor: &dyn Monitor, storage: Arc<dyn Storage>| {
        let form = RewriteOptions::sealed(&image, Keep::Own);
        rewrite(&*image, storage, form, monitor).map(|_| ())
    };
    let memory = || Arc::new(MemoryStorage::default());
    let cancelled = seal(&Impatient::after(1), memory()).unwrap_err();
    assert!(matches!(cancelled, OperationError::Cancelled));
    let full = Arc::new(bcow_testkit::SmallDisk::new(4096));
    let failed = seal(&(), full).unwrap_err();
    assert!(matches!(failed, OperationError::Write(_)), "{failed}");
    let fault = |on| Fault {
        on,
        after: 0,
        stays: true,
        errno: 5,
    };
    top.plan(Some(fault(On::Read)));
    let failed = seal(&(), memory()).unwrap_err();
    assert!(matches!(failed, OperationError::Read(_)), "{failed}");
    top.plan(None);
    let monitor = Impatient::default();
    seal(&monitor, memory()).unwrap();
    assert_eq!(
        monitor.phases.take(),
        [Phase::Write, Phase::Hash, Phase::Verify]
    );
    assert_eq!(monitor.done.get(), monitor.announced.get());
}

#[test]
fn a_comparison_finds_each_range_once_and_zeros_behind_an_end_are_the_same() {
    let disk = |size: u64, writes: &[(u64, &[u8])]| {
        let storage = Arc::new(MemoryStorage::default());
        let disk = Disk::create_alone(storage.clone(), &CreateOptions::disk(size)).unwrap();
        for (at, bytes) in writes {
            disk.write_at(*at, bytes).unwrap();
        }
        disk.close().unwrap();
        Image::open_storage(storage, &options()).unwrap()
    };
    let long = vec![1; 40 << 10];
    let a = disk(9 << 20, &[(4096, &long), (5 << 20, &[7; 9])]);
    let b = disk(4 << 20, &[(4096, &long[4096..]), (2 << 20, &[0; 4096])]);
    let mut found = Vec::new();
    let mut sink = |range| {
        found.push(range);
        Ok::<_, ()>(())
    };
    compare(&a, &b, &mut sink).unwrap();
    assert_eq!(found, [40 << 10..44 << 10, 5 << 20..(5 << 20) + 4096]);
    compare::<()>(&a, &a, &mut |range| panic!("{range:?}")).unwrap();
    let ended = compare(&a, &b, &mut |_| Err("enough")).unwrap_err();
    assert!(matches!(ended, CompareError::Sink("enough")));
}
