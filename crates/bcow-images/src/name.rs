//! The parser of names.
//!
//! A name is `TRANSPORT:REST`, or a path. The text before the first colon is a transport if it
//! begins with a letter and has only lower-case letters, digits and hyphens. As in skopeo, DIR and
//! FILE before `[:REF]` end at the first colon.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bcow_oci::{Digest, LocalImage, Source, TarInput};
use bcow_remote::Reference;

use crate::form::{NameForm, TRANSPORTS};
use crate::name_error::Syntax;
use crate::url::Url;

/// The name of an image, a disk or an archive, as the user wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    text: OsString,
    /// The text without the query of a URL, which can have a signature that gives access.
    shown: PathBuf,
    parts: NameParts,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameParts {
    /// A path without a transport.
    File(PathBuf),
    /// A BCoW file.
    Bcow(PathBuf),
    /// An image in an OCI image layout.
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
    /// An OCI image layout in a tar archive.
    OciArchive {
        /// The archive.
        file: PathBuf,
        /// Name or digest of the image.
        reference: Option<String>,
    },
    /// An archive of `docker save` or `podman save`.
    DockerArchive {
        /// The archive.
        file: PathBuf,
        /// Name of the image, or `@N` for the Nth.
        reference: Option<String>,
    },
    /// A tar archive; `None` is standard input or standard output.
    Tar(Option<PathBuf>),
    /// A root file system in a directory.
    Directory(PathBuf),
    /// The bytes of a disk.
    Raw(PathBuf),
    /// A qcow2 image.
    Qcow2(PathBuf),
    /// A directory with layers for containerd's erofs snapshotter.
    ContainerdCache(PathBuf),
    /// A file or a remote image.
    Url(Url),
    /// The lowest layers of an image in a registry.
    Lowest {
        image: Reference,
        /// The number of layers, 1 or more.
        count: usize,
    },
    /// A place of other programs.
    Elsewhere,
    /// A name with an unknown transport.
    Unknown,
}

impl Name {
    /// Parses a name of any form.
    pub fn parse(text: &OsStr) -> Result<Name, Syntax> {
        Ok(Name::of(text, NameParts::parse(text)?))
    }

    pub fn file(path: &Path) -> Name {
        Name::of(path.as_os_str(), NameParts::File(path.to_owned()))
    }

    /// The name of a file or a remote image.
    pub fn url(url: Url) -> Name {
        let text = url.to_string();
        Name::of(text.as_ref(), NameParts::Url(url))
    }

    pub(crate) fn of(text: &OsStr, parts: NameParts) -> Name {
        let shown = match (&parts, text.to_str().and_then(|text| text.split_once('?'))) {
            (NameParts::Url(_), Some((address, _))) => format!("{address}?...").into(),
            _ => text.into(),
        };
        let text = text.to_owned();
        Name { text, shown, parts }
    }

    /// The bytes that the user wrote.
    pub fn text(&self) -> &OsStr {
        &self.text
    }

    /// The name for messages: without the query of a URL.
    pub fn shown(&self) -> &Path {
        &self.shown
    }

    pub fn parts(&self) -> &NameParts {
        &self.parts
    }

    pub fn form(&self) -> NameForm {
        match &self.parts {
            NameParts::File(_) => NameForm::File,
            NameParts::Bcow(_) => NameForm::Bcow,
            NameParts::Layout { .. } => NameForm::Layout,
            NameParts::Blob { .. } => NameForm::Blob,
            NameParts::OciArchive { .. } => NameForm::OciArchive,
            NameParts::DockerArchive { .. } => NameForm::DockerArchive,
            NameParts::Tar(_) => NameForm::Tar,
            NameParts::Directory(_) => NameForm::Directory,
            NameParts::Raw(_) => NameForm::Raw,
            NameParts::Qcow2(_) => NameForm::Qcow2,
            NameParts::ContainerdCache(_) => NameForm::ContainerdCache,
            NameParts::Url(Url::Web(_)) => NameForm::Web,
            NameParts::Url(Url::S3(_)) => NameForm::S3,
            NameParts::Url(Url::Registry(_)) => NameForm::Registry,
            NameParts::Lowest { .. } => NameForm::Lowest,
            NameParts::Elsewhere => NameForm::Elsewhere,
            NameParts::Unknown => NameForm::Unknown,
        }
    }

