//! `bcow completions`

use clap::CommandFactory;
use clap_complete::Shell;

use crate::error::CommandError;
use crate::ui::Ui;

/// Print a completion script for a shell
///
/// For bash, for example:
///
///     bcow completions bash > /etc/bash_completion.d/bcow
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The shell to complete for
    shell: Shell,
}

/// Writes the script to standard output.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "bcow", &mut script);
    let mut out = ui.output();
    out.write_bytes(&script)?;
    out.finish()
}
