//! Errors of invalid BCoW files.

/// A violated rule of the specification. [`FormatError::code`] returns the stable code of spec
/// section 12.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// No slot has the magic number.
    #[error("not a BCoW file (no magic in the first 1024 bytes)")]
    NotBcow,
    /// A slot has another version.
    #[error("BCoW version {0}; this program reads version 1")]
    Version(u16),
    /// Both header slots are damaged.
    #[error("both header slots are damaged (checksum)")]
    HeaderChecksum,
    /// A header field violates a rule.
    #[error("header field {field}: {problem}")]
    HeaderField {
        /// Field name as in spec section 3.
        field: &'static str,
        /// The problem with its value.
        problem: String,
    },
    /// An unknown incompatible feature bit.
    #[error("unknown incompatible feature bit {bit}; a newer program is needed")]
    UnknownFeature {
        /// The lowest unknown bit.
        bit: u32,
    },
    /// A feature of version 1 that this program does not support yet.
    #[error("feature `{0}` is not supported yet")]
    UnsupportedFeature(&'static str),
    /// The file is shorter than the header says.
    #[error("the file is {found} bytes long, its header says {expected}: it was cut short")]
    Truncated {
        /// `file_bytes` of the header.
        expected: u64,
        /// Actual length of the file in bytes.
        found: u64,
    },
    /// The checksum of a section differs from the one in the header.
    #[error("{section}: checksum is {found:#010x}, the header says {expected:#010x}")]
    SectionChecksum {
        /// The section.
        section: SectionKind,
        /// CRC32C from the header.
        expected: u32,
        /// CRC32C of the bytes.
        found: u32,
    },
    /// A root entry violates a rule.
    #[error("root entry {region}: {problem}")]
    RootEntry {
        /// Index in the root table.
        region: u64,
        /// The problem.
        problem: String,
    },
    /// The checksum of a sub-block table differs from the one in its root entry.
    #[error(
        "sub-block table of region {region}: checksum is {found:#010x}, \
         the root table says {expected:#010x}"
    )]
    TableChecksum {
        /// Index of the region.
        region: u64,
        /// CRC32C from the root entry.
        expected: u32,
        /// CRC32C of the bytes.
        found: u32,
    },
    /// The header of a sub-block table violates a rule.
    #[error("sub-block table of region {region}: {problem}")]
    TableHeader {
        /// Index of the region.
        region: u64,
        /// The problem.
        problem: String,
    },
    /// An entry of a sub-block table violates a rule.
    #[error("sub-block table of region {region}, entry {index}: {problem}")]
    TableEntry {
        /// Index of the region.
        region: u64,
        /// Index in the table.
        index: u64,
        /// The problem.
        problem: String,
    },
    /// A window or fragment of the root table exceeds its backing or its region, or refers to a
    /// backing that does not exist.
    #[error("root entry {region}: {problem}")]
    WindowRange {
        /// Index of the region.
        region: u64,
        /// The problem.
        problem: String,
    },
    /// An entry of the backing table violates a rule.
    #[error("backing table entry {index}: {problem}")]
    BackingEntry {
        /// Index in the backing table.
        index: u32,
        /// The problem.
        problem: String,
    },
    /// A log record with a valid checksum violates a rule, or a record is damaged that was durable.
    #[error("record {sequence}: {problem}")]
    Record {
        /// The sequence number of the record.
        sequence: u64,
        /// The problem.
        problem: String,
    },
    /// The checksum of the free list differs from the one in the header, or the list violates a
    /// rule.
    #[error("free list: {0}")]
    FreeList(String),
    /// The metadata is not a JSON object.
    #[error("metadata: {0}")]
    MetadataJson(String),
}

/// A section to which the header refers with an offset and a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SectionKind {
    /// The root table.
    Root,
    /// The metadata.
    Metadata,
    /// The backing table.
    Backing,
}

impl std::fmt::Display for SectionKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SectionKind::Root => "root table",
            SectionKind::Metadata => "metadata",
            SectionKind::Backing => "backing table",
        })
    }
}

/// A rule of a structure. The caller of its decoder adds the place to the problem.
pub(crate) fn require(holds: bool, problem: impl std::fmt::Display) -> Result<(), String> {
    if holds { Ok(()) } else { Err(problem.to_string()) }
}

impl FormatError {
    /// The stable error code of spec section 12.
    pub fn code(&self) -> &'static str {
        match self {
            FormatError::NotBcow => "not-bcow",
            FormatError::Version(_) => "version",
            FormatError::HeaderChecksum => "header-crc",
            FormatError::HeaderField { .. } => "header-field",
            FormatError::UnknownFeature { .. } | FormatError::UnsupportedFeature(_) => {
                "unknown-feature"
            }
            FormatError::Truncated { .. } => "truncated",
            FormatError::SectionChecksum { section, .. } => match section {
                SectionKind::Root => "root-crc",
                SectionKind::Metadata => "metadata-crc",
                SectionKind::Backing => "backing-crc",
            },
            FormatError::RootEntry { .. } => "root-entry",
            FormatError::TableChecksum { .. } => "table-crc",
            FormatError::TableHeader { .. } => "table-header",
            FormatError::TableEntry { .. } => "table-entry",
            FormatError::WindowRange { .. } => "window-range",
            FormatError::BackingEntry { .. } => "backing-entry",
            FormatError::Record { .. } => "record",
            FormatError::FreeList(_) => "free-list",
            FormatError::MetadataJson(_) => "metadata-json",
        }
    }
}
