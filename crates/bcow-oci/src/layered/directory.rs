//! Converts a directory of the host into an image of one layer.
//!
//! A layer is identified by the digest of its archive, but a directory has no archive. So the
//! directory is read into a scratch image. An archive of this image goes through a pipe into the
//! conversion. The archive is the only layer that `bcow export --to oci:DIR` would write for the
//! image, so the result is the same as after such an export and a conversion.

use std::io;
use std::path::Path;
use std::thread;

use bcow::{Compression, Image as BcowImage, OpenOptions};
use bcow_erofs::reader::Filesystem;

use crate::blob::{Blob, read_error};
use crate::cancel::Cancel;
use crate::conversion::{Conversion, Target};
use crate::error::ConvertError;
use crate::export::{TarForm, export_tar};
use crate::image::Image;
use crate::input::single_layer;
use crate::layer::Reading;
use crate::layout::write::LayoutWriter;
use crate::metadata::Metadata;
use crate::options::{ConvertOptions, Progress, RunOptions};
use crate::space::INLINE_MAX;

/// Calls `convert` with an image whose only layer is an archive of the directory at `path`.
pub(crate) fn as_image<R>(
    path: &Path,
    layout: &LayoutWriter,
    options: &ConvertOptions,
    progress: &dyn Progress,
    convert: impl FnOnce(Image) -> Result<R, ConvertError>,
) -> Result<R, ConvertError> {
    let scratch = scratch(path, layout, options, progress)?;
    let name = path.display().to_string();
    let failed = |error: io::Error| read_error("make an archive of", &name, error);
    let (reader, mut writer) = io::pipe().map_err(failed)?;
    let export_options = RunOptions {
        threads: 1,
        cancel: options.cancel.clone(),
    };
    thread::scope(|scope| {
        let export = move || {
            export_tar(
                &scratch,
                TarForm::Flattened,
                &mut writer,
                &export_options,
                progress,
            )
        };
        let export = thread::Builder::new().spawn_scoped(scope, export);
        let export = export.map_err(failed)?;
        // The image owns the reading end of the pipe; both are dropped when the conversion ends.
        let converted = convert(single_layer(Blob::pipe(name.clone(), reader)));
        let exported = export
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match (converted, exported) {
            // The conversion failed first; the write error of the export is a consequence.
            (Err(error), Err(ConvertError::WriteArchive(_)) | Ok(_)) => Err(error),
            (_, Err(ConvertError::Interrupted)) => Err(ConvertError::Interrupted),
            (_, Err(error)) => Err(failed(io::Error::other(error))),
            (Ok(converted), Ok(_)) => Ok(converted),
        }
    })
}

/// Reads the directory into an image that never gets a name.
fn scratch(
    path: &Path,
    layout: &LayoutWriter,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<Filesystem, ConvertError> {
    let options = ConvertOptions {
        compression: Compression::None,
        plain: false,
        block_bytes: None,
        ..options.clone()
    };
    let output = layout.new_blob()?;
    let target = Target {
        output: &output,
        path: layout.directory().to_owned(),
        threads: options.threads.max(1),
        inline_max: INLINE_MAX,
    };
    let mut conversion = Conversion::start(target, &options, progress)?;
    let cancel = Cancel::new(options.cancel.as_deref());
    let reading = Reading::new(&options.limits, progress, cancel);
    let tree = conversion.directory(path, &reading)?;
    let tree = tree.into_tree();
    let tree = tree.map_err(|problem| ConvertError::layout(path.display().to_string(), problem))?;
    let nothing = Metadata::new("", serde_json::Value::Null, serde_json::Map::new());
    conversion.finish(&tree, nothing)?;
    let file = std::sync::Arc::new(output.file()?);
    let image = BcowImage::open_storage(file, &OpenOptions::default())
        .map_err(|error| ConvertError::Verify(error.into()))?;
    Filesystem::open(image).map_err(|error| ConvertError::Verify(error.into()))
}
