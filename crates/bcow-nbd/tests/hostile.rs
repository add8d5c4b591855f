//! Clients that violate the protocol: the server replies as the protocol says, or disconnects them.
//! Other clients are not affected.

mod common;

use bcow_testkit::changed;
use common::{Client, DISK_BYTES, MemoryDisk, Running, string};
use std::io::Write;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use bcow_nbd::ServerOptions;
use bcow_nbd::proto::{self, Framing, command_flag, option, option_reply};

const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EPERM: u32 = 1;
const EOVERFLOW: u32 = 75;

/// The timeout of an impatient server. A regular client must never take as long, even on a busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(2);
/// Limit of the time of any operation that ends at all.
const AT_MOST: Duration = Duration::from_secs(60);

fn impatient() -> ServerOptions {
    ServerOptions {
        handshake_timeout: Some(PATIENCE),
        request_timeout: Some(PATIENCE),
        ..ServerOptions::default()
    }
}

#[test]
fn greetings_that_make_no_sense_end_the_connection() {
    let server = Running::start();
    for flags in [4u32, 0x8000_0001, u32::MAX] {
        let mut client = server.connect();
        client.receive(18);
        client.send(&flags.to_be_bytes());
        assert!(client.is_closed());
    }
    // For example a web browser.
    let mut client = server.connect();
    client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(client.is_closed());
    server.assert_serves();
}

#[test]
fn options_with_a_wrong_magic_or_4_gib_of_data_end_the_connection() {
    let server = Running::start();
    for (magic, option, length) in [
        (proto::OPTION_MAGIC ^ 1, option::LIST, 0),
        (proto::OPTION_MAGIC, option::LIST, u32::MAX),
        (proto::OPTION_MAGIC, 4711, u32::MAX),
        (proto::OPTION_MAGIC, option::EXPORT_NAME, 100_000),
    ] {
        let mut client = server.connect();
        client.greet();
        client.send(&magic.to_be_bytes());
        client.send(&option.to_be_bytes());
        client.send(&length.to_be_bytes());
        assert!(client.is_closed(), "{option} {length}");
    }
    server.assert_serves();
}

#[test]
fn options_that_cannot_be_served_are_refused_and_the_next_one_is_served() {
    let server = Running::start();
    let mut client = server.connect();
    client.greet();
    let mut many_queries = string("disk");
    many_queries.extend(u32::MAX.to_be_bytes());
    let mut too_long = (u32::MAX - 3).to_be_bytes().to_vec();
    too_long.extend([0; 64]);
    let long_name = {
        let mut data = string(&"x".repeat(5000));
        data.extend([0, 0]);
        data
    };
    let trailing = {
        let mut data = string("disk");
        data.extend([0, 0, 1]);
        data
    };
    client.negotiate(Framing::Structured);
    for (option, data, kind) in [
        (0, vec![], option_reply::ERR_UNSUP),
        (4, vec![], option_reply::ERR_UNSUP),
        (u32::MAX, vec![1; 1000], option_reply::ERR_UNSUP),
        (option::LIST, vec![0], option_reply::ERR_INVALID),
        (option::STRUCTURED_REPLY, vec![0], option_reply::ERR_INVALID),
        (option::EXTENDED_HEADERS, vec![0], option_reply::ERR_INVALID),
        (option::STARTTLS, vec![], option_reply::ERR_POLICY),
        (option::INFO, vec![], option_reply::ERR_INVALID),
        (option::INFO, vec![0; 5], option_reply::ERR_INVALID),
        (option::GO, too_long.clone(), option_reply::ERR_INVALID),
        (option::GO, long_name, option_reply::ERR_INVALID),
        (option::GO, trailing, option_reply::ERR_INVALID),
        (option::GO, vec![0; 100_000], option_reply::ERR_TOO_BIG),
        (option::SET_META_CONTEXT, vec![], option_reply::ERR_INVALID),
        (
            option::SET_META_CONTEXT,
            many_queries.clone(),
            option_reply::ERR_INVALID,
        ),
        (
            option::LIST_META_CONTEXT,
            many_queries,
            option_reply::ERR_INVALID,
        ),
        (
            option::LIST_META_CONTEXT,
            too_long,
            option_reply::ERR_INVALID,
        ),
    ] {
        client.option(option, &data);
        let (got, _) = client.option_reply(option);
        assert_eq!(got, kind, "option {option} with {} bytes", data.len());
    }
    client.go("disk");
    assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
}

