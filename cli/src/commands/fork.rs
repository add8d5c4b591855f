//! `bcow fork`

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use bcow_convert::{fork, fork_upper};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser, new_file, new_path};
use bcow_images::requests::mount_of;
use bcow_images::target::Target;
use serde_json::json;

use super::mount;
use crate::error::{CommandError, exit};
use crate::image::StoreArgs;
use crate::running;
use crate::size::{Human, plural};
use crate::ui::Ui;

/// Make a further disk or upper that begins with the content of another one or of a snapshot
///
/// The new disk is over the snapshot and stores only its own changes. If DISK is a writable disk,
/// the command first takes a snapshot of it, with the name fork-N. Any number of disks can be over
/// a snapshot.
///
/// The new disk has the size and the layout of the snapshot. It must be in the same directory, or
/// the commands that use it need --backing-dir. The command never overwrites an existing file.
///
/// `bcow fork UPPER@NAME NEW` makes a further upper of the kernel driver, which stores only its own
/// changes too; `bcow mount IMG DIR --upper NEW` mounts it. It must be in the same file system. Of
/// the FUSE driver, the new upper is a copy, which shares blocks where the host has reflinks. In
/// place of UPPER, the command takes the directory where it is mounted.
///
/// With --mount, the command also mounts the new disk or upper.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk, the upper or the directory of a mount, or a snapshot of it
    #[arg(value_name = "DISK|UPPER|DIR[@NAME]", value_hint = clap::ValueHint::AnyPath)]
    #[arg(value_parser = NameParser(IMAGE))]
    from: Name,
    /// The disk or the upper to create
    #[arg(value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(new_file("fork")))]
    new: Name,
    /// Also mount the new disk or upper at this directory. Of an upper, the image with its layers
    /// and the pool are those of the mount of UPPER, which must be mounted
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    mount: Option<PathBuf>,
    /// Further options of `bcow mount`, for --mount
    #[arg(last = true, value_name = "MOUNT_OPTIONS", requires = "mount")]
    mount_options: Vec<OsString>,
    /// Print JSON (schema bcow.fork/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Forks. Returns the exit status.
pub fn run(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    let new = new_path(&args.new)?;
    let (target, name) = Target::with_snapshot(&args.from)?;
    let mount = args.mount.as_deref();
    let mount = mount.map(|directory| command_line(&target, new, directory, &args.mount_options));
    let mount = mount.transpose()?;
    let (of, forked) = match target {
        Target::Disk(disk) => ("disk", Some(fork(&disk, new, &args.stores)?)),
        Target::Upper(upper) => ("upper", fork_upper(&upper, name.as_deref(), new, ui)?),
    };
    if let Some(command_line) = mount {
        let status = mount::execute(&command_line, Path::new("."))?;
        if status != exit::DONE {
            ui.hint(format_args!("the fork {} is complete", args.new.display()));
            return Ok(status);
        }
    }
    if args.json {
        let printed = ui.print_json(&json!({
            "schema": "bcow.fork/1",
            of: args.new.to_string(),
            "bytes": forked.as_ref().map(|disk| disk.bytes),
            "backing": forked.as_ref().map(|disk| &disk.backing),
            "mount": args.mount.as_deref().map(running::absolute),
        }));
        return printed.map(|()| exit::DONE);
    }
    let (new, from) = (args.new.display(), args.from.display());
    match forked {
        Some(disk) => ui.status(format_args!(
            "{new}: writable {of} of {} ({}) over {}",
            Human(disk.bytes),
            plural(disk.bytes, "byte"),
            disk.backing
        )),
        None => ui.status(format_args!("{new}: upper with the content of {from}")),
    }
    Ok(exit::DONE)
}

/// The command line that mounts what is forked from `target`.
fn command_line(
    target: &Target,
    new: &Path,
    directory: &Path,
    options: &[OsString],
) -> Result<Vec<OsString>, CommandError> {
    let (new, directory) = (running::absolute(new), running::absolute(directory));
    let mut line = vec!["bcow".to_owned(), "mount".to_owned()];
    match target {
        Target::Disk(_) => line.extend([new, directory]),
        Target::Upper(upper) => {
            let mount = mount_of(upper).ok_or_else(|| {
                CommandError::new(format!("cannot mount a fork of {}", upper.display()))
                    .caused_by_text("it is not mounted, so its image is not known")
                    .hint("leave out --mount, and use `bcow mount IMG DIR --upper NEW`")
            })?;
            line.extend(["--upper".to_owned(), new]);
            line.extend(mount.pool.map(|pool| format!("--pool={pool}")));
            line.push(mount.image);
            line.extend(mount.layers);
            line.push(directory);
        }
    }
    let line = line.into_iter().map(OsString::from);
    Ok(line.chain(options.iter().cloned()).collect())
}
