//! Reads and checks uppers that are not mounted.
//!
//! [`Changes`] is the layer that an upper makes over its image, or a disk that shows the image as
//! ext4. [`check`] finds damage and leaks.

mod addresses;
mod body;
mod builder;
mod changes;
pub mod check;
mod disk;
mod error;
mod partial;
mod splice;

pub use addresses::{LOWER_START, lower_offset};
pub use changes::{Changes, Scope};
pub use disk::DiskOverView;
pub use error::{ChangesError, Problem};
pub use splice::{SpliceError, Spliced, Store};
