//! The sandbox of the process of a read-only mount with the FUSE driver.

use std::path::{Path, PathBuf};

use bcow::chain::directory_of;
use bcow_fuse::UnmountProcess;
use bcow_images::error::CommandError;
use bcow_images::sandbox;
use bcow_sandbox::{Access, CapabilitySet};
use bcow_union::log;

use super::fuse::Mounted;
use crate::args::MountArgs;

/// What a process needs that enters the sandbox later. `None` if it stays outside. The process has
/// one thread, and no file of the mount.
pub fn prepare(args: &MountArgs) -> Result<Option<UnmountProcess>, CommandError> {
    if args.sandbox.is_off() || !is_possible(args)? {
        return Ok(None);
    }
    match UnmountProcess::start() {
        Ok(process) => Ok(Some(process)),
        Err(error) => refused(args, &format!("a process cannot be started: {error}")),
    }
}

/// Fails if the user requires a sandbox for a mount that has none.
pub fn is_possible(args: &MountArgs) -> Result<bool, CommandError> {
    let layers = args.layers()?;
    let reason = match () {
        () if args.pool.is_some() => "a pool has none",
        () if args.upper.path().is_some() => "the mount has an upper",
        () if args
            .stores
            .may_need_network(layers.iter().chain([&args.image])) =>
        {
            sandbox::NETWORK
        }
        () => return Ok(true),
    };
    refused(args, reason).map(|_| false)
}

fn refused(args: &MountArgs, reason: &str) -> Result<Option<UnmountProcess>, CommandError> {
    args.sandbox.without(reason).map(|_| None)
}

/// Enters the sandbox, before the process has a second thread.
pub fn enter(
    args: &MountArgs,
    mounted: &mut Mounted,
    process: Option<UnmountProcess>,
) -> Result<(), CommandError> {
    let Some(process) = process else {
        return Ok(());
    };
    let Some(session) = mounted.session.fuse() else {
        return refused(args, "the kernel mounts the disk").map(drop);
    };
    if let Err(error) = session.unmount_by(process) {
        return refused(args, &format!("no other process can unmount: {error}")).map(drop);
    }
    log::connect_syslog();
    let mut entered = args.sandbox.begin(&[], &args.stores)?;
    let mut paths = vec![
        (PathBuf::from("/proc/self"), Access::Read),
        (PathBuf::from("/dev/null"), Access::Write),
    ];
    let written = [args.log_file.as_deref(), args.record.as_deref()];
    let written = written.into_iter().flatten();
    paths.extend(written.map(|path| (directory_of(path), Access::Write)));
    if let Some(path) = args
        .metrics
        .as_deref()
        .and_then(|at| at.strip_prefix("unix:"))
    {
        paths.push((directory_of(Path::new(path)), Access::Remove));
    }
    let capabilities = match paths.len() {
        2 => CapabilitySet::empty(),
        _ => CapabilitySet::DAC_OVERRIDE,
    };
    sandbox::complete(&mut entered, &paths, capabilities)?;
    mounted.stats.set_sandbox(entered.in_force());
    mounted.service.sandbox = entered.in_force();
    Ok(())
}
