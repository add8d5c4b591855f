//! Support for the tests of the other crates: storages that fail or record operations, random data,
//! tar archives, and checks for the tools of a test.
//!
//! The path through it: a test opens a disk on a storage of this crate. [`Faulty`] fails a chosen
//! operation, [`PowerCut`] rebuilds every state that a power cut can leave, and [`Parkable`] delays
//! chosen reads. [`History`] then decides whether the content of the disk is possible.
//!
//! ```
//! use bcow::Storage;
//! use bcow_testkit::{SmallDisk, noise};
//!
//! let disk = SmallDisk::new(4096);
//! disk.write_at(0, &noise(1, 4096))?;
//! disk.write_at(4096, b"x").expect_err("the disk is full");
//! # Ok::<(), std::io::Error>(())
//! ```

use std::io;
use std::sync::Mutex;

use bcow::{MemoryStorage, Storage};

mod chain;
#[cfg(feature = "shuttle")]
mod explore;
mod faults;
mod history;
mod parking;
mod power_cut;
mod random;
pub mod tar;
mod tools;

pub use chain::{assert_sound, below, content, read};
#[cfg(feature = "shuttle")]
pub use explore::explore;
pub use faults::{Fault, Faulty, On};
pub use history::{History, SECTOR_BYTES, fill, tag_of, tagged, tags};
pub use parking::{Moment, Parkable, Parked, Parking};
pub use power_cut::{Fate, PowerCut, Window};
pub use random::{Random, noise};
#[cfg(feature = "shuttle")]
pub use shuttle;
pub use tools::{
    has_program, lacks, lacks_mkfs, lacks_reports_of_preallocated_space, make_erofs, run, umount,
};

/// Inside an `impl Storage`: the operations that another storage, a field, carries out.
#[macro_export]
macro_rules! forward {
    ($content:ident: $($operation:ident),*) => { $($crate::forward!(@$operation $content);)* };
    (@len $content:ident) => {
        fn len(&self) -> std::io::Result<u64> {
            self.$content.len()
        }
    };
    (@read_at $content:ident) => {
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
            self.$content.read_at(offset, buf)
        }
    };
    (@write_at $content:ident) => {
        fn write_at(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
            self.$content.write_at(offset, bytes)
        }
    };
    (@set_len $content:ident) => {
        fn set_len(&self, bytes: u64) -> std::io::Result<()> {
            self.$content.set_len(bytes)
        }
    };
    (@sync $content:ident) => {
        fn sync(&self) -> std::io::Result<()> {
            self.$content.sync()
        }
    };
    (@punch $content:ident) => {
        fn punch(&self, offset: u64, bytes: u64) -> std::io::Result<()> {
            self.$content.punch(offset, bytes)
        }
    };
}

/// The value with a change, as for options that differ from others in one field.
pub fn changed<T>(mut value: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut value);
    value
}

/// A disk of limited size; a write beyond it fails as on a full disk.
pub struct SmallDisk {
    content: MemoryStorage,
    room: u64,
}

impl SmallDisk {
    /// An empty disk of `room` bytes.
    pub fn new(room: u64) -> Self {
        SmallDisk {
            content: MemoryStorage::default(),
            room,
        }
    }
}

impl Storage for SmallDisk {
    crate::forward!(content: len, read_at, set_len, sync);

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if offset + bytes.len() as u64 > self.room {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.content.write_at(offset, bytes)
    }
}

/// A storage that records every write, so that a test can build the state after a crash.
#[derive(Default)]
pub struct WriteLog {
    content: MemoryStorage,
    writes: Mutex<Vec<(u64, Vec<u8>)>>,
}

impl WriteLog {
    /// Number of writes so far.
    pub fn writes(&self) -> usize {
        self.log().len()
    }

    /// The content after the first `count` writes.
    pub fn after(&self, count: usize) -> MemoryStorage {
        let content = MemoryStorage::default();
        for (offset, bytes) in self.log().iter().take(count) {
            content
                .write_at(*offset, bytes)
                .expect("memory holds what it held before");
        }
        content
    }

    fn log(&self) -> std::sync::MutexGuard<'_, Vec<(u64, Vec<u8>)>> {
        self.writes
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Storage for WriteLog {
    crate::forward!(content: len, read_at, set_len, sync);

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.content.write_at(offset, bytes)?;
        self.log().push((offset, bytes.to_vec()));
        Ok(())
    }
}
