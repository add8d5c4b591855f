//! The sandbox of the process of a mount.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use bcow::chain::directory_of;
use bcow_fuse::kernel::{Device, DiskMount};
use bcow_fuse::mounter::{self, Mounter, Task};
use bcow_fuse::{AnySession, MountOptions};
use bcow_images::error::{CommandError, Context};
use bcow_images::sandbox;
use bcow_sandbox::fork::has_one_thread;
use bcow_sandbox::{Access, Attributes, CapabilitySet, OF_DISK, OF_UPPER, Sandbox, Sockets};
use bcow_union::log;

use super::driver::Way;
use super::fuse::Mounted;
use crate::args::MountArgs;
use crate::error::failure;

/// A process that enters the sandbox in steps.
pub struct Prepared {
    /// Mounts and unmounts when this process cannot: it can give up all files.
    mounter: Option<Mounter>,
    confined: Option<Confined>,
}

/// A process that has given up all files but those of its mount.
struct Confined {
    entered: Sandbox,
    rights: Rights,
}

/// What the process of a mount needs until its end, for the content of the mount.
struct Rights {
    files: Vec<(PathBuf, Access)>,
    capabilities: CapabilitySet,
    attributes: Attributes,
}

/// Starts the mounter of a process that is about to begin, if that will be in a sandbox: this
/// process only waits meanwhile.
pub fn mounter_of_daemon<'a>(
    args: &'a MountArgs,
    way: &Way,
    options: &'a MountOptions,
) -> Option<Box<dyn Fn(OwnedFd) + 'a>> {
    let (task, when) = (task(args, way, options), args.sandbox.when());
    let start = move |socket: OwnedFd| {
        // Without a mounter, this end of the socket closes, which the other process notices.
        let _ = mounter::start_on(&socket, task, when);
    };
    (!args.sandbox.is_off() && has_one_thread()).then(|| Box::new(start) as _)
}

fn task<'a>(args: &'a MountArgs, way: &Way, options: &'a MountOptions) -> Task<'a> {
    Task {
        target: args.directory(),
        options,
        may_mount: !matches!(way, Way::Fuse { .. }),
    }
}

/// Starts the processes that do what this one cannot do later, unless there is a mounter at this
/// socket. This process has one thread, and no file of the mount.
pub fn prepare(
    args: &MountArgs,
    way: &Way,
    options: &MountOptions,
    mounter: Option<OwnedFd>,
) -> Result<Prepared, CommandError> {
    let mut prepared = Prepared {
        mounter: None,
        confined: None,
    };
    let layers = args.layers()?;
    let images = layers.iter().chain([&args.image]);
    if !args.sandbox.prepare(images, &args.stores)? {
        return Ok(prepared);
    }
    let start = || Mounter::start(task(args, way, options), args.sandbox.when());
    match mounter.map_or_else(start, |socket| Ok(Mounter::at(socket))) {
        Ok(mounter) => prepared.mounter = Some(mounter),
        Err(error) => drop(refused(args, &error.to_string())?),
    }
    Ok(prepared)
}

fn refused(args: &MountArgs, why: &str) -> Result<Sandbox, CommandError> {
    args.sandbox
        .without(&format!("another process cannot mount: {why}"))
}

/// Fails if the user requires a sandbox for a mount that has none.
pub fn check(args: &MountArgs) -> Result<(), CommandError> {
    match args.pool {
        Some(_) => {
            let reason = "the process is that of the pool, which has its own";
            args.sandbox.without(reason).map(drop)
        }
        None => Ok(()),
    }
}

impl Prepared {
    /// Gives up all files but those of a disk, before its content is served. Returns the process
    /// that mounts it, if there is one. This process has one thread.
    pub fn confine(
        &mut self,
        args: &MountArgs,
        disk: &DiskMount,
    ) -> Result<Option<Mounter>, CommandError> {
        // Only root mounts with the kernel driver.
        let is_root = rustix::process::geteuid().is_root();
        let Some(mounter) = self.mounter.take().filter(|_| is_root) else {
            return Ok(None);
        };
        let rights = Rights::of_disk(disk);
        self.confined = Some(Confined::new(args, rights, Sockets::UntilTheEnd)?);
        Ok(Some(mounter))
    }

