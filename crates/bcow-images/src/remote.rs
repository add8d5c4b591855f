//! Remote images: the options for them, and how a name leads to bytes.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use crate::name::Name;
use crate::url::Url;
use bcow::Storage;
use bcow::format::is_plain_url;
use bcow_oci::store::{RecordedFile, RemoteFailure, RemoteFiles};
use bcow_oci::{
    BcowImage, ConvertError, Digest, FromIndex, ImageIndex, OrdinaryImage, Platform, RegistryImage,
    Repository,
};
use bcow_remote::{
    Address, Cache, Expected, Figures, Options, Problem, PublicKey, Reference, Registry, Remote,
    RemoteError, RemoteFile, Root, Setup, WeakRemote,
};
use bcow_sandbox::{Access, Attributes, When};

use crate::cache;
use crate::error::{CommandError, Context};
use crate::s3;
use crate::size::{self, Human};

pub use bcow_remote::Fetcher;

mod beside;
mod fetcher;
mod keys;

use beside::Beside;
pub use keys::Keys;

/// Options for remote images.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct RemoteArgs {
    /// Accept the image only if its root hash, which `bcow inspect` shows, is HEX, and verify every
    /// byte against that hash. This also works for files on this machine
    #[arg(long, value_name = "HEX", hide_short_help = true, help_heading = HEADING)]
    pub root_hash: Option<Root>,
    /// Cache the data of remote images in DIR [default: $BCOW_CACHE, or /var/cache/bcow
    /// for root, or $XDG_CACHE_HOME/bcow, or ~/.cache/bcow]
    #[arg(long, value_name = "DIR", hide_short_help = true, help_heading = HEADING)]
    #[arg(value_hint = clap::ValueHint::DirPath)]
    cache_dir: Option<PathBuf>,
    /// Use no cache for remote images
    #[arg(long, conflicts_with = "cache_dir", hide_short_help = true, help_heading = HEADING)]
    no_cache: bool,
    /// Largest size of the cache; beyond it, the least recently used data is evicted [default:
    /// $BCOW_CACHE_LIMIT, or no limit]
    #[arg(long, value_name = "SIZE", hide_short_help = true, help_heading = HEADING)]
    #[arg(value_parser = size::parse)]
    cache_limit: Option<u64>,
    /// Request data whose hash is known from this server first, and then from the server of the
    /// image (repeatable) [default: $BCOW_MIRRORS]
    #[arg(long = "mirror", value_name = "URL", hide_short_help = true, help_heading = HEADING)]
    mirrors: Vec<String>,
    /// Accept an image only if its manifest has a cosign signature that the public key in FILE
    /// verifies; for images in registries only
    #[arg(long, value_name = "FILE", hide_short_help = true, help_heading = HEADING)]
    #[arg(value_hint = clap::ValueHint::FilePath)]
    verify_key: Option<PathBuf>,
    /// The file with the credentials for registries, in the form of docker's config.json [default:
    /// what `docker login`, `podman login` or `skopeo login` have stored]
    #[arg(long, value_name = "FILE", hide_short_help = true, help_heading = HEADING)]
    #[arg(alias = "authfile", value_hint = clap::ValueHint::FilePath)]
    auth_file: Option<PathBuf>,
    /// Seconds to wait for a server that sends nothing [default: 30]
    #[arg(long, value_name = "SECONDS", hide_short_help = true, help_heading = HEADING)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=86400))]
    server_timeout: Option<u32>,
    /// Allow plain HTTP, which is not encrypted. bcow then always reaches registries by plain HTTP
    #[arg(long, hide_short_help = true, help_heading = HEADING)]
    insecure: bool,
    #[arg(skip)]
    client: OneClient,
    /// The process that makes the connections of this one, if it is started.
    #[arg(skip)]
    fetcher: OnceLock<Arc<Fetcher>>,
}

/// The client of a command line, made when the first remote image is opened.
#[derive(Default)]
struct OneClient(OnceLock<Arc<Client>>);

impl Clone for OneClient {
    /// Other options need another client.
    fn clone(&self) -> Self {
        OneClient::default()
    }
}

impl fmt::Debug for OneClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OneClient")
    }
}

