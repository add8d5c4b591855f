//! Uppers of writable mounts, for all commands: the note in the lock of an upper, the wait for the
//! end of another mount, the opening for reading, and the error for an upper that cannot be used.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bcow::lock::LockError;
use bcow::operation::is_snapshot_name;
use bcow_union::{Driver, UpperError, UpperReader};

use crate::error::{CommandError, Context};
use crate::image::{Messages, OpenImage};
use crate::running::{self, ProcessState};

/// How long to wait for a process that holds an upper or a disk and shows no sign that its mount
/// ends: umount(8) returns before that process has noticed the unmount.
const NOTICES_WITHIN: Duration = Duration::from_secs(2);
/// After this time, a message tells the user the reason of the delay.
const MESSAGE_AFTER: Duration = Duration::from_millis(500);
/// Pause between two attempts to open an upper or to lock a disk.
pub const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The start of the note of a mount, in the lock of an upper or of a disk. The number of the
/// process follows.
const NOTE: &str = "bcow mount, process ";

/// The note of this process in an upper's lock, when it mounts at `directory`.
pub fn note(directory: &Path) -> String {
    format!(
        "{NOTE}{}, at {}",
        std::process::id(),
        running::absolute(directory)
    )
}

/// The number of the process in the note of a mount; `None` for the note of another command.
pub fn holder_of_note(note: &str) -> Option<u32> {
    let rest = note.strip_prefix(NOTE)?;
    let end = rest.find(|c: char| !c.is_ascii_digit());
    rest[..end.unwrap_or(rest.len())].parse().ok()
}

