//! The image of an upper, for the check of the references to it.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::Args;
use crate::error::CommandError;
use crate::image::OpenImage;
use crate::names;
use crate::ui::Ui;
use bcow_images::args::IMAGE;

/// Opens the image of an upper: the image that the command line names, or else the `recorded` one.
/// `require_same` refuses another image. If the recorded image cannot be used and the command line
/// names neither an image nor a layer, this prints a warning that `unchecked` is not checked, and
/// returns `None`.
pub(super) fn open(
    args: &Args,
    recorded: &Path,
    require_same: impl FnOnce(&OpenImage) -> Result<(), CommandError>,
    unchecked: &str,
    ui: &Ui,
) -> Result<Option<OpenImage>, CommandError> {
    let name = match &args.lower {
        Some(name) => Ok(name.clone()),
        None => IMAGE
            .parse(recorded.as_os_str())
            .map_err(CommandError::from),
    };
    let opened = name
        .and_then(|name| OpenImage::open_with_layers(&name, &args.layers, &args.stores))
        .and_then(|image| require_same(&image).map(|()| image));
    match opened {
        Ok(image) => Ok(Some(image)),
        Err(error) if args.lower.is_some() || !args.layers.layers.is_empty() => Err(error),
        Err(error) => {
            let name = names::quoted(recorded.as_os_str().as_bytes());
            let message = error.to_string();
            let cause = error.causes().last().unwrap_or(&message);
            ui.warning(format_args!(
                "the image {name} is not usable, so {unchecked} not checked: {cause}"
            ));
            ui.hint("name the image as LOWER, and its layers with --layer");
            Ok(None)
        }
    }
}
