//! Writes a qcow2 image in one pass (qemu's docs/interop/qcow2.rst, version 3).
//!
//! ```text
//! | header | data clusters, L2 tables (mixed) | L1 table | refcount blocks | refcount table |
//! ```
//!
//! The writer writes the header last, when all offsets are known. Zeros stay unallocated.
//! Compressed clusters start at multiples of 512 bytes; several share a host cluster.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use flate2::{Compress, Compression, FlushCompress, Status};

const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Entries of an L2 table, and of one cluster of the refcount table.
const L2_ENTRIES: u64 = CLUSTER / 8;
/// Number of 16-bit refcounts in a refcount block.
const REFCOUNTS: u64 = CLUSTER / 2;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// Position of the number of additional sectors in the L2 entry of a compressed cluster.
const SECTORS_SHIFT: u32 = 62 - (CLUSTER_BITS - 8);
const SECTOR: u64 = 512;
const HEADER_BYTES: u32 = 112;
/// The writer collects this many bytes before it writes them.
const WRITE_BYTES: usize = 1 << 20;

/// How clusters are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ClusterCompression {
    /// Not compressed.
    #[default]
    None,
    /// With zlib, which every qcow2 reader supports.
    Zlib,
    /// With zstd, which qemu supports since version 5.1.
    Zstd {
        /// Level, 1 to 22.
        level: i32,
    },
}

/// Writes a qcow2 image from content in order. See the module documentation.
pub struct Qcow2Writer<'f> {
    file: &'f File,
    size: u64,
    compressor: Compressor,
    /// The bytes so far of the current cluster.
    cluster: Vec<u8>,
    at: u64,
    /// Bytes that are not written yet, and their offset in the file.
    pending: Vec<u8>,
    pending_at: u64,
    l1: Vec<u64>,
    l2: Vec<u64>,
    refcounts: Vec<u16>,
}

