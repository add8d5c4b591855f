//! The schema `bcow.pool-stats/1`.

use bcow::CacheFigures;
use serde::{Deserialize, Serialize};

use crate::asked::Asked;

/// The statistics of a pool.
#[derive(Debug, Serialize, Deserialize)]
pub struct Document {
    pub schema: String,
    /// The name of the pool.
    pub pool: String,
    /// Its process.
    pub pid: u32,
    /// Start time in seconds since 1970.
    pub since_unix_seconds: u64,
    /// The processes that the pool had before.
    #[serde(default)]
    pub restarts: u64,
    /// The parts of the sandbox of the process.
    #[serde(default)]
    pub sandbox: Vec<String>,
    pub memory: Memory,
    /// The cache of decoded blocks of all mounts.
    pub cache: CacheFigures,
    /// Threads of the process.
    pub threads: u64,
    /// Requests that were answered at these mounts.
    pub requests: u64,
    /// The mounts, the oldest first.
    pub mounts: Vec<Mount>,
}

/// The memory of a process in bytes, as the kernel counts it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Memory in use, with what other processes use too.
    pub resident_bytes: u64,
    /// As above, but memory that several processes use counts in parts; 0 if it is unknown.
    pub proportional_bytes: u64,
}

/// A mount of a pool.
#[derive(Debug, Serialize, Deserialize)]
pub struct Mount {
    pub image: String,
    /// The mountpoint.
    pub at: String,
    pub upper: Option<String>,
    /// `ro` or `rw`.
    pub mode: String,
    /// The device number, in the form of the kernel.
    pub device: Option<String>,
    /// Start time in seconds since 1970.
    pub since_unix_seconds: u64,
    /// Requests that were answered.
    pub requests: u64,
    /// Errors since the mount.
    pub errors: u64,
    /// The command that made it, if the pool can repeat it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<Asked>,
}

/// The schema of [`Document`].
pub const SCHEMA: &str = "bcow.pool-stats/1";
