//! Failures of the host: the caller gets the error, the file stays valid, and flushed data is
//! present.

use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::format::BackingEntry;
use bcow::{
    BlockDevice, CreateOptions, Disk, Error, Layout, MemoryStorage, OneBacking, OpenOptions, Space,
    WritableDevice,
};
use bcow_testkit::{Fault, Faulty, History, On, SECTOR_BYTES, below, tagged, tags};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const SIZE: u64 = 1 << 20;
const BLOCK: usize = 4096;

fn backing() -> (BackingEntry, Arc<dyn BlockDevice>) {
    below(Arc::new(tagged(&vec![7; SIZE as usize / 2 / SECTOR_BYTES])))
}

fn tags_of_all(device: &dyn BlockDevice) -> Vec<u32> {
    let tags = tags(device).into_iter();
    tags.map(|tag| tag.expect("no sector is torn")).collect()
}

fn layouts() -> [CreateOptions; 3] {
    let with = |layout, block_bytes| CreateOptions {
        layout,
        block_bytes,
        log_bytes: 256 << 10,
        ..CreateOptions::disk(SIZE)
    };
    [
        with(Layout::Space, None),
        with(Layout::Performance, Some(64 << 10)),
        with(Layout::Auto, None),
    ]
}

/// A disk, and the values that each of its sectors may have. The clock counts steps.
struct Subject {
    storage: Arc<Faulty>,
    disk: Disk,
    history: History,
    now: usize,
}

impl Subject {
    fn new(options: &CreateOptions) -> Self {
        let storage = Arc::new(Faulty::new(Vec::new()));
        let open = OpenOptions::default();
        let disk = Disk::create(storage.clone(), options, Some(backing()), &open).unwrap();
        let mut base = vec![7; SIZE as usize / SECTOR_BYTES];
        base[SIZE as usize / 2 / SECTOR_BYTES..].fill(0);
        Subject {
            storage,
            disk,
            history: History::new(1, base),
            now: 0,
        }
    }

