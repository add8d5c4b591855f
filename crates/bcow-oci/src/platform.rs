//! Platforms of images.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::null::{null_as_absent, some_text};

/// An operating system and a processor architecture, in the terms of the OCI image specification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// `linux`, ...
    #[serde(default, deserialize_with = "null_as_absent")]
    pub os: String,
    /// `amd64`, `arm64`, ...
    #[serde(default, deserialize_with = "null_as_absent")]
    pub architecture: String,
    /// `v8`, ...
    #[serde(default, deserialize_with = "some_text")]
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
        self.rank(found).is_some()
    }

    /// How well an image for the platform `found` matches, more is better; `None` if it does not
    /// run.
    ///
    /// A processor runs code for its own variant and for earlier ones, and the latest of these is
    /// the best. An omitted variant is the default of its architecture. An image without a variant
    /// also matches a wanted variant that excludes the default, as the last choice: many
    /// configurations of such images omit the variant. These are the rules of containerd and
    /// skopeo, without their fallback to another architecture.
    pub(crate) fn rank(&self, found: &Platform) -> Option<Rank> {
        let (wanted, found) = (self.clone().normalized(), found.clone().normalized());
        if wanted.os != found.os || wanted.architecture != found.architecture {
            return None;
        }
        let is_arm64 = wanted.architecture == "arm64";
        match (wanted.version(), found.version()) {
            (Some(own), Some(needed)) if own.runs(needed, is_arm64) => Some(Rank::Version(needed)),
            (Some(_), Some(_)) => found.variant.is_none().then_some(Rank::Unrecorded),
            _ if wanted.variant == found.variant => Some(Rank::Equal),
            _ if wanted.variant.is_none() || found.variant.is_none() => Some(Rank::Unrecorded),
            _ => None,
        }
    }

    /// Whether this is the platform `other` with a variant that `other` omits.
    pub(crate) fn completes(&self, other: &Platform) -> bool {
        let is_same = self.os == other.os && self.architecture == other.architecture;
        is_same && other.variant.is_none()
    }

    /// The platform with the names that the OCI specification uses for its architecture.
    fn normalized(self) -> Platform {
        let lower = |text: String| text.to_ascii_lowercase();
        let (os, architecture) = (lower(self.os), lower(self.architecture));
        let variant = self.variant.map(lower).filter(|text| !text.is_empty());
        let (architecture, implied) = match &*architecture {
            "x86_64" | "x86-64" => ("amd64", None),
            "i386" | "i486" | "i586" | "i686" | "x86" => ("386", None),
            "aarch64" => ("arm64", None),
            "armhf" => ("arm", Some("v7")),
            "armel" => ("arm", Some("v6")),
            other => (other, None),
        };
        Platform {
            os: match &*os {
                "macos" => "darwin".to_owned(),
                _ => os,
            },
            architecture: architecture.to_owned(),
            variant: variant.or(implied.map(str::to_owned)),
        }
    }

    /// The version of the instruction set, or that of the architecture's default; `None` if the
    /// architecture or the variant has no order.
    fn version(&self) -> Option<Version> {
        let default = match &*self.architecture {
            "arm" => "7",
            "arm64" => "8",
            "amd64" => "1",
            _ => return None,
        };
        let variant = self.variant.as_deref().unwrap_or(default);
        let number = variant.strip_prefix('v').unwrap_or(variant);
        let (major, minor) = number.split_once('.').unwrap_or((number, "0"));
        Some(Version {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    }
}

/// How well the platform of an image matches a wanted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// One of the two has no variant.
    Unrecorded,
    /// Both have the same variant, or none, of an architecture without versions.
    Equal,
    /// The image needs this version.
    Version(Version),
}

/// A version of an architecture's instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    major: u8,
    minor: u8,
}

impl Version {
    /// Whether a processor of this version runs code that needs the version `needed`.
    fn runs(self, needed: Version, is_arm64: bool) -> bool {
        match (self.major, needed.major) {
            // Armv9.0 contains Armv8.5, Armv9.1 contains Armv8.6, and so on.
            (9, 8) if is_arm64 => needed.minor <= self.minor.saturating_add(5),
            _ => needed <= self,
        }
    }
}

