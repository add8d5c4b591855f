//! `bcow cache verify`

use bcow_oci::Progress as _;
use bcow_remote::{Cache, CacheEntry, EntryKind, Root, Verified};
use bcow_view::{Remove, ViewEntry};
use serde::{Serialize, Serializer};

use super::{DirectoryArgs, cannot_read, image_label};
use crate::cache::FoundCache;
use crate::error::{CommandError, Context};
use crate::interrupt::Interrupt;
use crate::names::{printable, quoted};
use crate::size::{Human, plural};
use crate::ui::Ui;

/// Verify the cached data against the Merkle trees, and remove damaged data
///
/// The command reads every cached byte. It removes damaged chunks from their files; bcow fetches
/// them again when they are needed. It removes views whose bytes do not match their checksums; bcow
/// generates them again when they are needed. It reports files that do not belong to the cache, and
/// keeps them. The exit status is 0 also if the command removed damaged data.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON (schema bcow.cache-verify/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    directory: DirectoryArgs,
}

/// The result of the command.
#[derive(Default, Serialize)]
struct Verification {
    schema: &'static str,
    directory: String,
    right_bytes: u64,
    damaged_bytes: u64,
    manifests: u64,
    damaged_manifests: u64,
    files: Vec<VerifiedFile>,
    /// Names of files that do not belong to the cache.
    unknown: Vec<String>,
    views: u64,
    #[serde(serialize_with = "names")]
    damaged_views: Vec<ViewEntry>,
}

#[derive(Serialize)]
struct VerifiedFile {
    root: String,
    origin: Option<String>,
    #[serde(flatten)]
    found: Verified,
    complete: bool,
}

fn names<S: Serializer>(views: &[ViewEntry], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(views.iter().map(|view| &view.name))
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch();
    let mut verified = Verification {
        schema: "bcow.cache-verify/1",
        ..Verification::default()
    };
    match args.directory.find()? {
        FoundCache::Missing(path) => verified.directory = path.to_string_lossy().into_owned(),
        FoundCache::Present(cache) => verified.entries(&cache, &interrupt, ui)?,
    }
    verified.views(&args.directory, &interrupt)?;
    if args.json {
        return ui.print_json(&verified);
    }
    verified.print(ui)
}

impl Verification {
    fn entries(
        &mut self,
        cache: &Cache,
        interrupt: &Interrupt,
        ui: &Ui,
    ) -> Result<(), CommandError> {
        self.directory = cache.path().to_string_lossy().into_owned();
        let entries = cache.entries().context(|| cannot_read(cache.path()))?;
        let progress = ui.progress();
        progress.phase("verifying");
        let is_file = |entry: &&CacheEntry| matches!(entry.kind, EntryKind::File(_));
        let held = entries.iter().filter(is_file);
        progress.total(Some(held.map(|entry| entry.held_bytes).sum()));
        for entry in entries {
            let cannot = || format!("cannot verify {}", cache.path().join(&entry.name).display());
            match entry.kind {
                EntryKind::File(root) => {
                    let mut advance = |bytes| {
                        progress.advance(bytes);
                        interrupt.check().is_ok()
                    };
                    let found = cache.verify(root, &mut advance).context(cannot)?;
                    interrupt.check()?;
                    // `None` if it was removed meanwhile.
                    if let Some(found) = found {
                        self.file(root, entry.origin, found);
                    }
                }
                EntryKind::Manifest(digest) => {
                    self.manifests += 1;
                    let is_right = cache.verify_manifest(&digest).context(cannot)?;
                    self.damaged_manifests += u64::from(!is_right);
                }
                EntryKind::Name(_) => {}
                EntryKind::Unknown => self.unknown.push(entry.name),
            }
        }
        Ok(())
    }

    fn file(&mut self, root: Root, origin: Option<String>, found: Verified) {
        self.right_bytes += found.right_bytes;
        self.damaged_bytes += found.damaged_bytes;
        self.files.push(VerifiedFile {
            root: root.to_string(),
            origin,
            complete: found.is_complete(),
            found,
        });
    }

    /// Checks the views, and removes those that are damaged.
    fn views(
        &mut self,
        directory: &DirectoryArgs,
        interrupt: &Interrupt,
    ) -> Result<(), CommandError> {
        let views = directory.views()?;
        let Some(cache) = views.cache else {
            return Ok(());
        };
        for view in views.entries {
            interrupt.check()?;
            let path = cache.directory().join(&view.name);
            let cannot = || format!("cannot verify {}", path.display());
            let Some(is_sound) = cache.verify(&view.name).context(cannot)? else {
                continue;
            };
            self.views += 1;
            if !is_sound {
                cache.remove(&view.name, Remove::Any).context(cannot)?;
                self.damaged_views.push(view);
            }
        }
        Ok(())
    }

    fn print(&self, ui: &Ui) -> Result<(), CommandError> {
        let mut out = ui.output();
        let files = self.files.iter();
        for file in files.filter(|file| file.found.damaged_bytes > 0) {
            let damaged = plural(file.found.damaged_bytes, "byte");
            let from = file.origin.as_deref().map(printable);
            let from = from.map_or_else(String::new, |from| format!(" ({from})"));
            let root = &file.root;
            writeln!(
                out,
                "{root}: removed {damaged} that did not match the Merkle tree{from}"
            )?;
        }
        if self.damaged_manifests > 0 {
            let damaged = plural(self.damaged_manifests, "damaged manifest");
            writeln!(out, "{damaged} removed")?;
        }
        for view in &self.damaged_views {
            let (name, label) = (&view.name, image_label(view));
            writeln!(out, "{name}: removed the damaged view of {label}")?;
        }
        for name in &self.unknown {
            writeln!(out, "{}: not a file of the cache", quoted(name.as_bytes()))?;
        }
        out.finish()?;
        ui.status(format_args!(
            "{} in {} {} verified, {} removed",
            Human(self.right_bytes),
            plural(self.files.len() as u64, "file"),
            if self.files.len() == 1 { "is" } else { "are" },
            Human(self.damaged_bytes),
        ));
        Ok(())
    }
}
