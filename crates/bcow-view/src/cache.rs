//! The cache of views: a directory of the user, with one file per view.
//!
//! A disk over a view may be mounted by the kernel, which trusts the metadata of a file system. So
//! bcow makes each view on this machine, and uses a file of the cache only if no user except this
//! one and root could have written it.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::chain::{FoundView, ViewFailure, Views, WantedView};
use bcow::format::{BackingEntry, BackingName, hex};
use bcow::{Image, NewFile, NewFileError, OneBacking, OpenOptions, RestoredFile, Storage};

use crate::entries::{Removal, Remove, ViewEntry};
use crate::file::{self, LAYOUT};
use crate::{ViewError, ViewedImage};
use crate::{bound, entries};

/// Limit of the bytes that views take on the disk. About a thousand views fit.
const MAX_BYTES: u64 = 1 << 30;
/// Permission bits with which other users can write.
const OTHERS_WRITE: u32 = 0o022;

/// A directory with views. The user can delete them at any time: bcow makes missing views again.
/// When views take more than 1 GiB, bcow removes the least recently used ones. A view that is
/// larger than that does not count; of such views, only the most recently used one stays.
#[derive(Debug, Clone)]
pub struct ViewCache {
    directory: PathBuf,
    options: OpenOptions,
}

#[derive(Clone)]
pub struct CachedView {
    view: Arc<Image>,
    path: PathBuf,
    identity: [u8; 32],
}

impl CachedView {
    /// The view, over the image.
    pub fn device(&self) -> &Arc<Image> {
        &self.view
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the address space in bytes.
    pub fn bytes(&self) -> u64 {
        self.view.header().size
    }

    /// The backing of a disk over the view. `image` says where a reader finds the image.
    pub fn entry(&self, image: BackingEntry) -> BackingEntry {
        BackingEntry {
            size: self.bytes(),
            name: BackingName::View {
                layout: LAYOUT,
                identity: self.identity,
                image: Box::new(image),
            },
        }
    }
}

impl ViewCache {
    /// The cache in `directory`, which is made if it is missing. Views are opened with `options`.
    pub fn new(directory: &Path, options: &OpenOptions) -> Self {
        ViewCache {
            directory: directory.to_owned(),
            options: options.clone(),
        }
    }

    /// The view of `image` as an ext4 of `bytes` bytes, from the cache or new.
    pub fn view(&self, image: &dyn ViewedImage, bytes: u64) -> Result<CachedView, ViewError> {
        let directory = self.open_directory()?;
        match self.cached(&directory, image, bytes) {
            Some(view) => Ok(view),
            None => self.make(&directory, image, bytes),
        }
    }

    /// The directory, which need not exist.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The views, the most recently used first; none if the directory is missing.
    pub fn entries(&self) -> io::Result<Vec<ViewEntry>> {
        Ok(self.in_directory(entries::list)?.unwrap_or_default())
    }

    /// Whether the file of a view is as it was written: every stored byte matches its checksums.
    /// `None` if the view does not exist any more.
    pub fn verify(&self, name: &str) -> io::Result<Option<bool>> {
        let verified = self.in_directory(|directory| entries::verify(directory, name))?;
        Ok(verified.flatten())
    }

    /// Removes a view. A process that has it open keeps it.
    pub fn remove(&self, name: &str, which: Remove) -> io::Result<Removal> {
        let removed = self.in_directory(|directory| entries::remove(directory, name, which))?;
        Ok(removed.unwrap_or(Removal::Missing))
    }

