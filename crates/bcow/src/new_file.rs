//! A file that gets its name only when it is complete.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::attributes;

/// Bytes of the destination's name in the name of a `.partial` file. File systems limit a name to
/// 255 bytes.
const MAX_BASE_BYTES: usize = 100;
/// Temporary names that are tried. Killed processes may have left files with some of them.
const MAX_ATTEMPTS: usize = 100_000;
/// The mode of a new file, from which the system takes the bits of the umask.
const FOR_UMASK: Mode = Mode::from_raw_mode(0o666);

/// A file in the directory of its destination that has no name yet. If the process ends before
/// [`NewFile::complete`], nothing remains. On a file system without unnamed files (O_TMPFILE) the
/// file has a temporary name. A file that can be resumed has a name from the start,
/// `.NAME.TAG.partial`, and stays.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    directory: PathBuf,
    destination: PathBuf,
    /// The temporary name, if the file has one.
    temporary: Option<PathBuf>,
    /// Whether a file of the name of the destination is replaced.
    replaces: bool,
    /// Whether the temporary name stays when this is dropped.
    stays: bool,
}

/// The reason why a new file was not created or completed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NewFileError {
    /// The destination exists.
    #[error("file exists; not overwriting it")]
    Exists,
    /// The path has no last component, or a slash at its end.
    #[error("missing file name")]
    NoName,
    /// The destination is a directory.
    #[error("it is a directory")]
    Directory,
    /// The destination is a device, a pipe or a socket, which a rename would replace.
    #[error("file exists and is not a regular file")]
    NoRegularFile,
    /// The file system can give the file its name only with the risk of replacing another file.
    #[error(
        "the file system has neither hard links nor a rename that refuses to replace a file: {0}"
    )]
    NoSafeName(io::Error),
    /// The host cannot create the file.
    #[error(transparent)]
    Create(io::Error),
    /// The host cannot write, sync or rename the file.
    #[error(transparent)]
    Write(io::Error),
}

impl NewFile {
    /// Starts a file that becomes `destination`. The destination must not exist; this never
    /// replaces a file.
    pub fn create_new(destination: &Path) -> Result<Self, NewFileError> {
        if destination.symlink_metadata().is_ok() {
            return Err(NewFileError::Exists);
        }
        let mut new = NewFile::create(destination)?;
        new.replaces = false;
        Ok(new)
    }

    /// Starts a file that becomes `destination`, and replaces an existing file of that name.
    pub fn create(destination: &Path) -> Result<Self, NewFileError> {
        let destination = resolve(destination)?;
        NewFile::start(parent_of(&destination), destination.clone(), FOR_UMASK)
    }

    /// The same; only the owner can read and write the file.
    pub fn create_private(destination: &Path) -> Result<Self, NewFileError> {
        let destination = resolve(destination)?;
        let mode = Mode::RUSR | Mode::WUSR;
        NewFile::start(parent_of(&destination), destination.clone(), mode)
    }

    /// Starts a file in `directory`. [`NewFile::name_as`] gives it its name.
    pub fn unnamed(directory: &Path) -> Result<Self, NewFileError> {
        NewFile::start(directory, PathBuf::new(), FOR_UMASK)
    }

    /// Opens the file that an interrupted writer of `destination` left, or creates one that stays
    /// if it does not become complete. `tag` distinguishes the contents.
    ///
    /// If another process writes that file, or another user owns it, the new file begins empty, and
    /// is removed when it is dropped.
    pub fn resumed(destination: &Path, tag: &str) -> Result<Self, NewFileError> {
        let destination = resolve(destination)?;
        let base = destination.file_name().unwrap_or_default();
        let name = partial_name(&base.to_string_lossy(), tag);
        NewFile::partial(parent_of(&destination), destination.clone(), &name)
    }

    /// The same in `directory`. [`NewFile::name_as`] gives the file its name.
    pub fn resumed_unnamed(directory: &Path, tag: &str) -> Result<Self, NewFileError> {
        NewFile::partial(directory, PathBuf::new(), &format!(".{tag}.partial"))
    }

    fn partial(directory: &Path, destination: PathBuf, name: &str) -> Result<Self, NewFileError> {
        let name = directory.join(name);
        match own_partial(&name).map_err(NewFileError::Create)? {
            Some(file) => Ok(NewFile {
                file,
                directory: directory.to_owned(),
                destination,
                temporary: Some(name),
                replaces: true,
                stays: true,
            }),
            None => NewFile::start(directory, destination, FOR_UMASK),
        }
    }

