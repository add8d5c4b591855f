//! Names of images, the directories in which their layers and backings are found, and the errors of
//! images that do not open.

use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::name::{Name, NameParts};
use bcow::chain::Share;
use bcow::format::FormatError;
use bcow::{Error, OpenOptions};
use bcow_oci::store::{self, Opened, Places, RemoteFiles, StoreError};

use crate::error::{CommandError, Context};
use crate::foreign_format::format_hint;
use crate::given::{Given, OpenFiles};
use crate::remote::{HEADING, RemoteArgs, RemoteImage};
use crate::takes::registry_hint;

/// Directories in which the layers of an image are looked up, in addition to the layout of the
/// image.
#[derive(Debug, Default, clap::Args)]
pub struct StoreArgs {
    /// Also look for layers, and for backings recorded by digest, in this directory: an OCI layout,
    /// or files named by their digest (repeatable; searched before $BCOW_STORE)
    #[arg(long = "store", value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    stores: Vec<PathBuf>,
    /// Also look for backing files in this directory (repeatable)
    #[arg(long = "backing-dir", value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    backing_dirs: Vec<PathBuf>,
    /// Open a backing by its URL only if the URL is PREFIX, or begins with PREFIX and a slash
    /// (repeatable) [default: $BCOW_BACKING_URLS, or none]
    #[arg(long = "backing-url", value_name = "PREFIX", hide_short_help = true)]
    #[arg(help_heading = HEADING)]
    backing_urls: Vec<String>,
    /// Read disks without a lock, even while another process writes to them; reads may be
    /// inconsistent. The command still locks a disk that it opens for writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The options for remote images.
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// Stores for every command, as in PATH.
const STORES: &str = "BCOW_STORE";
/// Beginnings of URLs of backings that may be opened, separated by spaces.
const BACKING_URLS: &str = "BCOW_BACKING_URLS";

impl StoreArgs {
    /// The directories, those of the command line first.
    pub fn directories(&self) -> Result<Vec<PathBuf>, CommandError> {
        let variable = std::env::var_os(STORES).unwrap_or_default();
        let named = std::env::split_paths(&variable).filter(|path| !path.as_os_str().is_empty());
        let directories: Vec<PathBuf> = self.stores.iter().cloned().chain(named).collect();
        require_directories(&directories, "layers")?;
        Ok(directories)
    }

    /// Whether files that may change are locked while they are read.
    pub fn share(&self) -> Share {
        if self.force_share { Share::Force } else { Share::Lock }
    }

    /// The directories in which referenced files may be opened, in addition to the directory of the
    /// file itself.
    pub fn backing_dirs(&self) -> Result<&[PathBuf], CommandError> {
        require_directories(&self.backing_dirs, "backings")?;
        Ok(&self.backing_dirs)
    }

    /// Opens an image of another machine, with those files below it that are available.
    pub fn open_remote(
        &self,
        image: &RemoteImage,
        given: &Given,
        options: &OpenOptions,
    ) -> Result<Opened, CommandError> {
        let directories = self.directories()?;
        // What is open already needs no request.
        let places = given.remote.iter().chain(&image.files).cloned().collect();
        let files = Vec::new();
        let remote: Arc<dyn RemoteFiles> = Arc::new(OpenFiles { files, places });
        let places = Places {
            stores: &directories,
            named: self.backing_dirs()?,
            files: &given.files,
            remote: Some(&remote),
        };
        let name = image.name.shown();
        store::open_remote(name.to_owned(), image.storage.clone(), places, options)
            .map_err(|error| cannot_open(name, &error))
    }

    /// Whether files of these images may be on other machines.
    pub fn may_need_network<'n>(&self, images: impl IntoIterator<Item = &'n Name>) -> bool {
        let variable = std::env::var(BACKING_URLS).unwrap_or_default();
        !self.backing_urls.is_empty()
            || !variable.trim().is_empty()
            || images.into_iter().any(Name::is_remote)
    }

    /// Whether the user allows a file to name a backing by this URL.
    pub fn allows_url(&self, url: &str) -> bool {
        let variable = std::env::var(BACKING_URLS).unwrap_or_default();
        let by_variable = variable
            .split_whitespace()
            .filter(|_| self.backing_urls.is_empty());
        let named = self.backing_urls.iter().map(String::as_str);
        named.chain(by_variable).any(|prefix| {
            let prefix = prefix.trim_end_matches('/');
            let Some((scheme, place)) = prefix.split_once("://") else {
                return false;
            };
            let rest = url.strip_prefix(prefix).filter(|_| !place.is_empty());
            rest.is_some_and(|rest| match rest.bytes().next() {
                None | Some(b'/') => true,
                // The digest behind the name of a repository.
                Some(b'@') => scheme == "docker" && place.contains('/'),
                _ => false,
            })
        })
    }
}

