//! The traffic with other machines, for the statistics of a mount.

use bcow_fuse::stats::RemoteReport;
use bcow_fuse::stats::document::{self, KindCount};
use bcow_images::remote::{Client, RemoteArgs};

/// The counters; `None` as long as no remote image was opened.
pub fn of(args: &RemoteArgs) -> Option<RemoteReport> {
    let client = args.activity()?;
    Some(RemoteReport::new(move || report(&client)))
}

fn report(client: &Client) -> document::Remote {
    let files = client.files();
    let files: Vec<_> = files.iter().map(|file| file.presence()).collect();
    let figures = client.figures();
    document::Remote {
        files: files.len() as u64,
        file_bytes: files.iter().map(|file| file.file_bytes).sum(),
        held_bytes: files.iter().map(|file| file.held_bytes).sum(),
        fetched_bytes: figures.fetched_bytes,
        cached_bytes: figures.cached_bytes,
        bytes_per_second: figures.bytes_per_second,
        running_requests: figures.running_requests,
        waiting_reads: figures.waiting_reads,
        longest_wait_seconds: figures.longest_wait.as_secs_f64(),
        retries: figures.retries,
        tokens: figures.tokens,
        errors: figures
            .errors
            .into_iter()
            .map(|(kind, count)| KindCount {
                kind: kind.to_owned(),
                count,
            })
            .collect(),
        servers: figures
            .servers
            .into_iter()
            .map(|server| document::Server {
                server: server.server,
                requests: server.requests,
                received_bytes: server.received_bytes,
            })
            .collect(),
    }
}
