//! `bcow extract`

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bcow_erofs::extract::{
    self, Attribute, Existing, ExtractError, ExtractOptions, ExtractReport, LeftOut, Unreadable,
};
use bcow_erofs::reader::Inode;
use bcow_oci::Progress as _;
use rustix::fs::Mode;
use serde_json::json;

use crate::error::CommandError;
use crate::image::{LastLink, LayerArgs, OpenImage, StoreArgs, Tree};
use crate::interrupt::{Interrupt, interrupted};
use crate::names;
use crate::size::{Human, plural};
use crate::ui::{Progress, Ui};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};

/// Extract an image, or a part of it, into a directory
///
/// If PATH is a directory in the image (default: the root), its contents are extracted into DIR. If
/// PATH is not a directory, it is extracted into DIR under its own name. The command makes DIR
/// if it is missing.
///
/// The command extracts files of all types with mode, modification time in nanoseconds, extended
/// attributes and hard links; holes stay holes. For root, it also sets the owners of the image, and
/// an attribute that cannot be set is an error. For an ordinary user, all extracted files belong to
/// that user and have no set-user-ID and set-group-ID bits; the command leaves out devices and
/// privileged attributes (trusted.*, security.*) with a warning.
///
/// The command never writes outside DIR, for any content of the image. An existing directory keeps
/// its attributes; an existing file is an error. With --force, existing directories below DIR get
/// the attributes of the image, and existing files are replaced, never written into. After an
/// error, the files extracted so far remain. With --keep-going, the command reports each damaged
/// part of the image, leaves it out, extracts the rest, and exits with status 1.
#[derive(Debug, clap::Args)]
#[command(override_usage = "bcow extract [OPTIONS] <IMG> [PATH] <DIR>")]
pub struct Args {
    /// The image: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    image: Name,
    /// A path in the image [default: its root], and the directory to extract into
    #[arg(value_name = "[PATH] DIR", value_hint = clap::ValueHint::AnyPath)]
    path_or_directory: OsString,
    #[arg(hide = true, value_hint = clap::ValueHint::DirPath)]
    directory: Option<PathBuf>,
    /// Replace existing files
    #[arg(short, long)]
    force: bool,
    /// Extract all readable files of a damaged image: report each unreadable file and leave it out
    #[arg(short, long)]
    keep_going: bool,
    /// Set owners as in the image (the default for root)
    #[arg(long, conflicts_with = "no_same_owner")]
    same_owner: bool,
    /// Do not set owners: all files belong to the current user (the default for ordinary users)
    #[arg(long)]
    no_same_owner: bool,
    /// Leave out extended attributes, ACLs and file capabilities
    #[arg(long)]
    no_xattrs: bool,
    /// Print a summary as JSON (schema bcow.extract/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    layers: LayerArgs,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Extracts.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let (path, directory) = match &args.directory {
        Some(directory) => (args.path_or_directory.as_bytes(), directory.as_path()),
        None => (&b"/"[..], Path::new(&args.path_or_directory)),
    };
    let interrupt = Interrupt::catch();
    let image = if args.keep_going {
        // The content of a missing layer is unreadable, as that of a damaged block is.
        OpenImage::open_without_content(&args.image, &args.layers.layers, &args.stores, ui)?
    } else {
        OpenImage::open(&args.image, &args.layers.layers, &args.stores)?
    };
    let tree = image.tree()?;
    let start = tree.find(path, LastLink::Follow)?;
    // The umask could take permissions from the owner of a new directory, which is this process.
    rustix::process::umask(Mode::empty());
    let report = extract(args, &tree, &start, path, directory, &interrupt, ui)?;
    warn_of("device node", "create", &report.devices, ui);
    warn_of("extended attribute", "set", &report.xattrs, ui);
    let shown = directory.display();
    let entries = plural(report.entries, "entry");
    let content = Human(report.content_bytes);
    if args.json {
        let summary = json!({
            "entries": report.entries,
            "content_bytes": report.content_bytes,
            "unreadable": report.unreadable,
            "left_out": { "devices": report.devices.count, "xattrs": report.xattrs.count },
        });
        ui.print_report("bcow.extract/1", directory.display(), &summary)?;
    } else {
        ui.status(format_args!(
            "{shown}: {entries} extracted, {content} of file content"
        ));
    }
    match report.unreadable {
        0 => Ok(()),
        count => Err(CommandError::new(format!(
            "{} of the image could not be read and {} missing in {shown}",
            plural(count, "part"),
            if count == 1 { "is" } else { "are" },
        ))
        .hint(format!(
            "`bcow fsck --data {}` lists the damage",
            args.image
        ))),
    }
}

