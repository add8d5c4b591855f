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

use parking_lot::Mutex;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::credentials::Keyring;
use crate::error::Error;
use crate::record::{Labels, RemoteLayer};
use crate::repository::Repository;
use crate::tool::Tool;

/// The label with the chain ID of the layer that containerd is about to unpack.
pub const REF: &str = "containerd.io/snapshot.ref";
const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";
/// How long an answer of a registry holds. The layers of an image are prepared one by one.
const ANSWER_HOLDS: Duration = Duration::from_secs(60);
/// Answers in memory, at most.
const MAX_ANSWERS: usize = 256;
/// Layers of one image, at most: each has a record with the hashes of all.
const MAX_LAYERS: usize = 1024;

/// How images in registries are found and mounted.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct RemoteArgs {
    /// Pull every image whole, also one with a BCoW image attached
    #[arg(long)]
    no_remote: bool,
    /// File with the credentials for registries, in the form of docker's config.json [default:
    /// $REGISTRY_AUTH_FILE, $DOCKER_CONFIG/config.json or /root/.docker/config.json]
    #[arg(long, value_name = "FILE")]
    auth_file: Option<PathBuf>,
    /// Serve CRI's image service, which the containerd at this socket answers, and use the
    /// credentials of its pulls for the images that they pull
    #[arg(long, value_name = "SOCKET")]
    image_service: Option<PathBuf>,
    /// Largest size of the cache in DIR/cache; beyond it, the least recently used data is evicted
    /// [default: no limit]
    #[arg(long, value_name = "SIZE")]
    cache_limit: Option<String>,
    /// When a mount fetches the rest of its image: always, idle or never [default: never]
    #[arg(long, value_name = "WHEN")]
    complete: Option<String>,
    /// Start on remote blocks only images whose manifest and attached BCoW manifest both have a
    /// cosign signature by this key
    #[arg(long, value_name = "FILE")]
    verify_key: Option<PathBuf>,
    /// Request data whose hash is known from this server first, and then from the registry
    /// (repeatable)
    #[arg(long, value_name = "URL")]
    mirror: Vec<String>,
    /// Reach registries by plain HTTP, which is not encrypted
    #[arg(long)]
    insecure: bool,
}

impl RemoteArgs {
    /// The socket of the containerd that answers CRI's image service.
    pub fn image_service(&self) -> Option<&Path> {
        self.image_service.as_deref()
    }

    /// The options that every use of an image in a registry has, by their names in mounts, with
    /// the cache in `cache`. The first one is the file with the credentials of the user.
    fn options(&self, cache: &Path) -> Result<Vec<(&'static str, Option<String>)>, Error> {
        let auth_file = self.auth_file.clone().unwrap_or_else(usual_auth_file);
        let mut options = vec![
            ("auth_file", Some(text(&auth_file))),
            ("cache_dir", Some(text(cache))),
        ];
        if let Some(limit) = &self.cache_limit {
            options.push(("cache_limit", Some(limit.clone())));
        }
        for url in &self.mirror {
            options.push(("mirror", Some(url.clone())));
        }
        if self.insecure {
            options.push(("insecure", None));
        }
        let values = options.iter().filter_map(|(_, value)| value.as_ref());
        match values.chain(&self.complete).find(|value| !is_plain(value)) {
            None => Ok(options),
            Some(bad) => Err(Error::Invalid(format!(
                "{bad:?} cannot be an option of a mount: it is empty, or has a comma, a quotation \
                 mark, a backslash or a control character"
            ))),
        }
    }
}

/// Where `docker login` stores credentials. systemd starts a service without HOME.
fn usual_auth_file() -> PathBuf {
    let named = |name: &str| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty());
        value.map(PathBuf::from)
    };
    named("REGISTRY_AUTH_FILE")
        .or_else(|| Some(named("DOCKER_CONFIG")?.join("config.json")))
        .unwrap_or_else(|| PathBuf::from("/root/.docker/config.json"))
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn is_plain(value: &str) -> bool {
    !value.is_empty() && !value.contains([',', '"', '\\']) && !value.contains(char::is_control)
}

/// Finds images in BCoW form, and says how they are mounted.
pub struct Remote {
    tool: Tool,
    is_asked: bool,
    keyring: Arc<Keyring>,
    /// The file with the credentials of the user.
    auth_file: PathBuf,
    /// The further options of the command that looks for an image.
    of_lookups: Vec<String>,
    /// The further options of commands that read an image.
    of_commands: Vec<String>,
    /// The further options of mounts.
    of_mounts: Vec<String>,
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
    image: Option<Arc<Found>>,
}

