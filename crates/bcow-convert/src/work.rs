//! The user of an operation.

use bcow::operation::{Monitor, Phase};
use bcow_images::image::Messages;
use bcow_images::interrupt::Interrupt;
use bcow_oci::Progress;

/// What an operation shows its user, and how the user ends it.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    /// Takes messages.
    pub messages: &'a dyn Messages,
    /// Takes the phases, and counts bytes.
    pub progress: &'a dyn Progress,
    /// Ends the operation early.
    pub interrupt: &'a Interrupt,
}

impl Monitor for Work<'_> {
    fn phase(&self, phase: Phase, total: Option<u64>) {
        self.progress.phase(match phase {
            Phase::Commit => "committing",
            Phase::Compare => "comparing",
            Phase::Write => "writing",
            Phase::Hash => "hashing",
            Phase::Verify => "verifying",
            _ => "syncing",
        });
        if total.is_some() {
            self.progress.total(total);
        }
    }

    fn advance(&self, bytes: u64) {
        self.progress.advance(bytes);
    }

    fn is_cancelled(&self) -> bool {
        self.interrupt.check().is_err()
    }
}
