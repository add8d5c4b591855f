//! Layouts: how a new file is cut into blocks.

use bcow_format::BlockShift;
use serde_json::Value;

/// How the address space of a file is cut into blocks (BAOverlay, section 3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// Two levels. The first write into a region selects the block size of the region: 64 KiB for a
    /// write of at least 128 KiB, else 4 KiB.
    #[default]
    Auto,
    /// One level of at most 1024 blocks: 4 KiB in a file of 4 MiB, 4 MiB in one of 4 GiB. From 16
    /// GiB on, the blocks have 16 MiB, and there are more. There are few entries and no tables to
    /// look up, but a small write over a backing copies more.
    Performance,
    /// Two levels, with blocks of 4 KiB in regions of 4 MiB: a small write takes 4 KiB of space.
    Space,
}

impl Layout {
    /// The name of the layout in `bcow create --layout` and in the metadata of the file.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Auto => "auto",
            Layout::Performance => "performance",
            Layout::Space => "space",
        }
    }

    /// The layout with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Layout::Auto, Layout::Performance, Layout::Space]
            .into_iter()
            .find(|layout| layout.name() == name)
    }

    /// The layout and the block size with which a file was created, if its metadata has them. They
    /// may contradict the header, because the metadata is not checked.
    pub(crate) fn recorded(metadata: &Value) -> (Option<Self>, Option<BlockShift>) {
        let options = &metadata["options"];
        let layout = options["layout"].as_str().and_then(Layout::from_name);
        let bytes = options["block_size"].as_u64();
        let bytes = bytes.and_then(|bytes| u32::try_from(bytes).ok());
        (layout, bytes.and_then(BlockShift::from_bytes))
    }
}
