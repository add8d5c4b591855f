//! The targets of the fuzzer. Each takes any bytes, and must neither panic nor hang, nor use more
//! memory than a small multiple of its input. README.md says what the bytes of each are.

mod archive_open;
mod disk_ledger;
mod disk_write;
mod erofs_read;
mod ext4_read;
mod fuse_arguments;
mod image_open;
mod memory;
mod merged_file;
mod nbd_session;
mod partial_map;
mod pool_messages;
mod qcow2_read;
mod registry_documents;
mod server_answers;
mod snapshotter_requests;
mod tar_ingest;
mod texts;
mod upper_ledger;
mod upper_marks;
mod view_layout;

pub type Target = fn(&[u8]);

/// Each target with its name.
pub const TARGETS: [(&str, Target); 20] = [
    ("archive_open", archive_open::fuzz),
    ("disk_ledger", disk_ledger::fuzz),
    ("disk_write", disk_write::fuzz),
    ("erofs_read", erofs_read::fuzz),
    ("ext4_read", ext4_read::fuzz),
    ("fuse_arguments", fuse_arguments::fuzz),
    ("image_open", image_open::fuzz),
    ("merged_file", merged_file::fuzz),
    ("nbd_session", nbd_session::fuzz),
    ("partial_map", partial_map::fuzz),
    ("pool_messages", pool_messages::fuzz),
    ("qcow2_read", qcow2_read::fuzz),
    ("registry_documents", registry_documents::fuzz),
    ("server_answers", server_answers::fuzz),
    ("snapshotter_requests", snapshotter_requests::fuzz),
    ("tar_ingest", tar_ingest::fuzz),
    ("texts", texts::fuzz),
    ("upper_ledger", upper_ledger::fuzz),
    ("upper_marks", upper_marks::fuzz),
    ("view_layout", view_layout::fuzz),
];

/// Lets wrong checksums pass: else a changed input would not reach the code behind them.
pub fn prepare() {
    bcow_format::ignore_checksums();
}
