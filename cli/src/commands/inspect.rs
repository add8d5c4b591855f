//! `bcow inspect`

mod print;

use std::path::PathBuf;

use bcow_images::args::{IMAGE, NameParser};
use bcow_images::inspect::ImageFacts;
use bcow_images::inspect::resolve;
use bcow_images::sandbox::{self, SandboxArgs};
use bcow_images::{Name, plain};
use bcow_sandbox::{Access, CapabilitySet};

use crate::error::{Answer, CommandError, exit};
use crate::image::{OpenImage, StoreArgs};
use crate::ui::Ui;

/// Show the properties of an image or a disk, and how it is stored
///
/// The command shows the format version and features, geometry, block sizes, the compression of
/// content and metadata, the source of the image with its layers, and properties of the file
/// system. It reads the tables, but not the data.
///
/// For a stack, the command also shows each layer: the size of its file; the names and bytes that
/// it adds to the merged tree; what it hides of the layers below; what the layers above hide of it;
/// and the size of the content of lower layers to which it refers.
///
/// For a disk, the command shows its chain of backings. For a writable disk, it also shows the
/// layout, the record log, the free space in the file, and the process that is writing to the disk
/// (with --force-share).
///
/// JSON has the same data and the OCI configuration (`.metadata.config`). Later versions may add
/// fields, but never move them. Sizes are in bytes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The image or disk: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    image: Name,
    /// Print JSON (schema bcow.inspect/1)
    #[arg(long)]
    json: bool,
    /// Print only a shell command for root that mounts a plain image (`bcow convert --plain`) on
    /// DIR without a process of bcow [default DIR: /mnt]
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "/mnt", conflicts_with = "json")]
    #[arg(value_hint = clap::ValueHint::DirPath)]
    mount_command: Option<PathBuf>,
    /// For a name in a registry: print only the name, with a digest, of the image in BCoW form that
    /// bcow opens for it; with --json, also the layers of that image (schema bcow.resolve/1)
    #[arg(long, conflicts_with = "mount_command")]
    resolve: bool,
    #[command(flatten)]
    stores: StoreArgs,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

/// Inspects. For a damaged image, shows the readable part, and then fails.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    if args.resolve {
        return print_resolved(args, ui);
    }
    let mut sandbox = args.sandbox.begin([&args.image], &args.stores)?;
    let image = OpenImage::open_without_content(&args.image, &[], &args.stores, ui)?;
    if let Some(directory) = &args.mount_command {
        let mut out = ui.output();
        writeln!(out, "{}", plain::mount_command(&image, directory, ui)?)?;
        return out.finish();
    }
    // What is damaged is shown without it.
    let (_, beside) = image.annotations().unwrap_or_default();
    // The properties of a disk are read under a lock of its file.
    let own = (image.opened().path.clone(), Access::Read);
    sandbox::seal(&args.stores)?;
    let capabilities = CapabilitySet::DAC_READ_SEARCH;
    sandbox::complete(&mut sandbox, &args.stores, &[own], capabilities)?;
    let (mut facts, failure) = ImageFacts::examine(&image);
    facts.other_platforms = beside.platforms;
    if args.json {
        ui.print_json(&facts)?;
    } else {
        let mut out = ui.output();
        print::print(&facts, &mut out)?;
        out.finish()?;
    }
    failure.map_or(Ok(()), Err)
}

/// Prints the name of the image with the digest of its manifest.
///
/// The exit status says whether the registry has answered, for callers that continue without a
/// BCoW image.
fn print_resolved(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let resolved = resolve::find(&args.image, &args.stores);
    let resolved = resolved.map_err(|error| match error.answer() {
        Answer::None => error,
        Answer::NoImage => error.exit_with(exit::RESOLVED_TO_NONE),
        Answer::Denied => error.exit_with(exit::RESOLVE_DENIED),
    })?;
    if args.json {
        return ui.print_json(&resolved);
    }
    let mut out = ui.output();
    writeln!(out, "{}", resolved["name"].as_str().unwrap_or_default())?;
    out.finish()
}
