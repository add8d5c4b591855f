//! The destination file, which appears complete or not at all: a [`NewFile`] whose errors name it.
//!
//! Like `qemu-img convert`, bcow replaces an existing image; unlike it, atomically and only with a
//! complete image.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use bcow::{NewFile, NewFileError};

use crate::error::ConvertError;

/// A file that is not yet at its destination.
pub(crate) struct Output {
    new: NewFile,
    /// The path in messages.
    path: PathBuf,
}

impl Output {
    /// Creates a file for `destination`.
    pub(crate) fn create(destination: &Path) -> Result<Output, ConvertError> {
        Output::of(NewFile::create(destination), "create", destination)
    }

    /// Opens the file that an interrupted copy to `destination` left, or creates one that stays if
    /// it does not become complete. `tag` distinguishes the contents.
    pub(crate) fn resumed(destination: &Path, tag: &str) -> Result<Output, ConvertError> {
        Output::of(NewFile::resumed(destination, tag), "create", destination)
    }

    /// The same in `directory`; [`Output::name_as`] gives the file a name.
    pub(crate) fn resumed_unnamed(directory: &Path, tag: &str) -> Result<Output, ConvertError> {
        let new = NewFile::resumed_unnamed(directory, tag);
        Output::of(new, "create a file in", directory)
    }

    /// Creates a file in `directory`; [`Output::name_as`] gives it a name.
    pub(crate) fn unnamed(directory: &Path) -> Result<Output, ConvertError> {
        Output::of(NewFile::unnamed(directory), "create a file in", directory)
    }

    fn of(
        new: Result<NewFile, NewFileError>,
        action: &'static str,
        path: &Path,
    ) -> Result<Output, ConvertError> {
        let new = new.map_err(|error| failed(action, path, error))?;
        let path = path.to_owned();
        Ok(Output { new, path })
    }

    /// Gives the file a name in its directory, and replaces an existing file of that name. The
    /// caller flushes the file before the call, and the directory after it.
    pub(crate) fn name_as(self, name: &str) -> Result<(), ConvertError> {
        let named = self.new.name_as(name);
        named.map_err(|error| failed("name a file in", &self.path, error))
    }

    /// The directory for temporary data of the conversion: its file system must have space for the
    /// image anyway.
    pub(crate) fn directory(&self) -> &Path {
        self.new.directory()
    }

    /// The file, for writing.
    pub(crate) fn file(&self) -> Result<File, ConvertError> {
        let file = self.new.file().try_clone();
        file.map_err(|source| ConvertError::write("create", &self.path, source))
    }

    /// Makes the image durable, then moves it to its destination.
    pub(crate) fn publish(self) -> Result<(), ConvertError> {
        let completed = self.new.complete();
        completed.map_err(|error| failed("name", &self.path, error))
    }
}

/// The error of a file at or in `path`; `action` is what failed if it is not a write.
fn failed(action: &'static str, path: &Path, error: NewFileError) -> ConvertError {
    let problem = match error {
        NewFileError::Directory => "it is a directory; for an OCI layout, use oci:",
        NewFileError::NoRegularFile => "it is neither a regular file nor a new name",
        NewFileError::NoName => "it is not a file name",
        NewFileError::Create(source) => return ConvertError::write(action, path, source),
        NewFileError::Write(source) => return ConvertError::write("write", path, source),
        other => return ConvertError::write(action, path, io::Error::other(other)),
    };
    ConvertError::Destination {
        path: path.to_owned(),
        problem,
    }
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