    fn start(directory: &Path, destination: PathBuf, mode: Mode) -> Result<Self, NewFileError> {
        let (file, temporary) = match open_unnamed(directory, mode) {
            Ok(file) => (file, None),
            // EISDIR and EINVAL come from kernels and file systems that do not know O_TMPFILE.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let open = |name: &Path| rustix::fs::open(name, flags, mode);
                let opened = with_temporary_name(directory, open);
                let (file, name) = opened.map_err(NewFileError::Create)?;
                (file, Some(name))
            }
            Err(error) => return Err(NewFileError::Create(error.into())),
        };
        Ok(NewFile {
            file: file.into(),
            directory: directory.to_owned(),
            destination,
            temporary,
            replaces: true,
            stays: false,
        })
    }

    /// The file, to be filled.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The directory of the file.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Gives the file the owner, the group, the mode, the ACL and the extended attributes of `old`,
    /// as far as the host allows. No other user gets a right that `old` denies.
    pub fn take_attributes(&self, old: &File) -> io::Result<()> {
        attributes::pass(old, &self.file)
    }

    /// Makes the content durable, gives the file its name, and makes the name durable.
    pub fn complete(mut self) -> Result<(), NewFileError> {
        self.file.sync_all().map_err(NewFileError::Write)?;
        self.rename()?;
        File::open(&self.directory)
            .and_then(|directory| directory.sync_all())
            .map_err(NewFileError::Write)
    }

    /// Gives the file this name in its directory, and replaces an existing file of that name. The
    /// caller flushes the file before the call, and the directory after it.
    pub fn name_as(mut self, name: &str) -> Result<(), NewFileError> {
        self.destination = self.directory.join(name);
        self.rename()
    }

    fn rename(&mut self) -> Result<(), NewFileError> {
        let descriptor = link_path(&self.file);
        let link =
            |name: &Path| rustix::fs::linkat(CWD, &descriptor, CWD, name, AtFlags::SYMLINK_FOLLOW);
        let destination = &self.destination;
        match (&self.temporary, self.replaces) {
            (Some(temporary), true) => {
                std::fs::rename(temporary, destination).map_err(NewFileError::Write)?;
            }
            (Some(temporary), false) => name_new(temporary, destination, rename_new)?,
            (None, replaces) => match link(destination) {
                // A rename replaces a file, a link does not; so the file gets a temporary name.
                Err(Errno::EXIST) if replaces => {
                    let named = with_temporary_name(&self.directory, link);
                    let ((), name) = named.map_err(NewFileError::Write)?;
                    let name = self.temporary.insert(name);
                    std::fs::rename(name, destination).map_err(NewFileError::Write)?;
                }
                // This leaves no temporary name if the process is killed.
                linked => linked.map_err(not_named)?,
            },
        }
        self.temporary = None;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let (Some(temporary), false) = (&self.temporary, self.stays) {
            // The error that caused the drop is more precise than an error here.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

/// Gives the file at `temporary` the new name `destination`. Uses a hard link if the file system
/// does not support `rename`.
fn name_new(
    temporary: &Path,
    destination: &Path,
    rename: impl FnOnce(&Path, &Path) -> Result<(), Errno>,
) -> Result<(), NewFileError> {
    match rename(temporary, destination) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        renamed => return renamed.map_err(not_named),
    }
    rustix::fs::link(temporary, destination).map_err(|error| match error {
        Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP => NewFileError::NoSafeName(error.into()),
        error => not_named(error),
    })?;
    // The file is complete, so a temporary name that stays is no failure.
    let _ = std::fs::remove_file(temporary);
    Ok(())
}

/// Renames a file; never replaces another one. Network file systems and some FUSE file systems do
/// not support this.
fn rename_new(from: &Path, to: &Path) -> Result<(), Errno> {
    rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)
}

fn not_named(error: Errno) -> NewFileError {
    match error {
        Errno::EXIST => NewFileError::Exists,
        error => NewFileError::Create(error.into()),
    }
}

/// The directory of a file, as its path names it.
pub(crate) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != OsStr::new("") => parent,
        _ => Path::new("."),
    }
}

