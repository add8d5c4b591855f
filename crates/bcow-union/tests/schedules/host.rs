//! The host and the lower file. The model checker may switch threads at each call.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bcow::sync::atomic::{AtomicI64, Ordering};
use bcow::sync::thread::{self, ThreadId};
use bcow_union::Seek;
use bcow_union::testing::host::{FileTimes, HostFile};
use bcow_union::testing::partial::host::{MapStore, MarkedFile};
use bcow_union::testing::partial::{Lower, PartialMark};
use rustix::fs::Timespec;
use rustix::io::Errno;

use crate::support::TestLower;
use crate::world::World;

/// Lets the scheduler switch threads: it may do so at any use of an atomic.
fn pause(at: &AtomicI64) {
    at.load(Ordering::SeqCst);
}

/// A file of the host, with its modification time.
pub struct File {
    of: Of,
    point: AtomicI64,
    times: Mutex<Times>,
}

/// Times of a file. The clock counts the changes of the file.
#[derive(Default)]
struct Times {
    now: i64,
    modified: i64,
    /// Threads that write to the partial file. Threads that only complete blocks are not listed.
    changing: Vec<ThreadId>,
    /// Time of the last write by one of these threads.
    changed: i64,
}

enum Of {
    Partial(Arc<dyn MarkedFile>),
    Map(Arc<dyn HostFile>),
}

impl File {
    fn new(of: Of) -> Self {
        File {
            of,
            point: AtomicI64::new(0),
            times: Mutex::default(),
        }
    }

    fn there(&self) -> &dyn HostFile {
        pause(&self.point);
        match &self.of {
            Of::Partial(file) => file.content(),
            Of::Map(file) => &**file,
        }
    }

    fn change<T>(&self, changed: io::Result<T>) -> io::Result<T> {
        let mut times = self.times.lock().unwrap();
        times.now += 1;
        times.modified = times.now;
        if times.changing.contains(&thread::current().id()) {
            times.changed = times.now;
        }
        changed
    }
}

impl HostFile for File {
    fn size(&self) -> io::Result<u64> {
        self.there().size()
    }
    fn stored_bytes(&self) -> io::Result<u64> {
        self.there().stored_bytes()
    }
    fn inode(&self) -> io::Result<u64> {
        self.there().inode()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.there().read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<usize> {
        self.change(self.there().write_at(offset, data))
    }
    fn set_size(&self, size: u64) -> io::Result<()> {
        self.change(self.there().set_size(size))
    }
    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        self.change(self.there().punch(offset, length))
    }
    fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.there().allocate(offset, length)
    }
    fn seek(&self, offset: u64, what: Seek) -> io::Result<Option<u64>> {
        self.there().seek(offset, what)
    }
    fn times(&self) -> io::Result<FileTimes> {
        pause(&self.point);
        let modified = Timespec {
            tv_sec: self.times.lock().unwrap().modified,
            tv_nsec: 0,
        };
        let changed = modified;
        Ok(FileTimes { modified, changed })
    }
    fn set_modified(&self, at: Timespec) -> io::Result<()> {
        pause(&self.point);
        self.times.lock().unwrap().modified = at.tv_sec;
        Ok(())
    }
    fn sync_data(&self) -> io::Result<()> {
        self.there().sync_data()
    }
    fn sync_all(&self) -> io::Result<()> {
        self.there().sync_all()
    }
}

/// The file of the upper that stores the partial file.
pub struct Host {
    marks: Arc<dyn MarkedFile>,
    content: File,
}

impl Host {
    pub fn of(world: &World) -> Arc<Host> {
        let marks = world.host();
        Arc::new(Host {
            content: File::new(Of::Partial(Arc::clone(&marks))),
            marks,
        })
    }

    /// Runs `work`, whose writes count as changes of the file.
    pub fn changing<T>(&self, work: impl FnOnce() -> T) -> T {
        let me = thread::current().id();
        let times = || self.content.times.lock().unwrap();
        times().changing.push(me);
        let done = work();
        times().changing.retain(|thread| *thread != me);
        done
    }

    /// The modification time that the file reports, and the time of its last change.
    pub fn times(&self) -> (i64, i64) {
        let times = self.content.times.lock().unwrap();
        (times.modified, times.changed)
    }

    fn marks(&self) -> &dyn MarkedFile {
        pause(&self.content.point);
        &*self.marks
    }
}

impl MarkedFile for Host {
    fn content(&self) -> &dyn HostFile {
        &self.content
    }
    fn set_mark(&self, mark: &PartialMark) -> io::Result<()> {
        self.marks().set_mark(mark)
    }
    fn set_reject_marks(&self) -> io::Result<()> {
        self.marks().set_reject_marks()
    }
    fn restore_marks(&self) -> io::Result<()> {
        self.marks().restore_marks()
    }
    fn remove_marks(&self) -> io::Result<()> {
        self.marks().remove_marks()
    }
}

/// The directory of the maps.
pub struct Maps {
    world: World,
    point: AtomicI64,
}

impl Maps {
    pub fn of(world: &World) -> Arc<Maps> {
        Arc::new(Maps {
            world: world.clone(),
            point: AtomicI64::new(0),
        })
    }

    fn there(&self) -> &World {
        pause(&self.point);
        &self.world
    }
}

fn map(file: Arc<dyn HostFile>) -> Arc<dyn HostFile> {
    Arc::new(File::new(Of::Map(file)))
}

impl MapStore for Maps {
    fn open(&self, id: u64) -> io::Result<Option<Arc<dyn HostFile>>> {
        Ok(self.there().open(id)?.map(map))
    }
    fn create(&self, id: u64) -> io::Result<Arc<dyn HostFile>> {
        self.there().create(id).map(map)
    }
    fn publish(&self, id: u64) -> io::Result<()> {
        self.there().publish(id)
    }
    fn sync(&self) -> io::Result<()> {
        self.there().sync()
    }
    fn has_holes(&self) -> io::Result<bool> {
        Ok(true)
    }
    fn remove(&self, id: u64) -> io::Result<()> {
        self.there().remove(id)
    }
    fn path(&self, id: u64) -> PathBuf {
        self.world.path(id)
    }
}

/// The file of the image. Other threads may run between the start and the end of a read.
pub struct Below {
    file: Arc<TestLower>,
    point: AtomicI64,
}

impl Below {
    pub fn new(file: Arc<TestLower>) -> Arc<Below> {
        Arc::new(Below {
            file,
            point: AtomicI64::new(0),
        })
    }
}

impl Lower for Below {
    fn size(&self) -> u64 {
        self.file.size()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        pause(&self.point);
        let read = self.file.read_at(offset, buf);
        pause(&self.point);
        read
    }
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, Errno> {
        pause(&self.point);
        self.file.seek(offset, what)
    }
}
