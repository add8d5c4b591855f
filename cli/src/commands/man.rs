//! `bcow man`

use std::path::PathBuf;

use clap::CommandFactory;
use clap_mangen::Man;

use crate::error::{CommandError, Context};
use crate::ui::Ui;

/// Print the manual page, or write all manual pages into a directory
///
/// Without DIR, the command writes bcow(1) to standard output: `bcow man | man -l -`. With DIR, it
/// writes one page per command into DIR: bcow.1, bcow-convert.1 and so on. It replaces existing
/// pages.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory for the pages; the command makes it if it is missing
    dir: Option<PathBuf>,
}

/// Renders the pages from the same text as `--help`.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let mut command = crate::Cli::command();
    command.build();
    let Some(dir) = &args.dir else {
        let mut out = ui.output();
        out.write_bytes(&page(command)?)?;
        return out.finish();
    };

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

fn page(command: clap::Command) -> Result<Vec<u8>, CommandError> {
    let mut text = Vec::new();
    Man::new(command)
        .render(&mut text)
        .context(|| "cannot render the manual page")?;
    Ok(text)
}