/// The file that `destination` means.
fn resolve(destination: &Path) -> Result<PathBuf, NewFileError> {
    if destination.file_name().is_none() {
        return Err(NewFileError::NoName);
    }
    match std::fs::metadata(destination) {
        Ok(metadata) if metadata.is_dir() => Err(NewFileError::Directory),
        Ok(metadata) if !metadata.is_file() => Err(NewFileError::NoRegularFile),
        // A symbolic link stays; its target is replaced.
        Ok(_) => destination.canonicalize().map_err(NewFileError::Create),
        Err(_) if destination.as_os_str().as_encoded_bytes().ends_with(b"/") => {
            Err(NewFileError::NoName)
        }
        Err(_) => Ok(destination.to_owned()),
    }
}

fn open_unnamed(directory: &Path, mode: Mode) -> Result<OwnedFd, Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(directory, flags, mode)?;
    // Without /proc, the file can never get a name.
    match std::fs::symlink_metadata(link_path(&file)) {
        Ok(_) => Ok(file),
        Err(_) => Err(Errno::OPNOTSUPP),
    }
}

fn link_path(file: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The name of the `.partial` file of a copy to a file of the name `base`.
fn partial_name(base: &str, tag: &str) -> String {
    let mut end = base.len().min(MAX_BASE_BYTES);
    while !base.is_char_boundary(end) {
        end -= 1;
    }
    format!(".{}.{tag}.partial", &base[..end])
}

/// Opens or creates a `.partial` file of this user, and locks it for this process. `None` if that
/// is not possible.
fn own_partial(name: &Path) -> io::Result<Option<File>> {
    // A pipe of this name must not make the open block.
    let flags =
        OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(name, flags, FOR_UMASK) {
        Ok(file) => File::from(file),
        Err(Errno::LOOP | Errno::ACCESS | Errno::ISDIR) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Ok(None);
    }
    let own = file.metadata()?;
    let named = std::fs::symlink_metadata(name);
    // Another process may have completed it, and given it its name, before this one had the lock.
    let is_named = named.is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino()));
    let is_own = own.uid() == rustix::process::geteuid().as_raw();
    Ok((is_named && is_own && own.is_file() && own.nlink() == 1).then_some(file))
}

/// Tries temporary names in `directory` until one is free.
fn with_temporary_name<T>(
    directory: &Path,
    mut make: impl FnMut(&Path) -> Result<T, Errno>,
) -> io::Result<(T, PathBuf)> {
    // A process can have many new files in one directory.
    static COUNT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..MAX_ATTEMPTS {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        // Does not contain the name of the destination, which may have the greatest length.
        let path = directory.join(format!(".bcow-{}-{count}.part", std::process::id()));
        match make(&path) {
            Ok(made) => return Ok((made, path)),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::EXIST.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_a_temporary_name_is_removed_or_replaces_the_old_one() {
        let directory = tempfile::tempdir().unwrap();
        let (path, temporary) = (directory.path().join("file"), directory.path().join("new"));
        std::fs::write(&path, "old").unwrap();
        let named = || {
            std::fs::write(&temporary, "new").unwrap();
            let mut new = NewFile::create(&path).unwrap();
            new.temporary = Some(temporary.clone());
            new
        };
        drop(named());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert!(!temporary.exists());
        named().complete().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert!(!temporary.exists());
    }

    #[test]
    fn file_system_without_exclusive_renames_gets_the_file_by_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let entries = || std::fs::read_dir(&directory).unwrap().count();
        let [temporary, new, other] =
            ["temporary", "new", "other"].map(|name| directory.path().join(name));
        std::fs::write(&temporary, "content").unwrap();
        std::fs::write(&other, "other content").unwrap();
        for error in [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP] {
            let refused = name_new(&temporary, &other, |_, _| Err(error)).unwrap_err();
            assert!(matches!(refused, NewFileError::Exists), "{refused}");
            assert_eq!(std::fs::read(&other).unwrap(), b"other content");
            name_new(&temporary, &new, |_, _| Err(error)).unwrap();
            assert_eq!(std::fs::read(&new).unwrap(), b"content");
            assert_eq!(entries(), 2);
            std::fs::rename(&new, &temporary).unwrap();
        }
        let refused = name_new(&temporary, &new, |_, _| Err(Errno::NOSPC)).unwrap_err();
        assert!(matches!(refused, NewFileError::Create(_)), "{refused}");
    }
}
