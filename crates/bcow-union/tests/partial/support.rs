//! Lower files, and uppers for partial files.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use bcow_testkit::Random;
use bcow_union::testing::account::Account;
use bcow_union::testing::partial::{Lower, PartialMark, PartialOptions, Partials};
use bcow_union::testing::upper::{Attribute, ImageName, Mark, Marks, Metacopy};
use bcow_union::{Instance, Seek};
use rustix::io::Errno;

/// Number of random cases: `PROPTEST_CASES`, or `few` by default.
pub fn cases(few: u64) -> u64 {
    let asked = std::env::var("PROPTEST_CASES").ok();
    asked.and_then(|cases| cases.parse().ok()).unwrap_or(few)
}

/// No background threads and no optional operations.
pub fn quiet() -> PartialOptions {
    PartialOptions {
        fillers: 0,
        ahead_blocks: 0,
        ..PartialOptions::default()
    }
}

/// A lower file in memory: bytes above 200, and some holes.
pub struct TestLower {
    pub bytes: Vec<u8>,
    /// Whether reads fail.
    pub broken: AtomicBool,
    /// All reads, with offset and length.
    pub reads: Mutex<Vec<(u64, usize)>>,
}

impl TestLower {
    pub fn new(seed: u64, size: u64) -> Self {
        let mut random = Random::new(seed);
        let mut lower = TestLower::full(size);
        for _ in 0..random.below(4) {
            let start = random.below(size + 1) as usize;
            let end = (start + random.below(40_000) as usize).min(lower.bytes.len());
            lower.bytes[start..end].fill(0);
        }
        lower
    }
}

impl TestLower {
    /// A lower file without holes.
    pub fn full(size: u64) -> Self {
        TestLower {
            bytes: (0..size).map(|at| 201 + (at * 7 % 50) as u8).collect(),
            broken: AtomicBool::new(false),
            reads: Mutex::default(),
        }
    }
}

impl Lower for TestLower {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(Errno::IO);
        }
        self.reads.lock().unwrap().push((offset, buf.len()));
        buf.copy_from_slice(&self.bytes[offset as usize..][..buf.len()]);
        Ok(())
    }
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, Errno> {
        let size = self.size();
        if offset >= size {
            return Ok(None);
        }
        let wanted = |byte: &u8| (*byte != 0) == (what == Seek::Data);
        let found = self.bytes[offset as usize..].iter().position(wanted);
        Ok(match (found, what) {
            (Some(found), _) => Some(offset + found as u64),
            (None, Seek::Hole) => Some(size),
            (None, Seek::Data) => None,
        })
    }
}

/// An upper on the host with one file in it.
pub struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        Place {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("file")
    }

    fn instance(&self) -> Instance {
        let image = ImageName {
            identity: [7; 32],
            name: "image",
        };
        Instance::open(self.dir.path(), image, "a test").unwrap()
    }

    /// The file, as a metadata copy with this size.
    pub fn file(&self, size: u64) -> File {
        let file = File::options()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(self.path())
            .unwrap();
        file.set_len(size).unwrap();
        let at = Attribute::Open(file.as_fd());
        let value = Metacopy::Whole.encode().unwrap();
        Mark::Metacopy
            .set(at, self.instance().namespace(), value)
            .unwrap();
        file
    }

    pub fn partials(&self, account: Arc<Account>, options: PartialOptions) -> Partials {
        Partials::with_options(&self.instance(), account, options).unwrap()
    }

    /// The path of the map of a partial file.
    pub fn map(&self, id: u64) -> PathBuf {
        self.dir.path().join(format!(".bcow/maps/{id:016x}"))
    }

    pub fn host(&self) -> File {
        File::options()
            .read(true)
            .write(true)
            .open(self.path())
            .unwrap()
    }

    /// The mark of the file, if it is a partial file.
    pub fn mark(&self) -> Option<PartialMark> {
        let namespaces = [
            bcow_union::testing::upper::Namespace::Trusted,
            bcow_union::testing::upper::Namespace::User,
        ];
        let host = self.host();
        namespaces.into_iter().find_map(|namespace| {
            let marks = Marks::read(Attribute::Open(host.as_fd()), namespace).unwrap();
            assert_eq!(marks.partial.is_some(), marks.metacopy == Metacopy::Partial);
            marks.partial
        })
    }
}

/// The partial files of the upper `place`.
pub fn on_host(place: &Place, options: PartialOptions) -> Partials {
    place.partials(Arc::default(), options)
}

/// All bytes of a file.
pub fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}
