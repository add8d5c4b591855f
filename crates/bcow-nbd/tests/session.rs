//! Sessions of clients that follow the protocol.

mod common;

use bcow_testkit::changed;
use common::{Client, DISK_BYTES, MemoryDisk, Running, counting};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use bcow_nbd::ServerOptions;
use bcow_nbd::proto::{Framing, chunk, command_flag, info, option, option_reply};

const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

const TRIM: u16 = 4;
const CACHE: u16 = 5;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;
const FLUSH: u16 = 3;

#[test]
fn every_size_of_write_is_read_back_in_every_framing() {
    let server = Running::start();
    for framing in FRAMINGS {
        let mut client = server.client("disk", framing);
        // Payloads used from the receive buffer, received as a whole, and received in pieces; none
        // is aligned.
        for length in [1, 511, 4096, 70_000, 200_000, 1 << 20, (5 << 20) + 3] {
            let bytes = counting(length);
            assert_eq!(client.write(0, 13, &bytes), 0);
            assert!(
                client.read(13, length).unwrap() == bytes,
                "{framing:?} {length}"
            );
        }
        client.disconnect();
    }
}

#[test]
fn export_name_is_the_old_way_in() {
    let server = Running::start();
    for (flags, zeros) in [(1u32, 124), (3, 0)] {
        let mut client = server.connect();
        client.receive(18);
        client.send(&flags.to_be_bytes());
        client.option(option::EXPORT_NAME, b"image");
        assert_eq!(client.u64(), 3 << 20);
        assert_ne!(client.u16() & 2, 0, "read-only");
        assert_eq!(client.receive(zeros), vec![0; zeros]);
        assert_eq!(client.read(0, 512).unwrap(), counting(512));
    }
    let mut client = server.connect();
    client.greet();
    client.option(option::EXPORT_NAME, b"nothing");
    assert!(client.is_closed());
}

#[test]
fn list_has_names_and_descriptions() {
    let server = Running::start();
    let mut client = server.connect();
    client.greet();
    client.option(option::LIST, &[]);
    for expected in [&b"\0\0\0\x04diskin memory"[..], &b"\0\0\0\x05image"[..]] {
        let reply = client.option_reply(option::LIST);
        assert_eq!(reply, (option_reply::SERVER, expected.to_vec()));
    }
    assert_eq!(client.option_reply(option::LIST).0, option_reply::ACK);
    client.option(option::ABORT, &[]);
    assert_eq!(client.option_reply(option::ABORT).0, option_reply::ACK);
    assert!(client.is_closed());
}

#[test]
fn info_tells_what_is_asked_for() {
    let server = Running::start();
    let mut client = server.connect();
    client.greet();
    let wanted = [info::NAME, info::DESCRIPTION, 77];
    let infos = client.info(option::INFO, "disk", &wanted);
    let kinds: Vec<u16> = infos
        .iter()
        .filter(|(kind, _)| *kind == option_reply::INFO)
        .map(|(_, data)| u16::from_be_bytes(data[..2].try_into().unwrap()))
        .collect();
    assert_eq!(
        kinds,
        [
            info::EXPORT,
            info::BLOCK_SIZE,
            info::NAME,
            info::DESCRIPTION
        ]
    );
    assert_eq!(infos[0].1[2..10], DISK_BYTES.to_be_bytes());
    assert_eq!(infos[2].1[2..], *b"disk");
    assert_eq!(infos[3].1[2..], *b"in memory");
    // With two exports, the empty name selects none.
    let none = client.info(option::INFO, "", &[]);
    assert_eq!(none[0].0, option_reply::ERR_UNKNOWN);
    client.go("image");
}

