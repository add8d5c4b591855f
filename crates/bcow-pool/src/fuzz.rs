//! What clients, a supervisor and earlier processes send, for a fuzzer: requests, answers, records
//! of mounts, and packets with descriptors.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use bcow_images::image::Messages;
use bcow_mounts::control::read_line;
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::Value;

use crate::asked::{Asked, Bytes};
use crate::given::{Given, Kept, send_shared, take, take_shared};
use crate::link::{Link, Packet, Wait};
use crate::protocol::{
    Answer, Hello, Outcome, Request, decode_request, encode_request, line, read_answer,
};
use crate::record::MountRecord;

/// More are not sent: a socket has little space.
const MOST_BYTES: usize = 60_000;
const MOST_PACKETS: usize = 30;

/// Reads `bytes` as what the first of them says. Errors are expected; only a panic, or a property
/// that does not hold, is a finding.
pub fn fuzz_messages(bytes: &[u8]) {
    let Some((&what, bytes)) = bytes.split_first() else {
        return;
    };
    let free = free_descriptor();
    match what % 5 {
        0 => read_request(bytes),
        1 => read_answers(bytes),
        2 => read_record(bytes),
        3 => read_given(bytes),
        _ => read_kept(bytes),
    }
    assert_eq!(free_descriptor(), free, "a descriptor stays open");
}

/// The number of the next descriptor. It shows whether all others were closed.
fn free_descriptor() -> i32 {
    null().as_raw_fd()
}

fn null() -> OwnedFd {
    let null = File::open("/dev/null");
    assert!(null.is_ok(), "{null:?}");
    null.map_or_else(|_| unreachable!(), OwnedFd::from)
}

/// A request, from the socket on.
fn read_request(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(MOST_BYTES)];
    let Ok((ours, theirs)) = UnixStream::pair() else {
        return;
    };
    assert!((&ours).write_all(bytes).is_ok());
    assert!(ours.shutdown(Shutdown::Write).is_ok());
    let Ok(found) = read_line(&theirs, MOST_BYTES / 2, None) else {
        return;
    };
    assert!(found.len() < MOST_BYTES / 2 && bytes.starts_with(&found));
    let Ok(request) = decode_request(&found) else {
        return;
    };
    let again = encode_request(&request).map(|line| decode_request(&line));
    assert!(again.is_ok_and(|again| again.is_ok_and(|again| again == request)));
    if let Request::Mount { asked, .. } = request {
        read_asked(&asked);
    }
}

fn read_asked(asked: &Asked) {
    for string in asked.arguments.iter().chain([&asked.directory]) {
        let string = OsString::from(string.clone());
        let again = OsString::from(Bytes::from(&*string));
        assert_eq!(again, string);
    }
    let _ = asked.args();
}

/// The lines that a client gets.
fn read_answers(bytes: &[u8]) {
    if let Ok(hello) = serde_json::from_slice::<Hello>(bytes) {
        let again = line(&hello).map(|line| serde_json::from_slice::<Hello>(&line));
        assert!(again.is_ok_and(|again| again.is_ok()));
    }
    let Ok(answer) = serde_json::from_slice::<Answer<Value>>(bytes) else {
        return;
    };
    let count = answer.messages.len();
    let again = line(&answer).map(|line| serde_json::from_slice::<Answer<Value>>(&line));
    let is_same = |again: Answer<Value>| {
        let same = again.messages == answer.messages;
        same && match (&again.result, &answer.result) {
            (Outcome::Done(again), Outcome::Done(value)) => again == value,
            (Outcome::Failed(again), Outcome::Failed(error)) => {
                again.in_one_line() == error.in_one_line() && again.exit() == error.exit()
            }
            (Outcome::Again, Outcome::Again) => true,
            _ => false,
        }
    };
    assert!(again.is_ok_and(|again| again.is_ok_and(is_same)));
    let shown = Shown::default();
    match read_answer(bytes, &shown) {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => assert_ne!(error.exit(), 0, "a failure with the status of success"),
        Err(error) => unreachable!("an answer that was read: {error}"),
    }
    assert_eq!(shown.0.take(), count);
}

/// Counts the messages.
#[derive(Default)]
struct Shown(std::cell::Cell<usize>);

impl Shown {
    fn count(&self) {
        self.0.set(self.0.get() + 1);
    }
}

impl Messages for Shown {
    fn status(&self, text: &dyn Display) {
        // Nothing else escapes what is shown as it is.
        assert!(!text.to_string().contains(char::is_control));
        self.count();
    }

    fn warning(&self, _: &dyn Display) {
        self.count();
    }

