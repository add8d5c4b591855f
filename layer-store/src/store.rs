//! What the store does for container engines, independent of FUSE.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

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

/// The parts of the store.
pub struct Store {
    answers: Answers,
    uses: Uses,
    mounts: Mounts,
    blobs: Blobs,
    released: Sender<()>,
}

impl Store {
    /// The store on these parts, with a thread that ends mounts.
    pub fn start(answers: Answers, uses: Uses, mounts: Mounts, blobs: Blobs) -> Arc<Self> {
        let (released, receiver) = channel();
        let store = Arc::new(Store {
            answers,
            uses,
            mounts,
            blobs,
            released,
        });
        let sweeper = Arc::clone(&store);
        std::thread::spawn(move || sweeper.sweep(&receiver));
        store
    }

    /// Finds a layer: one in use as its record says, else as the registry says.
    pub fn find(&self, image: &Reference, digest: &str) -> Result<Option<Layer>, Error> {
        match self.uses.layer(image.as_str(), digest) {
            Some(layer) => Ok(Some(layer)),
            None => self.answers.layer(image, digest),
        }
    }

    /// Whether an engine that pulls the image now means this layer by the digest. If not,
    /// containers of an earlier image with this reference use the layer.
    pub fn is_current(
        &self,
        image: &Reference,
        digest: &str,
        layer: &Layer,
    ) -> Result<bool, Error> {
        let current = self.answers.layer(image, digest)?;
        let is_current = current.is_some_and(|current| current.chain_id == layer.chain_id);
        if !is_current {
            tracing::info!("{image}: {digest} is in use, but is not in the image of this name now");
        }
        Ok(is_current)
    }

    /// Mounts a layer; returns the directory. `None` if that fails; the log says why.
    pub fn mount(&self, image: &Reference, layer: &Layer) -> Option<PathBuf> {
        self.mounts
            .ensure(layer)
            .inspect_err(|error| tracing::error!("{image}: {}", on_one_line(error)))
            .ok()
    }

    /// Adds a use of a layer.
    pub fn add(&self, image: &Reference, digest: &str, layer: &Layer) -> Result<(), Error> {
        self.uses.add(image.as_str(), digest, layer)
    }

    /// Releases a use of a layer. With the last one, the mount ends soon.
    pub fn release(&self, image: &Reference, digest: &str) -> Result<(), Error> {
        if self.uses.release(image.as_str(), digest)? {
            // The sweeper ends only with the process.
            let _ = self.released.send(());
        }
        Ok(())
    }

    /// The blob of a layer. `None` if it cannot be fetched; the log says why.
    pub fn blob(&self, image: &Reference, layer: &Layer) -> Option<File> {
        self.blobs
            .get(layer)
            .inspect_err(|error| tracing::error!("{image}: {}", on_one_line(error)))
            .ok()
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
