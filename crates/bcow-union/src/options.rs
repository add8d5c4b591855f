//! How a writable mount behaves.

/// When small files that were copied up whole are made durable. Until then a crash leaves them as they are in the image, so no
/// write waits for it. An explicit fsync is always honoured, but for [`SyncPolicy::Volatile`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SyncPolicy {
    /// Each at once.
    #[default]
    Strict,
    /// After so many, or some seconds, all of them together.
    Batch(u32),
    /// Never, not even when a program asks: for uppers that nobody needs after a crash.
    Volatile,
}

/// How sketches are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SketchChoice {
    /// Sparse where the host's file system has holes, packed elsewhere.
    #[default]
    Auto,
    /// Blocks at their own offset of a host file with holes.
    Sparse,
    /// Blocks in the order they were written, in a BCoW file.
    Packed,
}

/// Files up to this size are copied whole by their first write.
pub const SMALL_BYTES: u64 = 64 << 10;

/// The options of a union.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnionOptions {
    /// How sketches are kept.
    pub sketch: SketchChoice,
    /// When copy-ups are made durable.
    pub sync: SyncPolicy,
    /// Most bytes that the upper may store.
    pub size_limit: Option<u64>,
    /// Files up to so many bytes are copied whole.
    pub small_bytes: u64,
    /// Threads that complete blocks in the background.
    pub fillers: usize,
}

impl Default for UnionOptions {
    fn default() -> Self {
        UnionOptions {
            sketch: SketchChoice::default(),
            sync: SyncPolicy::default(),
            size_limit: None,
            small_bytes: SMALL_BYTES,
            fillers: 1,
        }
    }
}
