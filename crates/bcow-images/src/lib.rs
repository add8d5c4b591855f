//! Names of images, disks and archives, as users write them: `debian.bcow`, `oci:layout:tag`,
//! `docker://debian:12`, `raw:disk.img`.
//!
//! [`Name::parse`] is the only parser. [`Takes`] says which forms an argument of a command takes,
//! and makes the errors for all others. [`apparent`] looks at the source of a conversion, and
//! [`way`] is the table of what converts to what.
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

mod content;
mod error;
mod form;
mod name;
mod takes;
mod url;
mod ways;

pub use content::{Apparent, apparent};
pub use error::{NameError, Syntax};
pub use form::{NameForm, spellings};
pub use name::{Name, NameParts};
pub use takes::{NameUse, Takes};
pub use url::Url;
pub use ways::{Content, Target, Way, no_way, table, way};
