//! Images on other machines: the options for them, and how a name leads to bytes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bcow::Storage;
use bcow_oci::store::{LayerFacts, RemoteFailure, RemoteFiles};
use bcow_oci::{Digest, RemoteManifest};
use bcow_remote::{
    Address, Cache, Credentials, Keychain, Options, Problem, Reference, Registry, Remote,
    RemoteError, Root,
};
use docker_credential::{CredentialRetrievalError, DockerCredential};

use crate::error::CommandError;

/// Options for images on other machines.
#[derive(Debug, Default, clap::Args)]
pub struct RemoteArgs {
    /// Accept the image only if its root hash is HEX, and verify every byte against HEX (see
    /// `bcow inspect`). Also for files of this machine
    #[arg(long, value_name = "HEX", hide_short_help = true, help_heading = HEADING)]
    pub root_hash: Option<Root>,
    /// Keep what is read of images on other machines in DIR [default: $BCOW_CACHE, or
    /// /var/cache/bcow for root, or ~/.cache/bcow]
    #[arg(long, value_name = "DIR", hide_short_help = true, help_heading = HEADING)]
    #[arg(value_hint = clap::ValueHint::DirPath)]
    cache_dir: Option<PathBuf>,
    /// Keep nothing of images on other machines
    #[arg(long, conflicts_with = "cache_dir", hide_short_help = true, help_heading = HEADING)]
    no_cache: bool,
    /// Longest wait for a server that sends nothing, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS", hide_short_help = true, help_heading = HEADING)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=86400))]
    server_timeout: Option<u32>,
    /// Allow plain HTTP, which is not encrypted
    #[arg(long, hide_short_help = true, help_heading = HEADING)]
    insecure: bool,
}

/// The heading of these options in the help.
const HEADING: &str = "Images on other machines";

/// Whether `--root-hash` applies to an image: it names one image of a command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinned {
    AsAsked,
    Never,
}

/// An image on another machine.
pub struct RemoteImage {
    /// The name for messages: without the query of a URL.
    pub name: PathBuf,
    /// The bytes, each checked against the hash tree.
    pub storage: Arc<dyn Storage>,
    /// The files below the image, if it comes from a place with several.
    pub files: Option<Arc<dyn RemoteFiles>>,
}

impl RemoteArgs {
    fn options(&self) -> Result<Options, CommandError> {
        let defaults = Options::default();
        Ok(Options {
            insecure: self.insecure,
            timeout: self.server_timeout.map_or(defaults.timeout, |seconds| {
                Duration::from_secs(seconds.into())
            }),
            cache: self.cache()?,
            ..defaults
        })
    }

    /// The cache. A directory that the user names must be usable; without the usual one, reading
    /// goes on.
    fn cache(&self) -> Result<Option<Cache>, CommandError> {
        if self.no_cache {
            return Ok(None);
        }
        if let Some(named) = named_cache(self.cache_dir.as_deref()) {
            return Cache::open(&named).map(Some).map_err(|problem| {
                CommandError::new(problem.to_string())
                    .hint("name another directory with --cache-dir, or use --no-cache")
            });
        }
        for path in usual_caches() {
            match Cache::open(&path) {
                Ok(cache) => return Ok(Some(cache)),
                Err(problem) => tracing::warn!("{problem}"),
            }
        }
        Ok(None)
    }
}

/// The directory that the user names, on the command line or in the environment.
fn named_cache(argument: Option<&Path>) -> Option<PathBuf> {
    let variable = || std::env::var_os("BCOW_CACHE").filter(|path| !path.is_empty());
    argument
        .map(Path::to_owned)
        .or_else(|| variable().map(PathBuf::from))
}

/// The directories without any option; the first one that can be used is used. Root of a user
/// namespace cannot write to that of the machine's root.
fn usual_caches() -> Vec<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    let of_root = is_root.then(|| PathBuf::from("/var/cache/bcow"));
    let absolute = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    let directory = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    let of_user = directory.map(|directory| directory.join("bcow"));
    of_root.into_iter().chain(of_user).collect()
}

