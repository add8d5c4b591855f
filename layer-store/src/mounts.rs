//! The mounts of layers.
//!
//! Each is a mount by `bcow` at a directory of its own, which does not need this process:
//! containers go on when this process ends. The directory exists only as long as the mount. So a
//! container whose layer is missing fails, instead of starting on an empty directory.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bcow_tool::host::entries_if_any;
use bcow_tool::registry::{explained, on_one_line};
use bcow_tool::{At, HostError, MountState, Tool, state_of, unmount};
use parking_lot::Mutex;
use rustix::mount::UnmountFlags;

use crate::error::Error;
use crate::layer::Layer;

/// How long a mount stays after the last lookup if no engine uses its layer: an engine follows the
/// link, and reports the use, a moment after the lookup.
const GRACE: Duration = Duration::from_secs(5);
/// Pause before the next attempt to end a mount that is in use.
const BUSY_PAUSE: Duration = Duration::from_secs(30);

/// The mounts in a directory.
pub struct Mounts {
    directory: PathBuf,
    tool: Tool,
    options: Vec<OsString>,
    /// The file with the credentials for registries.
    auth_file: PathBuf,
    /// Protects the list. Each mount has a lock of its own, which is taken without this one by
    /// lookups, and held while `bcow` mounts. A sweep only tries to take it.
    slots: Mutex<HashMap<String, Arc<Mutex<Slot>>>>,
    /// Mounts that were made again since the start of this process.
    made_again: AtomicU64,
}

#[derive(Default)]
struct Slot {
    looked_up: Option<Instant>,
}

impl Mounts {
    /// The mounts in `directory`, by `bcow mount` with these options, and with the credentials in
    /// `auth_file`.
    pub fn new(directory: PathBuf, tool: Tool, options: Vec<OsString>, auth_file: PathBuf) -> Self {
        if let Err(error) = fs::create_dir_all(&directory).at("create", &directory) {
            tracing::error!("{error}");
        }
        Mounts {
            directory,
            tool,
            options,
            auth_file,
            slots: Mutex::default(),
            made_again: AtomicU64::new(0),
        }
    }

    /// Mounts a layer, if it is not mounted. Returns the directory.
    pub fn ensure(&self, layer: &Layer) -> Result<PathBuf, Error> {
        let name = layer.mount_name();
        let path = self.path_of(layer);
        let slot = Arc::clone(self.slots.lock().entry(name).or_default());
        let mut slot = slot.lock();
        let state = state_of(&path)?;
        // The directory exists only as long as the mount, unless the mount has ended otherwise.
        let is_again =
            state == MountState::Dead || state == MountState::NotMounted && path.is_dir();
        match state {
            MountState::Served => {}
            MountState::Dead => {
                tracing::error!(
                    "the mount of {} at {} has no process any more; it is made again",
                    layer.source(),
                    path.display()
                );
                unmount(&path, UnmountFlags::DETACH)?;
                self.mount(layer, &path)?;
            }
            MountState::NotMounted => self.mount(layer, &path)?,
        }
        if is_again {
            self.made_again.fetch_add(1, Ordering::Relaxed);
        }
        slot.looked_up = Some(Instant::now());
        Ok(path)
    }

    /// The directory for the mount of a layer.
    pub fn path_of(&self, layer: &Layer) -> PathBuf {
        self.directory.join(layer.mount_name())
    }

    /// How many mounts were made again since the start of this process.
    pub fn made_again(&self) -> u64 {
        self.made_again.load(Ordering::Relaxed)
    }

    fn mount(&self, layer: &Layer, path: &Path) -> Result<(), Error> {
        fs::create_dir_all(path).at("create", path)?;
        let mut arguments = self.options.clone();
        arguments.extend(["--".into(), layer.source().into(), path.into()]);
        let mounted = self.tool.run("mount", &arguments);
        if mounted.is_err() {
            // It is empty.
            let _ = fs::remove_dir(path);
        }
        mounted.map_err(|error| Error::State(explained(&error, &layer.image, &self.auth_file)))?;
        tracing::info!("mounted {} at {}", layer.source(), path.display());
        Ok(())
    }

    /// Ends the mounts that are not in `used`. Returns when to try again what is left.
    pub fn sweep(&self, used: &HashSet<String>) -> Result<Option<Duration>, Error> {
        let mut pause: Option<Duration> = None;
        let mut wait = |time: Duration| pause = Some(pause.map_or(time, |other| other.min(time)));
        // Before the first mount there is no directory.
        for path in entries_if_any(&self.directory)? {
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            if used.contains(name) {
                continue;
            }
            let mut slots = self.slots.lock();
            let slot = slots.get(name).cloned().unwrap_or_default();
            let Some(held) = slot.try_lock() else {
                wait(GRACE);
                continue;
            };
            let age = held.looked_up.map(|at| at.elapsed());
            if let Some(left) = age.and_then(|age| GRACE.checked_sub(age)) {
                wait(left + Duration::from_millis(100));
                continue;
            }
            match end(&path) {
                Ok(()) => {
                    tracing::info!("ended the mount at {}", path.display());
                    drop(held);
                    // A lookup takes this from the list under the lock of the list.
                    if Arc::strong_count(&slot) <= 2 {
                        slots.remove(name);
                    }
                }
                Err(error) => {
                    tracing::debug!("{}; tried again later", on_one_line(&error));
                    wait(BUSY_PAUSE);
                }
            }
        }
        Ok(pause)
    }
}

/// Ends a mount, and removes its directory.
fn end(path: &Path) -> Result<(), HostError> {
    unmount(path, UnmountFlags::empty())?;
    fs::remove_dir(path).at("remove", path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::tests::layer;

    /// Mounts by a program that prints its version, and whose other commands end with a status.
    fn mounts(directory: &Path, status: u8) -> Mounts {
        let program = directory.join(format!("program{status}"));
        let script = format!("#!/bin/sh\n[ \"$2\" = version ] || exit {status}\n");
        fs::write(&program, script).unwrap();
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&program, permissions).unwrap();
        let tool = Tool::new(Some(program)).unwrap();
        Mounts::new(directory.join("mounts"), tool, Vec::new(), "/none".into())
    }

    #[test]
    fn unused_directory_is_removed_a_while_after_the_last_lookup() {
        let directory = tempfile::tempdir().unwrap();
        // The program mounts nothing.
        let mounts = mounts(directory.path(), 0);
        let path = mounts.ensure(&layer('a', '1')).unwrap();
        assert!(path.is_dir());
        assert_eq!(state_of(&path).unwrap(), MountState::NotMounted);
        let used = HashSet::from([layer('a', '1').mount_name()]);
        assert_eq!(mounts.sweep(&used).unwrap(), None);
        let again = mounts.sweep(&HashSet::new()).unwrap();
        assert!(again.is_some_and(|again| again <= GRACE + Duration::from_secs(1)));
        assert!(path.is_dir(), "looked up a moment ago");
        mounts.slots.lock().clear();
        assert_eq!(mounts.sweep(&HashSet::new()).unwrap(), None);
        assert!(!path.exists());
    }

    #[test]
    fn failed_mount_leaves_no_directory() {
        let directory = tempfile::tempdir().unwrap();
        let mounts = mounts(directory.path(), 1);
        assert!(mounts.ensure(&layer('a', '1')).is_err());
        assert_eq!(fs::read_dir(&mounts.directory).unwrap().count(), 0);
    }
}
