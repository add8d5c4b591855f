//! Checks and repairs what a name leads to: an image with its layers, a disk, or the upper of a
//! writable mount. Every check has one report.
//!
//! [`Fsck::run`] decides what the name is. `image` checks files in BCoW form and the file systems
//! in them, `upper` an upper of the FUSE driver, and `kernel_upper` one of the kernel driver; each
//! fills an [`FsckReport`], which is also the JSON document. The checks themselves are in the
//! libraries that know the data: `bcow::check`, `bcow_erofs::check` and
//! `bcow_union::offline::check`.
//!
//! ```no_run
//! use bcow_fsck::Fsck;
//! use bcow_images::args::WHOLE_IMAGE;
//! use bcow_images::error::CommandError;
//! use bcow_images::image::{LayerArgs, Messages, StoreArgs};
//! use bcow_images::sandbox::SandboxArgs;
//!
//! fn errors(image: &str, messages: &dyn Messages) -> Result<u64, CommandError> {
//!     let fsck = Fsck {
//!         image: &WHOLE_IMAGE.parse(image.as_ref())?,
//!         lower: None,
//!         data: true,
//!         repair: None,
//!         jobs: None,
//!         layers: &LayerArgs::default(),
//!         stores: &StoreArgs::default(),
//!         sandbox: &SandboxArgs::default(),
//!         messages,
//!         progress: &(),
//!     };
//!     Ok(fsck.run()?.verdict().errors)
//! }
//! ```

mod backing;
mod found;
mod image;
mod kernel_upper;
mod report;
mod restore;
mod tolerant;
mod upper;
mod upper_image;

use std::fmt::Display;
use std::path::Path;

use bcow::check::CheckOptions;
use bcow_images::Name;
use bcow_images::error::CommandError;
use bcow_images::image::{LayerArgs, Messages, StoreArgs};
use bcow_images::kernel_upper::is_kernel_upper;
use bcow_images::sandbox::SandboxArgs;
use bcow_oci::Progress;
use bcow_union::META;

pub use report::{CheckedFile, FsckReport, ReadCounts, Repairs, UpperFacts, Verdict};

/// What to check, and how.
pub struct Fsck<'a> {
    /// The image, the disk or the directory of the upper.
    pub image: &'a Name,
    /// The image of an upper. Without it, the path recorded in the upper.
    pub lower: Option<&'a Name>,
    /// Whether every byte is read and verified. Otherwise, structures and checksums of tables.
    pub data: bool,
    /// Repairs before the check; `None` changes nothing.
    pub repair: Option<RepairOptions<'a>>,
    /// The number of threads that read and verify, if the user chose one. There is no choice for an
    /// upper of the FUSE driver.
    pub jobs: Option<usize>,
    /// Layers on top of the image of an upper.
    pub layers: &'a LayerArgs,
    /// Where files below are looked up.
    pub stores: &'a StoreArgs,
    /// The sandbox of the process, for a check of an image or a disk without repairs.
    pub sandbox: &'a SandboxArgs,
    /// Takes warnings.
    pub messages: &'a dyn Messages,
    /// Takes the phases of the check.
    pub progress: &'a dyn Progress,
}

/// What to repair.
#[derive(Debug, Clone, Copy, Default)]
pub struct RepairOptions<'a> {
    /// A copy of the image, whose bytes replace damaged ones.
    pub from: Option<&'a Name>,
}

impl Fsck<'_> {
    /// Repairs and checks.
    pub fn run(&self) -> Result<FsckReport, CommandError> {
        if !is_upper(self.image.shown()) {
            return image::check(self);
        }
        self.sandbox.without("it is an upper")?;
        if self.copy().is_some() {
            let usage = format!("{} is the upper of a writable mount", self.image.display());
            Err(CommandError::usage(usage).hint("--from restores images"))
        } else if is_kernel_upper(self.image.shown()) {
            kernel_upper::check(self)
        } else {
            upper::check(self)
        }
    }

    fn copy(&self) -> Option<&Name> {
        self.repair.and_then(|repair| repair.from)
    }

    /// Whether every byte is read. A restored file is read as a whole in any case.
    fn reads_data(&self) -> bool {
        self.data || self.copy().is_some() || self.is_pinned_file()
    }

    fn check_options(&self) -> CheckOptions {
        CheckOptions {
            data: self.reads_data(),
            threads: self.threads(),
        }
    }

    /// The number of threads that read and verify.
    fn threads(&self) -> usize {
        let all = || std::thread::available_parallelism().map_or(1, |n| n.get());
        self.jobs.unwrap_or_else(all)
    }

    /// Whether --root-hash names the content of a file on this machine. The root in its header says
    /// nothing about the content until all of it is hashed. Each read of an image on another
    /// machine is verified.
    fn is_pinned_file(&self) -> bool {
        self.stores.remote.root_hash.is_some() && !self.image.is_remote()
    }
}

/// Whether `path` is the upper of a writable mount, with either driver.
fn is_upper(path: &Path) -> bool {
    path.join(META).is_dir()
}

/// The hint after a repair that was not followed by a check of the content.
fn unread_content(name: &impl Display) -> String {
    format!("the content of blocks was not checked: `bcow fsck --data {name}` reads it too")
}
