//! `bcow rebase`

use std::path::PathBuf;
use std::sync::Arc;

use bcow::format::{BackingEntry, SECTOR_BYTES};
use bcow::{
    BlockDevice, Content, Disk, Error, Image, NoBackings, OpenOptions, Space, Status,
    WritableDevice,
};

use super::commit::Given;
use super::create::backing;
use crate::disks::{Below, lock_disk, open_locked};
use crate::error::{CommandError, Context};
use crate::image::{StoreArgs, cannot_open_file};
use crate::interrupt::Interrupt;
use crate::rewrite::backing_of;
use crate::size::Human;
use crate::ui::Ui;

/// Bytes per comparison step.
const PIECE_BYTES: u64 = 1 << 20;

/// Change the backing of a disk
///
/// The content of the disk does not change. The command compares the old and the new backing where
/// the disk reads from its backing, and writes the differences into the disk before it changes the
/// backing. With --unsafe, it only records the new backing, without a comparison: for a backing
/// that was moved, renamed or changed on purpose. The old backing need not exist then.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    disk: PathBuf,
    /// The new backing: a BCoW file, or an image as oci:DIR[:REF]
    #[arg(short, long, value_name = "NEW", required_unless_present = "no_backing", value_hint = clap::ValueHint::FilePath)]
    backing: Option<PathBuf>,
    /// Remove the backing, after copying its visible data into the disk
    #[arg(long, conflicts_with = "backing")]
    no_backing: bool,
    /// Record the new backing by the digest of its file instead of its name
    #[arg(long, requires = "backing")]
    by_digest: bool,
    /// Change only the recorded backing, without a comparison; the disk then shows the data of the
    /// new backing
    #[arg(long = "unsafe")]
    reference_only: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// A device that is never read.
struct Unread(u64);

impl BlockDevice for Unread {
    fn size(&self) -> u64 {
        self.0
    }
    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), Error> {
        Err(Error::Unsupported("the old backing is not read".into()))
    }
}

/// Rebases.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let name = &args.disk;
    let cannot = || format!("cannot rebase {}", name.display());
    let options = OpenOptions::default();
    // Locked first, so that a backing that needs this disk shows as one in use.
    let (file, path, _lock) = lock_disk(name, "rebase")?;
    let new = match &args.backing {
        Some(new) => Some(backing(new, args.by_digest, &path, &args.stores, &options)?),
        None => None,
    };
    let below = Below::new(&args.stores, &options)?;
    let disk = match args.reference_only {
        true => {
            let own = Image::open_with_backings(file.clone(), &options, &NoBackings)
                .map_err(|error| cannot_open_file(name, name, &error))?;
            let size = backing_of(&own).map_or(0, |entry| entry.size);
            Disk::open(file.clone(), &options, &Given(Arc::new(Unread(size))))
                .map_err(|error| cannot_open_file(name, name, &error))?
        }
        false => open_locked(name, &path, &file, &below, &options)?,
    };
    let mut written = 0;
    if !args.reference_only {
        let interrupt = Interrupt::catch();
        let progress = ui.progress();
        progress.phase("comparing");
        progress.total(Some(disk.size()));
        let shown = new.as_ref().map(|(_, device)| &**device);
        written = keep_differences(&disk, shown, &mut |bytes| {
            progress.advance(bytes);
            interrupt.check()
        })?
        .context(cannot)?;
        disk.flush().context(cannot)?;
    }
    let over = new
        .as_ref()
        .map_or("no backing".to_owned(), |(entry, _)| entry.name.to_string());
    replace(disk, new).context(cannot)?;
    let kept = match written {
        0 => String::new(),
        bytes => format!(", {} written into the disk", Human(bytes)),
    };
    ui.status(format_args!("{}: over {over}{kept}", name.display()));
    Ok(())
}

fn replace(disk: Disk, new: Option<(BackingEntry, Arc<dyn BlockDevice>)>) -> Result<(), Error> {
    disk.set_backing(new)?;
    disk.close()
}

/// Writes data of the old backing that differs in the new one into the disk. Returns the number of
/// bytes.
///
/// The outer error is that of `step`.
fn keep_differences(
    disk: &Disk,
    new: Option<&dyn BlockDevice>,
    step: &mut dyn FnMut(u64) -> Result<(), CommandError>,
) -> Result<Result<u64, Error>, CommandError> {
    let mut written = 0;
    let mut at = 0;
    while at < disk.size() {
        let length = PIECE_BYTES.min(disk.size() - at);
        match keep_piece(disk, new, at, length) {
            Ok((done, kept)) => {
                at += done;
                written += kept;
                step(done)?;
            }
            Err(error) => return Ok(Err(error)),
        }
    }
    Ok(Ok(written))
}

/// One piece of at most `length` bytes: how many were done, and how many of these written.
fn keep_piece(
    disk: &Disk,
    new: Option<&dyn BlockDevice>,
    at: u64,
    length: u64,
) -> Result<(u64, u64), Error> {
    let old = disk.status(at, length)?;
    let length = old.length.clamp(1, length);
    if old.depth == 1 {
        return Ok((length, 0));
    }
    let there = status_of(new, at, length)?;
    let length = there.length.clamp(1, length);
    if old.content != Content::Data && there.content != Content::Data {
        return Ok((length, 0));
    }
    let mut shown = vec![0; length as usize];
    disk.read_at(at, &mut shown)?;
    let mut other = vec![0; length as usize];
    if let Some(new) = new {
        let bytes = new.size().saturating_sub(at).min(length);
        new.read_at(at, &mut other[..bytes as usize])?;
    }
    let mut written = 0;
    let sectors = shown
        .chunks(SECTOR_BYTES as usize)
        .zip(other.chunks(SECTOR_BYTES as usize));
    for (offset, (shown, other)) in (at..).step_by(SECTOR_BYTES as usize).zip(sectors) {
        if shown == other {
            continue;
        }
        match shown.iter().all(|&byte| byte == 0) {
            true => disk.write_zeroes(offset, shown.len() as u64, Space::Free)?,
            false => disk.write_at(offset, shown)?,
        }
        written += shown.len() as u64;
    }
    Ok((length, written))
}

/// What is known of the new backing, or of what is behind its end.
fn status_of(new: Option<&dyn BlockDevice>, at: u64, length: u64) -> Result<Status, Error> {
    match new {
        Some(new) if at < new.size() => new.status(at, length.min(new.size() - at)),
        _ => Ok(Status {
            length,
            content: Content::Hole,
            depth: 0,
        }),
    }
}
