//! Images that the kernel reads by itself.

use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bcow::format::incompatible;
use bcow::{Image, Mapping};
use bcow_oci::store::StackLayer;

use crate::error::{CommandError, Context};
use crate::image::{Messages, OpenImage, cannot_open};
use crate::names;
use crate::size::{Count, plural};

/// The files with which the kernel alone mounts an image: the file that begins with its EROFS, and
/// those of its further devices, in the order of the devices. `None` if the image is not plain.
pub fn files(image: &OpenImage) -> Result<Option<Vec<PathBuf>>, CommandError> {
    let opened = image.opened();
    let mut files = vec![(&*opened.image, opened.path.as_path())];
    let tree = image.tree()?;
    let backings = opened.image.backings();
    let backings: Vec<String> = backings.map(|entry| entry.name.to_string()).collect();
    let layers = opened.layers.iter();
    let layers: HashMap<String, &StackLayer> = layers
        .map(|layer| (layer.recorded.digest.to_string(), layer))
        .collect();
    // The layer whose window begins at this byte of the address space.
    let device_at = |start: u64| {
        let extent = opened.image.map(start).ok()?;
        let Mapping::Backing {
            index, offset: 0, ..
        } = extent.mapping
        else {
            return None;
        };
        let layer = layers.get(backings.get(index as usize)?)?;
        let file = layer.file.as_ref()?;
        (extent.offset == start).then_some((&*file.image, file.path.as_path()))
    };
    for &start in &tree.filesystem().superblock().devices {
        let (layer, path) = device_at(start).ok_or_else(|| {
            CommandError::new(format!(
                "no layer matches the device at byte {start} of {}",
                image.path().display()
            ))
            .hint("convert the image again")
        })?;
        files.push((layer, path));
    }
    let has = |image: &Image, feature| image.header().features.has_incompatible(feature);
    let are_plain = files.iter().all(|(file, _)| has(file, incompatible::PLAIN));
    let has_windows = has(&opened.image, incompatible::WINDOWS);
    if !are_plain || (has_windows && files.len() == 1) {
        return Ok(None);
    }
    let canonical = |path: &Path| {
        path.canonicalize()
            .context(|| format!("cannot find {}", path.display()))
    };
    let paths = files.iter().map(|(_, path)| canonical(path));
    paths.collect::<Result<_, _>>().map(Some)
}

/// The limit of mount(2) on the length of its options: one page.
const OPTIONS_BYTES: usize = 4096;

/// The command line with which root mounts the image on `directory` with the kernel alone.
pub fn mount_command(
    image: &OpenImage,
    directory: &Path,
    messages: &dyn Messages,
) -> Result<String, CommandError> {
    let all = image.opened().require_all();
    all.map_err(|error| cannot_open(image.path(), &error))?;
    let Some(files) = files(image)? else {
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
    let target = quoted(directory);
    let (image, layers) = (&files[0], &files[1..]);
    if layers.is_empty() {
        return Ok(format!(
            "mount -t erofs -o ro,loop {} {target}",
            quoted(image)
        ));
    }
    let likely = "ro".len() + layers.len() * ",device=/dev/loop1000".len();
    if likely > OPTIONS_BYTES {
        messages.warning(&format_args!(
            "the options for {} exceed the {} bytes of mount(2): the command needs a mount(8) that \
             uses fsconfig(2)",
            plural(layers.len() as u64, "layer"),
            Count(OPTIONS_BYTES as u64),
        ));
    }
    // mount(8) creates a loop device for one file, but refuses files as further devices.
    let device = |path: &Path| format!("\"$(losetup -rf --show {})\"", quoted(path));
    let layers = layers
        .iter()
        .map(|layer| format!(",device={}", device(layer)));
    let layers: String = layers.collect();
    Ok(format!(
        "mount -t erofs -o ro{layers} {} {target}",
        device(image)
    ))
}
