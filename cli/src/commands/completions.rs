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
    match (args.shell, std::str::from_utf8(&script)) {
        (Shell::Bash, Ok(script)) => out.write_bytes(with_files(script).as_bytes())?,
        _ => out.write_bytes(&script)?,
    }
    out.finish()
}

/// The script for bash with names of files for an empty word, for which the generated script has
/// options. An option is completed behind its hyphen.
fn with_files(script: &str) -> String {
    const WORDS: &str = "            COMPREPLY=( $(compgen -W \"${opts}\"";
    // Behind this command is the name of a command or of a file. For a word that has begun, bash
    // itself has the names of files.
    const EITHER: &str = "        bcow__subcmd__snapshot)";
    let mut files = "";
    let line = |line: &str| match (
        line.split_once(" || ${COMP_CWORD} -eq "),
        line.strip_prefix(WORDS),
    ) {
        (Some((condition, _)), _) => format!("{condition} ]] ; then\n"),
        // Without the options: the names of commands, the values of an argument, or none.
        (_, Some(end)) => format!("{WORDS} -X '-*'{files}{end}\n"),
        _ => {
            if line.starts_with("        bcow__") {
                files = match line {
                    EITHER => " $([[ -n ${cur} ]] || echo -f)",
                    _ => "",
                };
            }
            format!("{line}\n")
        }
    };
    script.lines().map(line).collect()
}
