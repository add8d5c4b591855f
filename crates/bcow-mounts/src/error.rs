//! The errors of mounts as the failures of commands.

use bcow_fuse::MountError;
use bcow_images::error::{CommandError, exit};

/// The library's error in the command's form.
pub fn failure(error: &MountError) -> CommandError {
    CommandError::of(error).hint_if(error.hint())
}

/// As [`failure`], for an error of the command line.
pub(crate) fn usage(error: &MountError) -> CommandError {
    failure(error).exit_with(exit::USAGE)
}

/// Adds `error` and its hint to a failure.
pub(crate) fn because(failure: CommandError, error: &MountError) -> CommandError {
    failure.caused_by(error).hint_if(error.hint())
}
