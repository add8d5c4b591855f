//! What the registry says of an image: the layers that the store serves of it.
//!
//! A container engine asks for a layer by the reference of its image and a digest of the layer. The
//! digest does not say which layers are below, and a tag can move to an image that has the same
//! layer over others. So an answer holds for a short time only, and a digest that has meant
//! different trees is not served.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bcow_tool::Tool;
use bcow_tool::registry::{RegistryOptions, with_auth_file};
use bcow_tool::resolved::Resolved;
use parking_lot::Mutex;

use crate::error::Error;
use crate::layer::Layer;
use crate::reference::Reference;

/// How long an answer holds. The layers of an image are looked up one by one.
const HOLDS: Duration = Duration::from_secs(5);
/// How long a digest that has meant two trees is not served.
const CONFLICT_HOLDS: Duration = Duration::from_secs(600);
/// References in memory, at most.
const MAX_REFERENCES: usize = 256;
/// Seconds to wait for a registry that sends nothing. The engine waits for the answer.
const SERVER_TIMEOUT: u32 = 10;

/// Asks registries, and keeps the answers for a short time.
pub struct Answers {
    tool: Tool,
    options: RegistryOptions,
    /// Protects the list of references. Each has a lock of its own, which is taken without this
    /// one, and held while the registry is asked.
    known: Mutex<HashMap<Reference, Arc<Mutex<Known>>>>,
}

#[derive(Default)]
struct Known {
    since: Option<Instant>,
    is_found: bool,
    /// Of the last answer with layers.
    layers: Served,
    /// The digests that have meant different trees, and since when this is known.
    conflicts: HashMap<String, Instant>,
}

/// The layers by each digest that means one of them only.
type Served = HashMap<String, Layer>;

impl Answers {
    /// Asks with these options.
    pub fn new(tool: Tool, options: RegistryOptions) -> Self {
        Answers {
            tool,
            options,
            known: Mutex::default(),
        }
    }

    /// The layer with this digest in the image. `None` if the store does not serve it: the log says
    /// why, once for each answer.
    pub fn layer(&self, image: &Reference, digest: &str) -> Result<Option<Layer>, Error> {
        let slot = self.slot(image);
        let mut known = slot.lock();
        if !known.holds() {
            let layers = self.ask(image)?;
            known.replace(image, layers.as_deref().map(served));
        }
        let is_served = known.is_found && !known.conflicts.contains_key(digest);
        Ok(known.layers.get(digest).filter(|_| is_served).cloned())
    }

    fn slot(&self, image: &Reference) -> Arc<Mutex<Known>> {
        let mut known = self.known.lock();
        if known.len() >= MAX_REFERENCES && !known.contains_key(image) {
            // A slot that is locked is in use.
            let is_kept = |slot: &Arc<Mutex<Known>>| slot.try_lock().is_none_or(|it| it.is_kept());
            known.retain(|_, slot| is_kept(slot));
        }
        if known.len() >= MAX_REFERENCES {
            known.clear();
        }
        Arc::clone(known.entry(image.clone()).or_default())
    }

    fn ask(&self, image: &Reference) -> Result<Option<Vec<Layer>>, Error> {
        let mut options = with_auth_file(&self.options.of_lookups, &self.options.auth_file);
        options.push(format!("--server-timeout={SERVER_TIMEOUT}"));
        let json = match self.tool.resolve(&format!("docker://{image}"), &options) {
            Ok(json) => json,
            Err(error) => {
                let auth_file = &self.options.auth_file;
                let whole = self.options.without_image(image.as_str(), auth_file, error);
                return whole.map(|_| None).map_err(Error::State);
            }
        };
        let resolved = match Resolved::read(&json) {
            Ok(resolved) => resolved,
            Err(problem) => {
                tracing::warn!("{image}: pulled whole: the BCoW image {problem}");
                return Ok(None);
            }
        };
        let (layers, name) = (Layer::of(&resolved), &resolved.name);
        if layers.is_empty() {
            let why = "is not attached to an ordinary image with the same layers";
            tracing::warn!("{image}: pulled whole: {name} {why}");
            return Ok(None);
        }
        tracing::info!("{image}: starts on {name}");
        Ok(Some(layers))
    }
}

impl Known {
    fn holds(&self) -> bool {
        self.since.is_some_and(|since| since.elapsed() < HOLDS)
    }

    fn is_kept(&self) -> bool {
        self.holds() || !self.conflicts.is_empty()
    }

    /// Takes a new answer. Digests that meant another tree in the last one are not served.
    fn replace(&mut self, image: &Reference, answer: Option<Served>) {
        self.since = Some(Instant::now());
        self.is_found = answer.is_some();
        self.conflicts
            .retain(|_, since| since.elapsed() < CONFLICT_HOLDS);
        let Some(layers) = answer else {
            return;
        };
        for (digest, layer) in &layers {
            let last = self.layers.get(digest);
            if last.is_some_and(|last| last.chain_id != layer.chain_id) {
                tracing::warn!(
                    "{image}: {digest} is over other layers now; not served for a while"
                );
                self.conflicts.insert(digest.clone(), Instant::now());
            }
        }
        self.layers = layers;
    }
}

/// The layers by their digests, without digests that occur more than once: the same changes over
/// different layers.
fn served(layers: &[Layer]) -> Served {
    let mut found: HashMap<&str, Vec<&Layer>> = HashMap::new();
    for layer in layers {
        found.entry(&layer.blob.digest).or_default().push(layer);
        if let Some(digest) = &layer.blob.toc_digest {
            found.entry(digest).or_default().push(layer);
        }
    }
    let once = found
        .into_iter()
        .filter_map(|(digest, layers)| match &layers[..] {
            [one] => Some((digest.to_owned(), (*one).clone())),
            _ => None,
        });
    once.collect()
}

#[cfg(test)]
mod tests {
    use data_encoding::BASE64;

    use super::*;
    use crate::layer::tests::{digest, layer};

    fn image() -> Reference {
        Reference::decode(BASE64.encode(b"h.org/r:1").as_bytes()).unwrap()
    }

    #[test]
    fn same_changes_over_different_layers_are_not_served() {
        let mut other = layer('b', '3');
        other.blob.toc_digest = Some(digest('e'));
        let found = served(&[layer('a', '1'), layer('a', '2'), other]);
        let mut digests: Vec<_> = found.keys().cloned().collect();
        digests.sort();
        assert_eq!(digests, [digest('b'), digest('e')]);
    }

    #[test]
    fn digest_that_has_meant_another_tree_is_not_served() {
        let mut known = Known::default();
        let is_served =
            |known: &Known, digest: &str| known.is_found && !known.conflicts.contains_key(digest);
        known.replace(&image(), Some(served(&[layer('a', '1'), layer('b', '2')])));
        assert!(known.holds() && is_served(&known, &digest('a')));
        known.replace(&image(), None);
        assert!(known.holds() && !is_served(&known, &digest('a')));
        known.replace(&image(), Some(served(&[layer('a', '1'), layer('b', '3')])));
        assert!(is_served(&known, &digest('a')));
        assert!(!is_served(&known, &digest('b')));
        known.replace(&image(), Some(served(&[layer('b', '3')])));
        assert!(!is_served(&known, &digest('b')), "still remembered");
    }
}
