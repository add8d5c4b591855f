//! Files that are made again when a read finds damage.

use std::error::Error;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::locked::header_of;
use crate::storage::{FileIdentity, Storage, Version};

/// Makes a file again, and opens it.
type MakeAgain = dyn Fn() -> Result<File, Box<dyn Error>> + Send + Sync;

/// A file that can be made again from other files, with the same bytes. The first read of damaged
/// bytes does that; later reads read the new file.
pub struct RestoredFile {
    file: File,
    /// For messages.
    path: PathBuf,
    make: Box<MakeAgain>,
    /// The file that was made when damage was found; `None` if that failed.
    again: OnceLock<Option<File>>,
}

impl RestoredFile {
    /// The open file at `path`, and how it is made again.
    pub fn new(
        file: File,
        path: PathBuf,
        make: impl Fn() -> Result<File, Box<dyn Error>> + Send + Sync + 'static,
    ) -> Self {
        RestoredFile {
            file,
            path,
            make: Box::new(make),
            again: OnceLock::new(),
        }
    }

    fn current(&self) -> &File {
        let again = self.again.get().and_then(Option::as_ref);
        again.unwrap_or(&self.file)
    }

    fn make_again(&self) -> Option<File> {
        let path = self.path.display();
        match (self.make)() {
            // Positions of the damaged file are in use.
            Ok(file) if header_of(&file) == header_of(&self.file) => {
                tracing::warn!("{path} was damaged, and was made again");
                Some(file)
            }
            Ok(_) => {
                tracing::error!("{path} is damaged, and was written by another version of bcow");
                None
            }
            Err(error) => {
                tracing::error!("{path} is damaged, and cannot be made again: {error}");
                None
            }
        }
    }
}

impl Storage for RestoredFile {
    fn len(&self) -> io::Result<u64> {
        Storage::len(self.current())
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        Storage::read_at(self.current(), offset, buf)
    }
    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn restore(&self) -> bool {
        self.again.get_or_init(|| self.make_again()).is_some()
    }
    fn identity(&self) -> Option<FileIdentity> {
        Storage::identity(&self.file)
    }
    fn version(&self) -> Option<Version> {
        Storage::version(&self.file)
    }
}
