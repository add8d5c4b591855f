//! The pipeline from full blocks to stored blocks: parallel encoders, one sink in order.
//!
//! ```text
//! caller --jobs--> encoder threads --+
//!    \---order: one receiver a block-+--> sink thread --> storage
//! ```
//!
//! The sink takes the results in the order of the blocks, so the content of the file does not
//! depend on the speed of the encoders. Both queues are bounded, and so is the memory.

use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use bcow_format::{Entry, SECTOR_BYTES, Stored, Uba};

use super::Compression;
use super::encode::{Encoded, Encoder, Form};
use super::layout::{BlockRun, Layout};
use crate::Error;
use crate::storage::Storage;

/// Size in bytes of the buffer in which stored bytes are collected before a write.
const WRITE_BYTES: usize = 1 << 20;
/// Limit of queued blocks per encoder thread, for each of the two queues.
const QUEUED_PER_THREAD: usize = 3;

/// Placement of stored blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placement {
    /// Contiguous.
    Packed,
    /// Each at its own address.
    Plain,
    /// In order, each at the start of a sector (spec section 10, "Places").
    Sectors,
}

/// See the documentation of the module.
pub(super) struct Pipeline {
    compression: Compression,
    stage: Stage,
}

enum Stage {
    /// All work in the calling thread.
    Inline { encoder: Encoder, sink: Sink },
    Threads {
        jobs: SyncSender<Job>,
        order: SyncSender<Ordered>,
        encoders: Vec<JoinHandle<()>>,
        sink: JoinHandle<Result<Sink, Error>>,
    },
    /// The sink failed and its error was returned, or all work is finished.
    Failed,
}

struct Job {
    block: Vec<u8>,
    done: Sender<Result<Encoded, Error>>,
}

enum Ordered {
    Block {
        logical: u64,
        encoded: Receiver<Result<Encoded, Error>>,
    },
    /// Nothing to encode.
    Run(BlockRun),
}

impl Pipeline {
    pub(super) fn start(
        storage: Arc<dyn Storage>,
        compression: Compression,
        placement: Placement,
        threads: usize,
    ) -> Result<Self, Error> {
        let stage = match Pipeline::start_threads(&storage, compression, placement, threads)? {
            Some(stage) => stage,
            None => Stage::Inline {
                encoder: Encoder::new(compression)?,
                sink: Sink::new(storage, placement),
            },
        };
        Ok(Pipeline { compression, stage })
    }

    /// `None` if one thread has to do all the work, also because the system refuses others.
    fn start_threads(
        storage: &Arc<dyn Storage>,
        compression: Compression,
        placement: Placement,
        threads: usize,
    ) -> Result<Option<Stage>, Error> {
        if threads <= 1 {
            return Ok(None);
        }
        let threads = threads.min(256);
        let (jobs, queue) = sync_channel::<Job>(threads * QUEUED_PER_THREAD);
        let (order, results) = sync_channel(threads * QUEUED_PER_THREAD);
        // Held by the one idle encoder that waits for the next job; it holds no other lock.
        let queue = Arc::new(Mutex::new(queue));
        let mut encoders = Vec::new();
        for _ in 0..threads {
            let mut encoder = Encoder::new(compression)?;
            let queue = queue.clone();
            let started = Builder::new().spawn(move || {
                while let Some(job) = next_job(&queue) {
                    // The result has no receiver if the sink has failed.
                    let _ = job.done.send(encoder.encode(job.block));
                }
            });
            match started {
                Ok(encoder) => encoders.push(encoder),
                Err(_) => break,
            }
        }
        if encoders.is_empty() {
            return Ok(None);
        }
        let sink = Sink::new(Arc::clone(storage), placement);
        let started = Builder::new().spawn(move || drain(sink, &results));
        // Without the sink, the encoders end, because their queue does.
        Ok(started.ok().map(|sink| Stage::Threads {
            jobs,
            order,
            encoders,
            sink,
        }))
    }

    /// Adds a full block at byte `logical` of the address space.
    pub(super) fn block(&mut self, logical: u64, block: Vec<u8>) -> Result<(), Error> {
        let sent = match &mut self.stage {
            Stage::Inline { encoder, sink } => {
                return sink.accept(logical, encoder.encode(block)?);
            }
            Stage::Threads { jobs, order, .. } => {
                let (done, encoded) = channel();
                order.send(Ordered::Block { logical, encoded }).is_ok()
                    && jobs.send(Job { block, done }).is_ok()
            }
            Stage::Failed => false,
        };
        if sent { Ok(()) } else { Err(self.failure()) }
    }

    /// Adds `blocks` blocks with an entry that stores no data. A zero block at byte 0 can be
    /// replaced later, by [`Pipeline::finish`].
    pub(super) fn run(&mut self, entry: Entry, blocks: u64) -> Result<(), Error> {
        let run = run_of(entry, blocks);
        let sent = match &mut self.stage {
            Stage::Inline { sink, .. } => {
                sink.records.push(run);
                true
            }
            Stage::Threads { order, .. } => order.send(Ordered::Run(run)).is_ok(),
            Stage::Failed => false,
        };
        if sent { Ok(()) } else { Err(self.failure()) }
    }

