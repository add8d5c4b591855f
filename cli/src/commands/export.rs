//! `bcow export`

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use bcow_convert::{ExportedPart, Output, export_archive, export_bytes, export_image, is_stream};
use bcow_images::args::{EXPORT_TO, IMAGE, NameParser};
use bcow_images::{Name, spellings};
use bcow_oci::LayoutPlace;
use bcow_oci::export::LayerCompression;
use serde_json::json;

use crate::error::CommandError;
use crate::image::{LayerArgs, OpenImage, StoreArgs};
use crate::push::Destination;
use crate::size::{Human, plural};
use crate::ui::Ui;

/// Write the content of an image in another form
///
/// FORM is one of
///
///     tar              an archive of the tree, sorted by name; for a single layer, a layer archive
///     oci:DIR[:REF]    an ordinary image in an OCI layout, for other tools: a stack keeps
///                      its layers, any other image becomes one layer
///     oci-archive:FILE[:REF]
///                      the same in a tar archive
///     docker://HOST/REPO[:TAG]
///                      the same in a registry
///     erofs            the EROFS file system of the image, which Linux mounts (mount -t erofs)
///     raw              the whole address space
///
/// In tar archives, PAX records store the attributes that do not fit into a tar header, in the form
/// that GNU tar and container engines read. Holes stay holes; sockets are left out. `erofs` and
/// `raw` write a sparse file.
///
/// The same tree gives the same bytes, however the image stores the tree. The command verifies
/// every block that it reads. A file or image gets its name when it is complete, and replaces an
/// existing one of that name; the command never replaces a file that belongs to IMG.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The image: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    image: Name,
    /// Form of the output: tar, oci:DIR[:REF], oci-archive:FILE[:REF], docker://HOST/REPO[:TAG],
    /// erofs or raw
    #[arg(long, value_name = "FORM")]
    to: OsString,
    /// Output file; required for tar, erofs and raw, refused for the other forms; - is standard
    /// output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Compression of the layers of an OCI image: gzip[:LEVEL], zstd[:LEVEL] or none [default:
    /// gzip:6]
    #[arg(long, value_name = "HOW")]
    compress: Option<LayerCompression>,
    /// Threads that compress [default: one for each CPU]; the output does not depend on N
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Print a summary as JSON (schema bcow.export/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    layers: LayerArgs,
    #[command(flatten)]
    stores: StoreArgs,
}

/// What is written, and where.
enum To<'a> {
    Image(LayoutPlace),
    Tar(&'a Path),
    Bytes(ExportedPart, &'a Path),
}

fn destination(args: &Args) -> Result<To<'_>, CommandError> {
    let shown = args.to.to_string_lossy();
    if shown.contains(':') {
        if args.output.is_some() {
            return Err(CommandError::usage(
                "-o does not apply to an OCI image: --to names the layout",
            )
            .hint("leave out -o"));
        }
        let to = EXPORT_TO.parse(&args.to)?;
        return match Destination::of(&to, &EXPORT_TO, &args.stores.remote, &args.image)? {
            Destination::Layout(layout) => Ok(To::Image(layout)),
            _ => Err(EXPORT_TO.refuse(&to).into()),
        };
    }
    let part = match &*shown {
        "tar" => None,
        "erofs" => Some(ExportedPart::Erofs),
        "raw" => Some(ExportedPart::Whole),
        _ => {
            let forms = spellings(EXPORT_TO.forms);
            return Err(CommandError::usage(format!("unknown form {shown:?}"))
                .hint(format!("use tar, erofs, raw, {forms}")));
        }
    };
    let Some(output) = &args.output else {
        return Err(CommandError::usage("missing output file")
            .hint("name one with -o FILE; -o - is standard output"));
    };
    if args.compress.is_some() {
        return Err(
            CommandError::usage("--compress applies only to the layers of an OCI image")
                .hint("leave out --compress, or compress the output in a pipe, with -o -"),
        );
    }
    Ok(match part {
        None => To::Tar(output),
        Some(part) => To::Bytes(part, output),
    })
}

/// The error for `--json` with an archive on standard output.
pub fn no_json_beside_an_archive() -> CommandError {
    CommandError::usage("--json and the archive would both go to standard output")
        .hint("leave out --json, or write the archive to a file")
}

/// Exports.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    const SCHEMA: &str = "bcow.export/1";
    let to = destination(args)?;
    if args.json && args.output.as_deref().is_some_and(is_stream) {
        return Err(no_json_beside_an_archive());
    }
    let image = OpenImage::open(&args.image, &args.layers.layers, &args.stores)?;
    let jobs = args.jobs.map(usize::from);
    let mut out = ui.output();
    let (output, content) = match to {
        To::Image(layout) => {
            let compression = args.compress.unwrap_or_default();
            let (report, left_out) =
                ui.work(|work| export_image(&image, &layout, compression, jobs, work))?;
            if args.json {
                ui.note_left_out(&image.path().display(), &left_out);
                return ui.print_report(SCHEMA, layout.shown(), &report);
            }
            let stored = report.layers.iter().map(|layer| layer.stored_bytes).sum();
            ui.status(format_args!(
                "{}: {} exported, {}, manifest {}",
                layout.without_reference(),
                plural(report.layers.len() as u64, "layer"),
                Human(stored),
                report.manifest
            ));
            ui.note_left_out(&image.path().display(), &left_out);
            return Ok(());
        }
        To::Tar(output) => {
            let to = Output::named(output, out.stream());
            let report = ui.work(|work| export_archive(&image, to, jobs, work))?;
            if args.json {
                return ui.print_report(SCHEMA, output.display(), &report);
            }
            let content = format!(
                "{} exported, {} of file content",
                plural(report.entries, "entry"),
                Human(report.content_bytes)
            );
            (output, content)
        }
        To::Bytes(part, output) => {
            let to = Output::named(output, out.stream());
            let bytes = ui.work(|work| export_bytes(&image, part, to, work))?;
            if args.json {
                return ui.print_report(SCHEMA, output.display(), &json!({ "bytes": bytes }));
            }
            (output, format!("{} exported", Human(bytes)))
        }
    };
    out.finish()?;
    if !is_stream(output) {
        ui.status(format_args!("{}: {content}", output.display()));
    }
    Ok(())
}
