//! `bcow inspect`

mod disk;
mod resolve;
mod stack;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;

use bcow::format::{BackingEntry, SECTOR_BYTES, State, Use, hex};
use bcow::{Extent, Image, Mapping};
use bcow_erofs::reader::Superblock;
use serde::{Serialize, Serializer};
use serde_json::Value;

use self::disk::DiskFacts;
use self::stack::Stack;
use crate::error::CommandError;
use crate::image::{LayerArgs, OpenImage, StoreArgs};
use crate::names::printable;
use crate::prefetch::Shown;
use crate::size::{Count, Human, plural};
use crate::stat::full_time;
use crate::ui::{Output, Ui};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};

/// Show the properties of an image or a disk, and how it is stored
///
/// The command shows the format version and features, geometry, block sizes, the compression of
/// content and metadata, the source of the image with its layers, and properties of the file
/// system. It reads the tables, but not the data.
///
/// For a stack, the command also shows each layer: the size of its file; the names and bytes that
/// it adds to the merged tree; what it hides of the layers below; what the layers above hide of it;
/// and the size of the content of lower layers to which it refers.
///
/// For a disk, the command shows its chain of backings. For a writable disk, it also shows the
/// layout, the record log, the free space in the file, and the process that is writing to the disk
/// (with --force-share).
///
/// JSON has the same data and the OCI configuration (`.metadata.config`). Later versions may add
/// fields, but never move them. Sizes are in bytes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The image or disk: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    image: Name,
    /// Print JSON (schema bcow.inspect/1)
    #[arg(long)]
    json: bool,
    /// Print only a shell command for root that mounts a plain image (`bcow convert --plain`) on
    /// DIR without a process of bcow [default DIR: /mnt]
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "/mnt", conflicts_with = "json")]
    #[arg(value_hint = clap::ValueHint::DirPath)]
    mount_command: Option<PathBuf>,
    /// For a name in a registry: print only the name, with a digest, of the image in BCoW form that
    /// bcow opens for it; with --json, also the layers of that image (schema bcow.resolve/1)
    #[arg(long, conflicts_with = "mount_command")]
    resolve: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Inspects. For a damaged image, shows the readable part, and then fails.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    if args.resolve {
        return resolve::run(args, ui);
    }
    let image =
        OpenImage::open_without_content(&args.image, &LayerArgs::default(), &args.stores, ui)?;
    if let Some(directory) = &args.mount_command {
        return stack::print_mount_command(&image, directory, ui);
    }
    let shown = image.path().display();
    let mut failure = None;
    let mut note = |what: &str, error: &(dyn std::error::Error + 'static)| {
        failure.get_or_insert_with(|| {
            CommandError::new(format!("cannot read the {what} of {shown}"))
                .caused_by(error)
                .hint(format!("`bcow fsck {shown}` lists all damage"))
        });
    };
    let metadata = image.image().metadata().unwrap_or_else(|error| {
        note("metadata", &error);
        Value::Null
    });
    let metadata_start = metadata["content"]["metadata_start"].as_u64();
    let (storage, error) = Storage::measure(image.image(), metadata_start);
    if let Some(error) = error {
        note("map", &error);
    }
    let prefetch = PrefetchFacts::of(&image, &metadata).unwrap_or_else(|error| {
        note("list of what a start reads", &error);
        None
    });
    let disk = DiskFacts::of(&image);
    let erofs = match bcow_erofs::reader::Filesystem::open(image.image().clone()) {
        Ok(filesystem) => Some(Erofs::of(filesystem.superblock())),
        // A disk has any content.
        Err(_) if disk.is_some() => None,
        Err(error) => {
            note("file system", &error);
            None
        }
    };
    let (stack, stack_failure) = if image.opened().is_stack() {
        let (stack, failure) = Stack::examine(image.opened(), &metadata);
        (Some(stack), failure)
    } else {
        (None, None)
    };
    let facts = Facts {
        disk,
        stack,
        erofs,
        prefetch,
        metadata,
        ..Facts::of(&image, storage)
    };
    if args.json {
        ui.print_json(&facts)?;
    } else {
        let mut out = ui.output();
        facts.print(&mut out)?;
        out.finish()?;
    }
    match failure.or(stack_failure) {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}

/// The result of the command.
#[derive(Serialize)]
struct Facts {
    #[serde(skip)]
    name: String,
    schema: &'static str,
    format: Format,
    geometry: Geometry,
    storage: Storage,
    merkle: Option<Merkle>,
    backings: Vec<Backing>,
    disk: Option<DiskFacts>,
    stack: Option<Stack>,
    erofs: Option<Erofs>,
    prefetch: Option<PrefetchFacts>,
    metadata: Value,
}

