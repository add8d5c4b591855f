//! `bcow convert`

use std::path::PathBuf;

use bcow_convert::{
    BlockSize, CacheReport, Compress, Conversion, ConvertReport, Converted, DiskReport, Encoding,
    parse_block_size, parse_compression,
};
use bcow_images::Name;
use bcow_images::args::{CONVERT_FROM, CONVERT_TO, NameParser};
use bcow_oci::{LayerOrigin, LayoutReport, Limits, Report};

use crate::error::CommandError;
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
///     FILE.tar[.gz|.zst]        the same as tar:FILE
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
    /// dir:PATH, raw:FILE, qcow2:FILE, or a BCoW file
    #[arg(value_name = "SRC", value_parser = NameParser(CONVERT_FROM))]
    source: Name,
    /// What to write: FILE, oci:, oci-archive:, docker:, s3:, raw:, qcow2: or containerd-cache:
    #[arg(value_name = "DST", value_parser = NameParser(CONVERT_TO))]
    destination: Name,
    /// Platform to select from a multi-platform source [default: this machine's]
    #[arg(long, value_name = "OS/ARCH[/VARIANT]")]
    platform: Option<String>,
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
    /// Replace DST even if it is a disk, the backing of a file, not a BCoW file, or in S3
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
}

/// Converts.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let conversion = Conversion {
        source: &args.source,
        destination: &args.destination,
        platform: args.platform.as_deref(),
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
        limits: Limits {
            max_entries: args.max_entries,
            max_ratio: args.max_ratio,
            max_bytes: args.max_size,
        },
        stores: &args.stores,
    };
    let converted = ui.work(|work| conversion.run(work))?;
    if let Some(left_out) = converted.report.left_out() {
        ui.note_left_out(&args.source, left_out);
    }
}

/// An open source.
enum Opened {
    /// An image or a disk in BCoW form.
    Image(Box<OpenImage>),
    /// An ordinary image, an archive or a directory, not opened yet.
    Files(Box<Source>),
    /// A disk in another form, not opened yet.
    ForeignDisk,
}

impl Opened {
    fn content(&self) -> Content {
        match self {
            Opened::Image(image) if image.image().header().purpose == Use::Image => Content::Image,
            Opened::Image(_) | Opened::ForeignDisk => Content::Disk,
            Opened::Files(source) => match **source {
                Source::Tar(_) => Content::Archive,
                Source::Directory(_) => Content::Directory,
                _ => Content::Ordinary,
            },
        }
    }
}

/// Opens the source. An image in a registry may be an ordinary one.
fn open(args: &Args, platform: Option<&Platform>) -> Result<Opened, CommandError> {
    let name = &args.source;
    match (apparent(name), name.registry()) {
        (Apparent::Bcow, None) => {
            require_there(name)?;
            Ok(Opened::Image(OpenImage::open(name, &args.stores)?.into()))
        }
        (Apparent::Bcow, Some(reference)) => {
            let remote = &args.stores.remote;
            match remote::find_in_registry(reference, remote, Pinned::AsAsked, platform)? {
                InRegistry::Bcow(image) => Ok(Opened::Image(
                    OpenImage::of_remote(image, &args.stores)?.into(),
                )),
                InRegistry::Ordinary(_) if remote.root_hash.is_some() => Err(CommandError::usage(
                    format!("--root-hash is for BCoW images, and {name} is an ordinary image"),
                )
                .hint("docker://...@sha256:DIGEST names an ordinary image by its content")),
                InRegistry::Ordinary(image) => Ok(Opened::Files(Source::Registry(image).into())),
            }
        }
        (Apparent::Files(source), _) => Ok(Opened::Files(source)),
        (Apparent::ForeignDisk, _) => Ok(Opened::ForeignDisk),
        (Apparent::NoForm, _) => Err(missing_transport(name)),
    }
}

fn target(args: &Args) -> Target {
    match args.destination.form() {
        NameForm::Layout | NameForm::OciArchive | NameForm::Registry => Target::Layers,
        NameForm::S3 if args.layers => Target::Layers,
        NameForm::ContainerdCache => Target::ContainerdCache,
        NameForm::Raw | NameForm::Qcow2 => Target::Foreign,
        _ if args.as_layer => Target::Layer,
        _ => Target::File,
    }
}

