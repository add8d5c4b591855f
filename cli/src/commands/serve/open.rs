//! The served devices: images for reading, disks for writing, or either under an overlay for the
//! length of a session.

use bcow_images::Name;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::chain::directory_of;
use bcow::format::{BackingEntry, BackingName};
use bcow::operation::LiveDisk;
use bcow::{BlockCache, BlockDevice, CreateOptions, Disk, OpenOptions};
use bcow_mounts::control::{ServedDisk, register};
use bcow_nbd::{Device, Export, FailureReport};
use bcow_union::log::{self, Severity};

use crate::disks::{is_writable_disk, open_writable};
use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs};
use crate::running::{self, Service};

/// Access of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Writable where the file is.
    AsFile,
    ReadOnly,
    /// Writable; all writes are dropped at the end.
    Snapshot,
}

impl Access {
    /// The access that the options `--read-only` and `--snapshot` select, which exclude each other.
    pub fn of_options(read_only: bool, snapshot: bool) -> Self {
        match (read_only, snapshot) {
            (true, _) => Access::ReadOnly,
            (_, true) => Access::Snapshot,
            _ => Access::AsFile,
        }
    }
}

/// How devices are opened.
pub struct DeviceOptions<'a> {
    /// Where layers are looked up.
    pub stores: &'a StoreArgs,
    /// Shared by all devices.
    pub cache: BlockCache,
    /// Access of clients.
    pub access: Access,
    /// The name of the command: the error of a second writer names it.
    pub command: &'static str,
}

/// The served devices, and the disks to close afterwards.
#[derive(Default)]
pub struct Served {
    /// In the order in which they were added.
    pub exports: Vec<Export>,
    /// One for each export.
    described: Vec<Described>,
    disks: Vec<(PathBuf, Arc<LiveDisk>)>,
    /// Open images keep their locks against writers.
    images: Vec<OpenImage>,
}

/// A served device, for messages and for `bcow ps`.
#[derive(Debug, Clone)]
struct Described {
    image: String,
    export: String,
    mode: &'static str,
}

impl Served {
    /// The services of a process of this kind, at these places. From now on, the process answers
    /// requests of other commands for its disks.
    pub fn services(&self, kind: &'static str, at: impl Fn(&str) -> Vec<String>) -> Vec<Service> {
        let is_only = self.described.len() == 1;
        let control = if self.disks.is_empty() { None } else { self.listen(kind) };
        self.described
            .iter()
            .map(|described| Service {
                kind: kind.to_owned(),
                image: described.image.clone(),
                export: (!is_only).then(|| described.export.clone()),
                at: at(&described.export),
                mode: described.mode.to_owned(),
                since: running::now(),
                control: control.clone(),
                ..Service::default()
            })
            .collect()
    }

    /// Answers requests of other commands. Returns the name of the socket.
    fn listen(&self, kind: &'static str) -> Option<String> {
        let disks = self.disks.iter().map(|(path, disk)| {
            let disk = ServedDisk {
                name: path.display().to_string(),
                disk: Arc::downgrade(disk),
                command: kind,
            };
            register(Arc::new(disk), kind)
        });
        disks.fold(None, |_, socket| socket)
    }

    /// The directories of the disks in files.
    pub fn directories(&self) -> Vec<PathBuf> {
        let files = self.disks.iter().map(|(path, _)| path);
        let files = files.filter(|path| path.is_file());
        files.map(|path| directory_of(path)).collect()
    }

    /// Logs failed requests with the name of their image.
    pub fn failure_report(&self) -> FailureReport {
        let described = self.described.clone();
        FailureReport::new(move |failed| {
            let of = described
                .iter()
                .find(|described| described.export == failed.export);
            let image = of.map_or("", |described| described.image.as_str());
            let export = match described.len() {
                1 => String::new(),
                _ => format!("export {:?}: ", failed.export),
            };
            log::log(Severity::Error, &format!("{image}: {export}{failed}"));
        })
    }

    /// Opens a device and adds an export of it.
    pub fn add(
        &mut self,
        image_name: &Name,
        name: String,
        description: String,
        opening: &DeviceOptions<'_>,
    ) -> Result<(), CommandError> {
        let options = OpenOptions {
            cache: opening.cache.clone(),
            ..OpenOptions::default()
        };
        let mut image = || -> Result<_, CommandError> {
            let opened = OpenImage::open_with(image_name, &[], opening.stores, &options, None)?;
            let image = opened.image().clone();
            self.images.push(opened);
            Ok(image)
        };
        let device = match opening.access {
            Access::AsFile if is_writable_disk(image_name) => {
                let opened = open_writable(image_name, opening.stores, &options, opening.command)?;
                let disk = LiveDisk::new(opened.disk, opened.file, opened.height);
                let disk = Arc::new(disk);
                self.disks
                    .push((image_name.shown().to_owned(), disk.clone()));
                Device::Writable(disk)
            }
            Access::AsFile | Access::ReadOnly => Device::ReadOnly(image()?),
            Access::Snapshot => {
                let disk = snapshot(image()?, image_name.shown(), &options)?;
                Device::Writable(Arc::new(disk))
            }
        };
        self.described.push(Described {
            image: image_name.absolute().to_string_lossy().into_owned(),
            export: name.clone(),
            mode: match (&device, opening.access) {
                (Device::ReadOnly(_), _) => "ro",
                (Device::Writable(_), Access::Snapshot) => "snapshot",
                (Device::Writable(_), _) => "rw",
            },
        });
        self.exports.push(Export {
            name,
            description,
            device,
        });
        Ok(())
    }

    /// Closes the disks. The devices must not be in use any more.
    pub fn close(self) -> Result<(), CommandError> {
        drop(self.exports);
        let mut result = Ok(());
        for (path, disk) in self.disks {
            let closed = match Arc::try_unwrap(disk) {
                Ok(disk) => disk.close(),
                // Another reference exists, so the disk is only checkpointed.
                Err(disk) => disk.with(bcow::Disk::checkpoint),
            };
            let closed = closed.context(|| format!("cannot close {}", path.display()));
            result = result.and(closed);
        }
        result
    }
}

/// The error of a failed [`snapshot`].
fn no_snapshot(path: &Path, error: &(dyn Error + 'static)) -> CommandError {
    let failure = CommandError::new(format!(
        "cannot make an overlay for {} in {}",
        path.display(),
        std::env::temp_dir().display()
    ));
    let failure = failure.caused_by(error);
    // An error of the disk below would be one in its backing.
    let is_of_file = matches!(error.downcast_ref(), Some(bcow::Error::Io { .. }));
    if is_of_file || error.is::<std::io::Error>() {
        failure.hint("TMPDIR names another directory for it")
    } else {
        failure
    }
}

/// A disk over `below`, the image at `path`, in a file without a name, which vanishes with the
/// process.
fn snapshot(
    below: Arc<dyn BlockDevice>,
    path: &Path,
    options: &OpenOptions,
) -> Result<Disk, CommandError> {
    let file = tempfile::tempfile().map_err(|error| no_snapshot(path, &error))?;
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
    .map_err(|error| no_snapshot(path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_about_the_directory_comes_with_errors_of_the_file_only() {
        let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
        let written = bcow::Error::Io {
            action: "write",
            offset: 0,
            source: full(),
        };
        let other = bcow::Error::Unsupported("x".into());
        let has_hint = |error: &(dyn Error + 'static)| {
            let error = no_snapshot(Path::new("a.bcow"), error);
            error.hint_text().is_some()
        };
        assert!(has_hint(&full()));
        assert!(has_hint(&written));
        assert!(!has_hint(&other));
    }
}
