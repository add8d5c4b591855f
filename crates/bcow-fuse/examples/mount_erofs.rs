//! Mounts a plain EROFS image, as `mkfs.erofs` makes it: the FUSE door without a BCoW file below.
//!
//! `mount_erofs [-f] [-o OPTIONS] [-t THREADS] IMAGE DIRECTORY`; as `bcow mount`, it returns when
//! the mount is ready.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use bcow_erofs::reader::Filesystem;
use bcow_fuse::daemon::{self, Launch};
use bcow_fuse::signals::{Ground, Signals};
use bcow_fuse::{ImageFs, MountOptions, Session};

/// A plain file as an address space.
struct FileDevice {
    file: File,
    size: u64,
}

impl bcow::BlockDevice for FileDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), bcow::Error> {
        self.file
            .read_exact_at(buf, offset)
            .map_err(|source| bcow::Error::Io {
                action: "read",
                offset,
                source,
            })
    }
}

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
        match daemon::launch()? {
            Launch::Ready => return Ok(()),
            Launch::Failed(code) => std::process::exit(code.into()),
        }
    }
    let ground = match foreground {
        true => Ground::Foreground,
        false => Ground::Background,
    };
    let signals = Signals::block(ground)?;
    let file = File::open(image)?;
    let size = file.metadata()?.len();
    let fs = Filesystem::open(Arc::new(FileDevice { file, size }))?;
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