/// Refuses options that the form of the destination excludes.
fn refuse_destination_options(args: &Args) -> Result<(), CommandError> {
    let (form, destination) = (args.destination.form(), &args.destination);
    let refused = |what: &str| CommandError::usage(format!("{what}, and not for {destination}"));
    if args.layers && form != NameForm::S3 {
        return Err(refused("--layers is only for s3://BUCKET/KEY")
            .hint("oci:, oci-archive: and docker: always have one file per layer"));
    }
    if args.as_layer && !matches!(form, NameForm::File | NameForm::Bcow) {
        return Err(refused("--as-layer is only for a file")
            .hint("oci:, oci-archive: and docker: always have one file per layer"));
    }
    if args.referrer && form != NameForm::Registry {
        return Err(refused("--referrer is only for an image in a registry")
            .hint("write to docker://HOST/REPO, the repository of the ordinary image"));
    }
    if args.writable && form == NameForm::S3 {
        return Err(refused("--writable is only for a file")
            .hint("make a disk over a sealed one: `bcow create -b s3://BUCKET/KEY NEW.bcow`"));
    }
    Ok(())
}

/// An option, whether it is given, the ways that it applies to, and a noun phrase for them.
struct OptionRule(
    &'static str,
    fn(&Args) -> bool,
    &'static [Way],
    &'static str,
);

const OF_FILES: &[Way] = &[Way::Flatten, Way::Split, Way::SplitForContainerd];
const OF_IMAGES: &[Way] = &[
    Way::Flatten,
    Way::Layer,
    Way::Split,
    Way::SplitForContainerd,
    Way::Recode,
    Way::RecodeLayers,
];
const TO_LAYERS: &[Way] = &[Way::Split, Way::SplitForContainerd, Way::RecodeLayers];
const TO_LAYOUT: &[Way] = &[Way::Split, Way::RecodeLayers];
/// A layer for containerd has no prefetch list.
const WITH_LIST: &[Way] = &[Way::Flatten, Way::Split, Way::Recode, Way::RecodeLayers];

const OPTION_RULES: [OptionRule; 8] = [
    OptionRule(
        "--platform",
        |args| args.platform.is_some(),
        OF_FILES,
        "ordinary images",
    ),
    OptionRule("--writable", |args| args.writable, &[Way::Disk], "disks"),
    OptionRule("--cache", |args| args.cache.is_some(), TO_LAYERS, "layers"),
    OptionRule(
        "--dedup-lower",
        |args| args.dedup_lower,
        TO_LAYOUT,
        "layers in an OCI layout",
    ),
    OptionRule(
        "--prefetch",
        |args| args.prefetch.is_some(),
        WITH_LIST,
        "images",
    ),
    OptionRule("--plain", |args| args.plain, OF_IMAGES, "images"),
    OptionRule(
        "--allow-truncated",
        |args| args.allow_truncated,
        OF_IMAGES,
        "images",
    ),
    OptionRule("--as-files", |args| args.as_files, OF_IMAGES, "images"),
];

/// Refuses options that do not apply to a way.
fn refuse_options(args: &Args, way: Way) -> Result<(), CommandError> {
    let (source, destination) = (&args.source, &args.destination);
    // In a registry, --platform has selected one of several images.
    let is_selected =
        source.form() == NameForm::Registry && matches!(way, Way::Recode | Way::RecodeLayers);
    for OptionRule(option, is_given, ways, only) in OPTION_RULES {
        let applies = ways.contains(&way) || (is_selected && option == "--platform");
        if is_given(args) && !applies {
            return Err(CommandError::usage(format!(
                "{option} is only for {only}, and not for {source} to {destination}"
            ))
            .hint(format!(
                "leave out {option}; `bcow help convert` says what it is for"
            )));
        }
    }
    Ok(())
}

/// Fails if the file or directory of a source is missing.
fn require_there(source: &Name) -> Result<(), CommandError> {
    let path = match source.parts() {
        NameParts::Layout {
            directory: path, ..
        }
        | NameParts::OciArchive { file: path, .. }
        | NameParts::DockerArchive { file: path, .. }
        | NameParts::Tar(Some(path))
        | NameParts::Directory(path)
        | NameParts::Raw(path)
        | NameParts::Qcow2(path)
        | NameParts::File(path)
        | NameParts::Bcow(path) => path,
        _ => return Ok(()),
    };
    match std::fs::metadata(path) {
        Err(error) => Err(missing(source, &error)),
        Ok(_) => Ok(()),
    }
}

