//! The layers of a stack, what each adds and hides, and the command with which the kernel alone
//! mounts them.

use std::collections::{HashMap, HashSet};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bcow_erofs::account::{LayerAccount, account};
use bcow_erofs::reader::Filesystem;
use bcow_oci::store::Opened;
use serde_json::{Value, json};

use super::Storage;
use crate::error::{CommandError, Context};
use crate::image::OpenImage;
use crate::names;
use crate::plain;
use crate::size::{Count, Human, plural};
use crate::ui::{Output, Ui};

/// A stack's layers, lowest first.
pub struct Stack {
    layers: Vec<Layer>,
    stack_bytes: u64,
}

struct Layer {
    digest: String,
    short: String,
    file_bytes: u64,
    /// Whether a lower layer is the same file.
    is_again: bool,
    path: Option<PathBuf>,
    /// Known if no layer is missing.
    account: Option<LayerAccount>,
    /// Bytes of file content that the layer shares with lower layers instead of storing them.
    shared_bytes: u64,
    /// The estimated size of that content in the file, by the compression of the layers.
    saved_bytes: u64,
    /// The source of the layer, in the metadata of the stack.
    source: Value,
    diff_id: Value,
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
        let mut seen = HashSet::new();
        let layers = opened
            .layers
            .iter()
            .enumerate()
            .map(|(index, layer)| {
                let digest = layer.recorded.digest.to_string();
                let said = described.get(&*digest).copied().unwrap_or(&Value::Null);
                let shared_bytes = layer.file.as_ref().map_or(0, |file| {
                    let metadata = file.image.metadata().unwrap_or_default();
                    metadata["content"]["lower_bytes"].as_u64().unwrap_or(0)
                });
                Layer {
                    digest,
                    short: layer.recorded.digest.short(),
                    file_bytes: layer.recorded.file_bytes,
                    is_again: !seen.insert(&layer.recorded.digest),
                    path: layer.file.as_ref().map(|file| file.path.clone()),
                    account: accounts.as_ref().map(|all| all[index]),
                    shared_bytes,
                    saved_bytes: (shared_bytes as f64 * ratio) as u64,
                    source: said["source"].clone(),
                    diff_id: said["diff_id"].clone(),
                }
            })
            .collect();
        let stack = Stack {
            layers,
            stack_bytes: opened.image.header().file_bytes,
        };
        (stack, failure)
    }

    fn sum(&self, of: impl Fn(&Layer) -> u64) -> u64 {
        self.layers
            .iter()
            .fold(0, |sum, layer| sum.saturating_add(of(layer)))
    }

    /// Bytes of the layers' files, each file once.
    fn files_bytes(&self) -> u64 {
        self.sum(|layer| if layer.is_again { 0 } else { layer.file_bytes })
    }

    fn files(&self) -> u64 {
        self.sum(|layer| u64::from(!layer.is_again))
    }

    fn source_bytes(&self) -> u64 {
        self.sum(|layer| layer.source["stored_bytes"].as_u64().unwrap_or(0))
    }

    pub fn as_json(&self) -> Value {
        let layers: Vec<Value> = self
            .layers
            .iter()
            .map(|layer| {
                json!({
                    "digest": layer.digest,
                    "diff_id": layer.diff_id,
                    "path": layer.path.as_ref().map(|path| path.to_string_lossy()),
                    "file_bytes": layer.file_bytes,
                    "adds": layer.account.map(|a| amount(a.added_entries, a.added_bytes)),
                    "hides": layer.account.map(|a| amount(a.hides_entries, a.hides_bytes)),
                    "hidden": layer.account.map(|a| amount(a.hidden_entries, a.hidden_bytes)),
                    "whiteouts": layer.account.map(|a| a.whiteouts),
                    "shared_bytes": layer.shared_bytes,
                    "saved_bytes_estimate": layer.saved_bytes,
                    "source": layer.source,
                })
            })
            .collect();
        json!({
            "layers": layers,
            "files": self.files(),
            "layers_bytes": self.files_bytes(),
            "stack_bytes": self.stack_bytes,
            "source_bytes": self.source_bytes(),
            "shared_bytes": self.sum(|layer| layer.shared_bytes),
            "saved_bytes_estimate": self.sum(|layer| layer.saved_bytes),
        })
    }

    pub fn print(&self, out: &mut Output) -> Result<(), CommandError> {
        writeln!(
            out,
            "\n{:<24} {:>10} {:>19} {:>19} {:>19} {:>10}",
            "Stack, top layer first", "file", "adds", "hides", "hidden", "shares"
        )?;
        let row = |out: &mut Output,
                   name: &str,
                   file: u64,
                   account: Option<&LayerAccount>,
                   shared: u64| {
            write!(out, "  {name:<22} {:>10}", Human(file).to_string())?;
            match account {
                Some(account) => {
                    for (entries, bytes) in [
                        (account.added_entries, account.added_bytes),
                        (account.hides_entries, account.hides_bytes),
                        (account.hidden_entries, account.hidden_bytes),
                    ] {
                        let (entries, bytes) = (Count(entries).to_string(), Human(bytes));
                        write!(out, " {entries:>8} {:>10}", bytes.to_string())?;
                    }
                }
                None => write!(out, " {:>19} {:>19} {:>19}", "?", "?", "?")?,
            }
            writeln!(out, " {:>10}", Human(shared).to_string())
        };
        let digits = self.layers.len().to_string().len();
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let name = format!("{:>digits$} {}", index + 1, layer.short);
            if layer.path.is_none() {
                writeln!(
                    out,
                    "  {name:<22} {:>10}  missing",
                    Human(layer.file_bytes).to_string()
                )?;
                continue;
            }
            row(
                out,
                &name,
                layer.file_bytes,
                layer.account.as_ref(),
                layer.shared_bytes,
            )?;
        }
        let total = self.layers.iter().try_fold(
            LayerAccount::default(),
            |sum, layer| -> Option<LayerAccount> {
                let one = layer.account?;
                Some(LayerAccount {
                    added_entries: sum.added_entries.saturating_add(one.added_entries),
                    added_bytes: sum.added_bytes.saturating_add(one.added_bytes),
                    hidden_entries: sum.hidden_entries.saturating_add(one.hidden_entries),
                    hidden_bytes: sum.hidden_bytes.saturating_add(one.hidden_bytes),
                    hides_entries: sum.hides_entries.saturating_add(one.hides_entries),
                    hides_bytes: sum.hides_bytes.saturating_add(one.hides_bytes),
                    whiteouts: sum.whiteouts.saturating_add(one.whiteouts),
                })
            },
        );
        let shared = self.sum(|layer| layer.shared_bytes);
        row(out, "all", self.files_bytes(), total.as_ref(), shared)?;
        let source = match self.source_bytes() {
            0 => String::new(),
            bytes => format!("; {} at the source", Human(bytes)),
        };
        writeln!(
            out,
            "  {} in {}, {}; with the stack {}{source}",
            plural(self.layers.len() as u64, "layer"),
            plural(self.files(), "file"),
            Human(self.files_bytes()),
            Human(self.files_bytes().saturating_add(self.stack_bytes)),
        )?;
        match (shared, self.sum(|layer| layer.saved_bytes)) {
            (0, _) => Ok(()),
            (shared, saved) => writeln!(
                out,
                "  {} of content are shared with lower layers, which saves about {}",
                Human(shared),
                Human(saved)
            ),
        }
    }
}

fn amount(entries: u64, bytes: u64) -> Value {
    json!({ "entries": entries, "bytes": bytes })
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
