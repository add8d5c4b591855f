//! Copies of whole files.

use std::fs::File;
use std::io::{self, Read};

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Most bytes of a piece of [`copy_file_in_pieces`].
const PIECE_BYTES: u64 = 4 << 20;

/// Makes `to`, which is empty, a copy of `from`: a reflink, or a copy of the stored ranges.
pub fn copy_file(from: &File, to: &File) -> io::Result<()> {
    copy_file_in_pieces(from, to, Ok)
}

/// As [`copy_file`]. Calls `copied` between any two pieces, and ends with its error.
pub(crate) fn copy_file_in_pieces<E: From<io::Error>>(
    from: &File,
    mut to: &File,
    mut copied: impl FnMut(()) -> Result<(), E>,
) -> Result<(), E> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    let size = from.metadata()?.len();
    let seek = |to| match rustix::fs::seek(from, to) {
        Ok(at) => Ok(at.min(size)),
        Err(Errno::NXIO) => Ok(size),
        Err(errno) => Err(io::Error::from(errno)),
    };
    let mut at = 0;
    while at < size {
        let start = seek(SeekFrom::Data(at))?;
        at = if start < size { seek(SeekFrom::Hole(start))? } else { size };
        at = at.min(start + PIECE_BYTES);
        rustix::fs::seek(from, SeekFrom::Start(start)).map_err(io::Error::from)?;
        rustix::fs::seek(to, SeekFrom::Start(start)).map_err(io::Error::from)?;
        io::copy(&mut from.take(at - start), &mut to)?;
        copied(())?;
    }
    Ok(to.set_len(size)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn copy_has_the_bytes_and_the_holes() {
        let [from, to] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        from.write_all_at(b"first", 0).unwrap();
        from.write_all_at(&[7; 5000], 10 << 20).unwrap();
        from.set_len(30 << 20).unwrap();
        copy_file(&from, &to).unwrap();
        let read = |file: &File| {
            let mut bytes = vec![0; 30 << 20];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        assert!(read(&from) == read(&to));
        let metadata = to.metadata().unwrap();
        assert_eq!(metadata.len(), 30 << 20);
        assert!(metadata.blocks() * 512 < 1 << 20);
    }
}
