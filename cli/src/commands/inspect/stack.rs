//! The layers of a stack, what each adds and hides, and the command with which the kernel alone
//! mounts them.

use std::collections::HashMap;
use std::iter::Sum;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bcow_erofs::account::{LayerAccount, account};
use bcow_erofs::reader::Filesystem;
use bcow_oci::store::{Opened, StackLayer};
use serde::Serialize;
use serde_json::Value;

use super::Storage;
use crate::error::{CommandError, Context};
use crate::image::OpenImage;
use crate::names;
use crate::plain;
use crate::size::{Count, Human, plural};
use crate::ui::{Output, Ui};

#[derive(Serialize)]
pub struct Stack {
    /// The lowest first.
    layers: Vec<Layer>,
    /// The number of different files.
    files: u64,
    /// Bytes of the layers' files, each file once.
    layers_bytes: u64,
    stack_bytes: u64,
    source_bytes: u64,
    shared_bytes: u64,
    saved_bytes_estimate: u64,
}

#[derive(Serialize)]
struct Layer {
    digest: String,
    #[serde(skip)]
    short: String,
    diff_id: Value,
    /// `None` if the layer is missing.
    path: Option<String>,
    file_bytes: u64,
    /// As the next ones: known if no layer is missing.
    adds: Option<Amount>,
    hides: Option<Amount>,
    hidden: Option<Amount>,
    whiteouts: Option<u64>,
    /// Bytes of file content that the layer shares with lower layers instead of storing them.
    shared_bytes: u64,
    /// The estimated size of that content in the file, by the compression of the layers.
    saved_bytes_estimate: u64,
    /// The source of the layer, in the metadata of the stack.
    source: Value,
}

/// Names in a tree, and the bytes of their files.
#[derive(Clone, Copy, Serialize)]
struct Amount {
    entries: u64,
    bytes: u64,
}

impl Sum for Amount {
    fn sum<I: Iterator<Item = Amount>>(amounts: I) -> Amount {
        let (entries, bytes) = (0, 0);
        amounts.fold(Amount { entries, bytes }, |sum, one| Amount {
            entries: sum.entries.saturating_add(one.entries),
            bytes: sum.bytes.saturating_add(one.bytes),
        })
    }
}

fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

impl Stack {
    /// Examines the layers; returns the reason too if a part of them cannot be read.
    pub fn examine(opened: &Opened, metadata: &Value) -> (Stack, Option<CommandError>) {
        let mut failure = None;
        let accounts = accounts(opened).unwrap_or_else(|error| {
            failure = Some(error);
            None
        });
        let ratio = stored_part(opened);
        let described: HashMap<&str, &Value> = metadata["layers"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|layer| Some((layer["digest"].as_str()?, layer)))
            .collect();
        let layer = |index: usize, layer: &StackLayer| {
            let digest = layer.recorded.digest.to_string();
            let said = described.get(&*digest).copied().unwrap_or(&Value::Null);
            let shared_bytes = layer.file.as_ref().map_or(0, |file| {
                let metadata = file.image.metadata().unwrap_or_default();
                metadata["content"]["lower_bytes"].as_u64().unwrap_or(0)
            });
            let account = accounts.as_ref().map(|all| all[index]);
            let amount = |of: fn(&LayerAccount) -> (u64, u64)| {
                let (entries, bytes) = of(account.as_ref()?);
                Some(Amount { entries, bytes })
            };
            Layer {
                digest,
                short: layer.recorded.digest.short(),
                diff_id: said["diff_id"].clone(),
                path: layer
                    .file
                    .as_ref()
                    .map(|file| file.path.to_string_lossy().into_owned()),
                file_bytes: layer.recorded.file_bytes,
                adds: amount(|a| (a.added_entries, a.added_bytes)),
                hides: amount(|a| (a.hides_entries, a.hides_bytes)),
                hidden: amount(|a| (a.hidden_entries, a.hidden_bytes)),
                whiteouts: account.map(|account| account.whiteouts),
                shared_bytes,
                saved_bytes_estimate: (shared_bytes as f64 * ratio) as u64,
                source: said["source"].clone(),
            }
        };
        let layers = opened.layers.iter().enumerate();
        let layers: Vec<Layer> = layers.map(|(index, one)| layer(index, one)).collect();
        let files: HashMap<&str, u64> = layers
            .iter()
            .map(|layer| (&*layer.digest, layer.file_bytes))
            .collect();
        let source_bytes = |layer: &Layer| layer.source["stored_bytes"].as_u64().unwrap_or(0);
        let stack = Stack {
            files: files.len() as u64,
            layers_bytes: sum(files.into_values()),
            stack_bytes: opened.image.header().file_bytes,
            source_bytes: sum(layers.iter().map(source_bytes)),
            shared_bytes: sum(layers.iter().map(|layer| layer.shared_bytes)),
            saved_bytes_estimate: sum(layers.iter().map(|layer| layer.saved_bytes_estimate)),
            layers,
        };
        (stack, failure)
    }

