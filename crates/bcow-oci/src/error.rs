//! Errors of a conversion, one variant for each reaction of a caller.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::cancel::is_cancellation;
use crate::digest::Digest;
use crate::platform::{Platform, PlatformSyntax};
use crate::text::{listed, quoted};

/// The class of an error; the command derives its exit code from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The input is corrupt: it contradicts itself, its digests, or its format.
    Invalid,
    /// The input seems valid, but uses a feature that bcow does not support.
    Unsupported,
    /// The host failed to read or write.
    Io,
    /// The input exceeds a limit on memory, time or space.
    Limit,
    /// The request is invalid or contradictory.
    Usage,
    /// The caller cancelled the operation.
    Interrupted,
}

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

/// Fails if a digest is not the expected one.
pub(crate) fn check_digest(
    place: &str,
    what: &'static str,
    expected: &Digest,
    found: &Digest,
) -> Result<(), ConvertError> {
    if found == expected {
        return Ok(());
    }
    Err(ConvertError::DigestMismatch {
        place: place.to_owned(),
        what,
        expected: expected.clone(),
        found: found.clone(),
    })
}

/// Fails if a size is not the expected one.
pub(crate) fn check_size(place: &str, expected: u64, found: u64) -> Result<(), ConvertError> {
    if found == expected {
        return Ok(());
    }
    let place = place.to_owned();
    Err(ConvertError::SizeMismatch {
        place,
        expected,
        found,
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

/// A conversion failed. It leaves no file at the destination.
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
        /// The host's error.
        source: io::Error,
    },
    /// The layout or archive lacks a part, or a part has a wrong form.
    #[error("{place}: {problem}")]
    Layout {
        /// The file within the layout or archive.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// The layout or archive has no image of this name.
    #[error("{place} has no image {reference:?}")]
    NoSuchReference {
        /// The layout or archive.
        place: String,
        /// The name that was asked for.
        reference: String,
        /// The names that there are.
        available: Vec<String>,
    },
    /// No name was given and there are several images, or several images match the name.
    #[error(
        "{place} has several images{}",
        optional(reference.as_ref(), |name| format!(" that match {name:?}"))
    )]
    AmbiguousReference {
        /// The layout or archive.
        place: String,
        /// The name that was asked for, if one was given.
        reference: Option<String>,
        /// The names that there are.
        available: Vec<String>,
    },
    /// There is no image for the platform.
    #[error("{place} has no image for platform {wanted}")]
    NoSuchPlatform {
        /// The layout or archive.
        place: String,
        /// The platform that was asked for, or the host's.
        wanted: Box<Platform>,
        /// The platforms that there are.
        available: Vec<String>,
    },
    /// bcow does not support the media type.
    #[error("{place}: media type {media_type:?} is not supported")]
    MediaType {
        /// The blob.
        place: String,
        /// The media type of the blob.
        media_type: String,
    },
    /// The image is not in BCoW form.
    #[error("{place} is an ordinary OCI image")]
    NotBcow {
        /// The manifest.
        place: String,
    },
    /// The file has no Merkle tree.
    #[error("{place} has no Merkle tree, without which a copy cannot be checked")]
    NoTree {
        /// The file.
        place: String,
    },
    /// The manifest does not have the root hash of a file.
    #[error("{place}: the manifest has no root hash for it")]
    NoRoot {
        /// The file.
        place: String,
    },
    /// The manifest has Docker's first form.
    #[error("{place} is in Docker's schema 1, which is obsolete and not supported")]
    SchemaOne {
        /// The image.
        place: String,
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
    /// The source is a BCoW image already.
    #[error("{place} is a BCoW image already")]
    AlreadyConverted {
        /// The manifest.
        place: String,
    },
    /// The new image would take the name of its source, in the same layout.
    #[error("the new image would replace its source {reference:?} in {}", path.display())]
    ReplacesSource {
        /// The layout.
        path: PathBuf,
        /// The name.
        reference: String,
    },
    /// bcow does not support the compression.
    #[error("{place}: {compression} compression is not supported")]
    Compression {
        /// The layer or file.
        place: String,
        /// The name of the compression.
        compression: &'static str,
    },
    /// A string that must be a digest is invalid.
    #[error("{place}: invalid digest {text:?}: {problem}")]
    DigestSyntax {
        /// The document that has the string.
        place: String,
        /// The string.
        text: String,
        /// What is wrong with the string.
        problem: &'static str,
    },
    /// A blob that a document refers to is missing.
    #[error("{place}: blob {digest} is missing")]
    MissingBlob {
        /// The document that refers to the blob.
        place: String,
        /// The digest of the blob.
        digest: Digest,
        /// Whether the descriptor gives addresses to download the blob from (a foreign layer).
        foreign: bool,
    },
    /// The bytes do not have the digest that the document records.
    #[error("{place}: {what} is {found}, expected {expected}")]
    DigestMismatch {
        /// The blob.
        place: String,
        /// "digest" or "diffID".
        what: &'static str,
        /// The digest in the manifest or configuration.
        expected: Digest,
        /// The digest of the bytes.
        found: Digest,
    },
    /// The size of the blob differs from that in its descriptor.
    #[error("{place}: size in bytes is {found}, expected {expected}")]
    SizeMismatch {
        /// The blob.
        place: String,
        /// The size in the descriptor.
        expected: u64,
        /// The size of the blob.
        found: u64,
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
        optional(value.as_ref(), |value| format!("{value}, "))
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
    /// A layer does not fit onto the layers below it.
    #[error("{place}: {problem}")]
    Tree {
        /// The layer, or the merged tree.
        place: String,
        /// The conflict, with its path.
        problem: bcow_erofs::tree::TreeError,
    },
    /// A file changed while it was read.
    #[error("{what} changed while it was read")]
    Changed {
        /// The file.
        what: String,
    },
    /// The image could not be written, for a reason other than the host's I/O.
    #[error("cannot write {}", path.display())]
    Image {
        /// The destination.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The written image reads back with different content: a bug of bcow, or a fault of the host's
    /// disk or memory.
    #[error("the written image does not read back as it was written")]
    Verify(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The caller cancelled the operation.
    #[error("interrupted")]
    Interrupted,
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

    /// A failure of the host to write.
    /// A blob that its layout or registry does not have.
    pub(crate) fn missing_blob(place: impl Into<String>, digest: &Digest) -> Self {
        ConvertError::MissingBlob {
            place: place.into(),
            digest: digest.clone(),
            foreign: false,
        }
    }

    /// A tree that cannot be written.
    pub(crate) fn tree(place: impl Into<String>, problem: bcow_erofs::tree::TreeError) -> Self {
        let place = place.into();
        ConvertError::Tree { place, problem }
    }

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

    /// The class of this error.
    pub fn kind(&self) -> ErrorKind {
        use ConvertError as E;
        match self {
            E::PlatformSyntax(_)
            | E::Destination { .. }
            | E::Options(_)
            | E::NoSuchReference { .. }
            | E::AmbiguousReference { .. }
            | E::NoSuchPlatform { .. } => ErrorKind::Usage,
            E::Read { .. } | E::Write { .. } | E::Changed { .. } | E::Verify(_) => ErrorKind::Io,
            E::Image { .. } => ErrorKind::Unsupported,
            E::Layout { .. }
            | E::DigestSyntax { .. }
            | E::MissingBlob { .. }
            | E::DigestMismatch { .. }
            | E::SizeMismatch { .. }
            | E::Decompress { .. }
            | E::Tree { .. } => ErrorKind::Invalid,
            E::Tar { problem, .. } => match problem {
                TarProblem::UnknownType { .. } | TarProblem::MultiVolume => ErrorKind::Unsupported,
                _ => ErrorKind::Invalid,
            },
            E::MediaType { .. }
            | E::SchemaOne { .. }
            | E::NotBcow { .. }
            | E::NoTree { .. }
            | E::NoRoot { .. }
            | E::Compression { .. }
            | E::AlreadyConverted { .. } => ErrorKind::Unsupported,
            E::ReplacesSource { .. } | E::HoldsImage { .. } => ErrorKind::Usage,
            E::Limit { .. } => ErrorKind::Limit,
            E::Interrupted => ErrorKind::Interrupted,
        }
    }

    /// A hint for the user, if there is one.
    pub fn hint(&self) -> Option<String> {
        use ConvertError as E;
        let hint = match self {
            E::PlatformSyntax(_) => "write OS/ARCH or OS/ARCH/VARIANT, for example linux/arm64",
            E::NoSuchReference { available, .. } | E::AmbiguousReference { available, .. } => {
                let names = (!available.is_empty()).then(|| listed(available))?;
                return Some(format!("available: {names}"));
            }
            E::NoSuchPlatform { available, .. } => {
                let platforms = listed(available);
                return Some(format!("choose one with --platform: {platforms}"));
            }
            E::NotBcow { .. } => {
                "`bcow convert` makes a BCoW image of it; `skopeo copy` copies ordinary images"
            }
            E::NoTree { .. } => "`bcow seal` makes a disk immutable, with a Merkle tree",
            E::NoRoot { .. } => {
                "an earlier version of bcow wrote the manifest; `skopeo copy` copies the image"
            }
            E::SchemaOne { .. } => {
                "push the image again with a current tool; `skopeo copy --format oci` converts it"
            }
            E::MissingBlob { foreign: true, .. } => {
                "registries do not distribute foreign layers; put the blob into the layout"
            }
            E::MissingBlob { .. } => "the layout is incomplete; copy the image again",
            E::DigestMismatch { .. } | E::SizeMismatch { .. } => {
                "the input was damaged or tampered with; copy the image again"
            }
            E::AlreadyConverted { .. } => {
                "`bcow export --to oci:DIR` makes an ordinary image of it; copy an image in an \
                 archive to oci:DIR with `bcow copy` first"
            }
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
            E::ReplacesSource { .. } => "choose another name, or another layout",
            E::Compression { .. } => "decompress it, or compress it with gzip or zstd",
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
            E::Changed { .. } => "convert a snapshot, or stop the program that writes there",
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

/// The text of an optional part of a message.
fn optional<T>(value: Option<&T>, text: impl FnOnce(&T) -> String) -> String {
    value.map(text).unwrap_or_default()
}
