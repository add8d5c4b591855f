//! The mount that a path names, and the one that the user may mean instead.

use std::path::{Path, PathBuf};

use bcow_fuse::{MountError, MountedImage};
use bcow_images::error::CommandError;
use bcow_images::names;
use bcow_images::running::{self, Service};

use crate::error::failure;

/// The mount at `directory`. If no mount is there, the hint names `command` for the mount that
/// `directory` is inside, or of which it is the image, a layer or the upper.
pub fn mount_at(directory: &Path, command: &str) -> Result<MountedImage, CommandError> {
    bcow_fuse::mounted_image(directory).map_err(|error| {
        let failure = failure(&error);
        let is_other_place = matches!(
            error,
            MountError::NotMounted(_) | MountError::ForeignMount { .. }
        );
        match is_other_place.then(|| meant(directory)).flatten() {
            Some((relation, mount)) => failure.hint(format!(
                "it is {relation} the mount at {}: `bcow {command} {}`",
                names::printable(&mount.to_string_lossy()),
                names::quoted(mount.as_os_str().as_encoded_bytes()),
            )),
            None => failure,
        }
    })
}

/// How a path is related to a mount, and the mountpoint.
fn meant(path: &Path) -> Option<(&'static str, PathBuf)> {
    // Below a mount whose process is dead, no path can be resolved.
    let resolved = path.canonicalize().or_else(|_| std::path::absolute(path));
    let resolved = resolved.ok()?;
    let mounts = bcow_fuse::mounted_images().ok()?;
    let mut places: Vec<PathBuf> = mounts.into_iter().map(|mount| mount.path).collect();
    // The innermost one.
    places.sort_by_key(|place| std::cmp::Reverse(place.as_os_str().len()));
    if let Some(place) = places.iter().find(|place| resolved.starts_with(place)) {
        return Some(("inside", place.clone()));
    }
    let servers = running::servers();
    let services = servers.iter().flat_map(|server| &server.services);
    services.into_iter().find_map(|service| {
        let relation = relation(service, &resolved)?;
        let is_here = |at: &&String| places.iter().any(|place| Path::new(at) == place);
        Some((relation, PathBuf::from(service.at.iter().find(is_here)?)))
    })
}

fn relation(service: &Service, path: &Path) -> Option<&'static str> {
    let is_it = |name: &str| {
        Path::new(name) == path
            || Path::new(name)
                .canonicalize()
                .is_ok_and(|name| name == path)
    };
    match () {
        () if is_it(&service.image) => Some("the image of"),
        () if service.layers.iter().any(|layer| is_it(layer)) => Some("a layer of"),
        () if service.upper.as_deref().is_some_and(is_it) => Some("the upper of"),
        () => None,
    }
}
