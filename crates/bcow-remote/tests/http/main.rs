//! Remote files over HTTP: what arrives is what the Merkle tree covers, or an error, in bounded
//! time and memory, with any behaviour of the server.

mod cache;
mod misbehaving;
mod patience;
mod referrers;
pub mod registry;
pub mod server;
mod upload;
mod without_ranges;

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, LazyLock, Mutex};
use std::time::Duration;

use bcow::{Image, ImageWriter, MemoryStorage, OpenOptions, Storage, WriterOptions};
use bcow_remote::{
    Address, Cache, Expected, Fetcher, Keychain, Options, Problem, Remote, RemoteError, RemoteFile,
    Root, Setup,
};
use server::{Asked, Reply, Server, ranged};

/// Longest wait for a server in these tests.
const TIMEOUT: Duration = Duration::from_millis(1500);

/// The time for an operation that ends before it, also on a slow machine.
pub const LONG: Duration = Duration::from_secs(60);

/// Where many tests read the image.
pub const AT: usize = 1 << 20;

/// The image of most tests.
static IMAGE: LazyLock<(Arc<Vec<u8>>, Root)> = LazyLock::new(|| new_image(1));

/// A sealed image of about three megabytes that do not compress, and its root hash.
pub fn image(seed: u64) -> (Arc<Vec<u8>>, Root) {
    match seed {
        1 => IMAGE.clone(),
        seed => new_image(seed),
    }
}

fn new_image(seed: u64) -> (Arc<Vec<u8>>, Root) {
    let storage = Arc::new(MemoryStorage::default());
    let mut writer =
        ImageWriter::on_storage(storage.clone(), WriterOptions::default()).expect("a writer");
    let mut state = seed;
    let noise: Vec<u8> = (0..3 << 20)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    writer.append(&noise).expect("appended");
    writer.begin_metadata().expect("metadata begins");
    writer.append(&noise[..50_000]).expect("appended");
    let written = writer
        .finish(b"superblock", &serde_json::json!({}))
        .expect("finished");
    let root = Root(written.merkle_root());
    drop(written);
    (Arc::new(storage.to_vec()), root)
}

/// Whether a fetcher makes the connections of these tests: the crate `fetched` has them too.
pub const IS_FETCHED: bool = matches!(env!("CARGO_CRATE_NAME").as_bytes(), b"fetched");

pub fn options(cache: Option<&tempfile::TempDir>) -> Options {
    options_with(cache, Arc::new(registry::Stranger))
}

/// With a fetcher, `keychain` is what that one has.
fn options_with(cache: Option<&tempfile::TempDir>, keychain: Arc<dyn Keychain>) -> Options {
    Options {
        insecure: true,
        timeout: TIMEOUT,
        cache: cache.map(|at| Cache::open(at.path()).expect("a cache")),
        fetcher: IS_FETCHED.then(|| fetcher(keychain)),
        ..Options::default()
    }
}

/// A fetcher in threads of this process. It ends when it is not used any more.
fn fetcher(keychain: Arc<dyn Keychain>) -> Arc<Fetcher> {
    let (fetcher, sockets) = Fetcher::pair().expect("sockets");
    let setup = Setup {
        keychain: Box::new(move |_| Arc::clone(&keychain)),
        s3: || Err("no S3".to_owned()),
    };
    std::thread::spawn(|| sockets.serve(setup).expect("served"));
    Arc::new(fetcher)
}

fn cache_directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

pub fn open(
    server: &Server,
    options: Options,
    root: Option<Root>,
) -> Result<RemoteFile, RemoteError> {
    let remote = Remote::new(options).expect("a client");
    let address = Address::parse(&server.url("/image.bcow")).expect("an address");
    remote.open(&address, root.map(Into::into))
}

pub fn good(file: &Arc<Vec<u8>>) -> Server {
    let file = Arc::clone(file);
    Server::start(move |_| Reply::File(file.clone()))
}

/// Whether a request is for the bytes from this place on.
fn starts_at(asked: &Asked, place: usize) -> bool {
    asked.range.is_some_and(|(first, _)| first == place)
}

pub fn read_all(file: &RemoteFile) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; file.len()? as usize];
    file.read_at(0, &mut bytes)?;
    Ok(bytes)
}