fn missing(source: &Name, error: &std::io::Error) -> CommandError {
    let failure = CommandError::new(format!("cannot open {source}")).caused_by(error);
    failure.hint(match source.form() {
        NameForm::File => format!("sources are {}", spellings(CONVERT_FROM.forms)),
        _ => "`bcow help convert` lists the forms of sources".to_owned(),
    })
}

/// A conversion of an image.
struct Conversion<'a> {
    args: &'a Args,
    options: ConvertOptions,
    sending: Option<Sending>,
    interrupt: Interrupt,
    ui: &'a Ui,
}

impl Conversion<'_> {
    fn to_file(&self, source: &Opened, path: &Path) -> Result<(), CommandError> {
        let report = match source {
            Opened::Image(image) => recode::to_file(image, path, &self.options, self.ui)?,
            Opened::Files(source) => {
                let convert =
                    if self.args.as_layer { bcow_oci::convert_layer } else { bcow_oci::convert };
                convert(source, path, &self.options, &self.ui.progress())
                    .map_err(|error| failure(&error))?
            }
            Opened::ForeignDisk => return Err(self.no_way(source)),
        };
        if let Some(sending) = &self.sending {
            sending.send_file(path, &self.ui.progress(), &self.interrupt)?;
        }
        note_left_out(&self.args.source, &report.left_out, self.ui);
        report_image(self.args, &report, path, &self.sending, self.ui)
    }

    fn to_layout(&self, source: &Opened, to: &Layout) -> Result<(), CommandError> {
        let (args, options, ui) = (self.args, &self.options, self.ui);
        let layout = LayoutOptions {
            directory: to.path.clone(),
            form: to.form.clone(),
            reference: to.reference.clone(),
            is_referrer: args.referrer,
            cache: args.cache.clone(),
            dedup_lower: args.dedup_lower,
        };
        let mut report = match source {
            Opened::Image(image) => recode::to_layout(image, to, &layout, options, ui)?,
            Opened::Files(source) => {
                bcow_oci::convert_to_layout(source, &layout, options, &ui.progress())
                    .map_err(|error| failure(&error))?
            }
            Opened::ForeignDisk => return Err(self.no_way(source)),
        };
        let shown = match &self.sending {
            Some(sending) => {
                let left_out = sending.send_layout(to, &self.interrupt, ui)?;
                report.left_out.annotations = left_out.annotations;
                sending.place.name()
            }
            None => to.shown(),
        };
        note_left_out(&args.source, &report.left_out, ui);
        if args.json {
            return ui.print_json(&as_json("bcow.convert-layout/1", &report)?);
        }
        report_layout(&report, &shown, ui)
    }

    fn no_way(&self, source: &Opened) -> CommandError {
        let (from, to) = (&self.args.source, &self.args.destination);
        no_way(source.content(), target(self.args), from, to).into()
    }
}

/// What is sent to S3 when it is complete: a file, or a layout with one image.
struct Sending {
    place: ToS3,
    directory: tempfile::TempDir,
}

impl Sending {
    fn new(name: S3Name, args: &Args) -> Result<Self, CommandError> {
        let replace = if args.force { Replace::Allowed } else { Replace::Refused };
        let place = ToS3::new(name, &args.stores.remote, replace)?;
        let scratch = remote::scratch();
        let cannot = || format!("cannot make a directory in {}", scratch.display());
        let directory = tempfile::Builder::new()
            .prefix(remote::SCRATCH_NAME)
            .tempdir_in(&scratch)
            .context(cannot)?;
        Ok(Sending { place, directory })
    }

    /// What is written first, in a directory of its own.
    fn destination(&self, in_layers: bool) -> Destination {
        if !in_layers {
            Destination::File(self.directory.path().join("image.bcow"))
        } else {
            Destination::Layout(Layout {
                form: LayoutForm::Directory,
                path: self.directory.path().join("layout"),
                reference: None,
            })
        }
    }

    /// Sends the file at `path`.
    fn send_file(
        &self,
        path: &Path,
        progress: &Progress<'_>,
        interrupt: &Interrupt,
    ) -> Result<(), CommandError> {
        let cannot = || format!("cannot read {}", path.display());
        let file = File::open(path).context(cannot)?;
        self.place.send(&file, progress, &interrupt.flag())?;
        Ok(())
    }