fn extract(
    args: &Args,
    tree: &Tree,
    start: &Inode,
    path: &[u8],
    directory: &Path,
    interrupt: &Interrupt,
    ui: &Ui,
) -> Result<ExtractReport, CommandError> {
    let defaults = ExtractOptions::default();
    let options = ExtractOptions {
        existing: if args.force { Existing::Replace } else { Existing::Refuse },
        unreadable: if args.keep_going { Unreadable::LeaveOut } else { Unreadable::Fail },
        owners: args.same_owner || (defaults.owners && !args.no_same_owner),
        xattrs: !args.no_xattrs,
        cancel: Some(interrupt.flag()),
    };
    let progress = ui.progress();
    progress.phase("extracting");
    let observer = Observer { tree, progress, ui };
    extract::extract(
        tree.filesystem(),
        start,
        path,
        directory,
        &options,
        &observer,
    )
    .map_err(|error| match error {
        // Later parts of the image may be intact.
        ExtractError::Read { .. } => {
            failure(tree, &error).hint("--keep-going extracts all parts that can be read")
        }
        error => failure(tree, &error),
    })
}

/// Shows the progress of an extraction.
struct Observer<'a> {
    tree: &'a Tree,
    progress: Progress<'a>,
    ui: &'a Ui,
}

impl extract::Progress for Observer<'_> {
    fn advance(&self, bytes: u64) {
        self.progress.advance(bytes);
    }

    fn unreadable(&self, error: &ExtractError) {
        self.ui.error(&failure(self.tree, error));
    }
}

fn warn_of(object: &str, verb: &str, left_out: &LeftOut, ui: &Ui) {
    if left_out.count > 0 {
        ui.warning(format_args!(
            "left out {} that only root can {verb} (the first: {})",
            plural(left_out.count, object),
            names::quoted(&left_out.first)
        ));
    }
}

/// The library's error in the command's form.
fn failure(tree: &Tree, error: &ExtractError) -> CommandError {
    let quoted = |path: &Path| names::quoted(path.as_os_str().as_bytes());
    match error {
        ExtractError::Cancelled => interrupted(),
        ExtractError::Read { path, source } => {
            CommandError::new(tree.cannot_read(path)).caused_by(source)
        }
        ExtractError::Owner { path, uid, gid } => CommandError::new(tree.cannot_read(path))
            .caused_by_text(format!("owner {uid}:{gid} is impossible"))
            .hint("--no-same-owner leaves owners out"),
        ExtractError::NoName { path } => {
            CommandError::usage(format!("{} does not end in a name", names::quoted(path)))
        }
        ExtractError::Exists { path } => {
            CommandError::new(format!("cannot create {}", quoted(path)))
                .caused_by_text("file exists")
                .hint("--force replaces existing files; an empty DIR needs no --force")
        }
        ExtractError::Create { path, source } => {
            CommandError::new(format!("cannot create {}", quoted(path))).caused_by(source)
        }
        ExtractError::Mknod { path, source } => {
            CommandError::new(format!("cannot create device {}", quoted(path)))
                .caused_by(source)
                .hint("a device needs CAP_MKNOD, which this process lacks")
        }
        ExtractError::Attribute {
            path,
            attribute: Attribute::Xattr(name),
            source,
        } => CommandError::new(format!(
            "cannot set extended attribute {} of {}",
            names::quoted(name),
            quoted(path)
        ))
        .caused_by(source)
        .hint("--no-xattrs leaves extended attributes out"),
        // The other messages show a path of the host as the user wrote it.
        error => CommandError::of(error),
    }
}
