//! What the programs that serve container engines have in common: they run the program `bcow`.
//!
//! [`tool`] runs it, [`registry`] has the options for images in registries, [`resolved`] reads what
//! `bcow inspect --resolve --json` prints, and [`notify`] reports to systemd. [`program`] has the
//! log and the exit status, [`sandbox`] the rights of the process, [`metrics`] the page for
//! Prometheus, and [`host`] the errors of files and directories.
//!
//! ```no_run
//! use bcow_tool::{Tool, resolved::Resolved};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let bcow = Tool::new(None)?;
//! let image = Resolved::read(&bcow.resolve("docker://images.example/debian:12", &[])?)?;
//! for layer in &image.layers {
//!     println!("{}", layer.chain_id);
//! }
//! # Ok(())
//! # }
//! ```

pub mod host;
pub mod metrics;
mod mounted;
pub mod notify;
pub mod program;
pub mod registry;
pub mod resolved;
pub mod sandbox;
pub mod tool;

pub use host::{At, HostError};
pub use mounted::{MountState, state_of, unmount};
pub use registry::RegistryArgs;
pub use tool::{ResolveError, Tool, ToolError};
