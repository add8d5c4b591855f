//! The destination file, which appears complete or not at all.
//!
//! The image is written to an unnamed file in the directory of the destination; the kernel removes
//! this file if the process dies. A complete image gets a name and is moved into place. On a file
//! system without unnamed files, a hidden `.NAME.*.tmp` is used.
//!
//! A copy that can be resumed has a name from the start, `.NAME.TAG.partial`, and stays.
//!
//! Like `qemu-img convert`, bcow replaces an existing image; unlike it, atomically and only with a
//! complete image.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};

use crate::error::ConvertError;

/// A file that is not yet at its destination.
pub(crate) struct Output {
    /// The destination, with symlinks resolved.
    path: PathBuf,
    directory: PathBuf,
    file: File,
    /// The temporary name, if the file has one.
    name: Option<PathBuf>,
    /// Whether the temporary name stays when this is dropped.
    stays: bool,
}

/// Bytes of the destination's name in the name of a `.partial` file. File systems limit a name to
/// 255 bytes.
const MAX_BASE_BYTES: usize = 100;

/// The name of the `.partial` file of a copy to `base`. `tag` distinguishes the contents.
fn partial_name(base: &str, tag: &str) -> String {
    let mut end = base.len().min(MAX_BASE_BYTES);
    while !base.is_char_boundary(end) {
        end -= 1;
    }
    format!(".{}.{tag}.partial", &base[..end])
}

impl Output {
    /// Creates a file for `destination`.
    pub(crate) fn create(destination: &Path) -> Result<Output, ConvertError> {
        let (path, directory) = resolve(destination)?;
        let failed = |source| ConvertError::write("create", destination, source);
        Output::temporary(path, directory).map_err(failed)
    }

    /// Opens the file that an interrupted copy to `destination` left, or creates one that stays if
    /// it does not become complete. `tag` distinguishes the contents.
    pub(crate) fn resumed(destination: &Path, tag: &str) -> Result<Output, ConvertError> {
        let (path, directory) = resolve(destination)?;
        let name = partial_name(&path.file_name().unwrap_or_default().to_string_lossy(), tag);
        Output::partial(path, directory, &name)
    }

    /// The same in `directory`; [`Output::name_as`] gives the file a name.
    pub(crate) fn resumed_unnamed(directory: &Path, tag: &str) -> Result<Output, ConvertError> {
        let name = format!(".{tag}.partial");
        Output::partial(directory.to_owned(), directory.to_owned(), &name)
    }

    /// If another process writes the `.partial` file, or another user owns it, the output begins
    /// empty, and is removed when this is dropped.
    fn partial(path: PathBuf, directory: PathBuf, name: &str) -> Result<Output, ConvertError> {
        let name = directory.join(name);
        let failed = |source| ConvertError::write("create", &name, source);
        if let Some(file) = own_partial(&name).map_err(failed)? {
            return Ok(Output {
                path,
                directory,
                file,
                name: Some(name),
                stays: true,
            });
        }
        Output::temporary(path.clone(), directory)
            .map_err(|source| ConvertError::write("create", &path, source))
    }

    /// Creates a file in `directory`; [`Output::name_as`] gives it a name.
    pub(crate) fn unnamed(directory: &Path) -> Result<Output, ConvertError> {
        Output::temporary(directory.to_owned(), directory.to_owned())
            .map_err(|source| ConvertError::write("create a file in", directory, source))
    }

    /// A file without a name. A file system without O_TMPFILE gives it a temporary name.
    fn temporary(path: PathBuf, directory: PathBuf) -> io::Result<Output> {
        let (file, name) = match nameless(&directory) {
            Err(error) if is_lack_of_support(&error) => {
                let name = temporary_name(&path, &directory);
                let mut options = File::options();
                options.read(true).write(true).create_new(true);
                (options.open(&name)?, Some(name))
            }
            file => (file?, None),
        };
        Ok(Output {
            path,
            directory,
            file,
            name,
            stays: false,
        })
    }

