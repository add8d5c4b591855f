//! What the directory of views has: a list, a check, and what is removed.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use bcow::Storage;
use bcow::check::{CheckOptions, check};
use bcow::format::{Crc32c, crc32c_matches};
use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, Stat, XattrFlags};
use rustix::io::Errno;

/// The extended attribute of a view with the name of its image, for the user.
const ORIGIN: &str = "user.bcow.origin";
/// The longest name that is recorded.
const ORIGIN_BYTES: usize = 1024;
/// The extended attribute of a view with the CRC32C of its file, as a little-endian number.
const CHECKSUM: &str = "user.bcow.crc32c";
/// The file is read in pieces of this size.
const PIECE_BYTES: usize = 256 << 10;

/// A view in the directory of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ViewEntry {
    /// Its name in the directory.
    pub name: String,
    /// The identity of the image, in hexadecimal digits.
    pub image: String,
    /// The name under which the image was last opened for the view, if the host has kept it.
    pub image_name: Option<String>,
    /// Size of the file system that it shows, in bytes.
    pub bytes: u64,
    /// Version of the layout.
    pub layout: u32,
    /// The bytes that the file takes up on the disk.
    pub held_bytes: u64,
    /// The time of the last use, in seconds since 1970. At most an hour late.
    pub last_use: i64,
    /// Whether a process has it open.
    pub is_in_use: bool,
}

/// Which views [`ViewCache::remove`] removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remove {
    /// Those that no process has open.
    Unused,
    /// All.
    Any,
}

/// The result of an attempt to remove a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    Removed,
    /// A process has it open.
    InUse,
    /// It does not exist any more.
    Missing,
}

/// The parts of the name of a view: IDENTITY-BYTES-LAYOUT.bcow.
pub(crate) fn parse(name: &str) -> Option<(&str, u64, u32)> {
    let mut parts = name.strip_suffix(".bcow")?.split('-');
    let identity = parts.next()?;
    let bytes = digits(parts.next()?)?.parse().ok()?;
    let layout = digits(parts.next()?)?.parse().ok()?;
    let is_identity = identity.len() == 64 && identity.bytes().all(|b| b.is_ascii_hexdigit());
    (is_identity && parts.next().is_none()).then_some((identity, bytes, layout))
}

/// The text, if it has digits only: numbers are parsed with a sign, too.
fn digits(text: &str) -> Option<&str> {
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then_some(text)
}

/// The regular files of `directory` with the name of a view.
pub(crate) fn views(directory: &File) -> io::Result<Vec<(String, Stat)>> {
    let mut views = Vec::new();
    for entry in Dir::read_from(directory.as_fd())? {
        let entry = entry?;
        let Ok(name) = entry.file_name().to_str() else {
            continue;
        };
        if parse(name).is_none() {
            continue;
        }
        match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) if FileType::from_raw_mode(found.st_mode) == FileType::RegularFile => {
                views.push((name.to_owned(), found));
            }
            // Removed meanwhile, or another kind of file.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(views)
}

/// The bytes that a file takes up on the disk.
pub(crate) fn held_bytes(file: &Stat) -> u64 {
    u64::try_from(file.st_blocks).unwrap_or(0) * 512
}

/// The views in `directory`, the most recently used first.
pub(crate) fn list(directory: &File) -> io::Result<Vec<ViewEntry>> {
    let mut entries = Vec::new();
    for (name, stat) in views(directory)? {
        let Some((image, bytes, layout)) = parse(&name) else {
            continue;
        };
        let file = open(directory, &name);
        entries.push(ViewEntry {
            image: image.to_owned(),
            image_name: file.as_ref().ok().and_then(image_name),
            bytes,
            layout,
            held_bytes: held_bytes(&stat),
            last_use: stat.st_mtime,
            is_in_use: file.is_ok_and(|file| is_in_use(&file)),
            name,
        });
    }
    entries.sort_by(|a, b| (b.last_use, &a.name).cmp(&(a.last_use, &b.name)));
    Ok(entries)
}

