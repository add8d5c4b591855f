//! Values of options, for all commands that write images or disks.

use bcow::Compression;
/// The value of `--compress`.
pub use bcow_foreign::ClusterCompression as Compress;
use bcow_images::error::CommandError;
use bcow_images::{remote, size};
use bcow_oci::ConvertOptions;

use crate::work::Work;

/// The value of `--block-size`: the number of bytes, or `None` if bcow selects the size (`auto`).
/// This is a struct because clap gives `Option<Option<..>>` another meaning.
#[derive(Debug, Clone, Copy)]
pub struct BlockSize(pub Option<u32>);

/// How a new BCoW file is written.
#[derive(Debug, Clone, Copy)]
pub struct Encoding {
    /// Compression of the blocks, if the user chose one.
    pub compress: Option<Compress>,
    /// Block size in bytes, if the user chose one.
    pub block_bytes: Option<u32>,
    /// Threads that compress, if the user chose their number.
    pub jobs: Option<usize>,
    /// Whether the file is read back before it gets its name.
    pub verify: bool,
}

impl Encoding {
    /// Compression of the blocks; `default` if the user chose none. Fails for zlib, which only
    /// qcow2 files have.
    pub(crate) fn compression(&self, default: Compression) -> Result<Compression, CommandError> {
        match self.compress {
            None => Ok(default),
            Some(Compress::None) => Ok(Compression::None),
            Some(Compress::Zstd { level }) => Ok(Compression::Zstd { level }),
            Some(Compress::Zlib) => Err(CommandError::usage("blocks are not compressed with zlib")
                .hint("use zstd, zstd:LEVEL or none")),
        }
    }

    /// Options of a conversion that a signal ends.
    pub(crate) fn convert_options(&self, work: &Work<'_>) -> Result<ConvertOptions, CommandError> {
        let defaults = ConvertOptions::default();
        Ok(ConvertOptions {
            compression: self.compression(defaults.compression)?,
            block_bytes: self.block_bytes,
            threads: self.threads(),
            verify: self.verify,
            source_date_epoch: source_date_epoch()?,
            scratch: remote::scratch(),
            cancel: Some(work.interrupt.flag()),
            ..defaults
        })
    }

    pub(crate) fn threads(&self) -> usize {
        self.jobs
            .unwrap_or_else(|| ConvertOptions::default().threads)
    }
}

/// The time to record in the output, in seconds since 1970, if SOURCE_DATE_EPOCH sets one
/// (reproducible-builds.org).
pub(crate) fn source_date_epoch() -> Result<Option<i64>, CommandError> {
    match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => match text.parse() {
            Ok(seconds) if bcow::rfc3339(seconds).is_some() => Ok(Some(seconds)),
            Ok(_) => Err(CommandError::usage(format!(
                "SOURCE_DATE_EPOCH is {text:?}, which is not in the years 0 to 9999"
            ))),
            Err(_) => Err(CommandError::usage(format!(
                "SOURCE_DATE_EPOCH is {text:?}, which is not a number of seconds"
            ))),
        },
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => Err(CommandError::usage(
            "SOURCE_DATE_EPOCH is not a number of seconds",
        )),
    }
}

/// A root hash as JSON documents have it.
pub(crate) fn as_digest(hex: &str) -> String {
    format!("sha256:{hex}")
}

/// Parses the value of `--compress`.
pub fn parse_compression(text: &str) -> Result<Compress, String> {
    match text.split_once(':') {
        None if text == "none" => Ok(Compress::None),
        None if text == "zstd" => Ok(Compress::Zstd { level: 3 }),
        None if text == "zlib" => Ok(Compress::Zlib),
        Some(("zstd", level)) => match level.parse() {
            Ok(level @ 1..=22) => Ok(Compress::Zstd { level }),
            _ => Err("zstd has levels from 1 to 22".to_owned()),
        },
        _ => Err("use zstd, zstd:LEVEL, zlib (qcow2 only) or none".to_owned()),
    }
}

/// Parses the value of `--block-size`.
pub fn parse_block_size(text: &str) -> Result<BlockSize, String> {
    if text == "auto" {
        return Ok(BlockSize(None));
    }
    let bytes = size::parse(text)?;
    match u32::try_from(bytes) {
        Ok(bytes) if bytes.is_power_of_two() && (4096..=4 << 20).contains(&bytes) => {
            Ok(BlockSize(Some(bytes)))
        }
        _ => Err("block sizes are powers of two from 4K to 4M".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compression_is_written_with_its_level() {
        assert_eq!(parse_compression("none"), Ok(Compress::None));
        assert_eq!(parse_compression("zstd"), Ok(Compress::Zstd { level: 3 }));
        assert_eq!(
            parse_compression("zstd:19"),
            Ok(Compress::Zstd { level: 19 })
        );
        let forms = "use zstd, zstd:LEVEL, zlib (qcow2 only) or none";
        assert_eq!(parse_compression("gzip"), Err(forms.to_owned()));
        for text in [
            "",
            "zstd:",
            "zstd:0",
            "zstd:23",
            "gzip",
            "none:1",
            "zstd:fast",
        ] {
            assert!(parse_compression(text).is_err(), "{text}");
        }
    }

    #[test]
    fn block_sizes_are_powers_of_two_from_4k_to_4m() {
        assert_eq!(parse_block_size("auto").map(|b| b.0), Ok(None));
        assert_eq!(parse_block_size("4K").map(|b| b.0), Ok(Some(4096)));
        assert_eq!(parse_block_size("4M").map(|b| b.0), Ok(Some(4 << 20)));
        for text in ["2K", "5K", "8M", "0", "big", "4G"] {
            assert!(parse_block_size(text).is_err(), "{text}");
        }
    }
}
