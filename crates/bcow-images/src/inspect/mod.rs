//! The properties of an image or a disk, and how it is stored.

mod disk;
pub mod resolve;
mod stack;

use std::collections::BTreeMap;

use bcow::format::{BackingEntry, SECTOR_BYTES, State, Use, hex};
use bcow::{Extent, Image, Mapping};
use bcow_erofs::reader::{Filesystem, Superblock};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::error::CommandError;
use crate::image::OpenImage;
use crate::prefetch::Shown;
use crate::stat::full_time;

pub use disk::{ChainFileFacts, DiskFacts};
pub use stack::{LayerFacts, NamedBytes, StackFacts};

/// The properties of an image or a disk, as JSON has them (schema `bcow.inspect/1`).
#[derive(Serialize)]
pub struct ImageFacts {
    #[serde(skip)]
    pub name: String,
    pub schema: &'static str,
    pub format: FormatFacts,
    pub geometry: GeometryFacts,
    pub storage: StorageFacts,
    pub merkle: Option<MerkleFacts>,
    pub backings: Vec<BackingFacts>,
    pub disk: Option<DiskFacts>,
    pub stack: Option<StackFacts>,
    pub erofs: Option<ErofsFacts>,
    pub prefetch: Option<PrefetchFacts>,
    /// The platforms of the other images of the index that leads to this one.
    pub other_platforms: Vec<String>,
    pub metadata: Value,
}

#[derive(Serialize)]
pub struct FormatFacts {
    pub version: u32,
    #[serde(rename = "use")]
    pub purpose: &'static str,
    pub sealed: bool,
    pub generation: u64,
    pub features: Vec<String>,
    pub feature_masks: FeatureMasks,
}

#[derive(Serialize)]
pub struct FeatureMasks {
    pub incompatible: u64,
    pub read_only_compatible: u64,
    pub compatible: u64,
}

#[derive(Serialize)]
pub struct GeometryFacts {
    pub size: u64,
    pub file_bytes: u64,
    pub region_bytes: u64,
    pub regions: u64,
}

/// How the parts of the address space are stored.
#[derive(Default, Serialize)]
pub struct StorageFacts {
    /// Content of files; the largest part of most images.
    pub content: StorageClass,
    /// Inodes, directories, names and small files.
    pub metadata: StorageClass,
    pub root_table_bytes: u32,
    pub json_bytes: u32,
    pub backing_table_bytes: u32,
    pub merkle_tree_bytes: u64,
}

#[derive(Default, Serialize)]
pub struct StorageClass {
    pub bytes: u64,
    pub zero_bytes: u64,
    /// Bytes in other files, in addition to `bytes`.
    pub backing_bytes: u64,
    pub stored_bytes: u64,
    pub raw_blocks: u64,
    pub zstd_blocks: u64,
    #[serde(serialize_with = "values")]
    pub block_sizes: BTreeMap<u64, BlocksOfSize>,
}

#[derive(Default, Serialize)]
pub struct BlocksOfSize {
    pub block_bytes: u64,
    pub blocks: u64,
    pub stored_bytes: u64,
}

fn values<S: Serializer>(map: &BTreeMap<u64, BlocksOfSize>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(map.values())
}

#[derive(Serialize)]
pub struct MerkleFacts {
    pub root: String,
    pub chunk_bytes: u64,
}

#[derive(Serialize)]
pub struct BackingFacts {
    pub name: String,
    pub size: u64,
}

#[derive(Serialize)]
pub struct ErofsFacts {
    pub block_bytes: u32,
    pub blocks: u64,
    pub inodes: u64,
    pub features: Vec<String>,
    pub uuid: String,
    pub volume_name: String,
    pub build_time: String,
}

impl ErofsFacts {
    fn of(superblock: &Superblock) -> Self {
        ErofsFacts {
            block_bytes: superblock.block_bytes,
            blocks: superblock.blocks,
            inodes: superblock.inodes,
            features: superblock.features(),
            uuid: uuid(&superblock.uuid),
            volume_name: String::from_utf8_lossy(&superblock.volume_name).into_owned(),
            build_time: full_time(superblock.build_time),
        }
    }
}

impl StorageClass {
    fn add(&mut self, extent: &Extent) {
        if let Mapping::Backing { .. } = extent.mapping {
            self.backing_bytes += extent.length;
            return;
        }
        self.bytes += extent.length;
        let stored = match extent.mapping {
            Mapping::Raw { stored } | Mapping::Open { stored } => {
                self.raw_blocks += 1;
                stored
            }
            Mapping::Compressed { stored } => {
                self.zstd_blocks += 1;
                stored
            }
            Mapping::Zero | Mapping::Hole | Mapping::Backing { .. } => {
                self.zero_bytes += extent.length;
                return;
            }
        };
        self.stored_bytes += u64::from(stored.bytes);
        // The last block of a region may be shorter; it counts as a whole one.
        let block_bytes = extent.length.next_power_of_two();
        let size = self.block_sizes.entry(block_bytes).or_default();
        size.block_bytes = block_bytes;
        size.blocks += 1;
        size.stored_bytes += u64::from(stored.bytes);
    }

    /// Bytes that are stored, before compression.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.bytes - self.zero_bytes
    }

    pub fn ratio(&self) -> Option<f64> {
        (self.stored_bytes > 0).then(|| self.kept_bytes() as f64 / self.stored_bytes as f64)
    }
}

