//! Reads the content of a device in order and skips zeros.

use bcow::{BlockDevice, Content, Error};

/// Most bytes of one read.
const READ_BYTES: u64 = 4 << 20;

/// A piece of a device.
pub enum Piece<'a> {
    Data {
        /// Offset of the first byte in the address space.
        offset: u64,
        /// The data.
        bytes: &'a [u8],
    },
    /// Zeros. They were not read.
    Zeros {
        /// Offset of the first byte in the address space.
        offset: u64,
        /// Number of bytes.
        length: u64,
    },
}

/// Why [`pieces`] stopped before the end.
#[derive(Debug)]
pub enum Stopped<E> {
    /// The device returned an error.
    Read(Error),
    /// The consumer of the pieces returned an error.
    Consumer(E),
}

/// Calls `consume` for the first `end` bytes of `device` in order. Data comes in pieces of at
/// most 4 MiB.
pub fn pieces<E>(
    device: &dyn BlockDevice,
    end: u64,
    consume: &mut dyn FnMut(Piece<'_>) -> Result<(), E>,
) -> Result<(), Stopped<E>> {
    let mut at = 0;
    while at < end {
        let status = device.status(at, end - at).map_err(Stopped::Read)?;
        let length = status.length.clamp(1, end - at);
        match status.content {
            Content::Data => data(device, at, length, consume)?,
            Content::Zero | Content::Hole => {
                consume(Piece::Zeros { offset: at, length }).map_err(Stopped::Consumer)?;
            }
        }
        at += length;
    }
    Ok(())
}

fn data<E>(
    device: &dyn BlockDevice,
    start: u64,
    length: u64,
    consume: &mut dyn FnMut(Piece<'_>) -> Result<(), E>,
) -> Result<(), Stopped<E>> {
    let end = start + length;
    let mut at = start;
    while at < end {
        let n = READ_BYTES.min(end - at);
        let mut offset = at;
        let mut consumed = Ok(());
        device
            .read_with(at, n, &mut |bytes| {
                if consumed.is_ok() {
                    consumed = consume(Piece::Data { offset, bytes });
                }
                offset += bytes.len() as u64;
            })
            .map_err(Stopped::Read)?;
        consumed.map_err(Stopped::Consumer)?;
        at += n;
    }
    Ok(())
}
