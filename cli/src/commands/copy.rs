//! `bcow copy`

use std::fmt::Display;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::format::{BackingName, Use};
use bcow::{Image, OpenOptions, Storage};
use bcow_images::{Name, NameParts, Url};
use bcow_oci::copy::{
    CopyDestination, CopyFile, CopyImage, CopyOptions, FileReport, ImageReport, copy_file,
    copy_image,
};
use bcow_oci::{ConvertError, LayoutForm, LeftOut, Source, store};
use bcow_remote::{Replace, Root, S3Name};
use serde::Serialize;
use serde_json::{Value, json};

use crate::conversion::{failure, note_left_out};
use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs, cannot_open, refuse_what_is_no_file};
use crate::interrupt::Interrupt;
use crate::push::{Destination, Layout, ToS3};
use crate::remote::{self, Pinned};
use crate::replace::{self, Replacement};
use crate::size::{Human, plural};
use crate::ui::Ui;
use bcow_images::args::{COPY_FROM, COPY_TO, NameParser};

/// Copy a BCoW image between files, layouts and registries, byte for byte
///
/// SRC is one of
///
///     FILE, bcow:FILE           a sealed BCoW file
///     oci:DIR[:REF]             an image in BCoW form in an OCI layout
///     oci:DIR@sha256:DIGEST     one BCoW file of a layout
///     oci-archive:FILE[:REF]    an image in BCoW form in an OCI layout in a tar archive
///     docker://HOST/REPO[:TAG]  an image in BCoW form in a registry
///     https://HOST/PATH         a BCoW file on a web server
///     s3://BUCKET/KEY           a BCoW file in S3
///
/// DST is one of FILE, bcow:FILE, oci:DIR[:REF], oci-archive:FILE[:REF], docker://HOST/REPO[:TAG]
/// and s3://BUCKET/KEY.
///
/// An image keeps its manifest, and so its digest. If SRC is one file and DST is a layout, an
/// archive or a registry, the file becomes the stack of a new image, and files that it names by
/// digest become the layers of that image. An image with layers cannot be copied to one file: use
/// `bcow convert`. In S3, the stack gets the name KEY; its layers are beside it, in blobs/sha256.
///
/// The command verifies all data against the Merkle trees or the digests. It does not copy blobs
/// that DST has. In a file or a directory, an interrupted copy stays under a temporary name
/// (.NAME.*.partial), and the next copy completes it: it verifies each chunk, and reads only what
/// is missing or wrong. In S3, an interrupted copy of a large file is continued in the same way,
/// and an existing file KEY is replaced only with --force.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// What to copy: a file, oci:DIR[:REF], oci-archive:FILE[:REF], docker://..., s3://... or
    /// https://...
    #[arg(value_name = "SRC", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(COPY_FROM))]
    source: Name,
    /// Where to: a file, oci:DIR[:REF], oci-archive:FILE[:REF], docker://HOST/REPO[:TAG] or
    /// s3://BUCKET/KEY
    #[arg(value_name = "DST", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(COPY_TO))]
    destination: Name,
    /// Replace DST even if it is a disk, the backing of a file, not a BCoW file, or in S3
    #[arg(short, long)]
    force: bool,
    /// Threads that compare chunks [default: 4]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: Option<u16>,
    /// Print a summary as JSON (schema bcow.copy/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Threads without `--jobs`: several requests at a time hide the way to a server.
const THREADS: u16 = 4;

/// What is copied.
enum From {
    File(CopyFile),
    Image(Box<CopyImage>),
}

impl From {
    fn image(image: CopyImage) -> Self {
        From::Image(Box::new(image))
    }
}

