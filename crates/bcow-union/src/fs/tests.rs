//! Tests of the background thread and of steps between requests. They call these steps directly,
//! because no request starts them. They need root (for `trusted.` attributes) and mkfs.erofs.

use std::fs;
use std::io::{Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use bcow::BlockDevice;
use bcow_erofs::reader::Filesystem;
use bcow_erofs::tree::Timestamp;
use bcow_testkit::{lacks, lacks_mkfs, make_erofs, noise};
use rustix::fs::IFlags;
use rustix::io::Errno;
use tempfile::TempDir;

use super::lookup::Access;
use super::nodes::{Content, Node};
use super::{
    Allocate, Attributes, Caller, Changes, LowerImage, New, Privileges, RenameMode, SetTime,
    SyncScope, UnionFs, on_host,
};
use crate::node::NodeId;
use crate::options::{SyncPolicy, UnionOptions};

pub(super) const BLOCK: u64 = 4096;
pub(super) const BIG: usize = 300_000;
/// Number of files in the directory `many`, each of two blocks.
const MANY: usize = 40;

pub(super) const ROOT: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
    umask: 0o022,
};

/// Number of names of the file in the directory `links`.
const LINKS: u32 = 100;

/// Waits until a condition holds that another thread brings about. Fails after one minute.
fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "it did not happen"
        );
        thread::sleep(Duration::from_millis(1));
    }
}

/// An image with a part that cannot be read while `broken` is set.
struct Lower {
    bytes: Vec<u8>,
    big: Range<u64>,
    broken: AtomicBool,
}

impl BlockDevice for Lower {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), bcow::Error> {
        let is_big = offset < self.big.end && offset + buf.len() as u64 > self.big.start;
        if self.broken.load(Ordering::Acquire) && is_big {
            Err(bcow::Error::OutOfRange {
                offset,
                length: buf.len() as u64,
                size: 0,
            })
        } else {
            self.bytes.read_at(offset, buf)
        }
    }
}

pub(super) struct Fixture {
    directory: TempDir,
    options: UnionOptions,
    lower: Arc<Lower>,
    union: Option<Arc<UnionFs>>,
}

/// A copy of a memory file.
fn copy(file: BorrowedFd<'_>) -> OwnedFd {
    let mut file = fs::File::from(file.try_clone_to_owned().unwrap());
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let mut copy = fs::File::from(rustix::fs::memfd_create("copy", flags).unwrap());
    file.seek(SeekFrom::Start(0)).unwrap();
    std::io::copy(&mut file, &mut copy).unwrap();
    copy.into()
}

fn make_image() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path().join("tree");
    fs::create_dir_all(tree.join("many")).unwrap();
    for number in 0..MANY {
        let bytes = vec![number as u8; 2 * BLOCK as usize];
        fs::write(tree.join(format!("many/{number}")), bytes).unwrap();
    }
    for name in ["a", "b", "c"] {
        fs::write(tree.join(name), b"small file\n").unwrap();
    }
    fs::write(tree.join("big"), noise(1, BIG)).unwrap();
    fs::write(tree.join("h1"), noise(1, 2 * BLOCK as usize)).unwrap();
    fs::hard_link(tree.join("h1"), tree.join("h2")).unwrap();
    fs::create_dir(tree.join("links")).unwrap();
    fs::write(tree.join("links/0"), b"a file with many names\n").unwrap();
    for number in 1..LINKS {
        fs::hard_link(tree.join("links/0"), tree.join(format!("links/{number}"))).unwrap();
    }
    let image = directory.path().join("image");
    make_erofs(&tree, &image, &[]);
    fs::read(image).unwrap()
}

impl Fixture {
    pub(super) fn new(options: UnionOptions) -> Option<Fixture> {
        Self::in_directory(tempfile::tempdir().unwrap(), options)
    }

    fn in_directory(directory: TempDir, options: UnionOptions) -> Option<Fixture> {
        if lacks_mkfs() {
            return None;
        }
        static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
        let bytes = IMAGE.get_or_init(make_image).clone();
        let begin = &noise(1, BIG)[..64];
        let start = bytes.windows(64).position(|piece| piece == begin).unwrap() as u64;
        let mut fixture = Fixture {
            directory,
            options,
            lower: Arc::new(Lower {
                bytes,
                big: start..start + BIG as u64 / BLOCK * BLOCK,
                broken: AtomicBool::new(false),
            }),
            union: None,
        };
        fixture.open();
        Some(fixture)
    }

