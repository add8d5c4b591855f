//! The errors of conversions, and of writes into layouts, as the failures of commands.

use bcow_oci::ConvertError;
use bcow_remote::RemoteError;

use crate::error::{CommandError, exit, interrupted};
use crate::remote;

impl From<ConvertError> for CommandError {
    fn from(error: ConvertError) -> Self {
        failure(&error)
    }
}

/// The error for a failed conversion, or a failed write into a layout.
pub fn failure(error: &ConvertError) -> CommandError {
    if matches!(error, ConvertError::Interrupted) {
        return interrupted();
    }
    let failure = CommandError::of(error);
    if error.full_path().is_some_and(remote::is_scratch) {
        return failure.hint(format!(
            "free space in {}, the directory for temporary files, or set TMPDIR to another one",
            remote::scratch().display()
        ));
    }
    let server_hint = RemoteError::below(error).and_then(|error| remote::hint(&error.problem));
    let failure = failure.hint_if(error.hint().or(server_hint.map(str::to_owned)));
    match error {
        ConvertError::HoldsImage { .. }
        | ConvertError::PlatformSyntax(_)
        | ConvertError::Options(_) => failure.exit_with(exit::USAGE),
        _ => failure,
    }
}
