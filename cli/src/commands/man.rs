//! `bcow man`

use std::path::PathBuf;

use clap::Command;
use clap_mangen::Man;

use crate::error::{CommandError, Context};
use crate::ui::Ui;

/// Print a manual page, or write all manual pages into a directory
///
/// Without an argument, the command writes bcow(1) to standard output: `bcow man | man -l -`. With
/// COMMAND, it writes the page of a command: `bcow man mount | man -l -`, or `bcow man cache-list`
/// for one below a command. With DIR, it writes one page per command into DIR: bcow.1,
/// bcow-convert.1 and so on. It replaces existing pages. A name that can be either is a directory
/// if there is one.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A command, or a directory for all pages; a missing directory is made
    #[arg(value_name = "COMMAND|DIR", value_hint = clap::ValueHint::DirPath)]
    dir: Option<PathBuf>,
}

/// Renders the pages from the same text as `--help`.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let mut command = crate::command();
    command.build();
    let command = without_help(command);
    let mut pages = Vec::new();
    add_pages(&command, &mut pages);
    let named = match &args.dir {
        None => Some(&command),
        Some(dir) if dir.is_dir() => None,
        Some(name) => {
            let page = format!("bcow-{}", name.display());
            let page = pages.iter().find(|command| name_of(command) == page);
            command.find_subcommand(name).or(page.copied())
        }
    };
    let (None, Some(dir)) = (named, &args.dir) else {
        let mut out = ui.output();
        out.write_bytes(&page(named.unwrap_or(&command), &command)?)?;
        return out.finish();
    };
    std::fs::create_dir_all(dir).context(|| format!("cannot make directory {}", dir.display()))?;
    for of_page in pages {
        let file = dir.join(format!("{}.1", name_of(of_page)));
        std::fs::write(&file, page(of_page, &command)?)
            .context(|| format!("cannot write {}", file.display()))?;
    }
    ui.status(format_args!("manual pages are in {}", dir.display()));
    Ok(())
}

/// The command and those below it without `help`, which has no page.
fn without_help(command: Command) -> Command {
    command.mut_subcommands(|below| {
        let is_help = below.get_name() == "help";
        without_help(if is_help { below.hide(true) } else { below })
    })
}

/// Adds the commands that have a page: `command` and those below it.
fn add_pages<'c>(command: &'c Command, pages: &mut Vec<&'c Command>) {
    pages.push(command);
    for below in shown(command) {
        add_pages(below, pages);
    }
}

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command
        .get_subcommands()
        .filter(|below| !below.is_hide_set())
}

/// The name of the page of a command: bcow-cache-list.
fn name_of(command: &Command) -> &str {
    command.get_display_name().unwrap_or(command.get_name())
}

/// The manual page of a command, which refers to those of the program and of its commands.
fn page(command: &Command, program: &Command) -> Result<Vec<u8>, CommandError> {
    let after = command
        .get_after_long_help()
        .map_or(String::new(), ToString::to_string);
    let name = name_of(command);
    let mut text = Vec::new();
    // The crate would fill the lines of tables in this text, and leave out the texts of options
    // that the short help does not list.
    let rendered = command
        .clone()
        .after_long_help(None::<&str>)
        .after_help(None::<&str>);
    Man::new(rendered.mut_args(|argument| argument.hide_short_help(false)))
        .render(&mut text)
        .context(|| "cannot render the manual page")?;
    text.extend(sections(&after).into_bytes());
    if !after.contains("Exit status") {
        text.extend(sections(crate::EXIT_STATUS).into_bytes());
    }
    let others = std::iter::once(program).chain(shown(program)).map(name_of);
    let others = others.filter(|other| *other != name);
    let others: Vec<_> = others.map(|other| format!("{other}(1)")).collect();
    text.extend(format!(".SH \"SEE ALSO\"\n{}", escaped(&others.join(", "))).into_bytes());
    Ok(text)
}

/// Sections of a manual page. A paragraph whose first line ends with a colon, and whose other lines
/// are indented, is a section, and its lines stay as they are.
fn sections(text: &str) -> String {
    let mut page = String::new();
    for paragraph in text.split("\n\n").filter(|paragraph| !paragraph.is_empty()) {
        let (first, lines) = paragraph.split_once('\n').unwrap_or((paragraph, ""));
        if first.ends_with(':') && lines.starts_with(' ') {
            let title = first.split([',', ':', '(']).next().unwrap_or_default();
            let title = title.trim_end().to_uppercase();
            page += &format!(".SH \"{title}\"\n.nf\n{}.fi\n", escaped(lines));
        } else {
            page += if page.is_empty() { ".SH NOTES\n" } else { ".PP\n" };
            page += &escaped(paragraph);
        }
    }
    page
}

/// Lines of text for roff. A dot or an apostrophe at the start of a line would be a request.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    let lines = text.lines().map(|line| {
        let start = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
        format!("{start}{line}\n")
    });
    lines.collect()
}
