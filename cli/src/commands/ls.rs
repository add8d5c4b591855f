//! `bcow ls`

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use bcow_erofs::reader::{Children, ErofsError, FileType, Inode};
use serde::Serialize;
use serde_json::json;

use crate::error::CommandError;
use crate::image::{LastLink, LayerArgs, OpenImage, StoreArgs, Tree};
use crate::names;
use crate::stat::{self, InodeFacts};
use crate::ui::{Output, Ui};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_images::sandbox::{self, SandboxArgs};

/// List files in an image
///
/// The command lists the names in the directory PATH (default: the root), one per line. If PATH is
/// not a directory, it lists PATH itself. It follows symbolic links in PATH inside the image.
///
/// On a terminal, the command quotes names with unusual characters as GNU ls does. Otherwise it
/// prints the bytes of a name unchanged; use -0 for names that may contain newlines.
///
/// With --json, U+FFFD replaces the invalid bytes of a name that is not UTF-8 (`"path"`), and
/// `"path_hex"` has all its bytes in hexadecimal. Times are in UTC.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The image: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    image: Name,
    /// A path in the image [default: the root]
    #[arg(default_value = "/", hide_default_value = true)]
    path: OsString,
    /// Show type, mode, links, owner, group, size, time and link target
    #[arg(short, long)]
    long: bool,
    /// List the whole tree below PATH, as paths
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Also list names that begin with a dot
    #[arg(short, long)]
    all: bool,
    /// End names with NUL instead of newline, and never quote names
    #[arg(short = '0', long, conflicts_with_all = ["json", "long"])]
    null: bool,
    /// Print JSON (schema bcow.ls/1), with all fields of each inode
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    layers: LayerArgs,
    #[command(flatten)]
    stores: StoreArgs,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

/// Lists.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let layers = &args.layers.layers;
    let sandbox = args
        .sandbox
        .begin(layers.iter().chain([&args.image]), &args.stores)?;
    let image = OpenImage::open_without_content(&args.image, layers, &args.stores, ui)?;
    sandbox::close(sandbox, &args.stores)?;
    let tree = image.tree()?;
    let path = args.path.as_bytes();
    // With -l a link is shown as a link; without, a link to a directory lists the directory.
    let mut start = tree.find(path, LastLink::Keep)?;
    if start.kind == FileType::Symlink && !args.long && !args.json {
        start = tree.find(path, LastLink::Follow).unwrap_or(start);
    }

    let mut listing = Listing {
        args,
        tree: &tree,
        quote: ui.stdout_is_terminal() && !args.null,
        out: ui.output(),
    };
    listing.begin()?;
    if start.kind == FileType::Directory {
        listing.directory(start, path)?;
    } else {
        listing.entry(&start, path, path)?;
    }
    listing.end()
}

struct Listing<'a> {
    args: &'a Args,
    tree: &'a Tree,
    quote: bool,
    out: Output,
}

impl Listing<'_> {
    fn begin(&mut self) -> Result<(), CommandError> {
        if self.args.json {
            self.out.open_document(&json!({ "schema": "bcow.ls/1" }))?;
            self.out.open_list("entries")?;
        }
        Ok(())
    }

    fn end(mut self) -> Result<(), CommandError> {
        if self.args.json {
            self.out.close_list()?;
            self.out.close_document()?;
        }
        self.out.finish()
    }

    fn directory(&mut self, directory: Inode, path: &[u8]) -> Result<(), CommandError> {
        // In a valid tree each directory has one parent; otherwise the listing might not end.
        let mut seen = HashSet::from([directory.nid]);
        let mut stack = vec![(path.to_vec(), Children::new(directory))];
        while let Some((path, children)) = stack.last_mut() {
            let Some(entry) = self.tree.read(path, |fs| children.next(fs))? else {
                stack.pop();
                continue;
            };
            if entry.name.starts_with(b".") && !self.args.all {
                continue;
            }
            let path = join(path, &entry.name);
            // A plain listing needs no inode, and is then as fast as reading the directory.
            if !(self.args.long || self.args.json || self.args.recursive) {
                self.name(&entry.name)?;
                continue;
            }
            let inode = self.tree.inode(entry.nid, &path)?;
            let shown = if self.args.recursive { &path } else { &entry.name };
            self.entry(&inode, &path, shown)?;
            if self.args.recursive && inode.kind == FileType::Directory {
                let nid = inode.nid;
                self.tree.read(&path, |_| {
                    if seen.insert(nid) { Ok(()) } else { Err(ErofsError::DirectoryTwice { nid }) }
                })?;
                stack.push((path, Children::new(inode)));
            }
        }
        Ok(())
    }

    fn entry(&mut self, inode: &Inode, path: &[u8], shown: &[u8]) -> Result<(), CommandError> {
        if self.args.json {
            return self.out.item(&Entry {
                path: names::text(path),
                path_hex: names::text_hex(path),
                inode: InodeFacts::of(self.tree, inode, path)?,
            });
        }
        if !self.args.long {
            return self.name(shown);
        }
        let size = match inode.rdev {
            Some(device) => format!("{}, {}", device.major, device.minor),
            None => inode.size.to_string(),
        };
        write!(
            self.out,
            "{} {:>3} {:>5} {:>5} {size:>10} {} ",
            stat::mode_letters(inode.kind, inode.permissions),
            inode.nlink,
            inode.uid,
            inode.gid,
            stat::short_time(inode.mtime),
        )?;
        self.out.name(shown, self.quote)?;
        if inode.kind == FileType::Symlink {
            let target = self.target(inode, path)?;
            write!(self.out, " -> ")?;
            self.out.name(&target, self.quote)?;
        }
        writeln!(self.out)
    }

    fn name(&mut self, name: &[u8]) -> Result<(), CommandError> {
        self.out.name(name, self.quote)?;
        self.out
            .write_bytes(if self.args.null { b"\0" } else { b"\n" })
    }

    fn target(&self, inode: &Inode, path: &[u8]) -> Result<Vec<u8>, CommandError> {
        self.tree.read(path, |fs| fs.read_link(inode))
    }
}

/// An entry, as JSON has it.
#[derive(Serialize)]
struct Entry {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    #[serde(flatten)]
    inode: InodeFacts,
}

fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    match directory {
        b"" => name.to_vec(),
        directory if directory.ends_with(b"/") => [directory, name].concat(),
        directory => [directory, b"/", name].concat(),
    }
}
