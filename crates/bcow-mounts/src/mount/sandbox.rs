//! The sandbox of the process of a mount.

use std::path::{Path, PathBuf};

use bcow::chain::directory_of;
use bcow_fuse::kernel::{Device, DiskMount, Mounter};
use bcow_fuse::{AnySession, MountOptions, UnmountProcess, starter};
use bcow_images::error::{CommandError, Context};
use bcow_images::sandbox;
use bcow_sandbox::{Access, Attributes, CapabilitySet, OF_DISK, OF_UPPER, Sandbox};
use bcow_union::log;

use super::driver::Way;
use super::fuse::Mounted;
use crate::args::MountArgs;
use crate::error::failure;

/// A process that enters the sandbox in steps.
pub struct Prepared {
    /// Unmounts when this process cannot: it can give up all files.
    unmounting: Option<UnmountProcess>,
    /// Mounts with the kernel driver when this process cannot.
    mounter: Option<Mounter>,
    /// Whether it gives up some rights before it opens the content: it may mount by the kernel
    /// driver, or needs the network.
    is_service: bool,
    /// What it has given up before.
    begun: Sandbox,
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
        is_service: false,
        begun: Sandbox::off(),
        confined: None,
    };
    if args.sandbox.is_off() {
        return Ok(prepared);
    }
    let layers = args.layers()?;
    let images = layers.iter().chain([&args.image]);
    let needs_network = args.stores.may_need_network(images);
    prepared.is_service = needs_network || !matches!(way, Way::Fuse { .. });
    // First, because the other process would use the starter.
    if !needs_network && !matches!(way, Way::Upper { .. }) {
        match UnmountProcess::start() {
            Ok(process) => prepared.unmounting = Some(process),
            Err(error) => drop(refused(args, &error)?),
        }
    }
    // Only root mounts with the kernel driver. If the FUSE driver mounts after all, root needs no
    // fusermount3.
    if prepared.is_service && !needs_network && rustix::process::geteuid().is_root() {
        match Mounter::start(args.directory(), options) {
            Ok(mounter) => {
                prepared.mounter = Some(mounter);
                return Ok(prepared);
            }
            Err(error) => {
                let reason = format!("another process cannot mount: {error}");
                args.sandbox.without(&reason)?;
            }
        }
    }
    if prepared.is_service
        && let Err(error) = starter::start(|_| ())
    {
        args.sandbox.without(&failure(&error).in_one_line())?;
        prepared.is_service = false;
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
    /// Gives up what neither the opening of the content nor the mount needs.
    pub fn begin(mut self, args: &MountArgs) -> Result<Self, CommandError> {
        if self.is_service {
            self.begun = args.sandbox.begin_service()?;
        }
        Ok(self)
    }

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
    /// has one thread before, unless it needs the network.
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
            None => self.begun,
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
        match args.upper.path() {
            Some(upper) => Rights {
                files: vec![
                    (upper.to_owned(), Access::All),
                    // The groups and capabilities of the processes that use the mount.
                    (PathBuf::from("/proc"), Access::Read),
                ],
                capabilities: OF_UPPER,
                attributes: Attributes::OfAllFiles,
            },
            None => Rights {
                files: vec![(PathBuf::from("/proc/self"), Access::Read)],
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
    fn new(args: &MountArgs, rights: Rights) -> Result<Self, CommandError> {
        log::connect_syslog();
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
