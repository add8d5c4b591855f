//! Tar archives. The reader supports every dialect of image layers, from bytes that may be hostile.
//!
//! Header layouts come from tar-core. Its parser is not used: it does not support signed times,
//! applies a PAX size after it has removed a sparse map, and ends without an error at a malformed
//! PAX record.
//!
//! Where dialects differ, the reader follows Go's `archive/tar`, which container engines use for
//! layers. Where Go permits two readings, this reader is stricter.

pub(crate) mod number;
pub(crate) mod pax;
pub(crate) mod reader;
pub(crate) mod sparse;
pub(crate) mod writer;

pub(crate) use reader::{End, Entry, EntryKind, TarReader};
pub(crate) use sparse::{MAX_RUNS, Run, SparseMap};
