//! The cache: its limit, its list, its check, and fetching all of a file into it.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, SystemTime};

use bcow::Storage;
use bcow_remote::{
    Address, Cache, EntryKind, Options, Problem, Prune, Pruned, Remote, RemoteFile, Root, Warm,
};

use super::server::{Asked, Reply, Server};
use super::{TIMEOUT, cache_directory, good, image, open, options, read_all};

fn limited(directory: &Path, limit: u64) -> Options {
    let cache = Cache::open(directory).expect("a cache");
    Options {
        cache: Some(cache.with_limit(limit).expect("a limit")),
        ..options(None)
    }
}

fn path(directory: &Path, root: Root) -> PathBuf {
    directory.join(format!("{root}.bcow"))
}

fn held(directory: &Path) -> u64 {
    let entries = Cache::open(directory).expect("a cache").entries();
    entries
        .expect("a list")
        .iter()
        .map(|entry| entry.held_bytes)
        .sum()
}

fn set_last_use(directory: &Path, root: Root, ago: Duration) {
    let file = std::fs::File::open(path(directory, root)).expect("a cache file");
    file.set_modified(SystemTime::now() - ago).expect("a time");
}

/// Fetches all of a file into the cache.
fn fill(server: &Server, options: Options, root: Root) -> RemoteFile {
    let file = open(server, options, Some(root)).expect("opens");
    read_all(&file).expect("reads");
    file
}

/// Puts three files into the cache. The first one was not used for the longest time.
fn three_files(cache: &tempfile::TempDir) -> [(Arc<Vec<u8>>, Root); 3] {
    let images = [image(1), image(2), image(3)];
    for (n, (file, root)) in images.iter().enumerate() {
        drop(fill(&good(file), options(Some(cache)), *root));
        let ago = Duration::from_secs(3600 * (3 - n as u64));
        set_last_use(cache.path(), *root, ago);
    }
    images
}

fn warm(file: &RemoteFile) -> Result<u64, bcow_remote::RemoteError> {
    let done = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    file.warm(&Warm {
        connections: 4,
        stop: &stop,
        before: &|| {},
        progress: &|bytes| {
            done.fetch_add(bytes, Ordering::Relaxed);
        },
    })?;
    Ok(done.into_inner())
}

#[test]
fn file_that_was_not_used_longest_is_evicted_first() {
    let cache = cache_directory();
    let images = three_files(&cache);
    let (file, root) = image(4);
    // Room for three files of about 3 MB.
    let limit = 10 << 20;
    drop(fill(&good(&file), limited(cache.path(), limit), root));
    let is_present = |root: Root| path(cache.path(), root).exists();
    assert!(!is_present(images[0].1), "the oldest file");
    assert!(is_present(images[2].1) && is_present(root));
    assert!(held(cache.path()) <= limit);
}

/// Makes a file that this process cannot remove, until the value is dropped: for root a mount
/// point, for others a file that they cannot open.
struct Fixed(PathBuf);

impl Fixed {
    fn new(path: PathBuf) -> Self {
        if rustix::process::geteuid().is_root() {
            rustix::mount::mount_bind(&path, &path).expect("a mount of the file")
        } else {
            rustix::fs::chmod(&path, rustix::fs::Mode::empty()).expect("a mode")
        }
        Fixed(path)
    }
}