    pub(super) fn upper(&self) -> PathBuf {
        self.directory.path().join("upper")
    }

    fn lower_image(&self) -> LowerImage {
        let device: Arc<dyn BlockDevice> = self.lower.clone();
        LowerImage {
            fs: Arc::new(Filesystem::open(device).unwrap()),
            identity: [7; 32],
            name: "image".into(),
        }
    }

    fn open(&mut self) {
        let union = UnionFs::open(self.lower_image(), &self.upper(), "a test", &self.options);
        self.begin(union.unwrap());
    }

    /// Lets another union take over, as after a kill of the process.
    pub(super) fn take_over(&mut self) {
        let union = self.union.take().unwrap();
        let ledger = copy(union.ledger().unwrap());
        let held = union.hold_upper().unwrap();
        // A process that is killed would leave the nodes in the ledger.
        drop(union);
        let lower = self.lower_image();
        let union = UnionFs::take_over(
            lower,
            &self.upper(),
            "a test",
            &self.options,
            ledger,
            Some(&held),
        );
        self.begin(union.unwrap());
    }

    fn begin(&mut self, union: Arc<UnionFs>) {
        union.start_background().unwrap();
        self.union = Some(union);
    }

    /// Closes the union and opens it again, as an unmount and a mount do.
    pub(super) fn reopen(&mut self) {
        self.union.take().unwrap().close().unwrap();
        self.open();
    }

    /// Opens the union again without a close, as after a kill of the daemon.
    fn killed(&mut self) {
        drop(self.union.take());
        self.open();
    }

    pub(super) fn fs(&self) -> &Arc<UnionFs> {
        self.union.as_ref().unwrap()
    }

    pub(super) fn get(&self, path: &str) -> Attributes {
        let mut found = self.fs().attributes(NodeId::ROOT).unwrap();
        for name in path.split('/') {
            found = self
                .fs()
                .lookup(found.node, name.as_bytes())
                .unwrap()
                .unwrap();
        }
        found
    }

    fn node(&self, path: &str) -> Arc<Node> {
        self.fs().node(self.get(path).node).unwrap()
    }

    pub(super) fn content(&self, path: &str) -> Vec<u8> {
        self.read(self.get(path).node)
    }

    pub(super) fn read(&self, id: NodeId) -> Vec<u8> {
        self.try_read(id).unwrap()
    }

    pub(super) fn try_read(&self, id: NodeId) -> Result<Vec<u8>, Errno> {
        let mut scratch = Vec::new();
        self.fs().read(id, 0, 1 << 20, &mut scratch, <[u8]>::to_vec)
    }

    pub(super) fn write(&self, id: NodeId, offset: u64, data: &[u8]) {
        let written = self.fs().write(id, offset, data, Privileges::Drop).unwrap();
        assert_eq!(written as usize, data.len());
    }

    pub(super) fn set(&self, id: NodeId, changes: Changes) -> Attributes {
        self.fs().set_attributes(id, &changes).unwrap()
    }

    /// Bytes of the host's disk that a file of the upper takes.
    fn stored(&self, path: &str) -> u64 {
        fs::metadata(self.upper().join(path)).unwrap().blocks() * 512
    }

    pub(super) fn counted(&self) -> u64 {
        self.fs().report().stored_bytes.unwrap_or(0)
    }
}

pub(super) fn plain() -> Option<Fixture> {
    Fixture::new(UnionOptions::default())
}

/// With partial files of small files too.
fn partial() -> Option<Fixture> {
    Fixture::new(with_partials())
}

/// With copies that a batch makes durable.
fn batch() -> Option<Fixture> {
    Fixture::new(UnionOptions {
        sync: SyncPolicy::Batch(100),
        ..UnionOptions::default()
    })
}

fn with_partials() -> UnionOptions {
    UnionOptions {
        small_bytes: 0,
        ..UnionOptions::default()
    }
}

pub(super) fn sized(size: u64) -> Changes {
    Changes {
        size: Some(size),
        ..Changes::default()
    }
}

fn modified(seconds: i64) -> Changes {
    Changes {
        mtime: Some(SetTime::At(Timestamp {
            seconds,
            nanoseconds: 0,
        })),
        ..Changes::default()
    }
}

