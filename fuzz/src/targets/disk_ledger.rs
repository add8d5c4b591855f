//! A disk is changed, its process ends without a flush, and another process continues with the
//! ledger, of which bytes can be changed meanwhile.
//!
//! The first byte selects the layout of the disk, and how many changes are made; each change has
//! six bytes. The bytes behind them change the ledger: each begins with a byte that says how. If
//! there is no such change, all data must be there. A ledger that is accepted leaves a sound disk;
//! one that is refused leaves the disk as after a crash.

use std::sync::{Arc, LazyLock};

use bcow::check::{CheckOptions, Severity, check};
use bcow::format::{BackingEntry, BackingName};
use bcow::{
    BlockDevice, CreateOptions, Disk, Error, Layout, Ledger, MemoryStorage, OneBacking,
    OpenOptions, Space, WritableDevice,
};

use super::memory::Small;

const BACKING_BYTES: usize = 300 << 10;
const RECORD_BYTES: usize = 40;
/// A file with all changes is shorter.
const MOST_BYTES: u64 = 48 << 20;

/// A disk without changes, over a backing.
struct Subject {
    file: Vec<u8>,
    content: Vec<u8>,
    backing: Arc<dyn BlockDevice>,
}

static SUBJECTS: LazyLock<[Subject; 3]> = LazyLock::new(|| {
    [
        // Two regions, one of them with few blocks.
        (Layout::Space, None, (4 << 20) + (48 << 10)),
        (Layout::Auto, None, (4 << 20) + (48 << 10)),
        (Layout::Performance, Some(64 << 10), 400 << 10),
    ]
    .map(|(layout, block_bytes, size)| {
        let mut content: Vec<u8> = (0..BACKING_BYTES)
            .map(|at| ((at * 31) >> 7) as u8)
            .collect();
        let backing: Arc<dyn BlockDevice> = Arc::new(content.clone());
        let entry = BackingEntry {
            name: BackingName::FileName {
                name: "below".into(),
                identity: None,
            },
            size: BACKING_BYTES as u64,
        };
        let options = CreateOptions {
            layout,
            block_bytes,
            log_bytes: 64 << 10,
            ..CreateOptions::disk(size)
        };
        let file = Arc::new(MemoryStorage::default());
        let below = Some((entry, backing.clone()));
        let disk = Disk::create(file.clone(), &options, below, &OpenOptions::default());
        disk.and_then(|disk| disk.close()).expect("a disk");
        content.resize(size as usize, 0);
        Subject {
            file: file.to_vec(),
            content,
            backing,
        }
    })
});

impl Subject {
    fn open(&self, file: &Arc<Small>, ledger: Option<Ledger>) -> Result<Disk, Error> {
        let backing = OneBacking(Some(self.backing.clone()));
        let options = OpenOptions::default();
        Disk::open_with_ledger(file.clone(), &options, &backing, ledger.map(Arc::new))
    }
}

/// Makes a change, also in `content`. Returns the place that it may have changed.
fn change(disk: &Disk, content: &mut [u8], bytes: &[u8; 6]) -> Result<(usize, usize), Error> {
    let number = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let mut at = (number(1) * content.len()) >> 16;
    let mut length = number(3);
    if bytes[0] & 0x80 != 0 {
        // Whole blocks, also many.
        (at, length) = (at & !4095, length << 5 & !4095);
    }
    length = length.clamp(1, content.len() - at);
    let (start, part) = (at as u64, &mut content[at..at + length]);
    match bytes[0] % 8 {
        0..4 => {
            part.fill(bytes[5]);
            disk.write_at(start, part)?;
        }
        4 => {
            part.fill(0);
            let space = if bytes[5] & 1 == 0 { Space::Free } else { Space::Keep };
            disk.write_zeroes(start, length as u64, space)?;
        }
        5 => {
            disk.discard(start, length as u64)?;
            // Only whole blocks are discarded.
            disk.read_at(start, part)?;
        }
        6 if bytes[5] == 0 => disk.checkpoint()?,
        _ => disk.flush()?,
    }
    Ok((at, length))
}

/// Changes the bytes of a ledger as `changes` says.
fn damage(ledger: &mut Vec<u8>, mut changes: &[u8]) {
    while let Some((&how, rest)) = changes.split_first() {
        match how % 4 {
            // A further record, without its checksum, which is not compared.
            0 if rest.len() >= RECORD_BYTES - 4 => {
                let (record, after) = rest.split_at(RECORD_BYTES - 4);
                ledger.extend([0; 4]);
                ledger.extend(record);
                changes = after;
            }
            1 if rest.len() >= 3 => {
                let at = usize::from(u16::from_le_bytes([rest[0], rest[1]]));
                let length = ledger.len();
                ledger[at % length] = rest[2];
                changes = &rest[3..];
            }
            2 if !rest.is_empty() => {
                let records = usize::from(rest[0]) * RECORD_BYTES / 4;
                ledger.truncate(64 + records);
                changes = &rest[1..];
            }
            _ => return,
        }
    }
}

/// Continues with a changed ledger, and makes changes.
fn go_on(disk: &Disk, size: u64) -> Result<(), Error> {
    for at in [0, 5000, size / 2, size - 4096] {
        disk.write_at(at, &[9; 4096])?;
        disk.read_at(at, &mut [0; 4096])?;
    }
    disk.discard(0, size / 2)?;
    disk.flush()?;
    disk.read_at(0, &mut vec![0; size as usize])
}

pub fn fuzz(bytes: &[u8]) {
    let Some((&first, rest)) = bytes.split_first() else {
        return;
    };
    let subject = &SUBJECTS[usize::from(first) % SUBJECTS.len()];
    let count = usize::from(first) / SUBJECTS.len() % 16;
    let (changes, left) = rest.as_chunks::<6>();
    let changes = &changes[..count.min(changes.len())];
    let damages = &rest[changes.len() * 6..];
    debug_assert!(damages.ends_with(left));

    let file = Arc::new(Small::new(subject.file.clone(), MOST_BYTES));
    let noted = Arc::new(MemoryStorage::default());
    let ledger = Ledger::create(noted.clone()).expect("a ledger");
    let disk = subject.open(&file, Some(ledger)).expect("a disk");
    let mut content = subject.content.clone();
    let mut places = Vec::new();
    for one in changes {
        places.push(change(&disk, &mut content, one).expect("a change"));
    }
    // The process ends.
    drop(disk);
    let mut ledger = noted.to_vec();
    damage(&mut ledger, damages);
    let is_damaged = ledger != noted.to_vec();

    let ledger = Ledger::open(Arc::new(MemoryStorage::new(ledger)));
    let opened = ledger.and_then(|ledger| subject.open(&file, Some(ledger)));
    let opened = match opened {
        Ok(disk) if is_damaged => {
            let _ = go_on(&disk, content.len() as u64);
            disk
        }
        Ok(disk) => {
            for (at, length) in places {
                let mut found = vec![0; length];
                disk.read_at(at as u64, &mut found).expect("a read");
                assert!(
                    found == content[at..at + length],
                    "changes at {at} are lost"
                );
            }
            disk
        }
        Err(error) => {
            assert!(is_damaged, "{error}");
            subject.open(&file, None).expect("the disk after a crash")
        }
    };
    if let Err(error) = opened.close() {
        assert!(is_damaged, "{error}");
        return;
    }
    let options = CheckOptions {
        data: true,
        threads: 1,
    };
    let report = check(file, &options).expect("a check");
    let errors = report.findings.iter();
    let errors: Vec<_> = errors
        .filter(|finding| finding.severity == Severity::Error)
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
}
