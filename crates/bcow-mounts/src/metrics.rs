//! The address at which a mount or a pool serves its metrics.

use bcow_images::error::{CommandError, Context};
use bcow_images::image::Messages;

pub use bcow_listen::{Metrics, answer_at};

/// Listens at `unix:PATH` or `HOST:PORT`.
pub fn listen(address: &str) -> Result<Metrics, CommandError> {
    Metrics::listen(address).context(|| format!("cannot serve metrics at {address}"))
}

/// Shows the address, if the host has chosen the port.
pub fn announce(metrics: &Metrics, ui: &dyn Messages) {
    if let Some(url) = metrics.chosen_url() {
        ui.status(&format_args!("metrics at {url}"));
    }
}
