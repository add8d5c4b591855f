//! Conversion of container images into BCoW images, and their export.
//!
//! The path of an image through a conversion ([`convert()`]):
//!
//! 1. `input` opens the [`Source`]: `layout`, `docker` and `archive` find an image's layers.
//! 2. For each layer, uppermost first, a thread reads, hashes and decompresses the blob (`layer`,
//!    `blob`) and sends chunks to the parser (`stream`). A directory of the host is walked instead
//!    (`directory`).
//! 3. `tar` reads entries from the chunks. `ingest` and `builder` build the layer's tree, and
//!    `content` stores the content of the files in the image; it stores equal pieces once. `hidden`
//!    finds the files that upper layers hide. Their content is not stored.
//! 4. `conversion` writes the merged tree and the JSON section (`metadata`). `image_file` reads the
//!    image back, and `output` gives the file its name.
//!
//! `layered` converts an image layer by layer into an OCI layout, with a `stack` that merges the
//! layers. [`store`] opens BCoW images and finds the files below them, [`join`] shows several
//! images as one, [`commit`] writes changes as a new image, [`recode`] rewrites an image with other
//! options, [`copy`] copies images without a change, and [`export`] writes tar archives and
//! ordinary OCI images.
//!
//! All input is treated as hostile. Each limit is a field of [`Limits`], or a constant in the
//! module that it protects. An input that exceeds a limit fails with [`ConvertError::Limit`].
//!
//! ```no_run
//! use bcow_oci::{ConvertOptions, Source, convert};
//!
//! let source = Source::Oci {
//!     directory: "layout".into(),
//!     reference: Some("latest".to_owned()),
//! };
//! let report = convert(&source, "image.bcow".as_ref(), &ConvertOptions::default(), &())?;
//! println!("{} inodes in {} bytes", report.entries, report.file_bytes);
//! # Ok::<(), bcow_oci::ConvertError>(())
//! ```

#![warn(missing_docs)]

mod archive;
mod blob;
mod builder;
mod cancel;
pub mod commit;
mod content;
mod conversion;
mod convert;
pub mod copy;
pub mod digest;
mod directory;
mod docker;
mod ending;
mod error;
pub mod export;
#[cfg(feature = "testing")]
mod fuzz;
mod hidden;
mod image;
mod image_file;
mod in_order;
mod index;
mod ingest;
mod input;
pub mod join;
mod layer;
mod layered;
mod layout;
mod left_out;
mod lower;
mod metadata;
mod name;
mod null;
mod one_layer;
mod options;
mod output;
mod parallel;
mod path;
mod platform;
mod prefetch;
pub mod recode;
mod recognise;
mod registry;
mod repository;
mod run_data;
mod source;
mod space;
mod stack;
pub mod store;
mod stream;
mod tails;
mod tar;
mod text;
pub mod trace;
mod warnings;

pub use bcow::rfc3339;
pub use convert::convert;
pub use digest::{DiffId, Digest};
pub use error::{ConvertError, ImageForm, LimitKind, TarPlace, TarProblem};
#[cfg(feature = "testing")]
pub use fuzz::fuzz_ingest;
pub use index::{ImageIndex, Platforms};
pub use input::diff_ids;
pub use layered::{
    Attestations, IndexReport, LayerOrigin, LayoutOptions, LayoutReport, StackReport,
    StoredLayerReport, convert_index, convert_to_layout, convert_trees,
};
pub use layout::write::{LayoutForm, LayoutPlace};
pub use layout::{annotations, annotations_of};
pub use left_out::{Annotations, FromIndex, LeftOut};
pub use name::LocalImage;
pub use one_layer::convert_layer;
pub use options::{Compression, ConvertOptions, LayerReport, Limits, Progress, Report, RunOptions};
pub use platform::{Platform, PlatformSyntax};
pub use prefetch::Prefetch;
pub use registry::{
    BcowImage, OrdinaryImage, RegistryImage, RemoteStack, find_attached, find_in_registry,
};
pub use repository::{OpenContent, Repository, Upload};
pub use source::{Source, TarInput};