    /// Gives the file a name in its directory, and replaces an existing file of that name. The
    /// caller flushes the file before the call, and the directory after it.
    pub(crate) fn name_as(mut self, name: &str) -> Result<(), ConvertError> {
        self.path = self.directory.join(name);
        self.rename()
    }

    /// The directory for temporary data of the conversion: its file system must have space for the
    /// image anyway.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The file, for writing.
    pub(crate) fn file(&self) -> Result<File, ConvertError> {
        self.file
            .try_clone()
            .map_err(|source| self.failed("create", source))
    }

    /// Makes the image durable, then moves it to its destination.
    pub(crate) fn publish(mut self) -> Result<(), ConvertError> {
        self.file
            .sync_all()
            .map_err(|source| self.failed("sync", source))?;
        self.rename()?;
        File::open(&self.directory)
            .and_then(|directory| directory.sync_all())
            .map_err(|e| self.failed("sync the directory of", e))
    }

    fn rename(&mut self) -> Result<(), ConvertError> {
        let name = match self.name.clone() {
            Some(name) => name,
            // Link the file directly to a free name: this leaves no temporary name if the process
            // is killed.
            None => match self.link(&self.path) {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::EXIST) => {
                    self.give_name().map_err(|e| self.failed("name", e))?
                }
                Err(error) => return Err(self.failed("name", error.into())),
            },
        };
        std::fs::rename(&name, &self.path).map_err(|e| self.failed("rename to", e))?;
        self.name = None;
        Ok(())
    }

    fn give_name(&mut self) -> io::Result<PathBuf> {
        let name = temporary_name(&self.path, &self.directory);
        self.link(&name)?;
        self.name = Some(name.clone());
        Ok(name)
    }

    fn link(&self, name: &Path) -> rustix::io::Result<()> {
        let file = link_path(&self.file);
        rustix::fs::linkat(CWD, file, CWD, name, AtFlags::SYMLINK_FOLLOW)
    }

    fn failed(&self, action: &'static str, source: io::Error) -> ConvertError {
        ConvertError::write(action, &self.path, source)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let (Some(name), false) = (&self.name, self.stays) {
            // The error that caused the drop is more precise than an error here.
            let _ = std::fs::remove_file(name);
        }
    }
}

/// The file that `destination` means, with symlinks resolved, and its directory.
fn resolve(destination: &Path) -> Result<(PathBuf, PathBuf), ConvertError> {
    let refuse = |problem| ConvertError::Destination {
        path: destination.to_owned(),
        problem,
    };
    let failed = |source| ConvertError::write("create", destination, source);
    let path = match std::fs::metadata(destination) {
        Ok(metadata) if metadata.is_dir() => {
            return Err(refuse("it is a directory; for an OCI layout, use oci:"));
        }
        Ok(metadata) if !metadata.is_file() => {
            return Err(refuse("it is neither a regular file nor a new name"));
        }
        // A symlink stays; its target is replaced.
        Ok(_) => std::fs::canonicalize(destination).map_err(failed)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => destination.to_owned(),
        Err(error) => return Err(failed(error)),
    };
    if path.file_name().is_none() || destination.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(refuse("it is not a file name"));
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    Ok((path, directory))
}

/// Opens or creates a `.partial` file of this user, and locks it for this process. `None` if that
/// is not possible.
fn own_partial(name: &Path) -> io::Result<Option<File>> {
    // A pipe of this name must not make the open block.
    let flags =
        OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(name, flags, Mode::from_raw_mode(0o666)) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::LOOP | rustix::io::Errno::ACCESS | rustix::io::Errno::ISDIR) => {
            return Ok(None);
        }
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

