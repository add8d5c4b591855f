//! `bcow man`

use std::path::PathBuf;

use clap::CommandFactory;
use clap_mangen::Man;

use crate::error::{CommandError, Context};
use crate::ui::Ui;

/// Print a manual page, or write all manual pages into a directory
///
/// Without an argument, the command writes bcow(1) to standard output: `bcow man | man -l -`. With
/// COMMAND, it writes the page of a command: `bcow man mount | man -l -`. With DIR, it writes one
/// page per command into DIR: bcow.1, bcow-convert.1 and so on. It replaces existing pages. A name
/// that can be either is a directory if there is one.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A command, or a directory for all pages; a missing directory is made
    #[arg(value_name = "COMMAND|DIR", value_hint = clap::ValueHint::DirPath)]
    dir: Option<PathBuf>,
}

/// Renders the pages from the same text as `--help`.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let mut command = crate::Cli::command();
    command.build();
    let Some(dir) = &args.dir else {
        return print(command, ui);
    };
    if let Some(named) = command.find_subcommand(dir).filter(|_| !dir.is_dir()) {
        return print(named.clone(), ui);
    }
    std::fs::create_dir_all(dir).context(|| format!("cannot make directory {}", dir.display()))?;
    let subcommands: Vec<_> = command
        .get_subcommands()
        .filter(|c| !c.is_hide_set() && c.get_name() != "help")
        .map(|c| (format!("bcow-{}", c.get_name()), c.clone()))
        .collect();
    let pages = std::iter::once(("bcow".to_owned(), command)).chain(subcommands);
    for (name, command) in pages {
        let file = dir.join(format!("{name}.1"));
        std::fs::write(&file, page(command)?)
            .context(|| format!("cannot write {}", file.display()))?;
    }
    ui.status(format_args!("manual pages are in {}", dir.display()));
    Ok(())
}

fn print(command: clap::Command, ui: &Ui) -> Result<(), CommandError> {
    let mut out = ui.output();
    out.write_bytes(&page(command)?)?;
    out.finish()
}

fn page(command: clap::Command) -> Result<Vec<u8>, CommandError> {
    let mut text = Vec::new();
    Man::new(command)
        .render(&mut text)
        .context(|| "cannot render the manual page")?;
    Ok(text)
}
