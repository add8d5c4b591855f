//! Tests of the public API: files, chains, disks, checks and repairs.

mod ahead;
mod chain;
mod composer;
mod disk;
mod long_chain;
mod repair;
mod restore;
mod vectors;
mod windows;
mod write_read;