fn nameless(directory: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(
        directory,
        flags,
        Mode::from_raw_mode(0o666),
    )?);
    // Without /proc, the file can never get a name.
    match std::fs::symlink_metadata(link_path(&file)) {
        Ok(_) => Ok(file),
        Err(_) => Err(rustix::io::Errno::OPNOTSUPP.into()),
    }
}

fn is_lack_of_support(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL))
}

fn link_path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A name that no other conversion uses.
fn temporary_name(path: &Path, directory: &Path) -> PathBuf {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let mut name = std::ffi::OsString::from(".");
    // Shortened, so that the longer temporary name stays within the limit of the file system.
    let base = path.file_name().unwrap_or_default().as_encoded_bytes();
    let base = String::from_utf8_lossy(&base[..base.len().min(120)]).into_owned();
    name.push(base);
    name.push(format!(
        ".{}-{}-{:08x}.tmp",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed),
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |t| t.subsec_nanos())
    ));
    directory.join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_file_stays_and_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let first = Output::resumed(&path, "tag").unwrap();
        std::io::Write::write_all(&mut first.file().unwrap(), b"part").unwrap();
        // A second writer at the same time begins with nothing, and leaves nothing.
        drop(Output::resumed(&path, "tag").unwrap());
        drop(first);
        assert_eq!(names(dir.path()), [".image.tag.partial"]);
        let second = Output::resumed(&path, "tag").unwrap();
        assert_eq!(second.file().unwrap().metadata().unwrap().len(), 4);
        second.publish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"part");
        assert_eq!(names(dir.path()), ["image"]);
    }

    #[test]
    fn a_long_name_gives_a_name_that_file_systems_take() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("\u{732b}".repeat(80));
        drop(Output::resumed(&path, &"a".repeat(16)).unwrap());
        let name = format!(".{}.{}.partial", "\u{732b}".repeat(33), "a".repeat(16));
        assert_eq!(names(dir.path()), [name]);
    }

    #[test]
    fn a_link_in_place_of_a_partial_file_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("image"), dir.path().join("victim"));
        std::fs::write(&victim, b"precious").unwrap();
        for link in [true, false] {
            let partial = dir.path().join(".image.tag.partial");
            if link {
                std::os::unix::fs::symlink(&victim, &partial).unwrap()
            } else {
                std::fs::hard_link(&victim, &partial).unwrap()
            }
            let output = Output::resumed(&path, "tag").unwrap();
            std::io::Write::write_all(&mut output.file().unwrap(), b"new").unwrap();
            output.publish().unwrap();
            assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
            std::fs::remove_file(&partial).unwrap();
        }
    }

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(directory)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_appears_only_when_it_is_published() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let output = Output::create(&path).unwrap();
        std::io::Write::write_all(&mut output.file().unwrap(), b"new").unwrap();
        assert!(!path.exists());
        output.publish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["image"]);
    }

    #[test]
    fn an_abandoned_file_leaves_nothing_and_the_old_one_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, b"old").unwrap();
        drop(Output::create(&path).unwrap());
        let mut named = Output::create(&path).unwrap();
        named.give_name().unwrap();
        drop(named);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(names(dir.path()), ["image"]);
    }

    #[test]
    fn a_symlink_stays_and_its_target_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("image"), dir.path().join("link"));
        std::fs::write(&path, b"old").unwrap();
        std::os::unix::fs::symlink("image", &link).unwrap();
        Output::create(&link).unwrap().publish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        assert!(link.is_symlink());
    }

    #[test]
    fn what_cannot_be_an_image_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refuse = |path: &Path| Output::create(path).err().unwrap().to_string();
        let of_directory = refuse(dir.path());
        assert!(of_directory.ends_with("it is a directory; for an OCI layout, use oci:"));
        assert!(
            refuse(Path::new("/dev/null")).ends_with("it is neither a regular file nor a new name")
        );
        assert!(refuse(&dir.path().join("new/")).ends_with("it is not a file name"));
        assert!(refuse(&dir.path().join("no/such/dir")).starts_with("cannot create"));
    }
}
