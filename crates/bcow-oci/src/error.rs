//! Errors of conversions, exports and copies.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use bcow_erofs::reader::ErofsError;

use crate::cancel::{Cancelled, is_cancellation};
use crate::digest::Digest;
use crate::platform::{Platform, PlatformSyntax};
use crate::text::{listed, quoted};

/// A place in the input. Displays as `layer 2 of 5 (sha256:0123456789ab), entry "a/b"`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TarPlace {
    /// The layer, or the file or blob if the input has no layers.
    pub layer: String,
    /// The name of the entry as the input has it.
    pub entry: Option<Vec<u8>>,
}

impl TarPlace {
    /// The layer as a whole.
    pub(crate) fn layer(name: impl Into<String>) -> Self {
        TarPlace {
            layer: name.into(),
            entry: None,
        }
    }

    /// One entry of the layer.
    pub(crate) fn entry(name: impl Into<String>, entry: &[u8]) -> Self {
        TarPlace {
            layer: name.into(),
            entry: Some(entry.to_vec()),
        }
    }
}

impl fmt::Display for TarPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.entry {
            Some(entry) if self.layer.is_empty() => write!(f, "entry {}", quoted(entry)),
            Some(entry) => write!(f, "{}, entry {}", self.layer, quoted(entry)),
            None => f.write_str(&self.layer),
        }
    }
}

/// The limit that an input exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitKind {
    /// Files, directories and other nodes, over all layers.
    Entries,
    /// Decompressed size over compressed size of one layer.
    Ratio,
    /// Uncompressed bytes over all layers. Holes of sparse files count, because a reader of the
    /// files gets their zeros.
    Bytes,
    /// Memory for names, link targets and extended attributes.
    NameBytes,
    /// Bytes of one path.
    PathBytes,
    /// Extension headers (PAX, GNU) of one tar entry, in bytes.
    ExtensionBytes,
    /// Bytes of the chunks of sparse files, the zeros around their data included.
    SparseFill,
    /// Data runs of one sparse file.
    SparseRuns,
    /// Chunk index entries of all sparse files.
    Chunks,
    /// Size of a JSON document (index, manifest, config).
    DocumentBytes,
    /// Indexes within indexes.
    IndexDepth,
    /// Images in an index.
    Manifests,
    /// Layers of an image.
    Layers,
    /// Members of an archive that holds an image.
    ArchiveMembers,
    /// Memory that decompression needs (zstd window).
    Window,
    /// What EROFS can address: 16 TiB of content.
    AddressSpace,
}

impl LimitKind {
    fn text(self) -> &'static str {
        match self {
            LimitKind::Entries => "entries",
            LimitKind::Ratio => "decompressed bytes per compressed byte",
            LimitKind::Bytes => "uncompressed bytes (holes counted)",
            LimitKind::NameBytes => "bytes of names and extended attributes",
            LimitKind::PathBytes => "bytes of path",
            LimitKind::ExtensionBytes => "bytes of tar extension headers",
            LimitKind::SparseFill => "bytes of blocks around scattered data of sparse files",
            LimitKind::SparseRuns => "data runs of a sparse file",
            LimitKind::Chunks => "chunks of sparse files",
            LimitKind::DocumentBytes => "bytes of a JSON document",
            LimitKind::IndexDepth => "nested image indexes",
            LimitKind::Manifests => "images in an index",
            LimitKind::Layers => "layers",
            LimitKind::ArchiveMembers => "archive members",
            LimitKind::Window => "bytes of decompression window",
            LimitKind::AddressSpace => "bytes of content",
        }
    }
}

/// A value of the input that exceeds a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exceeded {
    pub kind: LimitKind,
    pub value: u64,
    pub allowed: u64,
}

impl Exceeded {
    /// The error of the input at `place`.
    pub(crate) fn at(self, place: TarPlace) -> ConvertError {
        ConvertError::Limit {
            place,
            kind: self.kind,
            value: Some(self.value),
            allowed: self.allowed,
        }
    }
}

