//! Images in BCoW form in registries: finds the one that is attached to an ordinary image.
//!
//! containerd's labels say which image a layer is of. `bcow` asks the registry for a BCoW image
//! that is attached to it. A layer counts as found only if the diffIDs in the BCoW image give the
//! chain ID by which containerd calls the layer: both then mean the same content.
//!
//! The credentials for a registry are those that a pull of the repository has brought
//! ([`crate::credentials`]), or else those in the file of the user.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bcow_tool::registry::{PulledWhole, RegistryOptions, auth_file_text, with_auth_file};
use bcow_tool::resolved::Resolved;
use bcow_tool::{RegistryArgs, Tool};
use parking_lot::Mutex;

use crate::credentials::Keyring;
use crate::error::Error;
use crate::record::{Labels, RemoteLayer};
use crate::repository::Repository;

/// The label with the chain ID of the layer that containerd is about to unpack.
pub const REF: &str = "containerd.io/snapshot.ref";
const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";
/// How long an answer of a registry holds. The layers of an image are prepared one by one.
const ANSWER_HOLDS: Duration = Duration::from_secs(60);
/// Answers in memory, at most.
const MAX_ANSWERS: usize = 256;

/// How images in registries are found and mounted.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct RemoteArgs {
    /// Pull every image whole, also one with a BCoW image attached
    #[arg(long)]
    no_remote: bool,
    /// Serve CRI's image service, which the containerd at this socket answers, and use the
    /// credentials of its pulls for the images that they pull
    #[arg(long, value_name = "SOCKET")]
    image_service: Option<PathBuf>,
    #[command(flatten)]
    registry: RegistryArgs,
}

impl RemoteArgs {
    /// The socket of the containerd that answers CRI's image service.
    pub fn image_service(&self) -> Option<&Path> {
        self.image_service.as_deref()
    }
}

/// Finds images in BCoW form, and says how they are mounted.
pub struct Remote {
    tool: Tool,
    is_asked: bool,
    keyring: Arc<Keyring>,
    options: RegistryOptions,
    /// Protects the list of answers. An answer has a lock of its own, which is taken without this
    /// one, and held while the registry is asked.
    answers: Mutex<HashMap<Wanted, Arc<Mutex<Option<Answer>>>>>,
}

/// The image that a layer is of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Wanted {
    image: String,
    manifest: String,
    /// The file with the credentials. What the registry answers to one pull holds for no other.
    auth_file: PathBuf,
}

#[derive(Clone)]
struct Answer {
    since: Instant,
    image: Option<Arc<RemoteImage>>,
}

/// An image in BCoW form.
#[derive(Debug, PartialEq, Eq)]
struct RemoteImage {
    /// Its name, with a digest.
    name: String,
    /// The root hashes of its files: the stack, then the layers from the lowest.
    files: Vec<String>,
    /// The chain IDs of the layers.
    chain_ids: Vec<String>,
}

impl Remote {
    /// Images are found with these options; what is read of them is kept in `cache`.
    pub fn new(
        args: &RemoteArgs,
        tool: Tool,
        keyring: Arc<Keyring>,
        cache: &Path,
    ) -> Result<Self, Error> {
        // It may come later.
        if let Err(missing) = args.registry.require_auth_file() {
            tracing::warn!("{missing}; until it is there, registries get no credentials of it");
        }
        Ok(Remote {
            tool,
            is_asked: !args.no_remote,
            keyring,
            options: args.registry.options(cache).map_err(Error::Invalid)?,
            answers: Mutex::default(),
        })
    }

    /// The options of mounts of this image in a registry.
    pub fn mount_options(&self, image: &str) -> Vec<String> {
        let auth_file = auth_file_text(&self.auth_file_of(image));
        let auth_file = auth_file.map(|file| format!("auth_file={file}"));
        let options = self.options.of_mounts.iter().cloned();
        auth_file.into_iter().chain(options).collect()
    }

    /// The options of other commands that read it.
    pub fn command_options(&self, image: &str) -> Vec<String> {
        with_auth_file(&self.options.of_commands, &self.auth_file_of(image))
    }

    /// The file with the credentials for mounts of this image.
    pub fn auth_file_of(&self, image: &str) -> PathBuf {
        let kept = Repository::of(image).and_then(|of| self.keyring.for_mounts(&of));
        kept.unwrap_or_else(|| self.options.auth_file.clone())
    }

    /// The layer in a registry that has the content of the layer with these labels. `None` if the
    /// registry has no such layer, or denies access: containerd fetches the ordinary one.
    pub fn find(&self, labels: &Labels) -> Result<Option<RemoteLayer>, Error> {
        let found = [REF, IMAGE, MANIFEST].map(|label| labels.get(label));
        let ([Some(chain_id), Some(image), Some(manifest)], true) = (found, self.is_asked) else {
            return Ok(None);
        };
        let of_pull = Repository::of(image).and_then(|of| self.keyring.for_question(&of));
        let wanted = Wanted {
            image: image.clone(),
            manifest: manifest.clone(),
            auth_file: of_pull.unwrap_or_else(|| self.options.auth_file.clone()),
        };
        let layer_of = |image: Arc<RemoteImage>| {
            let at = image.chain_ids.iter().position(|id| id == chain_id)?;
            Some(RemoteLayer {
                image: image.name.clone(),
                layers: at + 1,
                files: image.files.clone(),
            })
        };
        Ok(self.image(&wanted)?.and_then(layer_of))
    }

