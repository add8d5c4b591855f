//! `bcow resize`

use bcow::{BlockDevice, OpenOptions};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_mounts::grow;

use crate::disks::open_writable;
use crate::error::{CommandError, Context};
use crate::image::StoreArgs;
use crate::size::{self, Human, disk_size, plural};
use crate::ui::Ui;

/// Change the size of a disk
///
/// The added part reads as zeros, even where the backing has data. The removed part is lost, so
/// shrinking needs --shrink.
///
/// A disk or an upper that is mounted with the kernel driver (see `bcow help mount`) grows together
/// with the file system on it, for root only. It cannot shrink.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk; or its mount with the kernel driver, or the upper of such a mount
    #[arg(value_name = "DISK", value_hint = clap::ValueHint::AnyPath)]
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Name,
    /// The new size; with + or - before it, the change of the size
    #[arg(value_name = "[+|-]SIZE", allow_hyphen_values = true, value_parser = parse_change)]
    size: Change,
    /// Allow the disk to shrink; data after its new end is lost
    #[arg(long)]
    shrink: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

#[derive(Debug, Clone, Copy)]
enum Change {
    To(u64),
    Grow(u64),
    Shrink(u64),
}

fn parse_change(text: &str) -> Result<Change, String> {
    match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(by), _) => size::parse(by).map(Change::Grow),
        (_, Some(by)) => size::parse(by).map(Change::Shrink),
        _ => size::parse(text).map(Change::To),
    }
}

impl Args {
    /// The new size of a disk of `old` bytes.
    fn new_size(&self, old: u64) -> Result<u64, CommandError> {
        let new = match self.size {
            Change::To(size) => Some(size),
            Change::Grow(by) => old.checked_add(by),
            Change::Shrink(by) => old.checked_sub(by),
        };
        let new = new.ok_or_else(|| {
            CommandError::usage(format!(
                "{} has {}; the new size is impossible",
                self.disk.display(),
                plural(old, "byte")
            ))
        })?;
        disk_size(new)
    }
}

/// Resizes.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let shown = args.disk.display();
    if let Some(mount) = grow::find(args.disk.shown())? {
        let grown = grow::grow(&shown.to_string(), &mount, |old| args.new_size(old))?;
        ui.status(format_args!(
            "{shown}: disk of {} ({}), with its {}",
            Human(grown.bytes),
            plural(grown.bytes, "byte"),
            grown.file_system
        ));
        return Ok(());
    }
    let opened = open_writable(&args.disk, &args.stores, &OpenOptions::default(), "resize")?;
    let disk = opened.disk;
    let old = disk.size();
    let new = args.new_size(old)?;
    if new < old && !args.shrink {
        return Err(CommandError::new(format!(
            "{shown} would lose the data in its last {}",
            plural(old - new, "byte")
        ))
        .hint("--shrink discards that data"));
    }
    disk.resize(new)
        .and_then(|()| disk.close())
        .context(|| format!("cannot resize {shown}"))?;
    ui.status(format_args!(
        "{shown}: disk of {} ({})",
        Human(new),
        plural(new, "byte")
    ));
    Ok(())
}
