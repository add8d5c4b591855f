//! `bcow convert`

use std::path::PathBuf;

use bcow::chain::directory_of;
use bcow_convert::{
    BlockSize, CacheReport, Compress, Conversion, ConvertReport, Converted, DiskReport, Encoding,
    parse_block_size, parse_compression,
};
use bcow_images::args::{CONVERT_FROM, CONVERT_TO, NameParser};
use bcow_images::sandbox::{self, SandboxArgs};
use bcow_images::{Apparent, Name, NameForm, NameParts, apparent, remote};
use bcow_oci::{
    Attestations, IndexReport, LayerOrigin, LayoutReport, Limits, Platform, Report, Source,
};
use bcow_sandbox::{Access, CapabilitySet};

use crate::error::CommandError;
use crate::foreign_words::in_format;
use crate::image::StoreArgs;
use crate::size::{self, Human, plural};
use crate::ui::{Output, Ui};

/// Largest limit of entries. Numbers of entries have 32 bits.
const MAX_ENTRIES: u64 = 1 << 31;

/// Make an image from a container image, an archive or a directory, or convert a disk
///
/// SRC is one of
///
///     oci:DIR[:REF]             an OCI image layout
///     oci-archive:FILE[:REF]    an OCI image layout in a tar archive
///     docker-archive:FILE[:REF] the output of `docker save` or `podman save`
///     tar:FILE                  a root file system or a layer; tar:- is standard input
///     dir:PATH                  a root file system in a directory
///     FILE, -                   an archive in the form of its content; - is standard input
///     raw:FILE  qcow2:FILE      a disk: the bytes of a file or block device, or a qcow2 image
///     FILE, bcow:FILE           a BCoW image or disk; a stack of layers is oci:DIR[:REF]
///     https://HOST/PATH         a BCoW image on a web server
///     s3://BUCKET/KEY           a BCoW image in S3
///     docker://HOST/REPO[:TAG]  an image in a registry, in any form
///
/// Archives and layers may be compressed with gzip or zstd. DST is one of
///
///     FILE.bcow                 one file: an image with all layers flattened, or a disk
///     oci:DIR[:REF]             an image in an OCI layout: one .bcow file per layer, which other
///                               images can share, and a stack file that merges the layers
///     oci-archive:FILE[:REF]    such a layout in a tar archive
///     docker://HOST/REPO[:TAG]  such an image in a registry
///     s3://BUCKET/KEY           one file in S3; with --layers, one file per layer
///     containerd-cache:DIR      the layers of an ordinary image as files that the erofs
///                               snapshotter of containerd 2.4 mounts
///     raw:FILE  qcow2:FILE      a disk for other programs, with the data of SRC and its backings;
///                               SRC is a disk, or any BCoW image (FILE, oci:DIR[:REF])
///     FILE.qcow2                the same as qcow2:FILE; FILE.raw and FILE.img are raw:FILE
///
/// The text before the first colon of SRC or DST is a transport if it begins with a letter and has
/// only lower-case letters, digits and hyphens. If the name of a file begins in this way, write
/// ./NAME or bcow:NAME. A name whose ending promises a form that bcow does not write, such as
/// .vmdk, .iso or .tar, is refused; bcow:NAME is a BCoW file of any name.
///
/// A disk made from raw: or qcow2: is sealed: compressed, checksummed and immutable. With
/// --writable, it is a writable disk. A raw or qcow2 SRC needs its prefix, because bcow does not
/// detect these formats.
///
/// The command needs no privilege, no daemon and no loop device. It uses the network only for
/// https:, docker: and s3:. It verifies each layer against its digest as it reads the layer. Into
/// an OCI layout, it converts only layers that are neither in the layout nor in the cache. Into a
/// registry, it sends only what the registry does not have.
///
/// The same input, options and version of bcow give the same bytes. DST gets its name when it is
/// complete; a BCoW file is read back and verified first. Without --force, a BCoW image replaces
/// only an empty file or a BCoW image that is not the backing of a file in the same directory, an
/// OCI archive replaces only an empty file or an archive, and a file in S3 replaces nothing. If the
/// command fails, no partial output remains.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
#[command(after_long_help = format!("What converts to what:\n{}", bcow_images::table()))]
pub struct Args {
    /// What to convert: an image (oci:, oci-archive:, docker-archive:, docker://...), tar:FILE,
    /// dir:PATH, raw:FILE, qcow2:FILE, a BCoW file, or an archive (- is standard input)
    #[arg(value_name = "SRC", value_parser = NameParser(CONVERT_FROM))]
    source: Name,
    /// What to write: FILE, oci:, oci-archive:, docker:, s3:, raw:, qcow2: or containerd-cache:
    #[arg(value_name = "DST", value_parser = NameParser(CONVERT_TO))]
    destination: Name,
    /// The format of SRC, as with `qemu-img convert -f`
    #[arg(long, value_name = "FORMAT", hide = true)]
    from_format: Option<String>,
    /// The format of DST, as with `qemu-img convert -O`
    #[arg(short = 'O', value_name = "FORMAT", hide = true)]
    to_format: Option<String>,
    /// Platform of the image to convert [default: this machine's]; `all`, or several separated by
    /// commas, make an index
    #[arg(long, value_name = "OS/ARCH[/VARIANT]")]
    platform: Option<String>,
    /// What becomes of the attestations of the images of an index: keep (copy them as they are) or
    /// drop [default: keep]
    #[arg(long, value_name = "WHAT", value_parser = parse_attestations, hide_short_help = true)]
    attestations: Option<Attestations>,
    /// Compression of blocks: zstd[:LEVEL] or none; for qcow2 also zlib [default: zstd:3; none with
    /// --writable and for qcow2]
    #[arg(long, value_name = "HOW", value_parser = parse_compression)]
    compress: Option<Compress>,
    /// Store every block uncompressed at its own offset, so that the kernel can mount the file
    /// directly
    #[arg(long)]
    plain: bool,
    /// Block size: auto, or a power of two from 4K to 4M
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = parse_block_size)]
    block_size: BlockSize,
    /// Threads that compress [default: one for each CPU]; the output does not depend on N
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Make a writable disk
    #[arg(long)]
    writable: bool,
    /// Cache converted layers in DIR and reuse them (not if DST is a single .bcow file)
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Refer to content of lower layers instead of storing it again; a layer then works only over
    /// the same lower layers (only for oci:, oci-archive:, docker:, and s3: with --layers)
    #[arg(long)]
    dedup_lower: bool,
    /// Store the files that TRACE lists before all other files, and record in the image which parts
    /// of them TRACE lists. A mount that reads the image over the network fetches these parts
    /// first. `bcow mount --record` writes TRACE, for example during the start of a container. In
    /// an image in layers, the order of the files does not change
    #[arg(long, value_name = "TRACE", value_hint = clap::ValueHint::FilePath)]
    #[arg(hide_short_help = true)]
    prefetch: Option<PathBuf>,
    /// Attach the new image to SRC as an OCI referrer, in the repository of DST, which must contain
    /// SRC. Commands that open SRC there by its tag then use the new image, except `bcow convert`
    /// and `bcow copy`
    #[arg(long, hide_short_help = true)]
    referrer: bool,
    /// Replace DST even if it is a disk, the backing of a file, not a BCoW file, in S3, or an index
    #[arg(short, long)]
    force: bool,
    /// Accept a tar archive without an end-of-archive marker, which may be truncated between two
    /// entries
    #[arg(long)]
    allow_truncated: bool,
    /// Accept a docker archive or OCI layout given as tar: or dir:, and take its files as a root
    /// file system
    #[arg(long)]
    as_files: bool,
    /// Write one file per layer to S3, and the stack file that merges the layers
    #[arg(long, hide_short_help = true)]
    layers: bool,
    /// Write SRC, the archive of one layer, as a layer, with its whiteouts: it shows its files over
    /// the layers on which it is mounted (`bcow mount LOWEST LAYER DIR`)
    #[arg(long, hide_short_help = true)]
    as_layer: bool,
    /// Do not read back and verify DST before it gets its name
    #[arg(long)]
    no_verify: bool,
    /// Refuse a source with more entries
    #[arg(
        long,
        value_name = "N",
        default_value_t = Limits::default().max_entries,
        value_parser = clap::value_parser!(u64).range(..=MAX_ENTRIES),
        help_heading = "Limits"
    )]
    max_entries: u64,
    /// Refuse a layer that is larger than 4 GiB and more than N times its compressed size
    #[arg(
        long,
        value_name = "N",
        default_value_t = Limits::default().max_ratio,
        help_heading = "Limits"
    )]
    max_ratio: u64,
    /// Refuse a source with more uncompressed bytes; holes of sparse files count
    #[arg(
        long,
        alias = "max-bytes",
        value_name = "SIZE",
        default_value = "1T",
        value_parser = size::parse,
        help_heading = "Limits"
    )]
    max_size: u64,
    /// Print a summary as JSON (schema bcow.convert/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

