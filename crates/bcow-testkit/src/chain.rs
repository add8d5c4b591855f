//! Backings of disks in tests.

use std::sync::Arc;

use bcow::BlockDevice;
use bcow::format::{BackingEntry, BackingName};

/// A device as the backing of a disk, by the name "below" and without an identity.
pub fn below(device: Arc<dyn BlockDevice>) -> (BackingEntry, Arc<dyn BlockDevice>) {
    let name = BackingName::FileName {
        name: "below".into(),
        identity: None,
    };
    let size = device.size();
    (BackingEntry { name, size }, device)
}
