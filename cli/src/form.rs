//! The format of a file that is not in BCoW format, for hints and for destinations that may be
//! replaced.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The apparent format of a file, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Empty,
    /// A tar archive, or a compressed file, which may be a tar archive.
    Archive,
    Qcow2,
    Erofs,
    Squashfs,
}

/// The apparent format of a file. It is a guess: a raw disk may begin with any bytes.
pub fn form(path: &Path) -> Option<Form> {
    let mut start = Vec::new();
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).ok()?;
    File::from(file).take(1028).read_to_end(&mut start).ok()?;
    let has = |offset: usize, magic: &[u8]| {
        start
            .get(offset..)
            .is_some_and(|rest| rest.starts_with(magic))
    };
    match () {
        () if start.is_empty() => Some(Form::Empty),
        () if has(257, b"ustar") || has(0, b"\x1f\x8b") || has(0, b"\x28\xb5\x2f\xfd") => {
            Some(Form::Archive)
        }
        () if has(0, b"QFI\xfb") => Some(Form::Qcow2),
        () if has(1024, b"\xe2\xe1\xf5\xe0") => Some(Form::Erofs),
        () if has(0, b"hsqs") => Some(Form::Squashfs),
        () => None,
    }
}

/// A hint that names the apparent format, and the command for it.
pub fn guess(path: &Path) -> Option<String> {
    let shown = path.display();
    Some(match form(path)? {
        Form::Empty => "the file is empty".to_owned(),
        Form::Archive => format!(
            "it looks like an archive; `bcow convert tar:{shown} IMAGE.bcow` makes an image of it"
        ),
        Form::Qcow2 => format!(
            "it is a qcow2 image; `bcow convert qcow2:{shown} DISK.bcow` makes a disk of it"
        ),
        Form::Erofs => {
            "it is an EROFS image without BCoW headers; the kernel can mount it".to_owned()
        }
        Form::Squashfs => "it is a squashfs image".to_owned(),
    })
}
