//! Sources of container images, and their conversion into one flattened BCoW image.

pub mod convert;
pub mod digest;
pub mod error;
pub mod options;
pub mod source;

pub use convert::convert;
pub use digest::{DiffId, Digest};
pub use error::{ConvertError, ErrorKind};
pub use options::{Compression, ConvertOptions, LayerReport, Limits, Platform, Progress, Report};
pub use source::{Source, TarInput};
