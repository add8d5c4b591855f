//! The source argument of a conversion.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::{ConvertError, ImageForm};
use crate::registry::OrdinaryImage;

/// A source of an image.
///
/// The syntax is `oci:DIR[:REF]`, `oci-archive:FILE[:REF]`, `docker-archive:FILE[:REF]`,
/// `tar:FILE`, `tar:-` or `dir:PATH`; a plain path that ends in `.tar`, `.tar.gz`, `.tgz`,
/// `.tar.zst` or `.tzst` means `tar:`. As in skopeo, DIR and FILE in front of `[:REF]` end at the
/// first colon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// An OCI image layout in a directory.
    Oci {
        /// The layout.
        directory: PathBuf,
        /// Name or digest of the image.
        reference: Option<String>,
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
    /// A root file system, or one layer, in a tar archive.
    Tar(TarInput),
    /// A root file system in a directory.
    Directory(PathBuf),
    /// An image in a registry, from [`crate::find_in_registry`]. No source argument is parsed as
    /// this variant.
    Registry(OrdinaryImage),
}

/// A tar archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TarInput {
    /// A file.
    File(PathBuf),
    /// Standard input.
    Stdin,
}

impl FromStr for Source {
    type Err = ConvertError;

    fn from_str(text: &str) -> Result<Self, ConvertError> {
        let bad = |problem| ConvertError::SourceSyntax {
            text: text.to_owned(),
            problem,
        };
        const ARCHIVES: [&str; 5] = [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst"];
        let plain_tar = ARCHIVES.iter().any(|end| text.ends_with(end));
        let (transport, rest) = match text.split_once(':') {
            // "./a:b.tar" and "dir/a:b.tar" are paths without a transport.
            Some((transport, rest)) if !transport.contains('/') => (transport, rest),
            _ if plain_tar => return Ok(Source::Tar(TarInput::File(text.into()))),
            _ => {
                return Err(ConvertError::MissingTransport {
                    text: text.to_owned(),
                });
            }
        };
        if rest.is_empty() {
            return Err(bad("missing path"));
        }
        let split = || match rest.split_once(':') {
            Some((_, "")) => Err(bad("missing name after the second colon")),
            Some(("", _)) => Err(bad("missing path")),
            Some((path, reference)) => Ok((PathBuf::from(path), Some(reference.to_owned()))),
            None => Ok((PathBuf::from(rest), None)),
        };
        match transport {
            "oci" => {
                let (directory, reference) = split()?;
                Ok(Source::Oci {
                    directory,
                    reference,
                })
            }
            "oci-archive" => {
                let (file, reference) = split()?;
                Ok(Source::OciArchive { file, reference })
            }
            "docker-archive" => {
                let (file, reference) = split()?;
                Ok(Source::DockerArchive { file, reference })
            }
            "tar" if rest == "-" => Ok(Source::Tar(TarInput::Stdin)),
            "tar" => Ok(Source::Tar(TarInput::File(rest.into()))),
            "dir" => Ok(Source::Directory(rest.into())),
            _ if plain_tar => Ok(Source::Tar(TarInput::File(text.into()))),
            _ => Err(bad("unknown transport")),
        }
    }
}

impl Source {
    /// Adds the source argument for the image in the files to a [`ConvertError::HoldsImage`].
    pub(crate) fn explain(&self, mut error: ConvertError) -> ConvertError {
        if let ConvertError::HoldsImage {
            form, source_text, ..
        } = &mut error
        {
            let other = match (self, form) {
                (Source::Tar(TarInput::File(file)), ImageForm::DockerArchive) => {
                    Some(Source::DockerArchive {
                        file: file.clone(),
                        reference: None,
                    })
                }
                (Source::Tar(TarInput::File(file)), ImageForm::OciLayout) => {
                    Some(Source::OciArchive {
                        file: file.clone(),
                        reference: None,
                    })
                }
                (Source::Directory(directory), ImageForm::OciLayout) => Some(Source::Oci {
                    directory: directory.clone(),
                    reference: None,
                }),
                _ => None,
            };
            // A path with a colon would be another source.
            *source_text = other
                .map(|source| (source.to_string(), source))
                .filter(|(text, source)| text.parse().is_ok_and(|parsed: Source| parsed == *source))
                .map(|(text, _)| text);
        }
        error
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (transport, path, reference) = match self {
            Source::Oci {
                directory,
                reference,
            } => ("oci", directory, reference.as_deref()),
            Source::OciArchive { file, reference } => ("oci-archive", file, reference.as_deref()),
            Source::DockerArchive { file, reference } => {
                ("docker-archive", file, reference.as_deref())
            }
            Source::Tar(TarInput::Stdin) => return f.write_str("tar:-"),
            Source::Tar(TarInput::File(file)) => ("tar", file, None),
            Source::Directory(path) => ("dir", path, None),
            Source::Registry(image) => return f.write_str(&image.name()),
        };
        write!(f, "{transport}:{}", path.display())?;
        match reference {
            Some(reference) => write!(f, ":{reference}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Source, String> {
        text.parse::<Source>().map_err(|e| e.to_string())
    }

    #[test]
    fn sources_are_written_as_in_skopeo() {
        assert_eq!(
            parse("oci:a/b:repo:tag"),
            Ok(Source::Oci {
                directory: "a/b".into(),
                reference: Some("repo:tag".into())
            })
        );
        assert_eq!(
            parse("oci-archive:x.tar"),
            Ok(Source::OciArchive {
                file: "x.tar".into(),
                reference: None
            })
        );
        assert_eq!(
            parse("docker-archive:/x.tar:@0"),
            Ok(Source::DockerArchive {
                file: "/x.tar".into(),
                reference: Some("@0".into())
            })
        );
        assert_eq!(parse("tar:-"), Ok(Source::Tar(TarInput::Stdin)));
        for name in ["a:b", "x:", ":x"] {
            assert_eq!(
                parse(&format!("tar:{name}")),
                Ok(Source::Tar(TarInput::File(name.into())))
            );
            assert_eq!(
                parse(&format!("dir:{name}")),
                Ok(Source::Directory(name.into()))
            );
        }
    }

    #[test]
    fn source_in_the_hint_is_that_of_the_image() {
        let hinted = |source: &str| {
            let error = source
                .parse::<Source>()
                .unwrap()
                .explain(ConvertError::HoldsImage {
                    place: "x".to_owned(),
                    form: ImageForm::OciLayout,
                    source_text: None,
                });
            match error {
                ConvertError::HoldsImage { source_text, .. } => source_text,
                _ => None,
            }
        };
        assert_eq!(hinted("dir:/d").as_deref(), Some("oci:/d"));
        assert_eq!(hinted("tar:a.tar").as_deref(), Some("oci-archive:a.tar"));
        assert_eq!(hinted("dir:/d:x"), None);
        assert_eq!(hinted("tar:a:b.tar"), None);
    }

    #[test]
    fn a_plain_path_to_a_tar_archive_is_a_source() {
        for name in ["a.tar", "./a:b.tar.gz", "x/y.tzst", "odd:name.tgz"] {
            assert_eq!(parse(name), Ok(Source::Tar(TarInput::File(name.into()))));
        }
    }

    #[test]
    fn invalid_sources_are_refused_with_the_reason() {
        for (text, problem) in [
            ("image", "missing transport"),
            ("oci:", "missing path"),
            ("oci:a:", "missing name after the second colon"),
            ("oci::a", "missing path"),
            ("docker://a", "unknown transport"),
        ] {
            let message = format!("invalid source {text:?}: {problem}");
            assert_eq!(parse(text), Err(message));
        }
    }

    #[test]
    fn sources_print_as_they_are_written() {
        for text in [
            "oci:a:b",
            "oci-archive:a",
            "docker-archive:a:b:c",
            "tar:-",
            "tar:x",
            "dir:y",
        ] {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), text);
        }
    }
}