    /// Runs a change after which each sector of the range has its old tag or `tag`.
    fn change(
        &mut self,
        at: usize,
        count: usize,
        tag: u32,
        change: impl FnOnce(&Disk, u64, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut tags = self.history.now().to_vec();
        tags[at..at + count].fill(tag);
        let bytes = tagged(&tags)[at * SECTOR_BYTES..(at + count) * SECTOR_BYTES].to_vec();
        let outcome = change(&self.disk, (at * SECTOR_BYTES) as u64, &bytes);
        let before = self.history.now().to_vec();
        self.step(tags.clone(), false);
        if outcome.is_err() {
            // Each sector has its old or its new value, and keeps it from here on.
            self.storage.pause(true);
            let held = tags_of_all(&self.disk);
            self.storage.pause(false);
            for (held, (before, tag)) in held.iter().zip(before.iter().zip(&tags)) {
                assert!(held == before || held == tag);
            }
            self.step(held, false);
        }
        outcome
    }

    fn flush(&mut self, how: impl FnOnce(&Disk) -> Result<(), Error>) -> Result<(), Error> {
        let outcome = how(&self.disk);
        self.step(self.history.now().to_vec(), outcome.is_ok());
        outcome
    }

    fn step(&mut self, tags: Vec<u32>, durable: bool) {
        self.now += 2;
        self.history.step(self.now, self.now + 1, durable, tags);
    }

    /// Runs operations of all kinds. Returns the number of calls that failed.
    fn work(&mut self, round: u32) -> u32 {
        let mut failed = 0;
        let mut note = |outcome: Result<(), Error>| {
            if let Err(error) = outcome {
                let innermost = error.innermost();
                let is_reported =
                    matches!(innermost, Error::Io { .. } | Error::WriteRefused { .. });
                assert!(is_reported, "{error}");
                failed += 1;
            }
        };
        let tag = round * 100;
        note(self.change(0, 8, tag + 1, |disk, at, bytes| disk.write_at(at, bytes)));
        note(self.change(13, 5, tag + 2, |disk, at, bytes| disk.write_at(at, bytes)));
        note(self.flush(|disk| disk.flush()));
        note(self.change(200, 512, tag + 3, |disk, at, bytes| {
            disk.write_at(at, bytes)
        }));
        note(self.change(1100, 300, 0, |disk, at, bytes| {
            disk.write_zeroes(at, bytes.len() as u64, Space::Keep)
        }));
        note(self.flush(|disk| disk.flush()));
        note(self.change(0, 64, 0, |disk, at, bytes| {
            disk.write_zeroes(at, bytes.len() as u64, Space::Free)
        }));
        note(self.change(2, 1, tag + 4, |disk, at, bytes| disk.write_at(at, bytes)));
        note(self.flush(|disk| disk.checkpoint()));
        note(self.change(300, 8, tag + 5, |disk, at, bytes| disk.write_at(at, bytes)));
        note(self.flush(|disk| disk.flush()));
        failed
    }

    /// Checks the file as if the program ended here.
    fn look(&self, context: &str) {
        let storage = Arc::new(MemoryStorage::new(self.storage.to_vec()));
        let report = check(storage.clone(), &CheckOptions::FULL).unwrap();
        assert!(report.is_sound(), "{context}: {:?}", report.findings);
        let disk = Disk::open(
            storage.clone(),
            &OpenOptions::default(),
            &OneBacking(Some(backing().1)),
        )
        .unwrap_or_else(|error| panic!("{context}: {error}"));
        let moment = usize::MAX;
        let allowed = self.history.allows(moment, &tags(&disk));
        allowed.unwrap_or_else(|problem| panic!("{context}: after opening again: {problem}"));
        disk.close().unwrap();
        let report = check(storage, &CheckOptions::FULL).unwrap();
        assert_eq!(report.findings, [], "{context}");
    }
}

/// Fails each operation of the work once alone, and in a second run together with all later ones.
fn every_operation_fails(on: On, errno: i32) {
    for options in layouts() {
        for stays in [false, true] {
            for after in 0.. {
                let context = format!("{:?}, {on:?} {after}, stays {stays}", options.layout);
                let mut subject = Subject::new(&options);
                subject.work(1);
                subject.storage.plan(Some(Fault {
                    on,
                    after,
                    stays,
                    errno,
                }));
                let failed = subject.work(2);
                let hits = subject.storage.hits();
                if hits == 0 {
                    assert_eq!(failed, 0, "{context}");
                    break;
                }
                subject.look(&context);
                // Reads still work, and return the new data or the old.
                subject.storage.plan(None);
                let held = tags(&subject.disk);
                let allowed = subject.history.allows(usize::MAX, &held);
                allowed.unwrap_or_else(|problem| panic!("{context}: a read: {problem}"));
                let failed_flush = subject.flush(|disk| disk.flush()).is_err();
                subject.look(&context);
                if on == On::Sync {
                    // After a failed barrier the state of the earlier writes is unknown.
                    assert!(failed > 0 && failed_flush, "{context}");
                    let refused = subject.disk.write_at(0, &[1; BLOCK]);
                    assert!(
                        matches!(refused, Err(Error::WriteRefused { .. })),
                        "{context}"
                    );
                }
                if on == On::Growth && !stays {
                    assert!(!failed_flush, "{context}: there is room again");
                    assert_eq!(subject.work(3), 0, "{context}");
                    subject.look(&context);
                }
                let closed = subject.disk.close();
                assert!(closed.is_ok() || on != On::Growth, "{context}");
            }
        }
    }
}

#[test]
fn failing_writes_are_reported_and_leave_the_file_valid() {
    every_operation_fails(On::Change, EIO);
}

#[test]
fn failing_barriers_end_writing() {
    every_operation_fails(On::Sync, EIO);
}

#[test]
fn a_full_disk_is_reported_and_can_be_written_when_there_is_room() {
    every_operation_fails(On::Growth, ENOSPC);
}

#[test]
fn failing_reads_are_reported_and_lose_nothing() {
    for options in layouts() {
        for after in 0..40 {
            let mut subject = Subject::new(&options);
            subject.work(1);
            subject.storage.plan(Some(Fault {
                on: On::Read,
                after,
                stays: true,
                errno: EIO,
            }));
            let mut bytes = [0; 512];
            let _ = subject.disk.read_at(300 * 512, &mut bytes);
            subject.work(2);
            subject.storage.plan(None);
            let context = format!("{:?}, read {after}", options.layout);
            subject.look(&context);
            let allowed = subject.history.allows(usize::MAX, &tags(&subject.disk));
            allowed.unwrap_or_else(|problem| panic!("{context}: {problem}"));
            subject.flush(|disk| disk.flush()).unwrap();
            subject.look(&context);
        }
    }
}

/// If a resize fails, the disk has its old size, unless it refuses writes.
#[test]
fn a_resize_that_reports_a_failure_is_not_made() {
    let size_of = |storage: &Faulty| {
        let storage = Arc::new(MemoryStorage::new(storage.to_vec()));
        let report = check(storage.clone(), &CheckOptions::FULL).unwrap();
        assert!(report.is_sound(), "{:?}", report.findings);
        let resolver = OneBacking(Some(backing().1));
        let disk = Disk::open(storage, &OpenOptions::default(), &resolver);
        disk.expect("a sound file").size()
    };
    for new_size in [SIZE / 4, SIZE * 2] {
        for after in 0.. {
            let context = format!("to {new_size}, change {after}");
            let mut subject = Subject::new(&layouts()[0]);
            subject.work(1);
            subject.storage.plan(Some(Fault {
                on: On::Change,
                after,
                stays: false,
                errno: EIO,
            }));
            let resized = subject.disk.resize(new_size);
            if subject.storage.hits() == 0 {
                break;
            }
            subject.storage.plan(None);
            let written = subject.disk.write_at(0, &[9; BLOCK]);
            let flushed = written.and_then(|()| subject.disk.flush());
            let found = (subject.disk.size(), size_of(&subject.storage));
            match (resized, flushed) {
                (Ok(()), _) => assert_eq!(found, (new_size, new_size), "{context}"),
                (Err(_), Err(Error::WriteRefused { .. })) => {}
                (Err(_), _) => assert_eq!(found, (SIZE, SIZE), "{context}"),
            }
        }
    }
}
