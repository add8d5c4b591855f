//! The properties of a disk and of its chain.

use std::fs::File;
use std::os::unix::fs::FileExt;

use bcow::format::{Header, State, Use, decode_free, hex};
use bcow::lock::FileLock;
use bcow::{BlockDevice, Image};
use serde::Serialize;
use serde_json::Value;

use crate::image::OpenImage;

/// The properties of a disk and of the files of its chain.
#[derive(Serialize)]
pub struct DiskFacts {
    pub layout: Option<String>,
    /// The space of the record log; 0 for a sealed disk.
    pub log_bytes: u64,
    /// The free bytes in the file according to its header. `None` if the free list is unreadable.
    pub free_bytes: Option<u64>,
    /// The reason why a shared lock on a writable disk is refused: usually the note of its writer.
    pub in_use: Option<String>,
    pub identity: String,
    /// The disk, its backing, the backing of that one, and so on.
    pub chain: Vec<ChainFileFacts>,
}

#[derive(Serialize)]
pub struct ChainFileFacts {
    pub name: String,
    pub path: Option<String>,
    pub sealed: bool,
    pub size: u64,
    pub file_bytes: u64,
}

impl ChainFileFacts {
    fn of(name: String, path: Option<String>, image: &Image) -> Self {
        ChainFileFacts {
            name,
            path,
            sealed: image.header().state == State::Sealed,
            size: image.size(),
            file_bytes: image.header().file_bytes,
        }
    }
}

impl DiskFacts {
    /// The properties of the opened disk; `None` for an image.
    pub fn of(opened: &OpenImage) -> Option<Self> {
        let image = opened.image();
        let header = image.header();
        if header.purpose == Use::Image {
            return None;
        }
        let name = opened.path().display().to_string();
        let top = ChainFileFacts::of(name.clone(), Some(name), image);
        let below = opened.chain().iter().map(|file| {
            let path = file.path.as_ref().map(|path| path.display().to_string());
            ChainFileFacts::of(file.name.clone(), path, &file.image)
        });
        let file = File::open(&opened.opened().path).ok();
        let metadata = image.metadata().unwrap_or(Value::Null);
        let layout = metadata["options"]["layout"].as_str().map(str::to_owned);
        Some(DiskFacts {
            layout,
            log_bytes: header.log.1,
            free_bytes: file.as_ref().and_then(|file| free_bytes(file, header)),
            in_use: file
                .filter(|_| header.state == State::Writable)
                .and_then(|file| FileLock::shared(&file).err())
                .map(|error| error.to_string()),
            identity: hex(&image.identity_hash()),
            chain: std::iter::once(top).chain(below).collect(),
        })
    }
}

/// The number of bytes in the free list that the header names. Records of the log may already use
/// some of these bytes.
fn free_bytes(file: &File, header: &Header) -> Option<u64> {
    let mut bytes = vec![0; header.free.bytes as usize];
    file.read_exact_at(&mut bytes, header.free.offset).ok()?;
    let ranges = decode_free(&bytes, header).ok()?;
    Some(ranges.iter().map(|range| range.bytes).sum())
}