#[derive(Serialize)]
struct Format {
    version: u32,
    #[serde(rename = "use")]
    purpose: &'static str,
    sealed: bool,
    generation: u64,
    features: Vec<String>,
    feature_masks: FeatureMasks,
}

#[derive(Serialize)]
struct FeatureMasks {
    incompatible: u64,
    read_only_compatible: u64,
    compatible: u64,
}

#[derive(Serialize)]
struct Geometry {
    size: u64,
    file_bytes: u64,
    region_bytes: u64,
    regions: u64,
}

/// How the parts of the address space are stored.
#[derive(Default, Serialize)]
struct Storage {
    /// Content of files; the largest part of most images.
    content: Class,
    /// Inodes, directories, names and small files.
    metadata: Class,
    root_table_bytes: u32,
    json_bytes: u32,
    backing_table_bytes: u32,
    merkle_tree_bytes: u64,
}

#[derive(Default, Serialize)]
struct Class {
    bytes: u64,
    zero_bytes: u64,
    /// Bytes in other files, in addition to `bytes`.
    backing_bytes: u64,
    stored_bytes: u64,
    raw_blocks: u64,
    zstd_blocks: u64,
    #[serde(serialize_with = "values")]
    block_sizes: BTreeMap<u64, BlockSize>,
}

#[derive(Default, Serialize)]
struct BlockSize {
    block_bytes: u64,
    blocks: u64,
    stored_bytes: u64,
}

fn values<S: Serializer>(map: &BTreeMap<u64, BlockSize>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(map.values())
}

#[derive(Serialize)]
struct Merkle {
    root: String,
    chunk_bytes: u64,
}

#[derive(Serialize)]
struct Backing {
    name: String,
    size: u64,
}

#[derive(Serialize)]
struct Erofs {
    block_bytes: u32,
    blocks: u64,
    inodes: u64,
    features: Vec<String>,
    uuid: String,
    volume_name: String,
    build_time: String,
}

impl Erofs {
    fn of(superblock: &Superblock) -> Self {
        Erofs {
            block_bytes: superblock.block_bytes,
            blocks: superblock.blocks,
            inodes: superblock.inodes,
            features: superblock.features(),
            uuid: uuid(&superblock.uuid),
            volume_name: String::from_utf8_lossy(&superblock.volume_name).into_owned(),
            build_time: full_time(superblock.build_time),
        }
    }
}

impl Class {
    fn add(&mut self, extent: &Extent) {
        if let Mapping::Backing { .. } = extent.mapping {
            self.backing_bytes += extent.length;
            return;
        }
        self.bytes += extent.length;
        let stored = match extent.mapping {
            Mapping::Raw { stored } | Mapping::Open { stored } => {
                self.raw_blocks += 1;
                stored
            }
            Mapping::Compressed { stored } => {
                self.zstd_blocks += 1;
                stored
            }
            Mapping::Zero | Mapping::Hole | Mapping::Backing { .. } => {
                self.zero_bytes += extent.length;
                return;
            }
        };
        self.stored_bytes += u64::from(stored.bytes);
        // The last block of a region may be shorter; it counts as a whole one.
        let block_bytes = extent.length.next_power_of_two();
        let size = self.block_sizes.entry(block_bytes).or_default();
        size.block_bytes = block_bytes;
        size.blocks += 1;
        size.stored_bytes += u64::from(stored.bytes);
    }

    /// Bytes that are stored, before compression.
    fn kept_bytes(&self) -> u64 {
        self.bytes - self.zero_bytes
    }

    fn ratio(&self) -> Option<f64> {
        (self.stored_bytes > 0).then(|| self.kept_bytes() as f64 / self.stored_bytes as f64)
    }
}

impl Storage {
    /// Walks the map; after an error, the result covers the part before the error.
    fn measure(image: &Image, metadata_start: Option<u64>) -> (Storage, Option<bcow::Error>) {
        // Without content, the block of the superblock holds metadata too.
        let metadata_start = metadata_start.map(|start| match start {
            SECTOR_BYTES => 0,
            start => start,
        });
        let header = image.header();
        let mut storage = Storage {
            root_table_bytes: header.root.bytes,
            json_bytes: header.metadata.bytes,
            backing_table_bytes: header.backings.bytes,
            merkle_tree_bytes: header
                .merkle
                .as_ref()
                .map_or(0, |tree| header.file_bytes.saturating_sub(tree.offset)),
            ..Storage::default()
        };
        for extent in image.extents() {
            match extent {
                Ok(extent) if metadata_start.is_some_and(|start| extent.offset >= start) => {
                    storage.metadata.add(&extent);
                }
                Ok(extent) => storage.content.add(&extent),
                Err(error) => return (storage, Some(error)),
            }
        }
        (storage, None)
    }
}

