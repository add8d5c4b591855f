//! `bcow export`

use std::ffi::OsString;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use bcow::BlockDevice;
use bcow_erofs::reader::Filesystem;
use bcow_images::{Name, spellings};
use bcow_oci::export::{
    ExportError, ExportOptions, LayerCompression, Layers, LayoutExport, TarForm, TarReport,
    export_layout, export_tar,
};
use serde_json::Value;

use crate::conversion::{failure as convert_failure, note_left_out};
use crate::copy_out::CopyOut;
use crate::error::{CommandError, Context};
use crate::image::{LayerArgs, OpenImage, StoreArgs};
use crate::interrupt::{Interrupt, interrupted};
use crate::names;
use crate::new_file::NewFile;
use crate::push::{Destination, Layout};
use crate::size::{Human, plural};
use crate::ui::{Progress, Ui};
use bcow_images::args::{EXPORT_TO, IMAGE, NameParser};

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
    #[command(flatten)]
    layers: LayerArgs,
    #[command(flatten)]
    stores: StoreArgs,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Form {
    Erofs,
    Raw,
    Tar,
    Oci(Layout),
}

fn form(args: &Args) -> Result<Form, CommandError> {
    let text = args.to.as_os_str();
    let shown = text.to_string_lossy();
    match &*shown {
        "erofs" => return Ok(Form::Erofs),
        "raw" => return Ok(Form::Raw),
        "tar" => return Ok(Form::Tar),
        _ => {}
    }
    if !shown.contains(':') {
        return Err(
            CommandError::usage(format!("unknown form {shown:?}")).hint(format!(
                "use tar, erofs, raw, {}",
                spellings(EXPORT_TO.forms)
            )),
        );
    }
    let to = EXPORT_TO.parse(text)?;
    match Destination::of(&to, &EXPORT_TO, &args.stores.remote, &args.image)? {
        Destination::Layout(layout) => Ok(Form::Oci(layout)),
        _ => Err(EXPORT_TO.refuse(&to).into()),
    }
}

/// Buffer of output that comes in small pieces, in bytes.
const BUFFER_BYTES: usize = 1 << 20;

/// Exports.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let to = form(args)?;
    let destination = match (&to, &args.output) {
        (Form::Oci(_), None) => None,
        (Form::Oci(_), Some(_)) => {
            return Err(CommandError::usage(
                "-o does not apply to an OCI image: --to names the layout",
            )
            .hint("leave out -o"));
        }
        (_, Some(output)) => Some(output.as_path()),
        (_, None) => {
            return Err(CommandError::usage("missing output file")
                .hint("name one with -o FILE; -o - is standard output"));
        }
    };
    if destination.is_some() && args.compress.is_some() {
        return Err(
            CommandError::usage("--compress applies only to the layers of an OCI image")
                .hint("leave out --compress, or compress the output in a pipe, with -o -"),
        );
    }
    let image = OpenImage::open_with_layers(&args.image, &args.layers, &args.stores)?;
    match (&to, destination) {
        (Form::Tar, Some(output)) => archive(args, &image, output, ui),
        (Form::Oci(layout), _) => oci(args, &image, layout, ui),
        (form, Some(output)) => address_space(form, &image, output, ui),
        (_, None) => Err(CommandError::usage("missing output file")),
    }
}

fn options(args: &Args, interrupt: &Interrupt) -> ExportOptions {
    let defaults = ExportOptions::default();
    ExportOptions {
        threads: args.jobs.map_or(defaults.threads, usize::from),
        cancel: Some(interrupt.flag()),
    }
}

/// Whether the image is a single layer (of `bcow commit --upper`).
fn is_layer(image: &OpenImage) -> Result<bool, CommandError> {
    Ok(metadata(image)?.get("layer").is_some())
}

pub fn metadata(image: &OpenImage) -> Result<Value, CommandError> {
    image
        .image()
        .metadata()
        .context(|| format!("cannot read {}", image.path().display()))
}

