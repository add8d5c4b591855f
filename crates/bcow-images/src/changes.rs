//! The changes to an image: in an upper of either driver, or in a disk that shows the image.

use std::path::Path;
use std::sync::Arc;

use bcow::OpenOptions;
use bcow_erofs::merge::merge;
use bcow_erofs::tree::LayerTree;
use bcow_ext4::ReadError;
use bcow_oci::Limits;
use bcow_union::offline::{Changes, ChangesError, Problem, Scope};
use bcow_view::CompareError;

use crate::error::CommandError;
use crate::image::{Messages, OpenImage, StoreArgs, Tree};
use crate::kernel_upper::{self, is_kernel_upper};
use crate::names;
use crate::over_view;
use crate::readable_upper::ReadableUpper;
use crate::size::plural;
use crate::upper::{Joined, open_reader_of};

/// The changes in an upper to its image, or those in a disk that shows the image.
pub fn read(
    image: &OpenImage,
    upper: &ReadableUpper,
    stores: &StoreArgs,
    scope: Scope<'_>,
    messages: &dyn Messages,
) -> Result<Changes, CommandError> {
    let (upper, snapshot) = (&*upper.path, upper.snapshot.as_deref());
    let most = Limits::default().max_entries;
    let lower = || -> Result<_, CommandError> { Ok(Arc::new(image.tree()?.into_filesystem())) };
    let device = image.image().clone();
    let disk = match () {
        () if upper.is_file() => Some(over_view::open(image, upper, stores)?),
        () if is_kernel_upper(upper) => {
            let options = OpenOptions::default();
            let found = kernel_upper::read(image, upper, snapshot, &options, messages)?;
            Some(over_view::of_upper(found, upper)?)
        }
        () => None,
    };
    let changes = match disk {
        Some(disk) => Changes::of_disk(disk, lower()?, device, scope, most),
        None => {
            let reader = open_reader_of(image, upper, messages)?;
            Changes::read(&reader, lower()?, device, scope, most)
        }
    };
    let changes = changes.map_err(|error| cannot_read(upper, image, &error))?;
    for (name, count) in &changes.dropped_xattrs {
        let name = names::quoted(name);
        messages.warning(&format_args!(
            "left out extended attribute {name} of {}, which an image cannot store",
            plural(*count, "file")
        ));
    }
    Ok(changes)
}

/// The trees of the directories that an upper changes: of its image, and with the changes.
pub fn trees(
    image: &OpenImage,
    upper: &ReadableUpper,
    stores: &StoreArgs,
    messages: &dyn Messages,
) -> Result<[Tree; 2], CommandError> {
    let changes = read(image, upper, stores, Scope::Touched, messages)?;
    let before = tree(image.path(), &changes, vec![changes.touched.clone()], upper)?;
    Ok([before, changed_tree(changes, upper)?])
}

/// The trees of the directories that one of two uppers changes: with the changes of each.
pub fn trees_of_two(
    image: &OpenImage,
    uppers: [&ReadableUpper; 2],
    stores: &StoreArgs,
    messages: &dyn Messages,
) -> Result<[Tree; 2], CommandError> {
    let read = |upper, scope| read(image, upper, stores, scope, messages);
    let paths = read(uppers[1], Scope::Layer)?.layer;
    let first = read(uppers[0], Scope::TouchedByBoth(&paths))?;
    let second = read(uppers[1], Scope::TouchedByBoth(&first.layer))?;
    Ok([
        changed_tree(first, uppers[0])?,
        changed_tree(second, uppers[1])?,
    ])
}

/// What the changes touch, with the changes.
fn changed_tree(mut changes: Changes, upper: &ReadableUpper) -> Result<Tree, CommandError> {
    let take = |tree| std::mem::replace(tree, LayerTree::new());
    let layers = vec![take(&mut changes.touched), take(&mut changes.layer)];
    tree(&upper.path, &changes, layers, upper)
}

/// The layers of the changes as one tree, which is called `name`.
fn tree(
    name: &Path,
    changes: &Changes,
    layers: Vec<LayerTree>,
    upper: &ReadableUpper,
) -> Result<Tree, CommandError> {
    let merged = merge(layers).joined(&upper.path)?;
    let spliced = changes.store.filesystem(&merged).joined(&upper.path)?;
    Ok(Tree::new(name, spliced.filesystem))
}

fn cannot_read(upper: &Path, image: &OpenImage, error: &ChangesError) -> CommandError {
    let what = match &error.path[..] {
        [] => "the root".to_owned(),
        path => names::quoted(path),
    };
    let failure = CommandError::new(format!("cannot read {what} in {}", upper.display()))
        .caused_by_text(error.problem.to_string());
    match error.problem {
        Problem::Image(_) => failure.hint(format!(
            "`bcow fsck --data {}` lists all damage",
            image.path().display()
        )),
        Problem::Mark(_) | Problem::NoLower { .. } | Problem::Partial(_) => {
            failure.hint(format!("`bcow fsck {}` lists all damage", upper.display()))
        }
        Problem::Compare(CompareError::Disk(ReadError::Journal(_))) => {
            failure.hint("mount the disk and unmount it once: the kernel replays the journal")
        }
        Problem::Disk(_) | Problem::DirectoryTwice(_) | Problem::Compare(CompareError::Disk(_)) => {
            failure.hint(
                "e2fsck repairs such damage, for instance on a device of `bcow attach` or `bcow \
                 serve`",
            )
        }
        _ => failure,
    }
}
