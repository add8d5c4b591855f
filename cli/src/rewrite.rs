//! Makes a BCoW disk of what another device has, in one pass.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use bcow::format::{BackingEntry, incompatible};
use bcow::{
    BlockDevice, Compression, DiskForm, Error, Image, ImageWriter, Keep, WriterOptions, Written,
    append_disk, verify_written,
};
use bcow_oci::ConvertOptions;
use serde_json::{Map, Value, json};

use crate::error::{CommandError, Context};
use crate::interrupt::Interrupt;
use crate::new_file::NewFile;
use crate::ui::{Progress, Ui};

/// Room for the record log of a disk that can be written, as `bcow create` makes it.
pub const LOG_BYTES: u64 = 4 << 20;

/// What to write.
pub struct Rewrite<'a> {
    pub device: &'a dyn BlockDevice,
    /// What the user calls it.
    pub name: &'a Path,
    pub keep: Keep,
    pub form: DiskForm,
    pub compression: Compression,
    pub block_bytes: Option<u32>,
    pub jobs: Option<u16>,
    pub verify: bool,
    pub metadata: Value,
}

impl Rewrite<'_> {
    /// Fills `new`, which is to become `destination`. Nothing is synced, and it has no name yet.
    pub fn write(
        self,
        new: &NewFile,
        destination: &Path,
        ui: &Ui,
    ) -> Result<Written, CommandError> {
        let interrupt = Interrupt::catch();
        let progress = ui.progress();
        progress.phase("writing");
        progress.total(Some(self.device.size()));
        let cannot = || format!("cannot write {}", destination.display());
        let threads = self
            .jobs
            .map_or(ConvertOptions::default().threads, usize::from);
        let options = WriterOptions {
            compression: self.compression,
            block_bytes: self.block_bytes,
            threads,
            disk: Some(self.form.clone()),
            ..WriterOptions::default()
        };
        let file = new.file().try_clone().context(cannot)?;
        let mut writer = ImageWriter::create(file, options).context(cannot)?;
        self.append(&mut writer, &interrupt, &progress, &cannot)?;
        progress.phase("hashing");
        let written = writer.finish(&[], &self.metadata).context(cannot)?;
        if self.verify {
            progress.phase("verifying");
            verify_written(&written, threads).context(cannot)?;
        }
        Ok(written)
    }

    fn append(
        &self,
        writer: &mut ImageWriter,
        interrupt: &Interrupt,
        progress: &Progress<'_>,
        cannot: &dyn Fn() -> String,
    ) -> Result<(), CommandError> {
        enum Stop {
            Failed(Error),
            Interrupted(CommandError),
        }
        impl From<Error> for Stop {
            fn from(error: Error) -> Self {
                Stop::Failed(error)
            }
        }
        let appended = append_disk(writer, self.device, self.keep, &mut |bytes| {
            progress.advance(bytes);
            interrupt.check().map_err(Stop::Interrupted)
        });
        appended.map_err(|stop| match stop {
            Stop::Interrupted(error) => error,
            Stop::Failed(
                error @ Error::Io {
                    action: "write", ..
                },
            ) => CommandError::new(cannot()).caused_by(&error),
            Stop::Failed(error) => {
                CommandError::new(format!("cannot read {}", self.name.display())).caused_by(&error)
            }
        })
    }
}

/// The metadata of a sealed disk.
pub fn metadata(
    compression: Compression,
    block_bytes: Option<u32>,
    source: Option<Value>,
) -> Result<Value, CommandError> {
    let mut all = Map::new();
    let tool = format!("bcow {}", env!("CARGO_PKG_VERSION"));
    all.insert("tool".into(), tool.into());
    let created = crate::commands::convert::source_date_epoch()?.and_then(bcow_oci::rfc3339);
    if let Some(created) = created {
        all.insert("created".into(), created.into());
    }
    let compress = match compression {
        Compression::None => "none".to_owned(),
        Compression::Zstd { level } => format!("zstd:{level}"),
    };
    let block_size = block_bytes.map_or(json!("auto"), |bytes| json!(bytes));
    all.insert(
        "options".into(),
        json!({ "compress": compress, "block_size": block_size }),
    );
    if let Some(source) = source {
        all.insert("source".into(), source);
    }
    Ok(Value::Object(all))
}

/// The backing of a disk, if it has one.
pub fn backing_of(image: &Image) -> Option<BackingEntry> {
    match image
        .header()
        .features
        .has_incompatible(incompatible::BACKING)
    {
        true => image.backings().next().cloned(),
        false => None,
    }
}

/// Gives a file that takes the place of another the other's mode and, where that is allowed, owner.
pub fn inherit(new: &NewFile, old: &std::fs::File) -> std::io::Result<()> {
    let metadata = old.metadata()?;
    // An ordinary user cannot, and owns both.
    let _ = std::os::unix::fs::fchown(new.file(), Some(metadata.uid()), Some(metadata.gid()));
    let mode = std::fs::Permissions::from_mode(metadata.mode() & 0o7777);
    new.file().set_permissions(mode)
}