/// What a process needs until its end for its remote files.
#[derive(Debug)]
pub struct Rights {
    pub files: Vec<(PathBuf, Access)>,
    pub attributes: Attributes,
}

impl Default for Rights {
    fn default() -> Self {
        Rights {
            files: Vec::new(),
            attributes: Attributes::Refused,
        }
    }
}

/// Opens remote files of a command line, and lists those that are open.
pub struct Client {
    remote: Remote,
    /// The lock is held to add to the list or to copy it.
    files: Mutex<Vec<Weak<RemoteFile>>>,
}

impl Client {
    fn add(&self, file: RemoteFile) -> Arc<RemoteFile> {
        let file = Arc::new(file);
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|file| file.strong_count() > 0);
        files.push(Arc::downgrade(&file));
        file
    }

    /// Adds a file, if the server has it.
    fn add_found(
        &self,
        opened: Result<RemoteFile, RemoteError>,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure> {
        match opened {
            Ok(file) => Ok(Some(self.add(file))),
            Err(error) if matches!(error.problem, Problem::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The open files, in the order of their opening.
    pub fn files(&self) -> Vec<Arc<RemoteFile>> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.iter().filter_map(Weak::upgrade).collect()
    }

    /// The counters.
    pub fn figures(&self) -> Figures {
        self.remote.figures()
    }
}

/// Largest size of a file with a key.
const KEY_BYTES: u64 = 64 << 10;

/// The default of [`scratch`]. /tmp is in memory on many machines.
const SCRATCH: &str = "/var/tmp";

/// The heading of these options in the help.
pub const HEADING: &str = "Remote images";

/// Whether `--root-hash` applies to an image: it names one image of a command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinned {
    /// It applies.
    AsAsked,
    /// It names another image.
    Never,
    /// The file above records the root hash.
    To(Root),
}

pub struct RemoteImage {
    /// The name, without the query of a URL in messages.
    pub name: Name,
    /// The bytes, each checked against the Merkle tree.
    pub storage: Arc<dyn Storage>,
    /// The files below the image, if it comes from a place with several.
    pub files: Option<Arc<dyn RemoteFiles>>,
    /// The URL that a file may record: without secrets, and in a registry with the digest of the
    /// manifest. `None` if the URL has a query.
    pub lasting_url: Option<String>,
    /// The digest of the file, if a registry has it.
    pub digest: Option<Digest>,
    /// The manifest, if the image is in a registry.
    pub manifest: Option<Vec<u8>>,
    /// What the indexes that lead to the manifest have beside it.
    pub from_index: FromIndex,
    /// The manifest of the ordinary image to which the image is attached, if the name led there.
    pub ordinary: Option<Vec<u8>>,
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
            mirrors: self.mirrors()?,
            scratch: scratch(),
            fetcher: self.fetcher(),
            keys: self.absolute_auth_file(),
            ..defaults
        })
    }

    /// The root hash that an image must have; `None` for any.
    pub fn root_of(&self, pinned: Pinned) -> Option<Root> {
        match pinned {
            Pinned::AsAsked => self.root_hash,
            Pinned::Never => None,
            Pinned::To(root) => Some(root),
        }
    }

    fn mirror_names(&self) -> Vec<String> {
        let variable = std::env::var("BCOW_MIRRORS").unwrap_or_default();
        if self.mirrors.is_empty() {
            variable.split_whitespace().map(str::to_owned).collect()
        } else {
            self.mirrors.clone()
        }
    }

    fn mirrors(&self) -> Result<Vec<Address>, CommandError> {
        let named = self.mirror_names();
        let parsed = named.iter().map(|url| {
            Address::parse(url).map_err(|problem| {
                CommandError::usage(format!("invalid mirror: {problem}"))
                    .hint("write https://HOST[:PORT][/PATH]")
            })
        });
        parsed.collect()
    }

    /// The key that must have signed the manifests of images in registries.
    fn verify_key(&self) -> Result<Option<PublicKey>, CommandError> {
        let Some(path) = &self.verify_key else {
            return Ok(None);
        };
        let cannot = || format!("cannot use the key {}", path.display());
        let mut text = String::new();
        let opened = std::fs::File::open(path).context(cannot)?;
        io::Read::read_to_string(&mut io::Read::take(opened, KEY_BYTES), &mut text)
            .context(cannot)?;
        let key = PublicKey::parse_pem(&text)
            .map_err(|why| CommandError::new(cannot()).caused_by_text(why))?;
        Ok(Some(key))
    }

    /// Starts a process that makes the connections of this one from now on. This one has one
    /// thread, and none of the descriptors that only one process may have.
    pub fn start_fetcher(&self, when: When) -> Result<(), CommandError> {
        if self.fetcher().is_none() {
            let _ = self.fetcher.set(start_fetcher(when)?);
        }
        Ok(())
    }

    fn fetcher(&self) -> Option<Arc<Fetcher>> {
        self.fetcher.get().or_else(|| FETCHER.get()).cloned()
    }

    /// What this process needs of files that have a fetcher, apart from the fetcher.
    pub fn rights(&self) -> Rights {
        if self.fetcher.get().is_none() {
            return Rights::default();
        }
        let Some(cache) = self.cache_directory() else {
            return Rights::default();
        };
        Rights {
            files: vec![(cache, Access::Write)],
            // The time of the last use, and the place that a file comes from.
            attributes: Attributes::OfOpenFiles,
        }
    }

    /// The process that makes the connections reads no further file from now on.
    pub(crate) fn seal_fetcher(&self) -> Result<(), Problem> {
        self.fetcher.get().map_or(Ok(()), |fetcher| fetcher.seal())
    }

    /// The credentials for registries. Fails if the file that the user names cannot be read.
    pub fn keys(&self) -> Result<Keys, CommandError> {
        if let Some(path) = &self.auth_file {
            let cannot = || format!("cannot read the credentials in {}", path.display());
            std::fs::File::open(path).context(cannot)?;
        }
        Ok(Keys {
            file: self.absolute_auth_file(),
        })
    }

    /// The process of a mount changes its directory later.
    fn absolute_auth_file(&self) -> Option<PathBuf> {
        let path = self.auth_file.as_ref()?;
        Some(std::path::absolute(path).unwrap_or_else(|_| path.clone()))
    }

    /// Fails for an image without a manifest, which has no signature, if one is required.
    pub fn refuse_unsigned(&self, name: &str) -> Result<(), CommandError> {
        match &self.verify_key {
            None => Ok(()),
            Some(_) => Err(CommandError::usage(format!(
                "--verify-key cannot be used with {name}: only images of registries have \
                 signatures"
            ))
            .hint("--root-hash HEX accepts one image only, from anywhere")),
        }
    }

    /// The same without a cache.
    pub fn uncached(&self) -> RemoteArgs {
        RemoteArgs {
            cache_dir: None,
            no_cache: true,
            ..self.clone()
        }
    }

    /// The open files on other machines, in the order of their opening.
    pub fn files(&self) -> Vec<Arc<RemoteFile>> {
        let client = self.client.0.get();
        client.map_or_else(Vec::new, |client| client.files())
    }

    /// The client; `None` as long as no remote image was opened.
    pub fn activity(&self) -> Option<Arc<Client>> {
        self.client.0.get().cloned()
    }

    /// Bytes that were fetched so far.
    pub fn fetched_bytes(&self) -> u64 {
        let client = self.client.0.get();
        client.map_or(0, |client| client.remote.figures().fetched_bytes)
    }

    /// Fails if the limit of the cache is too small for an image of `bytes`.
    pub fn refuse_small_limit(&self, name: &str, bytes: u64) -> Result<(), CommandError> {
        match cache::limit(self.cache_limit)? {
            Some(limit) if limit < bytes => Err(CommandError::new(format!("cannot fetch {name}"))
                .caused_by_text(format!(
                    "it has {}, and the limit of the cache is {}",
                    Human(bytes),
                    Human(limit)
                ))
                .hint("--cache-limit SIZE sets another limit")),
            _ => Ok(()),
        }
    }

    fn client(&self, name: &str) -> Result<Arc<Client>, CommandError> {
        if let Some(client) = self.client.0.get() {
            return Ok(Arc::clone(client));
        }
        let client = Arc::new(Client {
            remote: shared_client(self, name)?,
            files: Mutex::default(),
        });
        Ok(Arc::clone(self.client.0.get_or_init(|| client)))
    }

    /// What distinguishes the clients of a process: clients with equal options can be shared.
    fn key(&self) -> Result<String, CommandError> {
        let options = self.options()?;
        let cache = options.cache.as_ref().map(Cache::path);
        let cache = cache.map(|path| std::path::absolute(path).unwrap_or(path.to_owned()));
        let limit = cache::limit(self.cache_limit)?;
        let given = (options.insecure, options.timeout, cache, limit);
        let named = (self.mirror_names(), self.absolute_auth_file());
        Ok(format!("{given:?} {named:?}"))
    }

    /// The directory of the cache, if one can be used.
    pub fn cache_directory(&self) -> Option<PathBuf> {
        if self.no_cache {
            return None;
        }
        Some(match cache::find(self.cache_dir.as_deref()).ok()? {
            cache::FoundCache::Present(cache) => cache.path().to_owned(),
            cache::FoundCache::Missing(path) => path,
        })
    }

    fn cache(&self) -> Result<Option<Cache>, CommandError> {
        if self.no_cache {
            return Ok(None);
        }
        let limit = cache::limit(self.cache_limit)?;
        let cache = cache::open(self.cache_dir.as_deref())?;
        Ok(match (cache, limit) {
            (Some(cache), Some(limit)) => {
                let cannot = || format!("cannot limit {}", cache.path().display());
                Some(cache.clone().with_limit(limit).context(cannot)?)
            }
            (cache, _) => cache,
        })
    }
}

