//! Mounts a plain EROFS image, as `mkfs.erofs` makes it: the FUSE driver without a BCoW file below.
//!
//! `mount_erofs [-f] [-o OPTIONS] [-t THREADS] IMAGE DIRECTORY`; as `bcow mount`, it returns when
//! the mount is ready.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use bcow_erofs::reader::Filesystem;
use bcow_fuse::daemon::{self, Launch};
use bcow_fuse::signals::{Ground, Signals};
use bcow_fuse::{ImageFs, MountOptions, Session};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut options = MountOptions::default();
    let mut threads = 4;
    let mut foreground = false;
    let mut paths = Vec::new();
    let mut arguments = std::env::args_os().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or("a value is missing");
        match argument.to_str() {
            Some("-f") => foreground = true,
            Some("-o") => options.apply(&value()?)?,
            Some("-t") => threads = value()?.to_string_lossy().parse()?,
            _ => paths.push(PathBuf::from(argument)),
        }
    }
    let [image, target] = paths.as_slice() else {
        return Err("an image and a directory are needed".into());
    };
    let readiness = daemon::started_by_launch();
    if !foreground && readiness.is_none() {
        match daemon::launch(None)? {
            Launch::Ready => return Ok(()),
            Launch::Failed(code) => std::process::exit(code.into()),
        }
    }
    let ground = if foreground { Ground::Foreground } else { Ground::Background };
    let signals = Signals::block(ground)?;
    // An image in memory is a block device too.
    let fs = Filesystem::open(Arc::new(std::fs::read(image)?))?;
    options.set_default_source(OsString::from(image));
    let session = Session::mount(
        ImageFs::new(Arc::new(fs)),
        Arc::default(),
        target,
        &options,
        threads,
    )?;
    if let Some(readiness) = readiness {
        readiness.announce()?;
    }
    session.serve_until_signal(signals)?;
    Ok(())
}
