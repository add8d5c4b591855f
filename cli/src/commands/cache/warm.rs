//! `bcow cache warm`

use bcow::Storage;
use bcow_images::Name;
use bcow_oci::Progress as _;
use bcow_remote::Warm;

use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs};
use crate::interrupt::Interrupt;
use crate::remote;
use crate::size::{Human, plural};
use crate::ui::Ui;
use bcow_images::args::{NameParser, REMOTE_IMAGE};

/// Fetch all of an image into the cache
///
/// The command fetches the data of the image and its layers that the cache does not have. It also
/// verifies the data that the cache has. After an interruption, the next call fetches the rest. The
/// command does not fetch layers that --store has. Afterwards the image can be read without its
/// server, if its name contains a digest or if --root-hash is given.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The image: https://..., s3://... or docker://...
    #[arg(value_name = "IMG", value_parser = NameParser(REMOTE_IMAGE))]
    image: Name,
    /// Number of requests at a time, at most 16
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=16))]
    connections: u16,
    #[command(flatten)]
    stores: StoreArgs,
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch();
    let image = OpenImage::open(&args.image, &[], &args.stores)?;
    let name = image.path().display().to_string();
    let cannot = || format!("cannot fetch {name}");
    let files = args.stores.remote.files();
    let mut total = 0;
    for file in &files {
        total += file.len().context(cannot)?;
    }
    args.stores.remote.refuse_small_limit(&name, total)?;
    let fetched_before = args.stores.remote.fetched_bytes();
    let stop = interrupt.flag();
    {
        let progress = ui.progress();
        progress.phase(&name);
        progress.total(Some(total));
        let warm = Warm {
            connections: args.connections.into(),
            stop: &stop,
            before: &|| {},
            progress: &|bytes| progress.advance(bytes),
        };
        for file in &files {
            file.warm(&warm)
                .map_err(|error| remote::explain(CommandError::new(cannot()), &name, &error))?;
            interrupt.check()?;
        }
    }
    let fetched = args.stores.remote.fetched_bytes() - fetched_before;
    ui.status(format_args!(
        "{name}: {} with {} {} in the cache; {} fetched now",
        plural(files.len() as u64, "file"),
        Human(total),
        if files.len() == 1 { "is" } else { "are" },
        Human(fetched),
    ));
    Ok(())
}