#[test]
fn partial_that_could_not_be_flushed_outlives_its_node() {
    let Some(mut fixture) = partial() else { return };
    let big = fixture.get("big").node;
    fixture.lower.broken.store(true, Ordering::Release);
    fixture.write(big, 100_000, b"hello");
    fixture.fs().forget(big, 1);
    fixture.fs().run_periodic();
    assert_eq!(fixture.fs().open_partials.all().count(), 1);
    fixture.lower.broken.store(false, Ordering::Release);
    let mut expected = noise(1, BIG);
    expected[100_000..100_005].copy_from_slice(b"hello");
    assert!(fixture.content("big") == expected);
    // The kernel forgets the node: the partial file is not used any more.
    fixture.fs().forget(big, 1);
    fixture.fs().run_periodic();
    assert_eq!(fixture.fs().open_partials.all().count(), 0);
    assert!(fixture.content("big") == expected);
    fixture.reopen();
    assert!(fixture.content("big") == expected);
}

#[test]
fn partial_that_grew_has_its_size_also_when_its_node_was_forgotten() {
    let Some(fixture) = partial() else { return };
    let big = fixture.get("big").node;
    fixture.write(big, 0, b"hello");
    fixture.fs().run_periodic();
    fixture.write(big, BIG as u64, b"more");
    fixture.fs().forget(big, 1);
    for _ in 0..2 {
        assert_eq!(fixture.get("big").size, BIG as u64 + 4);
        fixture.fs().run_periodic();
    }
}

#[test]
fn partial_that_is_used_often_becomes_whole_if_the_kernel_uses_whole_files() {
    let Some(mut fixture) = partial() else { return };
    let big = fixture.get("big").node;
    let open = |fixture: &Fixture| fixture.fs().open_file(big, |_| Ok(5)).unwrap();
    let use_often = |fixture: &Fixture| {
        for _ in 0..=BIG as u64 / BLOCK {
            fixture.write(big, 100, b"often");
        }
        fixture.fs().sync(big, SyncScope::All).unwrap();
    };
    let mut expected = noise(1, BIG);
    expected[100..105].copy_from_slice(b"often");
    use_often(&fixture);
    assert!(!fixture.fs().complete_some());
    fixture.fs().pass_whole_files();
    assert_eq!(open(&fixture), None);
    fixture.lower.broken.store(true, Ordering::Release);
    assert!(fixture.fs().complete_some());
    // It is not tried again and again.
    assert!(!fixture.fs().complete_some());
    fixture.lower.broken.store(false, Ordering::Release);
    use_often(&fixture);
    while fixture.fs().complete_some() {}
    fixture.fs().run_periodic();
    assert_eq!(fixture.fs().partials.statistics().promoted, 1);
    fixture.fs().sync(big, SyncScope::All).unwrap();
    fixture.fs().closed(big);
    assert_eq!(open(&fixture), Some(5));
    assert!(fixture.content("big") == expected);
    fixture.reopen();
    assert!(fixture.content("big") == expected);
}

#[test]
fn partial_that_was_emptied_is_closed() {
    let Some(fixture) = partial() else { return };
    let big = fixture.get("big").node;
    fixture.write(big, 0, b"hello");
    assert_eq!(fixture.fs().open_partials.all().count(), 1);
    fixture.set(big, sized(0));
    assert_eq!(fixture.fs().open_partials.all().count(), 0);
    // The filler thread may hold the partial file for a moment longer.
    wait_until(|| fixture.fs().partials.statistics().open == 0);
}

#[test]
fn bytes_of_a_copy_that_a_crash_undid_do_not_come_back() {
    let options = UnionOptions {
        sync: SyncPolicy::Batch(100),
        size_limit: Some(100 * BLOCK),
        ..UnionOptions::default()
    };
    let Some(mut fixture) = Fixture::new(options) else {
        return;
    };
    fixture.write(fixture.get("a").node, 0, &[7; 5000]);
    let written = fixture.counted();
    fixture.killed();
    assert_eq!(fixture.counted(), written);
    assert_eq!(fixture.content("a"), b"small file\n");
    fixture.write(fixture.get("a").node, 0, b"S");
    assert_eq!(fixture.content("a"), b"Small file\n");
    assert_eq!(fixture.counted(), written - BLOCK);
    fixture.reopen();
    assert_eq!(fixture.content("a"), b"Small file\n");
    assert_eq!(fixture.stored("a"), BLOCK);
}