/// Opens the image that a URL names.
pub fn open(url: &Url, args: &RemoteArgs, pinned: Pinned) -> Result<RemoteImage, CommandError> {
    let place = match url {
        Url::Registry(reference) => return open_in_registry(reference, args, pinned),
        Url::S3(name) => beside::FileAddress::S3(s3::server()?, name.clone()),
        Url::Web(address) => beside::FileAddress::Web(address.clone()),
    };
    open_file(url, args, pinned, place)
}

/// Opens an image on a web server or in S3.
fn open_file(
    url: &Url,
    args: &RemoteArgs,
    pinned: Pinned,
    place: beside::FileAddress,
) -> Result<RemoteImage, CommandError> {
    let name = url.to_string();
    args.refuse_unsigned(&name)?;
    let client = args.client(&name)?;
    let expected = args.root_of(pinned).map(Expected::from);
    let file = place.open(&client.remote, expected);
    let file = file.map_err(|error| cannot_open(&name, &error))?;
    Ok(RemoteImage {
        name: Name::url(url.clone()),
        storage: client.add(file) as Arc<dyn Storage>,
        files: Some(Arc::new(Beside { place, client })),
        lasting_url: Some(name).filter(|name| is_plain_url(name)),
        digest: None,
        manifest: None,
        from_index: FromIndex::default(),
        ordinary: None,
    })
}

