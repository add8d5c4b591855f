//! One file per command: a clap struct whose doc comment is the help, and `run(args, ui)`.

pub mod completions;
pub mod later;
pub mod man;
pub mod version;
