//! The tests of `http`, with connections that a fetcher makes, and those of the fetcher itself.

#[path = "http/main.rs"]
mod http;

use std::sync::Arc;
use std::time::Instant;

use bcow::Storage;
use bcow_remote::{Address, Fetcher, Options, Problem, Remote, Setup};
use http::registry::Stranger;
use http::server::{Reply, Server};
use http::{AT, IS_FETCHED, LONG, good, image, open, options, read_all};

/// Options with a fetcher that answers `true` when it has ended.
fn with_fetcher() -> (Options, Arc<Fetcher>, std::thread::JoinHandle<bool>) {
    let (fetcher, sockets) = Fetcher::pair().expect("sockets");
    let setup = Setup {
        keychain: Box::new(|_| Arc::new(Stranger)),
        s3: || Err("no S3".to_owned()),
    };
    let serving = std::thread::spawn(|| sockets.serve(setup).is_ok());
    let fetcher = Arc::new(fetcher);
    let options = Options {
        fetcher: Some(Arc::clone(&fetcher)),
        ..options(None)
    };
    (options, fetcher, serving)
}

#[test]
fn a_sealed_fetcher_reads_what_is_open_and_nothing_else() {
    const { assert!(IS_FETCHED) };
    let (bytes, root) = image(1);
    let server = good(&bytes);
    let (options, fetcher, _) = with_fetcher();
    let remote = Remote::new(options).expect("a client");
    let address = Address::parse(&server.url("/image.bcow")).expect("an address");
    let file = remote.open(&address, Some(root.into())).expect("open");
    fetcher.seal().expect("sealed");
    let other = Address::parse(&server.url("/other.bcow")).expect("an address");
    let asked = server.asked().len();
    for address in [&address, &other] {
        let refused = remote.open(address, Some(root.into())).map(drop);
        let refused = refused.expect_err("sealed");
        assert!(refused.to_string().contains("refuses"), "{refused}");
    }
    assert_eq!(server.asked().len(), asked);
    assert!(read_all(&file).expect("read") == **bytes);
    assert!(server.asked().len() > asked);
    assert!(remote.figures().servers[0].received_bytes > 0);
}

#[test]
fn a_fetcher_ends_with_its_process_and_without_it_each_read_fails() {
    let (bytes, root) = image(1);
    let server = good(&bytes);
    let (options, fetcher, serving) = with_fetcher();
    let file = open(&server, options, Some(root)).expect("open");
    drop((file, fetcher));
    assert!(serving.join().expect("no panic"));

    let (fetcher, sockets) = Fetcher::pair().expect("sockets");
    drop(sockets);
    fetcher.wait_for_end();
    let options = Options {
        fetcher: Some(Arc::new(fetcher)),
        ..options_of_nobody()
    };
    let begun = Instant::now();
    let error = open(&server, options, Some(root)).map(drop);
    let error = error.expect_err("no fetcher");
    assert!(matches!(&error.problem, Problem::Connection(why) if why.contains("has ended")));
    assert!(begun.elapsed() < LONG);
}

fn options_of_nobody() -> Options {
    Options {
        fetcher: None,
        ..options(None)
    }
}

#[test]
fn more_reads_at_a_time_than_the_fetcher_has_sockets_all_succeed() {
    let (bytes, root) = image(1);
    let slow = Arc::clone(&bytes);
    let server = Server::start(move |_| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        Reply::File(slow.clone())
    });
    let (mut options, _fetcher, _) = with_fetcher();
    options.timeout = LONG;
    let file = open(&server, options, Some(root)).expect("open");
    std::thread::scope(|scope| {
        for n in 0..100 {
            let (file, bytes) = (&file, &bytes);
            scope.spawn(move || {
                let at = AT + n * 16_384;
                let mut read = vec![0; 1000];
                file.read_at(at as u64, &mut read).expect("read");
                assert!(read == bytes[at..at + 1000]);
            });
        }
    });
}