/// An image in BCoW form.
#[derive(Debug, PartialEq, Eq)]
struct Found {
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
        let options = args.options(cache)?;
        let (auth_file, options) = match &options[..] {
            [(_, Some(auth_file)), rest @ ..] => (PathBuf::from(auth_file), rest),
            _ => (usual_auth_file(), &options[..]),
        };
        let as_mount = |(name, value): &(&str, Option<String>)| match value {
            Some(value) => format!("{name}={value}"),
            None => (*name).to_owned(),
        };
        let as_command = |(name, value): &(&str, Option<String>)| match value {
            Some(value) => format!("--{}={value}", name.replace('_', "-")),
            None => format!("--{name}"),
        };
        let of_commands: Vec<String> = options.iter().map(as_command).collect();
        let key = args.verify_key.as_ref();
        let key = key.map(|path| format!("--verify-key={}", path.display()));
        let complete = args.complete.as_ref();
        let complete = complete.map(|when| format!("complete={when}"));
        Ok(Remote {
            tool,
            is_asked: !args.no_remote,
            keyring,
            auth_file,
            of_lookups: of_commands.iter().cloned().chain(key).collect(),
            of_commands,
            of_mounts: options.iter().map(as_mount).chain(complete).collect(),
            answers: Mutex::default(),
        })
    }

    /// The options of mounts of this image in a registry.
    pub fn mount_options(&self, image: &str) -> Vec<String> {
        let auth_file = format!("auth_file={}", text(&self.auth_file_of(image)));
        let options = self.of_mounts.iter().cloned();
        std::iter::once(auth_file).chain(options).collect()
    }

    /// The options of other commands that read it.
    pub fn command_options(&self, image: &str) -> Vec<String> {
        with_auth_file(&self.of_commands, &self.auth_file_of(image))
    }

    fn auth_file_of(&self, image: &str) -> PathBuf {
        let kept = Repository::of(image).and_then(|of| self.keyring.for_mounts(&of));
        kept.unwrap_or_else(|| self.auth_file.clone())
    }

    /// The layer in a registry that has the content of the layer with these labels, if there is
    /// one. If the registry cannot say, containerd fetches the layer.
    pub fn find(&self, labels: &Labels) -> Option<RemoteLayer> {
        let chain_id = labels.get(REF)?;
        let image = labels.get(IMAGE)?;
        let of_pull = Repository::of(image).and_then(|of| self.keyring.for_question(&of));
        let wanted = Wanted {
            image: image.clone(),
            manifest: labels.get(MANIFEST)?.clone(),
            auth_file: of_pull.unwrap_or_else(|| self.auth_file.clone()),
        };
        let image = self.image(&wanted)?;
        let at = image.chain_ids.iter().position(|id| id == chain_id)?;
        Some(RemoteLayer {
            image: image.name.clone(),
            layers: at + 1,
            files: image.files.clone(),
        })
    }

    fn image(&self, wanted: &Wanted) -> Option<Arc<Found>> {
        if !self.is_asked {
            return None;
        }
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
            return known.image.clone();
        }
        let image = match self.ask(wanted) {
            Ok(found) => {
                tracing::info!("{}: starts on {}", wanted.image, found.name);
                Some(Arc::new(found))
            }
            Err(why) => {
                let why = why.to_string();
                let why: Vec<&str> = why.lines().map(str::trim).collect();
                tracing::info!("{}: pulled whole: {}", wanted.image, why.join("; "));
                None
            }
        };
        *answer = Some(Answer {
            since: Instant::now(),
            image: image.clone(),
        });
        image
    }

    fn ask(&self, wanted: &Wanted) -> Result<Found, Error> {
        let name = format!("docker://{}", wanted.image);
        let options = with_auth_file(&self.of_lookups, &wanted.auth_file);
        let json = self.tool.resolve(&name, &options)?;
        let found = Found::read(&json, &wanted.manifest)
            .map_err(|problem| Error::State(format!("the BCoW image of {name} {problem}")))?;
        if wanted.auth_file != self.auth_file
            && let Some(repository) = Repository::of(&found.name)
        {
            // Mounts need them, also before the pull has ended.
            self.keyring.keep(&repository, &wanted.auth_file)?;
        }
        Ok(found)
    }
}

fn with_auth_file(options: &[String], auth_file: &Path) -> Vec<String> {
    let auth_file = format!("--auth-file={}", text(auth_file));
    std::iter::once(auth_file)
        .chain(options.iter().cloned())
        .collect()
}

/// What `bcow inspect --resolve --json` prints.
#[derive(Deserialize)]
struct Resolved {
    name: String,
    attached_to: Option<String>,
    merkle_root: Option<String>,
    layers: Vec<ResolvedLayer>,
}

#[derive(Deserialize)]
struct ResolvedLayer {
    diff_id: Option<String>,
    merkle_root: Option<String>,
}

