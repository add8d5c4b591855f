//! What a source of a conversion is, by its name and its first bytes.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use bcow::Storage;
use bcow_oci::{LocalImage, Source, TarInput, store};

use crate::foreign_format::{self, ForeignFormat};
use crate::name::{Name, NameParts};

/// What a name leads to, as far as the name and the first bytes say.
#[derive(Debug)]
pub enum Apparent {
    /// A file or an image in BCoW form. An image in a registry may also be an ordinary one.
    Bcow,
    /// An ordinary image, an archive or a directory.
    Files(Box<Source>),
    /// The bytes of a disk, or a qcow2 image.
    ForeignDisk,
    /// A path without a transport, to a file in no known form or to no file.
    NoForm,
}

/// Finds what `name` leads to. A file without a transport is a BCoW file or an archive if it begins
/// as one; a pipe is an archive, which only the conversion reads. Disks in other formats are not
/// detected: a program that writes to a raw disk could make it look like another file.
pub fn apparent(name: &Name) -> Apparent {
    match name.parts() {
        NameParts::Raw(_) | NameParts::Qcow2(_) => Apparent::ForeignDisk,
        NameParts::Bcow(_) | NameParts::Url(_) | NameParts::Lowest { .. } => Apparent::Bcow,
        // A blob that is missing or damaged is an error of the opening.
        NameParts::Blob { .. } => Apparent::Bcow,
        NameParts::File(path) if begins_as_bcow(path) => Apparent::Bcow,
        NameParts::Layout { .. } if is_in_bcow_form(name.local()) => Apparent::Bcow,
        _ => match name.source() {
            Some(source) => Apparent::Files(source.into()),
            None if begins_as_archive(name) => {
                let path = name.shown().to_owned();
                Apparent::Files(Source::Archive(TarInput::File(path)).into())
            }
            None => Apparent::NoForm,
        },
    }
}

fn is_in_bcow_form(image: Option<LocalImage>) -> bool {
    image.is_some_and(|image| store::locate(&image).is_ok())
}

/// Whether a path without a transport leads to an archive, or to a pipe.
fn begins_as_archive(name: &Name) -> bool {
    let NameParts::File(path) = name.parts() else {
        return false;
    };
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {
            foreign_format::detect(path) == Some(ForeignFormat::Archive)
        }
        Ok(metadata) => metadata.file_type().is_fifo(),
        Err(_) => false,
    }
}

/// Whether a file has the magic in one of its header slots (spec section 3).
fn begins_as_bcow(path: &Path) -> bool {
    const MAGIC: &[u8] = b"BCoW\r\n\x1a\n";
    let is_file = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
    let Some(file) = is_file.then(|| File::open(path).ok()).flatten() else {
        return false;
    };
    [0, 512].iter().any(|&slot| {
        let mut magic = [0; MAGIC.len()];
        Storage::read_at(&file, slot, &mut magic).is_ok() && magic == MAGIC
    })
}