#[test]
fn copy_of_a_batch_that_keeps_its_mark_stays_in_the_batch_and_the_others_do_not() {
    let Some(mut fixture) = batch() else { return };
    for name in ["a", "b", "c"] {
        fixture.write(fixture.get(name).node, 0, b"S");
    }
    let host = fs::File::open(fixture.upper().join("a")).unwrap();
    let flags = rustix::fs::ioctl_getflags(&host).and_then(|flags| {
        rustix::fs::ioctl_setflags(&host, flags | IFlags::IMMUTABLE).map(|()| flags)
    });
    let Ok(flags) = flags else {
        lacks("a host that has immutable files", false);
        return;
    };
    let synced = fixture.fs().finish_batch();
    rustix::fs::ioctl_setflags(&host, flags).unwrap();
    assert_eq!(synced, Err(Errno::PERM));
    assert_eq!(fixture.fs().batch.lock().len(), 1);
    fixture.reopen();
    for name in ["a", "b", "c"] {
        assert_eq!(fixture.content(name), b"Small file\n", "{name}");
    }
}

#[test]
fn root_of_an_adopted_upper_has_the_owner_and_mode_of_the_directory() {
    let Some(mut fixture) = plain() else { return };
    fixture.union.take().unwrap().close().unwrap();
    let upper = fixture.upper();
    fs::remove_dir_all(&upper).unwrap();
    fs::create_dir_all(upper.join("theirs")).unwrap();
    fs::set_permissions(&upper, fs::Permissions::from_mode(0o1711)).unwrap();
    std::os::unix::fs::chown(&upper, Some(7), Some(8)).unwrap();
    fixture.open();
    for mode in [0o1711, 0o750] {
        let root = fixture.fs().attributes(NodeId::ROOT).unwrap();
        assert_eq!((root.uid, root.gid, root.permissions), (7, 8, mode));
        let changes = Changes {
            permissions: Some(0o750),
            ..Changes::default()
        };
        fixture.set(NodeId::ROOT, changes);
        fixture.reopen();
    }
    // The mode of the host's directory does not change.
    let host = fs::metadata(&upper).unwrap();
    assert_eq!(host.permissions().mode() & 0o7777, 0o1711);
}

#[test]
fn removed_file_does_not_wait_for_its_batch_to_be_let_go() {
    let Some(fixture) = batch() else { return };
    let union = fixture.fs();
    for name in ["a", "b"] {
        fixture.write(fixture.get(name).node, 0, b"S");
    }
    let node = fixture.node("a");
    let id = node.id;
    let weak = Arc::downgrade(&node);
    drop(node);
    union.unlink(NodeId::ROOT, b"a").unwrap();
    assert!(weak.upgrade().is_some());
    union.forget(id, u64::MAX);
    assert!(weak.upgrade().is_none(), "its space is free");
    let left = union.batch.lock().len();
    assert_eq!(left, 1);
    union.finish_batch().unwrap();
}

#[test]
fn space_of_a_removed_partial_is_given_back_once() {
    let options = UnionOptions {
        size_limit: Some(200 * BLOCK),
        ..with_partials()
    };
    let Some(fixture) = Fixture::new(options) else {
        return;
    };
    let union = fixture.fs();
    let other = union
        .make(&ROOT, NodeId::ROOT, b"other", 0o644, &New::File)
        .unwrap();
    fixture.write(other.node, 0, &[1; 10 * BLOCK as usize]);
    let before = fixture.counted();
    let big = fixture.get("big").node;
    fixture.write(big, 5, b"x");
    union.unlink(NodeId::ROOT, b"big").unwrap();
    fixture.write(big, 0, &vec![2; BIG]);
    union.promote_if_complete(&union.node(big).unwrap());
    assert_eq!(fixture.read(big), vec![2; BIG]);
    assert!(fixture.counted() >= before + 74 * BLOCK);
    union.forget(big, 1);
    // The background thread may still hold the node.
    wait_until(|| fixture.counted() == before);
    union.run_periodic();
    assert_eq!(fixture.counted(), before);
}

#[test]
fn a_host_without_holes_stores_whole_files() {
    let path = std::path::Path::new("upper");
    assert_eq!(on_host(with_partials(), true, path), with_partials());
    let options = on_host(UnionOptions::default(), false, path);
    let Some(mut fixture) = Fixture::new(options) else {
        return;
    };
    let big = fixture.node("big");
    fixture.write(big.id, 100_000, b"hello");
    let is_plain = || matches!(big.read_state().content, Content::Plain);
    assert!(is_plain());
    assert_eq!(fixture.fs().report().copied_whole, 1);
    let mut expected = noise(1, BIG);
    expected[100_000..100_005].copy_from_slice(b"hello");
    assert!(fixture.content("big") == expected);
    fixture.reopen();
    assert!(fixture.content("big") == expected);
    assert!(fs::read(fixture.upper().join("big")).unwrap() == expected);
}

