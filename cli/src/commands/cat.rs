//! `bcow cat`

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use bcow_erofs::reader::FileType;

use crate::error::{CommandError, Context};
use crate::image::{LastLink, LayerArgs, OpenImage, StoreArgs};
use crate::ui::Ui;
use crate::{names, stat};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_images::sandbox::{self, SandboxArgs};

/// Write files of an image to standard output
///
/// The command follows symbolic links inside the image. It verifies each block before it writes
/// data of that block. At a damaged block the output ends with an error. So the output can be
/// incomplete, but it never has wrong data.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The image: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    image: Name,
    /// Paths of regular files in the image
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<OsString>,
    #[command(flatten)]
    layers: LayerArgs,
    #[command(flatten)]
    stores: StoreArgs,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

/// Bytes per read: `bcow cat IMG big | head -1` must not read the whole file.
const PIECE: u64 = 1 << 20;

/// Writes the files, one after the other.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let layers = &args.layers.layers;
    let sandbox = args
        .sandbox
        .begin(layers.iter().chain([&args.image]), &args.stores)?;
    let image = OpenImage::open(&args.image, layers, &args.stores)?;
    sandbox::close(sandbox, &args.stores)?;
    let tree = image.tree()?;
    let mut out = ui.output();
    for path in &args.paths {
        let path = path.as_bytes();
        let inode = tree.find(path, LastLink::Follow)?;
        if inode.kind != FileType::Regular {
            return Err(CommandError::new(format!(
                "{} in {} is not a regular file but a {}",
                names::quoted(path),
                image.path().display(),
                stat::type_name(inode.kind).replace('_', " ")
            )));
        }
        let mut offset = 0;
        while offset < inode.size {
            let length = PIECE.min(inode.size - offset);
            let mut written = Ok(());
            tree.filesystem()
                .read_with(&inode, offset, length, &mut |bytes| {
                    if written.is_ok() {
                        written = out.write_bytes(bytes);
                    }
                })
                .context(|| tree.cannot_read(path))?;
            written?;
            offset += length;
        }
    }
    out.finish()
}
