//! The file of an image.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::StoreError;
use crate::archive::Files;
use crate::blob::{open_regular, read_error};
use crate::digest::Digest;
use crate::error::{ConvertError, check_equal, check_size};
use crate::layout;
use crate::name::LocalImage;

/// The file of an image.
#[derive(Debug)]
pub struct Located {
    /// The path of the file.
    pub path: PathBuf,
    /// The open file.
    pub file: Arc<File>,
    /// The digest that the name or the manifest gives the file.
    pub digest: Option<Digest>,
    /// The layout that contains the file.
    pub layout: Option<PathBuf>,
}

/// Finds the file of `name`. The file is opened, but not checked to be an image.
pub fn locate(name: &LocalImage) -> Result<Located, StoreError> {
    let (directory, digest, size) = match name {
        LocalImage::File(path) => {
            let file = File::open(path).map_err(|source| StoreError::Open {
                path: path.clone(),
                source: bcow::Error::Io {
                    action: "open",
                    offset: 0,
                    source,
                },
            })?;
            return Ok(Located {
                layout: layout_around(path),
                path: path.clone(),
                file: Arc::new(file),
                digest: None,
            });
        }
        LocalImage::Layout {
            directory,
            reference,
        } => {
            let files = Files::directory(directory)?;
            let (digest, size) = layout::find_bcow(&files, reference.as_deref(), None)?.stack;
            (directory, digest, Some(size))
        }
        LocalImage::Blob { directory, digest } => {
            let files = Files::directory(directory)?;
            layout::check_version(&files)?;
            (directory, digest.clone(), None)
        }
    };
    let path = directory.join(layout::blob_path(&digest));
    let found = open_regular(&path)?.and_then(|blob| Some((blob.file()?, blob.length()?)));
    let Some((file, length)) = found else {
        return Err(match name {
            LocalImage::Blob { .. } => StoreError::NoSuchBlob {
                directory: directory.clone(),
                digest,
            },
            _ => {
                let place = format!("stack in {}", directory.display());
                ConvertError::missing_blob(&place, &digest).into()
            }
        });
    };
    if let Some(expected) = size {
        check_size(&path.display().to_string(), expected, length)?;
    }
    Ok(Located {
        path,
        file,
        digest: Some(digest),
        layout: Some(directory.clone()),
    })
}

/// The layout that has the file at `path` as a blob, if there is one.
fn layout_around(path: &Path) -> Option<PathBuf> {
    let folder = path.canonicalize().ok()?.parent()?.to_owned();
    let blobs = folder.parent().filter(|_| folder.ends_with("sha256"))?;
    let layout = blobs.parent().filter(|_| blobs.ends_with("blobs"))?;
    Some(layout.to_owned())
}

pub(super) fn check_digest(found: &Located, digest: &Digest) -> Result<(), ConvertError> {
    let place = found.path.display().to_string();
    let actual = Digest::of_storage(&*found.file, digest.algorithm())
        .map_err(|source| read_error("read", &place, source))?;
    check_equal(&place, "digest", digest, &actual)
}
