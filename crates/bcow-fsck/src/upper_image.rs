//! The image of an upper, for the check of the references to it.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bcow_images::args::IMAGE;
use bcow_images::error::CommandError;
use bcow_images::image::OpenImage;
use bcow_images::names;

use crate::Fsck;

/// Opens the image of an upper: the image that the command line names, or else the `recorded` one.
/// `require_same` refuses another image. If the recorded image cannot be used and the command line
/// names neither an image nor a layer, this prints a warning that `unchecked` is not checked, and
/// returns `None`.
pub fn open(
    asked: &Fsck<'_>,
    recorded: &Path,
    require_same: impl FnOnce(&OpenImage) -> Result<(), CommandError>,
    unchecked: &str,
) -> Result<Option<OpenImage>, CommandError> {
    let name = match asked.lower {
        Some(name) => Ok(name.clone()),
        None => IMAGE
            .parse(recorded.as_os_str())
            .map_err(CommandError::from),
    };
    let opened = name
        .and_then(|name| OpenImage::open_with_layers(&name, asked.layers, asked.stores))
        .and_then(|image| require_same(&image).map(|()| image));
    match opened {
        Ok(image) => Ok(Some(image)),
        Err(error) if asked.lower.is_some() || !asked.layers.layers.is_empty() => Err(error),
        Err(error) => {
            let name = names::quoted(recorded.as_os_str().as_bytes());
            let message = error.to_string();
            let cause = error.causes().last().unwrap_or(&message);
            asked.messages.warning(&format_args!(
                "the image {name} is not usable, so {unchecked} not checked: {cause}"
            ));
            asked
                .messages
                .hint("name the image as LOWER, and its layers with --layer");
            Ok(None)
        }
    }
}