    /// Runs `work` with the directory, if it exists.
    fn in_directory<T>(&self, work: impl FnOnce(&File) -> io::Result<T>) -> io::Result<Option<T>> {
        match File::open(&self.directory) {
            Ok(directory) => work(&directory).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn open_directory(&self) -> Result<File, ViewError> {
        let failed = |source| ViewError::Directory {
            path: self.directory.clone(),
            source,
        };
        let mut builder = DirBuilder::new();
        let made = builder.recursive(true).mode(0o700).create(&self.directory);
        made.map_err(failed)?;
        let directory = File::open(&self.directory).map_err(failed)?;
        let metadata = directory.metadata().map_err(failed)?;
        if metadata.is_dir() && is_safe(&metadata) {
            Ok(directory)
        } else {
            Err(ViewError::WritableByOthers(self.directory.clone()))
        }
    }

    /// The view in the cache. A file that does not belong there, or that is damaged, counts as
    /// missing, and is replaced. The whole file is compared with its checksum: a view is small, and
    /// a damaged block would fail later reads.
    fn cached(&self, directory: &File, image: &dyn ViewedImage, bytes: u64) -> Option<CachedView> {
        let name = name(image, bytes);
        let path = self.directory.join(&name);
        let file = Arc::new(open_safe(directory, &name)?);
        bound::record_use(&file);
        if let Some(name) = image.name() {
            entries::record_image(&file, &name);
        }
        let problem = match entries::is_as_written(&file) {
            Ok(true) => None,
            Ok(false) => Some("damaged".to_owned()),
            Err(error) => Some(format!("not readable: {error}")),
        };
        if let Some(problem) = problem {
            let path = path.display();
            tracing::warn!("{path} is {problem}: bcow makes this view again");
            return None;
        }
        let below = OneBacking(Some(image.image().clone()));
        let file = self.restored(file, &path, image, bytes);
        let view = Image::open_with_backings(file, &self.options, &below).ok()?;
        Some(CachedView {
            identity: file::identity_of(&view, image, bytes)?,
            view,
            path,
        })
    }

    /// The file of a view, which is made again if it is damaged later. That is not possible for an
    /// image of several parts, whose tree cannot be read again from here.
    fn restored(
        &self,
        file: Arc<File>,
        path: &Path,
        image: &dyn ViewedImage,
        bytes: u64,
    ) -> Arc<dyn Storage> {
        let whole = image.image().clone();
        let (true, Ok(own)) = (whole.identity_hash() == image.identity(), file.try_clone()) else {
            return file;
        };
        let cache = self.clone();
        let make = move || {
            let directory = cache.open_directory()?;
            let path = cache.make_file(&directory, &whole, bytes)?;
            let file = open_safe(&directory, &name(&whole, bytes));
            Ok(file.ok_or(ViewError::Replaced(path))?)
        };
        Arc::new(RestoredFile::new(own, path.to_owned(), make))
    }

    fn make(
        &self,
        directory: &File,
        image: &dyn ViewedImage,
        bytes: u64,
    ) -> Result<CachedView, ViewError> {
        let path = self.make_file(directory, image, bytes)?;
        self.cached(directory, image, bytes)
            .ok_or(ViewError::Replaced(path))
    }

    /// Makes the file of the view. Concurrent makers do no harm: each gives the name to a file with
    /// the same content.
    fn make_file(
        &self,
        directory: &File,
        image: &dyn ViewedImage,
        bytes: u64,
    ) -> Result<PathBuf, ViewError> {
        let name = name(image, bytes);
        let path = self.directory.join(&name);
        // Through the open directory: the path may lead to another one by now.
        let within = PathBuf::from(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd()));
        let failed = |source| ViewError::File {
            path: path.clone(),
            source,
        };
        let new = NewFile::create_private(&within).map_err(failed)?;
        let io = |source: io::Error| failed(NewFileError::Write(source));
        let storage = Arc::new(new.file().try_clone().map_err(io)?);
        file::write(storage, image, bytes)?;
        entries::record_checksum(new.file());
        new.complete().map_err(failed)?;
        bound::evict(directory, &name, MAX_BYTES);
        Ok(path)
    }

    /// The view that a disk names as its backing.
    pub(crate) fn find_wanted(
        &self,
        image: &dyn ViewedImage,
        wanted: &WantedView,
    ) -> Result<CachedView, ViewError> {
        if wanted.layout != LAYOUT {
            return Err(ViewError::Layout {
                wanted: wanted.layout,
                made: LAYOUT,
            });
        }
        let view = self.view(image, wanted.bytes)?;
        if view.identity == wanted.identity {
            Ok(view)
        } else {
            Err(ViewError::Identity)
        }
    }
}

impl Views for ViewCache {
    fn find(
        &self,
        image: Option<&Arc<Image>>,
        wanted: &WantedView,
    ) -> Result<FoundView, ViewFailure> {
        let image = image.ok_or("its image is not open")?;
        Ok(self.find_wanted(image, wanted)?.into())
    }
}

impl From<CachedView> for FoundView {
    fn from(found: CachedView) -> Self {
        FoundView {
            view: found.view,
            path: found.path,
        }
    }
}

/// Opens and holds a file of the cache, if only this user and root can have written it.
fn open_safe(directory: &File, name: &str) -> Option<File> {
    let file = entries::open(directory, name).ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || !is_safe(&metadata) {
        return None;
    }
    entries::hold(&file);
    Some(file)
}

/// Whether only this user and root can have written a file or directory.
fn is_safe(metadata: &std::fs::Metadata) -> bool {
    let own = rustix::process::geteuid().as_raw();
    [own, 0].contains(&metadata.uid()) && metadata.mode() & OTHERS_WRITE == 0
}

/// The name of a view's file.
fn name(image: &dyn ViewedImage, bytes: u64) -> String {
    format!("{}-{bytes}-{LAYOUT}.bcow", hex(&image.identity()))
}
