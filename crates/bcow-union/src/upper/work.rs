//! The work directory of an upper. An object is created there, and one rename moves it to its place
//! in the tree.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

/// The names of temporary objects.
#[derive(Debug, Default)]
pub(super) struct TemporaryNames {
    next: AtomicU64,
}

impl TemporaryNames {
    /// A name that this process has not used in the work directory.
    pub(super) fn next_name(&self) -> String {
        format!("{:x}", self.next.fetch_add(1, Ordering::Relaxed))
    }
}

/// A temporary object in the work directory. The drop removes the object, unless it was moved to
/// its place. So does a failure to move it.
#[derive(Debug)]
pub struct Temporary<'a> {
    work: BorrowedFd<'a>,
    name: String,
    kind: FileType,
    is_placed: bool,
}

impl<'a> Temporary<'a> {
    /// Takes ownership of the object with this name in the work directory.
    pub(super) fn adopt(work: BorrowedFd<'a>, name: String, kind: FileType) -> Temporary<'a> {
        Temporary {
            work,
            name,
            kind,
            is_placed: false,
        }
    }

    /// The work directory, and the name of the object in it.
    pub fn at(&self) -> (BorrowedFd<'a>, &str) {
        (self.work, &self.name)
    }

    /// Moves the object to `name` in `dir`, and replaces an object with that name.
    pub fn place(self, dir: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
        self.rename(dir, name, RenameFlags::empty())
    }

    /// Moves the object to `name` in `dir`. Fails with `EEXIST` if the name exists.
    pub fn place_new(self, dir: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
        self.rename(dir, name, RenameFlags::NOREPLACE)
    }

    /// Exchanges the object with the object `name` in `dir`, whose type is `other`. Returns the
    /// second object. Its drop removes a directory with all entries.
    pub fn exchange(
        mut self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        other: FileType,
    ) -> Result<Temporary<'a>, Errno> {
        rustix::fs::renameat_with(self.work, &*self.name, dir, name, RenameFlags::EXCHANGE)?;
        self.kind = other;
        Ok(self)
    }

    fn rename(mut self, dir: BorrowedFd<'_>, name: &[u8], flags: RenameFlags) -> Result<(), Errno> {
        rustix::fs::renameat_with(self.work, &*self.name, dir, name, flags)?;
        self.is_placed = true;
        Ok(())
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        // If the removal fails, the next opening of the upper removes the object: it empties the
        // work directory.
        if self.is_placed {
            return;
        }
        let _ = match self.kind {
            FileType::Directory => remove_tree(self.work, self.name.as_bytes()),
            _ => rustix::fs::unlinkat(self.work, &*self.name, AtFlags::empty()),
        };
    }
}

/// Whether `stat` describes a whiteout: a character device 0:0.
pub fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Sets `O_NOATIME`: reads through this descriptor do not change the access time of the file or
/// directory. Does nothing if the user does not own the file. The file was opened with none of the
/// flags that `F_SETFL` can change.
pub(crate) fn set_noatime_new(file: impl AsFd) {
    let _ = rustix::fs::fcntl_setfl(file, OFlags::NOATIME);
}

/// Removes the name of a file in a directory, if it exists.
pub(crate) fn unlink(dir: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Removes all entries of a directory, except for names that begin with `kept_prefix`. Symbolic
/// links are not followed.
///
/// A directory at any depth is moved to `dir` before it is emptied. So neither the depth of the
/// tree nor the length of its paths is limited.
pub(super) fn empty(dir: BorrowedFd<'_>, kept_prefix: Option<&str>) -> Result<(), Errno> {
    loop {
        let mut names = list(dir)?;
        names.retain(|name| !kept_prefix.is_some_and(|prefix| name.starts_with(prefix.as_bytes())));
        if names.is_empty() {
            return Ok(());
        }
        for name in names {
            match unlink(dir, &name) {
                // unlink(2) of a directory fails with EPERM in POSIX, and with EISDIR on Linux.
                Err(Errno::ISDIR | Errno::PERM) => remove_tree(dir, &name)?,
                other => other?,
            }
        }
    }
}

/// Removes the directory `name` of `dir` with all entries.
fn remove_tree(dir: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    // Names in `dir` of the directories that are still to be removed.
    let mut pending = vec![name.to_vec()];
    let mut moved = 0u64;
    while let Some(name) = pending.pop() {
        match rustix::fs::unlinkat(dir, &name[..], AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => continue,
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        let inside = open_to_empty(dir, &name)?;
        for entry in list(inside.as_fd())? {
            match unlink(inside.as_fd(), &entry) {
                Ok(()) => continue,
                Err(Errno::ISDIR | Errno::PERM) => {}
                Err(errno) => return Err(errno),
            }
            if rustix::fs::unlinkat(&inside, &entry[..], AtFlags::REMOVEDIR).is_ok() {
                continue;
            }
            let mut is_permitted = false;
            loop {
                let up = format!("up{moved:x}").into_bytes();
                moved += 1;
                let flags = RenameFlags::NOREPLACE;
                match rustix::fs::renameat_with(&inside, &entry[..], dir, &up[..], flags) {
                    Ok(()) => {
                        pending.push(up);
                        break;
                    }
                    Err(Errno::EXIST) => {}
                    // A rename to another parent needs write permission on the directory itself.
                    Err(Errno::ACCESS) if !is_permitted => {
                        rustix::fs::chmodat(&inside, &entry[..], Mode::RWXU, AtFlags::empty())?;
                        is_permitted = true;
                    }
                    Err(errno) => return Err(errno),
                }
            }
        }
        rustix::fs::unlinkat(dir, &name[..], AtFlags::REMOVEDIR)?;
    }
    Ok(())
}

/// Opens a directory whose entries are to be removed, and gives all permissions to its owner.
fn open_to_empty(dir: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let opened = match open_directory(dir, name) {
        Err(Errno::ACCESS) => {
            rustix::fs::chmodat(dir, name, Mode::RWXU, AtFlags::empty())?;
            open_directory(dir, name)?
        }
        other => other?,
    };
    // A directory that can be read may not be writable. Only its owner can change this; for others,
    // the removal of an entry fails then.
    if !Mode::from_raw_mode(rustix::fs::fstat(&opened)?.st_mode).contains(Mode::RWXU) {
        let _ = rustix::fs::fchmod(&opened, Mode::RWXU);
    }
    Ok(opened)
}

/// Opens the directory `name` of `dir`. Symbolic links are not followed.
pub(super) fn open_directory(dir: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

/// The names in a directory, without `.` and `..`.
pub(crate) fn list(dir: BorrowedFd<'_>) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            names.push(name.to_vec());
        }
    }
    Ok(names)
}
