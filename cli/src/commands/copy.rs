//! `bcow copy`

use bcow_convert::{CopyReport, Copying};
use bcow_images::Name;
use bcow_images::args::{COPY_FROM, COPY_TO, NameParser};

use crate::error::CommandError;
use crate::image::StoreArgs;
use crate::size::{Human, plural};
use crate::ui::Ui;

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
/// An image keeps its manifest, and so its digest. If SRC is an index, which has images for several
/// platforms, DST becomes the same index with all its images and attestations; a file and S3 take
/// the image for this machine. --platform selects one image. If SRC is one file and DST is a
/// layout, an archive or a registry, the file becomes the stack of a new image, and files that it
/// names by digest become the layers of that image. An image with layers cannot be copied to one
/// file: use `bcow convert`. In S3, the stack gets the name KEY; its layers are beside it, in
/// blobs/sha256.
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
    /// Copy only the image for this platform of an index [default: all of the index]
    #[arg(long, value_name = "OS/ARCH[/VARIANT]")]
    platform: Option<String>,
    /// Replace DST even if it is a disk, the backing of a file, not a BCoW file, in S3, or an index
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

/// Copies.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let copying = Copying {
        source: &args.source,
        destination: &args.destination,
        platform: args.platform.as_deref(),
        force: args.force,
        jobs: args.jobs.map(usize::from),
        stores: &args.stores,
    };
    let copied = ui.work(|work| copying.run(work))?;
    ui.note_left_out(&args.source.display(), &copied.left_out);
    if args.json {
        return ui.print_json(&copied);
    }
    let name = &copied.name;
    let mut out = ui.output();
    match &copied.report {
        CopyReport::File(report) => {
            let kept = match report.file_bytes.saturating_sub(report.copied_bytes) {
                0 => String::new(),
                bytes => format!(", {} of it was there", Human(bytes)),
            };
            writeln!(out, "{name}: {}{kept}, verified", Human(report.file_bytes))?;
        }
        CopyReport::Image(report) => {
            let blobs = report.blobs.iter();
            let (manifests, kind) = match report.images.len() as u64 {
                0 => (String::new(), "manifest"),
                count => (format!("{}, ", plural(count, "manifest")), "index"),
            };
            writeln!(
                out,
                "{name}: {manifests}{} of {}, {} copied, {kind} {}",
                plural(blobs.len() as u64, "blob"),
                Human(blobs.clone().map(|blob| blob.bytes).sum()),
                Human(blobs.map(|blob| blob.copied_bytes).sum()),
                report.manifest
            )?;
        }
        CopyReport::Sent { blobs, .. } => writeln!(
            out,
            "{name}: {} of {}, {} copied",
            plural(blobs.len() as u64, "file"),
            Human(blobs.iter().map(|blob| blob.bytes).sum()),
            Human(blobs.iter().map(|blob| blob.copied_bytes).sum())
        )?,
    }
    out.finish()
}
