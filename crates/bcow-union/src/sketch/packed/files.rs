//! The files of a packed sketch: opens or creates the BCoW file on the host's file and the lower
//! file.

use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName, Use};
use bcow::{BackingResolver, BlockDevice, CreateOptions, Disk, Layout, OpenOptions};

use super::super::host::MarkedFile;
use super::super::shared::Shared;
use super::super::{Lower, SketchError, SketchMark};
use super::MAX_BYTES;
use super::device::LowerDevice;
use super::storage::HostStorage;
use crate::blocks::BLOCK_BYTES;

/// The smallest address space of a new file. A large one costs nothing, but a resize does.
const LEAST_SPACE: u64 = 64 << 20;

/// The files of a sketch whose BCoW file is not yet open.
pub(super) struct Files {
    pub(super) host: Arc<dyn MarkedFile>,
    pub(super) storage: Arc<HostStorage>,
    pub(super) lower: Arc<LowerDevice>,
}

impl Files {
    pub(super) fn new(
        shared: &Shared,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
        mark: &SketchMark,
    ) -> Self {
        let storage = HostStorage::new(Arc::clone(&host), Arc::clone(&shared.account));
        Files {
            host,
            storage: Arc::new(storage),
            lower: Arc::new(LowerDevice::new(lower, mark.lower_limit)),
        }
    }

    pub(super) fn open_disk(&self, shared: &Shared) -> Result<Disk, SketchError> {
        let backing = LowerBacking(&self.lower);
        Ok(Disk::open(
            self.storage.clone(),
            &open_options(shared),
            &backing,
        )?)
    }

    /// Creates the BCoW file. The existing content of the host's file is discarded.
    pub(super) fn create_disk(
        &self,
        shared: &Shared,
        mark: &SketchMark,
    ) -> Result<Disk, SketchError> {
        let layout = shared.options.layout;
        let size = mark.size.next_multiple_of(BLOCK_BYTES);
        // The block size of the performance layout depends on the size.
        let size = match layout {
            Layout::Performance => size,
            Layout::Auto | Layout::Space => size.saturating_mul(2).clamp(LEAST_SPACE, MAX_BYTES),
        };
        let options = CreateOptions {
            layout,
            purpose: Use::Sketch,
            ..CreateOptions::disk(size)
        };
        self.storage.empty(0)?;
        let backing = (self.lower.size() > 0).then(|| {
            let device: Arc<dyn BlockDevice> = self.lower.clone();
            (backing_entry(&self.lower), device)
        });
        Ok(Disk::create(
            self.storage.clone(),
            &options,
            backing,
            &open_options(shared),
        )?)
    }
}

fn open_options(shared: &Shared) -> OpenOptions {
    OpenOptions {
        cache: shared.cache.clone(),
        ..OpenOptions::default()
    }
}

/// Provides the lower file as the backing.
struct LowerBacking<'a>(&'a Arc<LowerDevice>);

impl BackingResolver for LowerBacking<'_> {
    fn resolve(&self, _: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, bcow::Error> {
        Ok(Some(self.0.clone()))
    }
}

/// The entry of the backing in the BCoW file. Its name is not used to find the backing: the union
/// provides the lower file.
fn backing_entry(device: &LowerDevice) -> BackingEntry {
    BackingEntry {
        name: BackingName::FileName {
            name: "lower".into(),
            identity: None,
        },
        size: device.size(),
    }
}
