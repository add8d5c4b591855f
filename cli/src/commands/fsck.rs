//! `bcow fsck`

mod print;

use bcow_fsck::{Fsck, RepairOptions};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser, WHOLE_IMAGE};
use bcow_images::sandbox::SandboxArgs;

use crate::error::{CommandError, exit};
use crate::image::{LayerArgs, StoreArgs};
use crate::ui::Ui;

/// Check an image, a disk or an upper, and repair it
///
/// The command checks the structure and the checksums of the file, and then the file system in the
/// file: every directory, inode and link. With --data, it also reads and verifies every stored
/// block and the whole Merkle tree. Without --repair, it changes nothing.
///
/// Of a disk over a backing, the command also opens the files below, without a check of their
/// content.
///
/// The command also checks the upper of a writable mount, if no process is writing to the upper:
/// its overlayfs marks (whiteouts, opaque directories), its partial files (files of which only the
/// written blocks are stored) and their maps, and orphan files. If LOWER or the recorded path names
/// the upper's image, the command also checks the upper's references to that image. If the upper
/// was mounted with layers, name them with --layer. For an upper of the kernel driver (`bcow mount
/// --driver kernel`), the command checks instance.json and the disk, and whether the disk opens
/// over the image's view (the ext4 metadata that bcow generates for it); e2fsck(8) checks the file
/// system on the disk.
///
/// The command prints one line for each finding: severity, code, place and description. Of the
/// findings that follow from the damage of one place, such as the files in one block, three have a
/// line, and the others are counted; --json lists all. Codes are stable. Section 12 of the format
/// specification lists the codes of the format. Codes of the file system begin with `erofs-`; codes
/// of an upper begin with `upper-`; `file-data` names a file with damaged content (with --data).
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Exit status, as in fsck(8):
  0   no errors; there may be warnings
  1   all errors were repaired
  4   errors remain
  8   the check failed: the file is missing, unreadable, not a BCoW file, or of a newer version
  16  the command line is invalid")]
pub struct Args {
    /// The image or disk: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...; or the directory of an upper
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(WHOLE_IMAGE))]
    image: Name,
    /// The image of an upper [default: the path recorded in the upper]
    #[arg(value_name = "LOWER", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    lower: Option<Name>,
    /// Read and verify every byte. For a file on this machine, --root-hash implies --data
    #[arg(long)]
    data: bool,
    /// Repair errors that have exactly one correct repair: a damaged header slot; the free list
    /// and leaked space of a disk; orphan files and link counts of an upper. The content does not
    /// change
    #[arg(long)]
    repair: bool,
    /// With --repair: replace damaged bytes by those of this copy of the image, if the Merkle tree
    /// confirms them. COPY is a file, oci:DIR[:REF], https://..., s3://... or docker://... (implies
    /// --data)
    #[arg(long, value_name = "COPY", requires = "repair", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(WHOLE_IMAGE))]
    from: Option<Name>,
    /// Threads that read and verify [default: one for each CPU]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Print JSON (schema bcow.fsck/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    layers: LayerArgs,
    #[command(flatten)]
    stores: StoreArgs,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

/// Runs the check, prints the result, and returns the exit status.
pub fn run(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    run_check(args, ui).map_err(|error| match error.exit() {
        exit::FAILED => error.exit_with(exit::FSCK_OPERATIONAL),
        exit::USAGE => error.exit_with(exit::FSCK_USAGE),
        _ => error,
    })
}

fn run_check(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    let progress = ui.progress();
    let fsck = Fsck {
        image: &args.image,
        lower: args.lower.as_ref(),
        data: args.data,
        repair: args.repair.then_some(RepairOptions {
            from: args.from.as_ref(),
        }),
        jobs: args.jobs.map(usize::from),
        layers: &args.layers,
        stores: &args.stores,
        sandbox: &args.sandbox,
        messages: ui,
        progress: &progress,
    };
    let report = fsck.run()?;
    drop(progress);
    if args.json {
        ui.print_json(&report.document())?;
    } else {
        print::print(&report, ui)?;
    }
    Ok(match report.verdict().errors {
        0 if report.repairs.of_damage => exit::FSCK_REPAIRED,
        0 => exit::DONE,
        _ => exit::FSCK_ERRORS_LEFT,
    })
}
