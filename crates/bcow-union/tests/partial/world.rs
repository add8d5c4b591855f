//! A host in memory that simulates power cuts and failures.
//!
//! File content reaches the disk in any order, sector by sector, until it is synced. Sizes, holes,
//! marks and names are journaled: after a power cut, they are in their state at some moment. A sync
//! of a file makes its content durable, and the journal up to its last entry for the file. A sync
//! of data only does not cover marks.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use bcow_testkit::Random;
use bcow_testkit::changed;
use bcow_union::Seek;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::host::{FileTimes, HostFile};
use bcow_union::testing::partial::PartialMark;
use bcow_union::testing::partial::host::{MapStore, MarkedFile};
use bcow_union::testing::upper::Metacopy;
use bcow_union::testing::upper::marks::PARTIAL_MARK_BYTES;
use rustix::fs::Timespec;
use rustix::io::Errno;

const SECTOR: usize = 512;
const BLOCK: usize = BLOCK_BYTES as usize;
/// The index of the file that is the partial file.
const HOST: usize = 0;

#[derive(Clone, Default)]
struct FileState {
    bytes: Vec<u8>,
    /// Whether each block is data.
    data: Vec<bool>,
    mark: Option<[u8; PARTIAL_MARK_BYTES]>,
    metacopy: Metacopy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Name {
    Map(u64),
    Work(u64),
}

#[derive(Clone)]
enum Op {
    Write(usize, u64, Vec<u8>),
    SetSize(usize, u64),
    Punch(usize, u64, u64),
    Mark(Option<[u8; PARTIAL_MARK_BYTES]>),
    Metacopy(Metacopy),
    Create(Name, usize),
    Rename(Name, Name, usize),
    Remove(Name),
    SyncData(usize),
    SyncAll(usize),
    SyncNames,
}

/// A plan of the calls that fail.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// Number of calls that succeed first.
    pub after: u64,
    /// Whether all later calls that take space fail too.
    pub stays: bool,
    pub errno: i32,
}

#[derive(Default)]
struct State {
    files: Vec<FileState>,
    names: BTreeMap<Name, usize>,
    ops: Vec<Op>,
    fault: Option<Fault>,
    calls: u64,
    hits: u64,
    failed_sync: bool,
    /// Reserved bytes, and bytes that the end of a reservation has made free on a full host.
    reserved: u64,
    free: u64,
    /// The state before the first operation.
    first: (Vec<FileState>, BTreeMap<Name, usize>),
}

/// A host.
#[derive(Clone, Default)]
pub struct World(Arc<Mutex<State>>);

/// Kinds of calls, for faults.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Read,
    /// A call that takes space.
    Store,
    Change,
    Sync,
}

impl World {
    /// A host with a metadata copy of this size.
    pub fn new(size: u64) -> Self {
        let mut host = changed(FileState::default(), |new| new.metacopy = Metacopy::Whole);
        host.set_size(size as usize);
        Self::of(vec![host], BTreeMap::new())
    }

