//! The modification time is the time of the last write, no matter when the blocks are completed.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use bcow_union::Seek;
use bcow_union::testing::host::{HiddenChange, HostFile};
use bcow_union::testing::partial::{Durability, Lower, Partial, PartialOptions, Partials};
use rustix::fs::Timespec;
use rustix::io::Errno;

use crate::support::*;

const B: u64 = 4096;
/// Limit of the time of any operation that ends at all.
const AT_MOST: Duration = Duration::from_secs(60);

/// A lower file whose reads wait for the test, and then take a fixed time.
struct Gated {
    file: TestLower,
    /// The test holds it exclusively while readers must wait.
    gate: RwLock<()>,
    /// The number of reads that have begun.
    reads: AtomicU64,
    read_takes: Duration,
}

impl Lower for Gated {
    fn size(&self) -> u64 {
        self.file.size()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let _open = self.gate.read().unwrap();
        thread::sleep(self.read_takes);
        self.file.read_at(offset, buf)
    }
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, Errno> {
        self.file.seek(offset, what)
    }
}

/// Waits until the host's clock shows another time, so that later writes differ from earlier ones.
fn tick() {
    let file = tempfile::tempfile().unwrap();
    let touched = || {
        file.write_all_at(b"x", 0).unwrap();
        file.metadata().unwrap().modified().unwrap()
    };
    let now = touched();
    while touched() == now {
        thread::yield_now();
    }
}

/// A partial file on the host and the file that stores it.
struct Timed {
    partial: Arc<Partial>,
    host: File,
    lower: Arc<Gated>,
    _partials: Partials,
    _place: Place,
}

impl Timed {
    fn new(options: PartialOptions, read_takes: Duration) -> Self {
        let place = Place::new();
        let lower = Arc::new(Gated {
            file: TestLower::full(100 * B),
            gate: RwLock::default(),
            reads: AtomicU64::new(0),
            read_takes,
        });
        let partials = on_host(&place, options);
        let file = place.file(lower.size());
        let host = place.host();
        let partial = partials.create(file, lower.clone()).unwrap();
        Timed {
            partial,
            host,
            lower,
            _partials: partials,
            _place: place,
        }
    }

    /// The modification time that a stat request returns.
    fn modified(&self) -> SystemTime {
        let look = |_| self.host.metadata().unwrap().modified().unwrap();
        self.partial.hold_times(look)
    }

    /// The change time that a stat request returns.
    fn changed(&self) -> Timespec {
        let look = |hidden| HiddenChange::shown(hidden, self.host.times().unwrap());
        self.partial.hold_times(look)
    }

    /// Writes parts of blocks. Returns the modification time after the last write.
    fn write(&self, blocks: std::ops::Range<u64>) -> SystemTime {
        for block in blocks {
            self.partial.write_at(block * B + 5, b"some bytes").unwrap();
        }
        self.host.metadata().unwrap().modified().unwrap()
    }
}

fn in_background() -> PartialOptions {
    PartialOptions {
        fillers: 1,
        fill_delay: Duration::ZERO,
        ahead_blocks: 0,
        ..PartialOptions::default()
    }
}

#[test]
fn a_block_that_is_completed_in_the_background_is_no_change() {
    let timed = Timed::new(in_background(), Duration::ZERO);
    let (written, changed) = {
        let _closed = timed.lower.gate.write().unwrap();
        let times = (timed.write(3..4), timed.changed());
        tick();
        times
    };
    let start = Instant::now();
    while timed.partial.status().unwrap().incomplete > 0 {
        assert_eq!(timed.modified(), written);
        assert_eq!(timed.changed(), changed);
        assert!(start.elapsed() < AT_MOST);
    }
    assert_eq!(timed.modified(), written);
    assert_eq!(timed.changed(), changed);
    assert_eq!(timed.host.metadata().unwrap().modified().unwrap(), written);
}

