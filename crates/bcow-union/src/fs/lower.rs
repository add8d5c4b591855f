//! The image's file below a partial file.

use std::sync::Arc;

use bcow_erofs::reader::Inode;
use rustix::io::Errno;

use crate::Seek;
use crate::image::Image;
use crate::partial;

/// A file of the image as the lower file of a partial file.
pub(super) struct ImageFile {
    image: Arc<Image>,
    inode: Inode,
}

impl ImageFile {
    pub(super) fn new(image: Arc<Image>, inode: Inode) -> Self {
        ImageFile { image, inode }
    }
}

impl partial::Lower for ImageFile {
    fn size(&self) -> u64 {
        self.inode.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        self.image.read(&self.inode, offset, buf)
    }

    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, Errno> {
        if offset >= self.inode.size {
            return Ok(None);
        }
        self.image.seek(&self.inode, offset, what)
    }
}