/// Copies.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let remote = &args.stores.remote;
    let destination = Destination::of(&args.destination, &COPY_TO, remote, &args.source)?;
    let interrupt = Interrupt::catch();
    let from = open(args, &destination, &interrupt, ui)?;
    if let Some(root) = remote.root_hash {
        require_root(&from, root)?;
    }
    let options = CopyOptions {
        threads: args.jobs.unwrap_or(THREADS).into(),
        cancel: Some(interrupt.flag()),
    };
    match (&destination, from) {
        (Destination::S3(name), from) => to_s3(args, &from, name, &interrupt, ui),
        (Destination::File(path), From::File(file)) => {
            to_file(args, &file, path, &LeftOut::default(), &options, ui)
        }
        (Destination::File(path), From::Image(image)) => match image.only_file() {
            Some(file) => to_file(args, file, path, &left_out_of_files(&image)?, &options, ui),
            None => Err(CommandError::new(format!(
                "cannot copy {} to {}",
                image.name,
                path.display()
            ))
            .caused_by_text("the image has layers, and a file has none")
            .hint(
                "copy it to oci:DIR[:REF] or oci-archive:FILE[:REF]; `bcow convert` makes one file",
            )),
        },
        (Destination::Layout(to), From::Image(image)) => to_layout(args, &image, to, &options, ui),
        _ => Err(COPY_TO.refuse(&args.destination).into()),
    }
}

/// Refuses a file, or an image with a stack, that has another root hash.
fn require_root(from: &From, expected: Root) -> Result<(), CommandError> {
    let (name, found) = match from {
        From::File(file) => (&file.name, file.merkle_root),
        From::Image(image) => (&image.name, image.merkle_root()),
    };
    if found == expected.0 {
        Ok(())
    } else {
        Err(CommandError::new(format!("cannot copy {name}"))
            .caused_by_text(format!("its root hash is {}, not {expected}", Root(found))))
    }
}

fn open(
    args: &Args,
    destination: &Destination,
    interrupt: &Interrupt,
    ui: &Ui,
) -> Result<From, CommandError> {
    let image_of_layout = |source: &Source| {
        let (scratch, progress, cancel) = (remote::scratch(), ui.progress(), interrupt.flag());
        let image = CopyImage::of_layout(source, &scratch, &progress, Some(&cancel));
        image.map(From::image).map_err(|error| failure(&error))
    };
    refuse_what_is_no_file(&args.source)?;
    if let NameParts::Layout { .. } | NameParts::OciArchive { .. } = args.source.parts()
        && let Some(source) = args.source.source()
    {
        return image_of_layout(&source);
    }
    let file = match (args.source.parts(), args.source.local()) {
        (NameParts::Url(Url::Registry(image)), _) => {
            let (image, place) = remote::bcow_in_registry(image, &args.stores.remote)?;
            let image = CopyImage::of_registry(image, &*place, &*place);
            return image.map(From::image).map_err(|error| failure(&error));
        }
        (NameParts::Url(url), _) => {
            let found = remote::open(url, &args.stores.remote.uncached(), Pinned::AsAsked)?;
            let shown = found.name.to_string();
            let file = CopyFile::new(shown, Arc::clone(&found.storage), true);
            let file = file.map_err(|error| failure(&error))?;
            return if is_copied_alone(&file, destination)? {
                Ok(From::File(file))
            } else {
                with_files_below(file, &OpenImage::of_remote(found, &args.stores)?)
            };
        }
        (_, None) => return Err(COPY_FROM.refuse(&args.source).into()),
        (_, Some(local)) => {
            let located = store::locate(&local);
            let located = located.map_err(|error| cannot_open(args.source.shown(), &error))?;
            let shown = args.source.to_string();
            CopyFile::new(shown, located.file as Arc<dyn Storage>, false)
        }
    };
    let file = file.map_err(|error| failure(&error))?;
    if is_copied_alone(&file, destination)? {
        Ok(From::File(file))
    } else {
        with_files_below(file, &OpenImage::open(&args.source, &args.stores)?)
    }
}

/// Whether the files below a file stay where they are. In S3, an image is useful with them only.
fn is_copied_alone(file: &CopyFile, destination: &Destination) -> Result<bool, CommandError> {
    match destination {
        Destination::File(_) => Ok(true),
        Destination::S3(_) => {
            let options = OpenOptions::default();
            let image = Image::open_storage(Arc::clone(&file.storage), &options);
            let image = image.context(|| format!("cannot read {}", file.name))?;
            let mut backings = image.backings();
            let has_files_below =
                backings.any(|backing| matches!(backing.name, BackingName::Digest(_)));
            if image.header().purpose != Use::Image || !has_files_below {
                return Ok(true);
            }
            // A layer on its own is used with the files that are below it in another place.
            let metadata = image.metadata();
            let metadata = metadata.context(|| format!("cannot read {}", file.name))?;
            Ok(metadata.get("layer").is_some())
        }
        _ => Ok(false),
    }
}

