//! Runs `bcow`, which makes the layers.

use std::ffi::OsString;
use std::path::Path;

use bcow_tool::Tool;
use serde::Deserialize;

use crate::error::Error;

/// Converts a directory into the lowest layer, a new file.
pub fn convert(tool: &Tool, files: &Path, layer: &Path) -> Result<(), Error> {
    let mut source = OsString::from("dir:");
    source.push(files);
    tool.run("convert", &["--".into(), source, layer.into()])?;
    Ok(())
}

/// An archive that became a layer.
#[derive(Debug, Deserialize)]
pub struct Archive {
    /// The digest of the archive without its compression.
    pub diff_id: String,
    /// The bytes of the archive without its compression.
    pub bytes: u64,
}

/// Converts the archive of a layer into a layer, a new file.
pub fn convert_archive(tool: &Tool, archive: &Path, layer: &Path) -> Result<Archive, Error> {
    #[derive(Deserialize)]
    struct Converted {
        layers: [Archive; 1],
    }
    let mut source = OsString::from("tar:");
    source.push(archive);
    // The client compares the diffID, which an archive that ends too early does not have.
    let options = [
        "--as-layer",
        "--as-files",
        "--allow-truncated",
        "--json",
        "--",
    ];
    let mut arguments = Vec::from(options.map(OsString::from));
    arguments.extend([source, layer.into()]);
    let printed = tool.run("convert", &arguments)?;
    let Converted { layers: [archive] } = serde_json::from_slice(&printed)
        .map_err(|error| Error::State(format!("unknown output of bcow convert: {error}")))?;
    Ok(archive)
}

/// Writes the changes in an upper to `below`, the lowest layer and the layers on it, as a further
/// layer, a new file. `options` are for layers in a registry.
pub fn commit(
    tool: &Tool,
    below: &[String],
    options: &[String],
    upper: &Path,
    layer: &Path,
) -> Result<(), Error> {
    let mut arguments = over(below, options, upper)?;
    arguments.push(layer.into());
    tool.run("commit", &arguments)?;
    Ok(())
}

/// Whether an upper has changes to the layers `below`.
pub fn is_changed(
    tool: &Tool,
    below: &[String],
    options: &[String],
    upper: &Path,
) -> Result<bool, Error> {
    match tool.run("diff", &over(below, options, upper)?) {
        Ok(_) => Ok(false),
        Err(error) if error.status == Some(1) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// The arguments for an upper over layers.
fn over(below: &[String], options: &[String], upper: &Path) -> Result<Vec<OsString>, Error> {
    let mut arguments: Vec<OsString> = options.iter().map(OsString::from).collect();
    arguments.extend(["--upper".into(), upper.into()]);
    let (lowest, rest) = below
        .split_first()
        .ok_or_else(|| Error::State(format!("the upper {} has no layer below", upper.display())))?;
    for layer in rest {
        arguments.extend(["--layer".into(), layer.into()]);
    }
    arguments.extend(["--".into(), lowest.into()]);
    Ok(arguments)
}