fn problem(error: &io::Error) -> &Problem {
    let inner = error.get_ref().expect("an error of the library");
    &inner
        .downcast_ref::<RemoteError>()
        .expect("an error of this crate")
        .problem
}

/// The error of the first read of a server that is good until the file is open.
fn error_of_read(
    answers: impl Fn(&Asked, &Arc<Vec<u8>>) -> Reply + Send + Sync + 'static,
) -> Problem {
    let (file, _) = image(1);
    let opened = Arc::new(AtomicUsize::new(0));
    let (seen, bytes) = (Arc::clone(&opened), Arc::clone(&file));
    let server = Server::start(move |asked| match seen.load(Ordering::SeqCst) {
        0 => Reply::File(bytes.clone()),
        _ => answers(asked, &bytes),
    });
    let remote = open(&server, options(None), None).expect("opens");
    opened.store(1, Ordering::SeqCst);
    let error = remote
        .read_at(1 << 20, &mut [0; 4096])
        .expect_err("a hostile answer");
    assert!(error.to_string().contains("/image.bcow"), "{error}");
    problem(&error).clone()
}

#[test]
fn file_reads_as_it_is_on_the_server() {
    let (file, root) = image(1);
    let server = good(&file);
    for cache in [None, Some(cache_directory())] {
        let remote = open(&server, options(cache.as_ref()), Some(root)).expect("opens");
        assert_eq!(remote.root(), root);
        assert!(read_all(&remote).expect("reads") == **file);
        for (offset, length) in [(0, 1), (16383, 2), (100_000, 70_000), (file.len() - 40, 40)] {
            let mut buf = vec![0; length];
            remote.read_at(offset as u64, &mut buf).expect("reads");
            assert!(buf == file[offset..offset + length]);
        }
        remote
            .read_at(file.len() as u64 - 1, &mut [0; 2])
            .expect_err("beyond the end");
    }
}

#[test]
fn image_with_a_known_root_opens_with_few_bytes_and_two_requests() {
    let (file, root) = image(1);
    let server = good(&file);
    let remote = open(&server, options(None), Some(root)).expect("opens");
    let opened = Image::open_storage(Arc::new(remote), &OpenOptions::default()).expect("an image");
    opened.metadata().expect("metadata");
    let sent: usize = server
        .asked()
        .iter()
        .filter_map(|asked| asked.range)
        .map(|(first, last)| last.min(file.len() - 1) + 1 - first)
        .sum();
    assert!(sent < file.len() / 8, "{sent} bytes of {}", file.len());
    let requests = server.asked().len();
    assert!(requests <= 2, "{requests} requests");
}

#[test]
fn file_of_known_length_opens_with_requests_at_the_same_time() {
    let (file, root) = image(1);
    for (length, is_right) in [(file.len(), true), (file.len() - 32, false), (0, false)] {
        let bytes = Arc::clone(&file);
        let (arrived, end_arrived) = std::sync::mpsc::channel();
        let end_arrived = Mutex::new(end_arrived);
        let in_time = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&in_time);
        // The beginning is sent when the request for the end is there.
        let server = Server::start(move |asked| {
            if starts_at(asked, 0) {
                let end = end_arrived.lock().expect("no panic");
                let longest = if is_right { TIMEOUT / 2 } else { Duration::ZERO };
                seen.fetch_add(end.recv_timeout(longest).is_ok().into(), Ordering::SeqCst);
            } else {
                arrived.send(()).expect("the server runs");
            }
            Reply::File(bytes.clone())
        });
        let remote = Remote::new(options(None)).expect("a client");
        let address = Address::parse(&server.url("/image.bcow")).expect("an address");
        let expected = Expected {
            root,
            file_bytes: Some(length as u64),
        };
        let remote = remote.open(&address, Some(expected)).expect("opens");
        let remote = Arc::new(remote);
        let opened = Image::open_storage(remote.clone(), &OpenOptions::default());
        opened.expect("an image").metadata().expect("metadata");
        if is_right {
            assert_eq!(in_time.load(Ordering::SeqCst), 1, "the end came later");
            assert_eq!(server.asked().len(), 2);
        }
        assert!(read_all(&remote).expect("reads") == **file);
    }
}

