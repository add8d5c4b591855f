//! `bcow inspect`

mod disk;
mod resolve;
mod stack;

use std::collections::BTreeMap;
use std::path::PathBuf;

use bcow::format::{Header, SECTOR_BYTES, State, Use};
use bcow::{Extent, Image, Mapping};
use bcow_erofs::reader::Superblock;
use serde_json::{Value, json};

use self::disk::DiskFacts;
use self::stack::Stack;
use crate::error::CommandError;
use crate::image::{LayerArgs, OpenImage, StoreArgs};
use crate::names::{self, printable};
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
    let list = PrefetchFacts::of(&image, &metadata).unwrap_or_else(|error| {
        note("list of what a start reads", &error);
        None
    });
    let disk = DiskFacts::of(&image);
    let filesystem = match bcow_erofs::reader::Filesystem::open(image.image().clone()) {
        Ok(filesystem) => Some(filesystem.superblock().clone()),
        // A disk has any content.
        Err(_) if disk.is_some() => None,
        Err(error) => {
            note("file system", &error);
            None
        }
    };
    let (stack, stack_failure) = match image.opened().is_stack() {
        true => {
            let (stack, failure) = Stack::examine(image.opened(), &metadata);
            (Some(stack), failure)
        }
        false => (None, None),
    };
    let facts = Facts {
        image: &image,
        disk,
        stack,
        header: image.image().header(),
        metadata,
        prefetch: list,
        storage,
        filesystem,
    };
    if args.json {
        ui.print_json(&facts.as_json())?;
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

/// How the parts of the address space are stored.
#[derive(Default)]
struct Storage {
    /// Content of files; the largest part of most images.
    content: Class,
    /// Inodes, directories, names and small files.
    metadata: Class,
}

#[derive(Default)]
struct Class {
    bytes: u64,
    stored_bytes: u64,
    raw_blocks: u64,
    zstd_blocks: u64,
    zero_bytes: u64,
    /// Bytes in other files, in addition to `bytes`.
    backing_bytes: u64,
    /// Blocks by their size, and the bytes they take.
    sizes: BTreeMap<u64, (u64, u64)>,
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
        let (blocks, bytes) = self
            .sizes
            .entry(extent.length.next_power_of_two())
            .or_default();
        *blocks += 1;
        *bytes += u64::from(stored.bytes);
    }

    /// Bytes that are stored, before compression.
    fn kept_bytes(&self) -> u64 {
        self.bytes - self.zero_bytes
    }

    fn ratio(&self) -> Option<f64> {
        (self.stored_bytes > 0).then(|| self.kept_bytes() as f64 / self.stored_bytes as f64)
    }

    fn as_json(&self) -> Value {
        let sizes: Vec<Value> = self
            .sizes
            .iter()
            .map(|(size, (blocks, bytes))| {
                json!({ "block_bytes": size, "blocks": blocks, "stored_bytes": bytes })
            })
            .collect();
        json!({
            "bytes": self.bytes,
            "zero_bytes": self.zero_bytes,
            "backing_bytes": self.backing_bytes,
            "stored_bytes": self.stored_bytes,
            "raw_blocks": self.raw_blocks,
            "zstd_blocks": self.zstd_blocks,
            "block_sizes": sizes,
        })
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
        let mut storage = Storage::default();
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

struct Facts<'a> {
    image: &'a OpenImage,
    disk: Option<DiskFacts>,
    stack: Option<Stack>,
    header: &'a Header,
    metadata: Value,
    prefetch: Option<PrefetchFacts>,
    storage: Storage,
    filesystem: Option<Superblock>,
}

/// The list of what a start reads.
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

impl Facts<'_> {
    fn merkle_root(&self) -> Option<String> {
        self.header
            .merkle
            .as_ref()
            .map(|tree| format!("sha256:{}", names::hex(&tree.root)))
    }

    fn merkle_bytes(&self) -> u64 {
        self.header
            .merkle
            .as_ref()
            .map_or(0, |tree| self.header.file_bytes.saturating_sub(tree.offset))
    }

    fn as_json(&self) -> Value {
        let header = self.header;
        let backings: Vec<Value> = self
            .image
            .image()
            .backings()
            .map(|backing| json!({ "name": backing.name.to_string(), "size": backing.size }))
            .collect();
        json!({
            "schema": "bcow.inspect/1",
            "format": {
                "version": 1,
                "use": use_name(header.purpose),
                "sealed": header.state == State::Sealed,
                "generation": header.generation,
                "features": header.features.names(),
                "feature_masks": {
                    "incompatible": header.features.incompatible,
                    "read_only_compatible": header.features.read_only_compatible,
                    "compatible": header.features.compatible,
                },
            },
            "geometry": {
                "size": header.size,
                "file_bytes": header.file_bytes,
                "region_bytes": 1u64 << header.region_shift,
                "regions": header.size.div_ceil(1 << header.region_shift),
            },
            "storage": {
                "content": self.storage.content.as_json(),
                "metadata": self.storage.metadata.as_json(),
                "root_table_bytes": header.root.bytes,
                "json_bytes": header.metadata.bytes,
                "backing_table_bytes": header.backings.bytes,
                "merkle_tree_bytes": self.merkle_bytes(),
            },
            "merkle": header.merkle.as_ref().map(|tree| json!({
                "root": self.merkle_root(),
                "chunk_bytes": 1u64 << tree.chunk_shift,
            })),
            "backings": backings,
            "disk": self.disk.as_ref().map(DiskFacts::as_json),
            "stack": self.stack.as_ref().map(Stack::as_json),
            "erofs": self.filesystem.as_ref().map(|fs| json!({
                "block_bytes": fs.block_bytes,
                "blocks": fs.blocks,
                "inodes": fs.inodes,
                "features": fs.features(),
                "uuid": uuid(&fs.uuid),
                "volume_name": String::from_utf8_lossy(&fs.volume_name),
                "build_time": full_time(fs.build_time),
            })),
            "prefetch": self.prefetch.as_ref().map(|list| json!({
                "ranges": list.ranges,
                "bytes": list.bytes,
                "stored_bytes": list.stored_bytes,
            })),
            "metadata": self.metadata,
        })
    }

    fn print(&self, out: &mut Output) -> Result<(), CommandError> {
        let header = self.header;
        writeln!(
            out,
            "{}: {} BCoW {}, version 1",
            self.image.path().display(),
            match header.state {
                State::Sealed => "sealed",
                State::Writable => "writable",
            },
            use_name(header.purpose),
        )?;
        line(out, "features", &list(&header.features.names()))?;
        line(out, "file", &exact(header.file_bytes))?;
        line(out, "address space", &exact(header.size))?;
        line(
            out,
            "regions",
            &format!(
                "{} of {}",
                Count(header.size.div_ceil(1 << header.region_shift)),
                Human(1 << header.region_shift)
            ),
        )?;
        if let Some(list) = &self.prefetch {
            let ranges = plural(list.ranges as u64, "range");
            line(
                out,
                "start reads",
                &format!("{} in {ranges}", exact(list.bytes)),
            )?;
        }
        if let Some(root) = self.merkle_root() {
            line(out, "merkle root", &root)?;
        }
        for (index, backing) in self.image.image().backings().enumerate() {
            line(
                out,
                &format!("backing {index}"),
                &format!(
                    "{} ({})",
                    printable(&backing.name.to_string()),
                    Human(backing.size)
                ),
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
                line(out, name, &text)?;
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
                Human(class.bytes).to_string(),
                Human(class.zero_bytes).to_string(),
                Human(class.stored_bytes).to_string(),
                class
                    .ratio()
                    .map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
                Count(class.zstd_blocks).to_string(),
                Count(class.raw_blocks).to_string(),
            )?;
        }
        let window_bytes = self.storage.content.backing_bytes + self.storage.metadata.backing_bytes;
        if window_bytes > 0 {
            let bytes = Human(window_bytes).to_string();
            let name = match self.disk {
                Some(_) => "backing",
                None => "windows",
            };
            writeln!(out, "  {name:<16} {bytes:>12}")?;
        }
        for (name, bytes) in [
            ("Merkle tree", self.merkle_bytes()),
            ("metadata", self.header.metadata.bytes.into()),
        ] {
            if bytes > 0 {
                writeln!(
                    out,
                    "  {name:<16} {:>12} {:>12} {:>12}",
                    "",
                    "",
                    Human(bytes).to_string()
                )?;
            }
        }
        writeln!(
            out,
            "\n{:<18} {:>12} {:>12}",
            "Block sizes", "blocks", "stored"
        )?;
        for (name, class) in self.classes() {
            for (size, (blocks, bytes)) in &class.sizes {
                writeln!(
                    out,
                    "  {:<16} {:>12} {:>12}  {name}",
                    Human(*size).to_string(),
                    Count(*blocks).to_string(),
                    Human(*bytes).to_string()
                )?;
            }
        }
        Ok(())
    }

    fn print_filesystem(&self, out: &mut Output) -> Result<(), CommandError> {
        let Some(fs) = &self.filesystem else {
            return Ok(());
        };
        writeln!(out, "\nEROFS")?;
        line(out, "inodes", &Count(fs.inodes).to_string())?;
        line(
            out,
            "blocks",
            &format!("{} of {}", Count(fs.blocks), Human(fs.block_bytes.into())),
        )?;
        line(out, "features", &list(&fs.features()))?;
        line(out, "uuid", &uuid(&fs.uuid))?;
        let content = &self.metadata["content"];
        if let Some(bytes) = content["file_bytes"].as_u64() {
            line(out, "file content", &exact(bytes))?;
        }
        if let Some(bytes) = content["deduplicated_bytes"].as_u64() {
            line(out, "deduplicated", &format!("{} of it", exact(bytes)))?;
        }
        Ok(())
    }
}

fn line(out: &mut Output, name: &str, value: &str) -> Result<(), CommandError> {
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

fn use_name(purpose: Use) -> &'static str {
    match purpose {
        Use::Image => "image",
        Use::Disk => "disk",
        Use::Sketch => "sketch",
    }
}

fn uuid(bytes: &[u8; 16]) -> String {
    let hex = names::hex(bytes);
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}