#[test]
fn ten_thousand_options_are_answered() {
    let server = Running::start();
    let mut client = server.connect();
    client.greet();
    for _ in 0..10_000 {
        client.option(77, &[0; 16]);
        assert_eq!(client.option_reply(77).0, option_reply::ERR_UNSUP);
    }
    client.go("image");
    server.assert_serves();
}

#[test]
fn options_without_end_and_without_reading_the_answers_come_to_an_end() {
    let server = Running::with(MemoryDisk::new(), impatient());
    let mut client = server.connect();
    client.greet();
    let mut bytes = proto::OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option::LIST.to_be_bytes());
    bytes.extend([0; 4]);
    let begin = Instant::now();
    while client.stream.write_all(&bytes).is_ok() {
        assert!(begin.elapsed() < AT_MOST);
    }
    server.assert_serves();
}

#[test]
fn a_wrong_magic_in_transmission_ends_the_connection() {
    let server = Running::start();
    for framing in [Framing::Simple, Framing::Extended] {
        let mut client = server.client("disk", framing);
        let mut request = client.request(0, 0, 0, 512);
        request[3] ^= 1;
        client.send(&request);
        assert!(client.is_closed());
    }
    // Compact requests after the client has selected extended headers.
    let mut client = server.client("disk", Framing::Extended);
    client.framing = Framing::Structured;
    let request = client.request(0, 0, 0, 512);
    client.send(&request);
    client.send(&request);
    assert!(client.is_closed());
    server.assert_serves();
}

#[test]
fn unknown_commands_and_flags_are_invalid_and_the_next_request_is_served() {
    let server = Running::start();
    for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
        let mut client = server.client("disk", framing);
        for (command, flags) in [
            (8, 0),
            (99, 0),
            (u16::MAX, u16::MAX),
            (0, 1 << 6),
            (0, 1 << 15),
            (0, command_flag::NO_HOLE),
            (3, command_flag::REQ_ONE),
            (4, command_flag::FAST_ZERO),
            (6, command_flag::DF),
            (7, 0),
        ] {
            let errno = client.errno(command, flags, 0, 0);
            assert_eq!(errno, EINVAL, "{framing:?} {command} {flags:#x}");
        }
        assert_eq!(client.write(1 << 9, 0, b"not this"), EINVAL);
        assert_eq!(client.read(0, 8).unwrap(), [0; 8]);
    }
}

#[test]
fn what_ends_beyond_the_end_fails_and_changes_nothing() {
    let server = Running::start();
    let mut client = server.client("disk", Framing::Extended);
    for offset in [
        DISK_BYTES - 1,
        DISK_BYTES,
        DISK_BYTES + 1,
        u64::MAX - 1,
        u64::MAX,
    ] {
        assert_eq!(client.read(offset, 2), Err(EINVAL));
        assert_eq!(client.write(0, offset, b"xy"), ENOSPC);
        assert_eq!(client.errno(4, 0, offset, 2), EINVAL);
        assert_eq!(client.errno(5, 0, offset, 2), EINVAL);
        assert_eq!(client.errno(6, 0, offset, 2), ENOSPC);
        assert_eq!(client.errno(6, 0, offset, u64::MAX), ENOSPC);
    }
    assert_eq!(client.read(DISK_BYTES - 1, 1).unwrap(), [0]);
    let mut client = server.client_with_contexts("disk", Framing::Structured);
    assert_eq!(client.errno(7, 0, DISK_BYTES - 1, 2), EINVAL);
    assert_eq!(client.errno(7, 0, 0, 0), EINVAL);
}

#[test]
fn requests_of_4_gib_are_refused() {
    let server = Running::start();
    for (framing, errno) in [(Framing::Simple, EINVAL), (Framing::Structured, EINVAL)] {
        let mut client = server.client("disk", framing);
        for command in [0, 4, 5] {
            client.begin(command, 0, 0, u32::MAX.into());
            assert_eq!(client.chunk(0).errno, errno);
        }
        // The server could not tell the rest of the payload from the next request.
        client.begin(1, 0, 0, u32::MAX.into());
        assert!(client.is_closed());
    }
    let mut client = server.client("disk", Framing::Extended);
    client.begin(1, command_flag::PAYLOAD_LEN, 0, u64::MAX);
    assert!(client.is_closed());
    server.assert_serves();
}