/// Else a misspelt directory would look like a missing file.
fn require_directories(directories: &[PathBuf], what: &str) -> Result<(), CommandError> {
    for directory in directories {
        let cannot = || format!("cannot look for {what} in {}", directory.display());
        if !std::fs::metadata(directory).context(cannot)?.is_dir() {
            return Err(CommandError::new(cannot()).caused_by_text("it is no directory"));
        }
    }
    Ok(())
}

/// Fails with a clear message if there is nothing that could be an image.
pub fn refuse_what_is_no_file(name: &Name) -> Result<(), CommandError> {
    let Some(path) = name.path() else {
        return Ok(());
    };
    let cannot_open = || format!("cannot open {name}");
    let metadata = std::fs::metadata(path).map_err(|error| {
        let is_plain = matches!(name.parts(), NameParts::File(_));
        let may_be_remote = is_plain && error.kind() == ErrorKind::NotFound;
        CommandError::new(cannot_open())
            .caused_by(&error)
            .hint_if(registry_hint(path).filter(|_| may_be_remote))
    })?;
    if metadata.is_dir() {
        let failure = CommandError::new(format!("{}: it is a directory", cannot_open()));
        let shown = path.display();
        return Err(failure.hint(match () {
            () if path.join("oci-layout").exists() => {
                format!("it is an OCI image layout: name the image in it as oci:{shown}[:REF]")
            }
            () if matches!(bcow_union::driver_of(path), Ok(Some(_))) => format!(
                "it is the upper of a writable mount: name its image, with `--upper {shown}` for \
                 the changes where the command has this option, or mount it with `bcow mount`"
            ),
            () => "`bcow convert` makes an image of a directory (dir:PATH) or of an OCI layout \
                      (oci:DIR)"
                .to_owned(),
        }));
    }
    let kind = metadata.file_type();
    if kind.is_fifo() || kind.is_socket() || kind.is_char_device() {
        return Err(CommandError::new(format!(
            "{}: it is a pipe, a socket or a character device",
            cannot_open()
        )));
    }
    Ok(())
}

/// The error of an image, which the user calls `name`, that does not open.
pub fn cannot_open(name: &Path, error: &StoreError) -> CommandError {
    let shown = name.display();
    let failure = CommandError::new(format!("cannot open {shown}"));
    let failure = match error {
        StoreError::Open { path, source } => return cannot_open_file(name, path, source),
        StoreError::Layout(inner) => match std::error::Error::source(inner) {
            // An error of the host, whose text does not name the action.
            Some(source) => failure.caused_by_text(format!("{inner}: {source}")),
            None => failure.caused_by(inner),
        },
        other => failure.caused_by(other),
    };
    failure.hint_if(error.hint())
}

/// The error for a file at `path`, part of the image that the user calls `name`, that does not open
/// as an image.
pub fn cannot_open_file(name: &Path, path: &Path, error: &Error) -> CommandError {
    let failure = CommandError::new(format!("cannot open {}", name.display()));
    let failure = match error {
        // The message begins with "cannot open" already.
        Error::Io {
            action: "open",
            source,
            ..
        } => failure.caused_by(source),
        _ if name == path => failure.caused_by(error),
        _ => failure.caused_by_text(format!("{}: {error}", path.display())),
    };
    failure.hint_if(open_hint(name, path, error))
}

/// The hint for a file at `path`, part of the image or disk that the user calls `name`, that does
/// not open.
pub fn open_hint(name: &Path, path: &Path, error: &Error) -> Option<String> {
    match error {
        Error::Io { source, .. }
            if matches!(
                source.kind(),
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded
            ) =>
        {
            Some(
                "after a crash, a disk needs free space to be opened for writing: free some space \
                 where the disk is; reading it, as with `bcow serve --read-only`, needs none"
                    .to_owned(),
            )
        }
        Error::Format(FormatError::NotBcow) => format_hint(path),
        // There is nothing to find in a file that this program does not know.
        Error::Format(FormatError::Version(_) | FormatError::UnknownFeature { .. }) => None,
        Error::Format(FormatError::Truncated { .. }) => {
            Some("copy it again from where it came, or convert its source again".to_owned())
        }
        Error::Format(_) | Error::BadBlock { .. } | Error::Merkle { .. } => {
            Some(format!("`bcow fsck {}` lists all damage", name.display()))
        }
        _ => None,
    }
}
