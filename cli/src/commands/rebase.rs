//! `bcow rebase`

use std::path::Path;
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName};
use bcow::operation::{rebase, rebase_reference};
use bcow::{BlockDevice, Image, OpenOptions};
use bcow_convert::operation_failure;
use bcow_images::Name;
use bcow_images::backing::backing;

use crate::disks::{Below, lock_disk};
use crate::error::CommandError;
use crate::image::{StoreArgs, cannot_open_file};
use crate::size::Human;
use crate::ui::Ui;
use crate::views::{UserViews, cannot_view};
use bcow_images::args::{IMAGE, NameParser};

/// Change the backing of a disk
///
/// Without --unsafe, the content of the disk does not change. The command compares the old and the
/// new backing where the disk reads from its backing, and writes the differences into the disk
/// before it records the new backing. With --unsafe, the command only records the new backing. That
/// is for a backing that was moved, renamed or changed on purpose; the old one need not exist.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Name,
    /// The new backing: a BCoW file, oci:DIR[:REF], or a remote image, such as
    /// docker://HOST/REPO[:TAG] or https://HOST/PATH
    #[arg(
        short,
        long,
        value_name = "NEW",
        required_unless_present = "no_backing",
        value_hint = clap::ValueHint::FilePath
    )]
    #[arg(value_parser = NameParser(IMAGE))]
    backing: Option<Name>,
    /// Remove the backing, after copying its visible data into the disk
    #[arg(long, conflicts_with = "backing")]
    no_backing: bool,
    /// Record the backing by the digest of its file instead of its name. The backing must be sealed
    /// and on this machine; commands then look for it in the directories of --store
    #[arg(long, requires = "backing")]
    by_digest: bool,
    /// Change only the recorded backing, without a comparison; the disk then shows the data of the
    /// new backing
    #[arg(long = "unsafe", short_alias = 'u')]
    reference_only: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Rebases.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let name = &args.disk;
    let options = OpenOptions::default();
    // Locked first, so that a backing that needs this disk shows as one in use.
    let file = lock_disk(name, "rebase")?;
    let open = |name| backing(name, args.by_digest, file.path(), &args.stores, &options);
    let new = args.backing.as_ref().map(open).transpose()?;
    let recorded = Image::open_storage(file.storage(), &options)
        .map_err(|error| cannot_open_file(name.shown(), name.shown(), &error))?;
    let (new, is_same_view) = match (recorded.disk_backing(), new) {
        (Some(old), Some((entry, image))) => match over_view(old, &entry, &image, &options)? {
            Some(view) => (Some(view), true),
            None => (Some((entry, image as Arc<dyn BlockDevice>)), false),
        },
        (_, new) => (new.map(|(entry, image)| (entry, image as _)), false),
    };
    drop(recorded);
    let over = new
        .as_ref()
        .map_or("no backing".to_owned(), |(entry, _)| entry.name.to_string());
    // Nothing changes in the content of the same view, so there is nothing to compare.
    let written = if args.reference_only || is_same_view {
        rebase_reference(file.storage(), new, &options)
            .map_err(|error| cannot_open_file(name.shown(), name.shown(), &error))?;
        0
    } else {
        let below = Below::new(&args.stores, &options)?;
        let (disk, _) = below.open_disk(name.shown(), &file, None)?;
        let cannot = || format!("cannot rebase {}", name.display());
        ui.work(|work| {
            rebase(disk, new, work).map_err(|error| operation_failure(&error, cannot, cannot))
        })?
    };
    let kept = match written {
        0 => String::new(),
        bytes => format!(", {} written into the disk", Human(bytes)),
    };
    ui.status(format_args!("{}: over {over}{kept}", name.display()));
    Ok(())
}

/// The entry and the content of a backing.
type Backing = (BackingEntry, Arc<dyn BlockDevice>);

/// The same view over another file of its image, which `entry` names, for a disk over a view. Only
/// the name may change: the disk has blocks of a file system, which belong to that view.
fn over_view(
    old: &BackingEntry,
    entry: &BackingEntry,
    image: &Arc<Image>,
    options: &OpenOptions,
) -> Result<Option<Backing>, CommandError> {
    let BackingName::View { .. } = old.name else {
        return Ok(None);
    };
    let shown = entry.name.to_string();
    let view = UserViews::new(options).view(image, old.size);
    let view = view.map_err(|error| cannot_view(Path::new(&shown), &error))?;
    let entry = view.entry(entry.clone());
    let is_same = match (&entry.name, &old.name) {
        (
            BackingName::View {
                layout, identity, ..
            },
            BackingName::View {
                layout: old_layout,
                identity: old_identity,
                ..
            },
        ) => (layout, identity) == (old_layout, old_identity),
        _ => false,
    };
    if is_same {
        Ok(Some((entry, view.device().clone())))
    } else {
        Err(CommandError::new(format!(
            "{shown} is not the image that the disk was made over"
        ))
        .caused_by_text("the disk has blocks of an ext4 over that image")
        .hint("`bcow create --fs ext4 -b` makes a disk over another image"))
    }
}
