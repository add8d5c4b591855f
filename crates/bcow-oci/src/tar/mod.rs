//! Tar archives. Reading: every dialect that image layers come in, from bytes that may be hostile.
//!
//! Header layouts are tar-core's. Its parser is not used: it has no sign for times, applies a PAX
//! size after it has taken off a sparse map, and ends silently at a malformed PAX record.
//!
//! Where dialects leave room, this reads as Go's `archive/tar` does (which every container engine
//! reads layers with), and is stricter where Go lets two readings stand.

pub(crate) mod number;
pub(crate) mod pax;
pub(crate) mod reader;
pub(crate) mod sparse;
pub(crate) mod writer;

pub(crate) use reader::{End, Entry, EntryKind, TarError, TarReader};
pub(crate) use sparse::{MAX_RUNS, Run, SparseMap};