/// Converts.
impl Args {
    /// Whether converted layers are kept for the next conversion.
    pub fn has_cache(&self) -> bool {
        self.cache.is_some()
    }
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let source = &in_format(&args.source, args.from_format.as_deref(), &CONVERT_FROM)?;
    let destination = &in_format(&args.destination, args.to_format.as_deref(), &CONVERT_TO)?;
    let conversion = Conversion {
        source,
        destination,
        platform: args.platform.as_deref(),
        attestations: args.attestations,
        encoding: Encoding {
            compress: args.compress,
            block_bytes: args.block_size.0,
            jobs: args.jobs.map(usize::from),
            verify: !args.no_verify,
        },
        plain: args.plain,
        writable: args.writable,
        cache: args.cache.as_deref(),
        dedup_lower: args.dedup_lower,
        prefetch: args.prefetch.as_deref(),
        referrer: args.referrer,
        force: args.force,
        allow_truncated: args.allow_truncated,
        as_files: args.as_files,
        layers: args.layers,
        as_layer: args.as_layer,
        limits: Limits {
            max_entries: args.max_entries,
            max_ratio: args.max_ratio,
            max_bytes: args.max_size,
        },
        stores: &args.stores,
    };
    enter_sandbox(args, source, destination)?;
    let converted = ui.work(|work| conversion.run(work))?;
    if let Some(left_out) = converted.report.left_out() {
        ui.note_left_out(source, left_out);
    }
    if args.json {
        return ui.print_json(&converted);
    }
    let Converted { name, report } = &converted;
    let mut out = ui.output();
    match report {
        ConvertReport::Image(report) => print_image(name, report, &mut out)?,
        ConvertReport::Layout(report) => print_layout(name, report, &mut out)?,
        ConvertReport::Index(report) => print_index(name, report, &mut out)?,
        ConvertReport::Disk(report) => print_disk(name, report, &mut out)?,
        ConvertReport::ContainerdCache(report) => show_cache(name, report, ui),
    }
    out.finish()
}

