//! Servers that are slow, busy or silent: how long a read waits, and for what it does not wait.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

use bcow::Storage;
use bcow_remote::{Address, Options, Problem, Remote, RemoteError, RemoteFile};

use super::server::{self, Reply, Server, ranged};
use super::{
    AT, LONG, TIMEOUT, cache_directory, error_of_read, good, image, open, options, read_all,
    starts_at,
};

#[test]
fn silent_server_is_an_error_after_the_timeout() {
    let found = error_of_read(|_, _| Reply::Stall(Vec::new()));
    assert!(matches!(found, Problem::Timeout(_)), "{found}");
    let found = error_of_read(|asked, file| {
        let whole = ranged(asked, file, "\"one\"");
        Reply::Stall(whole[..500].to_vec())
    });
    assert!(matches!(found, Problem::Timeout(_)), "{found}");
}

#[test]
fn slow_network_is_no_error_and_a_trickle_is_one() {
    let (file, _) = image(1);
    let cache = cache_directory();
    // Longer than the timeout, but never without bytes for as long.
    let whole = server::answer(200, &[], &file);
    let server = Server::start(move |_| Reply::Slow(whole.clone(), 20, TIMEOUT / 12));
    let remote = open(&server, options(Some(&cache)), None).expect("opens");
    assert!(read_all(&remote).expect("reads") == **file);

    let found = error_of_read(|asked, file| {
        let part = ranged(asked, file, "\"one\"")[..3000].to_vec();
        Reply::Slow(part, 100, TIMEOUT / 20)
    });
    assert!(matches!(found, Problem::Timeout(_)), "{found}");
}

#[test]
fn process_that_hangs_while_it_fetches_does_not_hold_up_others() {
    let (file, root) = image(1);
    let bytes = Arc::clone(&file);
    // What the server does with requests: 1 hangs with the next one, which sets 2.
    let state = Arc::new(AtomicUsize::new(0));
    let of_server = Arc::clone(&state);
    let server = Server::start(move |_| {
        let order = Ordering::SeqCst;
        if of_server.compare_exchange(1, 2, order, order).is_ok() {
            while of_server.load(Ordering::SeqCst) == 2 {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Reply::File(bytes.clone())
    });
    let cache = cache_directory();
    let of_process = |seconds| Options {
        timeout: Duration::from_secs(seconds),
        ..options(Some(&cache))
    };
    let reads = |remote: &RemoteFile| {
        let mut buf = vec![0; 1000];
        remote.read_at(1 << 20, &mut buf).is_ok() && buf == file[1 << 20..(1 << 20) + 1000]
    };
    let first = open(&server, of_process(3600), Some(root)).expect("opens");
    // It waits a quarter of this for another process.
    let second = open(&server, of_process(8), Some(root)).expect("opens");
    state.store(1, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let by_first = scope.spawn(|| reads(&first));
        while state.load(Ordering::SeqCst) == 1 && !by_first.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let by_second = reads(&second);
        let was_hanging = state.swap(0, Ordering::SeqCst) == 2;
        let by_first = by_first.join().expect("no panic");
        assert_eq!((by_second, was_hanging, by_first), (true, true, true));
    });
}

/// Reads of an open file, and the number of requests that they make at a busy server.
fn requests_of_a_read(pause: &'static str) -> usize {
    let (file, root) = image(1);
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let server = Server::start(move |asked| {
        if starts_at(asked, AT) {
            counted.fetch_add(1, Ordering::SeqCst);
            Reply::Answer(429, vec![("retry-after", pause.to_owned())], Vec::new())
        } else {
            Reply::File(file.clone())
        }
    });
    let patient = Options {
        timeout: LONG / 6,
        ..options(None)
    };
    let remote = open(&server, patient, Some(root)).expect("opens");
    let error = remote.read_at(AT as u64, &mut [0; 100]);
    let error = error.expect_err("the server is busy");
    let found = RemoteError::below(&error).expect("an error of this crate");
    assert!(matches!(found.problem, Problem::Busy(429)), "{error}");
    count.load(Ordering::SeqCst)
}

#[test]
fn busy_server_is_asked_after_its_pause_and_the_clients_own() {
    // Own pauses of 0.1 s, 0.2 s, 0.4 s ... 5 s in 10 s, each at least half as long.
    let requests = requests_of_a_read("0");
    assert!((2..=10).contains(&requests), "{requests} requests");
    // One more when the time is nearly over.
    assert_eq!(requests_of_a_read("60"), 2);
}

#[test]
fn server_that_stalls_delays_no_read_from_another() {
    const READS: usize = 20;
    let (file, root) = image(1);
    // Requests that hang, and whether they go on.
    let stalled = Arc::new((Mutex::new((0, false)), Condvar::new()));
    let (shared, bytes) = (Arc::clone(&stalled), Arc::clone(&file));
    let first = Server::start(move |asked| {
        if asked.range.is_some_and(|(first, _)| first >= AT) {
            let (state, changed) = &*shared;
            let mut state = state.lock().expect("no panic");
            state.0 += 1;
            changed.notify_all();
            drop(changed.wait_while(state, |state| !state.1));
        }
        Reply::File(bytes.clone())
    });
    let second = good(&file);
    let remote = Remote::new(Options {
        // No request is given up.
        timeout: 60 * LONG,
        ..options(None)
    })
    .expect("a client");
    let open = |server: &Server| {
        let address = Address::parse(&server.url("/image.bcow")).expect("an address");
        remote.open(&address, Some(root.into())).expect("opens")
    };
    let healthy = open(&second);
    let stalls = {
        stalled.0.lock().expect("no panic").1 = true;
        let opened = open(&first);
        *stalled.0.lock().expect("no panic") = (0, false);
        opened
    };
    std::thread::scope(|scope| {
        for n in 0..READS {
            let stalls = &stalls;
            scope.spawn(move || stalls.read_at((AT + n * 90_000) as u64, &mut [0; 100]));
        }
        let (state, changed) = &*stalled;
        let state = state.lock().expect("no panic");
        drop(
            changed
                .wait_while(state, |state| state.0 < 16)
                .expect("no panic"),
        );
        let (healthy, (has_read, read)) = (&healthy, mpsc::channel());
        scope.spawn(move || {
            let mut buf = [0; 100];
            let result = healthy.read_at(AT as u64, &mut buf).map(|()| buf);
            has_read.send(result).expect("the test waits");
        });
        let read = read.recv_timeout(LONG);
        stalled.0.lock().expect("no panic").1 = true;
        changed.notify_all();
        let read = read.expect("an answer before the other server goes on");
        assert!(read.expect("reads") == file[AT..AT + 100]);
    });
}

#[test]
fn repeated_read_gets_the_error_of_the_first_and_the_next_one_asks_again() {
    let (file, root) = image(1);
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let server = Server::start(move |asked| {
        if starts_at(asked, AT) && counted.fetch_add(1, Ordering::SeqCst) == 0 {
            return Reply::Answer(400, vec![], Vec::new());
        }
        Reply::File(file.clone())
    });
    let remote = open(&server, options(None), Some(root)).expect("opens");
    let read = || remote.read_at(AT as u64, &mut [0; 100]);
    read().expect_err("refused");
    read().expect_err("the same");
    assert_eq!(count.load(Ordering::SeqCst), 1);
    read().expect("asked again");
}