    /// The text before the first colon, if it is a transport.
    pub fn transport(&self) -> Option<&str> {
        split(&self.text).map(|(transport, _)| transport)
    }

    /// The path of a BCoW file on this machine. `None` for names of other forms.
    pub fn path(&self) -> Option<&Path> {
        match &self.parts {
            NameParts::File(path) | NameParts::Bcow(path) => Some(path),
            _ => None,
        }
    }

    /// The BCoW file or the image in BCoW form that the name can mean on this machine.
    pub fn local(&self) -> Option<LocalImage> {
        match &self.parts {
            NameParts::File(path) | NameParts::Bcow(path) => Some(LocalImage::File(path.clone())),
            NameParts::Layout {
                directory,
                reference,
            } => Some(LocalImage::Layout {
                directory: directory.clone(),
                reference: reference.clone(),
            }),
            NameParts::Blob { directory, digest } => Some(LocalImage::Blob {
                directory: directory.clone(),
                digest: digest.clone(),
            }),
            _ => None,
        }
    }

    /// Whether the name leads to another machine.
    pub fn is_remote(&self) -> bool {
        matches!(self.parts, NameParts::Url(_) | NameParts::Lowest { .. })
    }

    /// The image in a registry, all of it.
    pub fn registry(&self) -> Option<&Reference> {
        match &self.parts {
            NameParts::Url(Url::Registry(reference)) => Some(reference),
            _ => None,
        }
    }

    /// The source of a conversion: an ordinary image, an archive or a directory. A path that ends
    /// as the name of an archive is one, and `-` is an archive from standard input.
    pub fn source(&self) -> Option<Source> {
        Some(match self.parts.clone() {
            NameParts::Layout {
                directory,
                reference,
            } => Source::Oci {
                directory,
                reference,
            },
            NameParts::OciArchive { file, reference } => Source::OciArchive { file, reference },
            NameParts::DockerArchive { file, reference } => {
                Source::DockerArchive { file, reference }
            }
            NameParts::Tar(None) => Source::Tar(TarInput::Stdin),
            NameParts::Tar(Some(file)) => Source::Tar(TarInput::File(file)),
            NameParts::Directory(path) => Source::Directory(path),
            NameParts::File(_) if self.text == "-" => Source::Archive(TarInput::Stdin),
            NameParts::File(_) | NameParts::Unknown if ends_as_archive(&self.text) => {
                Source::Archive(TarInput::File(PathBuf::from(&self.text)))
            }
            _ => return None,
        })
    }

    /// The same name with an absolute path, for readers in other directories (`/proc/mounts`).
    pub fn absolute(&self) -> OsString {
        let absolute = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let (directory, end) = match &self.parts {
            NameParts::File(path) | NameParts::Bcow(path) => return absolute(path).into(),
            NameParts::Layout {
                directory,
                reference,
            } => {
                let end = reference.as_ref().map(|reference| format!(":{reference}"));
                (directory, end.unwrap_or_default())
            }
            NameParts::Blob { directory, digest } => (directory, format!("@{digest}")),
            _ => return self.shown.clone().into(),
        };
        let mut name = OsString::from("oci:");
        name.push(absolute(directory));
        name.push(end);
        name
    }

    /// The name for messages.
    pub fn display(&self) -> std::path::Display<'_> {
        self.shown.display()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.display().fmt(f)
    }
}

/// Whether a path ends as the name of a tar archive, which can be compressed.
fn ends_as_archive(text: &OsStr) -> bool {
    const ARCHIVES: [&[u8]; 5] = [b".tar", b".tar.gz", b".tgz", b".tar.zst", b".tzst"];
    ARCHIVES.iter().any(|end| text.as_bytes().ends_with(end))
}

