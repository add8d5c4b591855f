//! Runs `bcow`, which makes the layers.

use std::ffi::OsString;
use std::path::Path;

use bcow_tool::Tool;

use crate::error::Error;

/// Converts a directory into the lowest layer, a new file.
pub fn convert(tool: &Tool, files: &Path, layer: &Path) -> Result<(), Error> {
    let mut source = OsString::from("dir:");
    source.push(files);
    tool.run("convert", &["--".into(), source, layer.into()])?;
    Ok(())
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
    let mut arguments: Vec<OsString> = options.iter().map(OsString::from).collect();
    arguments.extend(["--upper".into(), upper.into()]);
    let (lowest, rest) = below
        .split_first()
        .ok_or_else(|| Error::State(format!("the upper {} has no layer below", upper.display())))?;
    for layer in rest {
        arguments.extend(["--layer".into(), layer.into()]);
    }
    arguments.extend(["--".into(), lowest.into(), layer.into()]);
    tool.run("commit", &arguments)?;
    Ok(())
}
