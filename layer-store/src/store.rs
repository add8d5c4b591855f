//! What the store does for container engines, independent of FUSE.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use bcow_tool::metrics::{Failures, MountFamilies, MountFigures, Page};
use bcow_tool::registry::on_one_line;

use crate::answers::Answers;
use crate::blobs::Blobs;
use crate::error::Error;
use crate::layer::Layer;
use crate::mounts::Mounts;
use crate::reference::Reference;
use crate::uses::Uses;

/// Pause before the next sweep after one that failed.
const FAILURE_PAUSE: Duration = Duration::from_secs(60);
/// Pause between sweeps if nothing is left to do: lookups without a use leave mounts.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

const MOUNTS: MountFamilies = MountFamilies {
    label: "layer",
    up: "bcow_layer_up",
    requests: "bcow_layer_requests_total",
    errors: "bcow_layer_errors_total",
    fetched: "bcow_layer_fetched_bytes_total",
    mounts: "bcow_layer_store_mounts",
    omitted: "bcow_layer_store_omitted_layers",
};

/// The parts of the store.
pub struct Store {
    answers: Answers,
    uses: Uses,
    mounts: Mounts,
    blobs: Blobs,
    released: Sender<()>,
    failures: Failures,
    mount_figures: MountFigures,
}

impl Store {
    /// The store on these parts, with a thread that ends mounts.
    pub fn start(
        answers: Answers,
        uses: Uses,
        mounts: Mounts,
        blobs: Blobs,
    ) -> Result<Arc<Self>, Error> {
        let (released, receiver) = channel();
        let store = Arc::new(Store {
            answers,
            uses,
            mounts,
            blobs,
            released,
            failures: Failures::new(&["registry", "mount", "record", "blob", "busy"]),
            mount_figures: MountFigures::default(),
        });
        let sweeper = Arc::clone(&store);
        let started = std::thread::Builder::new().spawn(move || sweeper.sweep(&receiver));
        started.map_err(|error| Error::State(format!("cannot start a thread: {error}")))?;
        Ok(store)
    }

    /// Finds a layer: one in use as its record says, else as the registry says.
    pub fn find(&self, image: &Reference, digest: &str) -> Result<Option<Layer>, Error> {
        match self.uses.layer(image.as_str(), digest) {
            Some(layer) => Ok(Some(layer)),
            None => self.ask(image, digest),
        }
    }

    fn ask(&self, image: &Reference, digest: &str) -> Result<Option<Layer>, Error> {
        let answer = self.answers.layer(image, digest);
        answer.inspect_err(|_| self.failures.add("registry"))
    }

    /// Whether an engine that pulls the image now means this layer by the digest. If not,
    /// containers of an earlier image with this reference use the layer.
    pub fn is_current(
        &self,
        image: &Reference,
        digest: &str,
        layer: &Layer,
    ) -> Result<bool, Error> {
        let current = self.ask(image, digest)?;
        let is_current = current.is_some_and(|current| current.chain_id == layer.chain_id);
        if !is_current {
            tracing::info!("{image}: {digest} is in use, but is not in the image of this name now");
        }
        Ok(is_current)
    }

    /// Mounts a layer; returns the directory. `None` if that fails; the log says why.
    pub fn mount(&self, image: &Reference, layer: &Layer) -> Option<PathBuf> {
        self.done("mount", image, self.mounts.ensure(layer))
    }

    /// Adds a use of a layer. `None` if that fails; the log says why.
    pub fn add(&self, image: &Reference, digest: &str, layer: &Layer) -> Option<()> {
        self.done(
            "record",
            image,
            self.uses.add(image.as_str(), digest, layer),
        )
    }

    /// Releases a use of a layer. With the last one, the mount ends soon. `None` as for `add`.
    pub fn release(&self, image: &Reference, digest: &str) -> Option<()> {
        let released = self.uses.release(image.as_str(), digest);
        if self.done("record", image, released)? {
            // The sweeper ends only with the process.
            let _ = self.released.send(());
        }
        Some(())
    }

    /// The blob of a layer. `None` if it cannot be fetched; the log says why.
    pub fn blob(&self, image: &Reference, layer: &Layer) -> Option<File> {
        self.done("blob", image, self.blobs.get(layer))
    }

    /// The result of an operation. Counts and logs its failure.
    fn done<T>(
        &self,
        kind: &'static str,
        image: &Reference,
        result: Result<T, Error>,
    ) -> Option<T> {
        result
            .inspect_err(|error| {
                self.failures.add(kind);
                tracing::error!("{image}: {}", on_one_line(error));
            })
            .ok()
    }

    /// Counts a request that is refused because too many others are running.
    pub fn count_refusal(&self) {
        self.failures.add("busy");
    }

    /// The metrics of the moment.
    pub fn page(&self) -> Page {
        let layers = self.uses.layers();
        let mut page = Page::default();
        #[rustfmt::skip]
        let figures = [
            ("bcow_layer_store_layers", "gauge", "Layers that engines use", layers.len() as u64),
            ("bcow_layer_store_uses", "gauge", "Uses of layers",
                layers.iter().map(|(_, uses)| uses).sum()),
            ("bcow_layer_store_mounts_made_again_total", "counter",
                "Mounts that were made again after their end", self.mounts.made_again()),
        ];
        page.figures(&figures);
        let failed = "bcow_layer_store_failed_requests_total";
        self.failures.write(&mut page, failed);
        // Several images can have a layer.
        let mounts: BTreeMap<String, PathBuf> = layers
            .iter()
            .map(|(layer, _)| (layer.source(), self.mounts.path_of(layer)))
            .collect();
        let mounts = mounts.into_iter().collect();
        self.mount_figures.write(&mut page, &MOUNTS, mounts);
        page
    }

    /// Ends the mounts of layers that no engine uses.
    fn sweep(&self, released: &Receiver<()>) {
        loop {
            self.uses.write_rest();
            let pause = match self.mounts.sweep(&self.uses.mounts()) {
                Ok(pause) => pause.unwrap_or(LONGEST_PAUSE),
                Err(error) => {
                    tracing::error!("{error}");
                    FAILURE_PAUSE
                }
            };
            match released.recv_timeout(pause) {
                Ok(()) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            // Several releases are one sweep.
            while released.try_recv().is_ok() {}
        }
    }
}
