//! Partial files under a model checker, which tries thousands of schedules of threads on the same
//! blocks.
//!
//! Each test is a *model*: some operations for each of several threads, on a host in memory. In
//! every schedule, each byte that a thread reads, that the file has at the end, or that a power cut
//! leaves must be the result of some sequential order of the operations ([`orders`]).

mod host;
mod limit;
mod model;
mod orders;
mod sparse;

#[path = "../partial/support.rs"]
#[allow(dead_code)]
mod support;
#[path = "../partial/world.rs"]
#[allow(dead_code)]
mod world;
