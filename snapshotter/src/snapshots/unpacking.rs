//! Mounts into which containerd unpacks a layer: overlayfs over a mount of the layers below.
//!
//! An unpacking creates and replaces whole files. overlayfs does that several times as fast as a
//! mount of `bcow` with an upper, and `bcow commit` reads its uppers too.

use std::ffi::CString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use bcow_tool::host::make_private;
use bcow_tool::{At, HostError};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, XattrFlags, utimensat};
use rustix::mount::{MountFlags, mount};

use super::mounting::{self, Mounter};
use crate::error::Error;
use crate::mount::{of_unpacking, options_of_overlay, text};
use crate::protocol::Mount;

/// Largest size of a list of attributes, and of the value of one (xattr(7)).
const MAX_XATTR_BYTES: usize = 64 << 10;

/// The directories of a snapshot into which a layer is unpacked.
pub struct Unpacking {
    /// The layers below are mounted here. They stay mounted as long as the snapshot is active.
    pub lower: PathBuf,
    /// The new files.
    pub upper: PathBuf,
    /// The directory that overlayfs needs. It exists when the upper has the attributes of the root.
    pub work: PathBuf,
}

impl Unpacking {
    /// Mounts the layers below, and prepares the upper. `layers` is their mount. Returns the mounts
    /// that containerd makes.
    pub fn prepare(&self, mounter: &Mounter<'_>, layers: &Mount) -> Result<Vec<Mount>, Error> {
        mounter.ensure(layers, &self.lower)?;
        if !self.is_prepared() {
            // overlayfs shows the attributes of the upper as those of the root.
            copy_attributes(&self.lower, &self.upper)?;
            make_private(&self.work)?;
        }
        Ok(of_unpacking(&self.lower, &self.upper, &self.work))
    }

    /// Whether overlayfs may have used the upper.
    pub fn is_prepared(&self) -> bool {
        self.work.exists()
    }

    /// Ends the unpacking, so that the upper can be read. Does nothing for an upper of `bcow`.
    pub fn finish(&self) -> Result<(), Error> {
        if !self.is_prepared() {
            return Ok(());
        }
        let table = Path::new("/proc/self/mounts");
        let mounts = fs::read_to_string(table).at("read", table)?;
        if mounts.contains(&format!("upperdir={},", text(&self.upper))) {
            return Err(Error::State(format!(
                "{} is mounted with overlayfs",
                self.upper.display()
            )));
        }
        // An overlayfs elsewhere that still uses it keeps it alive.
        mounting::end(&self.lower)?;
        // overlayfs does not know what this directory means to `bcow`.
        let reserved = self.upper.join(".bcow");
        match reserved.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Ok(Err(error).at("examine", &reserved)?),
            Ok(_) => Err(Error::State(
                "the layer has a file /.bcow, a name that bcow reserves".to_owned(),
            )),
        }
    }
}

/// Whether overlayfs can use directories in `scratch`, an empty directory.
pub fn is_supported(scratch: &Path) -> Result<bool, HostError> {
    let [lower, upper, work, target] =
        ["lower", "upper", "work", "target"].map(|name| scratch.join(name));
    for directory in [&lower, &upper, &work, &target] {
        make_private(directory)?;
    }
    let options = options_of_overlay(&lower, &upper, &work).join(",");
    let options = CString::new(options)
        .map_err(io::Error::from)
        .at("use", scratch)?;
    match mount(
        "overlay",
        &target,
        "overlay",
        MountFlags::empty(),
        options.as_c_str(),
    ) {
        Ok(()) => {
            mounting::end(&target)?;
            Ok(true)
        }
        Err(errno) => {
            tracing::info!(
                "layers are unpacked through FUSE, as overlayfs refuses {}: {errno}",
                scratch.display()
            );
            Ok(false)
        }
    }
}

/// Gives a directory the owner, mode, extended attributes and times of another one.
fn copy_attributes(from: &Path, to: &Path) -> Result<(), HostError> {
    let found = fs::metadata(from).at("examine", from)?;
    std::os::unix::fs::chown(to, Some(found.uid()), Some(found.gid())).at("change", to)?;
    fs::set_permissions(to, fs::Permissions::from_mode(found.mode() & 0o7777)).at("change", to)?;
    let mut names = vec![0; MAX_XATTR_BYTES];
    let length = rustix::fs::listxattr(from, &mut names[..]).at("list the attributes of", from)?;
    let names = names[..length].split(|&byte| byte == 0);
    let mut value = vec![0; MAX_XATTR_BYTES];
    for name in names.filter(|name| !name.is_empty()) {
        let length = rustix::fs::getxattr(from, name, &mut value[..]);
        let length = length.at("read an attribute of", from)?;
        rustix::fs::setxattr(to, name, &value[..length], XattrFlags::empty())
            .at("set an attribute of", to)?;
    }
    let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    let times = Timestamps {
        last_access: time(found.atime(), found.atime_nsec()),
        last_modification: time(found.mtime(), found.mtime_nsec()),
    };
    utimensat(CWD, to, &times, AtFlags::empty()).at("change", to)
}
