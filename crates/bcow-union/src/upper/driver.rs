//! The drivers of uppers.

use serde::{Deserialize, Serialize};

/// The driver of all mounts of an upper. The mount that creates the upper selects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Driver {
    /// The process of the mount. The upper is a tree of files.
    Fuse,
    /// A file system of the kernel. The upper is a disk with this file system.
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
