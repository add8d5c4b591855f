//! Tar archives, written byte by byte, valid and invalid, in every dialect.

/// An archive that is being written.
#[derive(Clone, Default)]
pub struct Tar {
    pub bytes: Vec<u8>,
}

/// The fields of a header.
#[derive(Clone)]
pub struct Header {
    pub name: Vec<u8>,
    pub kind: u8,
    pub size: u64,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub mtime: u64,
    pub link: Vec<u8>,
    pub device: (u32, u32),
    pub magic: [u8; 8],
}

pub const USTAR: [u8; 8] = *b"ustar\x0000";
pub const GNU: [u8; 8] = *b"ustar  \0";
pub const V7: [u8; 8] = [0; 8];

impl Header {
    pub fn new(name: impl AsRef<[u8]>, kind: u8) -> Header {
        Header {
            name: name.as_ref().to_vec(),
            kind,
            size: 0,
            mode: if kind == b'5' { 0o755 } else { 0o644 },
            uid: 0,
            gid: 0,
            mtime: 1_000_000_000,
            link: Vec::new(),
            device: (0, 0),
            magic: USTAR,
        }
    }

    pub fn size(mut self, size: u64) -> Self {
        self.size = size;
        self
    }

    pub fn link(mut self, link: impl AsRef<[u8]>) -> Self {
        self.link = link.as_ref().to_vec();
        self
    }

    pub fn magic(mut self, magic: [u8; 8]) -> Self {
        self.magic = magic;
        self
    }

    /// The block. A test may change it and call [`seal`].
    pub fn block(&self) -> [u8; 512] {
        let mut block = [0; 512];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.name[..self.name.len().min(100)]);
        put(100, format!("{:07o}", self.mode).as_bytes());
        put(108, format!("{:07o}", self.uid).as_bytes());
        put(116, format!("{:07o}", self.gid).as_bytes());
        put(124, format!("{:011o}", self.size).as_bytes());
        put(136, format!("{:011o}", self.mtime).as_bytes());
        put(156, &[self.kind]);
        put(157, &self.link[..self.link.len().min(100)]);
        put(257, &self.magic);
        if self.magic != V7 {
            put(329, format!("{:07o}", self.device.0).as_bytes());
            put(337, format!("{:07o}", self.device.1).as_bytes());
        }
        seal(block)
    }
}

/// Sets the checksum.
pub fn seal(mut block: [u8; 512]) -> [u8; 512] {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// A PAX record.
pub fn record(key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Vec<u8> {
    let body = [b" ", key.as_ref(), b"=", value.as_ref(), b"\n"].concat();
    let length = (body.len()..)
        .find(|n| n.to_string().len() + body.len() == *n)
        .unwrap();
    [length.to_string().as_bytes(), &body].concat()
}

impl Tar {
    pub fn new() -> Tar {
        Tar::default()
    }

    /// Appends bytes.
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Appends a header and its data, padded.
    pub fn entry(self, header: &Header, data: &[u8]) -> Self {
        let mut tar = self.raw(&header.block()).raw(data);
        let padded = tar.bytes.len().next_multiple_of(512);
        tar.bytes.resize(padded, 0);
        tar
    }

    pub fn file(self, name: impl AsRef<[u8]>, data: impl AsRef<[u8]>) -> Self {
        let data = data.as_ref();
        self.entry(&Header::new(name, b'0').size(data.len() as u64), data)
    }

    pub fn dir(self, name: impl AsRef<[u8]>) -> Self {
        self.entry(&Header::new(name, b'5'), b"")
    }

    pub fn symlink(self, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        self.entry(&Header::new(name, b'2').link(target), b"")
    }

    pub fn hardlink(self, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        self.entry(&Header::new(name, b'1').link(target), b"")
    }

    /// A PAX header for the next entry.
    pub fn pax<K: AsRef<[u8]>, V: AsRef<[u8]>>(self, records: &[(K, V)]) -> Self {
        let data: Vec<u8> = records.iter().flat_map(|(k, v)| record(k, v)).collect();
        self.pax_raw(b'x', &data)
    }

    pub fn pax_raw(self, kind: u8, data: &[u8]) -> Self {
        let header = Header::new("PaxHeaders/x", kind).size(data.len() as u64);
        self.entry(&header, data)
    }

    /// A GNU `L` or `K` entry.
    pub fn gnu_long(self, kind: u8, name: impl AsRef<[u8]>) -> Self {
        let name = [name.as_ref(), b"\0"].concat();
        let header = Header::new("././@LongLink", kind)
            .magic(GNU)
            .size(name.len() as u64);
        self.entry(&header, &name)
    }

    /// The archive with the end-of-archive marker.
    pub fn done(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 1024, 0);
        self.bytes
    }
}
