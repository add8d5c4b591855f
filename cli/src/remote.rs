//! Images on other machines: the options for them, and how a name leads to bytes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bcow::Storage;
use bcow_oci::store::RemoteFiles;
use bcow_remote::{Address, Cache, Options, Problem, Remote, RemoteError, Root};

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
        let opened = usual_cache().map(|path| Cache::open(&path));
        Ok(match opened {
            Some(Ok(cache)) => Some(cache),
            Some(Err(problem)) => {
                tracing::warn!("{problem}");
                None
            }
            None => None,
        })
    }
}

/// The directory that the user names, on the command line or in the environment.
fn named_cache(argument: Option<&Path>) -> Option<PathBuf> {
    let variable = || std::env::var_os("BCOW_CACHE").filter(|path| !path.is_empty());
    argument
        .map(Path::to_owned)
        .or_else(|| variable().map(PathBuf::from))
}

/// The directory without any option.
fn usual_cache() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some("/var/cache/bcow".into());
    }
    let absolute = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    let directory = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    directory.map(|directory| directory.join("bcow"))
}

/// Opens the image that a URL names.
pub fn open(url: &str, args: &RemoteArgs, pinned: Pinned) -> Result<RemoteImage, CommandError> {
    if url.starts_with("docker://") {
        return Err(CommandError::new(format!("cannot open {url}"))
            .caused_by_text("images in registries are not supported yet")
            .hint("`skopeo copy` brings the image into an OCI layout (oci:DIR:REF)"));
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
