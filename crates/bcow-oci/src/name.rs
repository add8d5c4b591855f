//! The image argument for an image in BCoW form.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::digest::Digest;

/// An image in BCoW form: `FILE`, `bcow:FILE`, `oci:DIR[:REF]`, `oci:DIR@sha256:HEX`, or the URL of
/// an image on another machine.
///
/// As in [`crate::Source`], the first colon behind the transport ends DIR. A file whose name begins
/// with `oci:` or `bcow:` needs the form `./oci:...`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageName {
    /// A BCoW file.
    File(PathBuf),
    /// The stack of an image in an OCI image layout.
    Layout {
        /// The layout.
        directory: PathBuf,
        /// Name or digest of the image.
        reference: Option<String>,
    },
    /// One BCoW file of an OCI image layout: a layer, or a stack.
    Blob {
        /// The layout.
        directory: PathBuf,
        /// The file's digest.
        digest: Digest,
    },
    /// An image on another machine: `https://...`, `http://...`, `s3://...` or `docker://...`. This
    /// crate does not read it.
    Remote(String),
}

/// The text is not the name of an image in BCoW form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid image name {text:?}: {problem}")]
pub struct NameSyntax {
    text: String,
    problem: &'static str,
}

impl NameSyntax {
    /// A hint for the user.
    pub fn hint(&self) -> &'static str {
        "images are FILE, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... and \
         docker://..."
    }
}

const TRANSPORT: &[u8] = b"oci:";
/// The transport of a file whose name looks like another transport.
const FILE: &[u8] = b"bcow:";
/// The begin of the names of images on other machines.
const REMOTE: [&[u8]; 4] = [b"https://", b"http://", b"docker://", b"s3://"];

impl ImageName {
    /// Parses an image name. A name without a transport is a file.
    pub fn parse(text: &OsStr) -> Result<ImageName, NameSyntax> {
        let bad = |problem| NameSyntax {
            text: text.to_string_lossy().into_owned(),
            problem,
        };
        if REMOTE
            .iter()
            .any(|start| text.as_bytes().starts_with(start))
        {
            return match text.to_str() {
                Some(text) => Ok(ImageName::Remote(text.to_owned())),
                None => Err(bad("it is not UTF-8")),
            };
        }
        let Some(rest) = text.as_bytes().strip_prefix(TRANSPORT) else {
            return match text.as_bytes().strip_prefix(FILE) {
                Some(b"") => Err(bad("missing file name")),
                Some(path) => Ok(ImageName::File(OsStr::from_bytes(path).into())),
                None => Ok(ImageName::File(text.into())),
            };
        };
        let path = |bytes: &[u8]| match bytes {
            b"" => Err(bad("missing directory")),
            bytes => Ok(PathBuf::from(OsStr::from_bytes(bytes))),
        };
        let Some(colon) = rest.iter().position(|&b| b == b':') else {
            return Ok(ImageName::Layout {
                directory: path(rest)?,
                reference: None,
            });
        };
        let utf8 = |bytes| {
            std::str::from_utf8(bytes).map_err(|_| bad("the name of the image is not UTF-8"))
        };
        // `DIR@sha256:HEX`: the first colon is in the digest.
        if let Some(at) = rest[..colon].iter().rposition(|&b| b == b'@')
            && rest[at + 1..colon] == *b"sha256"
        {
            return Ok(ImageName::Blob {
                directory: path(&rest[..at])?,
                digest: utf8(&rest[at + 1..])?.parse().map_err(bad)?,
            });
        }
        match utf8(&rest[colon + 1..])? {
            "" => Err(bad("missing name after the second colon")),
            reference => Ok(ImageName::Layout {
                directory: path(&rest[..colon])?,
                reference: Some(reference.to_owned()),
            }),
        }
    }

    /// The same name with an absolute path, for readers in other directories (`/proc/mounts`). The
    /// query of a URL, which can have a signature that gives access, is left out.
    pub fn absolute(&self) -> OsString {
        let absolute = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let (directory, end) = match self {
            ImageName::File(path) => return absolute(path).into(),
            ImageName::Remote(url) => return without_query(url).into(),
            ImageName::Layout {
                directory,
                reference: None,
            } => (directory, String::new()),
            ImageName::Layout {
                directory,
                reference: Some(reference),
            } => (directory, format!(":{reference}")),
            ImageName::Blob { directory, digest } => (directory, format!("@{digest}")),
        };
        let mut bytes = TRANSPORT.to_vec();
        bytes.extend_from_slice(absolute(directory).as_os_str().as_bytes());
        bytes.extend_from_slice(end.as_bytes());
        OsString::from_vec(bytes)
    }
}

/// A URL for messages and for other users.
fn without_query(url: &str) -> String {
    match url.split_once('?') {
        Some((address, _)) => format!("{address}?..."),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn parse(text: &str) -> Result<ImageName, String> {
        ImageName::parse(text.as_ref()).map_err(|e| e.to_string())
    }

    #[test]
    fn files_layouts_and_blobs_are_distinguished() {
        for file in ["a.bcow", "./oci:x", "dir/oci:x", "tar:x", "a@sha256:0"] {
            assert_eq!(parse(file), Ok(ImageName::File(file.into())));
        }
        assert_eq!(parse("bcow:oci:x"), Ok(ImageName::File("oci:x".into())));
        let layout = |directory: &str, reference: Option<&str>| {
            Ok(ImageName::Layout {
                directory: directory.into(),
                reference: reference.map(str::to_owned),
            })
        };
        assert_eq!(parse("oci:a/b"), layout("a/b", None));
        assert_eq!(parse("oci:a@b"), layout("a@b", None));
        assert_eq!(parse("oci:a:repo:tag@x"), layout("a", Some("repo:tag@x")));
        assert_eq!(parse(&format!("oci:a:{DIGEST}")), layout("a", Some(DIGEST)));
        assert_eq!(
            parse(&format!("oci:a@b@{DIGEST}")),
            Ok(ImageName::Blob {
                directory: "a@b".into(),
                digest: DIGEST.parse().unwrap(),
            })
        );
    }

    #[test]
    fn urls_are_remote_and_are_shown_without_their_query() {
        for (url, shown) in [
            ("https://host/a.bcow?signature=x", "https://host/a.bcow?..."),
            ("http://host/a.bcow", "http://host/a.bcow"),
            ("docker://host/repo:tag", "docker://host/repo:tag"),
        ] {
            let name = ImageName::parse(url.as_ref()).unwrap();
            assert_eq!(name, ImageName::Remote(url.to_owned()));
            assert_eq!(name.absolute(), OsStr::new(shown));
        }
        assert_eq!(
            parse("bcow:https://x"),
            Ok(ImageName::File("https://x".into()))
        );
    }

    #[test]
    fn invalid_names_are_refused_with_the_reason() {
        for (text, why) in [
            ("bcow:", "missing file name"),
            ("oci:", "missing directory"),
            ("oci::x", "missing directory"),
            ("oci:a:", "missing name after the second colon"),
            ("oci:a@sha256:12", "it has the wrong length"),
            ("oci:a@sha256:", "it has the wrong length"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.ends_with(why), "{text}: {error}");
        }
    }

    #[test]
    fn names_outside_utf_8_are_kept() {
        let text = OsStr::from_bytes(b"oci:a\xff:tag");
        let name = ImageName::parse(text).unwrap();
        assert_eq!(name.absolute(), text);
        assert!(ImageName::parse(OsStr::from_bytes(b"oci:a:\xff")).is_err());
    }
}
