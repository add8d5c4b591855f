//! Platforms of images.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// An operating system and a processor architecture, in the terms of the OCI image specification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Platform {
    /// `linux`, ...
    pub os: String,
    /// `amd64`, `arm64`, ...
    pub architecture: String,
    /// `v8`, ...
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// The platform of this program.
    pub fn host() -> Platform {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "aarch64" => ("arm64", None),
            "x86" => ("386", None),
            "arm" => ("arm", Some("v7")),
            "powerpc64" if cfg!(target_endian = "little") => ("ppc64le", None),
            "loongarch64" => ("loong64", None),
            other => (other, None),
        };
        Platform {
            os: std::env::consts::OS.to_owned(),
            architecture: architecture.to_owned(),
            variant: variant.map(str::to_owned),
        }
    }

    /// Whether an image for the platform `found` runs on this platform.
    pub(crate) fn suits(&self, found: &Platform) -> bool {
        self.score(found).is_some()
    }

    /// How well an image for the platform `found` matches; `None` if it does not run.
    pub(crate) fn score(&self, found: &Platform) -> Option<u8> {
        if self.os != found.os || self.architecture != found.architecture {
            return None;
        }
        match (self.variant.as_deref(), found.variant.as_deref()) {
            (Some(wanted), Some(found)) => (wanted == found).then_some(2),
            (None, None) => Some(2),
            // arm64 has only this variant, so an omitted variant means the same.
            (None, Some("v8")) | (Some("v8"), None) if self.architecture == "arm64" => Some(2),
            (None, Some(_)) | (Some(_), None) => Some(1),
        }
    }
}

impl FromStr for Platform {
    type Err = PlatformSyntax;

    fn from_str(text: &str) -> Result<Self, PlatformSyntax> {
        let bad = || PlatformSyntax(text.to_owned());
        let parts: Vec<&str> = text.split('/').collect();
        if parts.iter().any(|p| p.is_empty()) {
            return Err(bad());
        }
        let (os, architecture, variant) = match parts[..] {
            [os, architecture] => (os, architecture, None),
            [os, architecture, variant] => (os, architecture, Some(variant.to_owned())),
            _ => return Err(bad()),
        };
        Ok(Platform {
            os: os.to_owned(),
            architecture: architecture.to_owned(),
            variant,
        })
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) => write!(f, "/{variant}"),
            None => Ok(()),
        }
    }
}

/// The text is not a platform: it does not have the form OS/ARCH[/VARIANT].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid platform {0:?}")]
pub struct PlatformSyntax(String);
