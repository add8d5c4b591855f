//! The doors of uppers.

use serde::{Deserialize, Serialize};

/// The door of the mounts of an upper. It is settled when the upper begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Door {
    /// A tree of files, which the process of the mount shows through FUSE.
    Fuse,
    /// A disk with a file system of the kernel.
    Kernel,
}

impl Door {
    /// Its name: `fuse` or `kernel`.
    pub fn name(self) -> &'static str {
        match self {
            Door::Fuse => "fuse",
            Door::Kernel => "kernel",
        }
    }
}