enum Compressor {
    None,
    Zlib(Compress),
    Zstd(Box<zstd::bulk::Compressor<'static>>),
}

impl<'f> Qcow2Writer<'f> {
    /// Starts an image in an empty file. `size` is the size of the disk in bytes, a multiple of
    /// 512.
    pub fn new(file: &'f File, size: u64, compression: ClusterCompression) -> io::Result<Self> {
        if !size.is_multiple_of(SECTOR) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the size of a qcow2 image, {size}, is not a multiple of {SECTOR}"),
            ));
        }
        let compressor = match compression {
            ClusterCompression::None => Compressor::None,
            // Readers use a window of 4096 bytes and expect no zlib header.
            ClusterCompression::Zlib => Compressor::Zlib(Compress::new_with_window_bits(
                Compression::default(),
                false,
                12,
            )),
            ClusterCompression::Zstd { level } => {
                Compressor::Zstd(Box::new(zstd::bulk::Compressor::new(level)?))
            }
        };
        Ok(Qcow2Writer {
            file,
            size,
            compressor,
            cluster: Vec::with_capacity(CLUSTER as usize),
            at: 0,
            pending: Vec::with_capacity(WRITE_BYTES + CLUSTER as usize),
            pending_at: CLUSTER,
            l1: Vec::new(),
            l2: vec![0; L2_ENTRIES as usize],
            refcounts: vec![1],
        })
    }

    /// Appends data.
    pub fn data(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let n = bytes.len().min(CLUSTER as usize - self.cluster.len());
            self.cluster.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if self.cluster.len() as u64 == CLUSTER {
                self.end_cluster()?;
            }
        }
        Ok(())
    }

    /// Appends `count` zeros.
    pub fn zeros(&mut self, mut count: u64) -> io::Result<()> {
        while count > 0 {
            let filled = self.cluster.len() as u64;
            if filled == 0 && count >= CLUSTER {
                // Skip whole clusters up to the end of the L2 table at once.
                let table_left = L2_ENTRIES * CLUSTER - self.at % (L2_ENTRIES * CLUSTER);
                let n = (count / CLUSTER * CLUSTER).min(table_left);
                self.advance(n)?;
                count -= n;
                continue;
            }
            let n = count.min(CLUSTER - filled);
            self.cluster.resize((filled + n) as usize, 0);
            count -= n;
            if filled + n == CLUSTER {
                self.end_cluster()?;
            }
        }
        Ok(())
    }

    /// Writes the tables and the header, without a sync. Returns the length of the file in bytes.
    pub fn finish(mut self) -> io::Result<u64> {
        if self.at + self.cluster.len() as u64 != self.size {
            return Err(io::Error::other(format!(
                "the length of the content is {}, the size of the image is {}",
                self.at + self.cluster.len() as u64,
                self.size
            )));
        }
        if !self.cluster.is_empty() {
            self.cluster.resize(CLUSTER as usize, 0);
            self.end_cluster()?;
        }
        if !self.at.is_multiple_of(L2_ENTRIES * CLUSTER) {
            self.end_table()?;
        }
        let l1_entries = self.l1.len() as u32;
        let l1 = std::mem::take(&mut self.l1);
        // An empty table needs a valid offset too.
        let l1_offset =
            if l1.is_empty() { CLUSTER } else { self.append(&big_endian(&l1), CLUSTER)? };
        let (table_offset, table_clusters) = self.write_refcounts()?;
        self.flush()?;
        let header = self.header(l1_entries, l1_offset, table_offset, table_clusters);
        self.file.write_all_at(&header, 0)?;
        Ok(self.end())
    }

    fn end_cluster(&mut self) -> io::Result<()> {
        let cluster = std::mem::take(&mut self.cluster);
        if cluster.iter().any(|&byte| byte != 0) {
            let entry = self.store(&cluster)?;
            self.l2[(self.at / CLUSTER % L2_ENTRIES) as usize] = entry;
        }
        self.cluster = cluster;
        self.cluster.clear();
        self.advance(CLUSTER)
    }

    /// Moves forward by whole clusters within the L2 table.
    fn advance(&mut self, bytes: u64) -> io::Result<()> {
        self.at += bytes;
        if self.at.is_multiple_of(L2_ENTRIES * CLUSTER) {
            self.end_table()
        } else {
            Ok(())
        }
    }

    fn end_table(&mut self) -> io::Result<()> {
        let entry = if self.l2.iter().all(|&entry| entry == 0) {
            0
        } else {
            let bytes = big_endian(&self.l2);
            self.l2.fill(0);
            self.append(&bytes, CLUSTER)? | COPIED
        };
        self.l1.push(entry);
        Ok(())
    }

    /// Stores a cluster and returns its L2 entry.
    fn store(&mut self, cluster: &[u8]) -> io::Result<u64> {
        match self.compressor.compress(cluster)? {
            None => Ok(self.append(cluster, CLUSTER)? | COPIED),
            Some(frame) => {
                let at = self.append(&frame, SECTOR)?;
                let sectors = (frame.len() as u64).div_ceil(SECTOR);
                Ok(at | (sectors - 1) << SECTORS_SHIFT | COMPRESSED)
            }
        }
    }

    /// Appends bytes to the file, aligned to `unit` bytes, and returns their offset.
    fn append(&mut self, bytes: &[u8], unit: u64) -> io::Result<u64> {
        self.pad(unit);
        let at = self.end();
        self.pending.extend_from_slice(bytes);
        self.pad(unit);
        for host in at >> CLUSTER_BITS..self.end().div_ceil(CLUSTER) {
            match self.refcounts.get_mut(host as usize) {
                Some(count) => *count += 1,
                None => self.refcounts.push(1),
            }
        }
        if self.pending.len() >= WRITE_BYTES {
            self.flush()?;
        }
        Ok(at)
    }

    /// Offset of the end of all appended bytes.
    fn end(&self) -> u64 {
        self.pending_at + self.pending.len() as u64
    }

    fn pad(&mut self, unit: u64) {
        let end = self.end();
        let padding = end.next_multiple_of(unit) - end;
        self.pending
            .resize(self.pending.len() + padding as usize, 0);
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.pending, self.pending_at)?;
        self.pending_at = self.end();
        self.pending.clear();
        Ok(())
    }

    /// Writes the refcounts of all clusters, those of the refcount clusters included. Returns the
    /// offset of the refcount table and its number of clusters.
    fn write_refcounts(&mut self) -> io::Result<(u64, u32)> {
        self.pad(CLUSTER);
        let used = self.end() >> CLUSTER_BITS;
        let (mut blocks, mut table) = (0, 0);
        loop {
            let needed = (used + blocks + table).div_ceil(REFCOUNTS);
            let table_clusters = needed.div_ceil(CLUSTER / 8);
            if (needed, table_clusters) == (blocks, table) {
                break;
            }
            (blocks, table) = (needed, table_clusters);
        }
        let mut refcounts = std::mem::take(&mut self.refcounts);
        refcounts.resize((used + blocks + table) as usize, 1);
        let mut places = Vec::with_capacity(blocks as usize);
        for block in refcounts.chunks(REFCOUNTS as usize) {
            let bytes: Vec<u8> = block.iter().flat_map(|count| count.to_be_bytes()).collect();
            places.push(self.append(&bytes, CLUSTER)?);
        }
        let at = self.append(&big_endian(&places), CLUSTER)?;
        debug_assert_eq!(self.end() >> CLUSTER_BITS, used + blocks + table);
        Ok((at, table as u32))
    }

    fn header(&self, l1_entries: u32, l1: u64, refcounts: u64, refcount_clusters: u32) -> Vec<u8> {
        let compression_type = matches!(self.compressor, Compressor::Zstd(_)) as u8;
        let incompatible = u64::from(compression_type) << 3;
        let mut header = Vec::with_capacity(HEADER_BYTES as usize + 8);
        header.extend_from_slice(b"QFI\xfb");
        header.extend_from_slice(&3u32.to_be_bytes());
        // No backing file.
        header.extend_from_slice(&[0; 12]);
        header.extend_from_slice(&CLUSTER_BITS.to_be_bytes());
        header.extend_from_slice(&self.size.to_be_bytes());
        // Not encrypted.
        header.extend_from_slice(&[0; 4]);
        header.extend_from_slice(&l1_entries.to_be_bytes());
        header.extend_from_slice(&l1.to_be_bytes());
        header.extend_from_slice(&refcounts.to_be_bytes());
        header.extend_from_slice(&refcount_clusters.to_be_bytes());
        // No snapshots.
        header.extend_from_slice(&[0; 12]);
        header.extend_from_slice(&incompatible.to_be_bytes());
        // No compatible and no autoclear features; refcounts of 2^4 bits.
        header.extend_from_slice(&[0; 16]);
        header.extend_from_slice(&4u32.to_be_bytes());
        header.extend_from_slice(&HEADER_BYTES.to_be_bytes());
        header.push(compression_type);
        // Padding, and the end mark of the header extensions.
        header.resize(HEADER_BYTES as usize + 8, 0);
        header
    }
}

