//! `bcow commit`

mod upper;

use std::path::PathBuf;

use bcow::operation::{CommitError, commit_into_backing};
use bcow::{Keep, OpenOptions};
use bcow_oci::export::LayerCompression;

use super::seal::{SealArgs, seal_into};
use crate::disks::{Below, cannot_lock, lock_disk, lock_note};
use crate::error::CommandError;
use crate::image::{LayerArgs, StoreArgs, cannot_open_file};
use crate::rewrite::{TerminalMonitor, operation_failure};
use crate::size::Human;
use crate::ui::Ui;
use bcow_images::Name;
use bcow_images::args::{COMMIT_DISK_TO, COMMIT_TO, IMAGE, NameParser};

/// Commit changes of a disk or a writable mount to a new layer or the backing
///
/// With --upper, IMG is the image of a writable mount, and the command writes the changes in the
/// mount's upper to NEW. UPPER can also be a disk of `bcow create --fs ext4` that shows IMG. NEW is
/// one of
///
///     FILE.bcow        a layer in overlayfs format. Of a partly changed file, the layer stores
///                      only the changed blocks; the other blocks are read from IMG
///     tar:FILE         a layer archive in OCI format; tar:- is standard output
///     oci:DIR[:REF]    an ordinary OCI image: the layers of IMG and the new layer
///     oci-archive:FILE[:REF]
///                      the same in a tar archive
///     docker://HOST/REPO[:TAG]
///                      the same in a registry; layers that the registry has are not sent
///
/// With --merge, FILE.bcow is an image with all files that the mount showed; bcow still reads
/// unchanged data from IMG. With --flatten, FILE.bcow has the same files, and needs no other file.
/// When a layer or image that needs IMG is opened later, bcow looks for IMG by its file name in the
/// directory of that layer or image, and by its file name or digest under --store.
///
/// The command changes neither the upper nor IMG. No process may write to the upper during the
/// command. A disk that was not unmounted is read with the changes in the journal of its file
/// system.
///
/// Without --upper, the command commits a disk. With NEW, it writes a sealed disk that has
/// the same backing and contains only the disk's own data. The disk does not change.
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
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Name,
    /// The layer, image or sealed disk to write; FILE.bcow, or with --upper also tar:FILE,
    /// oci:DIR[:REF], oci-archive:FILE[:REF] or docker://HOST/REPO[:TAG]
    #[arg(value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(COMMIT_TO))]
    new: Option<Name>,
    /// Commit the changes in this upper of a writable mount of IMG, or in this disk of `bcow create
    /// --fs ext4`
    #[arg(long, value_name = "UPPER|DISK", value_hint = clap::ValueHint::AnyPath)]
    upper: Option<PathBuf>,
    /// Write a complete image: IMG with the changes applied; bcow still reads unchanged data from
    /// IMG
    #[arg(long, requires = "upper")]
    merge: bool,
    /// Write a complete image: IMG with the changes applied; the image needs no other file
    #[arg(long, requires = "upper", conflicts_with = "merge")]
    flatten: bool,
    /// Compression of the layers of an OCI image: gzip[:LEVEL], zstd[:LEVEL] or none [default:
    /// gzip:6]
    #[arg(long, value_name = "HOW", requires = "upper")]
    layer_compress: Option<LayerCompression>,
    #[command(flatten, next_help_heading = "Options for NEW")]
    seal: SealArgs,
    #[command(flatten, next_help_heading = "Files")]
    layers: LayerArgs,
    #[command(flatten, next_help_heading = "Files")]
    stores: StoreArgs,
}

/// The content of a new image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NewContent {
    /// The changes.
    Layer,
    /// The whole visible content, with the image below it.
    Merged,
    /// The whole visible content.
    Whole,
}

impl Args {
    fn new_content(&self) -> NewContent {
        match (self.merge, self.flatten) {
            (true, _) => NewContent::Merged,
            (_, true) => NewContent::Whole,
            _ => NewContent::Layer,
        }
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
        Some(new) => match new.path() {
            Some(path) => seal_into(&args.disk, path, Keep::Own, &args.seal, &args.stores, ui),
            None => Err(COMMIT_DISK_TO.refuse(new).into()),
        },
        None => {
            let jobs = args.seal.jobs().map(|_| "--jobs");
            match args.seal.for_file().or(jobs) {
                Some(option) => Err(CommandError::usage(format!("{option} is for NEW"))
                    .hint("without NEW, the command writes into the backing as it is")),
                None => into_backing(args, ui),
            }
        }
    }
}

fn into_backing(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let name = &args.disk;
    let file = lock_disk(name, "commit")?;
    let below = Below::new(&args.stores, &OpenOptions::default())?;
    let monitor = TerminalMonitor::new(ui);
    let committed = commit_into_backing(&file, &below.policy(), &lock_note("commit"), &monitor)
        .map_err(|error| failure(args, &below, error))?;
    drop(monitor);
    ui.status(format_args!(
        "{}: {} committed into {}",
        name.display(),
        Human(committed.bytes),
        committed.backing.display()
    ));
    Ok(())
}

fn failure(args: &Args, below: &Below, error: CommitError) -> CommandError {
    let name = &args.disk;
    let cannot = || format!("cannot commit {}", name.display());
    match error {
        CommitError::Disk(error) => cannot_open_file(name.shown(), name.shown(), &error),
        CommitError::BackingByDigest => CommandError::new(cannot())
            .caused_by(&error)
            .hint("`bcow commit DISK NEW` makes a layer on top of the backing"),
        CommitError::Url(_) => CommandError::new(cannot())
            .caused_by(&error)
            .hint("`bcow commit DISK NEW` makes a layer on top of it, and `bcow copy` copies it"),
        CommitError::View => CommandError::new(cannot())
            .caused_by(&error)
            .hint("`bcow commit DISK NEW` makes a layer of the disk on top of the view"),
        CommitError::Chain(problem) => {
            let problem = below.first_problem(&problem);
            problem.cause_of(CommandError::new(cannot()))
        }
        CommitError::Lock { path, source } => cannot_lock(&path, &path, &source).hint(format!(
            "`bcow commit {} NEW.bcow` makes a layer on top of the backing instead",
            name.display()
        )),
        CommitError::Backing {
            path,
            source,
            below: problem,
        } => below.cannot_open_disk(&path, &source, problem.as_ref()),
        CommitError::Operation(error) => operation_failure(&error, cannot, cannot),
        error => CommandError::new(cannot()).caused_by(&error),
    }
}
