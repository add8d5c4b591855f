//! The commands that bcow will have and this version has not: they say so, rather than look like a
//! spelling mistake.

use std::ffi::OsString;

use crate::error::CommandError;

/// Whatever the user wrote behind the command.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    rest: Vec<OsString>,
}

/// Always fails.
pub fn run(command: &str, _args: &Args) -> Result<(), CommandError> {
    Err(CommandError::not_supported_yet(format_args!(
        "`bcow {command}`"
    )))
}
