//! The map of a partial file: the on-disk set of its present blocks.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use super::error::{Damage, PartialError};
use super::host::MapStore;
use super::journal::{self, Header, Replay, Replayed, SECTOR_BYTES};
use crate::blocks::BlockSet;
use crate::bytes::u64_at;
use crate::host::{HostFile, write_all};

/// The map is rewritten only if it has more records than this.
const FEW_RECORDS: u64 = 128;
/// The number of sectors in one read.
const BATCH: usize = 128;

/// A map's file. Only one thread at a time uses it.
pub(super) struct Map {
    id: u64,
    /// Blocks of the lower file.
    blocks: u64,
    store: Arc<dyn MapStore>,
    file: Option<Arc<dyn HostFile>>,
    records: u64,
    /// The number of records in the header's `confirmed`.
    confirmed: u64,
    /// The number of records after the last rewrite.
    compact: u64,
    /// Whether the content behind the last known record is unknown.
    dirty_tail: bool,
    /// Whether some records may not be durable: they were written without barriers, or the process
    /// was killed before the barrier.
    unsynced: bool,
}

/// Whether a map is written with barriers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Barriers {
    /// The records are durable when the call returns.
    Use,
    /// The records are in the host's kernel when the call returns.
    None,
}

impl Map {
    /// The map of a new partial file. It has no file yet.
    pub(super) fn new(id: u64, blocks: u64, store: Arc<dyn MapStore>) -> Self {
        Map {
            id,
            blocks,
            store,
            file: None,
            records: 0,
            confirmed: 0,
            compact: 0,
            dirty_tail: false,
            unsynced: false,
        }
    }

    /// Reads the map of a partial file whose mark says that there is one.
    pub(super) fn load(
        id: u64,
        blocks: u64,
        store: Arc<dyn MapStore>,
    ) -> Result<(Self, BlockSet), PartialError> {
        let mut map = Map::new(id, blocks, store);
        let found = map.store.open(id).map_err(|error| match error.kind() {
            ErrorKind::InvalidData => map.damaged((0, Damage::NoFile)),
            _ => PartialError::host("open the map of a partial file")(error),
        })?;
        let Some(file) = found else {
            return Err(map.damaged((0, Damage::Missing)));
        };
        let (header, replayed) =
            read_map(&*file, id, Some(blocks)).map_err(|error| match error {
                Unreadable::Host(error) => {
                    PartialError::host("read the map of a partial file")(error)
                }
                Unreadable::Damaged(at) => map.damaged(at),
            })?;
        map.file = Some(file);
        map.records = replayed.records;
        map.compact = replayed.records;
        map.confirmed = header.confirmed;
        map.dirty_tail = replayed.torn;
        // The records came from the host's page cache and may not be on the disk.
        map.unsynced = true;
        Ok((map, replayed.present))
    }

    /// The most bytes of the host that the next call of [`Map::record`] takes, with the name of the
    /// file.
    pub(super) fn most_bytes(&self) -> u64 {
        const HOST_BLOCK: u64 = 4096;
        (SECTOR_BYTES as u64 + journal::most_bytes(self.blocks)).next_multiple_of(HOST_BLOCK)
            + HOST_BLOCK / 4
    }

    /// Whether the file exists.
    pub(super) fn exists(&self) -> bool {
        self.file.is_some()
    }

    /// Whether the map must be rewritten even without new blocks.
    pub(super) fn has_dirty_tail(&self) -> bool {
        self.dirty_tail && self.exists()
    }

    /// Whether all records are durable.
    pub(super) fn is_synced(&self) -> bool {
        !self.unsynced
    }

    /// Whether the next call of [`Map::record`] rewrites the map, and so needs all present blocks
    /// instead of the new ones.
    pub(super) fn wants_all(&self) -> bool {
        self.file.is_none() || self.dirty_tail || self.records > FEW_RECORDS + 2 * self.compact
    }

    /// Records `blocks`: all present blocks if [`Map::wants_all`], else the new ones. Returns
    /// whether the map was rewritten. After an error, the file may or may not contain the new
    /// records, but each valid record is correct.
    pub(super) fn record(
        &mut self,
        blocks: &BlockSet,
        barriers: Barriers,
    ) -> Result<bool, PartialError> {
        let result = match &self.file {
            Some(file) if !self.wants_all() => {
                let file = Arc::clone(file);
                self.append(&*file, blocks, barriers).map(|()| false)
            }
            _ => self.rewrite(blocks, barriers).map(|()| true),
        };
        self.dirty_tail = result.is_err();
        self.unsynced |= barriers == Barriers::None;
        result
    }

    /// Makes all records durable. If this fails, the next call of [`Map::record`] rewrites the map.
    pub(super) fn sync(&mut self) -> Result<(), PartialError> {
        let Some(file) = self.file.as_ref().filter(|_| self.unsynced) else {
            return Ok(());
        };
        let synced = file.sync_all().and_then(|()| self.store.sync());
        self.dirty_tail |= synced.is_err();
        self.unsynced = synced.is_err();
        synced.map_err(PartialError::host("sync the map of a partial file"))
    }

