//! Disks in tests: their backings and their content.

use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::format::{BackingEntry, BackingName};
use bcow::{BlockDevice, Storage};

/// A device as the backing of a disk, by the name "below" and without an identity.
pub fn below(device: Arc<dyn BlockDevice>) -> (BackingEntry, Arc<dyn BlockDevice>) {
    let name = BackingName::FileName {
        name: "below".into(),
        identity: None,
    };
    let size = device.size();
    (BackingEntry { name, size }, device)
}

/// `length` bytes of a device from `offset` on.
pub fn read(device: &dyn BlockDevice, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    device.read_at(offset, &mut bytes).expect("a read");
    bytes
}

/// All bytes of a device.
pub fn content(device: &dyn BlockDevice) -> Vec<u8> {
    read(device, 0, device.size() as usize)
}

/// Fails if a full check of a file has findings.
pub fn assert_sound(storage: Arc<dyn Storage>) {
    let report = check(storage, &CheckOptions::FULL).expect("a check");
    assert_eq!(report.findings, []);
}