    fn hint(&self, _: &str) {
        self.count();
    }
}

/// The record of a mount, in a memory file.
fn read_record(bytes: &[u8]) {
    let Ok(file) = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC) else {
        return;
    };
    let mut file = File::from(file);
    assert!(file.write_all(bytes).is_ok());
    let Ok(record) = MountRecord::load(&file.into()) else {
        return;
    };
    let again = record.store().and_then(|file| MountRecord::load(&file));
    assert!(again.is_ok_and(|again| again == record));
    read_asked(&record.asked);
    let slots = record.slots();
    if !slots.is_empty() {
        assert_eq!(record.clone().with_slots(&slots).slots(), slots);
    }
    if let Some(disk) = &record.disk
        && let Ok(place) = record.place(disk)
    {
        let name = bcow_mount::HiddenName::parse(&format!("/{}", place.name));
        assert_eq!(name, Some(place.name));
    }
}

/// The packets of an input: each is behind a byte with the number of its descriptors, and ends with
/// a zero byte.
fn packets(bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let packets = bytes.split(|&byte| byte == 0).take(MOST_PACKETS);
    packets.filter_map(|packet| {
        let (&count, text) = packet.split_first()?;
        // One more than a receiver takes.
        (!text.is_empty()).then_some((usize::from(count) % 4, text))
    })
}

/// Sends a packet with any text. Fails if the socket is full, or the packet is too long.
fn send(link: &Link, text: &[u8], descriptors: usize) -> io::Result<()> {
    let files: Vec<OwnedFd> = (0..descriptors).map(|_| null()).collect();
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(link, &[IoSlice::new(text)], &mut control, flags)?;
    Ok(())
}

/// What a new process gets from its supervisor.
fn read_given(bytes: &[u8]) {
    let Ok((supervisor, process)) = Link::pair() else {
        return;
    };
    for (descriptors, text) in packets(bytes) {
        if send(&supervisor, text, descriptors).is_err() {
            break;
        }
    }
    drop(supervisor);
    let _ = Given::receive(&process);
}

/// What a supervisor gets from its process. It gives the same to the next process.
fn read_kept(bytes: &[u8]) {
    let Ok((supervisor, process)) = Link::pair() else {
        return;
    };
    let (mut mounts, mut shared) = (BTreeMap::new(), None);
    for (descriptors, text) in packets(bytes) {
        if send(&process, text, descriptors).is_err() {
            break;
        }
        match supervisor.receive(Wait::No) {
            Ok(Some((Packet::Shared { agreed, next_slot }, descriptors))) => {
                shared = take_shared(agreed, next_slot, descriptors).ok().or(shared);
            }
            Ok(Some((packet, descriptors))) => {
                let encoded = serde_json::to_vec(&packet);
                let again = encoded.map(|bytes| serde_json::from_slice::<Packet>(&bytes));
                let is_known = packet != Packet::Unknown;
                let is_same = again.is_ok_and(|again| again.is_ok_and(|again| again == packet));
                assert!(is_same || !is_known);
                let _ = take(&mut mounts, packet, descriptors);
            }
            Ok(None) | Err(_) => {}
        }
    }
    // A socket has little space.
    while mounts.len() > 8 {
        mounts.pop_last();
    }
    let Ok((supervisor, process)) = Link::pair() else {
        return;
    };
    let socket = Packet::Socket {
        since: 0,
        restarts: 0,
        supervisor: 1,
        log_file: None,
        keeps_shared: true,
    };
    let (listener, link) = (null(), &supervisor);
    let sent = link
        .send(&socket, &[listener.as_fd()])
        .and_then(|()| {
            mounts
                .iter()
                .try_for_each(|(&number, kept)| kept.send(link, number))
        })
        .and_then(|()| {
            shared
                .iter()
                .try_for_each(|shared| send_shared(link, shared))
        })
        .and_then(|()| link.send(&Packet::Begin, &[]));
    assert!(sent.is_ok(), "{sent:?}");
    drop(supervisor);
    let given = Given::receive(&process);
    let Ok(given) = given else {
        panic!("{:?}", given.err());
    };
    let parts = |mounts: &BTreeMap<u64, Kept>| {
        let parts = mounts.iter().map(|(&number, kept)| {
            let has = [
                kept.companion.is_some(),
                kept.disk.is_some(),
                kept.upper.is_some(),
                kept.outcome.is_some(),
            ];
            (number, kept.device.clone(), kept.is_disk, has)
        });
        parts.collect::<Vec<_>>()
    };
    assert_eq!(parts(&given.mounts), parts(&mounts));
    assert_eq!(given.shared.is_some(), shared.is_some());
}
