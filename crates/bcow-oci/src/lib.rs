//! Conversion of container images into BCoW images, and their export.
//!
//! The path of an image through a conversion: [`convert()`] opens the [`Source`] (`layout`,
//! `docker` and `archive` find an image's layers; `directory` walks a directory of the host). For
//! each layer, uppermost first, a thread reads, hashes and decompresses the blob (`layer`, `blob`)
//! and sends chunks to the parser (`stream`). `tar` reads entries from the chunks, `ingest` and
//! `builder` build the layer's tree, and `content` stores the files' content in the image, equal
//! pieces once, unless `hidden` finds that an upper layer hides a file. Then `convert` merges the
//! trees, writes the file system's metadata and the JSON section, and reads the image back
//! (`verify`); `output` gives the file its name.
//!
//! `layered` converts an image layer by layer into an OCI layout. `store` opens BCoW images and
//! finds the files below them, `join` shows several images as one, `commit` writes changes as a new
//! image, `recode` rewrites an image with other options, and `export` writes tar archives and
//! ordinary OCI images.
//!
//! All input is treated as hostile. Each limit is in [`Limits`] or a constant at the code that it
//! protects; an input that exceeds a limit fails with [`ConvertError::Limit`].
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
mod image_file;
mod ingest;
mod input;
pub mod join;
mod layer;
pub mod layered;
mod layout;
mod lower;
mod metadata;
pub mod name;
pub mod options;
mod output;
mod parallel;
mod path;
mod platform;
pub mod recode;
mod recognise;
pub mod source;
mod space;
mod stack;
pub mod store;
mod stream;
mod tails;
mod tar;
mod warnings;

pub use bcow::rfc3339;
pub use convert::convert;
pub use digest::{DiffId, Digest};
pub use error::{ConvertError, ErrorKind, ImageForm};
pub use fuzz::fuzz_ingest;
pub use layered::{LayoutOptions, LayoutReport, Made, convert_to_layout, convert_trees};
pub use layout::write::LayoutForm;
pub use name::{ImageName, NameSyntax};
pub use options::{Compression, ConvertOptions, LayerReport, Limits, Progress, Report};
pub use platform::{Platform, PlatformSyntax};
pub use source::{Source, TarInput};
