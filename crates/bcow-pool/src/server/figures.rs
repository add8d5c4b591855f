//! What a pool says of itself: to each client, as statistics, and as metrics.

use std::sync::Weak;
use std::sync::atomic::Ordering;

use bcow_images::running::Service;

use super::Pool;
use crate::asked::Asked;
use crate::protocol::{self, Hello};
use crate::stats::{Document, Memory, Mount, SCHEMA};

impl Pool {
    pub(super) fn hello(&self) -> Hello {
        Hello {
            version: protocol::VERSION,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            pool: self.name.to_string(),
            pid: std::process::id(),
            since: self.since,
            mounts: self.state().mounts.len(),
            supervisor: self.has_supervisor().then_some(self.supervisor),
            restarts: self.restarts,
            lost: self.lost.load(Ordering::Relaxed),
        }
    }

    /// The statistics of the mounts, without the lock: they take time.
    fn documents(&self) -> Vec<(Service, Option<Asked>, bcow_fuse::stats::Document)> {
        let mounts: Vec<_> = {
            let state = self.state();
            let mounts = state.mounts.values();
            mounts
                .map(|entry| {
                    let asked = entry.kept.as_ref().map(|kept| kept.asked.clone());
                    (entry.service.clone(), asked, Weak::clone(&entry.stats))
                })
                .collect()
        };
        let documents = mounts.into_iter();
        documents
            .filter_map(|(service, asked, stats)| {
                Some((service, asked, stats.upgrade()?.document()))
            })
            .collect()
    }

    /// The metrics of the pool and of its mounts at this moment.
    pub fn for_prometheus(&self) -> String {
        let mounts: Vec<_> = self.documents().into_iter().map(|one| one.2).collect();
        let resident = number("/proc/self/status", "VmRSS:").unwrap_or(0) << 10;
        #[rustfmt::skip]
        let figures = [
            ("bcow_pool_mounts", "gauge", "Mounts of the pool", mounts.len() as u64),
            ("bcow_pool_restarts_total", "counter", "Processes that the pool had before",
                self.restarts),
            ("bcow_pool_lost_mounts_total", "counter", "Mounts that this process did not take over",
                self.lost.load(Ordering::Relaxed)),
            ("bcow_pool_start_time_seconds", "gauge", "Start of the pool, since 1970", self.since),
            ("bcow_pool_resident_bytes", "gauge", "Memory of the process", resident),
        ];
        bcow_fuse::stats::text_of_pool(&figures, &self.cache.figures(), &mounts)
    }

    pub(super) fn statistics(&self) -> Document {
        let documents = self.documents().into_iter();
        let mounts = documents.map(|(service, asked, document)| {
            let requests = document.operations.iter().map(|operation| operation.count);
            Mount {
                requests: requests.sum(),
                errors: document.errors.total,
                image: service.image,
                at: service.at.join(", "),
                upper: service.upper,
                mode: service.mode,
                device: service.device,
                since_unix_seconds: service.since,
                asked,
            }
        });
        Document {
            schema: SCHEMA.to_owned(),
            pool: self.name.to_string(),
            pid: std::process::id(),
            since_unix_seconds: self.since,
            restarts: self.restarts,
            sandbox: self.sandbox.clone(),
            mounts: mounts.collect(),
            memory: memory(),
            cache: self.cache.figures(),
            threads: number("/proc/self/status", "Threads:").unwrap_or(0),
            requests: self.requests(),
        }
    }
}

/// A number from a file of /proc.
fn number(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(name))?;
    value.trim().trim_end_matches(" kB").parse().ok()
}

fn memory() -> Memory {
    let kib = |file, name| number(file, name).unwrap_or(0) << 10;
    Memory {
        resident_bytes: kib("/proc/self/status", "VmRSS:"),
        proportional_bytes: kib("/proc/self/smaps_rollup", "Pss:"),
    }
}
