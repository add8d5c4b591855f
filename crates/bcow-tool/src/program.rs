//! The start and the end of a program.

use std::fmt::Display;
use std::io::IsTerminal;
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;

/// Begins the log, on standard error. The variable BCOW_LOG selects what is logged.
pub fn start_log() {
    let filter = EnvFilter::try_from_env("BCOW_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
}

/// Prints the error, if there is one. Returns the exit status.
pub fn end(result: Result<(), impl Display>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
