//! The statistics as a page for Prometheus.

use std::collections::BTreeMap;

use bcow::CacheFigures;
use bcow_listen::{Figure, Page};

use super::document::{Bucket, DiskFigures, Document, OperationFigures, Remote, Upper};
use super::latency;

/// The metrics of a mount. Some fields of the document have no metric, such as the mountpoint.
pub(crate) fn text(document: &Document) -> String {
    let mut out = Page::default();
    write_mount(document, &mut out);
    write_cache(&document.cache, &mut out);
    write_operations(std::slice::from_ref(document), &mut out);
    out.text()
}

/// The metrics of a process that serves several mounts. The mountpoint is a label of those that
/// belong to a mount. The cache and the histograms of requests are those of all mounts: a histogram
/// for each mount would make the page too long.
pub fn text_of_pool(figures: &[Figure], cache: &CacheFigures, mounts: &[Document]) -> String {
    let mut out = Page::default();
    out.figures(figures);
    write_cache(cache, &mut out);
    for document in mounts {
        out.label_all(vec![("mountpoint", document.mountpoint.clone())]);
        write_mount(document, &mut out);
        let requests = document.operations.iter().map(|figures| figures.count);
        out.figures(&[(
            "bcow_mount_requests_total",
            "counter",
            "Requests that were answered",
            requests.sum(),
        )]);
    }
    out.label_all(Vec::new());
    write_operations(mounts, &mut out);
    out.text()
}

fn write_cache(cache: &CacheFigures, out: &mut Page) {
    #[rustfmt::skip]
    let figures = [
        ("bcow_cache_limit_bytes", "gauge", "Budget for decoded blocks", cache.limit_bytes),
        ("bcow_cache_held_bytes", "gauge", "Decoded blocks in memory", cache.held_bytes),
        ("bcow_cache_hits_total", "counter", "Blocks found decoded", cache.hits),
        ("bcow_cache_misses_total", "counter", "Blocks read and decoded", cache.misses),
    ];
    out.figures(&figures);
}

/// What a process has for each of its mounts.
fn write_mount(document: &Document, out: &mut Page) {
    let Document {
        image,
        process,
        upper,
        disk,
        remote,
        errors,
        ..
    } = document;
    let is_writable = upper.is_some() || disk.as_ref().is_some_and(|disk| disk.is_writable);
    out.family("bcow_mount_info", "gauge", "The mounted image");
    let labels = [
        ("image", image.name.as_str()),
        ("identity", image.identity.as_str()),
        ("mode", if is_writable { "rw" } else { "ro" }),
    ];
    out.sample("bcow_mount_info", &labels, 1.0);
    const UPTIME: &str = "bcow_uptime_seconds";
    out.family(UPTIME, "gauge", "Time since the mount");
    out.sample(UPTIME, &[], process.uptime_seconds);
    const ERRORS: &str = "bcow_errors_total";
    out.family(ERRORS, "counter", "Errors since the mount, by kind");
    for kind in &errors.kinds {
        out.sample(ERRORS, &[("kind", &kind.kind)], kind.count as f64);
    }
    if let Some(last) = errors.recent.first() {
        let name = "bcow_last_error_timestamp_seconds";
        out.figures(&[(name, "gauge", "Time of the last error", last.unix_seconds)]);
    }
    if let Some(upper) = upper {
        write_upper(upper, out);
    }
    if let Some(disk) = disk {
        write_disk(disk, out);
    }
    if let Some(remote) = remote {
        write_remote(remote, out);
    }
}

/// The sums over these mounts.
fn write_operations(mounts: &[Document], out: &mut Page) {
    let mut operations: BTreeMap<&str, Vec<&OperationFigures>> = BTreeMap::new();
    for figures in mounts.iter().flat_map(|document| &document.operations) {
        let same = operations.entry(&figures.operation).or_default();
        same.push(figures);
    }
    out.family(
        "bcow_operation_seconds",
        "histogram",
        "Duration of requests",
    );
    for (operation, figures) in operations {
        write_operation(operation, &figures, out);
    }
}

fn write_operation(operation: &str, figures: &[&OperationFigures], out: &mut Page) {
    const BUCKET: &str = "bcow_operation_seconds_bucket";
    let operation = ("operation", operation);
    // All limits, also those of empty buckets: Prometheus adds the counts of several series
    // with the same limit.
    for limit_ns in (0..latency::BUCKETS - 1).map(latency::upper_ns) {
        let is_below = |bucket: &&Bucket| bucket.below_ns.is_some_and(|ns| ns <= limit_ns);
        let buckets = figures.iter().flat_map(|figures| &figures.histogram);
        let below: u64 = buckets.filter(is_below).map(|bucket| bucket.count).sum();
        let limit = format!("{}", limit_ns as f64 / 1e9);
        out.sample(BUCKET, &[operation, ("le", &limit)], below as f64);
    }
    let count: u64 = figures.iter().map(|figures| figures.count).sum();
    let total_ns: u64 = figures.iter().map(|figures| figures.total_ns).sum();
    let count = count as f64;
    out.sample(BUCKET, &[operation, ("le", "+Inf")], count);
    let seconds = total_ns as f64 / 1e9;
    out.sample("bcow_operation_seconds_sum", &[operation], seconds);
    out.sample("bcow_operation_seconds_count", &[operation], count);
}