#[test]
fn requests_one_after_the_other_use_one_connection() {
    let (file, _) = image(1);
    let cache = cache_directory();
    let server = good(&file);
    let remote = open(&server, options(Some(&cache)), None).expect("opens");
    for place in [3 << 20, 1 << 20, 2 << 20] {
        remote.read_at(place, &mut [0; 4096]).expect("reads");
    }
    let asked = server.asked();
    assert!(asked.len() > 4, "{} requests", asked.len());
    let first = asked[0].connection;
    assert!(asked.iter().all(|asked| asked.connection == first));
}

#[test]
fn sequential_reads_take_few_requests() {
    let (file, _) = image(1);
    let server = good(&file);
    let remote = open(&server, options(None), None).expect("opens");
    for at in (0..file.len()).step_by(16384) {
        let mut buf = vec![0; 16384.min(file.len() - at)];
        remote.read_at(at as u64, &mut buf).expect("reads");
        assert!(buf == file[at..at + buf.len()]);
    }
    let count = server.asked().len();
    assert!(count < 16, "{count} requests");
}

#[test]
fn chunk_is_fetched_once_however_many_threads_need_it() {
    let (file, root) = image(1);
    let bytes = Arc::clone(&file);
    let server = Server::start(move |_| {
        std::thread::sleep(Duration::from_millis(20));
        Reply::File(bytes.clone())
    });
    let remote = open(&server, options(None), Some(root)).expect("opens");
    let threads = 12;
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        for n in 0..threads {
            let (remote, barrier, file) = (&remote, &barrier, &file);
            scope.spawn(move || {
                barrier.wait();
                read_from(n, remote, file);
            });
        }
    });
    assert_eq!(fetched_twice(&server), Vec::<usize>::new());
}

/// Reads 2 MB in 20 pieces, from piece `n` on, and compares them.
fn read_from(n: usize, remote: &RemoteFile, file: &[u8]) {
    for step in 0..20 {
        let at = ((step + n) % 20) * 100_000;
        let mut buf = vec![0; 100_000];
        remote.read_at(at as u64, &mut buf).expect("reads");
        assert!(buf == file[at..at + 100_000]);
    }
}

/// The chunks of the first 2 MiB that were requested more than once.
fn fetched_twice(server: &Server) -> Vec<usize> {
    let mut fetched = HashMap::<usize, u32>::new();
    for (first, last) in server.asked().iter().filter_map(|asked| asked.range) {
        for chunk in first / 16384..=last.min(2 << 20) / 16384 {
            *fetched.entry(chunk).or_default() += 1;
        }
    }
    let twice = fetched.into_iter().filter(|&(_, count)| count > 1);
    twice.map(|(chunk, _)| chunk).collect()
}

#[test]
fn chunk_is_fetched_once_however_many_processes_need_it() {
    let (file, root) = image(1);
    let bytes = Arc::clone(&file);
    let server = Server::start(move |_| {
        std::thread::sleep(Duration::from_millis(20));
        Reply::File(bytes.clone())
    });
    let cache = cache_directory();
    std::thread::scope(|scope| {
        for n in 0..8 {
            let (server, cache, file) = (&server, &cache, &file);
            scope.spawn(move || {
                // The locks are those of open files, so each opened cache is as another process.
                let patient = Options {
                    timeout: Duration::from_secs(3600),
                    ..options(Some(cache))
                };
                let remote = open(server, patient, Some(root)).expect("opens");
                read_from(n, &remote, file);
            });
        }
    });
    assert_eq!(fetched_twice(&server), Vec::<usize>::new());
}

#[test]
fn pinned_file_opens_only_with_its_root() {
    let (file, _) = image(1);
    let (_, other) = image(2);
    let opened = open(&good(&file), options(None), Some(other));
    let error = opened.map(drop).expect_err("another file");
    let is_expected = matches!(error.problem, Problem::WrongRoot { .. });
    assert!(is_expected, "{error}");
}

