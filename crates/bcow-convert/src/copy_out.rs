//! Writes the address space of a device to a file or a stream in another form.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bcow::BlockDevice;
use bcow_foreign::{ClusterCompression, Piece, Qcow2Writer, Stopped, pieces};

use bcow_images::error::{CommandError, Context};
use bcow_images::interrupt::Interrupt;
use bcow_images::new_file::NewFile;

use crate::work::Work;

/// Zeros inside of data become holes in pieces of this size.
const HOLE_BYTES: usize = 64 << 10;

/// The data to write, and the callback for progress.
pub struct CopyOut<'a> {
    /// The source.
    pub device: &'a dyn BlockDevice,
    /// The user's name for the source.
    pub name: &'a Path,
    /// The number of bytes to write.
    pub end: u64,
    pub work: &'a Work<'a>,
}

impl CopyOut<'_> {
    /// Writes the bytes as they are into an empty file, zeros as holes.
    pub fn raw(&self, new: &NewFile, cannot: &dyn Fn() -> String) -> Result<(), CommandError> {
        // Sets the length first: unwritten parts are then holes.
        new.file().set_len(self.end).context(cannot)?;
        self.pieces(&mut |piece| match piece {
            Piece::Data { offset, bytes } => {
                for (at, chunk) in (offset..).step_by(HOLE_BYTES).zip(bytes.chunks(HOLE_BYTES)) {
                    if chunk.iter().any(|&byte| byte != 0) {
                        new.file().write_all_at(chunk, at).context(cannot)?;
                    }
                }
                Ok(())
            }
            Piece::Zeros { .. } => Ok(()),
        })
    }

    /// Writes the bytes as they are to standard output.
    pub fn stream(&self, out: &mut dyn Write) -> Result<(), CommandError> {
        self.pieces(&mut |piece| match piece {
            Piece::Data { bytes, .. } => write_out(bytes, out),
            Piece::Zeros { length, .. } => write_zeros(length, self.work.interrupt, out),
        })
    }

    /// Writes a qcow2 image into an empty file; returns the size of the disk and the length of the
    /// file, in bytes.
    pub fn qcow2(
        &self,
        new: &NewFile,
        compression: ClusterCompression,
        cannot: &dyn Fn() -> String,
    ) -> Result<(u64, u64), CommandError> {
        // The size of a qcow2 image is a multiple of 512 bytes.
        let size = self.end.next_multiple_of(512);
        let mut writer = Qcow2Writer::new(new.file(), size, compression).context(cannot)?;
        self.pieces(&mut |piece| {
            match piece {
                Piece::Data { bytes, .. } => writer.data(bytes),
                Piece::Zeros { length, .. } => writer.zeros(length),
            }
            .context(cannot)
        })?;
        writer.zeros(size - self.end).context(cannot)?;
        Ok((size, writer.finish().context(cannot)?))
    }

    fn pieces(
        &self,
        take: &mut dyn FnMut(Piece<'_>) -> Result<(), CommandError>,
    ) -> Result<(), CommandError> {
        let taken = pieces(self.device, self.end, &mut |piece| {
            self.work.interrupt.check()?;
            self.work.progress.advance(match &piece {
                Piece::Data { bytes, .. } => bytes.len() as u64,
                Piece::Zeros { length, .. } => *length,
            });
            take(piece)
        });
        taken.map_err(|stopped| match stopped {
            Stopped::Read(error) => {
                CommandError::new(format!("cannot read {}", self.name.display())).caused_by(&error)
            }
            Stopped::Consumer(error) => error,
        })
    }
}

fn write_out(bytes: &[u8], out: &mut dyn Write) -> Result<(), CommandError> {
    let written = out.write_all(bytes);
    written.map_err(|error| CommandError::standard_output(&error))
}

/// Zeros for a stream, which has no holes.
fn write_zeros(
    mut length: u64,
    interrupt: &Interrupt,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
    while length > 0 {
        interrupt.check()?;
        let n = length.min(ZEROS.len() as u64);
        write_out(&ZEROS[..n as usize], out)?;
        length -= n;
    }
    Ok(())
}