    pub fn print(&self, out: &mut Output) -> Result<(), CommandError> {
        writeln!(
            out,
            "\n{:<24} {:>10} {:>19} {:>19} {:>19} {:>10}",
            "Stack, top layer first", "file", "adds", "hides", "hidden", "shares"
        )?;
        let digits = self.layers.len().to_string().len();
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let name = format!("{:>digits$} {}", index + 1, layer.short);
            let amounts = layer
                .path
                .as_ref()
                .map(|_| [layer.adds, layer.hides, layer.hidden]);
            row(out, &name, layer.file_bytes, amounts, layer.shared_bytes)?;
        }
        let total = |of: fn(&Layer) -> Option<Amount>| self.layers.iter().map(of).sum();
        let totals = [
            total(|layer| layer.adds),
            total(|layer| layer.hides),
            total(|layer| layer.hidden),
        ];
        row(
            out,
            "all",
            self.layers_bytes,
            Some(totals),
            self.shared_bytes,
        )?;
        let source = match self.source_bytes {
            0 => String::new(),
            bytes => format!("; {} at the source", Human(bytes)),
        };
        writeln!(
            out,
            "  {} in {}, {}; with the stack {}{source}",
            plural(self.layers.len() as u64, "layer"),
            plural(self.files, "file"),
            Human(self.layers_bytes),
            Human(self.layers_bytes.saturating_add(self.stack_bytes)),
        )?;
        if self.shared_bytes > 0 {
            writeln!(
                out,
                "  {} of content are shared with lower layers, which saves about {}",
                Human(self.shared_bytes),
                Human(self.saved_bytes_estimate)
            )?;
        }
        Ok(())
    }
}

/// Prints a layer, without `amounts` a missing one.
fn row(
    out: &mut Output,
    name: &str,
    file_bytes: u64,
    amounts: Option<[Option<Amount>; 3]>,
    shared_bytes: u64,
) -> Result<(), CommandError> {
    write!(out, "  {name:<22} {:>10}", Human(file_bytes))?;
    let Some(amounts) = amounts else {
        return writeln!(out, "  missing");
    };
    for amount in amounts {
        match amount {
            Some(Amount { entries, bytes }) => {
                write!(out, " {:>8} {:>10}", Count(entries), Human(bytes))?;
            }
            None => write!(out, " {:>19}", "?")?,
        }
    }
    writeln!(out, " {:>10}", Human(shared_bytes))
}

/// What each layer adds and hides; `None` if a layer is missing.
fn accounts(opened: &Opened) -> Result<Option<Vec<LayerAccount>>, CommandError> {
    let mut filesystems = HashMap::new();
    for layer in &opened.layers {
        let Some(file) = &layer.file else {
            return Ok(None);
        };
        if !filesystems.contains_key(&layer.recorded.digest) {
            let filesystem = Filesystem::open(file.image.clone())
                .context(|| format!("cannot read the file system in {}", file.path.display()))?;
            filesystems.insert(&layer.recorded.digest, filesystem);
        }
    }
    let layers: Vec<&Filesystem> = opened
        .layers
        .iter()
        .filter_map(|layer| filesystems.get(&layer.recorded.digest))
        .collect();
    let accounts = account(&layers).context(|| "cannot compare the layers")?;
    Ok(Some(accounts))
}

/// Stored bytes of file content for each byte of it, over all layers.
fn stored_part(opened: &Opened) -> f64 {
    let (mut kept, mut stored) = (0, 0);
    for file in opened.layers.iter().filter_map(|layer| layer.file.as_ref()) {
        let metadata = file.image.metadata().unwrap_or_default();
        let start = metadata["content"]["metadata_start"].as_u64();
        let (storage, _) = Storage::measure(&file.image, start);
        kept += storage.content.kept_bytes();
        stored += storage.content.stored_bytes;
    }
    match kept {
        0 => 0.0,
        kept => stored as f64 / kept as f64,
    }
}

/// The limit of mount(2) on the length of its options: one page.
const OPTIONS_BYTES: usize = 4096;

/// Prints the command line with which root mounts the image with the kernel alone.
pub fn print_mount_command(
    image: &OpenImage,
    directory: &Path,
    ui: &Ui,
) -> Result<(), CommandError> {
    let opened = image.opened();
    opened
        .require_all()
        .map_err(|error| crate::image::cannot_open(image.path(), &error))?;
    let Some(files) = plain::files(image)? else {
        return Err(CommandError::new(format!(
            "the kernel cannot mount {} by itself",
            image.path().display()
        ))
        .caused_by_text("the image is not stored plain")
        .hint(
            "`bcow mount` mounts every image; `bcow convert --plain` writes an image that the \
             kernel mounts too",
        ));
    };
    let quoted = |path: &Path| names::quoted(path.as_os_str().as_bytes());
    let target = names::quoted(directory.as_os_str().as_bytes());
    let mut out = ui.output();
    match &files[..] {
        [file] => writeln!(out, "mount -t erofs -o ro,loop {} {target}", quoted(file))?,
        [stack, layers @ ..] => {
            // mount(8) creates a loop device for one file, but refuses files as further devices.
            let device = |path: &Path| format!("\"$(losetup -rf --show {})\"", quoted(path));
            write!(out, "mount -t erofs -o ro")?;
            for layer in layers {
                write!(out, ",device={}", device(layer))?;
            }
            writeln!(out, " {} {target}", device(stack))?;
            let likely = "ro".len() + layers.len() * ",device=/dev/loop1000".len();
            if likely > OPTIONS_BYTES {
                ui.warning(format_args!(
                    "the options for {} exceed the {} bytes of mount(2): the command needs a \
                     mount(8) that uses fsconfig(2)",
                    plural(layers.len() as u64, "layer"),
                    Count(OPTIONS_BYTES as u64),
                ));
            }
        }
        [] => {}
    }
    out.finish()
}