/// Opens the image that a URL names.
pub fn open(url: &str, args: &RemoteArgs, pinned: Pinned) -> Result<RemoteImage, CommandError> {
    if url.starts_with("docker://") {
        return open_in_registry(url, args, pinned);
    }
    let address = Address::parse(url).map_err(|problem| {
        CommandError::usage(format!("invalid URL: {problem}"))
            .hint("write https://HOST/PATH; a query may follow")
    })?;
    let name = address.to_string();
    let client = client(args, &name)?;
    let root = match pinned {
        Pinned::AsAsked => args.root_hash,
        Pinned::Never => None,
    };
    let file = client
        .open(&address, root)
        .map_err(|error| cannot_open(&name, &error))?;
    Ok(RemoteImage {
        name: name.into(),
        storage: Arc::new(file) as Arc<dyn Storage>,
        files: None,
    })
}

/// Indexes, one inside the other.
const MOST_INDEXES: usize = 4;

fn open_in_registry(
    url: &str,
    args: &RemoteArgs,
    pinned: Pinned,
) -> Result<RemoteImage, CommandError> {
    let reference: Reference = url.parse().map_err(|problem| {
        CommandError::usage(format!("invalid image name {url:?}: {problem}"))
            .hint("write docker://SERVER/REPOSITORY[:TAG][@sha256:DIGEST]")
    })?;
    let name = reference.to_string();
    let failed = |error: RemoteError| cannot_open(&name, &error);
    let remote = client(args, &name)?;
    let registry = Registry::new(&remote, reference, Arc::new(Keys));
    let mut manifest = registry.manifest().map_err(failed)?;
    let mut stack = None;
    for _ in 0..=MOST_INDEXES {
        let parsed = RemoteManifest::parse(&name, &manifest)
            .map_err(|error| CommandError::new(format!("cannot open {name}")).caused_by(&error))?;
        match parsed {
            RemoteManifest::Index(digest) => {
                let digest = digest.to_string();
                manifest = registry.manifest_with_digest(&digest).map_err(failed)?;
            }
            RemoteManifest::Bcow(found) => {
                stack = Some(found);
                break;
            }
            RemoteManifest::Ordinary => {
                return Err(CommandError::new(format!("cannot open {name}"))
                    .caused_by_text("it is an ordinary OCI image")
                    .hint(format!(
                        "`skopeo copy {name} oci:DIR:TAG`, `bcow convert oci:DIR:TAG \
                         oci:STORE:TAG` and `skopeo copy oci:STORE:TAG docker://...` make a BCoW \
                         image of it"
                    )));
            }
        }
    }
    let Some(stack) = stack else {
        return Err(
            CommandError::new(format!("cannot open {name}")).caused_by_text(format!(
                "more than {MOST_INDEXES} indexes, one inside the other"
            )),
        );
    };
    let of_manifest = stack.merkle_root.map(Root);
    let root = match (pinned, args.root_hash) {
        (Pinned::AsAsked, Some(root)) => Some(root),
        _ => of_manifest,
    };
    if let (Some(root), Some(found)) = (root, of_manifest)
        && root != found
    {
        let problem = Problem::WrongRoot {
            found: found.to_string(),
            expected: root.to_string(),
        };
        let place = name.clone();
        return Err(failed(RemoteError { place, problem }));
    }
    let file = registry
        .blob(&stack.digest.to_string(), root)
        .map_err(failed)?;
    Ok(RemoteImage {
        storage: Arc::new(file) as Arc<dyn Storage>,
        files: Some(Arc::new(Layers(registry)) as Arc<dyn RemoteFiles>),
        name: name.into(),
    })
}

/// The layers of an image in a registry.
struct Layers(Registry);

