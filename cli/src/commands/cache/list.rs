//! `bcow cache list`

use bcow::format::hex;
use bcow_remote::{CacheEntry, EntryKind};
use bcow_view::ViewEntry;
use serde::Serialize;

use super::{DirectoryArgs, cannot_read, image_label};
use crate::cache::FoundCache;
use crate::error::{CommandError, Context};
use crate::names::printable;
use crate::size::{Human, plural};
use crate::ui::Ui;

/// List the files of the cache, and the views, the most recently used first
///
/// The list shows the size of each file, how much of it is present, the time of its last use,
/// whether a process uses it, its root hash, and the URL from which it was last fetched, if that is
/// known. The command does not verify the bytes; `bcow cache verify` does.
///
/// For each view, the list shows the size of its ext4 file system, the space that the view takes up
/// on the disk, the time of its last use, whether a process uses it, and the image as the last
/// command named it. If no name is known, the list shows the first 12 characters of the image's
/// identity.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON (schema bcow.cache-list/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    directory: DirectoryArgs,
}

/// The result of the command.
#[derive(Serialize)]
struct List {
    schema: &'static str,
    directory: String,
    held_bytes: u64,
    files: Vec<ListedImage>,
    manifests: Vec<ListedImage>,
    names: Vec<ListedImage>,
    unknown: Vec<ListedImage>,
    /// `None` if neither an option nor the environment names a directory for views.
    views_directory: Option<String>,
    views_bytes: u64,
    views: Vec<View>,
}

#[derive(Serialize)]
struct ListedImage {
    name: String,
    #[serde(flatten)]
    file: Option<CachedFile>,
    /// Of a manifest.
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    held_bytes: u64,
    last_use: Option<String>,
    last_use_unix_seconds: i64,
}

#[derive(Serialize)]
struct CachedFile {
    root: String,
    origin: Option<String>,
    file_bytes: Option<u64>,
    /// Blocks of the host are larger than the last bytes of a file.
    present_bytes: u64,
    in_use: bool,
}

#[derive(Serialize)]
struct View {
    name: String,
    image_identity: String,
    image: Option<String>,
    bytes: u64,
    layout: u32,
    held_bytes: u64,
    in_use: bool,
    last_use: Option<String>,
    last_use_unix_seconds: i64,
    #[serde(skip)]
    label: String,
}

impl ListedImage {
    fn of(entry: CacheEntry) -> Self {
        let (file, digest) = match entry.kind {
            EntryKind::File(root) => {
                let file_bytes = entry.file_bytes.unwrap_or(u64::MAX);
                let file = CachedFile {
                    root: root.to_string(),
                    origin: entry.origin,
                    file_bytes: entry.file_bytes,
                    present_bytes: entry.held_bytes.min(file_bytes),
                    in_use: entry.is_in_use,
                };
                (Some(file), None)
            }
            EntryKind::Manifest(digest) => (None, Some(format!("sha256:{}", hex(&digest)))),
            EntryKind::Name(_) | EntryKind::Unknown => (None, None),
        };
        ListedImage {
            name: entry.name,
            file,
            digest,
            held_bytes: entry.held_bytes,
            last_use: bcow::rfc3339(entry.last_use),
            last_use_unix_seconds: entry.last_use,
        }
    }

    /// The row of a file.
    fn row(&self) -> Option<[String; 6]> {
        let file = self.file.as_ref()?;
        Some([
            known(file.file_bytes.map(|bytes| Human(bytes).to_string())),
            Human(file.present_bytes).to_string(),
            known(self.last_use.clone()),
            yes_or_no(file.in_use),
            file.root.chars().take(12).collect(),
            known(
                file.origin
                    .as_deref()
                    .map(|origin| printable(origin).into()),
            ),
        ])
    }
}

impl View {
    fn of(view: ViewEntry) -> Self {
        View {
            label: image_label(&view),
            name: view.name,
            image_identity: view.image,
            image: view.image_name,
            bytes: view.bytes,
            layout: view.layout,
            held_bytes: view.held_bytes,
            in_use: view.is_in_use,
            last_use: bcow::rfc3339(view.last_use),
            last_use_unix_seconds: view.last_use,
        }
    }

    fn row(&self) -> [String; 5] {
        [
            Human(self.bytes).to_string(),
            Human(self.held_bytes).to_string(),
            known(self.last_use.clone()),
            yes_or_no(self.in_use),
            self.label.clone(),
        ]
    }
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let (path, entries) = match args.directory.find()? {
        FoundCache::Present(cache) => {
            let entries = cache.entries().context(|| cannot_read(cache.path()))?;
            (cache.path().to_owned(), entries)
        }
        FoundCache::Missing(path) => (path, Vec::new()),
    };
    let views = args.directory.views()?;
    let directory_of_views = views.cache.as_ref().map(|cache| cache.directory());
    let mut list = List {
        schema: "bcow.cache-list/1",
        directory: path.to_string_lossy().into_owned(),
        held_bytes: entries.iter().map(|entry| entry.held_bytes).sum(),
        files: Vec::new(),
        manifests: Vec::new(),
        names: Vec::new(),
        unknown: Vec::new(),
        views_directory: directory_of_views.map(|path| path.to_string_lossy().into_owned()),
        views_bytes: views.held_bytes(),
        views: views.entries.into_iter().map(View::of).collect(),
    };
    for entry in entries {
        let of_kind = match entry.kind {
            EntryKind::File(_) => &mut list.files,
            EntryKind::Manifest(_) => &mut list.manifests,
            EntryKind::Name(_) => &mut list.names,
            EntryKind::Unknown => &mut list.unknown,
        };
        of_kind.push(ListedImage::of(entry));
    }
    if args.json {
        return ui.print_json(&list);
    }
    let mut out = ui.output();
    let titles = ["SIZE", "PRESENT", "LAST USE", "IN USE", "ROOT", "FROM"];
    out.table(titles, list.files.iter().filter_map(ListedImage::row))?;
    let titles = ["VIEW", "SIZE", "LAST USE", "IN USE", "IMAGE"];
    out.table(titles, list.views.iter().map(View::row))?;
    out.finish()?;
    let (files, held) = (list.files.len() as u64, Human(list.held_bytes));
    let (files, directory) = (plural(files, "file"), &list.directory);
    ui.status(format_args!("{files} with {held} in {directory}"));
    if let Some(directory) = list.views_directory.filter(|_| !list.views.is_empty()) {
        let views = plural(list.views.len() as u64, "view");
        let held = Human(list.views_bytes);
        ui.status(format_args!("{views} with {held} in {directory}"));
    }
    Ok(())
}

fn known(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

fn yes_or_no(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.to_owned()
}
