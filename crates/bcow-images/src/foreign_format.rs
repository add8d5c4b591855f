//! The apparent format of a file that is not in BCoW format. Hints name this format, and the rule
//! for existing destinations depends on it.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The apparent format of a file, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignFormat {
    /// A file without bytes.
    Empty,
    /// A tar archive, or a file compressed with gzip or zstd, which may contain a tar archive.
    Archive,
    /// A qcow2 image.
    Qcow2,
    /// An EROFS file system.
    Erofs,
    /// A squashfs file system.
    Squashfs,
    /// A disk in a format that bcow does not read, by the name of the format.
    OtherDisk(&'static str),
}

/// Detects the apparent format of a file. The result is not reliable: a raw disk may begin with any
/// bytes. `None` for an unknown format, and for a file that cannot be read.
pub fn detect(path: &Path) -> Option<ForeignFormat> {
    let mut start = Vec::new();
    // With NONBLOCK, opening a pipe does not wait for a writer.
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).ok()?;
    File::from(file).take(1028).read_to_end(&mut start).ok()?;
    let has = |offset: usize, magic: &[u8]| {
        start
            .get(offset..)
            .is_some_and(|rest| rest.starts_with(magic))
    };
    match () {
        () if start.is_empty() => Some(ForeignFormat::Empty),
        () if has(257, b"ustar") || has(0, b"\x1f\x8b") || has(0, b"\x28\xb5\x2f\xfd") => {
            Some(ForeignFormat::Archive)
        }
        () if has(0, b"QFI\xfb") => Some(ForeignFormat::Qcow2),
        () if has(1024, b"\xe2\xe1\xf5\xe0") => Some(ForeignFormat::Erofs),
        () if has(0, b"hsqs") => Some(ForeignFormat::Squashfs),
        () if has(0, b"KDMV") || has(0, b"# Disk DescriptorFile") => {
            Some(ForeignFormat::OtherDisk("VMDK"))
        }
        () if has(64, b"\x7f\x10\xda\xbe") => Some(ForeignFormat::OtherDisk("VDI")),
        () if has(0, b"vhdxfile") => Some(ForeignFormat::OtherDisk("VHDX")),
        () if has(0, b"conectix") => Some(ForeignFormat::OtherDisk("VHD")),
        () => None,
    }
}

/// A hint with the apparent format of a file, and the command for files of this format.
pub fn format_hint(path: &Path) -> Option<String> {
    let shown = path.display();
    Some(match detect(path)? {
        ForeignFormat::Empty => "the file is empty".to_owned(),
        ForeignFormat::Archive => format!(
            "it looks like an archive; `bcow convert {shown} IMAGE.bcow` makes an image of it, \
             which `bcow mount IMAGE.bcow DIR` mounts"
        ),
        ForeignFormat::Qcow2 => format!(
            "it is a qcow2 image; `bcow convert qcow2:{shown} DISK.bcow` makes a disk of it"
        ),
        ForeignFormat::Erofs => {
            "it is an EROFS image without BCoW headers; the kernel can mount it".to_owned()
        }
        ForeignFormat::Squashfs => "it is a squashfs image".to_owned(),
        ForeignFormat::OtherDisk(format) => other_disk_hint(format, path),
    })
}

/// The hint for a disk in a format that bcow does not read.
pub fn other_disk_hint(format: &str, path: &Path) -> String {
    let shown = path.display();
    format!(
        "bcow does not read the format {format}; `qemu-img convert -O qcow2 {shown} DISK.qcow2` \
         makes a disk that `bcow convert qcow2:DISK.qcow2` reads"
    )
}