impl Found {
    /// Reads the answer of `bcow` about the image with this manifest. The error says what is wrong
    /// with the BCoW image.
    fn read(json: &[u8], manifest: &str) -> Result<Self, String> {
        let resolved: Resolved =
            serde_json::from_slice(json).map_err(|error| format!("is not described: {error}"))?;
        let is_itself = resolved.name.ends_with(&format!("@{manifest}"));
        if !is_itself && resolved.attached_to.as_deref() != Some(manifest) {
            return Err(format!("is not that of the manifest {manifest}"));
        }
        if resolved.layers.len() > MAX_LAYERS {
            return Err(format!("has more than {MAX_LAYERS} layers"));
        }
        if !is_plain(&resolved.name) {
            return Err(format!("has an unusable name, {:?}", resolved.name));
        }
        let mut files = vec![root(resolved.merkle_root)?];
        let mut chain_ids: Vec<String> = Vec::new();
        for layer in resolved.layers {
            let diff_id = layer.diff_id.ok_or("has a layer without a diffID")?;
            let below = chain_ids.last().map(String::as_str);
            chain_ids.push(chain_id(below, &diff_id));
            files.push(root(layer.merkle_root)?);
        }
        Ok(Found {
            name: resolved.name,
            files,
            chain_ids,
        })
    }
}

/// The digits of a root hash.
fn root(text: Option<String>) -> Result<String, String> {
    let digits = text
        .as_deref()
        .and_then(|text| text.strip_prefix("sha256:"));
    let is_hash =
        |digits: &&str| digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let digits = digits.filter(is_hash);
    let digits = digits.ok_or("has a file without a root hash")?;
    Ok(digits.to_owned())
}

/// The name of a layer with this diffID on the layer `below` (OCI image specification, "layer
/// ChainID").
fn chain_id(below: Option<&str>, diff_id: &str) -> String {
    let Some(below) = below else {
        return diff_id.to_owned();
    };
    let hash = Sha256::digest(format!("{below} {diff_id}"));
    let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
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

    /// The values are those of the function ChainID of github.com/opencontainers/image-spec.
    #[test]
    fn chain_ids_are_those_of_the_specification() {
        let diff_ids = ["sha256:a", "sha256:b", "sha256:c"];
        let found = Found::read(document("sha256:m", &diff_ids).as_bytes(), "sha256:m").unwrap();
        let of = |text: &str| chain_id(Some(text.split(' ').next().unwrap()), &text[9..]);
        assert_eq!(found.chain_ids[0], "sha256:a");
        assert_eq!(found.chain_ids[1], of("sha256:a sha256:b"));
        let expected = Sha256::digest("sha256:a sha256:b");
        let digits: String = expected.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found.chain_ids[1], format!("sha256:{digits}"));
        assert_eq!(
            found.chain_ids[2],
            chain_id(Some(&found.chain_ids[1]), "sha256:c")
        );
        assert_eq!(found.files.len(), 4);
    }

    #[test]
    fn an_image_of_another_manifest_does_not_count() {
        let of = |json: &str, manifest| Found::read(json.as_bytes(), manifest);
        let json = document("sha256:m", &["sha256:a"]);
        assert!(of(&json, "sha256:m").is_ok());
        assert!(of(&json, "sha256:b").is_ok(), "the manifest itself");
        for (json, manifest, expected) in [
            (json.clone(), "sha256:other", "is not that of the manifest"),
            (json.replace("diff_id", "x"), "sha256:m", "without a diffID"),
            (
                json.replace("sha256:aaa", "md5:aaa"),
                "sha256:m",
                "without a root hash",
            ),
            ("{".to_owned(), "sha256:m", "is not described"),
            (json.replace("h/r", "h,r"), "sha256:m", "unusable name"),
        ] {
            let error = of(&json, manifest).unwrap_err();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }

    #[test]
    fn options_have_the_names_of_mounts_and_commands() {
        let tool = Tool::new("true".into()).unwrap();
        let args = RemoteArgs {
            auth_file: Some("/a".into()),
            cache_limit: Some("1G".into()),
            complete: Some("idle".into()),
            verify_key: Some("/key".into()),
            mirror: vec!["https://m".into()],
            insecure: true,
            ..RemoteArgs::default()
        };
        let directory = tempfile::tempdir().unwrap();
        let keyring = Arc::new(Keyring::open(directory.path().join("auth")).unwrap());
        let new =
            |args: &RemoteArgs| Remote::new(args, tool.clone(), keyring.clone(), Path::new("/c"));
        let remote = new(&args).unwrap();
        let image = "docker://h.org/r@sha256:a";
        let rest = "cache_dir=/c,cache_limit=1G,mirror=https://m,insecure,complete=idle";
        assert_eq!(
            remote.mount_options(image).join(","),
            format!("auth_file=/a,{rest}")
        );
        assert_eq!(
            with_auth_file(&remote.of_lookups, Path::new("/a")).join(" "),
            "--auth-file=/a --cache-dir=/c --cache-limit=1G --mirror=https://m --insecure \
             --verify-key=/key"
        );
        // A pull has brought others for this repository.
        let kept = directory.path().join("auth/h.org+r.json");
        std::fs::write(&kept, "{}").unwrap();
        let kept = kept.display();
        assert_eq!(
            remote.mount_options(image).join(","),
            format!("auth_file={kept},{rest}")
        );
        let other = remote.command_options("docker://h.org/other@sha256:a");
        assert_eq!(other[0], "--auth-file=/a");
        let bad = RemoteArgs {
            mirror: vec!["https://m,suid".into()],
            ..RemoteArgs::default()
        };
        let error = new(&bad).err().unwrap();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    }
}