    fn image(&self, wanted: &Wanted) -> Result<Option<Arc<RemoteImage>>, Error> {
        let holds = |answer: &Answer| answer.since.elapsed() < ANSWER_HOLDS;
        let slot = {
            let mut answers = self.answers.lock();
            if answers.len() >= MAX_ANSWERS {
                // A slot that is locked is being filled.
                answers.retain(|_, slot| {
                    slot.try_lock()
                        .is_none_or(|answer| answer.as_ref().is_some_and(holds))
                });
            }
            if answers.len() >= MAX_ANSWERS {
                answers.clear();
            }
            answers.entry(wanted.clone()).or_default().clone()
        };
        let mut answer = slot.lock();
        if let Some(known) = answer.as_ref().filter(|known| holds(known)) {
            return Ok(known.image.clone());
        }
        // Another request asks again after an error.
        let image = match self.ask(wanted)? {
            Asked::Image(found) => Some(Arc::new(found)),
            Asked::None => None,
            // The credentials can come at any time.
            Asked::Denied => return Ok(None),
        };
        *answer = Some(Answer {
            since: Instant::now(),
            image: image.clone(),
        });
        Ok(image)
    }

    fn ask(&self, wanted: &Wanted) -> Result<Asked, Error> {
        let name = format!("docker://{}", wanted.image);
        let options = with_auth_file(&self.options.of_lookups, &wanted.auth_file);
        let json = match self.tool.resolve(&name, &options) {
            Ok(json) => json,
            Err(error) => {
                let (image, auth_file) = (&wanted.image, &wanted.auth_file);
                let whole = self.options.without_image(image, auth_file, error);
                return Ok(match whole.map_err(Error::Unanswered)? {
                    PulledWhole::Denied => Asked::Denied,
                    PulledWhole::NoImage | PulledWhole::Unanswered => Asked::None,
                });
            }
        };
        let found = match RemoteImage::read(&json, &wanted.manifest) {
            Ok(found) => found,
            Err(problem) => {
                let image = &wanted.image;
                tracing::warn!("{image}: pulled whole: the BCoW image of {name} {problem}");
                return Ok(Asked::None);
            }
        };
        tracing::info!("{}: starts on {}", wanted.image, found.name);
        if wanted.auth_file != self.options.auth_file
            && let Some(repository) = Repository::of(&found.name)
        {
            // Mounts need them, also before the pull has ended.
            self.keyring.keep(&repository, &wanted.auth_file)?;
        }
        Ok(Asked::Image(found))
    }
}

/// The answer about an image.
enum Asked {
    Image(RemoteImage),
    /// The image is pulled whole.
    None,
    /// The same, because the registry denies access.
    Denied,
}

impl RemoteImage {
    /// Reads the answer of `bcow` about the image with this manifest. The error says what is wrong
    /// with the BCoW image.
    fn read(json: &[u8], manifest: &str) -> Result<Self, String> {
        let resolved = Resolved::read(json)?;
        let is_itself = resolved.name.ends_with(&format!("@{manifest}"));
        if !is_itself && resolved.attached_to.as_deref() != Some(manifest) {
            return Err(format!("is not that of the manifest {manifest}"));
        }
        let layers = resolved.layers.into_iter();
        Ok(RemoteImage {
            name: resolved.name,
            files: resolved.files,
            chain_ids: layers.map(|layer| layer.chain_id).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(attached_to: &str, diff_ids: &[&str]) -> String {
        let root = format!("sha256:{}", "a".repeat(64));
        let layers: Vec<_> = diff_ids
            .iter()
            .map(|id| serde_json::json!({"diff_id": id, "merkle_root": root}))
            .collect();
        serde_json::json!({
            "schema": "bcow.resolve/1", "name": "docker://h/r@sha256:b", "merkle_root": root,
            "attached_to": attached_to, "layers": layers,
        })
        .to_string()
    }

    #[test]
    fn an_image_of_another_manifest_does_not_count() {
        let of = |json: &str, manifest| RemoteImage::read(json.as_bytes(), manifest);
        let json = document("sha256:m", &["sha256:a"]);
        assert!(of(&json, "sha256:m").is_ok());
        assert!(of(&json, "sha256:b").is_ok(), "the manifest itself");
        let error = of(&json, "sha256:other").unwrap_err();
        assert!(error.contains("is not that of the manifest"), "{error}");
    }

    #[test]
    fn credentials_of_a_pull_are_for_its_repository() {
        let tool = Tool::new(Some("true".into())).unwrap();
        let args = RemoteArgs {
            registry: RegistryArgs {
                auth_file: Some("/dev/null".into()),
                complete: Some("idle".into()),
                ..RegistryArgs::default()
            },
            ..RemoteArgs::default()
        };
        let directory = tempfile::tempdir().unwrap();
        let keyring = Arc::new(Keyring::open(directory.path().join("auth")));
        let remote = Remote::new(&args, tool, keyring, Path::new("/c")).unwrap();
        let image = "docker://h.org/r@sha256:a";
        let rest = "cache_dir=/c,complete=idle";
        assert_eq!(
            remote.mount_options(image).join(","),
            format!("auth_file=/dev/null,{rest}")
        );
        // A pull has brought others for this repository.
        let kept = directory.path().join("auth/h.org+r.json");
        std::fs::create_dir(directory.path().join("auth")).unwrap();
        std::fs::write(&kept, "{}").unwrap();
        let kept = kept.display();
        assert_eq!(
            remote.mount_options(image).join(","),
            format!("auth_file={kept},{rest}")
        );
        let other = remote.command_options("docker://h.org/other@sha256:a");
        assert_eq!(other, ["--auth-file=/dev/null", "--cache-dir=/c"]);
    }
}
