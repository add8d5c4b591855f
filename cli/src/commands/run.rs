//! `bcow run`: a program in the root file system of an image.
//!
//! The command runs itself twice more, each time through unshare(1), and [`STAGE`] tells it where
//! it is. In a namespace of mounts, and without privilege also of users, it mounts the image, and
//! unmounts it at the end ([`in_a_mount`]). In namespaces of processes and of mounts below that, it
//! makes the mount the root, and starts the program ([`root`]).

mod root;

use std::ffi::OsStr;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

use bcow::format::Use;
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use clap::{Args as _, FromArgMatches};
use nix::sys::signal::{SigSet, Signal};
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs};

/// The variable with the place of this process: `mount`, or the document of a [`Program`].
const STAGE: &str = "BCOW_RUN";
const MOUNT_STAGE: &str = "mount";
/// Holds an upper that lasts as long as the program. File systems in memory are smaller.
const TEMPORARY: &str = "/var/tmp";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Run a program in the root file system of an image
///
/// The command mounts the image with an upper, and runs CMD there: with the variables, the user and
/// the working directory that the image gives, an entry point before CMD, its own /proc and /dev,
/// and the network and the /etc/resolv.conf of this machine. Without CMD, it runs the program of
/// the image, or /bin/sh. At the end of the program, all its processes end. The changes are lost,
/// unless --upper names a directory for them.
///
/// Root and ordinary users can run programs. The program of an ordinary user is root in a namespace
/// of users in which there is no other user: it cannot change to another user, and the files of
/// others have no owner there.
///
/// This is no sandbox for programs that you do not trust: it limits neither memory nor system calls
/// nor the network, and a program that root runs as root has all rights. podman and others run such
/// programs on a mount.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Exit status:
  N        that of the program
  126      the program cannot be executed
  127      there is no such program
  128 + N  signal N ended the program")]
pub struct Args {
    /// The image
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    image: Name,
    /// The program and its arguments [default: those of the image]
    #[arg(
        value_name = "CMD",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<String>,
    /// Keep the changes in this upper, as `bcow mount --upper`
    #[arg(long, value_name = "UPPER", value_hint = clap::ValueHint::DirPath)]
    upper: Option<PathBuf>,
    /// Begin with the content of this upper, mount or snapshot, as `bcow fork`
    #[arg(long, value_name = "UPPER|DIR[@NAME]", value_hint = clap::ValueHint::AnyPath)]
    fork: Option<PathBuf>,
    /// Run /bin/sh in place of the program of the image
    #[arg(long, conflicts_with = "command")]
    shell: bool,
    /// Set a variable of the program (repeatable)
    #[arg(short, long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// The working directory [default: that of the image, or /]
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// The user, and the group, by name or number [default: those of the image, or root]
    #[arg(short, long, value_name = "USER[:GROUP]")]
    user: Option<String>,
    /// Also look for layers in this directory, as `bcow mount --store` (repeatable)
    #[arg(long = "store", value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    stores: Vec<PathBuf>,
    /// As podman run: without effect
    #[arg(short, long, hide = true)]
    interactive: bool,
    /// As podman run: without effect
    #[arg(short, long, hide = true)]
    tty: bool,
    /// As podman run: without effect
    #[arg(long, hide = true)]
    rm: bool,
}

/// What to run, and as whom.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Program {
    /// The mountpoint.
    root: PathBuf,
    /// The program and its arguments.
    words: Vec<String>,
    /// Variables, as NAME=VALUE.
    variables: Vec<String>,
    directory: String,
    /// The user, as the configuration of an image has it.
    user: String,
}

/// The part of the configuration of an image that is about its program.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ImageConfig {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
}

/// Runs the program; returns its exit status.
pub fn run(args: &Args) -> Result<u8, CommandError> {
    match std::env::var(STAGE).as_deref() {
        Ok(MOUNT_STAGE) => in_a_mount(args),
        Ok(program) => root::run(&serde_json::from_str(program).context(|| "invalid program")?),
        Err(_) => {
            // An error of the image comes before there is any process.
            args.program()?;
            let is_root = rustix::process::geteuid().is_root();
            let user: &[&str] = if is_root { &[] } else { &["--user", "--map-root-user"] };
            let error = again(&[user, &["--mount"]].concat(), MOUNT_STAGE)?.exec();
            Err(CommandError::new("cannot execute unshare")
                .caused_by(&error)
                .hint("it is in the package util-linux"))
        }
    }
}