/// An image in a registry.
pub enum InRegistry {
    /// In BCoW form.
    Bcow(RemoteImage),
    /// An ordinary one, which can be converted.
    Ordinary(OrdinaryImage),
}

fn open_in_registry(
    reference: &Reference,
    args: &RemoteArgs,
    pinned: Pinned,
) -> Result<RemoteImage, CommandError> {
    let place = InRepository::new(reference, args)?;
    let found = place.find(None)?;
    let image = match found {
        RegistryImage::Bcow(image) => return place.open(&image, args, pinned),
        RegistryImage::Ordinary(image) => image,
    };
    let name = place.shown();
    let ordinary = || {
        CommandError::new(format!("cannot open {name}"))
            .caused_by_text("it is an ordinary OCI image")
            .without_image()
    };
    // The digest of an ordinary image does not cover what is attached to it. A signature does: the
    // signed manifest names the digest.
    let is_covered = args.root_of(pinned).is_some() || place.key.is_some();
    if place.registry.reference().digest().is_some() && !is_covered {
        return Err(ordinary().hint(
            "its digest does not cover a BCoW image that is attached to it: name its tag, or that \
             image with --root-hash, or the key of its signature with --verify-key",
        ));
    }
    let attached = bcow_oci::find_attached(&image)
        .map_err(|error| cannot_convert(&error, &format!("cannot open {name}")))?;
    match attached {
        Some(attached) => {
            place.verify(&attached)?;
            tracing::info!("{name} is an ordinary image; opened what is attached to it");
            Ok(RemoteImage {
                ordinary: Some(image.manifest().to_owned()),
                ..place.open(&attached, args, pinned)?
            })
        }
        None => Err(ordinary().hint(format!(
            "`bcow convert {name} FILE.bcow` makes a BCoW image of it; `bcow convert --referrer \
             {name} {name}` attaches one to it, which is then found here"
        ))),
    }
}

