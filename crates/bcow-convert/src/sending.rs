//! Images and disks for S3, which are written to this machine first.

use std::fs::File;
use std::path::Path;

use bcow_images::error::{CommandError, Context};
use bcow_images::push::{Destination, ToS3};
use bcow_images::remote;
use bcow_oci::copy::CopyImage;
use bcow_oci::{LayoutPlace, LeftOut, Source};
use bcow_remote::{Replace, S3Name};

use crate::conversion::Conversion;
use crate::work::Work;

/// What is sent to S3 when it is complete: a file, or a layout with one image.
pub struct Sending {
    pub place: ToS3,
    directory: tempfile::TempDir,
}

impl Sending {
    pub fn new(name: S3Name, asked: &Conversion<'_>) -> Result<Self, CommandError> {
        let replace = if asked.force { Replace::Allowed } else { Replace::Refused };
        let place = ToS3::new(name, &asked.stores.remote, replace)?;
        let scratch = remote::scratch();
        let cannot = || format!("cannot make a directory in {}", scratch.display());
        let directory = tempfile::Builder::new()
            .prefix(remote::SCRATCH_NAME)
            .tempdir_in(&scratch)
            .context(cannot)?;
        Ok(Sending { place, directory })
    }

    /// What is written first, in a directory of its own.
    pub fn destination(&self, in_layers: bool) -> Destination {
        if !in_layers {
            Destination::File(self.directory.path().join("image.bcow"))
        } else {
            Destination::Layout(LayoutPlace {
                path: self.directory.path().join("layout"),
                ..LayoutPlace::default()
            })
        }
    }

    /// Sends the file at `path`.
    pub fn send_file(&self, path: &Path, work: &Work<'_>) -> Result<(), CommandError> {
        let cannot = || format!("cannot read {}", path.display());
        let file = File::open(path).context(cannot)?;
        let flag = work.interrupt.flag();
        self.place.send(&file, work.progress, &flag)?;
        Ok(())
    }

    /// Sends the files of the image of the layout, without the manifest. Returns the parts of the
    /// image that are not sent.
    pub fn send_layout(
        &self,
        layout: &LayoutPlace,
        work: &Work<'_>,
    ) -> Result<LeftOut, CommandError> {
        let written = Source::Oci {
            directory: layout.path.clone(),
            reference: None,
        };
        let (progress, cancel) = (work.progress, work.interrupt.flag());
        let image = CopyImage::of_layout(&written, None, &layout.path, progress, Some(&cancel))?;
        self.place.send_image(image.files(), progress, &cancel)?;
        Ok(image.left_out_of_files()?)
    }
}
