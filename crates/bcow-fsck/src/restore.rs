//! Restores the damaged bytes of an image from a copy of it.

use std::path::Path;
use std::sync::Arc;

use bcow::check::{RestoreError, restore};
use bcow::{OpenOptions, Storage};
use bcow_images::Name;
use bcow_images::disks::open_for_repair;
use bcow_images::error::{CommandError, Context};
use bcow_images::names::printable;
use bcow_images::remote::Pinned;
use bcow_images::size::{Human, plural};
use bcow_oci::LocalImage;
use bcow_oci::store::{self, LayerProblem, Opened, Places};

use crate::Fsck;
use crate::found::Found;

/// Restores the image, and the files below it, from the files of `from`. Returns a line for each
/// file that changed.
pub fn run(
    asked: &Fsck<'_>,
    name: &LocalImage,
    path: &Path,
    from: &Name,
    places: Places<'_>,
) -> Result<Vec<String>, CommandError> {
    let image = asked.image;
    let copies = copies(from, asked, places)?;
    let mut restoring = Restoring {
        from,
        copies,
        threads: asked.threads(),
        lines: Vec::new(),
        found: false,
    };
    let root = asked.stores.remote.root_hash.map(|root| root.0);
    restoring.file(&image.display().to_string(), path, root)?;
    // The names of the layers are readable as soon as the stack is whole again.
    if let Ok(opened) = store::open(name, places, &OpenOptions::default()) {
        for layer in &opened.below {
            restoring.file(&layer.name, &layer.path, root_of(&opened, &layer.path))?;
        }
        for problem in &opened.problems {
            if let LayerProblem::Open { name, path, .. } | LayerProblem::Wrong { name, path, .. } =
                &**problem
            {
                restoring.file(name, path, root_of(&opened, path))?;
            }
        }
    }
    if restoring.found {
        Ok(restoring.lines)
    } else {
        Err(
            CommandError::new(format!("cannot restore {image}: {from} has no copy of it")).hint(
                "`bcow inspect` shows the Merkle root of each; copies of an image have the same",
            ),
        )
    }
}

/// The files of the image that has the copies.
fn copies(
    from: &Name,
    asked: &Fsck<'_>,
    places: Places<'_>,
) -> Result<Vec<Arc<dyn Storage>>, CommandError> {
    let found = Found::of(from, &asked.stores.remote, Pinned::Never)?;
    let places = Places {
        remote: found.remote_files(),
        ..places
    };
    let mut files = vec![found.storage()];
    // A damaged stack may still have intact blocks.
    if let Ok(opened) = found.open(found.storage(), places) {
        files.extend(opened.below.into_iter().map(|layer| layer.storage));
    }
    Ok(files)
}

/// The root hash that a stack has for the layer in this file of a layout.
fn root_of(opened: &Opened, path: &Path) -> Option<[u8; 32]> {
    let name = path.file_name()?.to_str()?;
    let mut layers = opened.layers.iter().map(|layer| &layer.recorded);
    let recorded = layers.find(|recorded| recorded.digest.hex() == name)?;
    Some(recorded.merkle_root)
}

struct Restoring<'r> {
    from: &'r Name,
    copies: Vec<Arc<dyn Storage>>,
    threads: usize,
    lines: Vec<String>,
    /// Whether there was a copy of any file.
    found: bool,
}

impl Restoring<'_> {
    fn file(
        &mut self,
        name: &str,
        path: &Path,
        root: Option<[u8; 32]>,
    ) -> Result<(), CommandError> {
        let cannot = |path: &Path| format!("cannot restore {}", path.display());
        let (file, _lock) = open_for_repair(path, path)?;
        let copies: Vec<Arc<dyn Storage>> = self
            .copies
            .iter()
            .filter(|copy| copy.identity() != file.identity())
            .cloned()
            .collect();
        let restored = match restore(&*file, root, &copies, self.threads) {
            Ok(restored) => restored,
            Err(RestoreError::NoCopy { .. }) => return Ok(()),
            Err(RestoreError::File(error)) => return Err(error).context(|| cannot(path)),
            Err(error @ RestoreError::UnknownRoot) => {
                return Err(CommandError::new(format!("{}: {error}", cannot(path)))
                    .hint("name the original by --root-hash, or copy the whole file again"));
            }
            Err(error) => {
                return Err(CommandError::new(format!("{}: {error}", cannot(path))));
            }
        };
        self.found = true;
        if restored.is_changed() {
            let mut done = Vec::new();
            if !restored.written.is_empty() {
                done.push(format!(
                    "{} in {} restored from {}",
                    Human(restored.written_bytes()),
                    plural(restored.written.len() as u64, "range"),
                    printable(&self.from.to_string())
                ));
            }
            if restored.cut_off > 0 {
                done.push(format!(
                    "{} beyond the end cut off",
                    plural(restored.cut_off, "byte")
                ));
            }
            let name = printable(name);
            self.lines.push(format!("{name}: {}", done.join(", ")));
        }
        Ok(())
    }
}