/// Finds the image that `docker://...` names, for `platform` or for that of this machine. Nothing
/// that is attached to an ordinary image counts.
pub fn find_in_registry(
    reference: &Reference,
    args: &RemoteArgs,
    pinned: Pinned,
    platform: Option<&Platform>,
) -> Result<InRegistry, CommandError> {
    let place = InRepository::new(reference, args)?;
    match place.find(platform)? {
        RegistryImage::Bcow(image) => place.open(&image, args, pinned).map(InRegistry::Bcow),
        RegistryImage::Ordinary(image) => Ok(InRegistry::Ordinary(image)),
    }
}

/// A name in a registry: what `bcow_oci` reads there.
pub struct InRepository {
    registry: Registry,
    client: Arc<Client>,
    /// The key that must have signed what the name leads to.
    key: Option<PublicKey>,
}

impl InRepository {
    fn new(reference: &Reference, args: &RemoteArgs) -> Result<Arc<Self>, CommandError> {
        let client = args.client(&reference.to_string())?;
        let keys = Arc::new(args.keys()?);
        Ok(Arc::new(InRepository {
            registry: Registry::new(&client.remote, reference.clone(), keys),
            client,
            key: args.verify_key()?,
        }))
    }

    /// The name for messages.
    fn shown(&self) -> String {
        self.registry.reference().to_string()
    }

    /// Checks the signature of an image that no signed manifest has led to.
    fn verify(&self, image: &BcowImage) -> Result<(), CommandError> {
        let Some(key) = &self.key else {
            return Ok(());
        };
        let digest = Digest::of(&image.manifest).to_string();
        let verified = self.registry.verify(&digest, key);
        verified.map_err(|error| cannot_open(&self.shown(), &error))
    }

    fn find(self: &Arc<Self>, platform: Option<&Platform>) -> Result<RegistryImage, CommandError> {
        bcow_oci::find_in_registry(self.clone(), platform)
            .map_err(|error| cannot_convert(&error, &format!("cannot open {}", self.shown())))
    }

    /// Opens the stack of an image.
    fn open(
        self: &Arc<Self>,
        image: &BcowImage,
        args: &RemoteArgs,
        pinned: Pinned,
    ) -> Result<RemoteImage, CommandError> {
        let failed = |error: RemoteError| cannot_open(&self.shown(), &error);
        let of_manifest = image.stack.merkle_root.map(Root);
        let root = args.root_of(pinned).or(of_manifest);
        if let (Some(root), Some(found)) = (root, of_manifest)
            && root != found
        {
            let problem = Problem::WrongRoot {
                found: found.to_string(),
                expected: root.to_string(),
            };
            let place = self.shown();
            return Err(failed(RemoteError { place, problem }));
        }
        let expected = root.map(|root| Expected {
            root,
            file_bytes: Some(image.stack.bytes),
        });
        let file = self
            .registry
            .blob(&image.stack.digest.to_string(), expected)
            .map_err(failed)?;
        Ok(RemoteImage {
            storage: self.client.add(file) as Arc<dyn Storage>,
            files: Some(self.clone() as Arc<dyn RemoteFiles>),
            name: Name::url(Url::Registry(self.registry.reference().clone())),
            lasting_url: Some(format!(
                "docker://{}/{}@{}",
                self.registry.reference().server(),
                self.registry.reference().repository(),
                Digest::of(&image.manifest)
            ))
            .filter(|url| is_plain_url(url)),
            digest: Some(image.stack.digest.clone()),
            manifest: Some(image.manifest.clone()),
            from_index: image.from_index.clone(),
            ordinary: None,
        })
    }
}