/// The list of what a start reads.
#[derive(Serialize)]
struct PrefetchFacts {
    ranges: usize,
    /// In the address space.
    bytes: u64,
    /// Of blocks in files, each once.
    stored_bytes: u64,
}

impl PrefetchFacts {
    fn of(image: &OpenImage, metadata: &Value) -> Result<Option<Self>, bcow::Error> {
        let Some(list) = Shown::by(image).list(metadata) else {
            return Ok(None);
        };
        let mut stored_bytes = 0;
        list.blocks(&mut |_, stored| stored_bytes += u64::from(stored.bytes))?;
        Ok(Some(PrefetchFacts {
            ranges: list.ranges(),
            bytes: list.bytes(),
            stored_bytes,
        }))
    }
}

impl Facts {
    /// What the header says, and how the file is stored.
    fn of(image: &OpenImage, storage: Storage) -> Self {
        let header = image.image().header();
        let features = &header.features;
        let backing = |entry: &BackingEntry| Backing {
            name: entry.name.to_string(),
            size: entry.size,
        };
        Facts {
            name: image.path().display().to_string(),
            schema: "bcow.inspect/1",
            format: Format {
                version: 1,
                purpose: match header.purpose {
                    Use::Image => "image",
                    Use::Disk => "disk",
                    Use::Partial => "sketch",
                },
                sealed: header.state == State::Sealed,
                generation: header.generation,
                features: features.names(),
                feature_masks: FeatureMasks {
                    incompatible: features.incompatible,
                    read_only_compatible: features.read_only_compatible,
                    compatible: features.compatible,
                },
            },
            geometry: Geometry {
                size: header.size,
                file_bytes: header.file_bytes,
                region_bytes: 1 << header.region_shift,
                regions: header.size.div_ceil(1 << header.region_shift),
            },
            storage,
            merkle: header.merkle.as_ref().map(|tree| Merkle {
                root: format!("sha256:{}", hex(&tree.root)),
                chunk_bytes: 1 << tree.chunk_shift,
            }),
            backings: image.image().backings().map(backing).collect(),
            disk: None,
            stack: None,
            erofs: None,
            prefetch: None,
            metadata: Value::Null,
        }
    }

    fn print(&self, out: &mut Output) -> Result<(), CommandError> {
        let (format, geometry) = (&self.format, &self.geometry);
        let sealed = if format.sealed { "sealed" } else { "writable" };
        let (name, purpose) = (&self.name, format.purpose);
        writeln!(out, "{name}: {sealed} BCoW {purpose}, version 1")?;
        line(out, "features", list(&format.features))?;
        line(out, "file", exact(geometry.file_bytes))?;
        line(out, "address space", exact(geometry.size))?;
        let (regions, bytes) = (Count(geometry.regions), Human(geometry.region_bytes));
        line(out, "regions", format_args!("{regions} of {bytes}"))?;
        if let Some(list) = &self.prefetch {
            let (bytes, ranges) = (exact(list.bytes), plural(list.ranges as u64, "range"));
            line(out, "start reads", format_args!("{bytes} in {ranges}"))?;
        }
        if let Some(tree) = &self.merkle {
            line(out, "merkle root", &tree.root)?;
        }
        for (index, backing) in self.backings.iter().enumerate() {
            let (name, size) = (printable(&backing.name), Human(backing.size));
            line(
                out,
                &format!("backing {index}"),
                format_args!("{name} ({size})"),
            )?;
        }
        if let Some(disk) = &self.disk {
            disk.print(out)?;
        }
        self.print_source(out)?;
        if let Some(stack) = &self.stack {
            stack.print(out)?;
        }
        self.print_storage(out)?;
        self.print_filesystem(out)
    }

    fn print_source(&self, out: &mut Output) -> Result<(), CommandError> {
        let metadata = &self.metadata;
        if metadata.is_null() {
            return Ok(());
        }
        writeln!(out, "\nSource")?;
        let platform = platform(&metadata["config"]);
        for (name, value) in [
            ("made by", &metadata["tool"]),
            ("created", &metadata["created"]),
            ("image ID", &metadata["config_digest"]),
            ("platform", &platform),
        ] {
            if let Some(text) = text(value) {
                line(out, name, text)?;
            }
        }
        let layers = metadata["layers"].as_array().map_or(&[][..], Vec::as_slice);
        if !layers.is_empty() {
            writeln!(out, "\nLayers, lowest first")?;
        }
        for layer in layers {
            let name = text(&layer["diff_id"])
                .or_else(|| text(&layer["digest"]))
                .unwrap_or_else(|| "(no digest)".into());
            let sizes: Vec<String> = [("stored_bytes", "as stored"), ("tar_bytes", "as tar")]
                .iter()
                .filter_map(|(key, what)| {
                    // A stack shows its layers and their sources separately.
                    let bytes = layer[key]
                        .as_u64()
                        .or_else(|| layer["source"][key].as_u64());
                    Some(format!("{} {what}", Human(bytes?)))
                })
                .collect();
            writeln!(out, "  {name}  {}", sizes.join(", "))?;
        }
        Ok(())
    }