fn archive(args: &Args, image: &OpenImage, output: &Path, ui: &Ui) -> Result<(), CommandError> {
    let tree = image.tree()?;
    let form = if is_layer(image)? { TarForm::Layer } else { TarForm::Tree };
    let interrupt = Interrupt::catch();
    let options = options(args, &interrupt);
    let progress = ui.progress();
    progress.phase("exporting");
    let write = |out: &mut dyn Write| export_tar(tree.filesystem(), form, out, &options, &progress);
    let Some(report) = to_archive(image, output, ui, &progress, &write)? else {
        return Ok(());
    };
    drop(progress);
    let TarReport {
        entries,
        content_bytes,
        ..
    } = report;
    ui.status(format_args!(
        "{}: {} exported, {} of file content",
        output.display(),
        plural(entries, "entry"),
        Human(content_bytes)
    ));
    Ok(())
}

/// Writes an archive to `output`, complete or not at all. `-` is standard output, without a report.
pub fn to_archive(
    image: &OpenImage,
    output: &Path,
    ui: &Ui,
    progress: &Progress<'_>,
    write: &dyn Fn(&mut dyn Write) -> Result<TarReport, ExportError>,
) -> Result<Option<TarReport>, CommandError> {
    if output == Path::new("-") {
        let mut out = ui.output();
        write(out.stream()).map_err(|error| match error {
            ExportError::Write(error) => CommandError::standard_output(&error),
            _ => export_failure(image, &error),
        })?;
        return out.finish().map(|()| None);
    }
    image.refuse_own_file(output)?;
    let new = NewFile::create(output)?;
    let cannot = || format!("cannot write {}", output.display());
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, new.file());
    let report = write(&mut out).map_err(|error| match error {
        ExportError::Write(error) => CommandError::new(cannot()).caused_by(&error),
        _ => export_failure(image, &error),
    })?;
    out.flush().context(cannot)?;
    drop(out);
    progress.phase("syncing");
    new.complete()?;
    Ok(Some(report))
}

/// The trees of an image's layers.
pub struct ImageLayers {
    whole: Filesystem,
    /// The layers of a stack, lowest first; empty for other images.
    stack: Vec<Filesystem>,
    is_layer: bool,
}

impl ImageLayers {
    /// Opens the trees of all layers of a stack, or the one tree of another image.
    pub fn of(image: &OpenImage, metadata: &Value) -> Result<Self, CommandError> {
        Ok(ImageLayers {
            whole: image.tree()?.into_filesystem(),
            stack: layers_of_stack(image, metadata)?,
            is_layer: metadata.get("layer").is_some(),
        })
    }

    /// The layers to write.
    pub fn layers(&self) -> Layers<'_> {
        match (&self.stack[..], self.is_layer) {
            ([], false) => Layers::Flattened(&self.whole),
            ([], true) => Layers::Stack(vec![&self.whole]),
            (stack, _) => Layers::Stack(stack.iter().collect()),
        }
    }
}

fn oci(args: &Args, image: &OpenImage, layout: &Layout, ui: &Ui) -> Result<(), CommandError> {
    let metadata = metadata(image)?;
    image.refuse_as_destination(layout)?;
    let trees = ImageLayers::of(image, &metadata)?;
    let layers = trees.layers();
    let (annotations, left_out) = image.annotations()?;
    let destination = LayoutExport {
        directory: layout.path.clone(),
        form: layout.form.clone(),
        reference: layout.reference.clone(),
        compression: args.compress.unwrap_or_default(),
        annotations,
    };
    let interrupt = Interrupt::catch();
    let options = options(args, &interrupt);
    let progress = ui.progress();
    progress.phase("exporting");
    let report = export_layout(
        &layers,
        metadata.get("config"),
        &destination,
        &options,
        &progress,
    )
    .map_err(|error| export_failure(image, &error))?;
    drop(progress);
    let stored = report.layers.iter().map(|layer| layer.stored_bytes).sum();
    ui.status(format_args!(
        "{}: {} exported, {}, manifest {}",
        layout.without_reference(),
        plural(report.layers.len() as u64, "layer"),
        Human(stored),
        report.manifest
    ));
    note_left_out(&image.path().display(), &left_out, ui);
    Ok(())
}

