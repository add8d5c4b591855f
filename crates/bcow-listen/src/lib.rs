//! Sockets at which a process listens, and a page with its metrics for Prometheus.
//!
//! [`Listener`] is a socket with a name or an address. [`Metrics`] serves a page there, and
//! [`Page`] is the text of one.
//!
//! ```no_run
//! use bcow_listen::{Metrics, Page};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let metrics = Metrics::listen("127.0.0.1:9090")?;
//! metrics.answer(|| {
//!     let mut page = Page::default();
//!     page.figures(&[("jobs_total", "counter", "Jobs that are done", 7)]);
//!     page.text()
//! })?;
//! # Ok(())
//! # }
//! ```

mod error;
mod listener;
mod metrics;
mod page;

pub use error::ListenError;
pub use listener::{ListenAddress, Listener};
pub use metrics::{Metrics, answer_at};
pub use page::{Figure, Page};
