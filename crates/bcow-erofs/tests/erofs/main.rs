//! Tests of the public API: trees in, EROFS out, and back.

mod account;
mod diff;
mod extract;
mod hostile;
mod kernel;
mod limits;
mod merge;
mod mkfs;
mod overlay;
mod roundtrip;
mod support;