impl RemoteFiles for Layers {
    fn name(&self, digest: &Digest) -> PathBuf {
        self.0.blob_name(&digest.to_string()).into()
    }

    fn open(
        &self,
        digest: &Digest,
        facts: &LayerFacts,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure> {
        match self
            .0
            .blob(&digest.to_string(), Some(Root(facts.merkle_root)))
        {
            Ok(file) => Ok(Some(Arc::new(file))),
            Err(error) if matches!(error.problem, Problem::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// The credentials that `docker login`, `podman login` and `skopeo login` store.
struct Keys;

impl Keychain for Keys {
    fn credentials(&self, server: &str) -> Result<Option<Credentials>, String> {
        let directory = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let podman = directory("REGISTRY_AUTH_FILE")
            .or_else(|| Some(directory("XDG_RUNTIME_DIR")?.join("containers/auth.json")));
        if podman.is_some_and(|file| file.exists())
            && let Some(found) = found(docker_credential::get_podman_credential(server))?
        {
            return Ok(Some(found));
        }
        let docker =
            directory("DOCKER_CONFIG").or_else(|| Some(directory("HOME")?.join(".docker")));
        match docker.is_some_and(|directory| directory.join("config.json").exists()) {
            true => found(docker_credential::get_credential(server)),
            false => Ok(None),
        }
    }
}

/// The text of an error of the library can have what a helper printed, so it is not used.
fn found(
    result: Result<DockerCredential, CredentialRetrievalError>,
) -> Result<Option<Credentials>, String> {
    match result {
        Ok(DockerCredential::UsernamePassword(user, password)) => {
            Ok(Some(Credentials::Password { user, password }))
        }
        Ok(DockerCredential::IdentityToken(token)) => Ok(Some(Credentials::IdentityToken(token))),
        Err(
            CredentialRetrievalError::NoCredentialConfigured
            | CredentialRetrievalError::ConfigNotFound,
        ) => Ok(None),
        Err(CredentialRetrievalError::HelperFailure { helper, .. }) => {
            Err(format!("the credential helper {helper} failed"))
        }
        Err(CredentialRetrievalError::ConfigReadError) => {
            Err("the file with the credentials cannot be read".into())
        }
        Err(_) => Err("the stored credentials are invalid, or their helper does not work".into()),
    }
}

fn client(args: &RemoteArgs, name: &str) -> Result<Remote, CommandError> {
    Remote::new(args.options()?).map_err(|problem| {
        CommandError::new(format!("cannot open {name}")).caused_by_text(problem.to_string())
    })
}

/// The error of an image that does not open.
fn cannot_open(name: &str, error: &RemoteError) -> CommandError {
    let failure = CommandError::new(format!("cannot open {name}"));
    let failure = match error.place == name {
        true => failure.caused_by_text(error.problem.to_string()),
        false => failure.caused_by_text(error.to_string()),
    };
    match hint(&error.problem) {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

fn hint(problem: &Problem) -> Option<&'static str> {
    use bcow::format::FormatError;
    Some(match problem {
        Problem::PlainHttp(_) => "--insecure allows it; bytes are checked all the same",
        Problem::NoTree => "`bcow seal` makes a disk immutable, with a hash tree",
        Problem::Denied { .. } => {
            "for images in registries, `skopeo login`, `docker login` or `podman login` stores \
             credentials"
        }
        Problem::NoRanges(_) => "copy the file to this machine, and open the copy",
        Problem::WrongRoot { .. } => {
            "the file is another one than --root-hash names; \
             `bcow inspect` without --root-hash shows it"
        }
        Problem::WrongBytes => "the file on the server is damaged, or it changes at this moment",
        Problem::Format(FormatError::NotBcow) => {
            "the URL must lead to a BCoW file, which `bcow convert` makes"
        }
        Problem::Format(FormatError::Truncated { .. }) => "upload the file again",
        Problem::Certificates(_) => "install ca-certificates, or set SSL_CERT_FILE",
        _ => return None,
    })
}
