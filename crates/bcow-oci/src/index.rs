//! An image for several platforms: an index, and what it lists.

use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::archive::{Archive, Files, Spool};
use crate::cancel::Cancel;
use crate::error::ConvertError;
use crate::layer::Reading;
use crate::layout::{self, Candidate, Descriptor, Form, Manifests, nearest};
use crate::left_out::LeftOut;
use crate::options::{Limits, Progress};
use crate::platform::{Platform, PlatformSyntax};
use crate::registry::index_in_registry;
use crate::repository::Repository;
use crate::source::Source;

/// An index of a layout or a registry.
pub struct ImageIndex {
    /// The name of the source, for messages.
    pub name: String,
    /// The layout that has the index.
    pub(crate) layout: Option<Source>,
    /// The name of the image in its layout.
    pub(crate) reference: Option<String>,
    pub(crate) files: Files,
    pub(crate) manifests: Manifests,
}

/// The platforms of an index whose images are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Platforms {
    /// All platforms, except those of Windows, whose images bcow does not read.
    All,
    /// The image that matches each of these best.
    Named(Vec<Platform>),
}

/// Reads `all`, or platforms separated by commas.
impl FromStr for Platforms {
    type Err = PlatformSyntax;

    fn from_str(text: &str) -> Result<Self, PlatformSyntax> {
        if text == "all" {
            return Ok(Platforms::All);
        }
        let named = text.split(',').map(str::parse);
        Ok(Platforms::Named(named.collect::<Result<_, _>>()?))
    }
}

impl ImageIndex {
    /// The index of a layout: `oci:DIR[:REF]` or `oci-archive:FILE[:REF]`. `None` if the source is
    /// one image, or has another form. The directory `scratch` gets the bytes of an archive that is
    /// compressed as a whole.
    pub fn of_layout(
        source: &Source,
        scratch: &Path,
        progress: &dyn Progress,
        cancel: Option<&AtomicBool>,
    ) -> Result<Option<ImageIndex>, ConvertError> {
        ImageIndex::find(source, Form::Any, scratch, progress, cancel)
    }

    /// The same; without a name, images in the form are preferred.
    pub(crate) fn find(
        source: &Source,
        form: Form,
        scratch: &Path,
        progress: &dyn Progress,
        cancel: Option<&AtomicBool>,
    ) -> Result<Option<ImageIndex>, ConvertError> {
        let Some((files, reference)) = layout_files(source, scratch, progress, cancel)? else {
            return Ok(None);
        };
        let named = layout::named(&files, reference, form)?;
        if named.len() == 1 && !named[0].is_index() {
            return Ok(None);
        }
        Ok(Some(ImageIndex {
            name: source.to_string(),
            layout: Some(source.clone()),
            reference: named[0].name().map(str::to_owned),
            manifests: Manifests::of(&files, named, None)?,
            files,
        }))
    }

    /// The index that the name of `repository` leads to; `None` if it leads to one image.
    pub fn of_registry(
        repository: Arc<dyn Repository>,
    ) -> Result<Option<ImageIndex>, ConvertError> {
        let manifests = index_in_registry(&repository)?;
        Ok(manifests.map(|manifests| ImageIndex {
            name: repository.name(),
            layout: None,
            reference: None,
            files: Files::Registry(repository),
            manifests,
        }))
    }

    /// The descriptor of the index itself; `None` for images of several platforms that a layout
    /// lists by themselves, under one name.
    pub(crate) fn root(&self) -> Option<&Descriptor> {
        self.manifests.indexes.first()
    }

    /// The images for the platforms, in the order of the index, and the others.
    pub(crate) fn choose(
        &self,
        platforms: &Platforms,
    ) -> Result<(Vec<&Candidate>, LeftOut), ConvertError> {
        let images = &self.manifests.images;
        let mut is_wanted = vec![false; images.len()];
        match platforms {
            Platforms::All => {
                for (wanted, image) in is_wanted.iter_mut().zip(images) {
                    let platform = image.descriptor.platform.as_ref();
                    *wanted = platform.is_none_or(|platform| platform.os != "windows");
                }
            }
            Platforms::Named(named) => {
                for platform in named {
                    is_wanted[nearest(&self.name, images, platform)?] = true;
                }
            }
        }
        let wanted = images.iter().zip(&is_wanted).filter(|(_, wanted)| **wanted);
        let wanted: Vec<_> = wanted.map(|(image, _)| image).collect();
        let others = images
            .iter()
            .zip(&is_wanted)
            .filter(|(_, wanted)| !**wanted);
        let left_out = LeftOut {
            platforms: others
                .map(|(image, _)| image.descriptor.platform_name())
                .collect(),
            ..LeftOut::default()
        };
        if wanted.is_empty() {
            let problem = "it lists no image that bcow reads";
            return Err(ConvertError::layout(&self.name, problem));
        }
        Ok((wanted, left_out))
    }
}

/// Opens the files of a layout, and gives the name in it; `None` for a source in another form.
pub(crate) fn layout_files<'s>(
    source: &'s Source,
    scratch: &Path,
    progress: &dyn Progress,
    cancel: Option<&AtomicBool>,
) -> Result<Option<(Files, Option<&'s str>)>, ConvertError> {
    let limits = Limits::default();
    let spool = Spool {
        directory: scratch,
        reading: Reading::new(&limits, progress, Cancel::new(cancel)),
    };
    Ok(Some(match source {
        Source::Oci {
            directory,
            reference,
        } => (Files::directory(directory)?, reference.as_deref()),
        Source::OciArchive { file, reference } => {
            let archive = Archive::open_file(file, &spool)?;
            (Files::Archive(archive), reference.as_deref())
        }
        _ => return Ok(None),
    }))
}
