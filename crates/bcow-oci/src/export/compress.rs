//! Compression of layers. The output does not depend on the number of threads.

use std::io::{self, Write};
use std::str::FromStr;

use flate2::write::GzEncoder;

/// The compression of a layer's archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerCompression {
    /// No compression.
    None,
    /// gzip, which all engines support; level 0 to 9.
    Gzip {
        /// The usual level is 6.
        level: u32,
    },
    /// zstd; level 1 to 22.
    Zstd {
        /// The usual level is 3.
        level: i32,
    },
}

impl LayerCompression {
    /// The layer's media type.
    pub(super) fn media_type(self) -> &'static str {
        match self {
            LayerCompression::None => "application/vnd.oci.image.layer.v1.tar",
            LayerCompression::Gzip { .. } => "application/vnd.oci.image.layer.v1.tar+gzip",
            LayerCompression::Zstd { .. } => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }
}

impl Default for LayerCompression {
    fn default() -> Self {
        LayerCompression::Gzip { level: 6 }
    }
}

/// Parses `gzip[:LEVEL]`, `zstd[:LEVEL]` or `none`.
impl FromStr for LayerCompression {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name, Some(level)),
            None => (text, None),
        };
        match (name, level) {
            ("none", None) => Ok(LayerCompression::None),
            ("gzip", level) => match level.unwrap_or("6").parse() {
                Ok(level @ 0..=9) => Ok(LayerCompression::Gzip { level }),
                _ => Err("gzip has levels from 0 to 9"),
            },
            ("zstd", level) => match level.unwrap_or("3").parse() {
                Ok(level @ 1..=22) => Ok(LayerCompression::Zstd { level }),
                _ => Err("zstd has levels from 1 to 22"),
            },
            _ => Err("use gzip[:LEVEL], zstd[:LEVEL] or none"),
        }
    }
}

/// Compresses the bytes that are written to it.
pub(super) enum Encoder<W: Write> {
    None(W),
    Gzip(GzEncoder<W>),
    Zstd(zstd::Encoder<'static, W>),
}

impl<W: Write> Encoder<W> {
    pub(super) fn new(out: W, compression: LayerCompression) -> io::Result<Self> {
        Ok(match compression {
            LayerCompression::None => Encoder::None(out),
            // No name and no time; the operating system is "unknown" (255).
            LayerCompression::Gzip { level } => Encoder::Gzip(
                flate2::GzBuilder::new()
                    .operating_system(255)
                    .write(out, flate2::Compression::new(level)),
            ),
            LayerCompression::Zstd { level } => {
                let mut encoder = zstd::Encoder::new(out, level)?;
                encoder.include_checksum(true)?;
                Encoder::Zstd(encoder)
            }
        })
    }

    /// Writes the remaining bytes and returns the stream.
    pub(super) fn finish(self) -> io::Result<W> {
        match self {
            Encoder::None(out) => Ok(out),
            Encoder::Gzip(encoder) => encoder.finish(),
            Encoder::Zstd(encoder) => encoder.finish(),
        }
    }
}

impl<W: Write> Write for Encoder<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Encoder::None(out) => out.write(bytes),
            Encoder::Gzip(encoder) => encoder.write(bytes),
            Encoder::Zstd(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Encoder::None(out) => out.flush(),
            Encoder::Gzip(encoder) => encoder.flush(),
            Encoder::Zstd(encoder) => encoder.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compression_is_written_with_its_level() {
        use LayerCompression::{Gzip, None, Zstd};
        for (text, compression) in [
            ("none", None),
            ("gzip", Gzip { level: 6 }),
            ("gzip:9", Gzip { level: 9 }),
            ("zstd", Zstd { level: 3 }),
            ("zstd:19", Zstd { level: 19 }),
        ] {
            assert_eq!(text.parse(), Ok(compression));
        }
        for text in [
            "", "gzip:", "gzip:10", "gzip:-1", "zstd:0", "zstd:23", "none:1", "xz",
        ] {
            assert!(text.parse::<LayerCompression>().is_err(), "{text}");
        }
    }

    #[test]
    fn gzip_has_neither_time_nor_name() {
        let mut encoder = Encoder::new(Vec::new(), LayerCompression::Gzip { level: 6 }).unwrap();
        encoder.write_all(b"some text").unwrap();
        let bytes = encoder.finish().unwrap();
        assert_eq!(bytes[..10], [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255]);
    }
}
