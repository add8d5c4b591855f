//! Reading of disks that show an image as ext4, as the changes to this image.

use std::path::Path;
use std::sync::Arc;

use bcow::chain::directory_of;
use bcow::format::BackingName;
use bcow::{BlockDevice, Image, OpenOptions};
use bcow_union::offline::DiskOverView;

use crate::disks::{self, Below, NamedImage, OpenChain};
use crate::error::CommandError;
use crate::image::{OpenImage, StoreArgs};
use crate::kernel_upper::ReadUpper;

/// Opens the disk at `path`, and finds the view of `image` below it. The disk is locked against
/// writers.
pub fn open(
    image: &OpenImage,
    path: &Path,
    stores: &StoreArgs,
) -> Result<DiskOverView, CommandError> {
    let cannot = || CommandError::new(format!("cannot use the disk {}", path.display()));
    if !disks::is_disk(path) {
        return Err(cannot()
            .caused_by_text("it is not a disk")
            .hint("--upper takes the directory of a writable mount, or a disk of `bcow create`"));
    }
    let named = NamedImage {
        directory: match image.remote() {
            None => Some(directory_of(&image.opened().path)),
            Some(_) => None,
        },
        files: image.files(),
        url: image.lasting_url().map(str::to_owned),
    };
    let chain = Below::beside(stores, &OpenOptions::default(), named)?.open_chain(path, path)?;
    if let Some(problem) = chain.problems.first() {
        return Err(problem.failure(path));
    }
    let Some((above, view)) = split(&chain) else {
        return Err(cannot()
            .caused_by_text("it does not show an image as a file system")
            .hint("`bcow create -b IMG --fs ext4` makes such a disk"));
    };
    let shown = image_of(&view);
    if shown != Some(image.identity()) {
        return Err(cannot()
            .caused_by_text(format!("it does not show {}", image.path().display()))
            .hint("name the image with which the disk was created"));
    }
    Ok(DiskOverView {
        disk: chain.image.clone() as Arc<dyn BlockDevice>,
        above,
        view: view as Arc<dyn BlockDevice>,
        lock: None,
    })
}

/// The disk of an upper of the kernel driver, and the view below it.
pub fn of_upper(upper: ReadUpper, path: &Path) -> Result<DiskOverView, CommandError> {
    let mut above = vec![upper.disk.clone()];
    above.extend(upper.below);
    let (Some(view), false) = (above.pop(), above.is_empty()) else {
        return Err(
            CommandError::new(format!("cannot use the upper {}", path.display()))
                .caused_by_text("its disk is not over the view of an image"),
        );
    };
    Ok(DiskOverView {
        disk: upper.disk,
        above,
        view,
        lock: Some(Arc::new(upper.reader)),
    })
}

/// The files above the view, and the view.
fn split(chain: &OpenChain) -> Option<(Vec<Arc<Image>>, Arc<Image>)> {
    let mut above = vec![chain.image.clone()];
    for file in &chain.files {
        let image = file.image.clone();
        let over = above.last().and_then(|file| file.disk_backing());
        if matches!(over?.name, BackingName::View { .. }) {
            return Some((above, image));
        }
        above.push(image);
    }
    None
}

/// The identity of the image that a view shows.
fn image_of(view: &Image) -> Option<[u8; 32]> {
    match &view.backings().next()?.name {
        BackingName::FileName { identity, .. } => *identity,
        _ => None,
    }
}