/// The index that `docker://...` names, and what reads from its repository; `None` if the name
/// leads to one manifest.
pub fn index_in_registry(
    reference: &Reference,
    args: &RemoteArgs,
) -> Result<Option<(ImageIndex, Arc<InRepository>)>, CommandError> {
    let place = InRepository::new(reference, args)?;
    let index = ImageIndex::of_registry(place.clone())
        .map_err(|error| cannot_convert(&error, &format!("cannot open {}", place.shown())))?;
    Ok(index.map(|index| (index, place)))
}

/// Finds the image in BCoW form that `docker://...` names, for `platform` or for that of this
/// machine, to copy it: nothing of it is cached.
pub fn bcow_in_registry(
    reference: &Reference,
    args: &RemoteArgs,
    platform: Option<&Platform>,
) -> Result<(BcowImage, Arc<InRepository>), CommandError> {
    let place = InRepository::new(reference, &args.uncached())?;
    let found = place.find(platform)?;
    match found {
        RegistryImage::Bcow(image) => Ok((image, place)),
        RegistryImage::Ordinary(_) => {
            Err(CommandError::new(format!("cannot open {}", place.shown()))
                .caused_by_text("it is an ordinary OCI image")
                .hint(
                    "`bcow convert` makes a BCoW image of it; `skopeo copy` copies ordinary images",
                ))
        }
    }
}

/// A blob of the repository that `docker://...` names: its bytes as the registry sends them.
pub fn blob_in_registry(
    reference: &Reference,
    digest: &Digest,
    bytes: u64,
    args: &RemoteArgs,
) -> Result<Box<dyn io::Read + Send>, CommandError> {
    let place = InRepository::new(reference, &args.uncached())?;
    let sent = place.registry.download(&digest.to_string(), bytes);
    Ok(Box::new(
        sent.map_err(|error| cannot_open(&place.shown(), &error))?,
    ))
}

/// The error of a library that reads from servers through this program: `failed`, then the server's
/// answer, with its hint.
fn cannot_convert(error: &ConvertError, failed: &str) -> CommandError {
    let failure = CommandError::new(failed);
    match (RemoteError::below(error), error) {
        (Some(cause), _) => {
            let failure = failure.caused_by_text(cause.to_string());
            let failure = failure.of_problem(&cause.problem);
            failure.hint_if(hint(&cause.problem))
        }
        (None, error) => failure.caused_by(error).hint_if(error.hint()),
    }
}

impl Repository for InRepository {
    fn name(&self) -> String {
        self.registry.reference().to_string()
    }

    fn manifest(&self, digest: Option<&Digest>) -> io::Result<Vec<u8>> {
        Ok(match digest {
            Some(digest) => self.registry.manifest_with_digest(&digest.to_string())?,
            None => {
                let manifest = self.registry.manifest()?;
                if let Some(key) = &self.key {
                    let digest = Digest::of(&manifest).to_string();
                    self.registry.verify(&digest, key)?;
                }
                manifest
            }
        })
    }

    fn referrers(&self, digest: &Digest, artifact_type: &str) -> io::Result<Vec<u8>> {
        Ok(self
            .registry
            .referrers(&digest.to_string(), artifact_type)?)
    }

    fn blob(&self, digest: &Digest, length: u64) -> io::Result<Box<dyn io::Read + Send>> {
        Ok(Box::new(
            self.registry.download(&digest.to_string(), length)?,
        ))
    }
}

impl RemoteFiles for InRepository {
    fn name(&self, digest: &Digest) -> PathBuf {
        self.registry.blob_name(&digest.to_string()).into()
    }

