//! The options that all commands have.

/// When to use colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ColorWhen {
    /// On a terminal, unless NO_COLOR is set.
    #[default]
    Auto,
    Always,
    Never,
}

/// How to show the progress of long work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ProgressForm {
    /// A bar, on a terminal.
    #[default]
    Auto,
    /// Lines of text.
    Plain,
    /// Lines of JSON.
    Json,
    None,
}

/// The options of all commands.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Global options")]
pub struct GlobalArgs {
    /// Suppress messages and progress, but not warnings, errors and results
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// Increase verbosity; repeat for debug output
    #[arg(short, long, global = true, action = clap::ArgAction::Count, conflicts_with = "quiet")]
    pub verbose: u8,
    /// When to use colour: auto, always or never
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        default_value = "auto",
        hide_possible_values = true
    )]
    pub color: ColorWhen,
    /// Show progress on standard error as a bar, if that is a terminal (auto), as lines of text
    /// (plain) or of JSON (json), or not (none)
    #[arg(long, global = true, value_name = "HOW", default_value = "auto")]
    #[arg(hide_possible_values = true, hide_short_help = true)]
    pub progress: ProgressForm,
}
