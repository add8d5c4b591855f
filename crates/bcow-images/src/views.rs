//! Views of images: where they are kept.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::chain::{FoundView, ViewFailure, Views, WantedView};
use bcow::{Image, OpenOptions};
use bcow_ext4::Ext4Error;
use bcow_view::{CachedView, ViewCache, ViewError, ViewedImage};

use crate::cache;
use crate::error::CommandError;

/// The directory of views, in place of the default.
const VIEWS: &str = "BCOW_VIEWS";

/// The cache of this user, in the directory that the environment names.
#[derive(Debug, Clone)]
pub struct UserViews {
    options: OpenOptions,
}

impl UserViews {
    /// The views are read and written with these options.
    pub fn new(options: &OpenOptions) -> Self {
        UserViews {
            options: options.clone(),
        }
    }

    /// The view of an image as a file system of `bytes` bytes.
    pub fn view(&self, image: &dyn ViewedImage, bytes: u64) -> Result<CachedView, ViewFailure> {
        Ok(self.cache()?.view(image, bytes)?)
    }

    /// The cache itself.
    pub fn cache(&self) -> Result<ViewCache, ViewFailure> {
        match directory(None) {
            Some(directory) => Ok(ViewCache::new(&directory, &self.options)),
            None => Err(format!("there is no directory for views: {VIEWS} names one").into()),
        }
    }
}

impl Views for UserViews {
    fn find(
        &self,
        image: Option<&Arc<Image>>,
        wanted: &WantedView,
    ) -> Result<FoundView, ViewFailure> {
        self.cache()?.find(image, wanted)
    }
}

/// The views of the commands on the cache in the directory `cache`, or, without a name, in the
/// default one: those in `views` below it, unless the environment names another directory.
pub fn of_cache(cache: Option<&Path>) -> Option<ViewCache> {
    let directory = directory(cache)?;
    Some(ViewCache::new(&directory, &OpenOptions::default()))
}

/// The directory of the views, for the cache that the command line names.
pub fn directory(cache: Option<&Path>) -> Option<PathBuf> {
    let variable = std::env::var_os(VIEWS).filter(|name| !name.is_empty());
    let of_cache = || Some(cache::named(cache)?.join("views"));
    let of_default = || Some(cache::default_directory()?.join("views"));
    variable
        .map(PathBuf::from)
        .or_else(of_cache)
        .or_else(of_default)
}

/// The error of a view of the image that the user calls `name`.
pub fn cannot_view(name: &Path, error: &ViewFailure) -> CommandError {
    let cannot = CommandError::new(format!("cannot show {} as ext4", name.display()));
    let cannot = cannot.caused_by(&**error);
    match error.downcast_ref() {
        Some(ViewError::TooSmall { least, .. }) => {
            cannot.hint(format!("-s {}M gives the least size", least >> 20))
        }
        Some(ViewError::Ext4(Ext4Error::NoSpace { .. })) => cannot.hint("-s gives a larger size"),
        Some(ViewError::WritableByOthers { .. } | ViewError::Directory { .. }) => {
            cannot.hint(format!("{VIEWS} names another directory"))
        }
        Some(ViewError::NoImage(_)) => cannot.hint("`bcow convert` makes an image"),
        _ => cannot,
    }
}
