//! Sources of container images, and their conversion into one flattened BCoW image.

mod archive;
mod blob;
mod builder;
mod content;
pub mod convert;
mod date;
pub mod digest;
mod directory;
mod docker;
pub mod error;
mod fuzz;
mod hidden;
mod image;
mod ingest;
mod layer;
mod layout;
pub mod options;
mod output;
mod path;
pub mod source;
mod stream;
mod tails;
mod tar;
mod verify;
mod warnings;

pub use convert::convert;
pub use digest::{DiffId, Digest};
pub use error::{ConvertError, ErrorKind};
pub use fuzz::fuzz_ingest;
pub use options::{Compression, ConvertOptions, LayerReport, Limits, Platform, Progress, Report};
pub use source::{Source, TarInput};