    /// Sends the files of the image of the layout, without the manifest. Returns the parts of the
    /// image that are not sent.
    fn send_layout(
        &self,
        layout: &Layout,
        interrupt: &Interrupt,
        ui: &Ui,
    ) -> Result<LeftOut, CommandError> {
        let written = Source::Oci {
            directory: layout.path.clone(),
            reference: None,
        };
        let progress = ui.progress();
        let cancel = interrupt.flag();
        let image = CopyImage::of_layout(&written, &layout.path, &progress, Some(&cancel));
        let image = image.map_err(|error| failure(&error))?;
        self.place.send_image(image.files(), &progress, &cancel)?;
        image.left_out_of_files().map_err(|error| failure(&error))
    }
}

/// Reads a trace of `bcow mount --record`.
fn read_trace(path: &Path) -> Result<Prefetch, CommandError> {
    let cannot = || format!("cannot read {}", path.display());
    let mut text = Vec::new();
    let file = File::open(path).context(cannot)?;
    let limit = MAX_TRACE_BYTES + 1;
    file.take(limit).read_to_end(&mut text).context(cannot)?;
    if text.len() as u64 == limit {
        return Err(CommandError::new(cannot())
            .caused_by_text(format!("it is longer than {}", Human(MAX_TRACE_BYTES))));
    }
    Prefetch::parse(&text).context(cannot)
}

fn platform(args: &Args) -> Result<Option<Platform>, CommandError> {
    let given = args.platform.as_deref().map(str::parse::<Platform>);
    given.transpose().map_err(|error| failure(&error.into()))
}

/// The error for a source without a transport. The guess of the form is only for the hint.
fn missing_transport(source: &Name) -> CommandError {
    let path = source.shown();
    let text = path.display();
    let meant = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            if path.join("oci-layout").is_file() {
                format!("oci:{text}")
            } else {
                format!("dir:{text}, or oci:{text} for an OCI layout")
            }
        }
        Ok(_) => match foreign_format::detect(path) {
            Some(ForeignFormat::Archive) => format!(
                "tar:{text}, or for an image in an archive docker-archive:{text} or \
                 oci-archive:{text}"
            ),
            Some(ForeignFormat::Qcow2) => format!("qcow2:{text}"),
            Some(ForeignFormat::OtherDisk(format)) => {
                return CommandError::usage(format!("invalid source \"{text}\": a {format} disk"))
                    .hint(foreign_format::other_disk_hint(format, path));
            }
            _ => format!("raw:{text}"),
        },
        Err(error) => return missing(source, &error),
    };
    CommandError::usage(format!("invalid source \"{text}\": missing transport"))
        .hint(format!("did you mean {meant}?"))
}

pub fn as_json(schema: &str, report: &impl Serialize) -> Result<Value, CommandError> {
    let mut object = serde_json::Map::new();
    object.insert("schema".into(), schema.into());
    match serde_json::to_value(report) {
        Ok(mut fields @ Value::Object(_)) => {
            // As `bcow inspect` writes it.
            for holder in ["/merkle_root", "/stack/merkle_root"] {
                if let Some(root) = fields.pointer_mut(holder)
                    && let Some(hex) = root.as_str()
                {
                    *root = format!("sha256:{hex}").into();
                }
            }
            if let Value::Object(fields) = fields {
                object.extend(fields);
            }
        }
        Ok(_) => return Err(CommandError::new("the report is no JSON object")),
        Err(error) => return Err(CommandError::new("cannot write the report").caused_by(&error)),
    }
    Ok(Value::Object(object))
}

fn report_image(
    args: &Args,
    report: &Report,
    path: &Path,
    sending: &Option<Sending>,
    ui: &Ui,
) -> Result<(), CommandError> {
    if args.json {
        return ui.print_json(&converted);
    }
    let Converted { name, report } = &converted;
    let mut out = ui.output();
    match report {
        ConvertReport::Image(report) => print_image(name, report, &mut out)?,
        ConvertReport::Layout(report) => print_layout(name, report, &mut out)?,
        ConvertReport::Disk(report) => print_disk(name, report, &mut out)?,
        ConvertReport::ContainerdCache(report) => show_cache(name, report, ui),
    }
    out.finish()
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
