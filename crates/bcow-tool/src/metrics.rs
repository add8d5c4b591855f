//! The metrics of the programs for Prometheus: the page at `--metrics`, counts of failures, and the
//! figures of the mounts that the programs have made.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

pub use bcow_listen::{Metrics, Page};
use parking_lot::Mutex;
use serde::Deserialize;

use crate::mounted::{MountState, state_of};

/// Mounts on a page, at most: each has samples of its own.
const MAX_MOUNTS: usize = 1000;
/// Mounts that are asked at a time.
const AT_ONCE: usize = 8;
/// How long a page waits for the answers of mounts.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// The extended attribute of the root directory of a mount with its statistics in JSON, and the
/// largest value of an attribute in bytes.
const STATISTICS: &str = "user.bcow.stats";
const MAX_XATTR_BYTES: usize = 64 << 10;

/// The option for metrics.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct MetricsArgs {
    /// Serve Prometheus metrics at http://ADDR:PORT/metrics, or at the Unix socket unix:PATH. Every
    /// client that can connect to a TCP address can read the metrics
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<String>,
}

impl MetricsArgs {
    /// Serves the page that `page` returns, if there is an address. The socket stays until the
    /// result is dropped.
    pub fn serve(
        &self,
        page: impl Fn() -> Page + Send + Sync + 'static,
    ) -> Result<Option<Metrics>, String> {
        let Some(address) = &self.metrics else {
            return Ok(None);
        };
        let cannot = |error: &dyn Display| format!("cannot serve metrics at {address}: {error}");
        let metrics = Metrics::listen(address).map_err(|error| cannot(&error))?;
        let answered = metrics.answer(move || page().text());
        answered.map_err(|error| cannot(&error))?;
        if let Some(url) = metrics.chosen_url() {
            tracing::info!("metrics at {url}");
        }
        Ok(Some(metrics))
    }
}

