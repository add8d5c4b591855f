//! What can go wrong in a conversion, kept apart by what a caller would do about it.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::digest::Digest;
use crate::options::Platform;

/// What sort of failure it is; the command picks its exit code by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The input is broken: it contradicts itself, its digests, or the formats it claims to be in.
    Invalid,
    /// The input is well-formed as far as one can see, but uses something bcow does not know.
    Unsupported,
    /// The host failed to read or write.
    Io,
    /// The input exceeds a limit that guards memory, time or space.
    Limit,
    /// The caller asked for something that makes no sense.
    Usage,
    /// The caller asked to stop.
    Interrupted,
}

/// Where in the input something is wrong. Displays as `layer 2 of 5 (sha256:0123456789ab), entry "a/b"`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// The layer, or the file or blob if the input has no layers.
    pub layer: String,
    /// The entry's name as the input has it.
    pub entry: Option<Vec<u8>>,
}

impl Place {
    /// The layer as a whole.
    pub(crate) fn layer(name: impl Into<String>) -> Self {
        Place {
            layer: name.into(),
            entry: None,
        }
    }

    /// One entry of it.
    pub(crate) fn entry(name: impl Into<String>, entry: &[u8]) -> Self {
        Place {
            layer: name.into(),
            entry: Some(entry.to_vec()),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.entry {
            Some(entry) if self.layer.is_empty() => write!(f, "entry {}", quoted(entry)),
            Some(entry) => write!(f, "{}, entry {}", self.layer, quoted(entry)),
            None => f.write_str(&self.layer),
        }
    }
}

/// A name from the input in double quotes: escaped, so that it cannot drive a terminal, and cut to
/// a length that leaves the message readable.
pub(crate) fn quoted(name: &[u8]) -> String {
    const SHOWN: usize = 120;
    let shown = &name[..name.len().min(SHOWN)];
    let mut text = String::with_capacity(shown.len() + 2);
    text.push('"');
    for chunk in shown.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '"' | '\\' => {
                    text.push('\\');
                    text.push(c);
                }
                c if c.is_control() => text.extend(c.escape_default()),
                c => text.push(c),
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    if name.len() > SHOWN {
        text.push_str(&format!("...\" ({} bytes)", name.len()));
    } else {
        text.push('"');
    }
    text
}

/// Which guard a hostile or very large input ran into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitKind {
    /// Files, directories and other nodes, over all layers.
    Entries,
    /// Decompressed size over compressed size of one layer.
    Ratio,
    /// Uncompressed bytes over all layers; the holes of sparse files count, as who reads the files gets them.
    Bytes,
    /// Memory for names, link targets and extended attributes.
    NameBytes,
    /// Bytes of one path.
    PathBytes,
    /// Extension headers (PAX, GNU) of one tar entry, in bytes.
    ExtensionBytes,
    /// Bytes of the blocks around the scattered data of sparse files.
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

/// What holds container images and was given as a root file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageForm {
    /// What `docker save` and `podman save` write.
    DockerArchive,
    /// An OCI image layout, in a directory or an archive.
    OciLayout,
    /// What `skopeo copy ... dir:` writes.
    SkopeoDirectory,
}