    /// Writes the number of durable records into the header, so that a later open detects missing
    /// records. Does nothing if some records may not be durable, because a crash may still lose
    /// them.
    pub(super) fn confirm(&mut self) -> Result<(), PartialError> {
        let is_durable = !self.dirty_tail && !self.unsynced;
        let Some(file) = self.file.as_ref().filter(|_| is_durable) else {
            return Ok(());
        };
        if self.confirmed < self.records {
            let header = self.header(self.records).encode();
            write_all(&**file, 0, &header)
                .map_err(PartialError::host("write the map of a partial file"))?;
            self.confirmed = self.records;
        }
        Ok(())
    }

    /// Removes the map's file.
    pub(super) fn remove(&mut self) -> Result<(), PartialError> {
        self.file = None;
        self.store
            .remove(self.id)
            .map_err(PartialError::host("remove the map of a partial file"))
    }

    fn append(
        &mut self,
        file: &dyn HostFile,
        blocks: &BlockSet,
        barriers: Barriers,
    ) -> Result<(), PartialError> {
        if barriers == Barriers::Use {
            // The new records state that all earlier records are on the disk.
            self.sync()?;
        }
        let bytes = journal::encode(blocks, &self.header(0), self.records);
        let at = (self.records + 1) * SECTOR_BYTES as u64;
        write_all(file, at, &bytes)
            .and_then(|()| self.store.measure(self.id, file))
            .map_err(PartialError::host("write the map of a partial file"))?;
        if barriers == Barriers::Use {
            file.sync_data()
                .map_err(PartialError::host("sync the map of a partial file"))?;
        }
        self.records += (bytes.len() / SECTOR_BYTES) as u64;
        Ok(())
    }

    /// Writes a new file and renames it over the old one.
    fn rewrite(&mut self, blocks: &BlockSet, barriers: Barriers) -> Result<(), PartialError> {
        let failed = PartialError::host("rewrite the map of a partial file");
        let records = journal::encode(blocks, &self.header(0), 0);
        let count = (records.len() / SECTOR_BYTES) as u64;
        let mut bytes = self.header(count).encode().to_vec();
        bytes.extend_from_slice(&records);
        let file = self.store.create(self.id).map_err(failed)?;
        write_all(&*file, 0, &bytes).map_err(failed)?;
        self.store.measure(self.id, &*file).map_err(failed)?;
        // Before the first rewrite the mark says that no map exists, so no open reads the file. The
        // fsync of the file then also makes its name durable.
        let is_first = self.file.is_none();
        if is_first {
            self.store.publish(self.id).map_err(failed)?;
        }
        if barriers == Barriers::Use {
            file.sync_all().map_err(failed)?;
        }
        if !is_first {
            self.store.publish(self.id).map_err(failed)?;
        }
        // From now on this file is the map, even if its name is not durable yet.
        self.file = Some(file);
        self.records = count;
        self.compact = count;
        self.confirmed = count;
        if barriers == Barriers::Use && !is_first {
            self.store.sync().map_err(failed)?;
        }
        if barriers == Barriers::Use {
            self.unsynced = false;
        }
        Ok(())
    }

    fn header(&self, confirmed: u64) -> Header {
        Header {
            id: self.id,
            blocks: self.blocks,
            confirmed,
        }
    }

    fn damaged(&self, (sector, damage): journal::At) -> PartialError {
        PartialError::Damaged {
            file: self.store.path(self.id),
            offset: sector * SECTOR_BYTES as u64,
            damage,
        }
    }
}

/// Why a map cannot be read.
pub(crate) enum Unreadable {
    /// The host failed.
    Host(io::Error),
    Damaged(journal::At),
}

/// Reads the map of partial file `id` over a lower file of `blocks` blocks. `None`: takes the
/// number of blocks from the map.
pub(crate) fn read_map(
    file: &dyn HostFile,
    id: u64,
    blocks: Option<u64>,
) -> Result<(Header, Replayed), Unreadable> {
    let mut buf = vec![0; BATCH * SECTOR_BYTES];
    let mut held = 0;
    let mut at = 0;
    let mut replay: Option<(Header, Replay)> = None;
    loop {
        let read = file
            .read_at(at, &mut buf[held..])
            .map_err(Unreadable::Host)?;
        at += read as u64;
        held += read;
        let (sectors, left) = buf[..held].as_chunks::<SECTOR_BYTES>();
        for sector in sectors {
            match &mut replay {
                Some((_, replay)) => replay.sector(sector).map_err(Unreadable::Damaged)?,
                None => {
                    let blocks = blocks.unwrap_or_else(|| u64_at(sector, journal::BLOCKS_AT));
                    let header = Header::decode(sector, id, blocks)
                        .map_err(|damage| Unreadable::Damaged((0, damage)))?;
                    replay = Some((header, Replay::new(header)));
                }
            }
        }
        if read == 0 {
            let Some((header, replay)) = replay else {
                return Err(Unreadable::Damaged((0, Damage::Header)));
            };
            let replayed = replay.finish(!left.is_empty());
            return Ok((header, replayed.map_err(Unreadable::Damaged)?));
        }
        let done = held - left.len();
        buf.copy_within(done..held, 0);
        held -= done;
    }
}
