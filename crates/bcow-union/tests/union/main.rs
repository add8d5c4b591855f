//! Unions without a mount: what each request does to the upper, that all is as it was when it is opened again, and that what is
//! said of the upper afterwards is what the union showed. Needs root (trusted attributes) and mkfs.erofs.

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
mod tree;
mod unmounted;