/// Failure of a conversion. Nothing is left behind at the destination.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The source is not written as bcow expects.
    #[error("{text:?} is no source: {problem}")]
    SourceSyntax {
        /// What was given.
        text: String,
        /// Why it is none.
        problem: &'static str,
    },
    /// The source is a path alone, which could be anything.
    #[error("{text:?} is no source: missing transport")]
    MissingTransport {
        /// What was given.
        text: String,
    },
    /// The platform is not written as OS/ARCH[/VARIANT].
    #[error("{text:?} is no platform")]
    PlatformSyntax {
        /// What was given.
        text: String,
    },
    /// The destination cannot become an image file.
    #[error("cannot write the image to {}: {problem}", path.display())]
    Destination {
        /// What was given.
        path: PathBuf,
        /// Why it cannot.
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
    /// The layout or archive lacks something or has something in the wrong form.
    #[error("{place}: {problem}")]
    Layout {
        /// The file within the layout or archive.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// No image of that name.
    #[error("{place} has no image {reference:?}")]
    NoSuchReference {
        /// The layout or archive.
        place: String,
        /// What was asked for.
        reference: String,
        /// What there is.
        available: Vec<String>,
    },
    /// No name given and several images, or one name for several images.
    #[error("{place} has several images{}", match reference { Some(r) => format!(" that match {r:?}"), None => String::new() })]
    AmbiguousReference {
        /// The layout or archive.
        place: String,
        /// What was asked for, if anything.
        reference: Option<String>,
        /// What there is.
        available: Vec<String>,
    },
    /// The image is not made for the platform.
    #[error("{place} has no image for platform {wanted}")]
    NoSuchPlatform {
        /// The layout or archive.
        place: String,
        /// What was asked for, or the host's.
        wanted: Box<Platform>,
        /// What there is.
        available: Vec<String>,
    },
    /// A media type bcow does not know.
    #[error("{place}: media type {media_type:?} is not supported")]
    MediaType {
        /// The blob.
        place: String,
        /// Its media type.
        media_type: String,
    },
    /// The files are not those of a root file system: they hold an image.
    #[error("{place}: it holds {}, and is no root file system itself", match form {
        ImageForm::DockerArchive => "a container image, as `docker save` writes it",
        ImageForm::OciLayout => "container images, as an OCI image layout",
        ImageForm::SkopeoDirectory => "a container image, as `skopeo copy` writes it to dir:",
    })]
    HoldsImage {
        /// The archive or directory.
        place: String,
        /// What it is instead.
        form: ImageForm,
        /// How it is a source, if it is one.
        source_text: Option<String>,
    },
    /// What is to be converted was converted before.
    #[error("{place} is a BCoW image already")]
    AlreadyConverted {
        /// The manifest.
        place: String,
    },
    /// The new image would have the name of the one it is made of, in the same layout.
    #[error("the image would take the name {reference:?} in {} from the one it is made of", path.display())]
    ReplacesSource {
        /// The layout.
        path: PathBuf,
        /// The name.
        reference: String,
    },
    /// Compression of a kind bcow does not know.
    #[error("{place}: {compression} compression is not supported")]
    Compression {
        /// The layer or file.
        place: String,
        /// Its name.
        compression: &'static str,
    },
    /// A string that should be a digest is none.
    #[error("{place}: {text:?} is no digest: {problem}")]
    DigestSyntax {
        /// Where it stands.
        place: String,
        /// The string.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A blob that is referred to is not there.
    #[error("{place}: blob {digest} is missing")]
    MissingBlob {
        /// What refers to it.
        place: String,
        /// Its digest.
        digest: Digest,
        /// The descriptor says where it could be had from (a foreign layer).
        foreign: bool,
    },
    /// Bytes that do not hash to what refers to them says.
    #[error("{place}: {what} is {found}, expected {expected}")]
    DigestMismatch {
        /// The blob.
        place: String,
        /// "digest" or "diffID".
        what: &'static str,
        /// What the manifest or config says.
        expected: Digest,
        /// What the bytes hash to.
        found: Digest,
    },
    /// A blob of another size than its descriptor says.
    #[error("{place}: the manifest says {expected} bytes, there are {found}")]
    SizeMismatch {
        /// The blob.
        place: String,
        /// What the descriptor says.
        expected: u64,
        /// What there is.
        found: u64,
    },
    /// A compressed stream that does not decompress.
    #[error("{place}: corrupt {format} stream: {problem}")]
    Decompress {
        /// The layer or file.
        place: String,
        /// "gzip" or "zstd".
        format: &'static str,
        /// What the decoder says.
        problem: String,
    },
    /// A tar archive that is no valid tar archive.
    #[error("{place}: {problem}")]
    Tar {
        /// Layer and entry.
        place: Place,
        /// What is wrong.
        problem: TarProblem,
    },
    /// The input is larger, deeper or more than allowed.
    #[error("{place}: too many {}: {}at most {allowed} are allowed", kind.text(), match value { Some(v) => format!("{v}, "), None => String::new() })]
    Limit {
        /// Layer and entry.
        place: Place,
        /// Which limit.
        kind: LimitKind,
        /// What the input has (at least), if that is known.
        value: Option<u64>,
        /// What is allowed.
        allowed: u64,
    },
    /// A layer does not fit onto the layers below it.
    #[error("{place}: {problem}")]
    Tree {
        /// The layer, or the merged tree.
        place: String,
        /// What does not fit, with the path.
        problem: bcow_erofs::tree::TreeError,
    },
    /// A file changed while it was read.
    #[error("{what} changed while it was read")]
    Changed {
        /// The file.
        what: String,
    },
    /// Writing the image failed for another reason than the host's I/O.
    #[error("cannot write {}", path.display())]
    Image {
        /// The destination.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The written image does not read back as what was put in. Our bug, or the host's disk or memory.
    #[error("the written image does not read back as it was written")]
    Verify(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The caller asked to stop.
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
    #[error("there is nothing in it, not even the end-of-archive marker")]
    Empty,
    #[error("no end-of-archive marker (at byte {offset}): the archive may have been cut off")]
    NoEndMarker { offset: u64 },
    #[error("a zero block stands in the middle of the archive (at byte {offset})")]
    LoneZeroBlock { offset: u64 },
    #[error("bad number in header field {field}")]
    BadNumber { field: &'static str },
    #[error("malformed PAX record: {problem}")]
    BadPax { problem: String },
    #[error("two {what} headers for one entry")]
    DuplicateExtension { what: &'static str },
    #[error("extension headers without an entry to belong to")]
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
    #[error("the path climbs out of the root")]
    ClimbsOut,
    #[error("a name in the path has {bytes} bytes, at most 255 are possible")]
    NameTooLong { bytes: usize },
    #[error("the root is no directory here")]
    RootNotDirectory,
    #[error("{} is no directory", quoted(parent))]
    ParentNotDirectory { parent: Vec<u8> },
    #[error("too many symbolic links on the way to the parent directory")]
    TooManyLinks,
    #[error("a link without a target")]
    EmptyTarget,
    #[error("the link target has {bytes} bytes, at most 4095 are possible")]
    TargetTooLong { bytes: usize },
    #[error("hardlink to {}, which is a directory", quoted(target))]
    LinkToDirectory { target: Vec<u8> },
    #[error("hardlink to {}, which is not there", quoted(target))]
    LinkToNothing { target: Vec<u8> },
    #[error("hardlink to {}, which climbs out of the root", quoted(target))]
    LinkClimbsOut { target: Vec<u8> },
    #[error("whiteout of nothing")]
    BadWhiteout,
    #[error("{field} {value} does not fit")]
    OutOfRange { field: &'static str, value: String },
    #[error("extended attribute {}: {problem}", quoted(name))]
    BadXattr {
        name: Vec<u8>,
        problem: &'static str,
    },
}

impl ConvertError {
    /// What sort of failure it is.
    pub fn kind(&self) -> ErrorKind {
        use ConvertError as E;
        match self {
            E::SourceSyntax { .. }
            | E::MissingTransport { .. }
            | E::PlatformSyntax { .. }
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
            E::MediaType { .. } | E::Compression { .. } | E::AlreadyConverted { .. } => {
                ErrorKind::Unsupported
            }
            E::ReplacesSource { .. } | E::HoldsImage { .. } => ErrorKind::Usage,
            E::Limit { .. } => ErrorKind::Limit,
            E::Interrupted => ErrorKind::Interrupted,
        }
    }

    /// What the user could do about it, if there is something.
    pub fn hint(&self) -> Option<String> {
        use ConvertError as E;
        let hint = match self {
            E::SourceSyntax { .. } | E::MissingTransport { .. } => "sources are oci:DIR[:REF], oci-archive:FILE[:REF], docker-archive:FILE[:REF], tar:FILE, tar:-, dir:PATH, raw:FILE and qcow2:FILE".into(),
            E::PlatformSyntax { .. } => "write OS/ARCH or OS/ARCH/VARIANT, for example linux/arm64".into(),
            E::NoSuchReference { available, .. } | E::AmbiguousReference { available, .. } => {
                if available.is_empty() {
                    return None;
                }
                format!("there is: {}", listed(available))
            }
            E::NoSuchPlatform { available, .. } => format!("choose one with --platform: {}", listed(available)),
            E::MissingBlob { foreign: true, .. } => "the layer is a foreign one, which its registry does not pass on; put the blob into the layout".into(),
            E::MissingBlob { .. } => "the layout is incomplete; copy the image again".into(),
            E::DigestMismatch { .. } | E::SizeMismatch { .. } => "the input was damaged or tampered with; copy the image again".into(),
            E::AlreadyConverted { .. } => "`bcow export --to oci:DIR` makes an ordinary image of it; one in an archive is read once `skopeo copy` has put it into oci:DIR".into(),
            E::HoldsImage { form, source_text, .. } => {
                let instead = match (source_text, form) {
                    (Some(source), _) => format!("name it {source}"),
                    (None, ImageForm::SkopeoDirectory) => {
                        "make a layout of it with `skopeo copy dir:DIR oci:LAYOUT:TAG` and name that oci:LAYOUT:TAG".into()
                    }
                    (None, ImageForm::DockerArchive) => {
                        "write it to a file and name that docker-archive:FILE".into()
                    }
                    (None, ImageForm::OciLayout) => "write it to a file and name that oci-archive:FILE".into(),
                };
                format!("{instead}; with --as-files its files are taken as they are")
            }
            E::Tar { problem: TarProblem::NoEndMarker { .. }, .. } => {
                "look at what writes it; --allow-truncated takes the entries that there are".into()
            }
            E::ReplacesSource { .. } => "give it another name, or another layout".into(),
            E::Compression { compression, .. } if compression.starts_with("whole-archive") => {
                "decompress the archive first; its layers may stay compressed".into()
            }
            E::Limit { kind, .. } => match kind {
                LimitKind::Entries => "if you trust the input, raise it with --max-entries".into(),
                LimitKind::Ratio => "if you trust the input, raise it with --max-ratio".into(),
                LimitKind::Bytes => "if you trust the input, raise it with --max-size".into(),
                LimitKind::Window => "compress the layer with a window of at most 128 MiB (zstd --long=27)".into(),
                _ => return None,
            },
            E::Write { source, path, .. } if is_full(source) => {
                let directory = match path.parent() {
                    Some(p) if !p.as_os_str().is_empty() => p.display().to_string(),
                    _ => ".".into(),
                };
                format!("make room in {directory}; nothing was left there")
            }
            E::Changed { .. } => "convert a snapshot, or stop what writes there".into(),
            E::Verify(_) => "this is a bug in bcow, or the memory or disk of this machine; please report it".into(),
            _ => return None,
        };
        Some(hint)
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

fn listed(items: &[String]) -> String {
    const SHOWN: usize = 20;
    let mut text = items[..items.len().min(SHOWN)].join(", ");
    if items.len() > SHOWN {
        text.push_str(&format!(", and {} more", items.len() - SHOWN));
    }
    text
}
