//! The text format of Prometheus (version 0.0.4).

use std::fmt::Write;

use super::document::{Document, Upper};

/// The whole document as metrics.
pub fn text(document: &Document) -> String {
    let mut out = Metrics::default();
    let Document {
        image,
        process,
        cache,
        upper,
        errors,
        operations,
        ..
    } = document;
    out.family("bcow_mount_info", "gauge", "What is mounted");
    let labels = [
        ("image", image.name.as_str()),
        ("identity", image.identity.as_str()),
        ("mode", if upper.is_some() { "rw" } else { "ro" }),
    ];
    out.sample("bcow_mount_info", &labels, 1.0);
    out.one(
        "bcow_uptime_seconds",
        "gauge",
        "For how long it is mounted",
        process.uptime_seconds,
    );
    for (name, kind, help, value) in [
        (
            "bcow_cache_limit_bytes",
            "gauge",
            "Budget for decoded blocks",
            cache.limit_bytes,
        ),
        (
            "bcow_cache_held_bytes",
            "gauge",
            "Decoded blocks in memory",
            cache.held_bytes,
        ),
        (
            "bcow_cache_hits_total",
            "counter",
            "Blocks found decoded",
            cache.hits,
        ),
        (
            "bcow_cache_misses_total",
            "counter",
            "Blocks read and decoded",
            cache.misses,
        ),
    ] {
        out.one(name, kind, help, value as f64);
    }
    const ERRORS: &str = "bcow_errors_total";
    out.family(ERRORS, "counter", "Errors since the mount, by kind");
    for kind in &errors.kinds {
        out.sample(ERRORS, &[("kind", &kind.kind)], kind.count as f64);
    }
    if let Some(last) = errors.recent.first() {
        out.one(
            "bcow_last_error_timestamp_seconds",
            "gauge",
            "When the last error happened",
            last.unix_seconds as f64,
        );
    }
    if let Some(upper) = upper {
        write_upper(upper, &mut out);
    }
    const SECONDS: &str = "bcow_operation_seconds";
    out.family(SECONDS, "histogram", "How long requests took");
    for figures in operations {
        let operation = ("operation", figures.operation.as_str());
        let mut below = 0;
        for bucket in &figures.histogram {
            below += bucket.count;
            if let Some(ns) = bucket.below_ns {
                let limit = format!("{}", ns as f64 / 1e9);
                out.sample(
                    "bcow_operation_seconds_bucket",
                    &[operation, ("le", &limit)],
                    below as f64,
                );
            }
        }
        for (name, labels, value) in [
            (
                "bcow_operation_seconds_bucket",
                &[operation, ("le", "+Inf")][..],
                figures.count as f64,
            ),
            (
                "bcow_operation_seconds_sum",
                &[operation][..],
                figures.total_ns as f64 / 1e9,
            ),
            (
                "bcow_operation_seconds_count",
                &[operation][..],
                figures.count as f64,
            ),
        ] {
            out.sample(name, labels, value);
        }
    }
    out.0
}

fn write_upper(upper: &Upper, out: &mut Metrics) {
    let sketches = &upper.sketches;
    for (name, help, value) in [
        (
            "bcow_upper_limit_bytes",
            "Most that the upper may store",
            upper.limit_bytes,
        ),
        (
            "bcow_upper_stored_bytes",
            "Bytes that the upper stores",
            upper.stored_bytes,
        ),
        (
            "bcow_upper_limit_inodes",
            "Most inodes that the upper may have",
            upper.limit_inodes,
        ),
        (
            "bcow_upper_inodes",
            "Inodes that the upper has",
            upper.stored_inodes,
        ),
    ] {
        if let Some(value) = value {
            out.one(name, "gauge", help, value as f64);
        }
    }
    for (name, kind, help, value) in [
        (
            "bcow_upper_nodes",
            "gauge",
            "Inodes that the kernel knows",
            upper.nodes,
        ),
        (
            "bcow_upper_copied_metadata_total",
            "counter",
            "Files copied up without their bytes",
            upper.copied_metadata,
        ),
        (
            "bcow_upper_copied_whole_total",
            "counter",
            "Files copied up whole",
            upper.copied_whole,
        ),
        (
            "bcow_sketches_open",
            "gauge",
            "Sketches in use",
            sketches.open,
        ),
        (
            "bcow_sketch_blocks",
            "gauge",
            "Blocks of files that are sketches in use",
            sketches.blocks,
        ),
        (
            "bcow_sketch_present_blocks",
            "gauge",
            "Blocks that the image is not needed for",
            sketches.present_blocks,
        ),
        (
            "bcow_sketch_in_transit_blocks",
            "gauge",
            "Blocks to be completed",
            sketches.in_transit_blocks,
        ),
        (
            "bcow_sketch_stored_bytes",
            "gauge",
            "Bytes stored for sketches in use",
            sketches.stored_bytes,
        ),
        (
            "bcow_sketch_saved_bytes",
            "gauge",
            "Bytes of the image that sketches in use did not copy",
            sketches.saved_bytes,
        ),
        (
            "bcow_sketches_promoted_total",
            "counter",
            "Sketches that became plain files",
            sketches.promoted,
        ),
        (
            "bcow_sketch_flushes_total",
            "counter",
            "Flushes of sketches",
            sketches.flushes,
        ),
        (
            "bcow_sketch_maps_written_total",
            "counter",
            "Maps of blocks written anew",
            sketches.maps_written,
        ),
    ] {
        out.one(name, kind, help, value as f64);
    }
    const FILLS: &str = "bcow_sketch_fills_total";
    out.family(FILLS, "counter", "Blocks completed from the image");
    let fills = &sketches.fills;
    for (by, count) in [
        ("background", fills.background),
        ("reader", fills.readers),
        ("flush", fills.flushes),
        ("writer", fills.writers),
    ] {
        out.sample(FILLS, &[("by", by)], count as f64);
    }
}

#[derive(Default)]
struct Metrics(String);

impl Metrics {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.0.push_str(name);
        for (index, (label, value)) in labels.iter().enumerate() {
            let open = if index == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{open}{label}=\"{}\"", escaped(value));
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }
}

fn escaped(value: &str) -> String {
    value
        .replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::stats::{About, MountStats, Operation};
    use bcow_union::NodeId;

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
        assert!(buckets.len() >= 2 && buckets.is_sorted(), "{buckets:?}");
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let (_, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
