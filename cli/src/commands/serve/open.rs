//! What is served: images for reading, disks for writing, either under an overlay for the length of a session.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::disk::{CreateOptions, Disk};
use bcow::format::{BackingEntry, BackingName, State};
use bcow::{BlockCache, BlockDevice, NoBackings, OpenOptions};
use bcow_nbd::{Device, Export};

use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs, cannot_open_file};

/// What clients may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Write to what is writable.
    AsFile,
    /// Only read.
    ReadOnly,
    /// Write to everything, and nothing is kept.
    Snapshot,
}

/// How to open what is served.
pub struct Opening<'a> {
    /// Where layers are looked up.
    pub stores: &'a StoreArgs,
    /// Shared by everything that is opened.
    pub cache: BlockCache,
    /// For clients.
    pub access: Access,
}

/// Devices that are served, and what is to be closed when they are not served any more.
#[derive(Default)]
pub struct Served {
    /// In the order of the command line.
    pub exports: Vec<Export>,
    disks: Vec<(PathBuf, Arc<Disk>)>,
}

impl Served {
    /// Opens one more.
    pub fn add(
        &mut self,
        path: &Path,
        name: String,
        description: String,
        opening: &Opening<'_>,
    ) -> Result<(), CommandError> {
        let options = OpenOptions {
            cache: opening.cache.clone(),
            ..OpenOptions::default()
        };
        let image = OpenImage::open_with(path, opening.stores, &options)?;
        let writable = image.image().header().state == State::Writable;
        let device = match opening.access {
            Access::AsFile if writable => {
                drop(image);
                let disk = Arc::new(open_disk(path, &options)?);
                self.disks.push((path.to_owned(), disk.clone()));
                Device::Writable(disk)
            }
            Access::AsFile | Access::ReadOnly => Device::ReadOnly(image.image().clone()),
            Access::Snapshot => Device::Writable(Arc::new(
                snapshot(image.image().clone(), &options)
                    .map_err(|error| error.context_of(path))?,
            )),
        };
        self.exports.push(Export {
            name,
            description,
            device,
        });
        Ok(())
    }

    /// Closes the disks. Nobody may use the devices any more.
    pub fn close(self) -> Result<(), CommandError> {
        drop(self.exports);
        let mut result = Ok(());
        for (path, disk) in self.disks {
            let closed = match Arc::try_unwrap(disk) {
                Ok(disk) => disk.close(),
                // Somebody does use it; then it is only brought up to date.
                Err(disk) => disk.checkpoint(),
            };
            let closed = closed.context(|| format!("cannot close {}", path.display()));
            result = result.and(closed);
        }
        result
    }
}

fn open_disk(path: &Path, options: &OpenOptions) -> Result<Disk, CommandError> {
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .context(|| format!("cannot open {} for writing", path.display()))
        .map_err(|error| error.hint("--read-only serves it as it is"))?;
    Disk::open(Arc::new(file), options, &NoBackings)
        .map_err(|error| cannot_open_file(path, path, &error))
}

/// Why there is no overlay.
enum NoSnapshot {
    File(std::io::Error),
    Disk(bcow::Error),
}

impl NoSnapshot {
    fn context_of(self, path: &Path) -> CommandError {
        let directory = std::env::temp_dir();
        let failure = CommandError::new(format!(
            "cannot make an overlay for {} in {}",
            path.display(),
            directory.display()
        ));
        match self {
            NoSnapshot::File(error) => failure
                .caused_by(&error)
                .hint("TMPDIR names another directory for it"),
            NoSnapshot::Disk(error) => failure.caused_by(&error),
        }
    }
}

/// A disk over `below` in a file without a name, which vanishes with the process.
fn snapshot(below: Arc<dyn BlockDevice>, options: &OpenOptions) -> Result<Disk, NoSnapshot> {
    let file = tempfile::tempfile().map_err(NoSnapshot::File)?;
    let size = below.size();
    let entry = BackingEntry {
        name: BackingName::FileName {
            name: "below".into(),
            identity: None,
        },
        size,
    };
    Disk::create(
        Arc::new(file),
        &CreateOptions::disk(size),
        Some((entry, below)),
        options,
    )
    .map_err(NoSnapshot::Disk)
}
