//! Makes a mount the root of this process, and starts a program there.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::SigSet;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, move_mount, open_tree, unmount,
};
use rustix::process::{chdir, pivot_root};

use super::{Program, exit_status};
use crate::error::{CommandError, Context};

/// Exit statuses of shells, for a program that cannot be executed and for one that is missing.
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// The devices of the program.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
const RESOLVER: &str = "/etc/resolv.conf";

/// Runs the program as the only child of this process, which is the first one of its namespace: the
/// kernel ends all others with it.
pub fn run(program: &Program) -> Result<u8, CommandError> {
    enter(&program.root).context(|| "cannot make the image the root of the program")?;
    let user = User::find(&program.user)?;
    let cannot = || format!("cannot run {}", program.words.join(" "));
    let (first, rest) = program.words.split_first().ok_or_else(|| {
        CommandError::usage("there is no program to run") // There is always one.
    })?;
    let variables = program.variables.iter();
    let mut variables: HashMap<_, _> = variables.filter_map(|text| text.split_once('=')).collect();
    variables.entry("HOME").or_insert(&user.home);
    // As other programs that run images do.
    std::fs::create_dir_all(&program.directory).context(cannot)?;
    let mut command = Command::new(first);
    command.args(rest).current_dir(&program.directory);
    command.env_clear().envs(variables);
    if (user.id, user.group) != (0, 0) {
        command.uid(user.id).gid(user.group);
    }
    // What the process of the mount waits for. The kernel lets none of them end this process, which
    // is the first one of its namespace.
    SigSet::all()
        .thread_unblock()
        .context(|| "cannot unblock signals")?;
    let status = command.status();
    status.map(exit_status).map_err(|error| {
        let failure = CommandError::new(cannot()).caused_by(&error);
        match error.kind() {
            io::ErrorKind::NotFound => failure.exit_with(NOT_FOUND),
            _ => failure.exit_with(NOT_EXECUTABLE),
        }
    })
}

/// Makes the mount at `root` the root of this process, with devices, /proc and the resolver's file.
fn enter(root: &Path) -> io::Result<()> {
    let clone = |path: &str| open_tree(CWD, path, OpenTreeFlags::OPEN_TREE_CLONE);
    let devices = DEVICES.map(|name| clone(&format!("/dev/{name}")));
    let resolver = clone(RESOLVER);
    chdir(root)?;
    // The old root is over the new one then, at the working directory.
    pivot_root(".", ".")?;
    let safe = MountFlags::NOSUID | MountFlags::NOEXEC;
    make_directory("/proc")?;
    // While the old /proc is still there: the kernel wants to see that in a namespace of users.
    mount("proc", "/proc", "proc", safe | MountFlags::NODEV, None)?;
    unmount(".", UnmountFlags::DETACH)?;
    chdir("/")?;
    make_directory("/dev")?;
    mount("tmpfs", "/dev", "tmpfs", safe, Some(c"mode=755"))?;
    for (name, device) in DEVICES.iter().zip(devices) {
        place(device, &format!("/dev/{name}"))?;
    }
    for (name, of_file_system, options) in [
        ("/dev/pts", "devpts", c"newinstance,ptmxmode=0666,mode=0620"),
        ("/dev/shm", "tmpfs", c"mode=1777"),
    ] {
        make_directory(name)?;
        mount(of_file_system, name, of_file_system, safe, Some(options))?;
    }
    for (target, name) in [
        ("pts/ptmx", "/dev/ptmx"),
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ] {
        symlink(target, name)?;
    }
    // A program without a network does not need it, and an image can have no /etc.
    let _ = place(resolver, RESOLVER);
    Ok(())
}

fn make_directory(path: &str) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Mounts a file of the old root at `path`.
fn place(file: Result<OwnedFd, Errno>, path: &str) -> io::Result<()> {
    let file = file?;
    if !Path::new(path).exists() {
        File::create(path)?;
    }
    Ok(move_mount(
        file,
        "",
        CWD,
        path,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )?)
}

/// A user of the image.
struct User {
    id: u32,
    group: u32,
    home: String,
}

impl User {
    /// The user `text`, USER[:GROUP], by the files in /etc; root for an empty text.
    fn find(text: &str) -> Result<User, CommandError> {
        let (user, group) = text.split_once(':').unwrap_or((text, ""));
        let user = if user.is_empty() { "0" } else { user };
        let unknown =
            |what: &str, name: &str| CommandError::new(format!("the image has no {what} {name:?}"));
        let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let fields = passwd
            .lines()
            .map(|line| line.split(':').collect::<Vec<_>>());
        let is_it = |fields: &Vec<&str>| fields.len() > 5 && [fields[0], fields[2]].contains(&user);
        let found = fields.into_iter().find(is_it);
        let field = |index: usize| found.as_ref().and_then(|fields| fields[index].parse().ok());
        let id = field(2).or_else(|| user.parse().ok());
        let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
        let group = match group {
            "" => field(3).or(Some(0)),
            group => group.parse().ok().or_else(|| {
                let line = groups
                    .lines()
                    .find(|line| line.split(':').next() == Some(group));
                line?.split(':').nth(2)?.parse().ok()
            }),
        };
        Ok(User {
            id: id.ok_or_else(|| unknown("user", user))?,
            group: group.ok_or_else(|| unknown("group", text))?,
            home: found.map_or("/".to_owned(), |fields| fields[5].to_owned()),
        })
    }
}
