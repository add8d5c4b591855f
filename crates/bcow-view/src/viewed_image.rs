//! Images that a view shows.

use std::sync::Arc;

use bcow::{BlockCache, BlockDevice, Image};

use crate::ViewError;

/// An image that a view shows: a file, or several that are shown as one.
pub trait ViewedImage {
    /// The address space that the windows and fragments of the view show.
    fn image(&self) -> &Arc<Image>;

    /// The identity of the image. Equal identities mean equal trees at equal places.
    fn identity(&self) -> [u8; 32];

    /// The name under which the user opened it, if that is known.
    fn name(&self) -> Option<String> {
        None
    }

    /// The address space with its file system, whose metadata is authenticated by the identity. The
    /// content of files need not be there.
    ///
    /// The view is used for every image of that identity, which a header could claim wrongly. So
    /// the tree is verified.
    fn verified(&self) -> Result<Arc<dyn BlockDevice>, ViewError>;
}

impl ViewedImage for Arc<Image> {
    fn image(&self) -> &Arc<Image> {
        self
    }

    fn identity(&self) -> [u8; 32] {
        self.identity_hash()
    }

    fn verified(&self) -> Result<Arc<dyn BlockDevice>, ViewError> {
        let verified = Image::verified(self, &BlockCache::new(16 << 20));
        Ok(verified.map_err(ViewError::Image)?)
    }
}