impl Drop for Fixed {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_file_that_cannot_be_removed_does_not_keep_the_others() {
    let cache = cache_directory();
    let images = three_files(&cache);
    let oldest = Fixed::new(path(cache.path(), images[0].1));
    let (file, root) = image(4);
    drop(fill(&good(&file), limited(cache.path(), 10 << 20), root));
    let is_present = |root: Root| path(cache.path(), root).exists();
    assert!(is_present(images[0].1) && !is_present(images[1].1));
    assert!(held(cache.path()) <= 10 << 20);
    let error = Cache::open(cache.path())
        .expect("a cache")
        .prune(Prune::All)
        .expect_err("one file stays");
    let name = format!("cannot remove {}.bcow", images[0].1);
    assert!(error.to_string().contains(&name), "{error}");
    assert!(!is_present(images[2].1) && !is_present(root));
    drop(oldest);
}

#[test]
fn files_in_use_keep_their_last_use_when_they_are_evicted() {
    let cache = cache_directory();
    let (bytes, root) = image(1);
    let server = good(&bytes);
    let file = fill(&server, options(Some(&cache)), root);
    let ago = Duration::from_secs(7200);
    set_last_use(cache.path(), root, ago);
    // The content of the other file alone exceeds the limit, so all of the first one is evicted.
    let (other, of_other) = image(2);
    drop(fill(
        &good(&other),
        limited(cache.path(), 64 << 10),
        of_other,
    ));
    let metadata = path(cache.path(), root).metadata().expect("a file");
    // The attribute with the origin can take up a block.
    assert!(std::os::unix::fs::MetadataExt::blocks(&metadata) <= 8);
    let age = metadata.modified().expect("a time").elapsed();
    assert!(age.expect("in the past") >= ago);
    assert!(read_all(&file).expect("reads") == *bytes);
}

#[test]
fn files_in_use_keep_working_when_they_are_evicted() {
    let cache = cache_directory();
    let images: Vec<_> = (1..5).map(image).collect();
    let servers: Vec<Server> = images.iter().map(|(file, _)| good(file)).collect();
    let limit = 4 << 20;
    let files: Vec<RemoteFile> = images
        .iter()
        .zip(&servers)
        .map(|((_, root), server)| fill(server, limited(cache.path(), limit), *root))
        .collect();
    // Each process checks after a part of the limit.
    assert!(
        held(cache.path()) <= limit + 4 * (256 << 10),
        "{}",
        held(cache.path())
    );
    for ((bytes, root), file) in images.iter().zip(&files) {
        assert!(
            path(cache.path(), *root).exists(),
            "a file in use is never removed"
        );
        assert!(read_all(file).expect("reads") == **bytes);
    }
}

#[test]
fn nothing_wrong_is_read_while_others_evict() {
    let cache = cache_directory();
    let (bytes, root) = image(1);
    let server = good(&bytes);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for n in 0..6_u64 {
            let (bytes, server, cache, stop) = (&bytes, &server, &cache, &stop);
            scope.spawn(move || {
                let file = open(server, limited(cache.path(), 1 << 20), Some(root)).expect("opens");
                let mut state = n;
                for _ in 0..150 {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                    let at = (state >> 33) as usize % (bytes.len() - 50_000);
                    let mut buf = vec![0; 50_000];
                    file.read_at(at as u64, &mut buf).expect("reads");
                    assert!(buf == bytes[at..at + 50_000]);
                }
                stop.store(true, Ordering::Relaxed);
            });
        }
        // Another process that checks, punches and removes all the time.
        scope.spawn(|| {
            let other = Cache::open(cache.path()).expect("a cache");
            while !stop.load(Ordering::Relaxed) {
                other.verify(root, &mut |_| true).expect("verifies");
                other.prune(Prune::All).expect("prunes");
            }
        });
    });
    assert!(
        held(cache.path()) <= (1 << 20) + 6 * (256 << 10),
        "{}",
        held(cache.path())
    );
}

#[test]
fn verify_punches_out_exactly_what_is_damaged() {
    let cache = cache_directory();
    let (bytes, root) = image(1);
    drop(fill(&good(&bytes), options(Some(&cache)), root));
    let opened = Cache::open(cache.path()).expect("a cache");
    let verify = || {
        opened
            .verify(root, &mut |_| true)
            .expect("verifies")
            .expect("a file")
    };
    let clean = verify();
    assert!(clean.is_complete(), "{clean:?}");
    assert_eq!(clean.right_bytes, bytes.len() as u64);

    let file = std::fs::File::options()
        .write(true)
        .open(path(cache.path(), root))
        .expect("opens");
    for at in [100_000, 100_001, 2 << 20] {
        file.write_all_at(b"damage", at).expect("written");
    }
    let found = verify();
    assert_eq!(found.damaged_bytes, 2 * 16384, "{found:?}");
    assert_eq!(found.right_bytes, bytes.len() as u64 - 2 * 16384);
    assert!(!found.is_complete());
    assert_eq!(verify().damaged_bytes, 0, "the damage is removed");
    let mut left = vec![1; 16384];
    std::fs::File::open(path(cache.path(), root))
        .and_then(|file| file.read_exact_at(&mut left, 2 << 20))
        .expect("reads");
    assert!(left.iter().all(|&byte| byte == 0), "damaged bytes are left");

    // A damaged header: nothing below can be checked.
    file.write_all_at(&[7; 2000], 0).expect("written");
    assert_eq!(verify().right_bytes, 0);
    assert!(read_all(&fill(&good(&bytes), options(Some(&cache)), root)).expect("reads") == **bytes);
    assert!(verify().is_complete());
}

#[test]
fn damaged_tree_leaves_what_is_below_it_unknown() {
    let cache = cache_directory();
    let (bytes, root) = image(1);
    drop(fill(&good(&bytes), options(Some(&cache)), root));
    let opened = Cache::open(cache.path()).expect("a cache");
    // The tree of 3 MB: one chunk of hashes, and the root of 32 bytes behind it.
    let file = std::fs::File::options()
        .write(true)
        .open(path(cache.path(), root))
        .expect("opens");
    file.write_all_at(b"damage", bytes.len() as u64 - 100)
        .expect("written");
    let found = opened
        .verify(root, &mut |_| true)
        .expect("verifies")
        .expect("a file");
    assert!(found.damaged_bytes > 0 && !found.is_complete(), "{found:?}");
    assert!(read_all(&fill(&good(&bytes), options(Some(&cache)), root)).expect("reads") == **bytes);
}