#[test]
fn reads_larger_than_a_payload_are_refused_whatever_the_size_of_the_disk() {
    use bcow_nbd::{Device, Export, Exports, Listener, Server};
    struct Endless;
    impl bcow::BlockDevice for Endless {
        fn size(&self) -> u64 {
            1 << 62
        }
        fn read_at(&self, _: u64, buf: &mut [u8]) -> Result<(), bcow::Error> {
            buf.fill(1);
            Ok(())
        }
    }
    let export = Export {
        name: "endless".into(),
        description: String::new(),
        device: Device::ReadOnly(std::sync::Arc::new(Endless)),
    };
    let options = changed(ServerOptions::default(), |new| new.memory_bytes = 4 << 20);
    let server = Server::new(Exports::new(vec![export]).unwrap(), options).unwrap();
    let stopper = server.stopper();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = Listener::unix(&path).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.serve(&[listener]).unwrap());
        // The empty name selects the only export.
        let connect = |framing| Client::connect(&path).negotiated("", framing);
        let mut simple = connect(Framing::Simple);
        let mut structured = connect(Framing::Structured);
        structured.begin(0, 0, 0, (32 << 20) + 1);
        assert_eq!(structured.chunk(0).errno, EOVERFLOW);
        assert_eq!(structured.read(5, 32 << 20).unwrap(), vec![1; 32 << 20]);
        // A simple reply needs the whole content in one piece, for which there is no memory. A
        // structured reply is sent in smaller pieces.
        let begin = Instant::now();
        simple.begin(0, 0, 0, 32 << 20);
        assert_eq!(simple.chunk(0).errno, 12);
        assert!(begin.elapsed() < AT_MOST);
        assert_eq!(simple.read(5, 1 << 20).unwrap(), vec![1; 1 << 20]);
        stopper.stop();
    });
}

#[test]
fn payloads_nobody_wants_are_dropped_and_the_next_request_is_found() {
    let server = Running::start();
    for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
        let mut client = server.client("image", framing);
        for length in [0, 1, 5000, 300_000, 32 << 20] {
            assert_eq!(client.write(0, 0, &vec![0x25; length]), EPERM);
        }
        assert_eq!(client.read(0, 512).unwrap(), common::counting(512));
    }
    // A payload for a command that has none.
    let mut client = server.client("image", Framing::Extended);
    let mut message = client.request(0, command_flag::PAYLOAD_LEN, 0, 70_000);
    message.extend(vec![0; 70_000]);
    client.send(&message);
    assert_eq!(client.replies(0)[0].errno, EINVAL);
    assert_eq!(client.read(0, 512).unwrap(), common::counting(512));
}

#[test]
fn silence_in_the_middle_of_a_message_ends_the_connection_and_between_messages_does_not() {
    let server = Running::with(MemoryDisk::new(), impatient());
    let mut silent = server.client("disk", Framing::Structured);

    let mut before = server.connect();
    let mut in_option = server.connect();
    in_option.greet();
    in_option.send(&proto::OPTION_MAGIC.to_be_bytes()[..5]);
    let mut in_header = server.client("disk", Framing::Structured);
    let request = in_header.request(0, 0, 0, 512);
    in_header.send(&request[..27]);
    let mut in_payload = server.client("disk", Framing::Structured);
    in_payload.begin(1, 0, 0, 2 << 20);
    in_payload.send(&[0; 100_000]);
    let begin = Instant::now();
    for client in [&mut before, &mut in_option, &mut in_header, &mut in_payload] {
        assert!(client.is_closed());
    }
    assert!(begin.elapsed() < AT_MOST);
    assert_eq!(silent.read(0, 512).unwrap(), [0; 512]);
}

