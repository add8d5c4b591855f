//! Content digests: validated when they are parsed, and computed as bytes are read.

use std::fmt;
use std::io;
use std::str::FromStr;

use bcow::Storage;
pub(crate) use bcow::format::hex;
use data_encoding::HEXLOWER;
use sha2::{Digest as _, Sha256, Sha512};

use crate::cancel::Cancel;

/// Digest algorithms of the OCI image specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// SHA-256.
    Sha256,
    /// SHA-512.
    Sha512,
}

impl Algorithm {
    /// The algorithm's name in the text of a digest, in front of the colon.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        }
    }

    /// Length of a digest in bytes.
    fn bytes(self) -> usize {
        match self {
            Algorithm::Sha256 => 32,
            Algorithm::Sha512 => 64,
        }
    }
}

/// The digest of a blob, `sha256:...` or `sha512:...`. Its text is safe as a file name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest {
    algorithm: Algorithm,
    bytes: Box<[u8]>,
}

impl Digest {
    /// Its algorithm.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The hexadecimal digits behind the colon, in lower case.
    pub fn hex(&self) -> String {
        hex(&self.bytes)
    }

    /// A short form for messages: the algorithm and 12 digits.
    pub fn short(&self) -> String {
        format!("{}:{}", self.algorithm.name(), &self.hex()[..12])
    }

    /// The digest with these SHA-256 bytes.
    pub fn from_sha256(bytes: [u8; 32]) -> Digest {
        Digest {
            algorithm: Algorithm::Sha256,
            bytes: bytes.into(),
        }
    }

    /// The digest's bytes, if it is a SHA-256.
    pub fn sha256(&self) -> Option<[u8; 32]> {
        match self.algorithm {
            Algorithm::Sha256 => self.bytes[..].try_into().ok(),
            Algorithm::Sha512 => None,
        }
    }

    /// The digest of all bytes of a storage.
    pub fn of_storage(storage: &dyn Storage, algorithm: Algorithm) -> io::Result<Digest> {
        Digest::of_storage_until(storage, algorithm, Cancel::default())
    }

    /// The same, until the operation is cancelled.
    pub(crate) fn of_storage_until(
        storage: &dyn Storage,
        algorithm: Algorithm,
        cancel: Cancel<'_>,
    ) -> io::Result<Digest> {
        let mut hasher = Hasher::new(algorithm);
        let length = storage.len()?;
        let mut buffer = vec![0; length.min(1 << 20) as usize];
        let mut at = 0;
        while at < length {
            cancel.check()?;
            let count = (length - at).min(buffer.len() as u64) as usize;
            storage.read_at(at, &mut buffer[..count])?;
            hasher.update(&buffer[..count]);
            at += count as u64;
        }
        Ok(hasher.finish())
    }

    /// The SHA-256 digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest::of_bytes(bytes, Algorithm::Sha256)
    }

    pub(crate) fn of_bytes(bytes: &[u8], algorithm: Algorithm) -> Digest {
        let mut hasher = Hasher::new(algorithm);
        hasher.update(bytes);
        hasher.finish()
    }
}

impl FromStr for Digest {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (algorithm, hex) = text.split_once(':').ok_or("it has no colon")?;
        let algorithm = match algorithm {
            "sha256" => Algorithm::Sha256,
            "sha512" => Algorithm::Sha512,
            _ => return Err("the algorithm is neither sha256 nor sha512"),
        };
        // The length is checked first, because the text may have megabytes.
        if hex.len() != 2 * algorithm.bytes() {
            return Err("it has the wrong length");
        }
        let bytes = HEXLOWER
            .decode(hex.as_bytes())
            .map_err(|_| "it is not in lower-case hexadecimal")?;
        Ok(Digest {
            algorithm,
            bytes: bytes.into(),
        })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl serde::Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The digest of a layer's *uncompressed* archive. A layer has the same diffID in every source.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiffId(pub Digest);

impl fmt::Display for DiffId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl serde::Serialize for DiffId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

/// A digest that is being computed.
#[derive(Clone)]
pub(crate) enum Hasher {
    Sha256(Sha256),
    Sha512(Sha512),
}

impl Hasher {
    pub(crate) fn new(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Sha256 => Hasher::Sha256(Sha256::new()),
            Algorithm::Sha512 => Hasher::Sha512(Sha512::new()),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(h) => h.update(bytes),
            Hasher::Sha512(h) => h.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> Digest {
        match self {
            Hasher::Sha256(h) => Digest {
                algorithm: Algorithm::Sha256,
                bytes: h.finalize().to_vec().into(),
            },
            Hasher::Sha512(h) => Digest {
                algorithm: Algorithm::Sha512,
                bytes: h.finalize().to_vec().into(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_the_empty_string_reads_back() {
        let digest = Digest::of(b"");
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.parse(), Ok(digest.clone()));
        assert_eq!(digest.short(), "sha256:e3b0c44298fc");
    }

    #[test]
    fn a_digest_that_could_name_another_file_is_refused() {
        for text in [
            "",
            "sha256",
            "sha256:",
            "sha256:../../../../etc/passwd",
            "sha256:E3B0C44298FC1C149AFBF4C8996FB92427AE41E4649B934CA495991B7852B855",
            "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b85",
            "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b85/",
            "md5:d41d8cd98f00b204e9800998ecf8427e",
            "../sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }
}