/// Before the first thread. The process can read all files, because the source names others, and
/// changes those in the directory of the destination.
fn enter_sandbox(args: &Args, source: &Name, destination: &Name) -> Result<(), CommandError> {
    let without = |reason| args.sandbox.without(reason).map(drop);
    let path = match destination.parts() {
        NameParts::File(path) | NameParts::Bcow(path) => path,
        NameParts::Raw(path) | NameParts::Qcow2(path) => path,
        _ => return without("the destination is not a file"),
    };
    if source.form() == NameForm::Directory {
        // It can have attributes that only root reads.
        return without("the source is a directory");
    }
    let images = [source, destination];
    let mut sandbox = args.sandbox.begin_to_open_later(images, &args.stores)?;
    let mut paths = vec![
        (PathBuf::from("/"), Access::Read),
        (directory_of(path), Access::Write),
    ];
    // An archive that is compressed as a whole becomes a file there.
    let temporary = Some(std::env::temp_dir()).filter(|directory| directory.is_dir());
    paths.extend(temporary.map(|directory| (directory, Access::Write)));
    let is_archive = matches!(apparent(source), Apparent::Files(kind)
        if !matches!(*kind, Source::Oci { .. } | Source::Tar(_)));
    if is_archive || source.is_remote() {
        // What is in a compressed archive, or on a mirror, goes to a file without a name.
        paths.push((remote::scratch(), Access::Write));
    }
    if !args.sandbox.is_off() {
        paths.extend(sandbox::views_of(source));
    }
    let capabilities = CapabilitySet::DAC_OVERRIDE | CapabilitySet::SYS_RESOURCE;
    sandbox::complete(&mut sandbox, &args.stores, &paths, capabilities)
}