/// Whether the file of a view is as it was written. `None` if it does not exist.
pub(crate) fn verify(directory: &File, name: &str) -> io::Result<Option<bool>> {
    match open(directory, name) {
        Ok(file) => Ok(Some(is_sound(Arc::new(file)).map_err(io::Error::other)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether every stored byte of a view matches its checksums.
pub(crate) fn is_sound(view: Arc<dyn Storage>) -> Result<bool, bcow::Error> {
    match check(view, &CheckOptions::FULL) {
        Ok(report) => Ok(report.is_sound()),
        Err(error) if error.code().is_some() => Ok(false),
        Err(error) => Err(error),
    }
}

/// As [`is_sound`], of a file whose checksum may be recorded: a comparison with that reads the file
/// once, and decodes no block. The one of a file without it is recorded.
pub(crate) fn is_as_written(view: &Arc<File>) -> Result<bool, bcow::Error> {
    let mut recorded = [0; 4];
    let length = rustix::fs::fgetxattr(&**view, CHECKSUM, &mut recorded[..]);
    if length == Ok(recorded.len())
        && checksum(view).is_ok_and(|found| crc32c_matches(u32::from_le_bytes(recorded), found))
    {
        return Ok(true);
    }
    let is_sound = is_sound(view.clone())?;
    if is_sound {
        record_checksum(view);
    }
    Ok(is_sound)
}

/// Records the checksum of a complete view. Where that is not possible, each opening decodes all
/// blocks.
pub(crate) fn record_checksum(view: &File) {
    if let Ok(checksum) = checksum(view) {
        let value = checksum.to_le_bytes();
        let _ = rustix::fs::fsetxattr(view, CHECKSUM, &value, XattrFlags::empty());
    }
}

fn checksum(view: &File) -> io::Result<u32> {
    let (mut crc, mut piece) = (Crc32c::new(), vec![0; PIECE_BYTES]);
    let length = Storage::len(view)?;
    for at in (0..length).step_by(PIECE_BYTES) {
        let piece = &mut piece[..(length - at).min(PIECE_BYTES as u64) as usize];
        Storage::read_at(view, at, piece)?;
        crc.update(piece);
    }
    Ok(crc.finish())
}

/// Removes a view.
pub(crate) fn remove(directory: &File, name: &str, which: Remove) -> io::Result<Removal> {
    if which == Remove::Unused {
        match open(directory, name) {
            Ok(file) if is_in_use(&file) => return Ok(Removal::InUse),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Removal::Missing);
            }
            // Nor can this user use one that cannot be opened.
            _ => {}
        }
    }
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) => Ok(Removal::Removed),
        Err(Errno::NOENT) => Ok(Removal::Missing),
        Err(errno) => Err(errno.into()),
    }
}

/// Opens a view. Without O_NONBLOCK, the opening of a FIFO would wait for a writer.
pub(crate) fn open(directory: &File, name: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?.into())
}

/// Records that this process uses an open view, as long as it is open. Where the host has no locks,
/// the view counts as unused: its removal does no harm.
pub(crate) fn hold(view: &File) {
    let _ = rustix::fs::flock(view, FlockOperation::NonBlockingLockShared);
}

/// Whether another process holds the view. This one has just opened it.
fn is_in_use(view: &File) -> bool {
    let locked = rustix::fs::flock(view, FlockOperation::NonBlockingLockExclusive);
    locked == Err(Errno::WOULDBLOCK)
}

/// Records the name of the image of a view. Only its owner can.
pub(crate) fn record_image(view: &File, name: &str) {
    if name.len() <= ORIGIN_BYTES && image_name(view).as_deref() != Some(name) {
        let _ = rustix::fs::fsetxattr(view, ORIGIN, name.as_bytes(), XattrFlags::empty());
    }
}

fn image_name(view: &File) -> Option<String> {
    let mut name = vec![0; ORIGIN_BYTES];
    let length = rustix::fs::fgetxattr(view, ORIGIN, &mut *name).ok()?;
    name.truncate(length);
    String::from_utf8(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_checksum_is_that_of_the_file_as_it_is() {
        let file = tempfile::tempfile().unwrap();
        let content = vec![7; PIECE_BYTES + 100];
        Storage::write_at(&file, 0, &content).unwrap();
        let file = Arc::new(file);
        record_checksum(&file);
        // It is no view, so only the checksum makes it right.
        assert!(is_as_written(&file).unwrap());
        Storage::write_at(&*file, PIECE_BYTES as u64 + 1, &[8]).unwrap();
        assert!(!is_as_written(&file).unwrap_or(false));
        Storage::write_at(&*file, PIECE_BYTES as u64 + 1, &[7]).unwrap();
        assert!(is_as_written(&file).unwrap());
        file.set_len(PIECE_BYTES as u64).unwrap();
        assert!(!is_as_written(&file).unwrap_or(false));
    }

    #[test]
    fn names_of_views_are_known() {
        let identity = "0a".repeat(32);
        assert_eq!(
            parse(&format!("{identity}-65536-1.bcow")),
            Some((&*identity, 65536, 1))
        );
        for other in [
            "notes.bcow".to_owned(),
            "0-0-0.bcow".to_owned(),
            format!("{identity}-65536-1"),
            format!("{identity}-65536-1-1.bcow"),
            format!("{identity}--1.bcow"),
            format!("{identity}-99999999999999999999-1.bcow"),
        ] {
            assert_eq!(parse(&other), None, "{other}");
        }
    }
}
