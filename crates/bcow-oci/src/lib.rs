//! Sources of container images, and their conversion into one flattened BCoW image.
//!
//! The way of an image through this crate: [`convert()`] opens the [`Source`] (`layout`, `docker`, `archive`
//! find an image's layers; `directory` walks a directory of the host). For each layer, uppermost first, a
//! thread reads, hashes and decompresses (`layer`, `blob`) and hands chunks on (`stream`); `tar` makes
//! entries of them, `ingest` and `builder` a tree, and `content` puts the files' bytes into the image, each
//! piece once, unless `hidden` says that an upper layer hides them. `convert` then has the trees merged,
//! writes the file system's metadata and the JSON section, reads everything back (`verify`), and `output`
//! gives the file its name.
//!
//! Everything read is hostile until proven otherwise: every limit is in [`Limits`] or a constant beside
//! what it guards, and running into one is [`ConvertError::Limit`].
//!
//! ```no_run
//! use bcow_oci::{ConvertOptions, Source, convert};
//!
//! let source: Source = "oci:layout:latest".parse()?;
//! let report = convert(&source, "image.bcow".as_ref(), &ConvertOptions::default(), &())?;
//! println!("{} inodes in {} bytes", report.entries, report.file_bytes);
//! # Ok::<(), bcow_oci::ConvertError>(())
//! ```

mod archive;
mod blob;
mod builder;
mod cancel;
pub mod commit;
mod content;
mod conversion;
pub mod convert;
pub mod digest;
mod directory;
mod docker;
pub mod error;
pub mod export;
mod fuzz;
mod hidden;
mod image;
mod ingest;
pub mod join;
mod layer;
pub mod layered;
mod layout;
mod metadata;
pub mod name;
pub mod options;
mod output;
mod parallel;
mod path;
pub mod recode;
mod recognise;
pub mod source;
pub mod store;
mod stream;
mod tails;
mod tar;
mod verify;
mod warnings;

pub use bcow::rfc3339;
pub use convert::convert;
pub use digest::{DiffId, Digest};
pub use error::{ConvertError, ErrorKind, ImageForm};
pub use fuzz::fuzz_ingest;
pub use layered::{LayoutOptions, LayoutReport, Made, convert_to_layout, convert_trees};
pub use layout::write::LayoutForm;
pub use name::ImageName;
pub use options::{Compression, ConvertOptions, LayerReport, Limits, Platform, Progress, Report};
pub use source::{Source, TarInput};
