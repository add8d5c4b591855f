//! The sandbox of the programs: it is also that of each `bcow` that they run.

use bcow_sandbox::{Sandbox, Service, When, WhenArgs};

/// The option for the sandbox.
#[derive(Debug, Clone, clap::Args)]
pub struct SandboxArgs {
    #[command(flatten)]
    when: WhenArgs,
}

impl SandboxArgs {
    /// Enters the sandbox. The process has one thread.
    pub fn enter(&self) -> Result<(), String> {
        // `bcow mount` of an ordinary user runs fusermount3, which needs new privileges.
        let is_root = rustix::process::geteuid().is_root();
        if self.when.sandbox == When::Off || (!is_root && self.when.sandbox == When::Auto) {
            return Ok(());
        }
        let cannot = |why: &dyn std::fmt::Display| format!("cannot enter the sandbox: {why}");
        if !is_root {
            return Err(cannot(&"the user is not root"));
        }
        let sandbox = Sandbox::of_service(self.when.sandbox, Service::Programs);
        let parts = sandbox.map_err(|error| cannot(&error))?.in_force();
        tracing::info!("sandbox: {}", parts.join(", "));
        Ok(())
    }
}
