//! `bcow version`

use serde_json::json;

use crate::error::CommandError;
use crate::ui::Ui;

/// Print the version of bcow
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON (schema bcow.version/1)
    #[arg(long)]
    json: bool,
}

/// Prints what `--version` prints, or the same as JSON.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let version = env!("CARGO_PKG_VERSION");
    if args.json {
        return ui.print_json(&json!({ "schema": "bcow.version/1", "version": version }));
    }
    let mut out = ui.output();
    writeln!(out, "bcow {version}")?;
    out.finish()
}
