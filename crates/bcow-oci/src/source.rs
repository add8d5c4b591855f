//! The source of a conversion.

use std::fmt;
use std::path::PathBuf;

use crate::error::{ConvertError, ImageForm};
use crate::registry::OrdinaryImage;

/// A source of an image.
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
    /// An archive that is what its content says: one of `docker save` or of an OCI image layout, or
    /// else as with [`Source::Tar`].
    Archive(TarInput),
    /// A root file system in a directory.
    Directory(PathBuf),
    /// An image in a registry, from [`crate::find_in_registry`].
    Registry(OrdinaryImage),
}

/// A tar archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TarInput {
    /// A file, or a named pipe.
    File(PathBuf),
    /// Standard input.
    Stdin,
}

impl Source {
    /// Adds the source argument for the image in the files to a [`ConvertError::HoldsImage`].
    pub(crate) fn explain(&self, mut error: ConvertError) -> ConvertError {
        if let ConvertError::HoldsImage {
            form, source_text, ..
        } = &mut error
        {
            use Source::{Archive, Tar};
            let other = match (self, form) {
                (
                    Tar(TarInput::File(file)) | Archive(TarInput::File(file)),
                    ImageForm::DockerArchive,
                ) => Some(Source::DockerArchive {
                    file: file.clone(),
                    reference: None,
                }),
                (
                    Tar(TarInput::File(file)) | Archive(TarInput::File(file)),
                    ImageForm::OciLayout,
                ) => Some(Source::OciArchive {
                    file: file.clone(),
                    reference: None,
                }),
                (Source::Directory(directory), ImageForm::OciLayout) => Some(Source::Oci {
                    directory: directory.clone(),
                    reference: None,
                }),
                _ => None,
            };
            // In such a name, the first colon ends the path.
            *source_text = other
                .map(|source| source.to_string())
                .filter(|text| text.bytes().filter(|&byte| byte == b':').count() == 1);
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
            Source::Archive(TarInput::Stdin) => return f.write_str("-"),
            Source::Archive(TarInput::File(file)) => return file.display().fmt(f),
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

    #[test]
    fn source_in_the_hint_is_that_of_the_image() {
        let hinted = |source: Source| {
            let error = source.explain(ConvertError::HoldsImage {
                place: "x".to_owned(),
                form: ImageForm::OciLayout,
                source_text: None,
            });
            match error {
                ConvertError::HoldsImage { source_text, .. } => source_text,
                _ => None,
            }
        };
        let directory = |path: &str| hinted(Source::Directory(path.into()));
        let archive = |path: &str| hinted(Source::Tar(TarInput::File(path.into())));
        assert_eq!(directory("/d").as_deref(), Some("oci:/d"));
        assert_eq!(archive("a.tar").as_deref(), Some("oci-archive:a.tar"));
        assert_eq!(directory("/d:x"), None);
        assert_eq!(archive("a:b.tar"), None);
    }
}