/// This command once more, in new namespaces.
fn again(namespaces: &[&str], stage: &str) -> Result<Command, CommandError> {
    let mut unshare = Command::new("unshare");
    // Otherwise the mounts of others would be in use here when they are unmounted.
    unshare.args(["--propagation", "slave"]).args(namespaces);
    unshare.arg("--").arg(own_path()?);
    unshare.args(std::env::args_os().skip(1)).env(STAGE, stage);
    Ok(unshare)
}

fn own_path() -> Result<PathBuf, CommandError> {
    std::env::current_exe().context(|| "cannot find the program bcow")
}

/// Runs another command of bcow, which prints its errors. Returns its exit status.
fn bcow<'w>(words: impl IntoIterator<Item = &'w OsStr>) -> Result<u8, CommandError> {
    let mut command = Command::new(own_path()?);
    command.arg("-q").args(words).env_remove(STAGE);
    let status = command.status().context(|| "cannot start bcow")?;
    Ok(exit_status(status))
}

fn exit_status(status: ExitStatus) -> u8 {
    let signal = status.signal().map(|signal| 128 + signal);
    let status = status.code().or(signal).unwrap_or(1);
    u8::try_from(status).unwrap_or(u8::MAX)
}

/// Mounts the image, runs the program there, and unmounts.
fn in_a_mount(args: &Args) -> Result<u8, CommandError> {
    // Ctrl-C is for the program. The signals wait until the mount has ended.
    let signals: SigSet = [
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
        Signal::SIGHUP,
    ]
    .into_iter()
    .collect();
    signals.thread_block().context(|| "cannot block signals")?;
    let place = Place::make()?;
    let mut program = args.program()?;
    program.root = place.root();
    let root = program.root.as_os_str();
    let upper = args.upper.clone();
    let upper = upper.unwrap_or_else(|| place.0.path().join("upper"));
    if let Some(from) = &args.fork {
        let forked = bcow(["fork".as_ref(), from.as_os_str(), upper.as_os_str()])?;
        if forked != 0 {
            return Ok(forked);
        }
    }
    let options = if args.is_root_of_host() { "allow_other,suid,dev" } else { "allow_other" };
    let image = args.image.text();
    let mut mount: Vec<&OsStr> = vec!["mount".as_ref(), image, root, "--upper".as_ref()];
    mount.extend([upper.as_os_str(), "-o".as_ref(), options.as_ref()]);
    for store in &args.stores {
        mount.extend(["--store".as_ref(), store.as_os_str()]);
    }
    let mounted = bcow(mount)?;
    if mounted != 0 {
        return Ok(mounted);
    }
    let ended = start(&program, signals);
    let unmounted = bcow(["umount".as_ref(), root])?;
    if unmounted != 0 {
        // The process of the mount may still write there.
        place.keep();
        return Ok(unmounted);
    }
    ended
}

/// The directory of a run, with the mountpoint and the upper that does not last. The drop removes
/// it.
struct Place(TempDir);

impl Place {
    fn make() -> Result<Self, CommandError> {
        let parent = std::env::var_os("TMPDIR").map_or(TEMPORARY.into(), PathBuf::from);
        let made = tempfile::Builder::new()
            .prefix("bcow-run-")
            .tempdir_in(&parent);
        made.map(Place)
            .and_then(|place| std::fs::create_dir(place.root()).map(|()| place))
            .context(|| format!("cannot make a directory in {}", parent.display()))
    }

    fn root(&self) -> PathBuf {
        self.0.path().join("root")
    }

    fn keep(mut self) {
        self.0.disable_cleanup(true);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // If the image is still mounted, the removal would remove its files.
        if std::fs::remove_dir(self.root()).is_err() {
            self.0.disable_cleanup(true);
        }
    }
}

