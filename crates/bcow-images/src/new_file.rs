//! New files, with errors that name the destination.

use std::fs::File;
use std::path::{Path, PathBuf};

use bcow::NewFileError;

use crate::error::CommandError;
use crate::replace;

/// A file that gets its name only when it is complete.
pub struct NewFile {
    new: bcow::NewFile,
    destination: PathBuf,
}

impl NewFile {
    /// Starts a file that becomes `destination`. The destination must not exist; this never
    /// replaces a file.
    pub fn create_new(destination: &Path) -> Result<Self, CommandError> {
        NewFile::of(bcow::NewFile::create_new(destination), destination)
    }

    /// Starts a file that becomes `destination`. It replaces a file of that name, but no BCoW file:
    /// a disk may be the only copy of its data, and an image may be the backing of disks.
    pub fn create(destination: &Path) -> Result<Self, CommandError> {
        if !replace::is_bcow(destination) {
            NewFile::replace(destination)
        } else {
            Err(
                CommandError::new(format!("cannot create {}", destination.display()))
                    .caused_by_text("the file exists, and is in BCoW format")
                    .hint("give another name, or remove the file first"),
            )
        }
    }

    /// Starts a file that becomes `destination`, and replaces any file of that name.
    pub fn replace(destination: &Path) -> Result<Self, CommandError> {
        NewFile::of(bcow::NewFile::create(destination), destination)
    }

    fn of(
        new: Result<bcow::NewFile, NewFileError>,
        destination: &Path,
    ) -> Result<Self, CommandError> {
        Ok(NewFile {
            new: new.map_err(|error| failure(&error, destination))?,
            destination: destination.to_owned(),
        })
    }

    /// The file, to be filled.
    pub fn file(&self) -> &File {
        self.new.file()
    }

    /// The file of the library.
    pub fn inner(&self) -> &bcow::NewFile {
        &self.new
    }

    /// Makes the content durable and gives the file its name.
    pub fn complete(self) -> Result<(), CommandError> {
        let completed = self.new.complete();
        completed.map_err(|error| failure(&error, &self.destination))
    }
}

fn failure(error: &NewFileError, destination: &Path) -> CommandError {
    let action = match error {
        NewFileError::Write(_) => "write",
        _ => "create",
    };
    let failure =
        CommandError::new(format!("cannot {action} {}", destination.display())).caused_by(error);
    match error {
        NewFileError::NoRegularFile => {
            failure.hint("write to standard output (-o -) and redirect that")
        }
        _ => failure,
    }
}
