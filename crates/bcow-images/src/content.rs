//! What a source of a conversion is, by its name and its first bytes.

use std::fs::File;
use std::path::Path;

use bcow::Storage;
use bcow_oci::{LocalImage, Source, store};

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

/// Finds what `name` leads to. A file without a transport is a BCoW file if it begins as one; no
/// other format is detected.
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
            None => Apparent::NoForm,
        },
    }
}

fn is_in_bcow_form(image: Option<LocalImage>) -> bool {
    image.is_some_and(|image| store::locate(&image).is_ok())
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
