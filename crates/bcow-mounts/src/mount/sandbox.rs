//! The sandbox of the process of a mount.

use std::path::{Path, PathBuf};

use bcow::chain::directory_of;
use bcow_fuse::kernel::{Device, DiskMount, Mounter};
use bcow_fuse::{AnySession, MountOptions, UnmountProcess};
use bcow_images::error::{CommandError, Context};
use bcow_images::sandbox;
use bcow_sandbox::{Access, Attributes, CapabilitySet, OF_DISK, OF_UPPER, Sandbox};
use bcow_union::log;

use super::driver::Way;
use super::fuse::Mounted;
use crate::args::MountArgs;

/// A process that enters the sandbox in steps.
pub struct Prepared {
    /// Unmounts, and looks at other processes, when this process cannot: it can give up all files.
    unmounting: Option<UnmountProcess>,
    /// Mounts with the kernel driver when this process cannot.
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

/// Starts the processes that do what this one cannot do later. This one has one thread, and no file
/// of the mount.
pub fn prepare(
    args: &MountArgs,
    way: &Way,
    options: &MountOptions,
) -> Result<Prepared, CommandError> {
    let mut prepared = Prepared {
        unmounting: None,
        mounter: None,
        confined: None,
    };
    let layers = args.layers()?;
    let images = layers.iter().chain([&args.image]);
    if !args.sandbox.prepare(images, &args.stores)? {
        return Ok(prepared);
    }
    let when = args.sandbox.when();
    if !matches!(way, Way::Upper { .. }) {
        match UnmountProcess::start(when) {
            Ok(process) => prepared.unmounting = Some(process),
            Err(error) => drop(refused(args, &error)?),
        }
    }
    // Only root mounts with the kernel driver.
    if !matches!(way, Way::Fuse { .. }) && rustix::process::geteuid().is_root() {
        match Mounter::start(args.directory(), options, when) {
            Ok(mounter) => prepared.mounter = Some(mounter),
            Err(error) => {
                let reason = format!("another process cannot mount: {error}");
                args.sandbox.without(&reason)?;
            }
        }
    }
    Ok(prepared)
}

fn refused(args: &MountArgs, error: &std::io::Error) -> Result<Sandbox, CommandError> {
    args.sandbox
        .without(&format!("another process cannot unmount: {error}"))
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
        let Some(mounter) = self.mounter.take() else {
            return Ok(None);
        };
        self.confined = Some(Confined::new(args, Rights::of_disk(disk))?);
        Ok(Some(mounter))
    }

    /// Enters the sandbox, and takes requests of other commands. With the FUSE driver, the process
    /// has one thread before.
    pub fn enter(self, args: &MountArgs, mounted: &mut Mounted) -> Result<(), CommandError> {
        let confined = match (&mounted.session, self.unmounting) {
            (AnySession::Fuse(session), Some(process)) => match session.unmount_by(process) {
                Ok(()) => Some(Confined::new(args, Rights::of_fuse(args))?),
                Err(error) => {
                    refused(args, &error)?;
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
    fn new(args: &MountArgs, mut rights: Rights) -> Result<Self, CommandError> {
        log::connect_syslog();
        sandbox::seal(&args.stores)?;
        let remote = args.stores.remote.rights();
        rights.attributes = rights.attributes.max(remote.attributes);
        let mut entered = args.sandbox.begin_changing(rights.attributes)?;
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

    /// Gives up sockets too.
    fn finish(mut self) -> Result<Sandbox, CommandError> {
        let finished = self.entered.finish(self.rights.attributes);
        finished.context(sandbox::cannot)?;
        Ok(self.entered)
    }
}
