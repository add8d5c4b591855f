//! The image of an upper, for the check of the references to it.

use bcow_images::args::IMAGE;
use bcow_images::error::CommandError;
use bcow_images::image::OpenImage;
use bcow_images::{Name, names};

use crate::Fsck;

/// Opens the image of an upper: the image that the command line names, or else the `recorded` one;
/// `None` without either. `require_same` refuses another image. If the recorded image cannot be
/// used and the command line names no layer, this warns that `unchecked` is not checked, and
/// returns `None`.
pub fn open(
    asked: &Fsck<'_>,
    recorded: Option<&str>,
    require_same: impl FnOnce(&OpenImage) -> Result<(), CommandError>,
    unchecked: &str,
) -> Result<Option<OpenImage>, CommandError> {
    let has_layers = !asked.layers.layers.is_empty();
    let open = |name: &Name| {
        let image = OpenImage::open(name, &asked.layers.layers, asked.stores)?;
        require_same(&image).map(|()| image)
    };
    let recorded = match (asked.lower, recorded) {
        (Some(name), _) => return open(name).map(Some),
        (None, Some(recorded)) => recorded,
        (None, None) if has_layers => {
            let usage = "--layer needs the image of the upper: LOWER";
            return Err(CommandError::usage(usage));
        }
        (None, None) => return Ok(None),
    };
    let name = IMAGE.parse(recorded.as_ref()).map_err(CommandError::from);
    match name.and_then(|name| open(&name)) {
        Err(error) if !has_layers => {
            let name = names::quoted(recorded.as_bytes());
            let message = error.to_string();
            let cause = error.causes().last().unwrap_or(&message);
            asked.messages.warning(&format_args!(
                "the image {name} is not usable, so {unchecked} not checked: {cause}"
            ));
            let hint = "name the image as LOWER, and its layers with --layer";
            asked.messages.hint(hint);
            Ok(None)
        }
        opened => opened.map(Some),
    }
}
