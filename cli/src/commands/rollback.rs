//! `bcow rollback`

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bcow_convert::{roll_back, roll_back_upper};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_images::readable_upper::refuse_temporary;
use bcow_images::target::Target;
use bcow_images::upper::RETRY_PAUSE;
use bcow_mounts::umount;
use bcow_pool::{PoolName, client};
use serde_json::json;

use super::mount;
use crate::error::{CommandError, Context, exit};
use crate::image::StoreArgs;
use crate::running;
use crate::ui::Ui;

/// How long the process of a mount may take to end, for example because the mount is also in
/// another mount namespace for a while.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// Go back to a snapshot of a disk or of an upper
///
/// A new empty disk over the snapshot takes the place of the disk, in one step. What was written to
/// the disk since its last snapshot is lost, unless --keep makes it a snapshot first. All snapshots
/// stay, also later ones. An upper of the kernel driver has a disk. An upper of the FUSE
/// driver is replaced by a copy of its snapshot. The disk or the upper must not be in use; with
/// --restart, the command unmounts it first.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk, the upper, or the directory of a mount
    #[arg(value_name = "DISK|UPPER|DIR", value_hint = clap::ValueHint::AnyPath)]
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Name,
    /// The name of the snapshot to go back to
    #[arg(value_name = "NAME")]
    name: String,
    /// First make the present content of the disk its snapshot NAME2
    #[arg(long, value_name = "NAME2")]
    keep: Option<String>,
    /// Unmount DIR first, and mount it again afterwards with the same command line; not for a mount
    /// of --foreground
    #[arg(long)]
    restart: bool,
    /// Print JSON (schema bcow.rollback/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Rolls back. Returns the exit status.
pub fn run(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    let (disk, name, keep) = (&args.disk, &args.name, args.keep.as_deref());
    keep.map_or(Ok(()), refuse_temporary)?;
    let target = Target::of(disk)?;
    let mounted = args.restart.then(|| Mounted::at(disk, ui)).transpose()?;
    if let Some(mounted) = &mounted {
        umount::unmount(&mounted.at, false, client::answers, ui)?;
    }
    let go_back = || match &target {
        Target::Disk(disk) => roll_back(disk, name, keep, &args.stores).map(Some),
        Target::Upper(upper) => roll_back_upper(upper, name, keep),
    };
    let mut rolled_back = go_back();
    let unmounted = Instant::now();
    while let Err(error) = &rolled_back
        && (mounted.is_some() && error.may_pass() && unmounted.elapsed() < ENDS_WITHIN)
    {
        std::thread::sleep(RETRY_PAUSE);
        rolled_back = go_back();
    }
    // Also after a failure, which changes nothing.
    let restarted = mounted
        .as_ref()
        .map_or(Ok(exit::DONE), Mounted::mount_again);
    let rolled_back = rolled_back?;
    let restarted = restarted?;
    if let Some(mounted) = mounted
        && restarted != exit::DONE
    {
        ui.hint(format_args!("{} is not mounted now", mounted.at.display()));
        return Ok(restarted);
    }
    let of = match target {
        Target::Disk(_) => "disk",
        Target::Upper(_) => "upper",
    };
    if args.json {
        let printed = ui.print_json(&json!({
            "schema": "bcow.rollback/1",
            of: disk.to_string(),
            "snapshot": name,
            "kept": keep,
            "backing": rolled_back.map(|disk| disk.backing),
        }));
        return printed.map(|()| exit::DONE);
    }
    let kept = keep.map_or(String::new(), |keep| {
        format!("; its earlier content is the snapshot {disk}@{keep}")
    });
    ui.status(format_args!("{disk}: as its snapshot {name}{kept}"));
    Ok(exit::DONE)
}

/// A mount, and the command line that made it.
struct Mounted {
    at: PathBuf,
    command_line: Vec<OsString>,
    /// The directory to which its paths are relative.
    directory: PathBuf,
}

impl Mounted {
    fn at(name: &Name, ui: &Ui) -> Result<Self, CommandError> {
        let path = name.path().unwrap_or(name.shown());
        let cannot = || format!("cannot restart {}", name.display());
        let at = path.canonicalize().context(cannot)?;
        let because = |cause: &str| CommandError::new(cannot()).caused_by_text(cause);
        let (pid, mount) =
            running::mount_at(&at).ok_or_else(|| because("it is no mount of bcow"))?;
        let (command_line, directory) = match (&mount.pool, &mount.directory) {
            (Some(pool), _) => {
                let pool: PoolName = pool.parse().map_err(|cause: String| because(&cause))?;
                client::command_line(&pool, mount.device.as_deref().unwrap_or_default(), ui)?
            }
            (None, Some(directory)) => {
                let command_line = running::arguments(pid).context(cannot)?;
                (command_line, PathBuf::from(directory))
            }
            (None, None) => {
                return Err(because(
                    "the mount runs in the foreground, and only the program that started it can \
                     start it again",
                )
                .hint("unmount it, roll back its upper or disk, and mount it again"));
            }
        };
        Ok(Mounted {
            at,
            command_line,
            directory,
        })
    }

    fn mount_again(&self) -> Result<u8, CommandError> {
        mount::execute(&self.command_line, &self.directory)
    }
}