    /// The classes that the output shows: a disk has only one.
    fn classes(&self) -> Vec<(&'static str, &Class)> {
        match self.disk {
            Some(_) => vec![("content", &self.storage.content)],
            None => vec![
                ("file content", &self.storage.content),
                ("file system", &self.storage.metadata),
            ],
        }
    }

    fn print_storage(&self, out: &mut Output) -> Result<(), CommandError> {
        writeln!(
            out,
            "\n{:<18} {:>12} {:>12} {:>12} {:>7} {:>10} {:>10}",
            "Storage", "size", "of it zero", "stored", "ratio", "zstd", "raw"
        )?;
        for (name, class) in self.classes() {
            writeln!(
                out,
                "  {name:<16} {:>12} {:>12} {:>12} {:>7} {:>10} {:>10}",
                Human(class.bytes),
                Human(class.zero_bytes),
                Human(class.stored_bytes),
                class
                    .ratio()
                    .map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
                Count(class.zstd_blocks),
                Count(class.raw_blocks),
            )?;
        }
        let window_bytes = self.storage.content.backing_bytes + self.storage.metadata.backing_bytes;
        if window_bytes > 0 {
            let name = if self.disk.is_some() { "backing" } else { "windows" };
            writeln!(out, "  {name:<16} {:>12}", Human(window_bytes))?;
        }
        for (name, bytes) in [
            ("Merkle tree", self.storage.merkle_tree_bytes),
            ("metadata", self.storage.json_bytes.into()),
        ] {
            if bytes > 0 {
                writeln!(out, "  {name:<16} {:>38}", Human(bytes))?;
            }
        }
        writeln!(
            out,
            "\n{:<18} {:>12} {:>12}",
            "Block sizes", "blocks", "stored"
        )?;
        for (name, class) in self.classes() {
            for size in class.block_sizes.values() {
                writeln!(
                    out,
                    "  {:<16} {:>12} {:>12}  {name}",
                    Human(size.block_bytes),
                    Count(size.blocks),
                    Human(size.stored_bytes)
                )?;
            }
        }
        Ok(())
    }

    fn print_filesystem(&self, out: &mut Output) -> Result<(), CommandError> {
        let Some(erofs) = &self.erofs else {
            return Ok(());
        };
        writeln!(out, "\nEROFS")?;
        line(out, "inodes", Count(erofs.inodes))?;
        let (blocks, bytes) = (Count(erofs.blocks), Human(erofs.block_bytes.into()));
        line(out, "blocks", format_args!("{blocks} of {bytes}"))?;
        line(out, "features", list(&erofs.features))?;
        line(out, "uuid", &erofs.uuid)?;
        let content = &self.metadata["content"];
        if let Some(bytes) = content["file_bytes"].as_u64() {
            line(out, "file content", exact(bytes))?;
        }
        if let Some(bytes) = content["deduplicated_bytes"].as_u64() {
            line(out, "deduplicated", format_args!("{} of it", exact(bytes)))?;
        }
        Ok(())
    }
}

fn line(out: &mut Output, name: &str, value: impl Display) -> Result<(), CommandError> {
    writeln!(out, "  {name:<16} {value}")
}

/// The platform in an image's configuration: OS/ARCH[/VARIANT].
fn platform(config: &Value) -> Value {
    let field = |name: &str| config[name].as_str().filter(|text| !text.is_empty());
    match (field("os"), field("architecture")) {
        (Some(os), Some(architecture)) => {
            let parts = [Some(os), Some(architecture), field("variant")];
            let parts: Vec<&str> = parts.into_iter().flatten().collect();
            parts.join("/").into()
        }
        _ => Value::Null,
    }
}

/// A JSON value from the file, for the terminal.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(printable(text).into_owned()),
        other => Some(printable(&other.to_string()).into_owned()),
    }
}

fn list(items: &[String]) -> String {
    match items {
        [] => "none".to_owned(),
        items => items.join(", "),
    }
}

fn exact(bytes: u64) -> String {
    match bytes {
        0..1024 => plural(bytes, "byte"),
        _ => format!("{} ({} bytes)", Human(bytes), Count(bytes)),
    }
}

fn uuid(bytes: &[u8; 16]) -> String {
    let groups = [0..4, 4..6, 6..8, 8..10, 10..16];
    groups.map(|group| hex(&bytes[group])).join("-")
}
