//! The form of sealed disks, for the commands that write them.

use std::path::Path;

use bcow_convert::{
    BlockSize, Compress, Encoding, SealedDisk, parse_block_size, parse_compression,
};

use crate::size::{Human, plural};
use crate::ui::Ui;

/// The form of a sealed disk.
#[derive(Debug, clap::Args)]
pub struct SealArgs {
    /// Compression of blocks: zstd[:LEVEL] or none [default: zstd:3]
    #[arg(long, value_name = "HOW", value_parser = parse_compression)]
    compress: Option<Compress>,
    /// Block size: auto, or a power of two from 4K to 4M [default: auto]
    #[arg(long, value_name = "SIZE", value_parser = parse_block_size)]
    block_size: Option<BlockSize>,
    /// Threads that compress [default: one for each CPU]; the output does not depend on N
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: Option<u16>,
    /// Do not read back and verify the new file before it gets its name
    #[arg(long)]
    no_verify: bool,
}

impl SealArgs {
    pub fn encoding(&self) -> Encoding {
        Encoding {
            compress: self.compress,
            block_bytes: self.block_size.and_then(|size| size.0),
            jobs: self.jobs.map(usize::from),
            verify: !self.no_verify,
        }
    }

    /// One of the options that was given and is for a new BCoW file only.
    pub fn for_file(&self) -> Option<&'static str> {
        let given = [
            (self.compress.is_some(), "--compress"),
            (self.block_size.is_some(), "--block-size"),
            (self.no_verify, "--no-verify"),
        ];
        given.into_iter().find(|(is, _)| *is).map(|(_, name)| name)
    }
}

/// Says that the disk at `path` is sealed.
pub fn show_sealed(path: &Path, disk: &SealedDisk, ui: &Ui) {
    let over = disk.backing.as_ref();
    let over = over.map_or(String::new(), |name| format!(" over {name}"));
    ui.status(format_args!(
        "{}: sealed disk of {} ({}){over}, file of {}",
        path.display(),
        Human(disk.size),
        plural(disk.size, "byte"),
        Human(disk.file_bytes)
    ));
}