/// Reads OS/ARCH[/VARIANT]. Other usual names of an architecture, such as `aarch64`, mean the same.
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
        let platform = Platform {
            os: os.to_owned(),
            architecture: architecture.to_owned(),
            variant,
        };
        Ok(platform.normalized())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn platform(text: &str) -> Platform {
        text.parse().unwrap()
    }

    #[test]
    fn other_names_of_an_architecture_mean_the_same() {
        for (given, meant) in [
            ("linux/x86_64", "linux/amd64"),
            ("linux/x86-64", "linux/amd64"),
            ("Linux/AMD64", "linux/amd64"),
            ("linux/i386", "linux/386"),
            ("linux/aarch64", "linux/arm64"),
            ("linux/aarch64/v8", "linux/arm64/v8"),
            ("linux/armhf", "linux/arm/v7"),
            ("linux/armel", "linux/arm/v6"),
            ("linux/arm", "linux/arm"),
            ("macos/arm64", "darwin/arm64"),
            ("linux/riscv64", "linux/riscv64"),
        ] {
            assert_eq!(platform(given).to_string(), meant);
        }
    }

    /// All platforms that run on the first one, the best first; then some that do not.
    #[test]
    fn variants_have_a_default_and_an_order() {
        const CASES: [(&str, &[&str], &[&str]); 15] = [
            (
                "linux/arm",
                &["arm/v7", "arm/v6", "arm/v5"],
                &["arm/v8", "arm64", "arm64/v8"],
            ),
            ("linux/arm/v7", &["arm/v7", "arm/v6", "arm/v5"], &["arm/v8"]),
            ("linux/armhf", &["arm/7", "arm/v6", "arm/v5"], &["arm/v8"]),
            (
                "linux/arm/v8",
                &["arm/v8", "arm/v7", "arm/v6", "arm/v5"],
                &["arm64/v8"],
            ),
            ("linux/arm/v6", &["arm/v6", "arm/v5", "arm"], &["arm/v7"]),
            ("linux/arm/v5", &["arm/v5", "arm"], &["arm/v6", "arm/v7"]),
            (
                "linux/arm64",
                &["arm64/v8"],
                &["arm64/v8.1", "arm64/v9", "arm/v7"],
            ),
            ("linux/arm64", &["aarch64"], &["arm64/v9"]),
            (
                "linux/arm64/v8.2",
                &["arm64/v8.2", "arm64/v8.1", "arm64"],
                &["arm64/v8.3"],
            ),
            (
                "linux/arm64/v9",
                &["arm64/v9.0", "arm64/v8.5", "arm64/v8"],
                &["arm64/v8.6", "arm64/v9.1"],
            ),
            ("linux/amd64", &["amd64/v1"], &["amd64/v2", "386"]),
            (
                "linux/amd64/v3",
                &["amd64/v3", "amd64/v2", "amd64"],
                &["amd64/v4"],
            ),
            (
                "linux/riscv64",
                &["riscv64", "riscv64/rva20u64"],
                &["arm64"],
            ),
            ("linux/riscv64/a", &["riscv64/a", "riscv64"], &["riscv64/b"]),
            // The variant is not a version of the architecture.
            ("linux/amd64/x", &["amd64/x", "amd64"], &["amd64/v1"]),
        ];
        for (wanted, suitable, unsuitable) in CASES {
            let of = |name: &str| platform(wanted).rank(&platform(&format!("linux/{name}")));
            let ranks: Vec<_> = suitable.iter().map(|name| of(name)).collect();
            assert!(ranks.iter().all(Option::is_some), "{wanted}: {ranks:?}");
            assert!(ranks.is_sorted_by(|a, b| a > b), "{wanted}: {ranks:?}");
            for name in unsuitable {
                assert_eq!(of(name), None, "{wanted} and {name}");
            }
        }
    }

    #[test]
    fn omitted_variant_is_the_default() {
        for (architecture, default) in [("arm", "v7"), ("arm64", "v8"), ("amd64", "v1")] {
            let short = platform(&format!("linux/{architecture}"));
            let long = platform(&format!("linux/{architecture}/{default}"));
            assert_eq!(short.rank(&long), long.rank(&short));
            assert_eq!(short.rank(&short), long.rank(&long));
        }
    }

    #[test]
    fn another_system_does_not_match() {
        assert_eq!(
            platform("linux/amd64").rank(&platform("windows/amd64")),
            None
        );
    }
}