    /// Enters the sandbox, and takes requests of other commands. With the FUSE driver, the process
    /// has one thread before.
    pub fn enter(self, args: &MountArgs, mounted: &mut Mounted) -> Result<(), CommandError> {
        let confined = match (&mounted.session, self.mounter) {
            (AnySession::Fuse(session), Some(mounter)) => match session.unmount_by(mounter) {
                Ok(()) => {
                    mounted.prepare_requests();
                    let rights = Rights::of_fuse(args);
                    Some(Confined::new(args, rights, Sockets::OfOpenOnes)?)
                }
                Err(error) => {
                    refused(args, &failure(&error).in_one_line())?;
                    None
                }
            },
            _ => self.confined,
        };
        // Its thread is in the sandbox then.
        mounted.take_requests(|_| ());
        let entered = match confined {
            Some(confined) => confined.finish()?,
            None => Sandbox::off(),
        };
        let in_force = entered.in_force();
        mounted.stats.set_sandbox(in_force.clone());
        mounted.service.sandbox = in_force;
        Ok(())
    }
}

impl Rights {
    /// With the FUSE driver.
    fn of_fuse(args: &MountArgs) -> Self {
        let own = (PathBuf::from("/proc/self"), Access::Read);
        match args.upper.path() {
            Some(upper) => Rights {
                files: vec![(upper.to_owned(), Access::All), own],
                capabilities: OF_UPPER,
                attributes: Attributes::OfAllFiles,
            },
            None => Rights {
                files: vec![own],
                capabilities: CapabilitySet::empty(),
                attributes: Attributes::Refused,
            },
        }
    }

    /// With the kernel driver.
    fn of_disk(disk: &DiskMount) -> Self {
        let mut files = vec![
            (PathBuf::from("/proc/self"), Access::Read),
            // The files of loop devices.
            (PathBuf::from("/sys/devices/virtual/block"), Access::Read),
        ];
        match disk.device {
            Device::ReadOnly(_) => Rights {
                files,
                capabilities: CapabilitySet::empty(),
                attributes: Attributes::Refused,
            },
            Device::Writable(_) => {
                // For snapshots.
                files.push((directory_of(&disk.path), Access::Write));
                Rights {
                    files,
                    capabilities: OF_DISK,
                    attributes: Attributes::OfOpenFiles,
                }
            }
        }
    }
}

impl Confined {
    /// Gives up all files and capabilities but these, and those for the options of the mount.
    fn new(args: &MountArgs, mut rights: Rights, sockets: Sockets) -> Result<Self, CommandError> {
        log::connect_syslog();
        sandbox::seal(&args.stores)?;
        let remote = args.stores.remote.rights();
        rights.attributes = rights.attributes.max(remote.attributes);
        let mut entered =
            args.sandbox
                .begin_changing(rights.attributes, sockets, args.cache_size)?;
        let mut capabilities = rights.capabilities;
        let written = [args.log_file.as_deref(), args.record.as_deref()];
        let written = written.into_iter().flatten();
        let mut own: Vec<_> = written
            .map(|path| (directory_of(path), Access::Write))
            .collect();
        if let Some(path) = args
            .metrics
            .as_deref()
            .and_then(|at| at.strip_prefix("unix:"))
        {
            own.push((directory_of(Path::new(path)), Access::Remove));
        }
        own.extend(remote.files);
        if !own.is_empty() {
            capabilities |= CapabilitySet::DAC_OVERRIDE;
        }
        own.push((PathBuf::from("/dev/null"), Access::Write));
        own.extend_from_slice(&rights.files);
        let confined = entered.confine(&own, capabilities);
        confined.context(sandbox::cannot)?;
        Ok(Confined { entered, rights })
    }

    /// Gives up sockets too, if it has not yet.
    fn finish(mut self) -> Result<Sandbox, CommandError> {
        let finished = self.entered.finish(self.rights.attributes);
        finished.context(sandbox::cannot)?;
        Ok(self.entered)
    }
}
