//! The upper of a writable mount, as it lies on the host.
//!
//! The tree is overlayfs's (`Documentation/filesystems/overlayfs.rst`): whiteouts, opaque directories, redirects, origins,
//! metadata copies. What overlayfs does not know lies beside it in [`META`]; docs/upper.md has the layout.
//!
//! [`Instance`] opens the directory for its one writer, [`UpperReader`] for those who only read. [`Marks`] are the
//! attributes that say what a file of the upper stands for, [`Names`] keep the container's attributes apart from them,
//! [`Override`] keeps owners where the host cannot. Everything goes through descriptors and names below them; no link that
//! a container made is ever followed.

pub(crate) mod beneath;
mod body;
mod changes;
pub mod check;
mod error;
mod instance;
mod marks;
mod names;
mod overlap;
mod owner;
mod probe;
mod reader;
mod record;
mod sketched;
mod splice;
mod work;
mod xattr;

pub use changes::{Changes, ChangesError, Problem, Scope};
pub use error::UpperError;
pub use instance::{Begun, ImageName, Instance};
pub use marks::{
    Mark, MarkError, Marks, Metacopy, NlinkDelta, Origin, REDIRECT_NOWHERE, ReadMarksError,
    Redirect, SKETCH_MARK_BYTES, SketchKind, SketchMark,
};
pub(crate) use names::{ACCESS_ACL, DEFAULT_ACL};
pub use names::{Names, Namespace, Ownership};
pub use owner::{OVERRIDE, Override, OverrideKind, host_mode};
pub use reader::UpperReader;
pub use record::{Record, SCHEMA};
pub use splice::{LOWER_FROM, SpliceError, Spliced, Store, lower_offset};
pub(crate) use work::leave_access_time;
pub use work::{Temporary, is_whiteout, make_durable};
pub use xattr::{Attribute, SetHow};

/// The directory in the upper's root where everything lies that is no part of the tree.
pub const META: &str = ".bcow";
