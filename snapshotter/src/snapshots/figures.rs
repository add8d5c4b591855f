//! What the snapshotter counts, and its page for Prometheus.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use bcow_tool::metrics::{Failures, MountFamilies, MountFigures, Page};

use super::Snapshots;
use crate::error::Error;
use crate::record::{Kind, SnapshotRecord};

const MOUNTS: MountFamilies = MountFamilies {
    label: "snapshot",
    up: "bcow_snapshot_up",
    requests: "bcow_snapshot_requests_total",
    errors: "bcow_snapshot_errors_total",
    fetched: "bcow_snapshot_fetched_bytes_total",
    mounts: "bcow_snapshotter_mounts",
    omitted: "bcow_snapshotter_omitted_snapshots",
};

/// Counters since the start of this process.
pub struct Counters {
    failures: Failures,
    /// Mounts that were made again.
    pub made_again: AtomicU64,
    mounts: MountFigures,
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            failures: Failures::new(&Error::KINDS),
            made_again: AtomicU64::new(0),
            mounts: MountFigures::default(),
        }
    }
}

impl Snapshots {
    /// Counts the failure of a request.
    pub fn count_failure(&self, error: &Error) {
        if let Some(kind) = error.kind() {
            self.counters.failures.add(kind);
        }
    }

    /// The metrics of the moment.
    pub fn page(&self) -> Page {
        let records: Vec<SnapshotRecord> = self.index.lock().all().cloned().collect();
        let mut page = Page::default();
        let name = "bcow_snapshotter_snapshots";
        page.family(name, "gauge", "Snapshots, by kind");
        for (kind, label) in [
            (Kind::Active, "active"),
            (Kind::View, "view"),
            (Kind::Committed, "committed"),
        ] {
            let count = records.iter().filter(|record| record.kind == kind).count();
            page.sample(name, &[("kind", label)], count as f64);
        }
        let counters = &self.counters;
        let failed = "bcow_snapshotter_failed_requests_total";
        counters.failures.write(&mut page, failed);
        page.figures(&[(
            "bcow_snapshotter_mounts_made_again_total",
            "counter",
            "Mounts that were made again after their end",
            counters.made_again.load(Ordering::Relaxed),
        )]);
        let mounts = records
            .into_iter()
            .filter_map(|record| self.mount_of(record));
        counters.mounts.write(&mut page, &MOUNTS, mounts.collect());
        page
    }

    /// The name of a snapshot, and the directory where its layers are mounted, if they are.
    fn mount_of(&self, record: SnapshotRecord) -> Option<(String, PathBuf)> {
        if record.kind == Kind::Committed || record.parent.is_none() {
            return None;
        }
        let unpacking = self.place.unpacking(&record);
        let directory = if unpacking.is_prepared() {
            unpacking.lower
        } else {
            self.place.mounted_root(&record)
        };
        Some((record.name, directory))
    }
}