    fn open(
        &self,
        digest: &Digest,
        recorded: &RecordedFile,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure> {
        let expected = Expected {
            root: Root(recorded.merkle_root),
            file_bytes: Some(recorded.file_bytes),
        };
        let opened = self.registry.blob(&digest.to_string(), Some(expected));
        self.client.add_found(opened)
    }
}

/// The directory for files that are sent, or that come from a mirror.
pub fn scratch() -> PathBuf {
    let named = std::env::var_os("TMPDIR").filter(|path| !path.is_empty());
    named.map_or_else(|| PathBuf::from(SCRATCH), PathBuf::from)
}

/// The begin of the names of directories in [`scratch`].
pub const SCRATCH_NAME: &str = "bcow-";

/// Whether `path` is [`scratch`] itself, where files have no names, or is in one of its directories
/// that this program makes.
pub fn is_scratch(path: &Path) -> bool {
    let Ok(inner) = path.strip_prefix(scratch()) else {
        return false;
    };
    let first = inner.components().next();
    first.is_none_or(|name| {
        let name = name.as_os_str().as_encoded_bytes();
        inner.components().count() > 1 && name.starts_with(SCRATCH_NAME.as_bytes())
    })
}

/// The clients that the mounts of this process use; `None` if each has its own. The lock is held to
/// look for a client or to make one, which needs no connection.
static SHARED: Mutex<Option<Vec<(String, WeakRemote)>>> = Mutex::new(None);

/// The process that makes the connections of all clients of this process.
static FETCHER: OnceLock<Arc<Fetcher>> = OnceLock::new();

/// Starts a process that makes the connections of all clients of this one from now on. This one has
/// one thread, and none of the descriptors that only one process may have.
pub fn start_fetcher_of_all(when: When) -> Result<Arc<Fetcher>, CommandError> {
    let fetcher = start_fetcher(when)?;
    let _ = FETCHER.set(Arc::clone(&fetcher));
    Ok(fetcher)
}

fn start_fetcher(when: When) -> Result<Arc<Fetcher>, CommandError> {
    let setup = Setup {
        keychain: Box::new(|file| Arc::new(Keys { file })),
        s3: || s3::server().map_err(|error| error.in_one_line()),
    };
    fetcher::start(setup, when).context(|| "cannot start a process")
}

/// Makes all later clients of this process with equal options share connections, tokens and memory.
pub fn share_clients() {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    shared.get_or_insert_default();
}

fn shared_client(args: &RemoteArgs, name: &str) -> Result<Remote, CommandError> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(shared) = &mut *shared else {
        return client(args, name);
    };
    let key = args.key()?;
    shared.retain(|(_, remote)| remote.upgrade().is_some());
    let found = shared.iter().find(|(other, _)| *other == key);
    if let Some(remote) = found.and_then(|(_, remote)| remote.upgrade()) {
        return Ok(remote);
    }
    let remote = client(args, name)?;
    shared.push((key, remote.downgrade()));
    Ok(remote)
}

/// A client with these options. `name` is what is opened, for messages.
pub fn client(args: &RemoteArgs, name: &str) -> Result<Remote, CommandError> {
    Remote::new(args.options()?).map_err(|problem| {
        CommandError::new(format!("cannot open {name}")).caused_by_text(problem.to_string())
    })
}

/// The error of an image that does not open.
pub fn cannot_open(name: &str, error: &RemoteError) -> CommandError {
    explain(
        CommandError::new(format!("cannot open {name}")),
        name,
        error,
    )
}

/// Adds the cause of a failure with the image `name`.
pub fn explain(failure: CommandError, name: &str, error: &RemoteError) -> CommandError {
    let failure = if error.place == name {
        failure.caused_by_text(error.problem.to_string())
    } else {
        failure.caused_by_text(error.to_string())
    };
    let failure = failure.of_problem(&error.problem);
    failure.hint_if(hint(&error.problem))
}

/// What the user can do about a problem.
pub fn hint(problem: &Problem) -> Option<&'static str> {
    use bcow::format::FormatError;
    Some(match problem {
        Problem::PlainHttp(_) | Problem::NoTls => {
            "--insecure allows plain HTTP; bytes are checked all the same"
        }
        Problem::NoTree => "`bcow seal` makes a disk immutable, with a Merkle tree",
        Problem::Denied { .. } => {
            "for images in registries, `skopeo login`, `docker login` or `podman login` stores \
             credentials; for those in S3, set AWS_PROFILE, or AWS_ACCESS_KEY_ID and \
             AWS_SECRET_ACCESS_KEY"
        }
        Problem::Signature(_) => {
            "`cosign sign --key` signs an image; name the key that belongs to it with --verify-key"
        }
        Problem::NoSubject => "copy the ordinary image there first, with `skopeo copy`",
        Problem::NotKept(_) => {
            "name another directory with --cache-dir, or another limit with --cache-limit"
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
