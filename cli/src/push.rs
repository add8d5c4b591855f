//! Destinations in registries.

use std::io;
use std::sync::Arc;

use bcow_oci::{Digest, LayoutForm, OpenContent};
use bcow_remote::Upload;
use serde_json::Value;

use crate::error::CommandError;
use crate::place::{Destination, Layout};
use crate::remote::{self, RemoteArgs};

/// Makes a destination in a registry one that images are written to; any other stays. `from` is the
/// name of the image that is read, whose blobs may be in the same registry.
pub fn resolve(
    destination: Destination,
    args: &RemoteArgs,
    from: &str,
) -> Result<Destination, CommandError> {
    let Destination::Registry(url) = destination else {
        return Ok(destination);
    };
    let upload = upload(&url, args, from)?;
    Ok(Destination::Layout(Layout {
        form: LayoutForm::Registry(upload),
        path: remote::scratch(),
        reference: None,
    }))
}

/// The place that `docker://...` names, for writing.
pub fn upload(
    url: &str,
    args: &RemoteArgs,
    from: &str,
) -> Result<Arc<dyn bcow_oci::Upload>, CommandError> {
    let reference = remote::reference(url)?;
    if reference.digest().is_some() {
        return Err(CommandError::usage(format!(
            "invalid destination {url:?}: the digest of an image follows from its content"
        ))
        .hint("write docker://SERVER/REPOSITORY[:TAG]"));
    }
    let name = reference.to_string();
    let client = remote::client(args, &name)?;
    let from = from.parse().ok();
    let upload = Upload::new(&client, reference, Arc::new(args.keys()), from.as_ref())
        .map_err(|error| remote::cannot_open(&name, &error))?;
    Ok(Arc::new(ToRepository(upload)))
}

/// What `bcow_oci` writes to a registry.
struct ToRepository(Upload);

impl bcow_oci::Upload for ToRepository {
    fn name(&self) -> String {
        self.0.reference().to_string()
    }

    fn adopt(&self, digest: &Digest, length: u64) -> io::Result<bool> {
        Ok(self.0.adopt(&digest.to_string(), length)?)
    }

    fn blob(
        &self,
        digest: &Digest,
        length: u64,
        open: &OpenContent<'_>,
        sent: &dyn Fn(u64),
    ) -> io::Result<()> {
        self.0.blob(&digest.to_string(), length, open, sent)?;
        Ok(())
    }

    fn manifest(&self, bytes: &[u8], media_type: &str, digest: &Digest) -> io::Result<()> {
        Ok(self.0.manifest(bytes, media_type, &digest.to_string())?)
    }

    fn attach(
        &self,
        bytes: &[u8],
        media_type: &str,
        digest: &Digest,
        subject: &Digest,
        entry: &Value,
    ) -> io::Result<()> {
        let (digest, subject) = (digest.to_string(), subject.to_string());
        Ok(self.0.attach(bytes, media_type, &digest, &subject, entry)?)
    }
}