/// Opens an upper with `open`. Tries again while another process holds the upper and may soon
/// release it.
pub fn when_free<T>(
    messages: &dyn Messages,
    mut open: impl FnMut() -> Result<T, UpperError>,
) -> Result<T, UpperError> {
    let start = Instant::now();
    let mut is_reported = false;
    loop {
        let error = match open() {
            Err(error) if may_be_free_soon(&error, start.elapsed()) => error,
            other => return other,
        };
        if start.elapsed() > MESSAGE_AFTER && !is_reported {
            is_reported = true;
            messages.status(&format_args!(
                "waiting for the end of another mount: {error}"
            ));
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

fn may_be_free_soon(error: &UpperError, waited: Duration) -> bool {
    let in_use = error.in_use();
    in_use.is_some_and(|(_, holder)| may_release_soon(holder, waited))
}

/// Whether the process that holds an upper or a disk may soon release it: the process is ending its
/// mount, or may not have noticed the unmount yet.
pub fn may_release_soon(holder: &LockError, waited: Duration) -> bool {
    match holder {
        LockError::Writer(note) => match holder_of_note(note) {
            Some(pid) => is_closing(pid) || waited < NOTICES_WITHIN,
            None => false,
        },
        // The holder has no note. A writer removes its note just before it releases its lock; a
        // reader never has one.
        LockError::InUse => waited < NOTICES_WITHIN,
        LockError::Io(_) => false,
    }
}

/// Whether a process is ending a writable mount. False for a process that a signal has stopped.
pub fn is_closing(pid: u32) -> bool {
    match running::state(pid) {
        Some(ProcessState::Ending) => true,
        None | Some(ProcessState::Stopped) => false,
        Some(ProcessState::Running | ProcessState::Blocked) => running::has_closing_thread(pid),
    }
}

/// Opens an upper for reading. Fails if a process writes to it, if it belongs to another image than
/// `image`, or if the machine stopped while it was mounted with `--sync volatile`.
pub fn open_reader_of(
    image: &OpenImage,
    upper: &Path,
    messages: &dyn Messages,
) -> Result<UpperReader, CommandError> {
    let reader =
        when_free(messages, || UpperReader::open(upper)).map_err(|error| cannot_use(&error))?;
    require_same_image(&reader, image)?;
    refuse_lost(upper, reader.is_lost())?;
    Ok(reader)
}

/// Refuses an upper that was mounted with `--sync volatile` when the machine stopped.
pub fn refuse_lost(upper: &Path, is_lost: Result<bool, UpperError>) -> Result<(), CommandError> {
    match is_lost {
        Ok(false) => Ok(()),
        Ok(true) => Err(cannot_use(&UpperError::Volatile(upper.to_owned()))),
        Err(error) => Err(cannot_use(&error)),
    }
}

/// Refuses an upper of another image. Accepts an upper that overlayfs made: it belongs to no image.
pub fn require_same_image(upper: &UpperReader, image: &OpenImage) -> Result<(), CommandError> {
    match upper.record() {
        Some(record) => require_image(upper.path(), record.identity(), &record.image_name, image),
        None => Ok(()),
    }
}

/// Refuses the upper at `path` of an image with another identity than `image`, and with this name.
pub fn require_image(
    path: &Path,
    identity: Option<[u8; 32]>,
    name: &str,
    image: &OpenImage,
) -> Result<(), CommandError> {
    if identity == Some(image.identity()) {
        return Ok(());
    }
    Err(cannot_use(&UpperError::AnotherImage {
        path: path.to_owned(),
        belongs: Box::new((identity.unwrap_or_default(), name.to_owned())),
        image: Box::new((image.identity(), image.path().display().to_string())),
    }))
}

/// The path of the snapshot `name` of an upper of the FUSE driver.
pub fn tree_snapshot(upper: &Path, name: &str) -> Result<PathBuf, CommandError> {
    let path = bcow_union::snapshot_path(upper, name);
    if is_snapshot_name(name) && path.is_dir() {
        Ok(path)
    } else {
        Err(cannot_use(&UpperError::NoSnapshot(path)))
    }
}

/// The error for an upper that cannot be used. Names the processes that have it in use.
pub fn cannot_use(error: &UpperError) -> CommandError {
    let mut failure = CommandError::new("cannot use the upper").caused_by(error);
    if let Some((path, _)) = error.in_use() {
        let holders = running::describe_lock_holders(&path.join(running::LOCK_IN_UPPER));
        failure = holders
            .into_iter()
            .fold(failure, CommandError::caused_by_text)
            .passes_if(true);
    }
    match error {
        UpperError::InUse { .. } => failure.hint("unmount it first with `bcow umount`, or wait"),
        UpperError::Inside { .. } | UpperError::Around { .. } => failure
            .hint("choose a directory outside that upper, or unmount it first with `bcow umount`"),
        UpperError::AnotherImage { .. } => {
            failure.hint("name the image with which the upper was created, or another upper")
        }
        UpperError::NoAttributes { .. } | UpperError::NoWhiteouts { .. } => {
            failure.hint("ext4, xfs, btrfs and tmpfs (Linux 6.6 and later) can hold an upper")
        }
        UpperError::NamespaceDenied { .. } | UpperError::OwnershipDenied { .. } => {
            failure.hint("root created the upper: use it as root")
        }
        UpperError::OtherDriver {
            driver: Driver::Kernel,
            ..
        } => failure.hint("`bcow mount --driver kernel` mounts it; `bcow fsck` checks it"),
        UpperError::OtherDriver {
            driver: Driver::Fuse,
            ..
        } => failure.hint("`bcow mount --driver fuse` mounts it"),
        UpperError::NotEmpty { .. } => failure
            .hint("name a new directory; `--driver fuse` takes a directory of overlayfs as it is"),
        UpperError::Incomplete { .. } => {
            failure.hint("it has no changes yet: `bcow mount --driver kernel` begins it again")
        }
        _ => failure,
    }
}

/// Adds the failed action to an error of a merge of an upper with its image.
pub trait Joined<T> {
    /// As [`Context::context`]. The message names `upper`.
    fn joined(self, upper: &Path) -> Result<T, CommandError>;
}

impl<T, E: std::error::Error + 'static> Joined<T> for Result<T, E> {
    fn joined(self, upper: &Path) -> Result<T, CommandError> {
        self.context(|| format!("cannot merge {} with its image", upper.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_read_from_the_note_of_a_mount() {
        let note = note(Path::new("/mnt, process 8"));
        assert_eq!(holder_of_note(&note), Some(std::process::id()));
        // The note of a mounted disk, and of an upper that an earlier version mounted.
        assert_eq!(holder_of_note("bcow mount, process 7"), Some(7));
        assert_eq!(holder_of_note("bcow fsck --repair, process 7"), None);
        assert_eq!(holder_of_note("bcow mount, process "), None);
    }
}