/// A failure at an entry. The caller adds the place.
#[derive(Debug)]
pub(crate) enum Unplaced {
    Problem(TarProblem),
    Limit(Exceeded),
    /// This has its own place.
    Other(Box<ConvertError>),
}

impl Unplaced {
    pub(crate) fn at(self, place: TarPlace) -> ConvertError {
        match self {
            Unplaced::Problem(problem) => ConvertError::Tar { place, problem },
            Unplaced::Limit(exceeded) => exceeded.at(place),
            Unplaced::Other(error) => *error,
        }
    }
}

impl From<TarProblem> for Unplaced {
    fn from(problem: TarProblem) -> Self {
        Unplaced::Problem(problem)
    }
}

impl From<Exceeded> for Unplaced {
    fn from(exceeded: Exceeded) -> Self {
        Unplaced::Limit(exceeded)
    }
}

impl From<ConvertError> for Unplaced {
    fn from(error: ConvertError) -> Self {
        Unplaced::Other(error.into())
    }
}

/// Compares a value of the input with its limit.
pub(crate) fn check_limit(kind: LimitKind, value: u64, allowed: u64) -> Result<(), Exceeded> {
    if value > allowed {
        Err(Exceeded {
            kind,
            value,
            allowed,
        })
    } else {
        Ok(())
    }
}

/// Fails if a property of the input, such as its digest, is not the expected one.
pub(crate) fn check_equal<T: PartialEq + ToString>(
    place: &str,
    what: &'static str,
    expected: &T,
    found: &T,
) -> Result<(), ConvertError> {
    if found == expected {
        return Ok(());
    }
    Err(ConvertError::Mismatch {
        place: place.to_owned(),
        what,
        expected: expected.to_string(),
        found: found.to_string(),
    })
}

/// Fails if a size is not the expected one.
pub(crate) fn check_size(place: &str, expected: u64, found: u64) -> Result<(), ConvertError> {
    check_equal(place, "size in bytes", &expected, &found)
}

/// The digest with this text, which the document `place` has.
pub(crate) fn parse_digest(place: &str, text: &str) -> Result<Digest, ConvertError> {
    text.parse().map_err(|problem| {
        let shown: String = text.chars().take(200).collect();
        ConvertError::layout(place, format!("invalid digest {shown:?}: {problem}"))
    })
}

/// A form of container images that was given as a root file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageForm {
    /// The archive of `docker save` and `podman save`.
    DockerArchive,
    /// An OCI image layout, in a directory or an archive.
    OciLayout,
    /// The directory of `skopeo copy ... dir:`.
    SkopeoDirectory,
}

impl ImageForm {
    fn text(self) -> &'static str {
        match self {
            ImageForm::DockerArchive => "a container image written by `docker save`",
            ImageForm::OciLayout => "container images in an OCI image layout",
            ImageForm::SkopeoDirectory => "a container image written by `skopeo copy` to dir:",
        }
    }

    /// How to convert an image that no source argument reads where it is.
    fn advice(self) -> &'static str {
        match self {
            ImageForm::DockerArchive => "write it to a file and use docker-archive:FILE",
            ImageForm::OciLayout => "write it to a file and use oci-archive:FILE",
            ImageForm::SkopeoDirectory => {
                "make a layout of it with `skopeo copy dir:DIR oci:LAYOUT:TAG` and use \
                 oci:LAYOUT:TAG"
            }
        }
    }
}

