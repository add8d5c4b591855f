//! What the programs that serve container engines have in common: they run the program `bcow`.
//!
//! [`tool`] runs it, [`registry`] has the options for images in registries, [`resolved`] reads what
//! `bcow inspect --resolve --json` prints, and [`notify`] reports to systemd. [`program`] has the
//! log and the exit status, and [`host`] the errors of files and directories.

pub mod host;
pub mod notify;
pub mod program;
pub mod registry;
pub mod resolved;
pub mod tool;

pub use host::{At, HostError};
pub use registry::RegistryArgs;
pub use tool::{Tool, ToolError};
