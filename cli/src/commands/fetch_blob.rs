//! `bcow fetch-blob`: for `bcow-layer-store`.

use std::io::Read;

use bcow_images::Name;
use bcow_oci::Digest;

use crate::error::{CommandError, Context};
use crate::remote::{self, RemoteArgs};
use crate::ui::Ui;
use bcow_images::args::{NameParser, REPOSITORY};

/// Write a blob of a repository to standard output
///
/// The command is for bcow-layer-store. It checks the size of the blob, and leaves the check of the
/// digest to the reader of its output.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The repository: docker://SERVER/REPOSITORY, also with a tag or a digest
    #[arg(value_name = "NAME", value_parser = NameParser(REPOSITORY))]
    name: Name,
    /// The digest of the blob
    digest: Digest,
    /// The size of the blob in bytes
    bytes: u64,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// Bytes per read.
const PIECE: usize = 256 << 10;

/// Writes the blob.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let cannot = || format!("cannot read the blob {} of {}", args.digest, args.name);
    let Some(repository) = args.name.registry() else {
        return Err(REPOSITORY.refuse(&args.name).into());
    };
    let mut blob = remote::blob_in_registry(repository, &args.digest, args.bytes, &args.remote)?;
    let mut out = ui.output();
    let mut piece = vec![0; PIECE];
    loop {
        match blob.read(&mut piece).context(cannot)? {
            0 => return out.finish(),
            read => out.write_bytes(&piece[..read])?,
        }
    }
}
