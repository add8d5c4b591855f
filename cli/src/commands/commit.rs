//! `bcow commit`

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName};
use bcow::{
    BackingResolver, BlockDevice, Disk, Error, Image, Keep, Mapping, NoBackings, OpenOptions,
    Space, WritableDevice,
};

use super::seal::{How, seal_into};
use crate::disks::{Below, lock_disk, open_locked};
use crate::error::{CommandError, Context};
use crate::image::{StoreArgs, cannot_open_file};
use crate::interrupt::Interrupt;
use crate::rewrite::backing_of;
use crate::size::Human;
use crate::ui::{Progress, Ui};

/// Copied at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Put a disk's changes into its backing, or into a new layer
///
/// Without NEW, what the disk has is written into its backing, which has to be a disk that can be written; the disk is
/// empty afterwards. If that is interrupted, the disk shows what it showed, and the command can be given again. Other
/// disks over the same backing show it as it was before, and will not open any more.
///
/// With NEW, a sealed disk of that name is made over the same backing, with nothing but what the disk has. The disk
/// stays as it is.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk
    #[arg(value_name = "DISK", value_hint = clap::ValueHint::FilePath)]
    disk: PathBuf,
    /// The layer to make
    #[arg(value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    new: Option<PathBuf>,
    #[command(flatten, next_help_heading = "How NEW is written")]
    how: How,
    #[command(flatten, next_help_heading = "Files")]
    stores: StoreArgs,
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
    match &args.new {
        Some(new) => seal_into(&args.disk, new, Keep::Own, &args.how, &args.stores, ui),
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
