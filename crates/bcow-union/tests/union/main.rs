//! Unions without a mount: the effect of each request on the upper, the state after opening it
//! again, and the agreement of later reports on the upper with what the union showed. Needs root
//! (trusted attributes) and mkfs.erofs.

mod attributes;
mod changes;
mod check;
mod content;
mod fixture;
mod host;
mod image;
mod index;
mod limits;
mod links;
mod names;
mod opening;
mod random;
mod room;
mod snapshots;
mod tree;
mod unmounted;