#[test]
fn partial_with_an_index_entry_is_removed_with_its_last_name() {
    let Some(mut fixture) = partial() else { return };
    let bytes = vec![4; 2 * BLOCK as usize];
    fixture.write(fixture.get("h1").node, 0, &bytes);
    fixture.fs().unlink(NodeId::ROOT, b"h1").unwrap();
    assert_eq!(fixture.content("h2"), bytes);
    fixture.fs().run_periodic();
    // Its only name on the host is the index entry.
    assert!(!fixture.upper().join("h2").exists());
    fixture.reopen();
    assert_eq!(fixture.content("h2"), bytes);
    fixture.fs().unlink(NodeId::ROOT, b"h2").unwrap();
    let index = fs::read_dir(fixture.upper().join(".bcow/index")).unwrap();
    assert_eq!(index.count(), 0);
}

#[test]
fn names_are_counted_while_others_get_into_the_upper() {
    for _ in 0..40 {
        let Some(fixture) = plain() else { return };
        let (directory, node) = (fixture.get("links").node, fixture.get("links/0").node);
        let (fs, has_ended) = (fixture.fs(), AtomicBool::new(false));
        let has_ended = &has_ended;
        thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    let name = format!("new-{thread}");
                    while !has_ended.load(Ordering::Acquire) {
                        fs.link(node, NodeId::ROOT, name.as_bytes()).unwrap();
                        fs.unlink(NodeId::ROOT, name.as_bytes()).unwrap();
                    }
                });
            }
            // Each step brings a name of the image into the upper, or hides one.
            for number in 1..LINKS {
                let (name, new) = (number.to_string(), format!("moved-{number}"));
                let (name, new) = (name.as_bytes(), new.as_bytes());
                let done = match number % 4 {
                    0 => fs.unlink(directory, name),
                    _ => fs.rename(directory, name, directory, new, RenameMode::Replace),
                };
                done.unwrap();
            }
            has_ended.store(true, Ordering::Release);
        });
        let removed = (LINKS - 1) / 4;
        assert_eq!(fixture.get("links/0").nlink, LINKS - removed);
    }
}

#[test]
fn time_that_is_set_during_a_flush_stays() {
    let Some(fixture) = partial() else { return };
    let big = fixture.get("big").node;
    for turn in 0..60 {
        fixture.write(big, 5 + turn * BLOCK, b"x");
        let union = fixture.fs();
        thread::scope(|scope| {
            let flush = scope.spawn(|| union.sync(big, SyncScope::All));
            fixture.set(big, modified(1_000_000 + turn as i64));
            flush.join().unwrap().unwrap();
        });
        let found = fixture.get("big").mtime.seconds;
        assert_eq!(found, 1_000_000 + turn as i64, "turn {turn}");
    }
}

#[test]
fn directory_never_shows_the_time_of_a_copy_up_in_it() {
    let Some(fixture) = plain() else { return };
    let union = fixture.fs();
    let many = fixture.get("many").node;
    let set = |path: &str| {
        fixture.set(fixture.get(path).node, modified(1_000_000));
    };
    set("many");
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            (0..MANY).for_each(|number| set(&format!("many/{number}")));
            done.store(true, Ordering::Release);
        });
        while !done.load(Ordering::Acquire) {
            let seen = union.attributes(many).unwrap().mtime.seconds;
            assert_eq!(seen, 1_000_000);
        }
    });
}

/// As for a union that could close all descriptors the last time.
fn limit_descriptors_to(union: &UnionFs, limit: usize) {
    union.descriptors_least.store(0, Ordering::Relaxed);
    union.limit_descriptors_to(limit);
}

#[test]
fn descriptor_that_is_in_use_is_not_given_back() {
    let Some(fixture) = plain() else { return };
    let union = fixture.fs();
    let new = union
        .make(&ROOT, NodeId::ROOT, b"new", 0o644, &New::File)
        .unwrap();
    let node = union.node(new.node).unwrap();
    let has_file = || node.read_state().upper.as_ref().unwrap().file.is_some();
    // A thread that removes the name holds the file like this.
    let file = union.open_upper(&node, Access::Path).unwrap();
    limit_descriptors_to(union, 0);
    assert!(has_file());
    drop(file);
    limit_descriptors_to(union, 0);
    assert!(!has_file());
}

