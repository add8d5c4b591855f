//! Reads and writes tar archives. The reader supports every dialect that image layers use; its
//! input may be hostile. The writer writes ustar headers with PAX records.
//!
//! Header layouts come from tar-core. Its parser is not used: it does not support times before
//! 1970, applies a PAX size after it has removed a sparse map, and stops at a malformed PAX record
//! without an error.
//!
//! Where dialects differ, the reader follows Go's `archive/tar`, which container engines use for
//! layers. Where Go accepts an archive that other readers read differently (two PAX headers for one
//! entry, two numbers in one field), this reader returns an error.

pub(crate) mod number;
pub(crate) mod pax;
pub(crate) mod reader;
pub(crate) mod sparse;
pub(crate) mod writer;

pub(crate) use reader::{End, EntryKind, TarEntry, TarReader};
pub(crate) use sparse::{MAX_RUNS, Run, SparseMap};