#[test]
fn contexts_are_listed_and_chosen_by_name() {
    let server = Running::start();
    let mut client = server.connect();
    client.greet();
    let both = ["base:allocation", "qemu:allocation-depth"].map(|name| (0, name.to_owned()));
    let mut list = |queries: &[&str]| client.contexts(option::LIST_META_CONTEXT, "disk", queries);
    assert_eq!(list(&[]), both);
    assert_eq!(list(&["base:", "x-other:"]), both[..1]);
    assert_eq!(list(&["qemu:"]), both[1..]);
    client.negotiate(Framing::Structured);
    let mut choose = |queries: &[&str]| client.contexts(option::SET_META_CONTEXT, "disk", queries);
    // A namespace without a name selects no context.
    assert_eq!(choose(&["base:"]), []);
    assert_eq!(choose(&["base:nothing"]), []);
    assert_eq!(
        choose(&["base:allocation"]),
        [(1, "base:allocation".to_owned())]
    );
    // The contexts were selected for another export.
    client.go("image");
    assert_eq!(client.errno(BLOCK_STATUS, 0, 0, 4096), 22);
}

#[test]
fn contexts_need_structured_replies() {
    let server = Running::start();
    let mut client = server.connect();
    client.greet();
    let mut data = common::string("disk");
    data.extend(0u32.to_be_bytes());
    client.option(option::SET_META_CONTEXT, &data);
    let (kind, _) = client.option_reply(option::SET_META_CONTEXT);
    assert_eq!(kind, option_reply::ERR_INVALID);
}

#[test]
fn status_says_where_data_are_and_which_file_has_them() {
    let server = Running::start();
    for framing in [Framing::Structured, Framing::Extended] {
        let mut client = server.client_with_contexts("disk", framing);
        client.write(0, 4096, &[1; 8192]);
        let chunks = client.ask(BLOCK_STATUS, 0, 0, DISK_BYTES);
        let hole = DISK_BYTES - 12288;
        let expected = [
            (1, vec![(4096, 3), (8192, 0), (hole, 3)]),
            (2, vec![(4096, 0), (8192, 1), (hole, 0)]),
        ];
        let got: Vec<_> = chunks.iter().map(|chunk| extents(framing, chunk)).collect();
        assert_eq!(got, expected);
        let chunks = client.ask(BLOCK_STATUS, command_flag::REQ_ONE, 5000, 1 << 20);
        assert_eq!(extents(framing, &chunks[0]).1, [(12288 - 5000, 0)]);
        client.ask(TRIM, 0, 0, DISK_BYTES);
    }
}

fn extents(framing: Framing, chunk: &common::Chunk) -> (u32, Vec<(u64, u64)>) {
    let number = |bytes: &[u8]| bytes.iter().fold(0, |n, &byte| n << 8 | u64::from(byte));
    let payload = &chunk.payload;
    let (kind, head, half) = match framing {
        Framing::Extended => (chunk::BLOCK_STATUS_EXT, 8, 8),
        _ => (chunk::BLOCK_STATUS, 4, 4),
    };
    assert_eq!(chunk.kind, kind);
    let pairs: Vec<_> = payload[head..]
        .chunks(2 * half)
        .map(|pair| (number(&pair[..half]), number(&pair[half..])))
        .collect();
    if head == 8 {
        assert_eq!(number(&payload[4..8]), pairs.len() as u64);
    }
    (number(&payload[..4]) as u32, pairs)
}

#[test]
fn zeros_come_as_holes_unless_the_client_wants_one_piece() {
    let server = Running::start();
    let mut client = server.client("disk", Framing::Structured);
    client.write(0, 1 << 20, &[7; 4096]);
    let kinds = |chunks: &[common::Chunk]| -> Vec<u16> { chunks.iter().map(|c| c.kind).collect() };
    let chunks = client.ask(0, 0, 0, 2 << 20);
    assert_eq!(
        kinds(&chunks),
        [chunk::OFFSET_HOLE, chunk::OFFSET_DATA, chunk::OFFSET_HOLE]
    );
    let whole = common::assemble(Framing::Structured, &chunks, 0, 2 << 20).unwrap();
    let chunks = client.ask(0, command_flag::DF, 0, 2 << 20);
    assert_eq!(kinds(&chunks), [chunk::OFFSET_DATA]);
    assert!(common::assemble(Framing::Structured, &chunks, 0, 2 << 20).unwrap() == whole);
    assert!(whole[1 << 20..][..4096] == [7; 4096]);
}