#[test]
fn first_write_keeps_the_time_of_access() {
    let Some(fixture) = plain() else { return };
    let id = fixture.get("a").node;
    let atime = modified(1_234_567).mtime;
    let changes = Changes {
        atime,
        ..Changes::default()
    };
    fixture.set(id, changes);
    fixture.write(id, 0, b"S");
    assert_eq!(fixture.get("a").atime.seconds, 1_234_567);
}

#[test]
fn partials_give_their_descriptors_back() {
    let Some(mut fixture) = partial() else { return };
    let union = fixture.fs();
    let mut nodes = Vec::new();
    for number in 0..MANY {
        let id = fixture.get(&format!("many/{number}")).node;
        fixture.write(id, 5000, b"hello");
        nodes.push(id);
    }
    assert_eq!(union.partials.statistics().open, MANY as u64);
    let closes_all = || {
        limit_descriptors_to(union, 10);
        union.partials.statistics().open == 0
    };
    // A flush in the background uses its partial file for a short time.
    assert!((0..100).any(|_| closes_all() || {
        thread::sleep(Duration::from_millis(20));
        false
    }));
    let check = |fixture: &Fixture, number: usize| {
        let found = fixture.get(&format!("many/{number}"));
        assert_eq!(found.size, 2 * BLOCK);
        let content = fixture.read(found.node);
        assert_eq!(&content[5000..5005], b"hello");
        assert_eq!((content[4999], content.len()), (number as u8, 8192));
    };
    for (number, id) in nodes.iter().enumerate() {
        fixture.write(*id, 3 * BLOCK, b"longer");
        limit_descriptors_to(union, 0);
        assert_eq!(fixture.get(&format!("many/{number}")).size, 3 * BLOCK + 6);
        fixture.set(*id, sized(2 * BLOCK));
        check(&fixture, number);
    }
    fixture.reopen();
    (0..MANY).for_each(|number| check(&fixture, number));
}

#[test]
fn fsync_reports_bytes_that_the_background_could_not_make_durable() {
    let Some(mut fixture) = batch() else { return };
    let node = fixture.node("a");
    fixture.write(node.id, 0, b"S");
    let replace = |file| {
        let mut state = node.write_state();
        state.upper.as_mut().unwrap().file.replace(file).unwrap()
    };
    // A pipe: it cannot be synced.
    let (_reader, writer) = std::io::pipe().unwrap();
    let file = replace(Arc::new(fs::File::from(OwnedFd::from(writer))));
    assert!(fixture.fs().finish_batch().is_err());
    replace(file);
    for _ in 0..2 {
        assert!(fixture.fs().sync(node.id, SyncScope::Data).is_err());
    }
    // The copy is visible as long as the mount lives. After a kill the image's content is visible.
    assert_eq!(fixture.content("a"), b"Small file\n");
    drop(node);
    fixture.killed();
    assert_eq!(fixture.content("a"), b"small file\n");
}

#[test]
fn fsync_of_a_new_name_waits_for_one_that_is_making_it_durable() {
    let Some(fixture) = plain() else { return };
    let union = fixture.fs();
    let new = union
        .make(&ROOT, NodeId::ROOT, b"new", 0o644, &New::File)
        .unwrap();
    let node = union.node(new.node).unwrap();
    // A first sync has begun.
    let first = node.name_sync.lock();
    node.name_is_new.store(false, Ordering::Release);
    let changed = union.root.names_changed.unsynced();
    thread::scope(|scope| {
        let second = scope.spawn(|| union.sync(new.node, SyncScope::All));
        thread::sleep(Duration::from_millis(50));
        assert!(!second.is_finished());
        drop(first);
        second.join().unwrap().unwrap();
    });
    // Until it ends, a sync of another file in the directory syncs the directory too. It does not
    // cover later changes.
    assert!(changed.is_some());
    assert_eq!(union.root.names_changed.unsynced(), changed);
    union
        .make(&ROOT, NodeId::ROOT, b"newer", 0o644, &New::File)
        .unwrap();
    union.root.names_changed.synced(changed.unwrap());
    assert!(union.root.names_changed.unsynced().is_some());
    union.sync(NodeId::ROOT, SyncScope::All).unwrap();
    assert_eq!(union.root.names_changed.unsynced(), None);
}