/// The transport at the begin of a name, and the rest of the name. `None` for a path.
fn split(text: &OsStr) -> Option<(&str, &OsStr)> {
    let bytes = text.as_bytes();
    let colon = bytes.iter().position(|&byte| byte == b':')?;
    let (transport, rest) = (&bytes[..colon], &bytes[colon + 1..]);
    let is_one = transport.first().is_some_and(u8::is_ascii_lowercase)
        && transport
            .iter()
            .all(|&byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'));
    let transport = std::str::from_utf8(transport).ok().filter(|_| is_one)?;
    Some((transport, OsStr::from_bytes(rest)))
}

impl NameParts {
    fn parse(text: &OsStr) -> Result<NameParts, Syntax> {
        let Some((transport, rest)) = split(text) else {
            return Ok(NameParts::File(text.into()));
        };
        let Some(&(_, form)) = TRANSPORTS.iter().find(|(known, _)| *known == transport) else {
            return Ok(NameParts::Unknown);
        };
        let bad = |why: &str| Syntax::new(why, format!("write {}", form.syntax()));
        let path = |bytes: &[u8]| match bytes {
            b"" => Err(bad("missing name after the colon")),
            bytes => Ok(PathBuf::from(OsStr::from_bytes(bytes))),
        };
        let utf8 = |bytes| {
            std::str::from_utf8(bytes).map_err(|_| bad("the part after the path is not UTF-8"))
        };
        let rest = rest.as_bytes();
        let with_reference = || match rest.iter().position(|&byte| byte == b':') {
            None => Ok((path(rest)?, None)),
            Some(colon) => match utf8(&rest[colon + 1..])? {
                "" => Err(bad("missing reference after the second colon")),
                reference => Ok((path(&rest[..colon])?, Some(reference.to_owned()))),
            },
        };
        Ok(match form {
            NameForm::Bcow => NameParts::Bcow(path(rest)?),
            NameForm::Tar if rest == b"-" => NameParts::Tar(None),
            NameForm::Tar => NameParts::Tar(Some(path(rest)?)),
            NameForm::Directory => NameParts::Directory(path(rest)?),
            NameForm::ContainerdCache => NameParts::ContainerdCache(path(rest)?),
            NameForm::Raw | NameForm::Qcow2 if rest == b"-" => {
                return Err(Syntax::new(
                    "a disk is read and written at any offset, which standard input and output \
                     do not allow",
                    "to read a disk, store it in a file first; `bcow export --to raw -o -` writes \
                     to standard output",
                ));
            }
            NameForm::Raw => NameParts::Raw(path(rest)?),
            NameForm::Qcow2 => NameParts::Qcow2(path(rest)?),
            NameForm::OciArchive => {
                let (file, reference) = with_reference()?;
                NameParts::OciArchive { file, reference }
            }
            NameForm::DockerArchive => {
                let (file, reference) = with_reference()?;
                NameParts::DockerArchive { file, reference }
            }
            NameForm::Layout => match blob(rest) {
                // The first colon is in the digest.
                Some((directory, digest)) => NameParts::Blob {
                    directory: path(directory)?,
                    digest: utf8(digest)?.parse().map_err(|why| {
                        Syntax::new(why, format!("write {}", NameForm::Blob.syntax()))
                    })?,
                },
                None => {
                    let (directory, reference) = with_reference()?;
                    NameParts::Layout {
                        directory,
                        reference,
                    }
                }
            },
            NameForm::Web | NameForm::S3 | NameForm::Registry => {
                let text = text.to_str().ok_or_else(|| bad("it is not UTF-8"))?;
                return NameParts::on_another_machine(text, form);
            }
            _ => NameParts::Elsewhere,
        })
    }

    fn on_another_machine(text: &str, form: NameForm) -> Result<NameParts, Syntax> {
        // Elsewhere, a number sign is an ordinary character.
        let Some((name, part)) = text.rsplit_once('#').filter(|_| form == NameForm::Registry)
        else {
            return Url::parse(text).map(NameParts::Url);
        };
        let count = part.strip_prefix("layers=").and_then(|n| n.parse().ok());
        match (count.filter(|&count| count > 0), Url::parse(name)?) {
            (Some(count), Url::Registry(image)) => Ok(NameParts::Lowest { image, count }),
            _ => Err(Syntax::new(
                format!("#{part}"),
                "#layers=N behind the name means the N lowest layers, 1 or more",
            )),
        }
    }
}

/// Splits `DIR@sha256:HEX`.
fn blob(rest: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = rest.iter().position(|&byte| byte == b':')?;
    let at = rest[..colon].iter().rposition(|&byte| byte == b'@')?;
    (rest[at + 1..colon] == *b"sha256").then(|| (&rest[..at], &rest[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn parsed(text: &str) -> Result<NameParts, String> {
        let name = Name::parse(text.as_ref()).map_err(|error| error.problem)?;
        Ok(name.parts)
    }

    fn layout(directory: &str, reference: Option<&str>) -> Result<NameParts, String> {
        Ok(NameParts::Layout {
            directory: directory.into(),
            reference: reference.map(str::to_owned),
        })
    }

    #[test]
    fn name_has_a_transport_before_the_colon_or_is_a_path() {
        for path in [
            "a.bcow",
            "./oci:x",
            "dir/raw:x",
            "Debian:12.bcow",
            "12:30.bcow",
            "a_b:c",
            ":x",
            "./x.qcow2:y",
            "a@sha256:0",
            "-",
        ] {
            assert_eq!(parsed(path), Ok(NameParts::File(path.into())), "{path}");
        }
        for unknown in ["nothing:x", "debian:12", "oci2:x"] {
            assert_eq!(parsed(unknown), Ok(NameParts::Unknown), "{unknown}");
        }
    }

    #[test]
    fn every_transport_can_be_split_off() {
        for (transport, form) in TRANSPORTS {
            let text = format!("{transport}:x:y");
            let found = split(text.as_ref());
            assert_eq!(found, Some((transport, OsStr::new("x:y"))));
            if !matches!(form, NameForm::Web | NameForm::S3 | NameForm::Registry) {
                assert_eq!(Name::parse(text.as_ref()).unwrap().form(), form);
            }
        }
    }

    #[test]
    fn first_colon_ends_the_path_of_a_name_with_a_reference() {
        assert_eq!(parsed("oci:a/b"), layout("a/b", None));
        assert_eq!(parsed("oci:a@b"), layout("a@b", None));
        assert_eq!(parsed("oci:a:repo:tag@x"), layout("a", Some("repo:tag@x")));
        assert_eq!(
            parsed(&format!("oci:a:{DIGEST}")),
            layout("a", Some(DIGEST))
        );
        assert_eq!(
            parsed(&format!("oci:a@b@{DIGEST}")),
            Ok(NameParts::Blob {
                directory: "a@b".into(),
                digest: DIGEST.parse().unwrap(),
            })
        );
        assert_eq!(
            parsed("oci-archive:a:b:c"),
            Ok(NameParts::OciArchive {
                file: "a".into(),
                reference: Some("b:c".to_owned()),
            })
        );
        assert_eq!(
            parsed("docker-archive:/x.tar:@0"),
            Ok(NameParts::DockerArchive {
                file: "/x.tar".into(),
                reference: Some("@0".to_owned()),
            })
        );
    }

    #[test]
    fn a_path_without_a_reference_may_have_colons() {
        let path = || PathBuf::from("a:b");
        assert_eq!(parsed("bcow:a:b"), Ok(NameParts::Bcow(path())));
        assert_eq!(parsed("tar:a:b"), Ok(NameParts::Tar(Some(path()))));
        assert_eq!(parsed("dir:a:b"), Ok(NameParts::Directory(path())));
        assert_eq!(parsed("raw:a:b"), Ok(NameParts::Raw(path())));
        assert_eq!(parsed("qcow2:a:b"), Ok(NameParts::Qcow2(path())));
        let cache = NameParts::ContainerdCache(path());
        assert_eq!(parsed("containerd-cache:a:b"), Ok(cache));
        assert_eq!(parsed("tar:-"), Ok(NameParts::Tar(None)));
    }

    #[test]
    fn urls_are_shown_without_their_query() {
        for (url, shown) in [
            ("https://host/a.bcow?signature=x", "https://host/a.bcow?..."),
            ("http://host/a.bcow", "http://host/a.bcow"),
            ("docker://host.x/repo:tag", "docker://host.x/repo:tag"),
            ("s3://bucket/k:1", "s3://bucket/k:1"),
        ] {
            let name = Name::parse(url.as_ref()).unwrap();
            assert!(name.is_remote());
            assert_eq!(
                (name.text(), name.to_string()),
                (OsStr::new(url), shown.to_owned())
            );
            assert_eq!(name.absolute(), OsStr::new(shown));
        }
        assert_eq!(
            parsed("bcow:https://x"),
            Ok(NameParts::Bcow("https://x".into()))
        );
    }

    #[test]
    fn the_lowest_layers_are_counted_from_one() {
        let image = "docker://host.x/repo".parse().unwrap();
        let lowest = NameParts::Lowest { image, count: 2 };
        assert_eq!(parsed("docker://host.x/repo#layers=2"), Ok(lowest));
        for text in ["#layers=0", "#layers=x", "#layers=", "#2"] {
            assert_eq!(
                parsed(&format!("docker://host.x/repo{text}")),
                Err(text.to_owned())
            );
        }
        assert!(parsed("s3://bucket/key#layers=1").is_ok());
    }

    #[test]
    fn invalid_names_are_refused_with_the_reason() {
        for (text, why) in [
            ("bcow:", "missing name after the colon"),
            ("raw:", "missing name after the colon"),
            ("oci:", "missing name after the colon"),
            ("oci::x", "missing name after the colon"),
            ("oci-archive::a", "missing name after the colon"),
            ("oci:a:", "missing reference after the second colon"),
            ("oci:a@sha256:12", "it has the wrong length"),
            ("oci:a@sha256:", "it has the wrong length"),
            ("docker:host/x", "it does not begin with docker://"),
            ("s3:x/y", "it does not begin with s3://"),
            ("s3://bucket", "the key is missing"),
        ] {
            assert_eq!(parsed(text), Err(why.to_owned()), "{text}");
            let hint = Name::parse(text.as_ref()).unwrap_err().hint;
            assert!(hint.starts_with("write "), "{text}: {hint}");
        }
        assert!(parsed("raw:-").is_err());
    }

    #[test]
    fn names_outside_utf_8_are_kept() {
        let text = OsStr::from_bytes(b"oci:a\xff:tag");
        assert_eq!(Name::parse(text).unwrap().absolute(), text);
        assert!(Name::parse(OsStr::from_bytes(b"oci:a:\xff")).is_err());
        assert!(Name::parse(OsStr::from_bytes(b"tar:\xff")).is_ok());
    }

    #[test]
    fn a_path_that_ends_as_an_archive_is_a_source() {
        for text in ["a.tar", "./a:b.tar.gz", "x/y.tzst", "odd:name.tgz"] {
            let source = Name::parse(text.as_ref()).unwrap().source();
            let archive = Source::Archive(TarInput::File(text.into()));
            assert_eq!(source, Some(archive));
        }
        let source = Name::parse("-".as_ref()).unwrap().source();
        assert_eq!(source, Some(Source::Archive(TarInput::Stdin)));
        for text in [
            "oci:a:b",
            "oci-archive:a",
            "docker-archive:a:b:c",
            "tar:-",
            "tar:x",
            "dir:y",
        ] {
            let source = Name::parse(text.as_ref()).unwrap().source().unwrap();
            assert_eq!(source.to_string(), text);
        }
    }
}
