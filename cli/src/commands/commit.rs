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

/// Copied at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Put the changes of a disk or of a container's mount into a new layer
///
/// With --upper, IMG is the image of a writable mount, and what the mount changed becomes a layer.
/// NEW is one of
///
///     FILE.bcow        a layer in overlayfs's form; of a file that changed in part, only the blocks
///                      that changed are stored, the rest is shown of IMG
///     tar:FILE         a layer as OCI images have them; tar:- is standard output
///     oci:DIR[:REF]    an ordinary OCI image: the layers of IMG and the new one
///     oci-archive:FILE[:REF]
///                      the same in a tar archive
///
/// With --merge, FILE.bcow is an image of all that the mount showed, which needs IMG as the layer
/// does; with --flatten, one that needs no other file. Whoever needs IMG finds it by its digest, in
/// an OCI layout or under --store. The upper and IMG stay as they are; nobody may be writing to the
/// upper.
///
/// Of a disk: with NEW, a sealed disk of that name is made over the same backing, with nothing but
/// what the disk has. The disk stays as it is.
///
/// Without NEW, what the disk has is written into its backing, which has to be a disk that can be
/// written; the disk is empty afterwards. If that is interrupted, the disk shows what it showed, and
/// the command can be given again. Other disks over the same backing show it as it was before, and
/// will not open any more.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The disk; with --upper, the image
    #[arg(value_name = "DISK|IMG", value_hint = clap::ValueHint::FilePath)]
    disk: PathBuf,
    /// The layer to make
    #[arg(value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    new: Option<PathBuf>,
    /// Commit the changes in this upper of a writable mount of IMG
    #[arg(long, value_name = "UPPER", value_hint = clap::ValueHint::DirPath)]
    upper: Option<PathBuf>,
    /// Write an image of IMG and the changes together, with IMG below it
    #[arg(long, requires = "upper")]
    merge: bool,
    /// Write an image of IMG and the changes together that needs no other file
    #[arg(long, requires = "upper", conflicts_with = "merge")]
    flatten: bool,
    /// How to compress the layers of an OCI image: gzip[:LEVEL], zstd[:LEVEL] or none [default: gzip:6]
    #[arg(long, value_name = "HOW", requires = "upper")]
    layer_compress: Option<LayerCompression>,
    #[command(flatten, next_help_heading = "How NEW is written")]
    how: How,
    #[command(flatten, next_help_heading = "Files")]
    layers: LayerArgs,
    #[command(flatten, next_help_heading = "Files")]
    stores: StoreArgs,
}

/// How much a new image has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// The changes.
    Layer,
    /// All that is shown, with the image below it.
    Merged,
    /// All that is shown.
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

/// Gives one device, whatever is asked for.
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
    // Found and compared as for reading first: what is wrong with it is told before it is written to.
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

/// The disk's file once more, to be read only. The lock stays with who has it.
fn own_storage(path: &Path) -> Result<Arc<std::fs::File>, CommandError> {
    std::fs::File::open(path)
        .map(Arc::new)
        .context(|| format!("cannot open {}", path.display()))
}

/// Writes what `own` has itself into `backing`. Gives the bytes.
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
