//! `bcow mount`

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use bcow_mounts::{MountArgs, mount};
use bcow_pool::client;

use crate::error::{CommandError, Context, exit};
use crate::ui::Ui;

/// Mount an image, read-only or with an upper that stores changes, or a disk
///
/// The command returns when programs can use the mount. A background process serves the mount. The
/// process ends when the mount is unmounted with `bcow umount`, umount(8) or `fusermount3 -u`.
///
/// Root and ordinary users can mount; an ordinary user needs fusermount3 and must own DIR. By
/// default, only the user who mounts can access the mount, and set-user-ID files and devices do not
/// work (see -o). To stack layers of `bcow commit --upper` on top of the image, list the layers
/// between IMG and DIR, the lowest first.
///
/// IMG can also be a disk that contains ext4, xfs or btrfs. The kernel's own driver mounts it; this
/// is called the kernel driver, in contrast to the FUSE driver (see --driver). Only root can use
/// the kernel driver, and every user can access the mount as far as owners and modes of the files
/// allow.
///
/// The mount is read-only unless --upper names a directory for the changes. The upper has the form
/// of an overlayfs upper; of a large file of the image, it stores only the written blocks. With
/// --driver kernel, a new upper is a disk that shows the image as ext4, which the kernel mounts.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "bcow mount [OPTIONS] <IMG> [LAYER]... <DIR>",
    after_long_help = "\
Mount options (-o, separated by commas; of two opposite options the last one applies):
  allow_other             other users can access the mount; the kernel checks every access against
                          owner, mode and ACL of the file. For ordinary users, /etc/fuse.conf must
                          contain the line user_allow_other
  default_permissions     the kernel also checks every access of the user who mounts; without this
                          option, that user can read everything
  suid, nosuid            honour set-user-ID, set-group-ID and file capabilities, or not
                          (default; only root can use suid)
  dev, nodev              devices work, or not (default; only root can use dev)
  exec, noexec            programs can be executed (default), or not
  noatime, relatime, nodiratime
                          with the kernel driver, as in mount(8) (default: noatime); with the
                          FUSE driver, reading never updates access times
  rw, ro                  a mount with --upper is writable (default), or read-only
  discard, nodiscard      with the kernel driver: space of deleted files is released at once, or not
                          (default)
  commit=SECONDS          with the kernel driver: ext4 and btrfs make all changes durable at least
                          this often [default: that of the kernel, 5 for ext4]
  sync, async             each write is durable before it returns, or not (default)
  writeback, nowriteback  the kernel collects writes in its page cache, or not (default). With
                          writeback, small writes take a quarter of the time, but errors such as
                          a full disk appear at fsync or never, and a write to a part of an
                          uncached block first reads that block
  overlay_lower           the mount is a lower directory of overlayfs that hides those below it: the
                          directories in its root have opaque marks, and there are whiteouts for
                          what only lower layers have in their roots. overlay_lower=trusted marks
                          by trusted.overlay.opaque, overlay_lower=user by user.overlay.opaque
                          [default: user in a user namespace, else trusted]
  uidmap=RANGE, gidmap=RANGE
                          RANGE is CONTAINER:HOST:COUNT: the COUNT users (groups) of the image from
                          CONTAINER on are shown as those of the host from HOST on, and an upper
                          stores those of the image; other IDs have no counterpart (repeatable)
  fsname=NAME             source that /proc/mounts shows [default: the path of the image]
  loop, subtype=bcow, defaults
                          accepted without effect

With --upper, the kernel always checks owner, mode and ACL (default_permissions). `bcow umount`
returns when all data is durable (with --sync volatile: in the file system of the upper), and fails
if that file system did not accept all data. If the process of an earlier mount of the same upper is
still ending, a new mount waits for that process.

The background process logs to the system log; a foreground mount logs to standard error. Both also
log to the file of --log-file, and `bcow stats` shows the last errors. SIGTERM and SIGINT unmount.
If files are in use, the mount is detached: programs cannot open further files by path, and the
mount ends when the last open file is closed, or at a second signal. SIGHUP unmounts only in the
foreground."
)]
pub struct Args {
    #[command(flatten)]
    mount: MountArgs,
}

/// Mounts. Returns the exit status.
pub fn run(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    match &args.mount.pool {
        Some(name) => client::mount(name, &args.mount, ui).map(|()| exit::DONE),
        None => mount::run(&args.mount, ui),
    }
}

/// Mounts in another process of this program, with a command line that begins with its name. Paths
/// in it are relative to `directory`. Returns the exit status: the process has printed the reason
/// of a failure.
pub fn execute(command_line: &[OsString], directory: &Path) -> Result<u8, CommandError> {
    let mut command = Command::new("/proc/self/exe");
    if let Some((name, arguments)) = command_line.split_first() {
        command.arg0(name).args(arguments);
    }
    let status = command.current_dir(directory).status();
    let code = status.context(|| "cannot run `bcow mount`")?.code();
    Ok(code.map_or(exit::FAILED, |code| {
        u8::try_from(code).unwrap_or(exit::FAILED)
    }))
}