    fn of(files: Vec<FileState>, names: BTreeMap<Name, usize>) -> Self {
        World(Arc::new(Mutex::new(State {
            first: (files.clone(), names.clone()),
            files,
            names,
            ..State::default()
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub fn host(&self) -> Arc<dyn MarkedFile> {
        Arc::new(Host(Handle {
            world: self.clone(),
            file: HOST,
        }))
    }

    /// The mark of the file, if it is a partial file.
    pub fn mark(&self) -> Option<PartialMark> {
        let bytes = self.lock().files[HOST].mark?;
        Some(PartialMark::decode(&bytes).unwrap())
    }

    /// The metacopy attribute of the file, which overlayfs reads.
    pub fn metacopy(&self) -> Metacopy {
        self.lock().files[HOST].metacopy
    }

    /// The content of the host's file.
    pub fn content(&self) -> Vec<u8> {
        self.lock().files[HOST].bytes.clone()
    }

    /// Changes a byte of the map.
    pub fn spoil_map(&self, at: usize, with: u8) -> bool {
        let mut state = self.lock();
        let map = state.names.iter().find_map(|(name, file)| match name {
            Name::Map(_) => Some(*file),
            Name::Work(_) => None,
        });
        match map.and_then(|file| state.files[file].bytes.get_mut(at)) {
            Some(byte) => {
                *byte ^= with;
                true
            }
            None => false,
        }
    }

    /// Length of the map in bytes.
    pub fn map_bytes(&self) -> Option<usize> {
        let state = self.lock();
        let mut names = state.names.iter();
        names.find_map(|(name, file)| match name {
            Name::Map(_) => Some(state.files[*file].bytes.len()),
            Name::Work(_) => None,
        })
    }

    /// Truncates the map.
    pub fn cut_map(&self, to: usize) {
        let mut state = self.lock();
        let files: Vec<usize> = state.names.values().copied().collect();
        for file in files {
            state.files[file].set_size(to);
        }
    }

    pub fn remove_map(&self) {
        self.lock().names.clear();
    }

    /// Number of operations so far. It serves as the clock.
    pub fn now(&self) -> usize {
        self.lock().ops.len()
    }

    pub fn syncs(&self) -> usize {
        let state = self.lock();
        let is_sync = |op: &&Op| matches!(op, Op::SyncData(_) | Op::SyncAll(_) | Op::SyncNames);
        state.ops.iter().filter(is_sync).count()
    }

    pub fn plan(&self, fault: Option<Fault>) {
        let mut state = self.lock();
        if fault.is_some() {
            state.hits = 0;
        }
        state.fault = fault;
        state.calls = 0;
    }

    /// Number of calls since the plan was set, number of calls that failed because of it, and
    /// whether a sync ever failed.
    pub fn calls(&self) -> (u64, u64, bool) {
        let state = self.lock();
        (state.calls, state.hits, state.failed_sync)
    }

    /// The state if the program is killed now.
    pub fn killed(&self) -> World {
        let state = self.lock();
        Self::of(state.files.clone(), state.names.clone())
    }

    /// A possible state after a power cut at `moment`.
    pub fn cut(&self, moment: usize, random: &mut Random) -> World {
        let state = self.lock();
        let ops = &state.ops[..moment];
        // The journal is durable at least up to this entry, and possibly further.
        let mut least = 0;
        for (at, op) in ops.iter().enumerate() {
            let upto = match op {
                Op::SyncData(file) => last(&ops[..at], |op| match op {
                    Op::SetSize(of, _) | Op::Punch(of, ..) | Op::Create(_, of) => of == file,
                    _ => false,
                }),
                Op::SyncAll(file) => last(&ops[..at], |op| match op {
                    Op::SetSize(of, _)
                    | Op::Punch(of, ..)
                    | Op::Create(_, of)
                    | Op::Rename(_, _, of) => of == file,
                    Op::Mark(_) | Op::Metacopy(_) => *file == HOST,
                    _ => false,
                }),
                Op::SyncNames => last(&ops[..at], |op| {
                    matches!(op, Op::Create(..) | Op::Rename(..) | Op::Remove(_))
                }),
                _ => 0,
            };
            least = least.max(upto);
        }
        // A sync of a file that grew by writes makes the growth durable, in the order of the
        // journal.
        least = least.max(grown(&state.first.0, ops));
        let journal = match random.below(3) {
            0 => least,
            1 => moment,
            _ => least + random.below((moment - least) as u64 + 1) as usize,
        };
        let lost_in = *random.pick(&[1, 2, 5, u64::MAX]);
        let torn_in = *random.pick(&[1, 3, u64::MAX]);
        let mut synced = vec![0; state.files.len()];
        for (at, op) in ops.iter().enumerate() {
            if let Op::SyncData(file) | Op::SyncAll(file) = op {
                synced[*file] = at;
            }
        }
        let (mut files, mut names) = state.first.clone();
        files.resize(state.files.len(), FileState::default());
        for (at, op) in ops.iter().enumerate() {
            let journaled = at < journal;
            match op {
                Op::Write(file, offset, bytes) => {
                    let synced = synced[*file] > at;
                    // The growth of a file follows the order of the journal.
                    let may_grow = at <= journal || is_data(&ops[journal..at]);
                    if synced {
                        files[*file].write(*offset as usize, bytes, true);
                        continue;
                    }
                    if random.one_in(lost_in) {
                        continue;
                    }
                    let torn = random.one_in(torn_in);
                    let mut from = 0;
                    while from < bytes.len() {
                        let to =
                            (SECTOR - (*offset as usize + from) % SECTOR + from).min(bytes.len());
                        if !torn || random.one_in(2) {
                            let at = *offset as usize + from;
                            files[*file].write(at, &bytes[from..to], may_grow);
                        }
                        from = to;
                    }
                }
                _ if !journaled => {}
                Op::SetSize(file, size) => files[*file].set_size(*size as usize),
                Op::Punch(file, at, length) => files[*file].punch(*at as usize, *length as usize),
                Op::Mark(mark) => files[HOST].mark = *mark,
                Op::Metacopy(metacopy) => files[HOST].metacopy = *metacopy,
                Op::Create(name, file) => {
                    names.insert(*name, *file);
                }
                Op::Rename(from, to, file) => {
                    names.remove(from);
                    names.insert(*to, *file);
                }
                Op::Remove(name) => {
                    names.remove(name);
                }
                Op::SyncData(_) | Op::SyncAll(_) | Op::SyncNames => {}
            }
        }
        Self::of(files, names)
    }

    /// Describes the last operations, for messages.
    pub fn describe(&self, upto: usize) -> String {
        let state = self.lock();
        let ops = state.ops[..upto].iter().enumerate();
        let lines = ops.map(|(at, op)| match op {
            Op::Write(file, offset, bytes) => {
                format!("{at}: write {file} {offset}+{} {}\n", bytes.len(), bytes[0])
            }
            Op::SetSize(file, size) => format!("{at}: size {file} {size}\n"),
            Op::Punch(file, offset, length) => format!("{at}: punch {file} {offset}+{length}\n"),
            Op::Mark(mark) => {
                let mark = mark.map(|bytes| PartialMark::decode(&bytes).unwrap());
                format!("{at}: mark {mark:?}\n")
            }
            Op::Metacopy(metacopy) => format!("{at}: metacopy {metacopy:?}\n"),
            Op::Create(name, file) => format!("{at}: create {name:?} {file}\n"),
            Op::Rename(from, to, _) => format!("{at}: rename {from:?} {to:?}\n"),
            Op::Remove(name) => format!("{at}: remove {name:?}\n"),
            Op::SyncData(file) => format!("{at}: sync data {file}\n"),
            Op::SyncAll(file) => format!("{at}: sync all {file}\n"),
            Op::SyncNames => format!("{at}: sync names\n"),
        });
        let lines: Vec<String> = lines.collect();
        lines[lines.len().saturating_sub(60)..].concat()
    }

    fn call(&self, call: Call) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        let index = state.calls;
        state.calls += 1;
        if let Some(fault) = state.fault {
            let mut later = index > fault.after && fault.stays && call == Call::Store;
            if later && fault.errno == Errno::NOSPC.raw_os_error() && state.free > 0 {
                state.free = state.free.saturating_sub(BLOCK_BYTES);
                later = false;
            }
            if index == fault.after || later {
                state.hits += 1;
                state.failed_sync |= call == Call::Sync;
                return Err(io::Error::from_raw_os_error(fault.errno));
            }
        }
        Ok(state)
    }
}

/// The index after the last operation for which `is` holds.
fn last(ops: &[Op], is: impl Fn(&Op) -> bool) -> usize {
    ops.iter().rposition(is).map_or(0, |at| at + 1)
}

/// Whether none of the operations is journaled.
fn is_data(ops: &[Op]) -> bool {
    ops.iter().all(|op| {
        matches!(
            op,
            Op::Write(..) | Op::SyncData(_) | Op::SyncAll(_) | Op::SyncNames
        )
    })
}

/// Length of the journal up to the last synced write that made a file longer.
fn grown(first: &[FileState], ops: &[Op]) -> usize {
    let mut sizes: Vec<u64> = first.iter().map(|file| file.bytes.len() as u64).collect();
    let mut grown = vec![0; sizes.len()];
    let mut upto = 0;
    for (at, op) in ops.iter().enumerate() {
        match op {
            Op::Create(..) => {
                sizes.push(0);
                grown.push(0);
            }
            Op::SetSize(file, to) => sizes[*file] = *to,
            Op::Write(file, offset, bytes) if offset + bytes.len() as u64 > sizes[*file] => {
                sizes[*file] = offset + bytes.len() as u64;
                grown[*file] = at;
            }
            Op::SyncData(file) | Op::SyncAll(file) => upto = upto.max(grown[*file]),
            _ => {}
        }
    }
    upto
}

impl FileState {
    fn set_size(&mut self, size: usize) {
        self.bytes.resize(size, 0);
        self.data.resize(size.div_ceil(BLOCK), false);
    }

    fn write(&mut self, at: usize, bytes: &[u8], may_grow: bool) {
        let end = at + bytes.len();
        if end > self.bytes.len() && may_grow {
            self.set_size(end);
        }
        let end = end.min(self.bytes.len());
        if at < end {
            self.bytes[at..end].copy_from_slice(&bytes[..end - at]);
            self.data[at / BLOCK..end.div_ceil(BLOCK)].fill(true);
        }
    }

    fn punch(&mut self, at: usize, length: usize) {
        let end = (at + length).min(self.bytes.len());
        if at < end {
            self.bytes[at..end].fill(0);
            let to = if end == self.bytes.len() { end.div_ceil(BLOCK) } else { end / BLOCK };
            for block in at.div_ceil(BLOCK)..to {
                self.data[block] = false;
            }
        }
    }
}

struct Handle {
    world: World,
    file: usize,
}

impl HostFile for Handle {
    fn size(&self) -> io::Result<u64> {
        let state = self.world.call(Call::Read)?;
        Ok(state.files[self.file].bytes.len() as u64)
    }
    fn stored_bytes(&self) -> io::Result<u64> {
        let state = self.world.call(Call::Read)?;
        let data = state.files[self.file].data.iter();
        Ok(data.filter(|data| **data).count() as u64 * BLOCK_BYTES)
    }
    fn inode(&self) -> io::Result<u64> {
        Ok(self.file as u64)
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let state = self.world.call(Call::Read)?;
        let bytes = &state.files[self.file].bytes;
        let start = (offset as usize).min(bytes.len());
        let end = (start + buf.len()).min(bytes.len());
        buf[..end - start].copy_from_slice(&bytes[start..end]);
        Ok(end - start)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<usize> {
        let mut state = self.world.call(Call::Store)?;
        // Return a short write now and then, like a disk that is nearly full.
        let data = if data.len() > 5000 && state.calls % 5 == 0 { &data[..4500] } else { data };
        state.ops.push(Op::Write(self.file, offset, data.to_vec()));
        state.files[self.file].write(offset as usize, data, true);
        Ok(data.len())
    }
    fn set_size(&self, size: u64) -> io::Result<()> {
        let mut state = self.world.call(Call::Change)?;
        state.ops.push(Op::SetSize(self.file, size));
        state.files[self.file].set_size(size as usize);
        Ok(())
    }
    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut state = self.world.call(Call::Change)?;
        state.ops.push(Op::Punch(self.file, offset, length));
        state.files[self.file].punch(offset as usize, length as usize);
        Ok(())
    }
    fn allocate(&self, _: u64, _: u64) -> io::Result<()> {
        self.world.call(Call::Store).map(drop)
    }
    fn seek(&self, offset: u64, what: Seek) -> io::Result<Option<u64>> {
        let state = self.world.call(Call::Read)?;
        let file = &state.files[self.file];
        let size = file.bytes.len() as u64;
        if offset >= size {
            return Ok(None);
        }
        let wanted = what == Seek::Data;
        let first = (offset / BLOCK_BYTES) as usize;
        let found = file.data[first..].iter().position(|data| *data == wanted);
        Ok(match found {
            Some(found) => Some(offset.max((first + found) as u64 * BLOCK_BYTES)),
            None if wanted => None,
            None => Some(size),
        })
    }
    fn times(&self) -> io::Result<FileTimes> {
        let none = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let none = FileTimes {
            modified: none,
            changed: none,
        };
        self.world.call(Call::Read).map(|_| none)
    }
    fn set_modified(&self, _: Timespec) -> io::Result<()> {
        self.world.call(Call::Change).map(drop)
    }
    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.world.call(Call::Sync)?;
        state.ops.push(Op::SyncData(self.file));
        Ok(())
    }
    fn sync_all(&self) -> io::Result<()> {
        let mut state = self.world.call(Call::Sync)?;
        state.ops.push(Op::SyncAll(self.file));
        Ok(())
    }
}

struct Host(Handle);

impl MarkedFile for Host {
    fn content(&self) -> &dyn HostFile {
        &self.0
    }
    fn set_mark(&self, mark: &PartialMark) -> io::Result<()> {
        let mut state = self.0.world.call(Call::Change)?;
        state.ops.push(Op::Mark(Some(mark.encode())));
        state.files[HOST].mark = Some(mark.encode());
        Ok(())
    }
    fn set_reject_marks(&self) -> io::Result<()> {
        self.set_metacopy(Metacopy::Partial)
    }
    fn restore_marks(&self) -> io::Result<()> {
        self.set_metacopy(Metacopy::Whole)?;
        self.clear_mark()
    }
    fn remove_marks(&self) -> io::Result<()> {
        self.set_metacopy(Metacopy::None)?;
        self.clear_mark()
    }
}

impl Host {
    fn set_metacopy(&self, metacopy: Metacopy) -> io::Result<()> {
        let mut state = self.0.world.call(Call::Change)?;
        state.ops.push(Op::Metacopy(metacopy));
        state.files[HOST].metacopy = metacopy;
        Ok(())
    }
    fn clear_mark(&self) -> io::Result<()> {
        let mut state = self.0.world.call(Call::Change)?;
        state.ops.push(Op::Mark(None));
        state.files[HOST].mark = None;
        Ok(())
    }
}

impl MapStore for World {
    fn open(&self, id: u64) -> io::Result<Option<Arc<dyn HostFile>>> {
        let state = self.call(Call::Read)?;
        let found = state.names.get(&Name::Map(id)).copied();
        drop(state);
        Ok(found.map(|file| {
            let handle: Arc<dyn HostFile> = Arc::new(Handle {
                world: self.clone(),
                file,
            });
            handle
        }))
    }
    fn create(&self, id: u64) -> io::Result<Arc<dyn HostFile>> {
        let mut state = self.call(Call::Store)?;
        let file = state.files.len();
        state.files.push(FileState::default());
        state.names.insert(Name::Work(id), file);
        state.ops.push(Op::Create(Name::Work(id), file));
        drop(state);
        Ok(Arc::new(Handle {
            world: self.clone(),
            file,
        }))
    }
    fn publish(&self, id: u64) -> io::Result<()> {
        let mut state = self.call(Call::Change)?;
        let file = state.names.remove(&Name::Work(id)).unwrap();
        state.names.insert(Name::Map(id), file);
        state
            .ops
            .push(Op::Rename(Name::Work(id), Name::Map(id), file));
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        let mut state = self.call(Call::Sync)?;
        state.ops.push(Op::SyncNames);
        Ok(())
    }
    fn has_holes(&self) -> io::Result<bool> {
        Ok(true)
    }
    fn remove(&self, id: u64) -> io::Result<()> {
        for name in [Name::Work(id), Name::Map(id)] {
            let mut state = self.call(Call::Change)?;
            if state.names.remove(&name).is_some() {
                state.ops.push(Op::Remove(name));
            }
        }
        Ok(())
    }
    fn reserve(&self, bytes: u64) -> io::Result<()> {
        let mut state = if bytes == 0 { self.lock() } else { self.call(Call::Store)? };
        state.free += state.reserved.saturating_sub(bytes);
        state.reserved = bytes;
        Ok(())
    }
    fn path(&self, id: u64) -> PathBuf {
        format!("maps/{id:016x}").into()
    }
}
