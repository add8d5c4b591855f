//! The sandbox of the process of a mount.

use std::path::{Path, PathBuf};

use bcow::chain::directory_of;
use bcow_fuse::{AnySession, UnmountProcess, starter};
use bcow_images::error::{CommandError, Context};
use bcow_images::sandbox;
use bcow_sandbox::{Access, Attributes, CapabilitySet, OF_UPPER, Sandbox};
use bcow_union::log;

use super::driver::Way;
use super::fuse::Mounted;
use crate::args::MountArgs;
use crate::error::failure;

/// A process that enters the sandbox in steps.
pub struct Prepared {
    /// Unmounts when this process cannot: it can give up all files.
    unmounting: Option<UnmountProcess>,
    /// Whether it gives up some rights before it opens the content: it may mount by the kernel
    /// driver, or needs the network.
    is_service: bool,
    /// What it has given up.
    begun: Sandbox,
}

/// Starts the processes that do what this one cannot do later. This one has one thread, and no file
/// of the mount.
pub fn prepare(args: &MountArgs, way: &Way) -> Result<Prepared, CommandError> {
    let mut prepared = Prepared {
        unmounting: None,
        is_service: false,
        begun: Sandbox::off(),
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

    /// Enters the sandbox, and takes requests of other commands. With the FUSE driver, the process
    /// has one thread before, unless it needs the network.
    pub fn enter(self, args: &MountArgs, mounted: &mut Mounted) -> Result<(), CommandError> {
        let mut entered = match (&mounted.session, self.unmounting) {
            (AnySession::Fuse(session), Some(process)) => match session.unmount_by(process) {
                Ok(()) => Some(confine(args)?),
                Err(error) => {
                    refused(args, &error)?;
                    None
                }
            },
            _ => None,
        };
        // Its thread is in the sandbox then.
        mounted.take_requests(|_| ());
        if let Some(entered) = &mut entered {
            let finished = entered.finish(attributes(args));
            finished.context(sandbox::cannot)?;
        }
        let in_force = entered.unwrap_or(self.begun).in_force();
        mounted.stats.set_sandbox(in_force.clone());
        mounted.service.sandbox = in_force;
        Ok(())
    }
}

/// The attributes of files that the process changes.
fn attributes(args: &MountArgs) -> Attributes {
    match args.upper.path() {
        Some(_) => Attributes::OfAllFiles,
        None => Attributes::Refused,
    }
}

/// Gives up all files and capabilities but those that the mount needs.
fn confine(args: &MountArgs) -> Result<Sandbox, CommandError> {
    log::connect_syslog();
    let mut entered = args.sandbox.begin_changing(attributes(args))?;
    let mut paths = vec![(PathBuf::from("/dev/null"), Access::Write)];
    let mut capabilities = CapabilitySet::empty();
    match args.upper.path() {
        Some(upper) => {
            paths.push((upper.to_owned(), Access::All));
            // The groups and capabilities of the processes that use the mount.
            paths.push((PathBuf::from("/proc"), Access::Read));
            capabilities |= OF_UPPER;
        }
        None => paths.push((PathBuf::from("/proc/self"), Access::Read)),
    }
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
    paths.append(&mut own);
    let confined = entered.confine(&paths, capabilities);
    confined.context(sandbox::cannot)?;
    Ok(entered)
}
