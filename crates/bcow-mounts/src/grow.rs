//! Growth of a disk that is mounted with the kernel driver.

use std::path::Path;

use bcow_fuse::growth::{self, GrowError};
use bcow_fuse::{Driver, MountError, MountedImage};
use bcow_images::error::{CommandError, Context};
use bcow_images::kernel_upper::is_kernel_upper;
use bcow_images::running::{self, Server, Service};
use bcow_images::size::plural;

use crate::ask;
use crate::error::{because, failure};

/// The mount with the kernel driver that the user means by `path`: its mountpoint, its upper or its
/// disk. `None` for a disk that is not mounted.
pub fn find(path: &Path) -> Result<Option<MountedImage>, CommandError> {
    // The process of a mount may hang, so the list of mounts comes before a request to it.
    match bcow_fuse::mounted_image(path) {
        Ok(mount) if mount.driver == Driver::Fuse => Err(CommandError::new(format!(
            "{} is mounted with the FUSE driver, and has no disk",
            path.display()
        ))
        .hint("`--size-limit` of the next mount changes the limit of its upper")),
        Ok(MountedImage {
            driver: Driver::Direct(file),
            ..
        }) => Err(CommandError::new(format!(
            "{} is a mount of {}, an image, which never changes",
            path.display(),
            file.display()
        ))),
        Ok(mount) => Ok(Some(mount)),
        Err(_) if !path.is_dir() => {
            let server = mount_of(path, |service| {
                service.upper.is_none().then_some(&service.image)
            });
            server.map(|server| visible(path, server)).transpose()
        }
        Err(MountError::NotMounted(_)) => find_upper(path).map(Some),
        Err(error) => Err(failure(&error)),
    }
}

fn find_upper(path: &Path) -> Result<MountedImage, CommandError> {
    let shown = path.display();
    if let Some(server) = mount_of(path, |service| service.upper.as_ref()) {
        return visible(path, server);
    }
    Err(if is_kernel_upper(path) {
        CommandError::new(format!("the upper {shown} is not mounted"))
            .hint("its next mount grows it: `bcow mount IMG DIR --upper UPPER -s SIZE`")
    } else {
        CommandError::new(format!("cannot resize {shown}"))
            .caused_by_text("it is a directory, and no mount or upper of the kernel driver")
    })
}

/// The process that serves a mount with the kernel driver, and the mount's device number. `part` is
/// the path of a service that `path` must be.
fn mount_of(path: &Path, part: impl Fn(&Service) -> Option<&String>) -> Option<(Server, String)> {
    let path = path.canonicalize().ok()?;
    let is_path = |text: &String| {
        Path::new(text)
            .canonicalize()
            .is_ok_and(|found| found == path)
    };
    running::servers().into_iter().find_map(|server| {
        let mut services = server.services.iter();
        let service = services.find(|service| {
            let is_of_kernel_driver = service.kind == "mount" && service.descriptor.is_some();
            is_of_kernel_driver && part(service).is_some_and(is_path)
        })?;
        let device = service.device.clone()?;
        Some((server, device))
    })
}

/// The mount with this device number, if this process can see it.
fn visible(path: &Path, server: (Server, String)) -> Result<MountedImage, CommandError> {
    let (server, device) = server;
    let mounts = bcow_fuse::mounted_images().context(|| "cannot list the mounts".to_owned())?;
    let mount = mounts.into_iter().find(|mount| mount.device == device);
    mount.ok_or_else(|| {
        CommandError::new(format!(
            "{} is mounted in another mount namespace",
            path.display()
        ))
        .hint(format!(
            "`nsenter -t {} -m` enters the namespace of its process",
            server.pid
        ))
    })
}

/// A disk that has grown.
pub struct Grown {
    /// Its size in bytes.
    pub bytes: u64,
    /// The kind of the file system on it.
    pub file_system: String,
}

/// Grows the disk of a mount, called `shown` in messages, and the file system on it. `new_size`
/// returns the new size in bytes for the present one.
pub fn grow(
    shown: &str,
    mount: &MountedImage,
    new_size: impl FnOnce(u64) -> Result<u64, CommandError>,
) -> Result<Grown, CommandError> {
    let place = mount.path.display();
    let cannot = || CommandError::new(format!("cannot resize {shown}, mounted at {place}"));
    if !rustix::process::geteuid().is_root() {
        return Err(cannot().caused_by_text("only root can resize a mounted disk"));
    }
    let json = ask::statistics(&mount.path, mount, ask::ANSWER_TIMEOUT)?;
    let Some(disk) = ask::read(&mount.path, &json)?.disk else {
        return Err(cannot().caused_by_text("its process serves no disk"));
    };
    if !disk.is_writable || !mount.is_writable {
        return Err(cannot().caused_by_text("it is mounted read-only"));
    }
    let new = new_size(disk.size_bytes)?;
    if new < disk.size_bytes {
        return Err(cannot()
            .caused_by_text(format!(
                "it has {}, and a mounted file system cannot shrink",
                plural(disk.size_bytes, "byte")
            ))
            .hint("a new upper can be smaller: `bcow commit` keeps the changes of this one"));
    }
    if let Some(largest) = disk.largest_bytes.filter(|largest| new > *largest) {
        return Err(cannot().caused_by_text(format!(
            "this disk can have at most {}: its regions were chosen for a smaller one",
            plural(largest, "byte")
        )));
    }
    let hidden = ask::hidden_mount(mount).map_err(std::io::Error::from);
    let hidden = hidden.context(|| format!("cannot resize {shown}, mounted at {place}"))?;
    growth::grow(mount, &hidden, new).map_err(|error| {
        let (cannot, error) = match &error {
            GrowError::Nothing(error) => (cannot(), error),
            GrowError::Disk(error) => (
                CommandError::new(format!(
                    "the disk of {place} has {} now, but its {} has not grown",
                    plural(new, "byte"),
                    disk.filesystem
                )),
                error,
            ),
        };
        because(cannot, error)
    })?;
    Ok(Grown {
        bytes: new,
        file_system: disk.filesystem,
    })
}
