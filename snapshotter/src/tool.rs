//! Runs `bcow`, which makes the layers, and finds those in registries.
//!
//! A process of its own makes each layer: a damaged directory, or a lack of memory, then fails one
//! commit and not the snapshotter.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::Error;

/// Bytes of the messages of a failed command that a client gets.
const MESSAGE_BYTES: usize = 4096;

/// The program `bcow`.
#[derive(Debug, Clone)]
pub struct Tool {
    program: PathBuf,
}

impl Tool {
    /// The program at this path, or of this name in PATH. Fails if it does not run.
    pub fn new(program: PathBuf) -> Result<Self, Error> {
        let tool = Tool { program };
        tool.run("version", &[]).map(drop)?;
        Ok(tool)
    }

    /// Converts a directory into the lowest layer, a new file.
    pub fn convert(&self, files: &Path, layer: &Path) -> Result<(), Error> {
        let mut source = OsString::from("dir:");
        source.push(files);
        self.run("convert", &["--".into(), source, layer.into()])
            .map(drop)
    }

    /// Writes the changes in an upper to `below`, the lowest layer and the layers on it, as a
    /// further layer, a new file. `options` are for layers in a registry.
    pub fn commit(
        &self,
        below: &[String],
        options: &[String],
        upper: &Path,
        layer: &Path,
    ) -> Result<(), Error> {
        let mut arguments: Vec<OsString> = options.iter().map(OsString::from).collect();
        arguments.extend(["--upper".into(), upper.into()]);
        let (lowest, rest) = below.split_first().ok_or_else(|| {
            Error::State(format!("the upper {} has no layer below", upper.display()))
        })?;
        for layer in rest {
            arguments.extend(["--layer".into(), layer.into()]);
        }
        arguments.extend(["--".into(), lowest.into(), layer.into()]);
        self.run("commit", &arguments).map(drop)
    }

    /// Finds the image in BCoW form to which a name in a registry leads; returns its description in
    /// JSON.
    pub fn resolve(&self, name: &str, options: &[String]) -> Result<Vec<u8>, Error> {
        let mut arguments: Vec<OsString> = vec!["--resolve".into(), "--json".into()];
        arguments.extend(options.iter().map(OsString::from));
        arguments.extend(["--".into(), name.into()]);
        self.run("inspect", &arguments)
    }

    /// Fails if this pool does not run.
    pub fn require_pool(&self, name: &str) -> Result<(), Error> {
        let arguments = ["stats", "--json", "--", name].map(OsString::from);
        self.run("pool", &arguments).map(drop)
    }

    /// Runs a command; returns what it has printed.
    fn run(&self, command: &str, arguments: &[OsString]) -> Result<Vec<u8>, Error> {
        let failure = |message: String| Error::Tool {
            command: format!("{} {command}", self.program.display()),
            message,
        };
        let output = Command::new(&self.program)
            .arg("--quiet")
            .arg(command)
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| failure(error.to_string()))?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let from = output.stderr.len().saturating_sub(MESSAGE_BYTES);
        let text = String::from_utf8_lossy(&output.stderr[from..]);
        Err(failure(match text.trim() {
            "" => output.status.to_string(),
            text => text.to_owned(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named() {
        let error = Tool::new("/nonexistent/bcow".into()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("/nonexistent/bcow version failed"), "{text}");
    }

    #[test]
    fn a_failed_command_ends_with_its_messages_or_its_status() {
        let error = Tool::new("false".into()).unwrap_err().to_string();
        assert_eq!(error, "false version failed: exit status: 1");
    }
}