/// Starts the program, and waits for its end.
fn start(program: &Program, signals: SigSet) -> Result<u8, CommandError> {
    let document = serde_json::to_string(program).context(|| "cannot describe the program")?;
    let namespaces = ["--pid", "--fork", "--kill-child", "--mount", "--ipc"];
    let mut child = again(&namespaces, &document)?
        .spawn()
        .context(|| "cannot start unshare")?;
    let ended = end_at_signals(&child, signals).and_then(|()| child.wait());
    ended.map(exit_status).context(|| "cannot run the program")
}

/// Kills all processes of the program at SIGTERM and SIGHUP.
fn end_at_signals(child: &Child, signals: SigSet) -> std::io::Result<()> {
    let child = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    std::thread::Builder::new().spawn(move || {
        while let Ok(signal) = signals.wait() {
            if matches!(signal, Signal::SIGTERM | Signal::SIGHUP) {
                // It may have ended.
                let _ = pidfd_send_signal(&child, rustix::process::Signal::KILL);
            }
        }
    })?;
    Ok(())
}

impl Args {
    /// What to run, by the image and the options.
    fn program(&self) -> Result<Program, CommandError> {
        let words = self.stores.iter().map(|store| store.as_os_str());
        let words = words.flat_map(|store| ["--store".as_ref(), store]);
        let command = clap::Command::new("run").no_binary_name(true);
        let stores = StoreArgs::augment_args(command).try_get_matches_from(words);
        let stores = stores.and_then(|matches| StoreArgs::from_arg_matches(&matches));
        let image = OpenImage::open(&self.image, &[], &stores.context(|| "invalid --store")?)?;
        if image.image().header().purpose != Use::Image {
            return Err(CommandError::new(format!("cannot run {}", self.image))
                .caused_by_text("it is a disk")
                .hint("`bcow serve` serves a disk for a virtual machine"));
        }
        let mut metadata = image.metadata()?;
        let config = metadata.pointer_mut("/config/config").map(|it| it.take());
        let config = config.map_or(Ok(ImageConfig::default()), serde_json::from_value);
        let config = config.context(|| format!("invalid configuration of {}", self.image))?;
        let variable = |name: &str| Some(format!("{name}={}", std::env::var(name).ok()?));
        let mut variables = vec![format!("PATH={PATH}")];
        variables.extend(variable("TERM"));
        variables.extend(config.env.unwrap_or_default());
        variables.extend(self.env.iter().cloned());
        let mut words = config.entrypoint.unwrap_or_default();
        if self.command.is_empty() {
            words.extend(config.cmd.unwrap_or_default());
        } else {
            words.extend(self.command.iter().cloned());
        }
        if self.shell || words.is_empty() {
            words = vec!["/bin/sh".to_owned()];
        }
        let directory = self.workdir.clone().or(config.working_dir);
        Ok(Program {
            root: PathBuf::new(),
            words,
            variables,
            directory: directory.filter(|it| !it.is_empty()).unwrap_or("/".into()),
            user: self.user.clone().or(config.user).unwrap_or_default(),
        })
    }

    /// Whether this process is root, and not only in a namespace of users.
    fn is_root_of_host(&self) -> bool {
        let all = format!("{:>10} {:>10} {:>10}", 0, 0, u32::MAX);
        let map = std::fs::read_to_string(Path::new("/proc/self/uid_map"));
        map.is_ok_and(|map| map.trim() == all.trim())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_directory_of_an_ended_mount_is_removed() {
        let place = Place::make().unwrap();
        let directory = place.0.path().to_owned();
        std::fs::write(directory.join("upper"), "").unwrap();
        drop(place);
        assert!(!directory.exists());
        let place = Place::make().unwrap();
        // As a mount, it keeps the directory from being removed.
        let file = place.root().join("file");
        std::fs::write(&file, "").unwrap();
        drop(place);
        assert!(file.exists());
        std::fs::remove_dir_all(file.ancestors().nth(2).unwrap()).unwrap();
    }
}