/// The lower file can be on another machine, and a program that lists a directory does not wait for
/// it.
#[test]
fn times_can_be_read_while_a_thread_waits_for_the_lower_file() {
    type Needs = (&'static str, PartialOptions, fn(&Partial));
    let needs: [Needs; 4] = [
        ("background", in_background(), |_| {}),
        ("settle", quiet(), |partial| partial.settle().unwrap()),
        ("flush", quiet(), |partial| {
            partial.flush(Durability::Durable).unwrap();
        }),
        ("read", quiet(), |partial| {
            assert_eq!(partial.read_at(3 * B, &mut [0; 100]).unwrap(), 100);
        }),
    ];
    for (what, options, need) in needs {
        let timed = Timed::new(options, Duration::ZERO);
        thread::scope(|scope| {
            let closed = timed.lower.gate.write().unwrap();
            let written = timed.write(3..4);
            scope.spawn(|| need(&timed.partial));
            let start = Instant::now();
            while timed.lower.reads.load(Ordering::SeqCst) == 0 {
                assert!(start.elapsed() < AT_MOST);
                thread::yield_now();
            }
            // Otherwise this waits for the thread, which waits for the gate.
            assert_eq!(timed.modified(), written, "{what}");
            drop(closed);
        });
    }
}

#[test]
fn a_write_while_a_block_is_completed_has_its_own_time() {
    let timed = Timed::new(in_background(), Duration::ZERO);
    let written = {
        let _closed = timed.lower.gate.write().unwrap();
        timed.write(3..4);
        let start = Instant::now();
        while timed.lower.reads.load(Ordering::SeqCst) == 0 {
            assert!(start.elapsed() < AT_MOST);
            thread::yield_now();
        }
        tick();
        let written = timed.write(40..41);
        tick();
        written
    };
    timed.partial.settle().unwrap();
    assert_eq!(timed.modified(), written);
}

#[test]
fn a_block_that_somebody_needs_complete_is_no_change() {
    type Needs = (&'static str, fn(&Partial));
    let needs: [Needs; 3] = [
        ("settle", |partial| partial.settle().unwrap()),
        ("flush", |partial| {
            partial.flush(Durability::Durable).unwrap()
        }),
        ("read", |partial| {
            assert_eq!(partial.read_at(3 * B, &mut [0; 100]).unwrap(), 100);
        }),
    ];
    for (what, need) in needs {
        let timed = Timed::new(quiet(), Duration::ZERO);
        let written = timed.write(3..4);
        let changed = timed.changed();
        tick();
        need(&timed.partial);
        assert_eq!(timed.modified(), written, "{what}");
        assert_eq!(timed.changed(), changed, "{what}");
        tick();
        timed.write(50..51);
        assert_ne!(timed.changed(), changed, "{what}");
    }
}

#[test]
fn reading_times_does_not_write_to_a_complete_partial() {
    let timed = Timed::new(quiet(), Duration::ZERO);
    timed.write(3..4);
    timed.partial.settle().unwrap();
    let changed = || {
        let host = timed.host.metadata().unwrap();
        (host.ctime(), host.ctime_nsec())
    };
    let before = changed();
    tick();
    timed.partial.settle().unwrap();
    timed.modified();
    assert_eq!(changed(), before);
}

/// Threads that complete blocks set the time back. The time after a write that has returned is
/// never before the start of this write.
#[test]
fn a_write_is_never_undone() {
    let options = PartialOptions {
        fillers: 2,
        fill_delay: Duration::ZERO,
        ..PartialOptions::default()
    };
    // Use the host's file clock, which may be behind the system clock.
    let clock = tempfile::tempfile().unwrap();
    let now = |turn: u64| {
        clock.write_all_at(&turn.to_le_bytes(), 0).unwrap();
        clock.metadata().unwrap().modified().unwrap()
    };
    for round in 0..cases(20) {
        let timed = Timed::new(options.clone(), Duration::from_micros(20));
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for reads in [true, false] {
                let (timed, over) = (&timed, &over);
                scope.spawn(move || {
                    for block in (0..100).cycle() {
                        if reads {
                            drop(timed.partial.read_at(block * B, &mut [0; 4096]))
                        } else {
                            timed.partial.settle().unwrap()
                        }
                        if over.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                });
            }
            let mut undone = None;
            for turn in 0..200 {
                // Write a part of a new block, then the whole block.
                let block = turn / 2 * 37 % 100;
                let data = vec![turn as u8; if turn % 2 == 0 { 20 } else { 4096 }];
                let before = now(turn);
                timed.partial.write_at(block * B, &data).unwrap();
                let modified = timed.modified();
                if modified < before {
                    undone = Some((turn, before, modified));
                    break;
                }
            }
            over.store(true, Ordering::Relaxed);
            assert_eq!(undone, None, "round {round}");
        });
    }
}