/// A conversion, an export or a copy failed. It leaves no file at the destination.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The platform does not have the form OS/ARCH[/VARIANT].
    #[error(transparent)]
    PlatformSyntax(#[from] PlatformSyntax),
    /// The destination cannot become an image file.
    #[error("cannot write the image to {}: {problem}", path.display())]
    Destination {
        /// The destination that was given.
        path: PathBuf,
        /// The reason.
        problem: &'static str,
    },
    /// Options that contradict each other or are out of range.
    #[error("{0}")]
    Options(String),
    /// The input could not be read.
    #[error("cannot {action} {what}")]
    Read {
        /// "open", "read", ...
        action: &'static str,
        /// The file, with the layer and entry when there is one.
        what: String,
        /// The host's error.
        source: io::Error,
    },
    /// The output could not be written.
    #[error("cannot {action} {}", path.display())]
    Write {
        /// "write", "create", "sync", ...
        action: &'static str,
        /// The destination.
        path: PathBuf,
        /// The host's error, or the reason why an image cannot be written.
        source: io::Error,
    },
    /// A layout, an archive or a document is invalid: a part is missing, has a wrong form, or does
    /// not fit to the others.
    #[error("{place}: {problem}")]
    Layout {
        /// The file within the layout or archive.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// The name or the platform selects no image, or several.
    #[error("{place} has {found}")]
    Selection {
        /// The layout or archive.
        place: String,
        /// What was found instead of one image.
        found: String,
        /// The images that can be selected.
        hint: Option<String>,
    },
    /// The input is of a kind that bcow does not support or does not accept here, or it lacks a
    /// part that other places have.
    #[error("{text}")]
    Refused {
        /// The input, and why it is refused.
        text: String,
        /// What to do instead.
        hint: Option<&'static str>,
    },
    /// The files are not a root file system: they are a container image.
    #[error("{place} contains {}, not a root file system", form.text())]
    HoldsImage {
        /// The archive or directory.
        place: String,
        /// The form of the image.
        form: ImageForm,
        /// The source argument that converts the image, if bcow supports its form.
        source_text: Option<String>,
    },
    /// The bytes do not have the digest or the size that the document records.
    #[error("{place}: {what} is {found}, expected {expected}")]
    Mismatch {
        /// The blob.
        place: String,
        /// "digest", "diffID" or "size in bytes".
        what: &'static str,
        /// The value in the manifest or configuration.
        expected: String,
        /// The value of the bytes.
        found: String,
    },
    /// A compressed stream does not decompress.
    #[error("{place}: corrupt {format} stream: {problem}")]
    Decompress {
        /// The layer or file.
        place: String,
        /// "gzip" or "zstd".
        format: &'static str,
        /// The decoder's message.
        problem: String,
    },
    /// The tar archive is invalid.
    #[error("{place}: {problem}")]
    Tar {
        /// The layer and the entry.
        place: TarPlace,
        /// What is wrong.
        problem: TarProblem,
    },
    /// The input exceeds a limit.
    #[error(
        "{place}: too many {}: {}the limit is {allowed}",
        kind.text(),
        value.map(|value| format!("{value}, ")).unwrap_or_default()
    )]
    Limit {
        /// The layer and the entry.
        place: TarPlace,
        /// The limit.
        kind: LimitKind,
        /// The value in the input, or a lower bound of it, if known.
        value: Option<u64>,
        /// The largest allowed value.
        allowed: u64,
    },
    /// The written image reads back with different content: a bug of bcow, or a fault of the host's
    /// disk or memory.
    #[error("the written image does not read back as it was written")]
    Verify(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The file system of an image cannot be read.
    #[error("cannot read {}", quoted(path))]
    ReadImage {
        /// Absolute path in the file system.
        path: Vec<u8>,
        /// The cause.
        #[source]
        source: ErofsError,
    },
    /// The archive of an export cannot be written.
    #[error("cannot write the archive")]
    WriteArchive(#[source] io::Error),
    /// An archive cannot represent a property of a file.
    #[error("{}: {problem}", quoted(path))]
    Unrepresentable {
        /// Absolute path in the file system.
        path: Vec<u8>,
        /// The property that cannot be represented.
        problem: String,
    },
    /// The image cannot be exported, for a reason that no file of it has.
    #[error("{0}")]
    Export(String),
    /// The caller cancelled the operation.
    #[error("interrupted")]
    Interrupted,
}

impl From<Cancelled> for ConvertError {
    fn from(_: Cancelled) -> Self {
        ConvertError::Interrupted
    }
}

/// What is wrong with a tar archive or an entry of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum TarProblem {
    #[error("not a tar archive (at byte {offset})")]
    NotTar { offset: u64 },
    #[error("header checksum is {found}, expected {expected} (at byte {offset})")]
    Checksum {
        offset: u64,
        found: u64,
        expected: u64,
    },
    #[error("the archive is truncated: it ends in the middle of {what} (at byte {offset})")]
    Truncated { offset: u64, what: &'static str },
    #[error("the archive is empty: it has no entries and no end-of-archive marker")]
    Empty,
    #[error("no end-of-archive marker (at byte {offset}): the archive may have been cut off")]
    NoEndMarker { offset: u64 },
    #[error("a zero block in the middle of the archive (at byte {offset})")]
    LoneZeroBlock { offset: u64 },
    #[error("bad number in header field {field}")]
    BadNumber { field: &'static str },
    #[error("malformed PAX record: {problem}")]
    BadPax { problem: String },
    #[error("two {what} headers for one entry")]
    DuplicateExtension { what: &'static str },
    #[error("extension headers without an entry")]
    OrphanExtension,
    #[error("malformed sparse map: {problem}")]
    BadSparse { problem: &'static str },
    #[error("unknown entry type {kind:?}")]
    UnknownType { kind: char },
    #[error("multi-volume archives are not supported")]
    MultiVolume,
    #[error("the name is empty")]
    EmptyName,
    #[error("the name contains a zero byte")]
    ZeroInName,
    #[error("the path leads out of the root")]
    ClimbsOut,
    #[error("a name in the path has {bytes} bytes, more than 255")]
    NameTooLong { bytes: usize },
    #[error("the entry for the root is not a directory")]
    RootNotDirectory,
    #[error("{} is not a directory", quoted(parent))]
    ParentNotDirectory { parent: Vec<u8> },
    #[error("too many symbolic links on the way to the parent directory")]
    TooManyLinks,
    #[error("a link without a target")]
    EmptyTarget,
    #[error("the link target has {bytes} bytes, more than 4095")]
    TargetTooLong { bytes: usize },
    #[error("hardlink to {}, which is a directory", quoted(target))]
    LinkToDirectory { target: Vec<u8> },
    #[error("hardlink to {}, which leads out of the root", quoted(target))]
    LinkClimbsOut { target: Vec<u8> },
    #[error("whiteout without a name")]
    BadWhiteout,
    #[error("{field} {value} is out of range")]
    OutOfRange { field: &'static str, value: String },
    #[error("extended attribute {}: {problem}", quoted(name))]
    BadXattr {
        name: Vec<u8>,
        problem: &'static str,
    },
}

impl ConvertError {
    /// An invalid layout, archive or document.
    pub(crate) fn layout(place: impl Into<String>, problem: impl fmt::Display) -> Self {
        ConvertError::Layout {
            place: place.into(),
            problem: problem.to_string(),
        }
    }

    /// An input that is not supported or not accepted.
    pub(crate) fn refused(text: String, hint: &'static str) -> Self {
        let hint = Some(hint);
        ConvertError::Refused { text, hint }
    }

    /// A media type that bcow does not support.
    pub(crate) fn media_type(place: &str, media_type: &str) -> Self {
        let text = format!("{place}: media type {media_type:?} is not supported");
        ConvertError::Refused { text, hint: None }
    }

    /// A blob that its layout or registry does not have.
    pub(crate) fn missing_blob(place: &str, digest: &Digest) -> Self {
        let text = format!("{place}: blob {digest} is missing");
        ConvertError::refused(text, "the layout is incomplete; copy the image again")
    }

    /// A file that changed while it was read.
    pub(crate) fn changed(what: &str) -> Self {
        let text = format!("{what} changed while it was read");
        ConvertError::refused(
            text,
            "convert a snapshot, or stop the program that writes there",
        )
    }

    /// A name that no image has, or several; `available` are the names that there are.
    pub(crate) fn not_one(
        place: String,
        count: usize,
        reference: Option<&str>,
        available: &[String],
    ) -> Self {
        let found = match (count, reference) {
            (0, reference) => format!("no image {:?}", reference.unwrap_or_default()),
            (_, Some(reference)) => format!("several images that match {reference:?}"),
            (_, None) => "several images".to_owned(),
        };
        let hint = (!available.is_empty()).then(|| format!("available: {}", listed(available)));
        ConvertError::Selection { place, found, hint }
    }

    /// A platform that no image of the index is for.
    pub(crate) fn no_platform(place: String, wanted: &Platform, available: &[String]) -> Self {
        let found = format!("no image for platform {wanted}");
        let hint = Some(format!("choose one with --platform: {}", listed(available)));
        ConvertError::Selection { place, found, hint }
    }

    /// A failure of the host to write.
    pub(crate) fn write(action: &'static str, path: &Path, source: io::Error) -> Self {
        if is_cancellation(&source) {
            ConvertError::Interrupted
        } else {
            ConvertError::Write {
                action,
                path: path.to_owned(),
                source,
            }
        }
    }

    /// A failure to read content through a device.
    pub(crate) fn read_through(
        what: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        ConvertError::Read {
            action: "read",
            what: what.to_owned(),
            source: io::Error::other(source),
        }
    }

    /// The file that a full file system has no space for, or the directory of a file without a
    /// name; `None` for any other error.
    pub fn full_path(&self) -> Option<&Path> {
        match self {
            ConvertError::Write { source, path, .. } if is_full(source) => Some(path),
            _ => None,
        }
    }

    /// A hint for the user, if there is one.
    pub fn hint(&self) -> Option<String> {
        use ConvertError as E;
        let hint = match self {
            E::PlatformSyntax(_) => "write OS/ARCH or OS/ARCH/VARIANT, for example linux/arm64",
            E::Selection { hint, .. } => return hint.clone(),
            E::Refused { hint, .. } => (*hint)?,
            E::Mismatch { .. } => "the input was damaged or tampered with; copy the image again",
            E::HoldsImage {
                form, source_text, ..
            } => {
                let instead = match (source_text, form) {
                    (Some(source), _) => format!("use {source}"),
                    (None, form) => form.advice().to_owned(),
                };
                return Some(format!(
                    "{instead}, or --as-files to convert the files as they are"
                ));
            }
            E::Tar {
                problem: TarProblem::NoEndMarker { .. },
                ..
            } => {
                "check the program that wrote it; --allow-truncated accepts the entries that are \
                 there"
            }
            E::Limit { kind, .. } => {
                let option = match kind {
                    LimitKind::Entries => "--max-entries",
                    LimitKind::Ratio => "--max-ratio",
                    LimitKind::Bytes => "--max-size",
                    LimitKind::Window => {
                        let hint = "compress the layer with a window of at most 128 MiB";
                        return Some(format!("{hint} (zstd --long=27)"));
                    }
                    _ => return None,
                };
                return Some(format!(
                    "if you trust the input, raise the limit with {option}"
                ));
            }
            E::Write { source, path, .. } if is_full(source) => {
                let directory = directory_of(path).display();
                return Some(format!(
                    "free space in {directory}; the incomplete file was removed"
                ));
            }
            E::Verify(_) => {
                "this is a bug of bcow, or a fault of the memory or disk of this machine; please \
                 report it"
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

/// The directory that a write to `path` needs space in. Files without names are reported as their
/// directory.
fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        _ if path.is_dir() => path,
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}
