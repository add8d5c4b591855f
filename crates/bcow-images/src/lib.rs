//! Names of images, disks and archives, as users write them (`debian.bcow`, `oci:layout:tag`,
//! `docker://debian:12`, `raw:disk.img`), and the files to which they lead.
//!
//! [`Name::parse`] is the only parser. [`Takes`] says which forms an argument of a command takes,
//! and makes the errors for all others. [`apparent`] looks at the source of a conversion, and
//! [`way`] is the table of what converts to what. [`image`] and [`disks`] open images and disks,
//! with the files below them, where [`stores`] and [`remote`] find them. [`upper`] and
//! [`kernel_upper`] open the uppers of writable mounts for reading, and [`changes`] reads what they
//! change. [`snapshots`] finds the snapshots of disks. [`push`] has the places that commands write
//! to. [`error`] is the failure of a command, and [`interrupt`] its end by a signal.
//!
//! ```
//! use bcow_images::{Name, NameForm, NameUse, Takes};
//!
//! let takes = Takes {
//!     to: NameUse::Open,
//!     forms: &[NameForm::File, NameForm::Layout],
//! };
//! let name = takes.parse("oci:layout:debian".as_ref())?;
//! assert_eq!(name.form(), NameForm::Layout);
//!
//! let error = takes.parse("tar:root.tar".as_ref()).unwrap_err();
//! assert!(error.to_string().contains("tar:root.tar"));
//! assert!(error.hint().contains("bcow convert"));
//! # Ok::<(), bcow_images::NameError>(())
//! ```

pub mod args;
pub mod backing;
pub mod cache;
pub mod changes;
mod content;
pub mod disks;
pub mod error;
pub mod extents;
pub mod failure;
pub mod foreign_format;
mod form;
pub mod given;
pub mod global;
pub mod image;
pub mod inspect;
pub mod interrupt;
pub mod kernel_upper;
mod name;
mod name_error;
pub mod names;
pub mod new_file;
mod over_view;
pub mod plain;
pub mod prefetch;
pub mod push;
pub mod readable_upper;
pub mod record;
pub mod remote;
pub mod replace;
pub mod requests;
pub mod running;
pub mod s3;
pub mod sandbox;
pub mod size;
pub mod snapshots;
pub mod stat;
pub mod stores;
mod takes;
pub mod target;
pub mod tree;
pub mod upper;
mod url;
pub mod views;
mod ways;

pub use content::{Apparent, apparent};
pub use form::{NameForm, spellings};
pub use name::{Name, NameParts};
pub use name_error::{NameError, Syntax};
pub use takes::{NameUse, Takes, registry_hint};
pub use url::Url;
pub use ways::{Content, Target, Way, no_way, table, way};
