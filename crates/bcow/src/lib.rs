//! A BCoW file and its chain: storage, open, map, read, write, check, cache.
//!
//! `Storage` (bytes somewhere) lies below; [`BlockDevice`] (an address space) is what others see.

pub mod device;
pub mod error;

pub use device::BlockDevice;
pub use error::Error;
