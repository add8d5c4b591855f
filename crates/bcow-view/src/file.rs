//! The file of a view: a sealed BCoW disk whose backing is the image.

use std::io;
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName, Use, compatible, from_hex, hex};
use bcow::{BlockDevice, Composer, Composition, Compression, Image, Storage};
use bcow_erofs::reader::Filesystem;
use bcow_ext4::Sink;
use serde_json::{Value, json};

use crate::lay_out::region_shift;
use crate::{BLOCK_BYTES, Options, ViewError, ViewedImage, lay_out};

/// The version of the layout of views. Views of one image with the same size and version have the
/// same content. A disk names the version of its view, because its blocks match that content only.
/// A change of the content needs a new version, and bcow must then still make views of the old one.
pub(crate) const LAYOUT: u32 = 1;

/// log2 of the block size of metadata, in bytes. Small blocks: a lookup reads one of them.
const BLOCK_SHIFT: u8 = 14;

/// Writes the view of `image` to empty storage. Returns its identity.
pub(crate) fn write(
    storage: Arc<dyn Storage>,
    image: &dyn ViewedImage,
    bytes: u64,
) -> Result<[u8; 32], ViewError> {
    check_kind(image.image())?;
    let fs = Filesystem::open(image.verified()?)?;
    let mut composer = compose(storage, &fs, backing_of(image), image.identity(), bytes)?;
    let identity = composer.content_hash().map_err(ViewError::Write)?;
    composer
        .finish(&metadata(&identity))
        .map_err(ViewError::Write)?;
    Ok(identity)
}

/// Lays out a view of the tree `fs`, and writes its metadata, windows and fragments. The caller
/// finishes the file. `backing` is the entry for the image that contains the tree.
fn compose(
    storage: Arc<dyn Storage>,
    fs: &Filesystem,
    backing: BackingEntry,
    seed: [u8; 32],
    bytes: u64,
) -> Result<Composer, ViewError> {
    let form = Composition {
        size: bytes,
        region_shift: region_shift(bytes),
        block_shift: BLOCK_SHIFT,
        compression: Compression::Zstd { level: 3 },
        backings: vec![backing],
    };
    let mut composer = Composer::new(storage, form).map_err(ViewError::Write)?;
    let options = Options {
        bytes,
        journal_blocks: None,
        seed,
    };
    let view = lay_out(fs, &options, &mut ComposerSink(&mut composer))?;
    for window in &view.windows {
        let [start, address, length] =
            [window.start, window.device_start, window.blocks].map(|blocks| blocks * BLOCK_BYTES);
        composer
            .window(start, 0, address, length)
            .map_err(ViewError::Write)?;
    }
    for fragment in &view.fragments {
        let start = fragment.block * BLOCK_BYTES;
        composer
            .fragment(start, 0, fragment.device_offset, fragment.bytes)
            .map_err(ViewError::Write)?;
    }
    Ok(composer)
}

/// Checks that `image` shows a whole tree.
fn check_kind(image: &Image) -> Result<(), ViewError> {
    let header = image.header();
    if header.purpose != Use::Image || !header.features.has_compatible(compatible::EROFS) {
        return Err(ViewError::NoImage("this is a disk"));
    }
    let metadata = image.metadata().map_err(ViewError::Image)?;
    if metadata.get("layer").is_some() {
        return Err(ViewError::NoImage("this is a layer"));
    }
    Ok(())
}

/// The backing entry for the image in the file of its view. Copies of an image share one view, so
/// the name in the entry does not depend on the path of the image.
fn backing_of(image: &dyn ViewedImage) -> BackingEntry {
    let identity = image.identity();
    BackingEntry {
        name: BackingName::FileName {
            name: hex(&identity),
            identity: Some(identity),
        },
        size: image.image().size(),
    }
}

fn metadata(identity: &[u8; 32]) -> Value {
    json!({
        "tool": concat!("bcow ", env!("CARGO_PKG_VERSION")),
        "view": { "layout": LAYOUT, "identity": hex(identity) },
    })
}

/// The identity that the metadata of the file `view` records; `None` if the file is not a view of
/// `image` with this version of the layout and this size.
pub(crate) fn identity_of(view: &Image, image: &dyn ViewedImage, bytes: u64) -> Option<[u8; 32]> {
    let mut backings = view.backings();
    let is_of_image = backings.next() == Some(&backing_of(image)) && backings.next().is_none();
    let metadata = view.metadata().ok()?;
    let described = metadata.get("view")?;
    let identity = described.get("identity")?.as_str()?;
    let matches = is_of_image
        && view.header().purpose == Use::Disk
        && view.size() == bytes
        && described.get("layout")?.as_u64()? == u64::from(LAYOUT);
    matches.then(|| from_hex(identity)).flatten()
}

/// Writes the metadata of the ext4 to a [`Composer`].
struct ComposerSink<'c>(&'c mut Composer);

impl Sink for ComposerSink<'_> {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, bytes).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use bcow::MemoryStorage;

    use super::*;

    /// The blocks of existing disks match views with exactly this layout. If this test fails, the
    /// layout has changed: it needs a new version, and bcow must still make views of the old one.
    #[test]
    fn the_layout_of_version_1_does_not_change() {
        let bytes = include_bytes!("../../../fixtures/erofs/tree.erofs");
        let backing = BackingEntry {
            name: BackingName::Digest([1; 32]),
            size: bytes.len() as u64,
        };
        let fs = Filesystem::open(Arc::new(bytes.to_vec())).expect("an EROFS");
        let found = [1 << 30, 64 << 30].map(|size| {
            let storage = Arc::new(MemoryStorage::default());
            let composer = compose(storage, &fs, backing.clone(), [9; 32], size);
            hex(&composer.expect("a view").content_hash().expect("a hash"))
        });
        let expected = [
            "7bd9953cf16d67b66f3a9cf7c9918b8126c55a33646b3008d5423e81682ec8b1",
            "43f996ec812fa06e71860e0f5c9afa1c8dc28d434f68147d3d8e22efe4347a36",
        ];
        assert_eq!((LAYOUT, found), (1, expected.map(str::to_owned)));
    }
}