#[test]
fn trim_and_zeroes_make_zeros() {
    let server = Running::start();
    for framing in FRAMINGS {
        let mut client = server.client("disk", framing);
        for (command, flags, errno) in [
            (TRIM, 0, 0),
            (WRITE_ZEROES, 0, 0),
            (WRITE_ZEROES, command_flag::NO_HOLE, 0),
            (WRITE_ZEROES, command_flag::FAST_ZERO, 0),
            (
                WRITE_ZEROES,
                command_flag::FAST_ZERO | command_flag::NO_HOLE,
                95,
            ),
        ] {
            client.write(0, 0, &[9; 8192]);
            assert_eq!(client.errno(command, flags, 4096, 4096), errno);
            let left = if errno == 0 { 0 } else { 9 };
            assert_eq!(
                client.read(4095, 2).unwrap(),
                [9, left],
                "{command} {flags}"
            );
        }
        assert_eq!(client.errno(CACHE, 0, 0, DISK_BYTES), 0);
    }
}

#[test]
fn flush_and_fua_reach_the_disk() {
    let server = Running::start();
    let mut client = server.client("disk", Framing::Structured);
    let flushes = || server.disk.flushes.load(Ordering::SeqCst);
    client.write(0, 0, &[1; 512]);
    assert_eq!(flushes(), 0);
    client.write(command_flag::FUA, 0, &[1; 512]);
    assert_eq!(flushes(), 1);
    client.write(command_flag::FUA, 0, &[1; 3 << 20]);
    assert_eq!(flushes(), 2);
    client.errno(FLUSH, 0, 0, 0);
    client.errno(TRIM, command_flag::FUA, 0, 4096);
    client.errno(WRITE_ZEROES, command_flag::FUA, 0, 4096);
    assert_eq!(flushes(), 5);
}

#[test]
fn extended_headers_reach_further_than_32_bits() {
    let server = Running::start();
    let mut client = server.client("disk", Framing::Extended);
    // Ranges beyond the end are refused. The length is not truncated to 32 bits.
    assert_eq!(client.errno(WRITE_ZEROES, 0, 0, 1 << 33), 28);
    assert_eq!(client.errno(TRIM, 0, 0, 1 << 63), 22);
    assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
}

#[test]
fn bad_places_fail_by_themselves() {
    let mut disk = MemoryDisk::new();
    disk.bad_from = 3 << 20;
    let server = Running::with(disk, ServerOptions::default());
    for framing in FRAMINGS {
        let mut client = server.client("disk", framing);
        client.write(0, 0, &vec![3; 3 << 20]);
        assert_eq!(client.read(3 << 20, 4096), Err(5));
        assert_eq!(client.read((3 << 20) - 4096, 8192), Err(5));
        assert_eq!(client.write(0, (2 << 20) - 1, &vec![3; 2 << 20]), 5);
        assert!(client.read(0, 4096).unwrap() == [3; 4096]);
    }
    server.disk.mark(&(0..4 << 20), true);
    // The reply contains the content before the error, and the offset of the error.
    let mut client = server.client("disk", Framing::Structured);
    let chunks = client.ask(0, 0, 0, 4 << 20);
    let last = chunks.last().unwrap();
    assert_eq!(last.kind, chunk::ERROR_OFFSET);
    assert_eq!(
        last.payload[last.payload.len() - 8..],
        (3u64 << 20).to_be_bytes()
    );
    assert!(chunks.iter().any(|chunk| chunk.kind == chunk::OFFSET_DATA));
}

