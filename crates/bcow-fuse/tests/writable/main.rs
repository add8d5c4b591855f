//! What programs see in a mount with an upper: the same as in a plain directory.

mod content;
mod mount;
mod names;
mod pair;
mod privileges;
#[path = "../support/mod.rs"]
mod support;
