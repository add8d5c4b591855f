//! Uppers of the kernel driver that are open for writing: their disk is over the view of an image.

use std::path::Path;
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName, hex, is_plain_name};
use bcow::operation::LiveDisk;
use bcow::{CreateOptions, Disk, OpenOptions};
use bcow_fuse::kernel::DiskFiles;
use bcow_images::error::CommandError;
use bcow_images::image::OpenImage;
use bcow_images::kernel_upper::{cannot_open_disk, views};
use bcow_images::upper::cannot_use;
use bcow_images::views::{UserViews, cannot_view};
use bcow_mount::filesystem::{self, Kind};
use bcow_union::{DiskInstance, FileSystem, ImageName, UpperError};
use bcow_view::{CachedView, Instance};

use crate::disk_ledger::{LedgerUse, OpenLedger};

/// What the user asks of the file system of an upper.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// Its size in bytes. The disk of an existing upper grows to it.
    pub size: Option<u64>,
    /// Whether it is to be mounted read-only.
    pub read_only: bool,
}

/// An upper that is open for writing.
pub struct WritableUpper {
    pub disk: LiveDisk,
    /// The size in bytes to which the file system is to grow, when it is mounted.
    pub grows_to: Option<u64>,
    /// What the next process of a pool needs to continue with the disk.
    pub files: Option<DiskFiles>,
    /// Holds the lock of the upper. Dropped after the disk.
    pub instance: DiskInstance,
}

/// Opens the upper at `path` for writing, or begins one for `image`. `open` repeats the opening
/// until no other mount uses the upper.
pub fn open_or_begin(
    image: &OpenImage,
    path: &Path,
    asked: Asked,
    note: &str,
    options: &OpenOptions,
    ledger_use: LedgerUse<'_>,
    open: impl FnOnce(
        &mut dyn FnMut() -> Result<DiskInstance, UpperError>,
    ) -> Result<DiskInstance, UpperError>,
) -> Result<WritableUpper, CommandError> {
    let name = image.path().to_string_lossy();
    let named = ImageName {
        identity: image.identity(),
        name: &name,
    };
    let size_of_new = asked.size.unwrap_or(bcow_view::DEFAULT_BYTES);
    if let Ok(None) = bcow_union::driver_of(path) {
        // An image without a view begins no upper.
        view_of(image, size_of_new, options)?;
    }
    let kept = ledger_use.kept_file()?;
    let opened = open(&mut || match &kept {
        Some(disk) => DiskInstance::open_again(path, named, note, disk, ledger_use.kept_upper()),
        None => DiskInstance::open(path, named, note),
    });
    let mut instance = opened.map_err(|error| cannot_use(&error))?;
    let views = views(image, options)?;
    if instance.disk().is_none() {
        make_disk(&mut instance, image, size_of_new, note, options)?;
    }
    // Made or checked above.
    let Some(storage) = instance.disk() else {
        return Err(cannot_use(&UpperError::Incomplete(path.to_owned())));
    };
    let ledger = ledger_use.of_disk(instance.continues()).open()?;
    let noted = ledger.as_ref().map(OpenLedger::ledger);
    let disk = Instance {
        storage,
        path: &instance.disk_path(),
        image,
        cache: &views,
        options,
    };
    let (disk, height) = disk
        .open(noted)
        .map_err(|error| cannot_open_disk(path, &error))?;
    let files = match (ledger, instance.disk_file()) {
        (Some(ledger), Some(file)) => Some(ledger.files(file)?),
        _ => None,
    };
    let grows_to = grow(&disk, asked, path)?;
    let size = disk.header().size;
    // A disk can also grow while it is mounted.
    if instance.record().is_none_or(|record| record.size != size) {
        let completed = instance.complete(FileSystem::Ext4, size, named);
        completed.map_err(|error| cannot_use(&error))?;
    }
    let Some(file) = instance.take_disk() else {
        return Err(cannot_use(&UpperError::Incomplete(path.to_owned())));
    };
    Ok(WritableUpper {
        disk: LiveDisk::new(disk, file, height),
        grows_to,
        files,
        instance,
    })
}