/// A file, and the files that it names by digest, as an image.
fn with_files_below(file: CopyFile, image: &OpenImage) -> Result<From, CommandError> {
    let cannot = |error: &ConvertError| failure(error);
    if image.image().header().purpose != Use::Image || !image.chain().is_empty() {
        return Err(CommandError::usage(format!("{} is a disk", file.name))
            .hint("a disk is copied to a file or to s3://BUCKET/KEY"));
    }
    let below = image
        .opened()
        .below
        .iter()
        .map(|below| {
            let is_local = below.storage.identity().is_some();
            let storage = Arc::clone(&below.storage);
            let part = CopyFile::new(below.name.clone(), storage, !is_local)?;
            Ok((below.digest.clone(), part))
        })
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| cannot(&error))?;
    let image = CopyImage::of_files(file, below);
    image.map(From::image).map_err(|error| cannot(&error))
}

/// The parts of the source that copies of the image's files do not have.
fn left_out_of_files(image: &CopyImage) -> Result<LeftOut, CommandError> {
    let left_out = image.left_out_of_files();
    left_out.map_err(|error| failure(&error))
}

fn to_file(
    args: &Args,
    file: &CopyFile,
    path: &Path,
    left_out: &LeftOut,
    options: &CopyOptions,
    ui: &Ui,
) -> Result<(), CommandError> {
    refuse_same(file, path)?;
    let header = bcow::header_of(&*file.storage);
    let replacement = if header.is_some_and(|header| header.purpose == Use::Image) {
        Replacement::Image
    } else {
        Replacement::Disk
    };
    let _replaced = replace::check(path, replacement, args.force)?;
    let progress = ui.progress();
    let report = copy_file(file, path, options, &progress).map_err(|error| failure(&error))?;
    drop(progress);
    report_file(args, path.display(), &report, left_out, ui)
}

/// Prints a report as JSON, and what the copy does not have.
fn print_json(report: &impl Serialize, left_out: &LeftOut, ui: &Ui) -> Result<(), CommandError> {
    let mut report = super::convert::as_json("bcow.copy/1", report)?;
    report["left_out"] = json!(left_out);
    ui.print_json(&report)
}

fn report_file(
    args: &Args,
    destination: impl Display,
    report: &FileReport,
    left_out: &LeftOut,
    ui: &Ui,
) -> Result<(), CommandError> {
    note_left_out(&args.source.display(), left_out, ui);
    if args.json {
        return print_json(report, left_out, ui);
    }
    let kept = match report.file_bytes.saturating_sub(report.copied_bytes) {
        0 => String::new(),
        bytes => format!(", {} of it was there", Human(bytes)),
    };
    let mut out = ui.output();
    writeln!(
        out,
        "{destination}: {}{kept}, verified",
        Human(report.file_bytes)
    )?;
    out.finish()
}

fn to_s3(
    args: &Args,
    from: &From,
    name: &S3Name,
    interrupt: &Interrupt,
    ui: &Ui,
) -> Result<(), CommandError> {
    let replace = if args.force { Replace::Allowed } else { Replace::Refused };
    let place = ToS3::new(name.clone(), &args.stores.remote, replace)?;
    let left_out = match from {
        From::File(_) => LeftOut::default(),
        From::Image(image) => left_out_of_files(image)?,
    };
    let progress = ui.progress();
    let file = match from {
        From::File(file) => file,
        From::Image(image) => match image.only_file() {
            Some(file) => file,
            None => {
                let sent = place.send_image(image.files(), &progress, &interrupt.flag())?;
                drop(progress);
                return report_sent(args, &place.name(), image, &sent, &left_out, ui);
            }
        },
    };
    if !file.is_checked {
        progress.phase("checking");
        let options = CheckOptions {
            data: true,
            threads: args.jobs.unwrap_or(THREADS).into(),
        };
        let cannot = || format!("cannot read {}", file.name);
        let report = check(Arc::clone(&file.storage), &options).context(cannot)?;
        if let Some(found) = report.findings.first().filter(|_| !report.is_sound()) {
            return Err(CommandError::new(format!("cannot copy {}", file.name))
                .caused_by_text(format!("{}: {}", found.place, found.message))
                .hint(format!("`bcow fsck --data {}` lists all damage", file.name)));
        }
    }
    let sent_bytes = place.send(&*file.storage, &progress, &interrupt.flag())?;
    drop(progress);
    let report = FileReport::new(&file.merkle_root, file.bytes, sent_bytes);
    report_file(args, place.name(), &report, &left_out, ui)
}