impl Compressor {
    /// The compressed cluster if it is at least one sector shorter.
    fn compress(&mut self, cluster: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let most = cluster.len() - SECTOR as usize;
        let frame = match self {
            Compressor::None => return Ok(None),
            Compressor::Zlib(zlib) => {
                let mut frame = Vec::with_capacity(most);
                zlib.reset();
                let status = zlib
                    .compress_vec(cluster, &mut frame, FlushCompress::Finish)
                    .map_err(io::Error::other)?;
                match status {
                    Status::StreamEnd => frame,
                    // The output does not fit.
                    _ => return Ok(None),
                }
            }
            Compressor::Zstd(zstd) => {
                let frame = zstd.compress(cluster)?;
                if frame.len() > most {
                    return Ok(None);
                }
                frame
            }
        };
        Ok(Some(frame))
    }
}

fn big_endian(entries: &[u64]) -> Vec<u8> {
    entries
        .iter()
        .flat_map(|entry| entry.to_be_bytes())
        .collect()
}

#[cfg(test)]
mod tests {
    use bcow::BlockDevice;

    use super::*;
    use crate::Qcow2Disk;

    fn sample() -> Vec<u8> {
        let mut bytes = vec![0; (3 << 20) + 512];
        for (i, byte) in bytes[1 << 20..2 << 20].iter_mut().enumerate() {
            *byte = (i / 300) as u8;
        }
        let mut state = 1u32;
        for byte in &mut bytes[100_000..300_000] {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        bytes.last_mut().into_iter().for_each(|last| *last = 1);
        bytes
    }

    #[test]
    fn an_image_reads_back() {
        let bytes = sample();
        for compression in [ClusterCompression::None, ClusterCompression::Zlib] {
            let file = tempfile::NamedTempFile::new().unwrap();
            let mut writer =
                Qcow2Writer::new(file.as_file(), bytes.len() as u64, compression).unwrap();
            writer.data(&bytes[..5000]).unwrap();
            writer.data(&bytes[5000..2 << 20]).unwrap();
            writer.zeros(1 << 20).unwrap();
            writer.data(&bytes[3 << 20..]).unwrap();
            let length = writer.finish().unwrap();
            assert_eq!(length, file.as_file().metadata().unwrap().len());
            let disk = Qcow2Disk::open(file.path(), &[]).unwrap();
            assert_eq!(disk.bytes(), bytes.len() as u64);
            let mut found = vec![0; bytes.len()];
            disk.read_at(0, &mut found).unwrap();
            assert!(found == bytes, "{compression:?}");
        }
    }

    #[test]
    fn content_of_another_length_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        let mut writer = Qcow2Writer::new(&file, 1 << 20, ClusterCompression::None).unwrap();
        writer.zeros(1 << 19).unwrap();
        assert!(writer.finish().is_err());
        assert!(Qcow2Writer::new(&file, 1000, ClusterCompression::None).is_err());
    }
}
