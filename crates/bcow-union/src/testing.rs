//! The layers below [`fs`](crate::fs), for the tests of this crate and for fuzzing. Nothing here is
//! stable.

/// Space and inodes of an upper.
pub mod account {
    pub use crate::account::*;
}

/// Blocks of a file.
pub mod blocks {
    pub use crate::blocks::*;
}

/// Files of the host.
pub mod host {
    pub use crate::host::*;
}

/// Partial files.
pub mod partial {
    pub use crate::partial::*;
}

pub mod upper {
    pub use crate::upper::*;
}

/// The ledger of a mount that another process can take over.
pub mod ledger {
    pub use crate::ledger::*;
}