/// Reports an image that was sent to S3; `sent` are the bytes of each file that were sent.
fn report_sent(
    args: &Args,
    destination: &str,
    image: &CopyImage,
    sent: &[u64],
    left_out: &LeftOut,
    ui: &Ui,
) -> Result<(), CommandError> {
    note_left_out(&args.source.display(), left_out, ui);
    let files = image.files().iter().zip(sent);
    if args.json {
        let blobs: Vec<Value> = files
            .map(|((digest, file), sent)| {
                json!({
                    "digest": digest.to_string(),
                    "bytes": file.bytes,
                    "copied_bytes": sent,
                })
            })
            .collect();
        let root = Root(image.merkle_root()).to_string();
        let report = json!({ "merkle_root": root, "blobs": blobs });
        return print_json(&report, left_out, ui);
    }
    let all: u64 = files.map(|((_, file), _)| file.bytes).sum();
    let mut out = ui.output();
    writeln!(
        out,
        "{destination}: {} of {}, {} copied",
        plural(image.files().len() as u64, "file"),
        Human(all),
        Human(sent.iter().sum())
    )?;
    out.finish()
}

/// Refuses to copy a file over itself.
fn refuse_same(file: &CopyFile, path: &Path) -> Result<(), CommandError> {
    let Ok(other) = File::open(path) else {
        return Ok(());
    };
    let own = file.storage.identity();
    if own.is_some() && own == Storage::identity(&other) {
        Err(CommandError::new(format!(
            "cannot write {}: it is {}",
            path.display(),
            file.name
        )))
    } else {
        Ok(())
    }
}

fn to_layout(
    args: &Args,
    image: &CopyImage,
    to: &Layout,
    options: &CopyOptions,
    ui: &Ui,
) -> Result<(), CommandError> {
    let mut _replaced = None;
    if to.form == LayoutForm::Archive {
        _replaced = replace::check(&to.path, Replacement::Archive, args.force)?;
        let same = |path: &Path| path.canonicalize().ok();
        if let NameParts::OciArchive { file, .. } = args.source.parts()
            && same(file).is_some()
            && same(file) == same(&to.path)
        {
            return Err(CommandError::new(format!(
                "cannot write {}: it is the source",
                to.path.display()
            )));
        }
    }
    let destination = CopyDestination {
        directory: to.path.clone(),
        form: to.form.clone(),
        reference: to.reference.clone(),
    };
    let progress = ui.progress();
    let report =
        copy_image(image, &destination, options, &progress).map_err(|error| failure(&error))?;
    drop(progress);
    let left_out = match &to.form {
        LayoutForm::Registry(_) => image.left_out_of_registry(),
        _ => image.left_out().clone(),
    };
    note_left_out(&args.source.display(), &left_out, ui);
    if args.json {
        return print_json(&report, &left_out, ui);
    }
    let ImageReport {
        blobs, manifest, ..
    } = report;
    let all: u64 = blobs.iter().map(|blob| blob.bytes).sum();
    let copied: u64 = blobs.iter().map(|blob| blob.copied_bytes).sum();
    let mut out = ui.output();
    writeln!(
        out,
        "{}: {} of {}, {} copied, manifest {manifest}",
        to.shown(),
        plural(blobs.len() as u64, "blob"),
        Human(all),
        Human(copied)
    )?;
    out.finish()
}
