//! `bcow commit`

mod upper;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName};
use bcow::{
    BackingResolver, BlockDevice, Disk, Error, Image, Keep, Mapping, NoBackings, OpenOptions,
    Space, WritableDevice,
};

use bcow_oci::export::LayerCompression;

use super::seal::{How, seal_into};
use crate::disks::{Below, lock_disk, open_locked};
use crate::error::{CommandError, Context};
use crate::image::{LayerArgs, StoreArgs, cannot_open_file};
use crate::interrupt::Interrupt;
use crate::place::{self, Destination};
use crate::rewrite::backing_of;
use crate::size::Human;
use crate::ui::{Progress, Ui};

/// Bytes per copy step.
const PIECE_BYTES: u64 = 1 << 20;

/// Commit changes of a disk or a writable mount to a new layer or the backing
///
/// With --upper, IMG is the image of a writable mount, and the command writes the changes in the
/// mount's upper to NEW. NEW is one of
///
///     FILE.bcow        a layer in overlayfs format. Of a partly changed file, the layer stores
///                      only the changed blocks; the other blocks are read from IMG
///     tar:FILE         a layer archive in OCI format; tar:- is standard output
///     oci:DIR[:REF]    an ordinary OCI image: the layers of IMG and the new layer
///     oci-archive:FILE[:REF]
///                      the same in a tar archive
///
/// With --merge, FILE.bcow is a complete image of what the mount showed; unchanged data is still
/// read from IMG. With --flatten, FILE.bcow is a complete image that needs no other file. For a
/// layer or image that needs IMG, bcow looks for the file name of IMG in the directory of the new
/// file, and for its file name or digest under --store. The command changes neither the upper nor
/// IMG. No process may write to the upper during the command.
///
/// Without --upper, the command commits a disk. With NEW, it writes a sealed disk over the same
/// backing that has only the disk's own data. The disk does not change.
///
/// Without NEW, the command writes the disk's own data into its backing, which must be a writable
/// disk. The disk is empty afterwards. If the command is interrupted, the content of the disk is
/// unchanged, and you can run the command again. Other disks over the same backing do not open any
/// more, because their backing has changed.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The disk; with --upper, the image
    #[arg(value_name = "DISK|IMG", value_hint = clap::ValueHint::FilePath)]
    disk: PathBuf,
    /// The layer, image or sealed disk to write; FILE.bcow, or with --upper also tar:FILE,
    /// oci:DIR[:REF] or oci-archive:FILE[:REF]
    #[arg(value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    new: Option<PathBuf>,
    /// Commit the changes in this upper of a writable mount of IMG
    #[arg(long, value_name = "UPPER", value_hint = clap::ValueHint::DirPath)]
    upper: Option<PathBuf>,
    /// Write an image of IMG and the changes that reads unchanged data from IMG
    #[arg(long, requires = "upper")]
    merge: bool,
    /// Write an image of IMG and the changes that needs no other file
    #[arg(long, requires = "upper", conflicts_with = "merge")]
    flatten: bool,
    /// Compression of the layers of an OCI image: gzip[:LEVEL], zstd[:LEVEL] or none [default:
    /// gzip:6]
    #[arg(long, value_name = "HOW", requires = "upper")]
    layer_compress: Option<LayerCompression>,
    #[command(flatten, next_help_heading = "Options for NEW")]
    how: How,
    #[command(flatten, next_help_heading = "Files")]
    layers: LayerArgs,
    #[command(flatten, next_help_heading = "Files")]
    stores: StoreArgs,
}

/// The content of a new image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// The changes.
    Layer,
    /// The whole visible content, with the image below it.
    Merged,
    /// The whole visible content.
    Whole,
}

impl Args {
    fn extent(&self) -> Extent {
        match (self.merge, self.flatten) {
            (true, _) => Extent::Merged,
            (_, true) => Extent::Whole,
            _ => Extent::Layer,
        }
    }
}

/// Returns the same device for every request.
pub struct Given(pub Arc<dyn BlockDevice>);

impl BackingResolver for Given {
    fn resolve(&self, _: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        Ok(Some(self.0.clone()))
    }
}

/// Commits.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    if let Some(upper) = &args.upper {
        return upper::run(args, upper, ui);
    }
    if !args.layers.layers.is_empty() {
        return Err(CommandError::usage("a disk has no layers")
            .hint("--layer is for an image, with --upper"));
    }
    match &args.new {
        Some(new) => match Destination::parse(new.as_os_str())? {
            Destination::File(new) => {
                seal_into(&args.disk, &new, Keep::Own, &args.how, &args.stores, ui)
            }
            _ => Err(place::refuse(&new.to_string_lossy(), "commit")
                .hint("the layer of a disk is a BCoW file")),
        },
        None => into_backing(args, ui),
    }
}