#[test]
fn slow_requests_do_not_hold_up_each_other() {
    const COUNT: u32 = 64;
    let options = ServerOptions::default();
    let together = options.in_flight;
    let mut disk = MemoryDisk::new();
    // The first read is slow, so that the server passes the turn for later reads. No later read
    // completes until the limit of parallel requests is in flight.
    let (met, met_too) = (
        Arc::new((Mutex::new(0), Condvar::new())),
        AtomicUsize::new(0),
    );
    disk.on_read = Box::new(move || {
        if met_too.fetch_add(1, Ordering::SeqCst) == 0 {
            return std::thread::sleep(Duration::from_millis(5));
        }
        let (count, changed) = &*met;
        let mut count = count.lock().unwrap();
        *count += 1;
        changed.notify_all();
        drop(
            changed
                .wait_while(count, |count| *count < together)
                .unwrap(),
        );
    });
    let server = Running::with(disk, options);
    let mut client = server.client("disk", Framing::Structured);
    let mut requests = Vec::new();
    for _ in 0..COUNT {
        requests.extend(client.request(0, 0, 0, 512));
    }
    client.send(&requests);
    let mut cookies: Vec<u64> = (0..COUNT).map(|_| client.chunk(0).cookie).collect();
    cookies.sort();
    assert_eq!(cookies, (1..=COUNT.into()).collect::<Vec<u64>>());
}

#[test]
fn what_is_being_done_is_finished_when_the_server_stops() {
    let mut disk = MemoryDisk::new();
    let (begun, has_begun) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let may_go_on = Mutex::new(may_go_on);
    disk.on_read = Box::new(move || {
        begun.send(()).unwrap();
        may_go_on.lock().unwrap().recv().unwrap();
    });
    let mut server = Running::with(disk, ServerOptions::default());
    let mut client = server.client("disk", Framing::Structured);
    client.begin(0, 0, 0, 512);
    has_begun.recv().unwrap();
    server.begin_stop();
    go_on.send(()).unwrap();
    server.stop().unwrap();
    let chunk = client.chunk(512);
    assert_eq!((chunk.errno, chunk.payload.len()), (0, 512 + 8));
    assert!(client.is_closed());
    assert!(!server.directory.path().join("socket").exists());
    assert_eq!(server.disk.flushes.load(Ordering::SeqCst), 1);
}

#[test]
fn clients_beyond_the_limit_get_an_error() {
    let options = changed(ServerOptions::default(), |new| new.max_clients = 2);
    let server = Running::with(MemoryDisk::new(), options);
    let first = server.client("disk", Framing::Simple);
    let _second = server.client("disk", Framing::Simple);
    let mut third = server.connect();
    third.greet();
    let refused = third.info(option::GO, "disk", &[]);
    assert_eq!(refused[0].0, option_reply::ERR_POLICY);
    assert!(String::from_utf8_lossy(&refused[0].1).contains("limit of clients"));
    drop(third);
    first.disconnect();
    // The server frees the place of the client when it notices the disconnection.
    let begin = Instant::now();
    loop {
        let mut client = server.connect();
        client.greet();
        if client.info(option::GO, "disk", &[])[0].0 == option_reply::INFO {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn rate_holds_a_client_back() {
    let options = changed(ServerOptions::default(), |new| new.rate = Some(1 << 20));
    let server = Running::with(MemoryDisk::new(), options);
    let mut client = server.client("image", Framing::Structured);
    let begin = Instant::now();
    // The burst of one second and the request that exceeds it return at once.
    for _ in 0..7 {
        client.read(0, 256 << 10).unwrap();
    }
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(400), "{took:?}");
}

#[test]
fn an_idle_server_ends_by_itself() {
    const IDLE: Duration = Duration::from_millis(500);
    let options = ServerOptions {
        exit_on_idle: Some(IDLE),
        ..ServerOptions::default()
    };
    // The server accepts this client first, however slow the machine is.
    let (server, client) = Running::with_first(MemoryDisk::new(), options, Client::connect);
    let mut client = client.negotiated("image", Framing::Structured);
    std::thread::sleep(IDLE * 2);
    assert!(client.read(0, 512).is_ok(), "it was not idle");
    client.disconnect();
    let begin = Instant::now();
    while server.directory.path().join("socket").exists() {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
}