#[test]
fn nothing_but_a_regular_file_is_opened_for_its_content() {
    let Some(fixture) = plain() else { return };
    let union = fixture.union.as_ref().unwrap();
    for device in [Some(rustix::fs::makedev(1, 3)), None] {
        let name = if device.is_some() { "a" } else { "b" };
        let node = union.find_existing(&union.root, name.as_bytes()).unwrap();
        union.ensure_upper(&node).unwrap();
        // As if another object had taken the file's place while its descriptor was closed.
        let kind = match device {
            Some(_) => rustix::fs::FileType::CharacterDevice,
            None => rustix::fs::FileType::Fifo,
        };
        let mode = rustix::fs::Mode::from_raw_mode(0o666);
        let work = union.upper.work();
        rustix::fs::mknodat(work, name, kind, mode, device.unwrap_or(0)).unwrap();
        let file = super::host::open_path(work, name.as_bytes()).unwrap();
        {
            let mut state = node.write_state();
            let upper = state.upper.as_mut().unwrap();
            upper.file = file.map(Arc::new);
            upper.is_fully_open = false;
        }
        let opened = union.open_upper(&node, Access::Data);
        assert_eq!(opened.err(), Some(Errno::IO), "{name}");
    }
}

/// Runs `change` at the same time as a write of one block, again and again. After each round, the
/// counted bytes of the file must equal the space that it takes on the host.
///
/// The host is a tmpfs: for a moment while ext4 writes data back, it reports too few blocks, and so
/// another process with a sync could make a count wrong.
fn count_is_exact_with_concurrent_writes(change: impl Fn(&UnionFs, NodeId) + Sync) {
    let options = UnionOptions {
        size_limit: Some(1 << 30),
        ..UnionOptions::default()
    };
    let memory = Path::new("/dev/shm");
    if lacks("/dev/shm", memory.is_dir()) {
        return;
    }
    let directory = tempfile::tempdir_in(memory).unwrap();
    let Some(fixture) = Fixture::in_directory(directory, options) else {
        return;
    };
    let union = fixture.fs();
    let new = union
        .make(&ROOT, NodeId::ROOT, b"new", 0o644, &New::File)
        .unwrap();
    let empty = fixture.counted();
    let rounds = Barrier::new(2);
    let differs = thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..10_000 {
                rounds.wait();
                change(union, new.node);
                rounds.wait();
            }
        });
        let differing = (0..10_000).filter(|_| {
            fixture.write(new.node, 0, &[1; 4096]);
            rounds.wait();
            fixture.write(new.node, 0, &[1; 4096]);
            rounds.wait();
            fixture.counted() != empty + fixture.stored("new")
        });
        differing.count()
    });
    assert_eq!(differs, 0, "rounds with a wrong count");
}

#[test]
fn write_during_a_punch_stays_counted() {
    count_is_exact_with_concurrent_writes(|union, id| {
        union.allocate(id, 0, BLOCK, Allocate::PunchHole).unwrap();
    });
}

#[test]
fn write_during_a_truncation_stays_counted() {
    count_is_exact_with_concurrent_writes(|union, id| {
        union.set_attributes(id, &sized(0)).unwrap();
    });
}

#[test]
fn descriptors_that_are_opened_during_a_recount_are_counted() {
    let Some(fixture) = plain() else { return };
    let union = fixture.fs();
    let nodes: Vec<_> = (0..MANY)
        .map(|number| {
            let node = fixture.node(&format!("many/{number}"));
            union.ensure_upper(&node).unwrap();
            node
        })
        .collect();
    let rounds = Barrier::new(2);
    let differs = thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2000 {
                rounds.wait();
                union.close_idle_descriptors(false);
                rounds.wait();
            }
        });
        let differing = (0..2000).filter(|_| {
            union.close_idle_descriptors(false);
            rounds.wait();
            for node in &nodes {
                union.open_upper(node, Access::Path).unwrap();
            }
            rounds.wait();
            let mut open = 0;
            union.table.for_each(&mut |node| {
                let state = node.read_state();
                let upper = state.upper.as_ref();
                open += usize::from(upper.is_some_and(|upper| upper.file.is_some()));
            });
            union.descriptors.load(Ordering::Relaxed) < open
        });
        differing.count()
    });
    assert_eq!(differs, 0, "rounds with too small a count");
}