impl StorageFacts {
    /// Walks the map; after an error, the result covers the part before the error.
    pub(crate) fn measure(
        image: &Image,
        metadata_start: Option<u64>,
    ) -> (StorageFacts, Option<bcow::Error>) {
        // Without content, the block of the superblock holds metadata too.
        let metadata_start = metadata_start.map(|start| match start {
            SECTOR_BYTES => 0,
            start => start,
        });
        let header = image.header();
        let mut storage = StorageFacts {
            root_table_bytes: header.root.bytes,
            json_bytes: header.metadata.bytes,
            backing_table_bytes: header.backings.bytes,
            merkle_tree_bytes: header
                .merkle
                .as_ref()
                .map_or(0, |tree| header.file_bytes.saturating_sub(tree.offset)),
            ..StorageFacts::default()
        };
        for extent in image.extents() {
            match extent {
                Ok(extent) if metadata_start.is_some_and(|start| extent.offset >= start) => {
                    storage.metadata.add(&extent);
                }
                Ok(extent) => storage.content.add(&extent),
                Err(error) => return (storage, Some(error)),
            }
        }
        (storage, None)
    }
}

/// The list of what a start reads.
#[derive(Serialize)]
pub struct PrefetchFacts {
    pub ranges: usize,
    /// In the address space.
    pub bytes: u64,
    /// Of blocks in files, each once.
    pub stored_bytes: u64,
}

impl PrefetchFacts {
    fn of(image: &OpenImage, metadata: &Value) -> Result<Option<Self>, bcow::Error> {
        let Some(list) = Shown::by(image).list(metadata) else {
            return Ok(None);
        };
        let mut stored_bytes = 0;
        list.blocks(&mut |_, stored| stored_bytes += u64::from(stored.bytes))?;
        Ok(Some(PrefetchFacts {
            ranges: list.ranges(),
            bytes: list.bytes(),
            stored_bytes,
        }))
    }
}

impl ImageFacts {
    /// Reads the tables of the image, but not the data. Of a damaged image, this returns what can
    /// be read, and the first failure.
    pub fn examine(image: &OpenImage) -> (Self, Option<CommandError>) {
        let shown = image.path().display();
        let mut failure = None;
        let mut note = |what: &str, error: &(dyn std::error::Error + 'static)| {
            failure.get_or_insert_with(|| {
                CommandError::new(format!("cannot read the {what} of {shown}"))
                    .caused_by(error)
                    .hint(format!("`bcow fsck {shown}` lists all damage"))
            });
        };
        let metadata = image.image().metadata().unwrap_or_else(|error| {
            note("metadata", &error);
            Value::Null
        });
        let metadata_start = metadata["content"]["metadata_start"].as_u64();
        let (storage, error) = StorageFacts::measure(image.image(), metadata_start);
        if let Some(error) = error {
            note("map", &error);
        }
        let prefetch = PrefetchFacts::of(image, &metadata).unwrap_or_else(|error| {
            note("list of what a start reads", &error);
            None
        });
        let disk = DiskFacts::of(image);
        let erofs = match Filesystem::open(image.image().clone()) {
            Ok(filesystem) => Some(ErofsFacts::of(filesystem.superblock())),
            // A disk has any content.
            Err(_) if disk.is_some() => None,
            Err(error) => {
                note("file system", &error);
                None
            }
        };
        let (stack, stack_failure) = if image.opened().is_stack() {
            let (stack, failure) = StackFacts::examine(image.opened(), &metadata);
            (Some(stack), failure)
        } else {
            (None, None)
        };
        let facts = ImageFacts {
            disk,
            stack,
            erofs,
            prefetch,
            metadata,
            ..ImageFacts::of_header(image, storage)
        };
        (facts, failure.or(stack_failure))
    }

    /// What the header says, and how the file is stored.
    fn of_header(image: &OpenImage, storage: StorageFacts) -> Self {
        let header = image.image().header();
        let features = &header.features;
        let backing = |entry: &BackingEntry| BackingFacts {
            name: entry.name.to_string(),
            size: entry.size,
        };
        ImageFacts {
            name: image.path().display().to_string(),
            schema: "bcow.inspect/1",
            format: FormatFacts {
                version: 1,
                purpose: match header.purpose {
                    Use::Image => "image",
                    Use::Disk => "disk",
                    Use::Partial => "sketch",
                },
                sealed: header.state == State::Sealed,
                generation: header.generation,
                features: features.names(),
                feature_masks: FeatureMasks {
                    incompatible: features.incompatible,
                    read_only_compatible: features.read_only_compatible,
                    compatible: features.compatible,
                },
            },
            geometry: GeometryFacts {
                size: header.size,
                file_bytes: header.file_bytes,
                region_bytes: 1 << header.region_shift,
                regions: header.size.div_ceil(1 << header.region_shift),
            },
            storage,
            merkle: header.merkle.as_ref().map(|tree| MerkleFacts {
                root: format!("sha256:{}", hex(&tree.root)),
                chunk_bytes: 1 << tree.chunk_shift,
            }),
            backings: image.image().backings().map(backing).collect(),
            disk: None,
            stack: None,
            erofs: None,
            prefetch: None,
            other_platforms: Vec::new(),
            metadata: Value::Null,
        }
    }
}

fn uuid(bytes: &[u8; 16]) -> String {
    let groups = [0..4, 4..6, 6..8, 8..10, 10..16];
    groups.map(|group| hex(&bytes[group])).join("-")
}