fn print_image(name: &str, report: &Report, out: &mut Output) -> Result<(), CommandError> {
    let layers = plural(report.layers.len() as u64, "layer");
    let saved = match report.deduplicated_bytes {
        0 => String::new(),
        bytes => format!(" ({} of it deduplicated)", Human(bytes)),
    };
    writeln!(
        out,
        "{name}: {layers}, {}, {} of file content{saved}, {} on disk{}",
        plural(report.entries, "entry"),
        Human(report.content_bytes),
        Human(report.file_bytes),
        verified(report.verified)
    )
}

fn verified(is_verified: bool) -> &'static str {
    if is_verified { ", verified" } else { "" }
}

fn print_layout(name: &str, report: &LayoutReport, out: &mut Output) -> Result<(), CommandError> {
    for (i, layer) in report.layers.iter().enumerate() {
        let made = match layer.made {
            LayerOrigin::Cache => ", from the cache",
            LayerOrigin::Layout => ", there already",
            _ => "",
        };
        let lower = match layer.lower_bytes {
            0 => String::new(),
            bytes => format!(", {} of its content in lower layers", Human(bytes)),
        };
        writeln!(
            out,
            "layer {}: {}, {}, {} of file content{lower}{made}",
            i + 1,
            Human(layer.file_bytes),
            plural(layer.entries, "entry"),
            Human(layer.content_bytes),
        )?;
    }
    let layers = plural(report.layers.len() as u64, "layer");
    let bytes: u64 = report.layers.iter().map(|layer| layer.file_bytes).sum();
    writeln!(
        out,
        "{name}: {layers} of {} in all, a stack of {} with {}{}",
        Human(bytes),
        Human(report.stack.file_bytes),
        plural(report.stack.entries, "entry"),
        verified(report.verified)
    )
}

fn print_index(name: &str, report: &IndexReport, out: &mut Output) -> Result<(), CommandError> {
    for image in &report.images {
        let platform = image.platform.as_ref();
        let platform = platform.map_or_else(|| image.manifest.to_string(), Platform::to_string);
        print_layout(&platform, image, out)?;
    }
    let attestations = match report.attestations {
        0 => String::new(),
        count => format!(", {}", plural(count, "attestation")),
    };
    let images = plural(report.images.len() as u64, "image");
    writeln!(out, "{name}: an index of {images}{attestations}")
}

fn parse_attestations(text: &str) -> Result<Attestations, String> {
    match text {
        "keep" => Ok(Attestations::Keep),
        "drop" => Ok(Attestations::Drop),
        _ => Err("use keep or drop".to_owned()),
    }
}

fn print_disk(name: &str, report: &DiskReport, out: &mut Output) -> Result<(), CommandError> {
    let (kind, is_verified) = match &report.bcow {
        None => ("", false),
        Some(disk) if disk.sealed => ("sealed ", disk.verified),
        Some(disk) => ("writable ", disk.verified),
    };
    writeln!(
        out,
        "{name}: {kind}disk of {} ({}), file of {}{}",
        Human(report.size),
        plural(report.size, "byte"),
        Human(report.file_bytes),
        verified(is_verified)
    )
}

fn show_cache(name: &str, report: &CacheReport, ui: &Ui) {
    let layers = &report.layers;
    let bytes = layers.iter().map(|layer| layer.file_bytes).sum();
    let new = layers.iter().filter(|layer| layer.is_new).count();
    ui.status(format_args!(
        "{name}: {} of {} in all, {new} new",
        plural(layers.len() as u64, "layer"),
        Human(bytes),
    ));
}
