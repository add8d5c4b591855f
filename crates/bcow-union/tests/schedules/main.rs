//! Sparse sketches under a model checker: what threads do with the same blocks, in thousands of orders.
//!
//! Each test is a *model*: some operations for each of some threads, on a host in memory. Whatever order the scheduler chooses, each byte
//! that is read, that is left at the end, or that a power cut leaves must be one that some order of the same operations, done one after
//! the other, gives ([`orders`]).

mod host;
mod model;
mod orders;
mod sparse;

#[path = "../sketch/support.rs"]
#[allow(dead_code)]
mod support;
#[path = "../sketch/world.rs"]
#[allow(dead_code)]
mod world;
