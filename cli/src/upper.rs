//! Reading of uppers of writable mounts, while no process writes to them.

use std::path::Path;
use std::time::{Duration, Instant};

use bcow::lock::LockError;
use bcow_union::{Door, UpperError, UpperReader};

use crate::error::{CommandError, Context};
use crate::image::OpenImage;
use crate::running::{self, State};
use crate::ui::Ui;

/// How long a process may keep the upper before it ends its mount: umount(8) returns before the
/// process has noticed the unmount.
pub const NOTICES_WITHIN: Duration = Duration::from_secs(2);
/// After this time, a message tells the user the reason of the delay.
const MESSAGE_AFTER: Duration = Duration::from_millis(500);
pub const PAUSE: Duration = Duration::from_millis(10);

/// The begin of the note in the lock of an upper; the number of the process follows.
const NOTE: &str = "bcow mount, process ";

/// The note of this process in an upper's lock, when it mounts at `directory`.
pub fn note(directory: &Path) -> String {
    format!(
        "{NOTE}{}, at {}",
        std::process::id(),
        running::absolute(directory)
    )
}

/// The process that left a note; `None` if the process is not a mount.
pub fn holder_of_note(note: &str) -> Option<u32> {
    let rest = note.strip_prefix(NOTE)?;
    let end = rest.find(|c: char| !c.is_ascii_digit());
    rest[..end.unwrap_or(rest.len())].parse().ok()
}

/// Opens an upper with `open`. Waits for a process that is ending a mount of the upper.
pub fn when_free<T>(
    ui: &Ui,
    mut open: impl FnMut() -> Result<T, UpperError>,
) -> Result<T, UpperError> {
    let start = Instant::now();
    let mut is_reported = false;
    loop {
        let error = match open() {
            Err(error) if ends_soon(&error, start.elapsed()) => error,
            other => return other,
        };
        if start.elapsed() > MESSAGE_AFTER && !is_reported {
            is_reported = true;
            ui.status(format_args!(
                "waiting for the end of another mount: {error}"
            ));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether the process that holds the upper soon releases it: it ends its mount, or may be about
/// to.
fn ends_soon(error: &UpperError, waited: Duration) -> bool {
    let Some((_, holder)) = error.in_use() else {
        return false;
    };
    match holder {
        LockError::Writer(note) => match holder_of_note(note) {
            Some(pid) => is_closing(pid) || waited < NOTICES_WITHIN,
            None => false,
        },
        // A process that has removed its note releases its lock next.
        LockError::InUse => waited < NOTICES_WITHIN,
        LockError::Io(_) => false,
    }
}

/// Whether a process is ending a writable mount. A stopped process is not.
pub fn is_closing(pid: u32) -> bool {
    match running::state(pid) {
        Some(State::Ending) => true,
        None | Some(State::Stopped) => false,
        Some(State::Running | State::Blocked) => running::has_closing_thread(pid),
    }
}

/// Opens an upper for reading, if no process writes to it and it belongs to `image`.
pub fn open_of(image: &OpenImage, upper: &Path, ui: &Ui) -> Result<UpperReader, CommandError> {
    let reader = when_free(ui, || UpperReader::open(upper)).map_err(|error| cannot_use(&error))?;
    require_same_image(&reader, image)?;
    match reader.is_lost() {
        Ok(false) => Ok(reader),
        Ok(true) => Err(cannot_use(&UpperError::Volatile {
            path: upper.to_owned(),
        })),
        Err(error) => Err(cannot_use(&error)),
    }
}

/// Refuses an upper of another image. An upper that overlayfs made belongs to no image.
pub fn require_same_image(upper: &UpperReader, image: &OpenImage) -> Result<(), CommandError> {
    let identity = image.identity();
    match upper.record() {
        Some(record) if record.identity() != Some(identity) => {
            let belongs = record.identity().unwrap_or_default();
            Err(cannot_use(&UpperError::AnotherImage {
                path: upper.path().to_owned(),
                belongs: Box::new((belongs, record.image_name.clone())),
                image: Box::new((identity, image.path().display().to_string())),
            }))
        }
        _ => Ok(()),
    }
}

/// The error for an upper that cannot be used.
pub fn cannot_use(error: &UpperError) -> CommandError {
    let mut failure = CommandError::new(format!("cannot use the upper {error}"));
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        failure = failure.caused_by_text(cause.to_string());
        source = cause.source();
    }
    if let Some((path, _)) = error.in_use() {
        failure = name_holders(failure, path);
    }
    match error {
        _ if error.in_use().is_some() => failure.hint("unmount the upper first, or wait"),
        UpperError::AnotherImage { .. } => {
            failure.hint("name the image with which the upper was created")
        }
        UpperError::NoAttributes { .. } => failure.hint(
            "put the upper on a file system that has them: ext4, xfs, btrfs, tmpfs (user.* since \
             Linux 6.6)",
        ),
        UpperError::NamespaceDenied { .. } | UpperError::OwnershipDenied { .. } => {
            failure.hint("root created the upper: use it as root")
        }
        UpperError::OtherDoor {
            door: Door::Kernel, ..
        } => failure.hint("`bcow mount --door kernel` mounts it; `bcow fsck` checks it"),
        UpperError::OtherDoor {
            door: Door::Fuse, ..
        } => failure.hint("`bcow mount --door fuse` mounts it"),
        UpperError::NotEmpty { .. } => failure
            .hint("name a new directory; `--door fuse` takes a directory of overlayfs as it is"),
        UpperError::Incomplete { .. } => {
            failure.hint("it has no changes yet: `bcow mount --door kernel` begins it again")
        }
        _ => failure,
    }
}

/// Says which processes have the upper in use.
pub fn name_holders(failure: CommandError, upper: &Path) -> CommandError {
    let holders = running::describe_lock_holders(&upper.join(running::LOCK_IN_UPPER));
    holders
        .into_iter()
        .fold(failure, CommandError::caused_by_text)
}

/// As [`Context::context`], for a merge of an upper with its image.
pub trait Joined<T> {
    /// Names the upper.
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
        // As earlier versions wrote it.
        assert_eq!(holder_of_note("bcow mount, process 7"), Some(7));
        assert_eq!(holder_of_note("bcow fsck --repair, process 7"), None);
        assert_eq!(holder_of_note("bcow mount, process "), None);
    }
}
