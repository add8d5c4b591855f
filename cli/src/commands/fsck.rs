//! `bcow fsck`

mod backing;
mod image;
mod kernel_upper;
mod report;
mod restore;
mod tolerant;
mod upper;
mod upper_image;

use bcow::check::CheckOptions;
use bcow_images::Name;

use crate::error::{CommandError, exit};
use crate::image::{LayerArgs, StoreArgs};
use crate::ui::Ui;
use bcow_images::args::{IMAGE, NameParser, WHOLE_IMAGE};
use bcow_images::kernel_upper::is_kernel_upper;

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
}

impl Args {
    /// Whether every byte is read. A restored file is read as a whole in any case.
    fn data(&self) -> bool {
        self.data || self.from.is_some() || self.is_pinned_file()
    }

    /// The number of threads that read and verify.
    fn threads(&self) -> usize {
        match self.jobs {
            Some(jobs) => jobs.into(),
            None => std::thread::available_parallelism().map_or(1, |n| n.get()),
        }
    }

    fn check_options(&self) -> CheckOptions {
        CheckOptions {
            data: self.data(),
            threads: self.threads(),
        }
    }

    /// Whether --root-hash names the content of a file on this machine. The root in its header says
    /// nothing about the content until all of it is hashed. Each read of an image on another
    /// machine is verified.
    fn is_pinned_file(&self) -> bool {
        self.stores.remote.root_hash.is_some() && !self.image.is_remote()
    }
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
    let outcome = if !upper::is_upper(args.image.shown()) {
        image::check(args, ui)?
    } else if args.from.is_some() {
        let usage = format!("{} is the upper of a writable mount", args.image.display());
        return Err(CommandError::usage(usage).hint("--from restores images"));
    } else if is_kernel_upper(args.image.shown()) {
        kernel_upper::check(args, ui)?
    } else {
        upper::check(args, ui)?
    };
    if args.json {
        ui.print_json(&outcome.document())?;
    } else {
        outcome.print(ui)?;
    }
    Ok(outcome.exit())
}