#[test]
fn forged_root_in_the_header_is_found_at_the_first_chunk() {
    // The header of one file before the content of another one.
    let (mut file, root) = image(1);
    let (other, _) = image(2);
    Arc::make_mut(&mut file)[1024..].copy_from_slice(&other[1024..]);
    let opened = open(&good(&file), options(None), Some(root));
    let error = opened.map(drop).expect_err("a forged file");
    assert!(matches!(error.problem, Problem::WrongBytes), "{error}");
}

#[test]
fn wrong_bytes_are_never_returned_nor_cached() {
    let (file, root) = image(1);
    let cache = cache_directory();
    let opened = Arc::new(AtomicUsize::new(0));
    let (seen, bytes) = (Arc::clone(&opened), Arc::clone(&file));
    let server = Server::start(move |asked| {
        let Some((first, _)) = asked.range.filter(|_| seen.load(Ordering::SeqCst) == 1) else {
            return Reply::File(bytes.clone());
        };
        let mut wrong = bytes.to_vec();
        wrong[first + 5000] ^= 1;
        Reply::File(Arc::new(wrong))
    });
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    opened.store(1, Ordering::SeqCst);
    let error = remote
        .read_at(1 << 20, &mut [0; 4096])
        .expect_err("wrong bytes");
    assert!(matches!(problem(&error), Problem::WrongBytes), "{error}");
    assert!(error.to_string().contains("bytes 1048576.."), "{error}");
    opened.store(0, Ordering::SeqCst);
    assert!(read_all(&remote).expect("right bytes") == **file);
}

#[test]
fn damage_on_the_way_is_fetched_again() {
    let (file, _) = image(1);
    let bytes = Arc::clone(&file);
    let count = AtomicUsize::new(0);
    let server = Server::start(move |asked| {
        let mut sent = bytes.to_vec();
        if starts_at(asked, AT) && count.fetch_add(1, Ordering::SeqCst) == 0 {
            sent[1 << 20] ^= 1;
        }
        Reply::File(Arc::new(sent))
    });
    let remote = open(&server, options(None), None).expect("opens");
    let mut buf = [0; 4096];
    remote
        .read_at(1 << 20, &mut buf)
        .expect("the second answer");
    assert_eq!(buf, file[1 << 20..(1 << 20) + 4096]);
}

#[test]
fn changed_file_is_an_error_and_never_a_mixture() {
    let (other, _) = image(2);
    let found = error_of_read(move |_, _| Reply::Tagged(other.clone(), "\"two\""));
    assert!(matches!(found, Problem::Changed), "{found}");
}

#[test]
fn shortened_file_is_an_error() {
    let found = error_of_read(|_, file| Reply::File(Arc::new(file[..2000].to_vec())));
    assert!(matches!(found, Problem::Changed), "{found}");
}

#[test]
fn wrong_ranges_are_refused() {
    let found = error_of_read(|asked, file| {
        let shifted = Asked {
            range: asked.range.map(|(first, last)| (first + 1, last + 1)),
            ..asked.clone()
        };
        Reply::Raw(ranged(&shifted, file, "\"one\""))
    });
    assert!(matches!(found, Problem::Answer(_)), "{found}");
    for range in [
        "bytes x-y/z",
        "bytes 9-3/20",
        "none",
        "bytes 0-99999999999999999999/*",
    ] {
        let found = error_of_read(move |_, _| {
            Reply::Answer(206, vec![("content-range", range.to_owned())], vec![0; 100])
        });
        assert!(matches!(found, Problem::Answer(_)), "{range}: {found}");
    }
}

#[test]
fn short_body_is_continued_where_it_ended() {
    let (file, _) = image(1);
    let bytes = Arc::clone(&file);
    let server = Server::start(move |asked| {
        let whole = ranged(asked, &bytes, "\"one\"");
        // Two chunks arrive at most, and a part of a third one.
        Reply::Raw(whole[..whole.len().min(40_000)].to_vec())
    });
    let remote = open(&server, options(None), None).expect("opens");
    assert!(read_all(&remote).expect("reads") == **file);
}

#[test]
fn shorter_ranges_than_requested_are_enough() {
    let (file, _) = image(1);
    let bytes = Arc::clone(&file);
    let server = Server::start(move |asked| {
        let less = Asked {
            range: asked
                .range
                .map(|(first, last)| (first, last.min(first + 20_000))),
            ..asked.clone()
        };
        Reply::Raw(ranged(&less, &bytes, "\"one\""))
    });
    let remote = open(&server, options(None), None).expect("opens");
    assert!(read_all(&remote).expect("reads") == **file);
}

