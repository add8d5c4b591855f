//! Servers without ranges: the whole file goes into the cache, once and only if it fits.

use std::sync::Arc;

use bcow::Storage;
use bcow_remote::{Address, Options, Problem, Remote};

use super::server::{Asked, Reply, Server};
use super::{AT, LONG, cache_directory, good, image, open, options, read_all, starts_at};

#[test]
fn server_without_ranges_sends_the_whole_file_into_the_cache() {
    let (file, root) = image(1);
    let bytes = Arc::clone(&file);
    let server = Server::start(move |_| Reply::Whole(bytes.clone()));
    let error = open(&server, options(None), None)
        .map(drop)
        .expect_err("no cache");
    assert!(matches!(error.problem, Problem::NoRanges(_)), "{error}");

    let cache = cache_directory();
    let limited = Options {
        whole_bytes: file.len() as u64 - 1,
        ..options(Some(&cache))
    };
    let error = open(&server, limited, None)
        .map(drop)
        .expect_err("too long");
    assert!(matches!(error.problem, Problem::NoRanges(_)), "{error}");

    let before = server.asked().len();
    let remote = open(&server, options(Some(&cache)), None).expect("opens");
    assert!(read_all(&remote).expect("reads") == **file);
    assert_eq!(server.asked().len(), before + 1);
    // The next reader needs no server.
    let server = Server::start(|_| Reply::Raw(Vec::new()));
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    assert!(read_all(&remote).expect("reads") == **file);
}

#[test]
fn endless_body_is_read_to_the_length_in_the_header_and_not_at_all_if_that_is_too_long() {
    let (file, _) = image(1);
    let head = b"HTTP/1.1 200 x\r\nconnection: close\r\n\r\n".to_vec();
    let sent = [head, file.repeat(10)].concat();
    let endless = move |_: &Asked| Reply::Raw(sent.clone());
    // The time that a slow machine takes for the many bytes is no failure.
    let patient = |cache| Options {
        timeout: LONG,
        ..options(Some(cache))
    };
    let cache = cache_directory();
    let server = Server::start(endless.clone());
    let limited = Options {
        whole_bytes: 2 << 20,
        ..patient(&cache)
    };
    let error = open(&server, limited, None)
        .map(drop)
        .expect_err("too long");
    assert!(matches!(error.problem, Problem::NoRanges(_)), "{error}");
    let left = || {
        std::fs::read_dir(cache.path())
            .expect("a directory")
            .count()
    };
    assert_eq!(left(), 0, "a half-made file is left in the cache");

    let server = Server::start(endless);
    let remote = Remote::new(patient(&cache)).expect("a client");
    let address = Address::parse(&server.url("/image.bcow")).expect("an address");
    let opened = remote.open(&address, None).expect("opens");
    assert!(read_all(&opened).expect("reads") == **file);
    let received = remote.figures().servers[0].received_bytes;
    assert!(received < file.len() as u64 + (1 << 20), "{received} bytes");
}

#[test]
fn server_without_ranges_serves_what_the_cache_has_lost() {
    let (file, root) = image(1);
    let whole = || {
        let bytes = Arc::clone(&file);
        Server::start(move |_| Reply::Whole(bytes.clone()))
    };
    let cache = cache_directory();
    let server = whole();
    let remote = open(&server, options(Some(&cache)), Some(root)).expect("opens");
    let path = cache.path().join(format!("{root}.bcow"));
    let damage = |at: usize, bytes: usize| {
        let mut held = std::fs::read(&path).expect("reads");
        held[at..at + bytes].fill(7);
        std::fs::write(&path, held).expect("written");
    };
    let reads = |at: usize| {
        let mut buf = vec![0; 5000];
        remote.read_at(at as u64, &mut buf).expect("reads");
        assert!(buf == file[at..at + 5000]);
    };
    // One chunk, and all of the content: each time the file is fetched once.
    damage(AT, 1);
    let before = server.asked().len();
    reads(AT);
    assert_eq!(server.asked().len(), before + 1);
    damage(16384, file.len() - 100_000);
    std::thread::scope(|scope| {
        for n in 0..8 {
            let reads = &reads;
            scope.spawn(move || reads((1 << 20) + (n + 1) * 200_000));
        }
    });
    let requests = server.asked().len();
    assert!(std::fs::read(&path).expect("reads") == **file);
    reads(2 << 20);
    assert_eq!(server.asked().len(), requests);
    drop(remote);

    // A limit below the length is known when the file is opened.
    let small = cache_directory();
    let limited = Options {
        cache: options(Some(&small))
            .cache
            .map(|cache| cache.with_limit(1 << 20).expect("a limit")),
        ..options(None)
    };
    let error = open(&whole(), limited, Some(root))
        .map(drop)
        .expect_err("too small");
    let text = error.to_string();
    assert!(text.contains("the limit of the cache is 1048576"), "{text}");

    // Another file evicts a part of this one.
    let shared = cache_directory();
    let limited = || Options {
        cache: options(Some(&shared))
            .cache
            .map(|cache| cache.with_limit(4 << 20).expect("a limit")),
        ..options(None)
    };
    let (other, other_root) = image(2);
    let servers = (whole(), good(&other));
    let remote = open(&servers.0, limited(), Some(root)).expect("opens");
    let second = open(&servers.1, limited(), Some(other_root)).expect("opens");
    assert!(read_all(&second).expect("reads") == **other);
    assert!(read_all(&remote).expect("reads") == **file);
}

#[test]
fn server_that_stops_to_send_ranges_is_read_without_a_cache() {
    let (file, root) = image(1);
    let bytes = Arc::clone(&file);
    let server = Server::start(move |asked| {
        if starts_at(asked, AT) {
            Reply::Whole(bytes.clone())
        } else {
            Reply::File(bytes.clone())
        }
    });
    let remote = Remote::new(options(None)).expect("a client");
    let address = Address::parse(&server.url("/image.bcow")).expect("an address");
    let opened = remote.open(&address, Some(root.into())).expect("opens");
    let mut buf = vec![0; 5000];
    opened.read_at(AT as u64, &mut buf).expect("reads");
    assert!(buf == file[AT..AT + 5000]);
    let received = remote.figures().servers[0].received_bytes;
    // Those of the image, twice.
    assert!(received < 7 << 20, "{received} bytes");
}