fn write_disk(disk: &DiskFigures, out: &mut Page) {
    #[rustfmt::skip]
    let figures = [
        ("bcow_disk_size_bytes", "gauge", "Size of the disk", disk.size_bytes),
        ("bcow_disk_flushes_total", "counter", "Flushes of the disk", disk.flushes),
        ("bcow_disk_checkpoints_total", "counter", "Checkpoints of the disk", disk.checkpoints),
        ("bcow_disk_filled_blocks_total", "counter", "Blocks completed from the backing",
            disk.filled_blocks),
        ("bcow_disk_unflushed_blocks", "gauge", "Blocks changed since the last flush",
            disk.unflushed_blocks),
        ("bcow_disk_free_bytes", "gauge", "Free bytes inside the file of the disk",
            disk.free_bytes),
    ];
    out.figures(&figures);
}

fn write_remote(remote: &Remote, out: &mut Page) {
    #[rustfmt::skip]
    let figures = [
        ("bcow_remote_files", "gauge", "Open files on other machines", remote.files),
        ("bcow_remote_file_bytes", "gauge", "Total length of the open remote files",
            remote.file_bytes),
        ("bcow_remote_held_bytes", "gauge", "Bytes of the open remote files in the cache",
            remote.held_bytes),
        ("bcow_remote_fetched_bytes_total", "counter", "Bytes fetched and checked",
            remote.fetched_bytes),
        ("bcow_remote_cached_bytes_total", "counter", "Bytes read from the cache and checked",
            remote.cached_bytes),
        ("bcow_remote_running_requests", "gauge", "Requests to servers without a complete answer",
            remote.running_requests),
        ("bcow_remote_waiting_reads", "gauge", "Reads that wait for a server",
            remote.waiting_reads),
        ("bcow_remote_retries_total", "counter", "Repeated attempts of requests to servers",
            remote.retries),
        ("bcow_remote_tokens_total", "counter", "Tokens that token servers have issued",
            remote.tokens),
    ];
    out.figures(&figures);
    const WAIT: &str = "bcow_remote_longest_wait_seconds";
    out.family(WAIT, "gauge", "Time of the longest wait for a server");
    out.sample(WAIT, &[], remote.longest_wait_seconds);
    const ERRORS: &str = "bcow_remote_errors_total";
    out.family(ERRORS, "counter", "Failed attempts, by kind");
    for kind in &remote.errors {
        out.sample(ERRORS, &[("kind", &kind.kind)], kind.count as f64);
    }
    const REQUESTS: &str = "bcow_remote_requests_total";
    out.family(REQUESTS, "counter", "Requests, by server");
    for server in &remote.servers {
        out.sample(
            REQUESTS,
            &[("server", &server.server)],
            server.requests as f64,
        );
    }
    const BYTES: &str = "bcow_remote_received_bytes_total";
    out.family(BYTES, "counter", "Bytes of answers, by server");
    for server in &remote.servers {
        let bytes = server.received_bytes as f64;
        out.sample(BYTES, &[("server", &server.server)], bytes);
    }
}

