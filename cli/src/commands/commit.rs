//! `bcow commit`

use std::path::{Path, PathBuf};

use bcow::Keep;
use bcow_convert::{CommitOutput, NewContent, UpperCommit, commit_disk, seal_into};
use bcow_images::args::{COMMIT_DISK_TO, COMMIT_TO, IMAGE, NameParser};
use bcow_images::{Name, NameForm, NameParts};
use bcow_oci::export::LayerCompression;
use serde_json::json;

use super::export::no_json_beside_an_archive;
use crate::error::CommandError;
use crate::image::{LayerArgs, StoreArgs};
use crate::sealing::{SealArgs, show_sealed};
use crate::size::{Human, plural};
use crate::ui::Ui;

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
/// The command changes neither the upper nor IMG. UPPER can also be the directory of a mount, or a
/// snapshot, UPPER@NAME. If the upper or the disk is in use, the process that uses it takes a
/// snapshot, which the command reads and removes. A disk that was not unmounted is read with the
/// changes in the journal of its file system.
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
    /// --fs ext4`; both also while they are mounted
    #[arg(long, value_name = "UPPER|DISK|DIR", value_hint = clap::ValueHint::AnyPath)]
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
    /// Print a summary as JSON (schema bcow.commit/1)
    #[arg(long)]
    json: bool,
    #[command(flatten, next_help_heading = "Options for NEW")]
    seal: SealArgs,
    #[command(flatten, next_help_heading = "Files")]
    layers: LayerArgs,
    #[command(flatten, next_help_heading = "Files")]
    stores: StoreArgs,
}

const SCHEMA: &str = "bcow.commit/1";

/// Commits.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    if let Some(upper) = &args.upper {
        return commit_upper(args, upper, ui);
    }
    if !args.layers.layers.is_empty() {
        return Err(CommandError::usage("a disk has no layers")
            .hint("--layer is for an image, with --upper"));
    }
    let (disk, stores) = (&args.disk, &args.stores);
    if let Some(new) = &args.new {
        let Some(path) = new.path() else {
            return Err(COMMIT_DISK_TO.refuse(new).into());
        };
        let encoding = args.seal.encoding();
        let sealed = ui.work(|work| seal_into(disk, path, Keep::Own, &encoding, stores, work))?;
        if args.json {
            return ui.print_report(SCHEMA, path.display(), &sealed);
        }
        show_sealed(path, &sealed, ui);
        return Ok(());
    }
    if let Some(option) = args.seal.for_file().or(args.seal.jobs.map(|_| "--jobs")) {
        return Err(CommandError::usage(format!("{option} is for NEW"))
            .hint("without NEW, the command writes into the backing as it is"));
    }
    let committed = ui.work(|work| commit_disk(disk, stores, work))?;
    if args.json {
        let report = json!({ "disk": disk.to_string(), "bytes": committed.bytes });
        return ui.print_report(SCHEMA, committed.backing.display(), &report);
    }
    ui.status(format_args!(
        "{}: {} committed into {}",
        disk.display(),
        Human(committed.bytes),
        committed.backing.display()
    ));
    Ok(())
}

/// Makes a layer or an image of the changes in `upper`.
fn commit_upper(args: &Args, upper: &Path, ui: &Ui) -> Result<(), CommandError> {
    let Some(new) = &args.new else {
        return Err(
            CommandError::usage("there is nothing to write the changes to").hint(
                "name FILE.bcow, tar:FILE, oci:DIR[:REF], oci-archive:FILE[:REF] or docker://...",
            ),
        );
    };
    let content = match (args.merge, args.flatten) {
        (true, _) => NewContent::Merged,
        (_, true) => NewContent::Whole,
        _ => NewContent::Layer,
    };
    refuse_options(args, new.form(), content)?;
    if args.json && *new.parts() == NameParts::Tar(None) {
        return Err(no_json_beside_an_archive());
    }
    let commit = UpperCommit {
        image: &args.disk,
        upper,
        new,
        content,
        encoding: args.seal.encoding(),
        layer_compression: args.layer_compress.unwrap_or_default(),
        layers: &args.layers,
        stores: &args.stores,
    };
    let mut out = ui.output();
    let committed = ui.work(|work| commit.run(out.stream(), work))?;
    out.finish()?;
    match committed {
        CommitOutput::Archive(_, report) if args.json => {
            ui.print_report(SCHEMA, new, &report)?;
        }
        CommitOutput::Layout(name, report) if args.json => {
            ui.print_report(SCHEMA, name, &report)?;
        }
        CommitOutput::File(_, report) if args.json => ui.print_report(SCHEMA, new, &report)?,
        CommitOutput::Archive(Some(path), report) => ui.status(format_args!(
            "{}: layer of {}, {} of file content",
            path.display(),
            plural(report.entries, "entry"),
            Human(report.content_bytes)
        )),
        CommitOutput::Archive(None, _) => {}
        CommitOutput::Layout(name, report) => {
            let new = report.layers.last();
            ui.status(format_args!(
                "{name}: {}, the new one of {}, {}; manifest {}",
                plural(report.layers.len() as u64, "layer"),
                plural(new.map_or(0, |layer| layer.entries), "entry"),
                Human(new.map_or(0, |layer| layer.stored_bytes)),
                report.manifest
            ));
        }
        CommitOutput::File(path, report) => {
            let what = if content == NewContent::Layer { "layer" } else { "image" };
            let over = match report.base_bytes {
                0 => String::new(),
                bytes => format!(", {} in {}", Human(bytes), args.disk.display()),
            };
            ui.status(format_args!(
                "{}: {what} of {}, {} of file content stored{over}, file of {}",
                path.display(),
                plural(report.entries, "inode"),
                Human(report.content_bytes - report.deduplicated_bytes),
                Human(report.file_bytes)
            ));
        }
    }
    Ok(())
}

/// Refuses options that do not apply to the form of the output.
fn refuse_options(args: &Args, form: NameForm, content: NewContent) -> Result<(), CommandError> {
    let is_file = matches!(form, NameForm::File | NameForm::Bcow);
    let is_tar = form == NameForm::Tar;
    if !is_file && content != NewContent::Layer {
        return Err(
            CommandError::usage("--merge and --flatten are for an image in one file")
                .hint("`bcow export --to tar` writes the tree of an image"),
        );
    }
    if let (false, Some(option)) = (is_file, args.seal.for_file()) {
        return Err(
            CommandError::usage(format!("{option} is for a BCoW file")).hint(if is_tar {
                "a layer archive is not compressed"
            } else {
                "--layer-compress is for the layers of an OCI image"
            }),
        );
    }
    if (is_file || is_tar) && args.layer_compress.is_some() {
        return Err(
            CommandError::usage("--layer-compress is for an OCI image").hint(if is_file {
                "--compress is for a BCoW file"
            } else {
                "a layer archive is not compressed"
            }),
        );
    }
    Ok(())
}