#[test]
fn bytes_that_drip_in_do_not_keep_a_connection() {
    let server = Running::with(MemoryDisk::new(), impatient());
    let mut client = server.client("disk", Framing::Structured);
    client.begin(1, 0, 0, 1 << 20);
    let begin = Instant::now();
    // All data of the request would take hours.
    while client.stream.write_all(&[1]).is_ok() {
        assert!(begin.elapsed() < AT_MOST);
        std::thread::sleep(PATIENCE / 50);
    }
    assert!(client.is_closed());
}

#[test]
fn a_client_that_goes_in_mid_write_leaves_the_disk_as_it_was() {
    let server = Running::start();
    server
        .client("disk", Framing::Structured)
        .write(0, 0, &[1; 65536]);
    for length in [4096, 65_536, 600_000] {
        let mut client = server.client("disk", Framing::Structured);
        client.begin(1, 0, 0, length);
        client.send(&vec![2; length as usize - 1]);
        drop(client);
    }
    server.assert_serves();
    let mut client = server.client("disk", Framing::Structured);
    assert_eq!(client.read(0, 65536).unwrap(), [1; 65536]);
}

#[test]
fn a_client_that_takes_no_replies_is_cut_off_and_others_are_served() {
    let server = Running::with(MemoryDisk::new(), impatient());
    let mut client = server.client("image", Framing::Structured);
    let begin = Instant::now();
    loop {
        let request = client.request(0, 0, 0, 1 << 20);
        if client.stream.write_all(&request).is_err() {
            break;
        }
        assert!(begin.elapsed() < AT_MOST);
        if client.cookie.is_multiple_of(1000) {
            server.assert_serves();
        }
    }
    server.assert_serves();
}

#[test]
fn a_thousand_connections_are_too_many_and_not_for_long() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let most = getrlimit(Resource::Nofile).maximum;
    let raised = Rlimit {
        current: most,
        maximum: most,
    };
    setrlimit(Resource::Nofile, raised).unwrap();
    let options = changed(impatient(), |new| new.max_clients = 200);
    let server = Running::with(MemoryDisk::new(), options);
    let mut busy = server.client("disk", Framing::Structured);
    let crowd: Vec<Client> = (0..1000).map(|_| server.connect()).collect();
    // The connected client stays connected.
    assert_eq!(busy.read(0, 4096).unwrap(), [0; 4096]);
    let begin = Instant::now();
    for mut client in crowd {
        assert!(client.is_closed());
    }
    // After the server has refused the crowd, other clients can connect.
    assert!(begin.elapsed() < AT_MOST);
    server.assert_serves();
    assert_eq!(busy.read(0, 4096).unwrap(), [0; 4096]);
}

#[test]
fn noise_does_no_harm() {
    let server = Running::with(MemoryDisk::new(), impatient());
    let mut state = 1u64;
    let mut noise = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..200 {
        let mut client = match round % 2 {
            0 => server.connect(),
            _ => server.client("disk", Framing::Extended),
        };
        let mut bytes = Vec::new();
        for _ in 0..noise() % 40 {
            bytes.extend(noise().to_be_bytes());
        }
        // A valid header in front lets the bytes reach later checks.
        if round % 4 == 3 {
            let request = client.request(noise() as u16 % 9, noise() as u16, noise(), noise() % 99);
            let _ = client.stream.write_all(&request);
        }
        let _ = client.stream.write_all(&bytes);
    }
    server.assert_serves();
}

#[test]
fn a_client_that_leaves_before_a_large_read_takes_no_memory_with_it() {
    const LARGE: u64 = 1 << 20;
    let options = changed(ServerOptions::default(), |new| new.memory_bytes = LARGE);
    let gate = Arc::new(RwLock::new(()));
    let mut disk = MemoryDisk::new();
    let behind = gate.clone();
    disk.on_read = Box::new(move || drop(behind.read().unwrap()));
    let server = Running::with(disk, options);
    let mut client = server.client("disk", Framing::Simple);
    let mut both = client.request(0, 0, 0, 512);
    both.extend(client.request(0, 0, 0, LARGE));
    {
        // The first reply waits to be sent together with the second, and the client is gone by
        // then.
        let _closed = gate.write().unwrap();
        client.send(&both);
        drop(client);
    }
    let mut client = server.client("disk", Framing::Simple);
    assert_eq!(client.read(0, LARGE as usize).map(drop), Ok(()));
}
