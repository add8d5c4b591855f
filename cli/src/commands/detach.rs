//! `bcow detach`

use std::path::PathBuf;

use crate::error::CommandError;

/// Detach a block device that `bcow attach` made
///
/// The command returns when all data written to the device is durable in the disk's file and other
/// programs can use the disk. It fails if that takes more than 60 seconds. If the server of the
/// device is another program (nbd-client, qemu-nbd), the command does not wait for its end.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The device: /dev/nbdN
    #[arg(value_name = "DEVICE", value_hint = clap::ValueHint::FilePath)]
    device: PathBuf,
    /// Detach the device even if it is mounted or in use, or if the flush fails; programs that use
    /// it then get I/O errors, and data that was not flushed is lost
    #[arg(short, long)]
    force: bool,
}

/// Detaches.
pub fn run(args: &Args) -> Result<(), CommandError> {
    bcow_mounts::nbd_device::detach(&args.device, args.force)
}
