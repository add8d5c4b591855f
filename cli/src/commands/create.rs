//! `bcow create`

use std::sync::Arc;

use bcow::format::{BlockShift, Use};
use bcow::{BlockDevice, CreateOptions, Disk, Layout, OpenOptions};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser, new_file, new_path};
use bcow_images::backing::backing;
use bcow_images::disks::new_file_system_hint;
use serde_json::json;

use crate::error::{CommandError, Context};
use crate::image::StoreArgs;
use crate::new_file::NewFile;
use crate::size::{self, Human, disk_size, plural};
use crate::ui::Ui;
use crate::views::{UserViews, cannot_view};

/// Create a writable disk
///
/// A disk is sparse: unwritten blocks take no space. They are read from the backing, or are zeros
/// without a backing. The backing is a BCoW disk or image that the disk only reads. bcow finds the
/// backing by its file name, in the directory of the disk and in directories given by
/// --backing-dir; or by its digest, in stores given by --store. If the backing has changed, the
/// disk does not open.
///
/// A disk over a remote image records the URL and the root hash of the image. For an
/// image in a registry, it also records the digest of the manifest. The commands that use the disk
/// open such a backing only if --backing-url, or $BCOW_BACKING_URLS, allows its URL.
///
/// Layouts:
///
///     auto          4 KiB blocks for small writes, larger blocks for large writes; the first write
///                   to a region selects the block size of the region
///     performance   blocks of 1/1024 of the size of the disk, rounded up to a power of two from
///                   4 KiB to 16 MiB: fast, but a small write over a backing copies more data
///     space         4 KiB blocks everywhere
///
/// With --fs ext4, the disk shows the tree of the image given by -b as an ext4 file system, with a
/// UUID of its own. A virtual machine, or `bcow mount` on this machine, mounts it for writing. The
/// content of files stays in the image. bcow generates the metadata once per image and size, and
/// stores it in $BCOW_VIEWS [default: $BCOW_CACHE/views, or /var/cache/bcow/views for root, or
/// $XDG_CACHE_HOME/bcow/views, or ~/.cache/bcow/views].
///
/// The command never overwrites an existing file.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The disk to create
    #[arg(value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(new_file("create")))]
    new: Name,
    /// Size of the disk, as with --size
    #[arg(value_name = "SIZE", value_parser = size::parse, conflicts_with = "size")]
    bytes: Option<u64>,
    /// Backing image for unwritten blocks: a BCoW file, oci:DIR[:REF], or an image on another
    /// machine, such as docker://HOST/REPO[:TAG] or https://HOST/PATH
    #[arg(short, long, value_name = "BACKING", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    backing: Option<Name>,
    /// Record the backing by the digest of its file instead of its name. The backing must be sealed
    /// and on this machine; commands then look for it in the directories of --store
    #[arg(long, requires = "backing")]
    by_digest: bool,
    /// Show the files of the backing as a file system of this kind: ext4
    #[arg(long, value_name = "KIND", requires = "backing", value_parser = file_system)]
    fs: Option<FileSystem>,
    /// Size of the disk, in bytes or with K, M, G, T or P [default: the size of the backing; 64G
    /// with --fs]
    #[arg(short, long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
    /// Block layout of the disk: auto, performance or space
    #[arg(long, value_name = "LAYOUT", default_value = "auto", value_parser = layout)]
    layout: Layout,
    /// Block size, a power of two from 4K to 4M, or to 16M with --layout performance [default: the
    /// layout chooses]
    #[arg(long, value_name = "SIZE", value_parser = block_size)]
    block_size: Option<u32>,
    /// Print a summary as JSON (schema bcow.create/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// A value of --fs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileSystem {
    Ext4,
}

fn file_system(text: &str) -> Result<FileSystem, String> {
    match text {
        "ext4" => Ok(FileSystem::Ext4),
        _ => Err("the only kind is ext4".to_owned()),
    }
}

fn layout(text: &str) -> Result<Layout, String> {
    Layout::from_name(text).ok_or_else(|| "the layouts are auto, performance and space".to_owned())
}

fn block_size(text: &str) -> Result<u32, String> {
    u32::try_from(size::parse(text)?)
        .ok()
        .filter(|bytes| BlockShift::from_bytes(*bytes).is_some())
        .ok_or_else(|| "block sizes are powers of two from 4K to 16M".to_owned())
}

/// Creates the disk.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let asked = args.size.or(args.bytes);
    let path = new_path(&args.new)?;
    let new = NewFile::create_new(path)?;
    let options = OpenOptions::default();
    let open = |name| backing(name, args.by_digest, path, &args.stores, &options);
    let backing = args.backing.as_ref().map(open).transpose()?;
    // Until the file has its name, only the lock of the open image shows that it is in use.
    let _below = backing.as_ref().map(|(_, image)| Arc::clone(image));
    let is_image = backing
        .as_ref()
        .is_some_and(|(_, image)| image.header().purpose == Use::Image);
    let view = match (&args.backing, &backing, args.fs) {
        (Some(name), Some((_, image)), Some(FileSystem::Ext4)) => {
            let bytes = disk_size(asked.unwrap_or(bcow_view::DEFAULT_BYTES))?;
            let view = UserViews::new(&options).view(image, bytes);
            Some(view.map_err(|error| cannot_view(name.shown(), &error))?)
        }
        _ => None,
    };
    let size = match (asked, &view, &backing) {
        (Some(size), ..) => disk_size(size)?,
        (None, Some(view), _) => view.bytes(),
        (None, None, Some((entry, _))) => entry.size,
        (None, None, None) => {
            return Err(CommandError::usage("the disk needs a size")
                .hint("give one with -s SIZE, or a backing with -b BACKING"));
        }
    };
    let cannot = || format!("cannot create {}", args.new.display());
    let create = CreateOptions {
        layout: args.layout,
        block_bytes: args.block_size,
        ..CreateOptions::disk(size)
    };
    let file = Arc::new(new.file().try_clone().context(cannot)?);
    let disk = match (&view, backing) {
        (Some(view), Some((entry, _))) => {
            bcow_view::create_instance(file, view, entry, &create, &options).context(cannot)?
        }
        (_, backing) => {
            let backing = backing.map(|(entry, image)| (entry, image as Arc<dyn BlockDevice>));
            Disk::create(file, &create, backing, &options).context(cannot)?
        }
    };
    let backing_name = disk.backing().map(|entry| entry.name.to_string());
    disk.close().context(cannot)?;
    new.complete()?;
    if args.json {
        let file_system = args.fs.map(|FileSystem::Ext4| "ext4");
        let report = json!({ "size": size, "backing": backing_name, "file_system": file_system });
        return ui.print_report("bcow.create/1", args.new.display(), &report);
    }
    let over = backing_name.map_or(String::new(), |name| format!(" over {name}"));
    ui.status(format_args!(
        "{}: writable disk of {} ({}){over}",
        args.new.display(),
        Human(size),
        plural(size, "byte")
    ));
    match (&args.backing, args.fs) {
        (None, _) => ui.hint(new_file_system_hint(path)),
        (Some(image), None) if is_image => ui.hint(format_args!(
            "{image} is a read-only file system, and so is a mount of the disk; `bcow create -b \
             {image} --fs ext4 NEW.bcow` makes a disk that is mounted writable"
        )),
        _ => {}
    }
    Ok(())
}