fn into_backing(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let name = &args.disk;
    let cannot = || format!("cannot commit {}", name.display());
    let options = OpenOptions::default();
    let (file, path, _lock) = lock_disk(name, "commit")?;
    let before = Image::open_with_backings(file.clone(), &options, &NoBackings)
        .map_err(|error| cannot_open_file(name, name, &error))?;
    let Some(entry) = backing_of(&before) else {
        return Err(CommandError::new(cannot()).caused_by_text("it has no backing"));
    };
    let BackingName::FileName { identity, .. } = &entry.name else {
        return Err(CommandError::new(cannot())
            .caused_by_text("its backing is named by digest, and never changes")
            .hint("`bcow commit DISK NEW` makes a layer on top of it"));
    };
    // The backing is found and compared as for reading first, so that an error of the backing comes
    // before any write.
    let below = Below::new(&args.stores, &options)?;
    let found = {
        let opener = below.opener(&path);
        opener
            .open(&entry)
            .map_err(|problem| CommandError::new(cannot()).caused_by(&*problem))?;
        opener.files().into_iter().next().and_then(|file| file.path)
    };
    let backing_path = found
        .ok_or_else(|| CommandError::new(cannot()).caused_by_text("its backing is not there"))?;
    let (backing_file, backing_path, _backing_lock) =
        lock_disk(&backing_path, "commit").map_err(|error| {
            error.hint(format!(
                "`bcow commit {} NEW.bcow` makes a layer on top of the backing instead",
                name.display()
            ))
        })?;
    let is_same = Image::open_with_backings(backing_file.clone(), &options, &NoBackings)
        .map_err(|error| cannot_open_file(&backing_path, &backing_path, &error))?
        .identity_hash();
    if identity.is_some_and(|identity| identity != is_same) {
        return Err(CommandError::new(cannot())
            .caused_by_text("its backing changed while it was looked at"));
    }
    let backing = open_locked(
        &backing_path,
        &backing_path,
        &backing_file,
        &below,
        &options,
    )?;
    let backing = Arc::new(backing);
    let device: Arc<dyn BlockDevice> = backing.clone();
    let disk = Disk::open(file, &options, &Given(device.clone()))
        .map_err(|error| cannot_open_file(name, name, &error))?;
    let copied = {
        let interrupt = Interrupt::catch();
        let progress = ui.progress();
        progress.phase("committing");
        progress.total(Some(disk.size()));
        // From here on the backing is not what the disk says, until the disk says otherwise.
        let renamed = |identity: Option<[u8; 32]>, size: u64| BackingEntry {
            name: BackingName::FileName {
                name: entry.name.to_string(),
                identity,
            },
            size,
        };
        disk.set_backing(Some((renamed(None, backing.size()), device.clone())))
            .context(cannot)?;
        if disk.size() > backing.size() {
            backing.resize(disk.size()).context(cannot)?;
            disk.set_backing(Some((renamed(None, backing.size()), device.clone())))
                .context(cannot)?;
        }
        // Opened anew: what was changed until now may have moved things in the file.
        let own = Image::open_with_backings(own_storage(&path)?, &options, &NoBackings)
            .context(cannot)?;
        let copied = copy(&own, &backing, &interrupt, &progress, &cannot)?;
        progress.phase("syncing");
        backing
            .flush()
            .and_then(|()| backing.checkpoint())
            .context(cannot)?;
        let identity = Image::open_with_backings(backing_file.clone(), &options, &NoBackings)
            .context(cannot)?
            .identity_hash();
        disk.set_backing(Some((renamed(Some(identity), backing.size()), device)))
            .and_then(|()| disk.clear())
            .and_then(|()| disk.close())
            .context(cannot)?;
        copied
    };
    if let Some(backing) = Arc::into_inner(backing) {
        backing.close().context(cannot)?;
    }
    ui.status(format_args!(
        "{}: {} committed into {}",
        name.display(),
        Human(copied),
        backing_path.display()
    ));
    Ok(())
}

/// A second descriptor of the disk's file, for reading. The first descriptor keeps the lock.
fn own_storage(path: &Path) -> Result<Arc<std::fs::File>, CommandError> {
    std::fs::File::open(path)
        .map(Arc::new)
        .context(|| format!("cannot open {}", path.display()))
}

/// Writes the own data of `own` into `backing`. Returns the number of bytes.
fn copy(
    own: &Image,
    backing: &Disk,
    interrupt: &Interrupt,
    progress: &Progress<'_>,
    cannot: &dyn Fn() -> String,
) -> Result<u64, CommandError> {
    let mut buffer = Vec::new();
    let mut copied = 0;
    for extent in own.extents() {
        let extent = extent.context(cannot)?;
        match extent.mapping {
            Mapping::Backing { .. } | Mapping::Hole => {}
            Mapping::Zero => {
                backing
                    .write_zeroes(extent.offset, extent.length, Space::Free)
                    .context(cannot)?;
                copied += extent.length;
            }
            Mapping::Raw { .. } | Mapping::Compressed { .. } | Mapping::Open { .. } => {
                let mut done = 0;
                while done < extent.length {
                    let n = PIECE_BYTES.min(extent.length - done);
                    buffer.resize(n as usize, 0);
                    own.read_at(extent.offset + done, &mut buffer)
                        .and_then(|()| backing.write_at(extent.offset + done, &buffer))
                        .context(cannot)?;
                    done += n;
                }
                copied += extent.length;
            }
        }
        interrupt.check()?;
        progress.advance(extent.length);
    }
    Ok(copied)
}
