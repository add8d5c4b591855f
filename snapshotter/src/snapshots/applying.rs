//! containerd's diff service: makes the layer of a snapshot of an archive in the content store. The
//! archive is not unpacked, and the layers below are not read: the layer has marks for what it
//! removes and for links to files below, and a mount merges it with them.

use std::path::{Path, PathBuf};

use bcow_tool::At;

use super::Snapshots;
use crate::error::Error;
use crate::protocol::{Descriptor, Mount};
use crate::record::{Id, Kind};
use crate::tool;

/// The media type of an archive without compression, in an answer.
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

/// The directory of containerd's content store.
pub struct ContentStore {
    blobs: PathBuf,
}

impl ContentStore {
    /// Fails if there is no such directory.
    pub fn open(directory: &Path) -> Result<Self, Error> {
        // containerd makes the directory of the blobs when it stores the first one.
        directory.read_dir().at("open", directory)?;
        Ok(ContentStore {
            blobs: directory.join("blobs"),
        })
    }

    /// The file of a blob. containerd asks another diff service if this one does not support a
    /// blob, so what is not an archive of a layer is not an error.
    pub fn archive(&self, blob: &Descriptor) -> Result<PathBuf, Error> {
        if !is_archive(&blob.media_type) {
            return Err(Error::Unsupported(format!(
                "a layer of the type {:?}",
                blob.media_type
            )));
        }
        let path = blob.digest.split_once(':').and_then(|(algorithm, digits)| {
            let is_plain = |text: &str| {
                !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
            };
            let is_digest = is_plain(algorithm) && is_plain(digits);
            is_digest.then(|| self.blobs.join(algorithm).join(digits))
        });
        let path =
            path.ok_or_else(|| Error::Invalid(format!("invalid digest {:?}", blob.digest)))?;
        if path.is_file() {
            Ok(path)
        } else {
            Err(Error::Unsupported(format!(
                "a layer without the file {} (see --content-store)",
                path.display()
            )))
        }
    }
}

/// Whether blobs of this type are the archive of a layer, as it is or compressed with gzip or zstd.
fn is_archive(media_type: &str) -> bool {
    let of_layer = [
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "application/vnd.docker.image.rootfs.diff.tar",
        "application/vnd.docker.image.rootfs.foreign.diff.tar",
    ];
    let rest = of_layer
        .iter()
        .find_map(|name| media_type.strip_prefix(name));
    matches!(rest, Some("" | "+gzip" | ".gzip" | "+zstd" | ".zstd"))
}

impl Snapshots {
    /// Makes the layer of the active snapshot with these mounts of the archive `blob`. Returns the
    /// descriptor of the archive without its compression.
    pub fn apply(&self, blob: &Descriptor, mounts: &[Mount]) -> Result<Descriptor, Error> {
        let unsupported = |what: &str| Error::Unsupported(what.to_owned());
        let content = self.content.as_ref();
        let content = content.ok_or_else(|| unsupported("a diff service without a store"))?;
        let archive = content.archive(blob)?;
        let id = mounts.iter().find_map(|mount| self.snapshot_of(mount));
        let id = id.ok_or_else(|| unsupported("a layer for mounts of another snapshotter"))?;
        let name = {
            let index = self.index.lock();
            let record = index.all().find(|record| record.id == id);
            let record = record.ok_or_else(|| Error::NotFound(format!("with the number {id}")))?;
            record.name.clone()
        };
        let (record, _hold) = self.hold(&[&name], &[&name], |index| {
            let record = index.get(&name)?;
            if record.id == id && record.kind == Kind::Active && !record.has_layer {
                Ok(record.clone())
            } else {
                Err(Error::State(format!(
                    "a layer cannot be applied to snapshot {name:?}: it is committed, or has a \
                     layer"
                )))
            }
        })?;
        if !self.place.is_untouched(&record)? {
            return Err(unsupported("a layer for a snapshot with files"));
        }
        let mut made = None;
        self.place.make_layer(id, |layer| {
            made = Some(tool::convert_archive(&self.tool, &archive, layer)?);
            Ok(())
        })?;
        let made = made.ok_or_else(|| Error::State("bcow convert made no layer".to_owned()))?;
        let applied = record.applied();
        self.place.replace(&applied)?;
        self.index.lock().put(&name, applied);
        Ok(Descriptor {
            media_type: TAR.to_owned(),
            digest: made.diff_id,
            size: i64::try_from(made.bytes).unwrap_or(i64::MAX),
        })
    }

    /// The number of the snapshot that a writable mount is of.
    fn snapshot_of(&self, mount: &Mount) -> Option<Id> {
        let uppers = mount.options.iter().filter_map(|option| {
            let upper = option.strip_prefix("upper=");
            upper.or_else(|| option.strip_prefix("upperdir="))
        });
        let mut paths = uppers.chain([mount.source.as_str()]);
        paths.find_map(|path| self.place.id_of_files(Path::new(path)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_of_layers_are_known_by_their_types() {
        for archive in [
            TAR,
            "application/vnd.oci.image.layer.v1.tar+zstd",
            "application/vnd.docker.image.rootfs.diff.tar.gzip",
        ] {
            assert!(is_archive(archive), "{archive}");
        }
        for other in [
            "",
            "application/vnd.oci.image.layer.v1.tar+gzip+encrypted",
            "application/vnd.oci.image.layer.v1.tarball",
            "application/vnd.erofs.layer.v1",
        ] {
            assert!(!is_archive(other), "{other}");
        }
    }

    #[test]
    fn a_blob_is_a_file_below_the_store() {
        let directory = tempfile::tempdir().unwrap();
        let store = ContentStore::open(directory.path()).unwrap();
        let blobs = directory.path().join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        std::fs::write(blobs.join("ab"), "").unwrap();
        std::fs::write(directory.path().join("secret"), "").unwrap();
        let find = |digest: &str| {
            store.archive(&Descriptor {
                media_type: TAR.to_owned(),
                digest: digest.to_owned(),
                size: 0,
            })
        };
        assert_eq!(find("sha256:ab").unwrap(), blobs.join("ab"));
        assert!(matches!(find("sha256:cd"), Err(Error::Unsupported(_))));
        for bad in [
            "ab",
            "sha256:",
            ":ab",
            "sha256:../../secret",
            "..:secret",
            "sha256:a/b",
        ] {
            assert!(matches!(find(bad), Err(Error::Invalid(_))), "{bad}");
        }
    }
}