fn write_upper(upper: &Upper, out: &mut Page) {
    #[rustfmt::skip]
    let limited = [
        ("bcow_upper_limit_bytes", "Limit of the stored bytes", upper.limit_bytes),
        ("bcow_upper_stored_bytes", "Bytes stored in the upper", upper.stored_bytes),
        ("bcow_upper_limit_inodes", "Limit of the inodes", upper.limit_inodes),
        ("bcow_upper_inodes", "Inodes of the upper", upper.stored_inodes),
    ];
    for (name, help, value) in limited {
        if let Some(value) = value {
            out.figures(&[(name, "gauge", help, value)]);
        }
    }
    let partials = &upper.partials;
    #[rustfmt::skip]
    let figures = [
        ("bcow_upper_nodes", "gauge", "Inodes that the kernel knows", upper.nodes),
        ("bcow_upper_copied_metadata_total", "counter", "Files copied up without data",
            upper.copied_metadata),
        ("bcow_upper_copied_whole_total", "counter", "Files copied up whole", upper.copied_whole),
        ("bcow_sketches_open", "gauge", "Partial files in use", partials.open),
        ("bcow_sketch_blocks", "gauge", "Blocks of the partial files in use", partials.blocks),
        ("bcow_sketch_present_blocks", "gauge", "Blocks for which the image is not needed",
            partials.present_blocks),
        ("bcow_sketch_in_transit_blocks", "gauge", "Blocks written in part and not completed",
            partials.incomplete_blocks),
        ("bcow_sketch_stored_bytes", "gauge", "Bytes stored for partial files in use",
            partials.stored_bytes),
        ("bcow_sketch_saved_bytes", "gauge", "Bytes that partial files in use did not copy",
            partials.saved_bytes),
        ("bcow_sketches_promoted_total", "counter", "Partial files that became plain files",
            partials.promoted),
        ("bcow_sketch_flushes_total", "counter", "Flushes of partial files", partials.flushes),
        ("bcow_sketch_maps_written_total", "counter", "Block maps written", partials.maps_written),
    ];
    out.figures(&figures);
    const FILLS: &str = "bcow_sketch_fills_total";
    out.family(FILLS, "counter", "Blocks completed from the image");
    let fills = &partials.fills;
    for (by, count) in [
        ("background", fills.background),
        ("reader", fills.readers),
        ("flush", fills.flushes),
        ("writer", fills.writers),
    ] {
        out.sample(FILLS, &[("by", by)], count as f64);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::stats::document::Server;
    use crate::stats::{About, MountStats, Operation, RemoteReport};
    use bcow_union::NodeId;

    #[test]
    fn servers_of_remote_files_are_labels() {
        let remote = Remote {
            files: 2,
            servers: vec![Server {
                server: "https://a:5000".into(),
                requests: 3,
                received_bytes: 4096,
            }],
            ..Remote::default()
        };
        let stats = MountStats::new(About {
            remote: Some(RemoteReport::new(move || remote.clone())),
            ..About::default()
        });
        let page = text(&stats.document());
        assert!(page.contains("\nbcow_remote_files 2\n"), "{page}");
        assert!(
            page.contains("\nbcow_remote_received_bytes_total{server=\"https://a:5000\"} 4096\n"),
            "{page}"
        );
        let without = text(&MountStats::default().document());
        assert!(!without.contains("bcow_remote"), "{without}");
    }

    #[test]
    fn page_of_a_pool_has_each_family_once() {
        let stats = [Arc::new(MountStats::default()), Arc::default()];
        for stats in &stats {
            drop(stats.time(Operation::Read, NodeId::ROOT));
        }
        let mut mounts: Vec<Document> = stats.iter().map(|stats| stats.document()).collect();
        mounts[0].mountpoint = "/a".to_owned();
        mounts[1].mountpoint = "/b".to_owned();
        let figures = [("bcow_pool_mounts", "gauge", "Mounts of the pool", 2)];
        let page = text_of_pool(&figures, &mounts[0].cache, &mounts);
        let mut families: Vec<&str> = page
            .lines()
            .filter(|line| line.starts_with("# TYPE"))
            .collect();
        let count = families.len();
        families.sort_unstable();
        families.dedup();
        assert_eq!(families.len(), count, "{page}");
        for line in [
            "bcow_pool_mounts 2",
            r#"bcow_mount_requests_total{mountpoint="/a"} 1"#,
            r#"bcow_mount_requests_total{mountpoint="/b"} 1"#,
            r#"bcow_errors_total{mountpoint="/b",kind="no-space"} 0"#,
            r#"bcow_operation_seconds_count{operation="read"} 2"#,
            r#"bcow_operation_seconds_bucket{operation="read",le="+Inf"} 2"#,
        ] {
            assert!(page.lines().any(|one| one == line), "{line}\n{page}");
        }
        assert_eq!(page.matches("bcow_cache_hits_total ").count(), 3, "{page}");
    }

    #[test]
    fn page_is_what_prometheus_reads() {
        let stats = Arc::new(MountStats::new(About {
            image: "a \"b\"\\\n.bcow".into(),
            ..About::default()
        }));
        for _ in 0..3 {
            drop(stats.time(Operation::Read, NodeId::ROOT));
        }
        let page = text(&stats.document());
        assert!(page.contains(r#"bcow_mount_info{image="a \"b\"\\\n.bcow",identity="0000"#));
        // Kinds without an error are present too, so that a rate includes the first error.
        assert!(page.contains("bcow_errors_total{kind=\"image-damage\"} 0\n"));
        assert!(page.contains("bcow_errors_total{kind=\"no-space\"} 0\n"));
        assert!(page.contains(r#"bcow_operation_seconds_count{operation="read"} 3"#));
        assert!(page.contains(r#"bcow_operation_seconds_bucket{operation="read",le="+Inf"} 3"#));
        // Buckets are cumulative, so their counts never decrease.
        let buckets: Vec<f64> = page
            .lines()
            .filter(|line| line.starts_with("bcow_operation_seconds_bucket"))
            .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
            .collect();
        assert!(buckets.is_sorted(), "{buckets:?}");
        assert_eq!(buckets.len(), latency::BUCKETS);
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let (_, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
