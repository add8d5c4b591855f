//! Runs `bcow`. A process of its own does each task: a damaged image, or a lack of memory, then
//! fails one task and not the caller.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Bytes of the messages of a failed command that a client gets.
const MESSAGE_BYTES: usize = 4096;
/// What the messages of `bcow` have when a server denies access, with status 401 or 403.
const DENIAL: &str = "the server denies access (status 40";

/// The program `bcow`.
#[derive(Debug, Clone)]
pub struct Tool {
    program: PathBuf,
}

/// `bcow` failed.
#[derive(Debug, thiserror::Error)]
#[error("{command} failed: {message}")]
pub struct ToolError {
    /// The program and the command.
    pub command: String,
    /// The end of its messages, or its status.
    pub message: String,
    /// Its exit status; `None` if it did not exit.
    pub status: Option<i32>,
}

impl ToolError {
    /// Whether the server of an image denies access. Mounts have no exit status for that.
    pub fn is_denial(&self) -> bool {
        self.message.contains(DENIAL)
    }
}

/// Why a name in a registry leads to no image in BCoW form.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The registry has no BCoW image that may be used.
    #[error(transparent)]
    NoImage(ToolError),
    /// The registry denies access. The caller says how it gets credentials.
    #[error(transparent)]
    Denied(ToolError),
    /// The registry did not say.
    #[error(transparent)]
    Unknown(ToolError),
}

impl From<ToolError> for ResolveError {
    /// By the exit statuses of `bcow inspect --resolve`.
    fn from(error: ToolError) -> Self {
        match error.status {
            Some(3) => ResolveError::NoImage(error),
            Some(4) => ResolveError::Denied(error),
            _ => ResolveError::Unknown(error),
        }
    }
}

impl Tool {
    /// The program at this path, or of this name in PATH; by default, `bcow` beside this program,
    /// or else in PATH. Fails if it does not run.
    pub fn new(program: Option<PathBuf>) -> Result<Self, ToolError> {
        let tool = Tool {
            program: program.unwrap_or_else(beside),
        };
        tool.run("version", &[]).map(drop)?;
        Ok(tool)
    }

    /// Finds the image in BCoW form to which a name in a registry leads; returns its description in
    /// JSON.
    pub fn resolve(&self, name: &str, options: &[String]) -> Result<Vec<u8>, ResolveError> {
        let mut arguments: Vec<OsString> = vec!["--resolve".into(), "--json".into()];
        arguments.extend(options.iter().map(OsString::from));
        arguments.extend(["--".into(), name.into()]);
        Ok(self.run("inspect", &arguments)?)
    }

    /// Fails if this pool does not run.
    pub fn require_pool(&self, name: &str) -> Result<(), ToolError> {
        let arguments = ["stats", "--json", "--", name].map(OsString::from);
        self.run("pool", &arguments).map(drop)
    }

    /// Mounts as mount(8) does, by the helper `mount.bcow`, which is this program by another name.
    /// `options` are those of fstab(5).
    pub fn mount(&self, source: &str, directory: &Path, options: &str) -> Result<(), ToolError> {
        let mut helper = Command::new(&self.program);
        helper.arg0("mount.bcow").arg(source).arg(directory);
        helper.args(["-o", options]).stdout(Stdio::null());
        self.finish("mount", &mut helper).map(drop)
    }

    /// Runs a command; returns what it has printed.
    pub fn run(&self, command: &str, arguments: &[OsString]) -> Result<Vec<u8>, ToolError> {
        self.run_into(command, arguments, Stdio::piped())
    }

    /// Runs a command whose standard output goes to `output`; returns it if it is a pipe.
    pub fn run_into(
        &self,
        command: &str,
        arguments: &[OsString],
        output: Stdio,
    ) -> Result<Vec<u8>, ToolError> {
        let mut run = Command::new(&self.program);
        run.arg("--quiet").arg(command).args(arguments);
        self.finish(command, run.stdout(output))
    }

    /// Runs a process to its end; returns its standard output if that is a pipe.
    fn finish(&self, name: &str, process: &mut Command) -> Result<Vec<u8>, ToolError> {
        let failure = |message: String, status: Option<i32>| ToolError {
            command: format!("{} {name}", self.program.display()),
            message,
            status,
        };
        let output = process
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .and_then(|child| child.wait_with_output())
            .map_err(|error| failure(error.to_string(), None))?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let from = output.stderr.len().saturating_sub(MESSAGE_BYTES);
        let text = String::from_utf8_lossy(&output.stderr[from..]);
        let message = match text.trim() {
            "" => output.status.to_string(),
            text => text.to_owned(),
        };
        Err(failure(message, output.status.code()))
    }
}

/// `bcow` beside this program, or else the one in PATH.
fn beside() -> PathBuf {
    let beside = std::env::current_exe().ok();
    let beside = beside.and_then(|path| Some(path.parent()?.join("bcow")));
    beside
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PathBuf::from("bcow"))
}

/// Checks the name of a pool, which becomes an option of mounts.
pub fn parse_pool(text: &str) -> Result<String, String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if !text.is_empty() && !text.starts_with(['.', '-']) && text.chars().all(is_allowed) {
        Ok(text.to_owned())
    } else {
        Err("a name consists of letters, digits, '.', '_' and '-'".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named() {
        let error = Tool::new(Some("/nonexistent/bcow".into())).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("/nonexistent/bcow version failed"), "{text}");
    }

    #[test]
    fn a_failed_command_ends_with_its_messages_or_its_status() {
        let error = Tool::new(Some("false".into())).unwrap_err().to_string();
        assert_eq!(error, "false version failed: exit status: 1");
    }
}
