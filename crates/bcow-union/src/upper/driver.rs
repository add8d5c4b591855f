//! The drivers of uppers.

use serde::{Deserialize, Serialize};

/// The driver of the mounts of an upper. It is settled when the upper begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Driver {
    /// A tree of files, which the process of the mount shows through FUSE.
    Fuse,
    /// A disk with a file system of the kernel.
    Kernel,
}

impl Driver {
    /// Its name: `fuse` or `kernel`.
    pub fn name(self) -> &'static str {
        match self {
            Driver::Fuse => "fuse",
            Driver::Kernel => "kernel",
        }
    }
}