#[test]
fn list_has_the_files_their_origin_and_their_use() {
    let cache = cache_directory();
    let (bytes, root) = image(1);
    let server = good(&bytes);
    let file = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    std::fs::write(cache.path().join("notes.txt"), b"mine").expect("written");
    std::fs::create_dir(cache.path().join("views")).expect("a directory");
    let opened = Cache::open(cache.path()).expect("a cache");
    let entries = opened.entries().expect("a list");
    let entry = |kind| {
        let found = entries.iter().find(|entry| entry.kind == kind);
        found.unwrap_or_else(|| panic!("{kind:?} in {entries:?}"))
    };
    let listed = entry(EntryKind::File(root));
    assert_eq!(listed.origin, Some(server.url("/image.bcow")));
    assert_eq!(listed.file_bytes, Some(bytes.len() as u64));
    assert!(
        listed.is_in_use && listed.held_bytes < bytes.len() as u64 / 8,
        "{listed:?}"
    );
    assert_eq!(entry(EntryKind::Unknown).name, "notes.txt");
    assert_eq!(entries.len(), 2, "{entries:?}");
    drop(file);
    assert!(
        !opened
            .entries()
            .expect("a list")
            .iter()
            .any(|entry| entry.is_in_use)
    );
}

#[test]
fn prune_keeps_what_is_in_use_and_what_is_not_its_own() {
    let cache = cache_directory();
    let (one, root_of_one) = image(1);
    let (two, root_of_two) = image(2);
    let server = good(&one);
    let in_use = fill(&server, options(Some(&cache)), root_of_one);
    drop(fill(&good(&two), options(Some(&cache)), root_of_two));
    std::fs::write(cache.path().join("notes.txt"), b"mine").expect("written");
    set_last_use(cache.path(), root_of_two, Duration::from_secs(7200));
    let opened = Cache::open(cache.path()).expect("a cache");

    let young = Prune::OlderThan(Duration::from_secs(7300));
    assert_eq!(opened.prune(young).expect("prunes").removed_files, 0);
    let all_fits = Prune::Limit(100 << 20);
    assert_eq!(opened.prune(all_fits).expect("prunes").removed_files, 0);
    let old = opened
        .prune(Prune::OlderThan(Duration::from_secs(7100)))
        .expect("prunes");
    assert_eq!((old.removed_files, old.in_use_files), (1, 0));
    assert!(old.removed_bytes >= two.len() as u64);
    let all = opened.prune(Prune::All).expect("prunes");
    assert_eq!((all.removed_files, all.in_use_files), (0, 1));
    assert!(all.held_bytes >= one.len() as u64);
    let asked = server.asked().len();
    assert!(read_all(&in_use).expect("reads") == **one);
    assert_eq!(server.asked().len(), asked, "the file in use is complete");
    drop(in_use);
    let all = opened.prune(Prune::All).expect("prunes");
    assert_eq!(
        (all.removed_files, all.in_use_files, all.held_bytes),
        (1, 0, 0)
    );
    assert_eq!(opened.prune(Prune::All).expect("prunes"), Pruned::default());
    assert!(cache.path().join("notes.txt").exists());
}

#[test]
fn warm_fetches_all_with_several_requests_at_a_time_and_nothing_twice() {
    let cache = cache_directory();
    let (bytes, root) = image(1);
    let file = Arc::clone(&bytes);
    // The first request of `warm` gets its answer when a second one has come.
    let requests = Arc::new((Mutex::new(0), Condvar::new()));
    let warms = Arc::new(AtomicBool::new(false));
    let alone = Arc::new(AtomicBool::new(false));
    let (counted, begun, timed_out) = (
        Arc::clone(&requests),
        Arc::clone(&warms),
        Arc::clone(&alone),
    );
    let server = Server::start(move |_| {
        if begun.load(Ordering::SeqCst) {
            let (number, came) = &*counted;
            let mut number = number.lock().expect("no panic");
            *number += 1;
            came.notify_all();
            let waited = came.wait_timeout_while(number, TIMEOUT / 2, |number| *number < 2);
            timed_out.fetch_or(waited.expect("no panic").1.timed_out(), Ordering::SeqCst);
        }
        Reply::File(file.clone())
    });
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    warms.store(true, Ordering::SeqCst);
    assert_eq!(warm(&remote).expect("fetches"), bytes.len() as u64);
    assert!(!alone.load(Ordering::SeqCst), "one request at a time");
    drop(remote);
    assert!(std::fs::read(path(cache.path(), root)).expect("reads") == **bytes);
    let asked = server.asked().len();
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    assert_eq!(warm(&remote).expect("is complete"), bytes.len() as u64);
    assert_eq!(server.asked().len(), asked);
}

