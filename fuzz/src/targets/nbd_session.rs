//! Any bytes as what an NBD client says, from the greeting on or from behind a good handshake. What
//! the server answers has to be whole chunks.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock, RwLock};

use bcow::{BlockDevice, Content, Error, Space, Status, WritableDevice};
use bcow_nbd::proto::{self, option};
use bcow_nbd::{Device, Export, Exports, Server, ServerOptions};

const SIZE: usize = 1 << 20;

struct Disk(RwLock<Vec<u8>>);

impl Disk {
    fn range(&self, offset: u64, length: u64) -> Result<std::ops::Range<usize>, Error> {
        // The server has checked it.
        let end = offset.checked_add(length).expect("no overflow");
        assert!(end <= SIZE as u64);
        Ok(offset as usize..end as usize)
    }
}

impl BlockDevice for Disk {
    fn size(&self) -> u64 {
        SIZE as u64
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let range = self.range(offset, buf.len() as u64)?;
        if range.contains(&0x9_9999) {
            return Err(Error::Unsupported("a bad place".into()));
        }
        buf.copy_from_slice(&self.0.read().unwrap()[range]);
        Ok(())
    }
    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        self.range(offset, length)?;
        let content = match (offset >> 16) % 3 {
            0 => Content::Data,
            1 => Content::Zero,
            _ => Content::Hole,
        };
        Ok(Status {
            length: (0x1_0000 - offset % 0x1_0000).min(length),
            content,
            depth: (offset >> 17) as u32 % 4,
        })
    }
}

impl WritableDevice for Disk {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let range = self.range(offset, bytes.len() as u64)?;
        self.0.write().unwrap()[range].copy_from_slice(bytes);
        Ok(())
    }
    fn write_zeroes(&self, offset: u64, length: u64, _: Space) -> Result<(), Error> {
        let range = self.range(offset, length)?;
        self.0.write().unwrap()[range].fill(0);
        Ok(())
    }
    fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.range(offset, length).map(drop)
    }
    fn flush(&self) -> Result<(), Error> {
        Ok(())
    }
}

fn an_option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = proto::OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// A handshake that ends in transmission.
fn handshake(framing: u32) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(an_option(framing, &[]));
    let mut contexts = [0u8, 0, 0, 0, 0, 0, 0, 2].to_vec();
    for name in ["base:allocation", "qemu:allocation-depth"] {
        contexts.extend((name.len() as u32).to_be_bytes());
        contexts.extend(name.as_bytes());
    }
    bytes.extend(an_option(option::SET_META_CONTEXT, &contexts));
    bytes.extend(an_option(option::EXPORT_NAME, &[]));
    bytes
}

fn talk(input: Vec<u8>) -> Vec<u8> {
    let disk = Disk(RwLock::new(vec![7; SIZE]));
    let export = Export {
        name: "disk".into(),
        description: "for noise".into(),
        device: Device::Writable(Arc::new(disk)),
    };
    let options = ServerOptions {
        memory_bytes: 8 << 20,
        handshake_timeout: None,
        request_timeout: None,
        in_flight: 2,
        ..ServerOptions::default()
    };
    let server = Server::new(Exports::new(vec![export]).unwrap(), options).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.serve_client(theirs.into()));
        scope.spawn(|| {
            // The server may have had enough before it has heard all.
            let _ = (&ours).write_all(&input);
            let _ = ours.shutdown(Shutdown::Write);
        });
        let mut said = Vec::new();
        let _ = (&ours).read_to_end(&mut said);
        said
    })
}

fn take(bytes: &mut &[u8], count: usize) -> u64 {
    let (number, rest) = bytes.split_at(count);
    *bytes = rest;
    number
        .iter()
        .fold(0, |number, &byte| number << 8 | u64::from(byte))
}

pub fn fuzz(bytes: &[u8]) {
    let Some((&mode, rest)) = bytes.split_first() else {
        return;
    };
    let framing = match mode % 3 {
        0 => {
            talk(rest.to_vec());
            return;
        }
        1 => option::STRUCTURED_REPLY,
        _ => option::EXTENDED_HEADERS,
    };
    // As long for both, and for every session.
    static BEFORE: OnceLock<usize> = OnceLock::new();
    let before = *BEFORE.get_or_init(|| talk(handshake(framing)).len());
    let said = talk([handshake(framing), rest.to_vec()].concat());
    let mut said = &said[before..];
    while !said.is_empty() {
        let magic = take(&mut said, 4);
        take(&mut said, 12);
        let length = if framing == option::EXTENDED_HEADERS {
            assert_eq!(magic, u64::from(proto::EXTENDED_REPLY_MAGIC));
            take(&mut said, 8);
            take(&mut said, 8)
        } else {
            assert_eq!(magic, u64::from(proto::STRUCTURED_REPLY_MAGIC));
            take(&mut said, 4)
        };
        said = &said[length as usize..];
    }
}
