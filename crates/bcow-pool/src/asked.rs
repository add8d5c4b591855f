//! A mount as a client asks for it: the command line, and the directory to which its paths are
//! relative. Each process of a pool reads it again to open the files of the mount.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use bcow_images::error::{CommandError, Context};
use bcow_images::global::GlobalArgs;
use bcow_mounts::MountArgs;
use clap::Parser;
use nix::sched::CloneFlags;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

/// A string of the host, which may be any bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Bytes {
    /// UTF-8.
    Text(String),
    /// Other bytes.
    Other(Vec<u8>),
}

impl From<&OsStr> for Bytes {
    fn from(string: &OsStr) -> Self {
        match string.to_str() {
            Some(text) => Bytes::Text(text.to_owned()),
            None => Bytes::Other(string.as_bytes().to_vec()),
        }
    }
}

impl From<Bytes> for OsString {
    fn from(bytes: Bytes) -> Self {
        match bytes {
            Bytes::Text(text) => text.into(),
            Bytes::Other(bytes) => OsString::from_vec(bytes),
        }
    }
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// The command line of `bcow mount`, from the name of the program on.
    pub arguments: Vec<Bytes>,
    /// The directory to which its paths are relative.
    pub directory: Bytes,
}

/// The command line of a mount, with options that concern the terminal of the client only.
#[derive(Debug, Parser)]
#[command(name = "bcow")]
struct CommandLine {
    #[command(flatten)]
    _global: GlobalArgs,
    #[command(subcommand)]
    command: MountCommand,
}

#[derive(Debug, clap::Subcommand)]
enum MountCommand {
    Mount(MountArgs),
}

impl Asked {
    /// The options of the mount.
    pub fn args(&self) -> Result<MountArgs, CommandError> {
        let arguments = self.arguments.iter().cloned().map(OsString::from);
        let parsed = CommandLine::try_parse_from(arguments).map_err(|error| {
            CommandError::usage("the pool does not accept the command line of the mount")
                .caused_by_text(error.kind().to_string())
                .hint("the pool may be of another version of bcow: start it again")
        })?;
        let MountCommand::Mount(args) = parsed.command;
        Ok(args)
    }
}

/// The working directory of this thread, and of those that it starts.
pub struct OwnDirectory;

impl OwnDirectory {
    /// Separates the thread from the working directory of the process, and changes to `directory`,
    /// that of the process `client`, if that runs.
    pub fn enter(directory: Bytes, client: Option<Pid>) -> Result<Self, CommandError> {
        let directory: OsString = directory.into();
        let cannot = || format!("cannot change to {}", directory.display());
        nix::sched::unshare(CloneFlags::CLONE_FS)
            .map_err(io::Error::from)
            .context(cannot)?;
        let changed = std::env::set_current_dir(&directory).or_else(|error| {
            // A directory above may be closed to the user. The link of the client leads to the
            // directory itself.
            let Some(client) = client else {
                return Err(error);
            };
            let link = format!("/proc/{}/cwd", client.as_raw_nonzero());
            match std::fs::read_link(&link) {
                Ok(path) if path.as_os_str() == directory => std::env::set_current_dir(link),
                _ => Err(error),
            }
        });
        changed.context(cannot)?;
        Ok(OwnDirectory)
    }
}

impl Drop for OwnDirectory {
    fn drop(&mut self) {
        // The threads of the mount have the same directory, and must not keep it in use.
        let _ = std::env::set_current_dir("/");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(arguments: &[&str]) -> Asked {
        let arguments = arguments.iter().map(|one| OsStr::new(one).into());
        Asked {
            arguments: arguments.collect(),
            directory: OsStr::new("/").into(),
        }
    }

    #[test]
    fn options_of_all_commands_are_accepted_on_both_sides_of_the_name() {
        for arguments in [
            &["bcow", "mount", "--pool=web", "a.bcow", "/mnt"][..],
            &[
                "mount.bcow",
                "-vv",
                "mount",
                "a.bcow",
                "/mnt",
                "--pool",
                "web",
            ],
            &[
                "bcow",
                "--color",
                "never",
                "mount",
                "--pool=web",
                "-q",
                "--",
                "a",
                "/mnt",
            ],
        ] {
            let args = asked(arguments).args().unwrap();
            assert_eq!(args.pool.unwrap().to_string(), "web");
        }
    }

    #[test]
    fn other_commands_and_unknown_options_are_refused() {
        for arguments in [
            &["bcow", "ls", "a.bcow"][..],
            &["bcow", "mount", "--surprise", "a.bcow", "/mnt"],
            &["bcow"],
        ] {
            let error = asked(arguments).args().unwrap_err();
            assert_eq!(error.exit(), bcow_images::error::exit::USAGE);
        }
    }
}