#[test]
fn redirect_is_followed_once_and_renewed_when_it_expires() {
    let (file, _) = image(1);
    let bytes = Arc::clone(&file);
    let blobs = Server::start(move |asked| match asked.number {
        // The signed address expires.
        3 => Reply::Answer(403, Vec::new(), Vec::new()),
        _ => Reply::File(bytes.clone()),
    });
    let target = blobs.url("/blob?signature=secret");
    let server =
        Server::start(move |_| Reply::Answer(307, vec![("location", target.clone())], vec![]));
    let remote = open(&server, options(None), None).expect("opens");
    assert!(read_all(&remote).expect("reads") == **file);
    assert_eq!(server.asked().len(), 2);
    assert!(
        blobs
            .asked()
            .iter()
            .all(|asked| asked.path == "/blob?signature=secret")
    );
}

#[test]
fn plain_http_needs_permission() {
    let (file, _) = image(1);
    let server = good(&file);
    let strict = Options {
        insecure: false,
        ..options(None)
    };
    // Without certificates on the machine, the client itself is refused.
    let Ok(remote) = Remote::new(strict) else {
        return;
    };
    let address = Address::parse(&server.url("/image.bcow")).expect("an address");
    let error = remote.open(&address, None).map(drop).expect_err("refused");
    assert!(matches!(error.problem, Problem::PlainHttp(_)), "{error}");
    assert!(server.asked().is_empty());
}

#[test]
fn what_is_no_bcow_file_or_is_truncated_does_not_open() {
    let (file, root) = image(1);
    let truncated = file[..file.len() - 1].to_vec();
    for (bytes, pin) in [
        (vec![0; 100_000], None),
        (b"<html>".to_vec(), None),
        (Vec::new(), None),
        (truncated, Some(root)),
    ] {
        let error = open(&good(&Arc::new(bytes)), options(None), pin)
            .map(drop)
            .expect_err("no image");
        assert!(matches!(error.problem, Problem::Format(_)), "{error}");
    }
}

#[test]
fn complete_cache_serves_without_the_server() {
    let (file, root) = image(1);
    let cache = cache_directory();
    {
        let server = good(&file);
        let remote = open(&server, options(Some(&cache)), None).expect("opens");
        assert!(read_all(&remote).expect("reads") == **file);
    }
    let dead = Server::start(|_| Reply::Raw(Vec::new()));
    let remote = open(&dead, options(Some(&cache)), Some(root)).expect("opens");
    assert!(read_all(&remote).expect("reads") == **file);
    assert!(dead.asked().is_empty());
}

#[test]
fn damaged_cache_is_fetched_again() {
    let (file, root) = image(1);
    let cache = cache_directory();
    let server = good(&file);
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    read_all(&remote).expect("reads");
    drop(remote);
    let path = std::fs::read_dir(cache.path())
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .next()
        .expect("a cache file");
    assert!(std::fs::read(&path).expect("reads") == **file);
    let mut one_byte = file.to_vec();
    one_byte[1_500_000] ^= 1;
    let others = [vec![7; file.len()], file[..1 << 20].to_vec(), Vec::new()];
    for damage in others.into_iter().chain([one_byte]) {
        std::fs::write(&path, damage).expect("written");
        let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
        assert!(read_all(&remote).expect("reads") == **file);
        drop(remote);
        assert!(std::fs::read(&path).expect("reads") == **file);
    }
}

#[test]
fn damaged_chunk_in_any_part_of_a_read_is_fetched_again() {
    const CHUNK: usize = 16384;
    let (file, root) = image(1);
    let cache = cache_directory();
    let server = good(&file);
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    read_all(&remote).expect("reads");
    drop(remote);
    let path = cache.path().join(format!("{root}.bcow"));
    // A part of the first chunk, whole chunks, and a part of the last one.
    let range = 40 * CHUNK + 1000..44 * CHUNK + 5000;
    for damaged in 40..=44 {
        let mut bytes = file.to_vec();
        // Of the last chunk, this byte is not read.
        bytes[damaged * CHUNK + 8000] ^= 1;
        std::fs::write(&path, bytes).expect("written");
        let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
        let before = server.asked().len();
        let mut buf = vec![0; range.len()];
        remote.read_at(range.start as u64, &mut buf).expect("reads");
        assert!(buf == file[range.clone()], "chunk {damaged}");
        assert_eq!(server.asked().len(), before + 1, "chunk {damaged}");
        drop(remote);
        assert!(std::fs::read(&path).expect("reads") == **file);
    }
}

