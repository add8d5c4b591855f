//! One file per command: a clap struct whose doc comment is the help, and `run(args, ui)`.

pub mod attach;
pub mod cat;
pub mod commit;
pub mod compact;
pub mod completions;
pub mod convert;
pub mod create;
pub mod detach;
pub mod diff;
pub mod export;
pub mod extract;
pub mod fsck;
pub mod inspect;
pub mod ls;
pub mod man;
pub mod map;
pub mod mount;
pub mod ps;
pub mod rebase;
pub mod resize;
pub mod seal;
pub mod serve;
pub mod stats;
pub mod umount;
pub mod version;