/// Counts of failures by kind.
#[derive(Debug)]
pub struct Failures(Mutex<BTreeMap<&'static str, u64>>);

impl Failures {
    /// A rate includes the first failure of a kind only if the kind is on the page before.
    pub fn new(kinds: &[&'static str]) -> Self {
        Failures(Mutex::new(kinds.iter().map(|&kind| (kind, 0)).collect()))
    }

    pub fn add(&self, kind: &'static str) {
        *self.0.lock().entry(kind).or_default() += 1;
    }

    /// Writes the counts as the family `name`.
    pub fn write(&self, page: &mut Page, name: &'static str) {
        page.family(name, "counter", "Failed requests, by kind");
        for (&kind, &count) in &*self.0.lock() {
            page.sample(name, &[("kind", kind)], count as f64);
        }
    }
}

/// The names of the metrics of mounts.
pub struct MountFamilies {
    /// The label with the name of a mount.
    pub label: &'static str,
    pub up: &'static str,
    pub requests: &'static str,
    pub errors: &'static str,
    pub fetched: &'static str,
    /// The number of mounts.
    pub mounts: &'static str,
    /// The number of those that are not examined.
    pub omitted: &'static str,
}

/// Asks mounts by `bcow` for their figures.
#[derive(Debug, Default)]
pub struct MountFigures {
    /// Held while a page is made: another one would take the mounts that are being asked for mounts
    /// that hang.
    page: Mutex<()>,
    /// The mounts that are being asked. A mount that hangs stays here, and keeps one thread, until
    /// its process answers or ends.
    asked: Arc<Mutex<HashSet<PathBuf>>>,
}

/// What a directory for a mount shows.
#[derive(Debug)]
enum Examined {
    /// The time of the page ended before its turn.
    NotAsked,
    NotMounted,
    Dead,
    /// A mount with the kernel driver has no statistics.
    Served(Option<Statistics>),
}

/// The part of the statistics of a mount that is on the page.
#[derive(Debug, Deserialize)]
struct Statistics {
    #[serde(default)]
    errors: Errors,
    remote: Option<Remote>,
    operations: Vec<Operation>,
}

#[derive(Debug, Default, Deserialize)]
struct Errors {
    total: u64,
}

#[derive(Debug, Deserialize)]
struct Remote {
    fetched_bytes: u64,
}

#[derive(Debug, Deserialize)]
struct Operation {
    count: u64,
}

impl MountFigures {
    /// Writes the figures of the mounts at these directories, each with a name, and how many there
    /// are. Of those beyond [`MAX_MOUNTS`], and of those that are not asked in time, only the
    /// number is written.
    pub fn write(
        &self,
        page: &mut Page,
        families: &MountFamilies,
        mut mounts: Vec<(String, PathBuf)>,
    ) {
        let mut omitted = mounts.len().saturating_sub(MAX_MOUNTS);
        mounts.truncate(MAX_MOUNTS);
        let answers = self.ask(mounts.iter().map(|(_, directory)| directory.clone()));
        let mut count = 0;
        for ((name, directory), answer) in mounts.into_iter().zip(answers) {
            match answer {
                Some(Examined::NotMounted) => continue,
                Some(Examined::NotAsked) => {
                    omitted += 1;
                    continue;
                }
                _ => count += 1,
            }
            let mountpoint = directory.display().to_string();
            page.label_all(vec![(families.label, name), ("mountpoint", mountpoint)]);
            let is_up = matches!(answer, Some(Examined::Served(_)));
            let help = "Whether the process of the mount answers";
            page.figures(&[(families.up, "gauge", help, is_up.into())]);
            if let Some(Examined::Served(Some(statistics))) = answer {
                statistics.write(page, families);
            }
        }
        page.label_all(Vec::new());
        page.figures(&[
            (families.mounts, "gauge", "Mounts", count),
            (
                families.omitted,
                "gauge",
                "Further snapshots or layers, whose mounts are not on this page",
                omitted as u64,
            ),
        ]);
    }

    /// The answers in the order of the directories; `None`: no answer in time.
    fn ask(&self, directories: impl Iterator<Item = PathBuf>) -> Vec<Option<Examined>> {
        let _page = self.page.lock();
        let queue: VecDeque<_> = directories.enumerate().collect();
        let mut answers: Vec<Option<Examined>> = queue.iter().map(|_| None).collect();
        let queue = Arc::new(Mutex::new(queue));
        let (sender, receiver) = channel();
        for _ in 0..AT_ONCE.min(answers.len()) {
            let (queue, asked, sender) = (queue.clone(), self.asked.clone(), sender.clone());
            let next = move || queue.lock().pop_front();
            let work = move || {
                while let Some((at, directory)) = next() {
                    // Otherwise it hangs since an earlier page.
                    if asked.lock().insert(directory.clone()) {
                        let answer = examine(&directory);
                        asked.lock().remove(&directory);
                        // The page can be complete.
                        let _ = sender.send((at, answer));
                    }
                }
            };
            // Without threads, there are no answers.
            let _ = thread::Builder::new().name("figures".into()).spawn(work);
        }
        drop(sender);
        let end = Instant::now() + ANSWER_WITHIN;
        let left = || end.saturating_duration_since(Instant::now());
        while let Ok((at, answer)) = receiver.recv_timeout(left()) {
            answers[at] = Some(answer);
        }
        for (at, _) in queue.lock().drain(..) {
            answers[at] = Some(Examined::NotAsked);
        }
        answers
    }
}

impl Statistics {
    fn write(&self, page: &mut Page, families: &MountFamilies) {
        let requests = self.operations.iter().map(|operation| operation.count);
        let help = "Requests that were answered";
        page.figures(&[
            (families.requests, "counter", help, requests.sum()),
            (
                families.errors,
                "counter",
                "Errors since the mount",
                self.errors.total,
            ),
        ]);
        if let Some(remote) = &self.remote {
            let help = "Bytes fetched and checked";
            page.figures(&[(families.fetched, "counter", help, remote.fetched_bytes)]);
        }
    }
}

fn examine(directory: &Path) -> Examined {
    match state_of(directory) {
        Ok(MountState::NotMounted) => return Examined::NotMounted,
        Ok(MountState::Served) => {}
        Ok(MountState::Dead) | Err(_) => return Examined::Dead,
    }
    let mut json = vec![0; MAX_XATTR_BYTES];
    let read = rustix::fs::getxattr(directory, STATISTICS, &mut json[..]);
    let statistics = read
        .ok()
        .map(|length| serde_json::from_slice(&json[..length]));
    Examined::Served(statistics.and_then(Result::ok))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAMILIES: MountFamilies = MountFamilies {
        label: "snapshot",
        up: "up",
        requests: "requests_total",
        errors: "errors_total",
        fetched: "fetched_bytes_total",
        mounts: "mounts",
        omitted: "omitted",
    };

    #[test]
    fn the_number_of_mounts_on_a_page_is_limited() {
        let directory = tempfile::tempdir().unwrap();
        let mount = |n: usize| (n.to_string(), directory.path().join(n.to_string()));
        let mounts = (0..MAX_MOUNTS + 7).map(mount);
        let (figures, mut page) = (MountFigures::default(), Page::default());
        figures.write(&mut page, &FAMILIES, mounts.collect());
        let text = page.text();
        assert!(text.contains("\nmounts 0\n"), "{text}");
        assert!(text.contains("\nomitted 7\n"), "{text}");
        assert!(figures.asked.lock().is_empty());
    }

    #[test]
    fn a_mount_that_hangs_has_no_figures_and_is_not_asked_again() {
        let directory = tempfile::tempdir().unwrap();
        let hanging = directory.path().join("hanging");
        let figures = MountFigures::default();
        figures.asked.lock().insert(hanging.clone());
        let mut page = Page::default();
        figures.write(
            &mut page,
            &FAMILIES,
            vec![("a\"b".to_owned(), hanging.clone())],
        );
        let text = page.text();
        let line = format!(
            "up{{snapshot=\"a\\\"b\",mountpoint=\"{}\"}} 0\n",
            hanging.display()
        );
        assert!(text.contains(&line), "{text}");
        assert!(text.contains("\nmounts 1\n"), "{text}");
    }

    #[test]
    fn statistics_become_samples() {
        let json = r#"{"schema": "bcow.stats/1", "errors": {"total": 2, "kinds": []},
            "remote": {"fetched_bytes": 4096}, "operations": [{"count": 3}, {"count": 4}]}"#;
        let statistics: Statistics = serde_json::from_str(json).unwrap();
        let mut page = Page::default();
        statistics.write(&mut page, &FAMILIES);
        let text = page.text();
        for line in [
            "requests_total 7",
            "errors_total 2",
            "fetched_bytes_total 4096",
        ] {
            assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        }
    }

    #[test]
    fn failures_are_on_the_page_before_the_first_one() {
        let failures = Failures::new(&["mount", "host"]);
        failures.add("mount");
        let mut page = Page::default();
        failures.write(&mut page, "failed_total");
        let text = page.text();
        assert!(text.contains("failed_total{kind=\"host\"} 0\n"), "{text}");
        assert!(text.contains("failed_total{kind=\"mount\"} 1\n"), "{text}");
    }
}
