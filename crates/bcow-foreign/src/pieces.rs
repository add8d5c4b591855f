//! The content of a device, in order, zeros told apart.

use bcow::{BlockDevice, Content, Error};

/// Read at once.
const PIECE_BYTES: u64 = 4 << 20;

/// A piece of a device.
pub enum Piece<'a> {
    /// Bytes at a place.
    Data {
        /// First byte in the address space.
        offset: u64,
        /// What is there.
        bytes: &'a [u8],
    },
    /// Zeros that did not have to be read.
    Zeros {
        /// First byte in the address space.
        offset: u64,
        /// How many.
        length: u64,
    },
}

/// Why the way through a device ended early.
#[derive(Debug)]
pub enum Stopped<E> {
    /// The device could not be read.
    Read(Error),
    /// Whoever took the pieces would have no more.
    Taker(E),
}

/// Gives `take` the first `end` bytes of `device` in order, in pieces of up to 4 MiB of data.
pub fn pieces<E>(
    device: &dyn BlockDevice,
    end: u64,
    take: &mut dyn FnMut(Piece<'_>) -> Result<(), E>,
) -> Result<(), Stopped<E>> {
    let mut at = 0;
    while at < end {
        let status = device.status(at, end - at).map_err(Stopped::Read)?;
        let length = status.length.clamp(1, end - at);
        match status.content {
            Content::Data => data(device, at, length, take)?,
            Content::Zero | Content::Hole => {
                take(Piece::Zeros { offset: at, length }).map_err(Stopped::Taker)?;
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
    take: &mut dyn FnMut(Piece<'_>) -> Result<(), E>,
) -> Result<(), Stopped<E>> {
    let end = start + length;
    let mut at = start;
    while at < end {
        let n = PIECE_BYTES.min(end - at);
        let mut offset = at;
        let mut taken = Ok(());
        device
            .read_with(at, n, &mut |bytes| {
                if taken.is_ok() {
                    taken = take(Piece::Data { offset, bytes });
                }
                offset += bytes.len() as u64;
            })
            .map_err(Stopped::Read)?;
        taken.map_err(Stopped::Taker)?;
        at += n;
    }
    Ok(())
}
