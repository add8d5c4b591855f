//! The directory with the sockets of the pools of a user.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use bcow_images::error::{CommandError, Context};
use bcow_mounts::PoolName;
use rustix::fs::FlockOperation;

/// The ending of the names of sockets.
const ENDING: &str = ".sock";
/// Names another directory for the sockets.
const VARIABLE: &str = "BCOW_POOLS";
/// Access for the owner only.
const PRIVATE: u32 = 0o700;

/// The directory with the sockets of the pools of this user.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// The directory, if it exists and no other user can write to it.
    pub fn find() -> Result<Option<Self>, CommandError> {
        let path = path();
        let cannot = || format!("cannot use {}", path.display());
        let metadata = match std::fs::symlink_metadata(&path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CommandError::new(cannot()).caused_by(&error)),
        };
        let problem = match () {
            () if !metadata.is_dir() => "it is no directory",
            () if metadata.uid() != rustix::process::geteuid().as_raw() => {
                "it belongs to another user"
            }
            () if metadata.mode() & 0o077 != 0 => "other users can enter it",
            () => return Ok(Some(Directory(path))),
        };
        Err(CommandError::new(cannot())
            .caused_by_text(problem)
            .hint(format!(
                "{VARIABLE} names the directory for the sockets of pools; its mode must be 0700"
            )))
    }

    /// The directory; makes it if it is missing.
    pub fn make() -> Result<Self, CommandError> {
        let path = path();
        let cannot = || format!("cannot create {}", path.display());
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).context(cannot)?;
        }
        match DirBuilder::new().mode(PRIVATE).create(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(CommandError::new(cannot()).caused_by(&error));
            }
            _ => {}
        }
        match Directory::find()? {
            Some(directory) => Ok(directory),
            None => Err(CommandError::new(cannot()).caused_by_text("it was removed again")),
        }
    }

    pub fn socket(&self, name: &PoolName) -> PathBuf {
        self.0.join(format!("{name}{ENDING}"))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The pools that have a socket, by name. A socket may be left of a pool that was killed.
    pub fn names(&self) -> std::io::Result<Vec<PoolName>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.0)? {
            let file = entry?.file_name();
            let name = file.to_str().and_then(|file| file.strip_suffix(ENDING));
            names.extend(name.and_then(|name| name.parse().ok()));
        }
        names.sort();
        Ok(names)
    }

    /// Waits until no other process creates or removes a socket. The lock ends with the result.
    pub fn lock(&self) -> std::io::Result<File> {
        let directory = File::open(&self.0)?;
        rustix::fs::flock(&directory, FlockOperation::LockExclusive)?;
        Ok(directory)
    }
}

fn path() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let user = rustix::process::geteuid();
    match (variable(VARIABLE), variable("XDG_RUNTIME_DIR")) {
        (Some(path), _) => {
            // The process of a pool changes its directory.
            let path = PathBuf::from(path);
            std::path::absolute(&path).unwrap_or(path)
        }
        (None, _) if user.is_root() => "/run/bcow/pools".into(),
        (None, Some(path)) => PathBuf::from(path).join("bcow/pools"),
        (None, None) => format!("/tmp/bcow-{}", user.as_raw()).into(),
    }
}
