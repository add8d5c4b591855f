//! e2fsprogs and the kernel judge the file systems that the crate writes.

mod journal;
mod kernel;
mod programs;
mod read;
mod refused;
mod tree;
