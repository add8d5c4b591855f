//! `--if-mounted bind`: a mount whose upper is mounted already becomes a bind mount of that mount.
//!
//! One process serves both mounts, from one page cache. So both show the same files at any moment,
//! also those of which only some blocks are in the upper.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use bcow_fuse::options::Access;
use bcow_fuse::stats::document::Document;
use bcow_fuse::{Driver, MountOptions, MountedImage, WhenBusy};
use bcow_images::error::CommandError;
use bcow_images::running::{self, LOCK_IN_UPPER, ProcessState, Server, Service};

use super::owners;
use crate::args::MountArgs;
use crate::ask::{self, Answer};
use crate::error::failure;
use crate::umount::file_at;
use bcow_images::image::Messages;
use bcow_images::upper::RETRY_PAUSE;

/// How long to wait for another mount of the same upper that is being made.
const TURN_WITHIN: Duration = Duration::from_secs(30);

/// The result of an attempt to bind.
pub enum Attempt {
    /// Nothing is left to do: DIR shows the mount of the upper, or nothing was to be mounted.
    Done,
    /// The upper has no mount that can be bound. The caller makes one, and keeps the turn until
    /// that mount is ready.
    Free(Turn),
}

/// The lock of an upper with which a command has the right to mount it, among the commands with
/// `--if-mounted bind`: the second of two that start together must find the mount of the first. It
/// protects nothing else, so a command that waits in vain continues without it.
pub type Turn = Option<File>;

fn wait_for_turn(upper: &Path) -> Turn {
    let start = Instant::now();
    // Without a directory there is no mount to wait for.
    File::open(upper).ok().filter(|directory| {
        loop {
            match directory.try_lock() {
                Ok(()) => return true,
                Err(TryLockError::WouldBlock) if start.elapsed() < TURN_WITHIN => {}
                Err(_) => return false,
            }
            std::thread::sleep(RETRY_PAUSE);
        }
    })
}

/// Binds the mount of the upper to DIR, if there is one and the command line asks for it.
pub fn attempt(
    args: &MountArgs,
    options: &MountOptions,
    ui: &dyn Messages,
) -> Result<Attempt, CommandError> {
    let Some(upper) = args.upper.path_to_bind() else {
        return Ok(Attempt::Free(None));
    };
    let turn = wait_for_turn(upper);
    for (server, service) in mounts_of(upper) {
        let Some(device) = &service.device else {
            continue;
        };
        let image = args.image.absolute();
        let has_same_content =
            image.to_string_lossy() == service.image && args.layer_names()? == service.layers;
        let has_same_owners = service.owners == owners(options);
        let is_writable_enough = service.mode == "rw" || options.asks_for_read_only();
        if !(has_same_content && has_same_owners && is_writable_enough) {
            continue;
        }
        let bound = bcow_fuse::bind(device, args.directory(), options);
        let Some(mount) = bound.map_err(|error| failure(&error))? else {
            continue;
        };
        let is_same = shows_upper(&mount, upper, &server, options);
        if let Ok(true) = is_same {
            ui.status(&format_args!(
                "{} is a bind mount: process {} serves the upper {} already",
                args.directory().display(),
                server.pid,
                upper.display()
            ));
            return Ok(Attempt::Done);
        }
        let detached = bcow_fuse::unmount(&mount.path, WhenBusy::Detach);
        detached.map_err(|error| failure(&error))?;
        is_same?;
    }
    Ok(Attempt::Free(turn))
}

/// The mounts of an upper in this mount namespace, by processes of this user, without a mount that
/// is ending.
fn mounts_of(upper: &Path) -> Vec<(Server, Service)> {
    let lock = upper.join(LOCK_IN_UPPER);
    let Some(identity) = file_at(upper).filter(|_| lock.exists()) else {
        return Vec::new();
    };
    let holders = running::lock_holders(&lock);
    let mut servers: Vec<Server> = holders.into_iter().filter_map(running::server_of).collect();
    if servers.is_empty() {
        // The list of locks names the process that took the lock, which may have left it to
        // another one. And some file systems have another device number there.
        servers = running::servers();
    }
    let own = rustix::process::geteuid().as_raw();
    servers.retain(|server| {
        server.uid == own && !server.is_in_other_namespace && server.state == ProcessState::Running
    });
    let is_of_upper = |service: &Service| {
        let path = service.upper.as_deref().map(Path::new);
        service.kind == "mount" && path.and_then(file_at) == Some(identity)
    };
    let mut found = Vec::new();
    for server in servers {
        let services = server
            .services
            .iter()
            .filter(|service| is_of_upper(service));
        found.extend(services.map(|service| (server.clone(), service.clone())));
    }
    found
}

/// Whether a bind mount, which now keeps its file system, shows the upper to the users of the
/// options: the mount may have ended just before it, and another one may have its device number.
fn shows_upper(
    mount: &MountedImage,
    upper: &Path,
    server: &Server,
    options: &MountOptions,
) -> Result<bool, CommandError> {
    if mount.driver == Driver::Fuse && mount.owner.is_some() != (options.access() == Access::Owner)
    {
        return Ok(false);
    }
    let json = match ask::ask(mount, ask::ANSWER_TIMEOUT) {
        Answer::Statistics(json) => json,
        Answer::NotServed | Answer::NoProcess | Answer::Refused(_) => return Ok(false),
        Answer::Timeout => {
            let (cause, hint) = ask::explain_timeout(mount);
            let error = CommandError::new(format!(
                "cannot bind the mount of upper {} by process {}",
                upper.display(),
                server.pid
            ))
            .caused_by_text(cause);
            return Err(error.hint_if(hint));
        }
    };
    let document = ask::read(&mount.path, &json).ok();
    let served = document.as_ref().and_then(upper_of).map(Path::new);
    let served = served.and_then(file_at);
    Ok(served.is_some() && served == file_at(upper))
}

fn upper_of(document: &Document) -> Option<&str> {
    match (&document.upper, &document.disk) {
        (Some(upper), _) => Some(&upper.path),
        (None, disk) => disk.as_ref()?.upper.as_deref(),
    }
}
