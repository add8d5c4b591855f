//! The command as its users meet it: the real binary, its output as a whole, its exit status.
//!
//! Snapshots are read before they are accepted. What may change without anybody noticing (digests,
//! the version, the layout of metadata) is filtered out of them.

mod convert;
mod damage;
mod diagnostics;
mod diff;
mod disks;
mod errors;
mod export;
mod extract;
mod forms;
mod guesses;
mod help;
mod host;
mod mount;
mod outputs;
mod over;
mod platforms;
mod stacks;
mod support;
mod ways;
mod writable;
