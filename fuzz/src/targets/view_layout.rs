//! Any bytes as an EROFS image of which a view is made. A view that can be made can be read.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use bcow_erofs::reader::Filesystem;
use bcow_ext4::Sink;
use bcow_view::{BLOCK_BYTES, Options, View, lay_out};

use super::ext4_read::{Blocks, read_all};

const OPTIONS: Options = Options {
    bytes: 1 << 30,
    journal_blocks: Some(1024),
    seed: [7; 32],
};

impl Sink for Blocks {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        let mut at = offset;
        while !rest.is_empty() {
            let within = (at % BLOCK_BYTES) as usize;
            let count = rest.len().min(BLOCK_BYTES as usize - within);
            let (part, behind) = rest.split_at(count);
            let block = self
                .written
                .entry(at / BLOCK_BYTES)
                .or_insert([0; BLOCK_BYTES as usize]);
            block[within..within + count].copy_from_slice(part);
            (rest, at) = (behind, at + count as u64);
        }
        Ok(())
    }
}

pub fn fuzz(bytes: &[u8]) {
    let Ok(fs) = Filesystem::open(Arc::new(bytes.to_vec())) else {
        return;
    };
    let mut blocks = Blocks {
        bytes: OPTIONS.bytes,
        written: BTreeMap::new(),
    };
    let Ok(view) = lay_out(&fs, &OPTIONS, &mut blocks) else {
        return;
    };
    show(&view, bytes, &mut blocks);
    read_all(Box::new(blocks)).expect("a view that can be read");
}

/// Puts the content of the image at its places.
fn show(view: &View, image: &[u8], blocks: &mut Blocks) {
    let mut put = |at: u64, from: u64, bytes: u64| {
        let from = from as usize;
        let shown = &image[from..from + bytes as usize];
        blocks.write_at(at, shown).expect("written");
    };
    for window in &view.windows {
        let from = window.device_start * BLOCK_BYTES;
        put(
            window.start * BLOCK_BYTES,
            from,
            window.blocks * BLOCK_BYTES,
        );
    }
    for fragment in &view.fragments {
        let at = fragment.block * BLOCK_BYTES;
        put(at, fragment.device_offset, fragment.bytes.into());
    }
}