#[test]
fn cache_deleted_during_use_does_no_harm() {
    let (file, root) = image(1);
    let cache = cache_directory();
    let server = good(&file);
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    std::fs::remove_dir_all(cache.path()).expect("removed");
    assert!(read_all(&remote).expect("reads") == **file);
}

#[test]
fn cache_of_another_kind_is_refused_or_ignored() {
    use std::os::unix::fs::PermissionsExt;
    let (file, root) = image(1);
    let server = good(&file);
    let cache = cache_directory();
    // A symbolic link under the name of the file is not followed.
    let victim = cache_directory();
    let target = victim.path().join("victim");
    std::fs::write(&target, b"precious").expect("written");
    std::os::unix::fs::symlink(&target, cache.path().join(format!("{root}.bcow"))).expect("a link");
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    assert!(read_all(&remote).expect("reads") == **file);
    assert_eq!(std::fs::read(&target).expect("reads"), b"precious");
    // A directory that others can write to is no cache.
    let open_to_all = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(victim.path(), open_to_all).expect("permitted");
    Cache::open(victim.path()).map(drop).expect_err("refused");
}

#[test]
fn compressed_answer_is_refused() {
    let found = error_of_read(|asked, file| {
        let (first, last) = asked.range.expect("a range");
        let range = format!("bytes {first}-{last}/{}", file.len());
        let headers = vec![
            ("content-range", range),
            ("content-encoding", "gzip".to_owned()),
        ];
        Reply::Answer(206, headers, file[first..=last].to_vec())
    });
    assert!(matches!(found, Problem::Answer(_)), "{found}");
}

#[test]
fn requests_ask_for_the_bytes_as_they_are() {
    let (file, _) = image(1);
    let server = good(&file);
    open(&server, options(None), None).expect("opens");
    for asked in server.asked() {
        assert_eq!(asked.header("accept-encoding"), Some("identity"));
        assert!(asked.header("authorization").is_none());
    }
}

#[test]
fn damaged_header_is_fetched_again() {
    for damages in [1, usize::MAX] {
        let (file, root) = image(1);
        for pin in [None, Some(root)] {
            let bytes = Arc::clone(&file);
            let count = AtomicUsize::new(0);
            let server = Server::start(move |asked| {
                let mut sent = bytes.to_vec();
                if starts_at(asked, 0) && count.fetch_add(1, Ordering::SeqCst) < damages {
                    sent[..1024].fill(b'x');
                }
                Reply::File(Arc::new(sent))
            });
            match open(&server, options(None), pin) {
                Ok(remote) => assert!(damages == 1 && read_all(&remote).expect("reads") == **file),
                Err(error) => {
                    assert!(damages > 1, "{error}");
                    assert!(matches!(error.problem, Problem::Format(_)), "{error}");
                    let heads = server.asked().iter().filter(|a| starts_at(a, 0)).count();
                    assert_eq!(heads, 2);
                }
            }
        }
    }
}

#[test]
fn plain_http_at_an_encrypted_address_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let server = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming().take(3) {
            let mut stream = stream.expect("a connection");
            // Of a greeting in TLS, an HTTP server understands nothing.
            stream
                .write_all(&server::answer(400, &[], b""))
                .expect("sent");
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    let strict = Options {
        insecure: false,
        ..options(None)
    };
    let remote = Remote::new(strict).expect("a client");
    let address = format!("https://{server}/image.bcow");
    let address = Address::parse(&address).expect("an address");
    let error = remote.open(&address, None).map(drop).expect_err("no TLS");
    // Without certificates on the machine, no connection is made.
    let is_named = matches!(error.problem, Problem::NoTls | Problem::Certificates(_));
    assert!(is_named, "{error}");
}
