//! New files from others: conversions, copies and exports of images, commits of changes, disks that
//! are written anew, and snapshots of disks.
//!
//! Each command that writes images or disks has one entry here, which gets what the user asks for
//! and a [`Work`], and returns a report: [`Conversion::run`], [`Copying::run`], [`export_archive`],
//! [`export_image`] and [`export_bytes`], [`UpperCommit::run`] and [`commit_disk`], [`seal_into`]
//! and [`compact`], [`take_snapshot`], [`fork`], [`roll_back`] and [`remove_snapshot`]. A
//! conversion opens its source, finds the way to its destination in the table of
//! [`bcow_images::way`], refuses options that do not apply to this way, and goes it: `recode` for
//! images in BCoW form, `disk` for disks, `containerd_cache`, and `bcow_oci` for the others.
//!
//! ```no_run
//! use bcow_convert::{ExportedPart, Output, Work, export_bytes};
//! use bcow_images::args::IMAGE;
//! use bcow_images::error::CommandError;
//! use bcow_images::image::{Messages, OpenImage, StoreArgs};
//! use bcow_images::interrupt::Interrupt;
//!
//! fn export(image: &str, messages: &dyn Messages) -> Result<u64, CommandError> {
//!     let image = OpenImage::open(&IMAGE.parse(image.as_ref())?, &[], &StoreArgs::default())?;
//!     let work = Work {
//!         messages,
//!         progress: &(),
//!         interrupt: &Interrupt::catch(),
//!     };
//!     export_bytes(&image, ExportedPart::Erofs, Output::File("image.erofs".as_ref()), &work)
//! }
//! ```

mod commit;
mod containerd_cache;
mod conversion;
mod convert;
mod copy;
mod copy_out;
mod disk;
mod disks;
mod export;
mod options;
mod recode;
mod rewrite;
mod sending;
mod snapshots;
mod upper_snapshots;
mod work;

pub use commit::{CommitOutput, NewContent, UpperCommit};
pub use containerd_cache::{CacheReport, CachedLayer};
pub use conversion::Conversion;
pub use convert::{ConvertReport, Converted};
pub use copy::{Copied, CopyReport, Copying, SentFile};
pub use disk::{BcowDisk, DiskReport};
pub use disks::{CompactedDisk, SealedDisk, commit_disk, compact, seal_in_place, seal_into};
pub use export::{ExportedPart, Output, export_archive, export_bytes, export_image, is_stream};
pub use options::{BlockSize, Compress, Encoding, parse_block_size, parse_compression};
pub use rewrite::operation_failure;
pub use snapshots::{ForkedDisk, fork, remove_snapshot, roll_back, take_snapshot};
pub use upper_snapshots::{
    fork_upper, remove_upper_snapshot, roll_back_upper, take_upper_snapshot, upper_snapshots,
};
pub use work::Work;