    /// Waits for all blocks, stores `first` in place of the zero block at byte 0, and records the
    /// places of the blocks in `layout`. Returns the first free byte after the stored blocks.
    pub(super) fn finish(
        &mut self,
        first: Option<Vec<u8>>,
        layout: &mut Layout,
    ) -> Result<u64, Error> {
        let (mut encoder, mut sink) = match std::mem::replace(&mut self.stage, Stage::Failed) {
            Stage::Inline { encoder, sink } => (encoder, sink),
            Stage::Threads {
                jobs,
                order,
                encoders,
                sink,
            } => {
                drop((jobs, order));
                let sink = joined(sink)?;
                for encoder in encoders {
                    if encoder.join().is_err() {
                        return Err(thread_died());
                    }
                }
                (Encoder::new(self.compression)?, sink)
            }
            Stage::Failed => return Err(thread_died()),
        };
        if let Some(first) = first {
            sink.records[0] = sink.store(0, encoder.encode(first)?)?;
        }
        sink.flush()?;
        layout.fill(std::mem::take(&mut sink.records));
        Ok(sink.end)
    }

    /// The error of a sink that stopped.
    fn failure(&mut self) -> Error {
        match std::mem::replace(&mut self.stage, Stage::Failed) {
            Stage::Threads {
                jobs, order, sink, ..
            } => {
                drop((jobs, order));
                joined(sink).err().unwrap_or_else(thread_died)
            }
            _ => thread_died(),
        }
    }
}

/// Blocks with an entry that stores no data.
fn run_of(entry: Entry, blocks: u64) -> BlockRun {
    BlockRun {
        entry,
        blocks,
        logical_crc: 0,
    }
}

fn next_job(queue: &Mutex<Receiver<Job>>) -> Option<Job> {
    let queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
    queue.recv().ok()
}

fn joined(sink: JoinHandle<Result<Sink, Error>>) -> Result<Sink, Error> {
    sink.join().unwrap_or_else(|_| Err(thread_died()))
}

fn thread_died() -> Error {
    Error::Unsupported("a worker thread ended before its work (a bug in bcow)".into())
}

fn drain(mut sink: Sink, results: &Receiver<Ordered>) -> Result<Sink, Error> {
    while let Ok(next) = results.recv() {
        match next {
            Ordered::Block { logical, encoded } => {
                let encoded = encoded.recv().map_err(|_| thread_died())??;
                sink.accept(logical, encoded)?;
            }
            Ordered::Run(run) => sink.records.push(run),
        }
    }
    Ok(sink)
}

/// Writes stored blocks to the file.
pub(super) struct Sink {
    pub(super) storage: Arc<dyn Storage>,
    placement: Placement,
    /// Stored bytes that are not written yet; they belong at `buffer_at`.
    buffer: Vec<u8>,
    buffer_at: u64,
    /// First free byte of the file.
    pub(super) end: u64,
    records: Vec<BlockRun>,
}

impl Sink {
    pub(super) fn new(storage: Arc<dyn Storage>, placement: Placement) -> Self {
        Sink {
            storage,
            placement,
            buffer: Vec::with_capacity(WRITE_BYTES),
            buffer_at: SECTOR_BYTES,
            end: SECTOR_BYTES,
            records: Vec::new(),
        }
    }

    fn accept(&mut self, logical: u64, encoded: Encoded) -> Result<(), Error> {
        let record = self.store(logical, encoded)?;
        self.records.push(record);
        Ok(())
    }

    /// Stores a block at byte `logical` of the address space. The first block of a plain file
    /// begins with the header slots, which are written last; its checksum counts them as zeros.
    pub(super) fn store(&mut self, logical: u64, encoded: Encoded) -> Result<BlockRun, Error> {
        let logical_crc = encoded.logical_crc;
        let (bytes, crc, zstd) = match encoded.form {
            Form::Zero => return Ok(run_of(Entry::Zero, 1)),
            Form::Raw(bytes) => (bytes, logical_crc, false),
            Form::Zstd { frame, crc } => (frame, crc, true),
        };
        let at = match self.placement {
            Placement::Plain => logical,
            Placement::Packed => self.end,
            Placement::Sectors => self.end.next_multiple_of(SECTOR_BYTES),
        };
        let stored = Stored {
            at: Uba(at),
            bytes: bytes.len() as u32,
            crc,
        };
        if self.placement == Placement::Sectors && !self.buffer.is_empty() {
            self.buffer.resize((at - self.buffer_at) as usize, 0);
        }
        if at != self.buffer_at + self.buffer.len() as u64 {
            self.flush()?;
            self.buffer_at = at;
        }
        if self.buffer.len() + bytes.len() > WRITE_BYTES {
            self.flush()?;
            self.buffer_at = at;
        }
        if bytes.len() >= WRITE_BYTES {
            self.storage.write(at, &bytes)?;
            self.buffer_at = stored.end();
        } else {
            self.buffer.extend_from_slice(&bytes);
        }
        self.end = self.end.max(stored.end());
        Ok(BlockRun {
            entry: if zstd { Entry::Zstd(stored) } else { Entry::Raw(stored) },
            blocks: 1,
            logical_crc,
        })
    }

    pub(super) fn flush(&mut self) -> Result<(), Error> {
        if !self.buffer.is_empty() {
            self.storage.write(self.buffer_at, &self.buffer)?;
            self.buffer_at += self.buffer.len() as u64;
            self.buffer.clear();
        }
        Ok(())
    }
}