#[test]
fn warm_goes_on_where_it_was_stopped() {
    let cache = cache_directory();
    let (bytes, root) = image(1);
    let server = good(&bytes);
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    let stop = AtomicBool::new(false);
    let done = AtomicU64::new(0);
    remote
        .warm(&Warm {
            connections: 1,
            stop: &stop,
            before: &|| {},
            progress: &|count| {
                let before = done.fetch_add(count, Ordering::Relaxed);
                stop.store(before + count > 1 << 20, Ordering::Relaxed);
            },
        })
        .expect("stops");
    drop(remote);
    let sent = |asked: &[Asked]| -> usize {
        let ranges = asked.iter().filter_map(|asked| asked.range);
        ranges
            .map(|(first, last)| last.min(bytes.len() - 1) + 1 - first)
            .sum()
    };
    let before = server.asked().len();
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    warm(&remote).expect("fetches the rest");
    let asked = server.asked();
    assert!(
        sent(&asked[before..]) < bytes.len() - (1 << 20),
        "the beginning is fetched again"
    );
    assert!(std::fs::read(path(cache.path(), root)).expect("reads") == **bytes);
}

#[test]
fn warm_without_room_is_an_error() {
    let (bytes, root) = image(1);
    let server = good(&bytes);
    let remote = open(&server, options(None), Some(root)).expect("opens");
    let error = warm(&remote).expect_err("no cache");
    assert!(matches!(error.problem, Problem::NotKept(_)), "{error}");
    let cache = cache_directory();
    let remote = open(&server, limited(cache.path(), 1 << 20), Some(root)).expect("opens");
    let error = warm(&remote).expect_err("a limit");
    assert!(error.to_string().contains("limit of the cache"), "{error}");
}

#[test]
fn ten_thousand_reads_from_a_server_with_wrong_bytes_are_right_or_fail() {
    let (bytes, root) = image(1);
    let cache = cache_directory();
    let file = Arc::clone(&bytes);
    let state = AtomicU64::new(1);
    let wrong_answers = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&wrong_answers);
    // Every fifth answer has a wrong byte at a random place: in header, tree or content.
    let server = Server::start(move |asked| {
        let step = |n: u64| {
            n.wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407)
        };
        let random = state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| Some(step(n)));
        let random = random.unwrap_or_default() >> 16;
        let Some((first, last)) = asked.range.filter(|_| random.is_multiple_of(5)) else {
            return Reply::File(file.clone());
        };
        counted.fetch_add(1, Ordering::SeqCst);
        let mut wrong = file.to_vec();
        let last = last.min(wrong.len() - 1);
        wrong[first + (random / 5) as usize % (last + 1 - first)] ^= 1 << (random % 8);
        Reply::File(Arc::new(wrong))
    });
    let address = Address::parse(&server.url("/image.bcow")).expect("an address");
    let (mut right, mut failed) = (0, 0);
    let mut state = 7_u64;
    while right + failed < 10_000 {
        // An empty cache again and again, so that much is fetched.
        if let Ok(opened) = Cache::open(cache.path())
            .expect("a cache")
            .prune(Prune::All)
        {
            assert_eq!(opened.in_use_files, 0);
        }
        let remote = Remote::new(options(Some(&cache))).expect("a client");
        let Ok(remote) = remote.open(&address, Some(root.into())) else {
            failed += 1;
            continue;
        };
        for _ in 0..200 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            let length = 1 + (state >> 40) as usize % 40_000;
            let at = (state >> 20) as usize % (bytes.len() - length);
            let mut buf = vec![0; length];
            match remote.read_at(at as u64, &mut buf) {
                Ok(()) if at >= 1024 => {
                    assert!(buf == bytes[at..at + length], "wrong bytes at {at}");
                    right += 1;
                }
                // The tree does not cover every byte of the header slots.
                Ok(()) => right += 1,
                Err(_) => failed += 1,
            }
        }
        drop(remote);
        let opened = Cache::open(cache.path()).expect("a cache");
        let found = opened.verify(root, &mut |_| true).expect("verifies");
        let found = found.unwrap_or_default();
        assert_eq!(
            found.damaged_bytes, 0,
            "wrong bytes are in the cache: {found:?}"
        );
    }
    let wrong = wrong_answers.load(Ordering::SeqCst);
    assert!(
        wrong > 100 && right > 5000,
        "{wrong} wrong answers, {right} right, {failed} failed"
    );
}
