//! Repairs that need no guess. A repair never changes the visible content.

use std::fmt;
use std::sync::Arc;

use bcow_format::{HEADER_AREA_BYTES, Header, SLOT_BYTES, Section, State, choose_header};

use super::{CheckOptions, check, check_as};
use crate::checked::read_header;
use crate::storage::Storage;
use crate::{Disk, Error, OpenOptions, UnreadBackings};

/// A change that [`repair`] made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repair {
    /// The header slot of this name was damaged, and is written again.
    Slot(&'static str),
    /// The free list was damaged, and is rebuilt.
    FreeList,
    /// This number of bytes was neither in use nor in the free list, and is free again.
    LostBytes(u64),
    /// This number of records of the log is in the tables now.
    Records(u64),
}

impl Repair {
    /// Whether the file was damaged or had lost space. Records in the log are part of a sound file
    /// whose writer did not close it.
    pub fn is_of_damage(&self) -> bool {
        !matches!(self, Repair::Records(_))
    }

    /// Whether the repair changed the identity of the file (spec section 8), so that disks over the
    /// file do not open any more.
    pub fn changes_identity(&self) -> bool {
        !matches!(self, Repair::Slot(_))
    }
}

impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Repair::Slot(name) => {
                write!(f, "header slot {name} was damaged and is written again")
            }
            Repair::FreeList => f.write_str("the free list was damaged and is made anew"),
            Repair::LostBytes(1) => f.write_str("1 lost byte of the file is free again"),
            Repair::LostBytes(bytes) => {
                write!(f, "{bytes} lost bytes of the file are free again")
            }
            Repair::Records(1) => f.write_str("1 record of the log is in the tables now"),
            Repair::Records(records) => {
                write!(f, "{records} records of the log are in the tables now")
            }
        }
    }
}

/// Repairs the file in `storage`, which is open for writing and locked. Returns each change.
///
/// - A damaged header slot is rewritten from the valid one.
/// - In a writable file that has a damaged free list or lost space, but no other damage, the
///   records are folded into the tables, the free list is rebuilt, and both slots get the newest
///   header.
///
/// Records in the log, and a last record that a crash cut short, need no repair. They alone do not
/// cause a change of the file, because disks over it would not open any more.
///
/// Other damage stays as it is, above all contradictions between two parts of the file; [`check`]
/// reports it. An interruption leaves the file no worse than before.
pub fn repair(storage: Arc<dyn Storage>) -> Result<Vec<Repair>, Error> {
    let mut done = Vec::new();
    let header = match read_header(&*storage) {
        Ok(header) => header,
        Err(error) if error.code().is_some() => return Ok(done),
        Err(error) => return Err(error),
    };
    repair_slots(&*storage, &header, &mut done)?;
    if header.state == State::Writable && header.log.1 > 0 {
        repair_writable(&storage, header, &mut done)?;
    }
    Ok(done)
}

fn repair_slots(
    storage: &dyn Storage,
    header: &Header,
    done: &mut Vec<Repair>,
) -> Result<(), Error> {
    let mut area = [0; HEADER_AREA_BYTES];
    storage.read(0, &mut area)?;
    let slots: Vec<_> = area.chunks(SLOT_BYTES).map(choose_header).collect();
    let ([Err(_), Ok(good)] | [Ok(good), Err(_)]) = &slots[..] else {
        return Ok(());
    };
    if good != header {
        return Ok(());
    }
    let (bad, name) = match slots[0] {
        Err(_) => (0, "A"),
        Ok(_) => (1, "B"),
    };
    let generation = match header.state {
        // The records belong to this generation.
        State::Writable => header.generation,
        // The generation at creation (spec section 14), so that the file gets its original digest.
        State::Sealed if bad == 0 => header.generation.saturating_sub(1).max(1),
        State::Sealed => header.generation.saturating_add(1),
    };
    let slot = Header {
        generation,
        ..header.clone()
    };
    write_slot(storage, bad, &slot)?;
    done.push(Repair::Slot(name));
    Ok(())
}

fn write_slot(storage: &dyn Storage, index: usize, header: &Header) -> Result<(), Error> {
    storage.write((index * SLOT_BYTES) as u64, &header.encode())?;
    storage.make_durable()
}

fn repair_writable(
    storage: &Arc<dyn Storage>,
    header: Header,
    done: &mut Vec<Repair>,
) -> Result<(), Error> {
    let quick = CheckOptions {
        data: false,
        threads: 1,
    };
    let mut report = check(storage.clone(), &quick)?;
    if !report.is_sound() {
        // If only the free list is damaged, the file is valid with an empty one, which says that no
        // space is free. Nothing else changes.
        let without = Header {
            free: Section::default(),
            ..header
        };
        report = check_as(storage.clone(), &without, &quick)?;
        if !report.is_sound() {
            return Ok(());
        }
        // The same generation, so that the records stay valid. Until both slots are written, either
        // header is right.
        write_slot(&**storage, 0, &without)?;
        write_slot(&**storage, 1, &without)?;
        done.push(Repair::FreeList);
    }
    let Some(writable) = report.writable else {
        return Ok(());
    };
    if writable.leaked_bytes == 0 {
        return Ok(());
    }
    let disk = Disk::open(storage.clone(), &OpenOptions::default(), &UnreadBackings)?;
    let recovered = disk.rebuild_free_list()?;
    disk.close()?;
    if recovered > 0 {
        done.push(Repair::LostBytes(recovered));
    }
    if writable.records > 0 {
        done.push(Repair::Records(writable.records));
    }
    Ok(())
}