/// The file systems of a stack's layers, lowest first; empty for other images.
pub fn layers_of_stack(
    image: &OpenImage,
    metadata: &Value,
) -> Result<Vec<Filesystem>, CommandError> {
    // Not a stack: a merged commit, or a single layer, is exported as one tree.
    if metadata.get("commit").is_some() || metadata.get("layer").is_some() {
        return Ok(Vec::new());
    }
    let opened = image.opened();
    let backings: Vec<String> = image
        .image()
        .backings()
        .map(|b| b.name.to_string())
        .collect();
    let layers: Vec<String> = opened
        .layers
        .iter()
        .map(|layer| layer.recorded.digest.to_string())
        .collect();
    // A layer that the metadata does not name would be missing from the new image.
    let described = metadata["layers"].as_array().map_or(0, Vec::len);
    let is_complete = described == layers.len() && backings.iter().all(|b| layers.contains(b));
    if !backings.is_empty() && !is_complete {
        return Err(
            CommandError::new(format!("cannot export {}", image.path().display()))
                .caused_by_text("its metadata does not name all its layers"),
        );
    }
    opened
        .layers
        .iter()
        .map(|layer| {
            // Metadata can list a layer that is no backing, and is not searched for.
            let file = layer.file.as_ref().ok_or_else(|| {
                CommandError::new(format!("cannot export {}", image.path().display()))
                    .caused_by_text(format!("its layer {} was not found", layer.recorded.digest))
            })?;
            Filesystem::open(file.image.clone())
                .context(|| format!("cannot read the file system in {}", file.path.display()))
        })
        .collect()
}

/// The error for a failed export, except for errors of the output.
pub fn export_failure(image: &OpenImage, error: &ExportError) -> CommandError {
    let failure = |path: &[u8], doing: &str| {
        CommandError::new(format!(
            "cannot {doing} {} in {}",
            names::quoted(path),
            image.path().display()
        ))
    };
    match error {
        ExportError::Interrupted => interrupted(),
        ExportError::Read { path, source } => failure(path, "read").caused_by(source),
        ExportError::Unrepresentable { path, problem } => {
            failure(path, "export").caused_by_text(problem)
        }
        ExportError::Layout(error) => convert_failure(error),
        _ => {
            CommandError::new(format!("cannot export {}", image.path().display())).caused_by(error)
        }
    }
}

fn address_space(
    form: &Form,
    image: &OpenImage,
    output: &Path,
    ui: &Ui,
) -> Result<(), CommandError> {
    let end = match form {
        Form::Erofs => erofs_bytes(image)?,
        _ => image.image().size(),
    };
    let interrupt = Interrupt::catch();
    let progress = ui.progress();
    progress.phase("exporting");
    progress.total(Some(end));
    let export = CopyOut {
        device: &**image.image(),
        name: image.path(),
        end,
        interrupt: &interrupt,
        progress: &progress,
    };
    if output == Path::new("-") {
        let mut out = ui.output();
        export.stream(&mut out)?;
        return out.finish();
    }
    image.refuse_own_file(output)?;
    let new = NewFile::create(output)?;
    export.raw(&new, &|| format!("cannot write {}", output.display()))?;
    progress.phase("syncing");
    new.complete()?;
    drop(progress);
    ui.status(format_args!(
        "{}: {} exported",
        output.display(),
        Human(end)
    ));
    Ok(())
}

/// The length of the file system in the address space, in bytes.
fn erofs_bytes(image: &OpenImage) -> Result<u64, CommandError> {
    let tree = image.tree()?;
    let superblock = tree.filesystem().superblock();
    let size = image.image().size();
    if !superblock.devices.is_empty() {
        // The superblock counts only the blocks of the first device; in the address space, the
        // other devices follow it.
        return Ok(size);
    }
    match superblock.blocks.checked_mul(superblock.block_bytes.into()) {
        Some(bytes) if bytes <= size => Ok(bytes),
        _ => Err(CommandError::new(format!(
            "cannot export {}: its EROFS superblock claims {} of {}, the address space has {}",
            image.path().display(),
            plural(superblock.blocks, "block"),
            plural(superblock.block_bytes.into(), "byte"),
            plural(size, "byte")
        ))),
    }
}