/// Grows the disk of an upper to the size that the user asks for. Returns the size if the file
/// system on it is smaller.
fn grow(disk: &Disk, asked: Asked, upper: &Path) -> Result<Option<u64>, CommandError> {
    /// Bytes of a group of the ext4. The kernel leaves out a last group that would be too short.
    const GROUP_BYTES: u64 = 128 << 20;
    let old = disk.header().size;
    let size = asked.size.unwrap_or(old);
    let cannot = || {
        let shown = upper.display();
        CommandError::new(format!("cannot grow the upper {shown} to {size} bytes"))
    };
    if size < old {
        return Err(CommandError::usage(format!(
            "the upper {} has a file system of {old} bytes, which cannot shrink to {size}",
            upper.display()
        ))
        .hint("leave out --size, or give a larger one"));
    }
    if asked.read_only {
        return if size == old {
            Ok(None)
        } else {
            Err(cannot().caused_by_text("it is to be mounted read-only"))
        };
    }
    if size > disk.largest_size() {
        return Err(cannot().caused_by_text(format!(
            "its disk can have at most {} bytes: its regions were chosen for a smaller one",
            disk.largest_size()
        )));
    }
    let head = bcow_fuse::kernel::head(disk).map_err(|error| cannot().caused_by(&error))?;
    let is_whole = filesystem::ext4_bytes(&head).saturating_add(GROUP_BYTES) > size;
    if asked.size.is_none() || size == old && is_whole {
        return Ok(None);
    }
    bcow_mount::may_grow(Kind::Ext4)
        .map_err(|error| cannot().caused_by(&error).hint_if(error.hint()))?;
    disk.resize(size)
        .map_err(|error| cannot().caused_by(&error))?;
    Ok(Some(size))
}

fn make_disk(
    instance: &mut DiskInstance,
    image: &OpenImage,
    size: u64,
    note: &str,
    options: &OpenOptions,
) -> Result<(), CommandError> {
    let view = view_of(image, size, options)?;
    let new = instance.new_disk().map_err(|error| cannot_use(&error))?;
    let cannot = |error: &(dyn std::error::Error + 'static)| {
        let disk = instance.disk_path();
        CommandError::new(format!("cannot create {}", disk.display())).caused_by(error)
    };
    let file = new.file().try_clone().map_err(|error| cannot(&error))?;
    let create = CreateOptions::disk(size);
    bcow_view::create_instance(Arc::new(file), &view, entry_of(image), &create, options)
        .map_err(|error| cannot(&error))?
        .close()
        .map_err(|error| cannot(&error))?;
    let completed = instance.complete_disk(new, note);
    completed.map_err(|error| cannot_use(&error))
}

fn view_of(
    image: &OpenImage,
    bytes: u64,
    options: &OpenOptions,
) -> Result<CachedView, CommandError> {
    let view = UserViews::new(options).view(image, bytes);
    view.map_err(|error| cannot_view(image.path(), &error))
}

/// The entry by which other commands find the image of the disk: with `--backing-dir` for the
/// directory of the image, or with `--backing-url` for a remote image.
fn entry_of(image: &OpenImage) -> BackingEntry {
    let identity = image.identity();
    let header = image.image().header();
    // The root hash of one image; several have no URL together.
    let root = header.merkle.as_ref().map(|tree| tree.root);
    let root = root.filter(|root| *root == identity);
    if let (Some(url), Some(merkle_root)) = (image.lasting_url(), root) {
        return BackingEntry {
            name: BackingName::Url {
                url: url.to_owned(),
                merkle_root,
            },
            size: header.size,
        };
    }
    let file = image
        .opened()
        .path
        .file_name()
        .and_then(|name| name.to_str());
    let name = match file.filter(|name| is_plain_name(name)) {
        Some(name) => name.to_owned(),
        None => format!("{}.bcow", hex(&identity)),
    };
    BackingEntry {
        name: BackingName::FileName {
            name,
            identity: Some(identity),
        },
        size: header.size,
    }
}
