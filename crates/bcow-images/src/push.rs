//! Destinations in registries and in S3.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::name::{Name, NameParts};
use crate::takes::Takes;
use crate::url::Url;
use bcow::{Storage, header_of};
use bcow_oci::copy::CopyFile;
use bcow_oci::{ConvertError, Digest, LayoutForm, LayoutPlace, OpenContent, Progress};
use bcow_remote::{
    Problem, Reference, Remote, RemoteError, Replace, Root, S3, S3Content, S3Name, S3Upload, Upload,
};
use serde_json::Value;

use crate::error::CommandError;
use crate::failure::failure;
use crate::remote::{self, RemoteArgs};
use crate::s3;

/// A place that a command writes to.
#[derive(Debug, Clone)]
pub enum Destination {
    /// A BCoW file.
    File(PathBuf),
    /// An image in an OCI layout or in a registry.
    Layout(LayoutPlace),
    /// An archive of a tree or a layer; `None` is standard output.
    Tar(Option<PathBuf>),
    /// The bytes of a disk.
    Raw(PathBuf),
    /// A qcow2 image.
    Qcow2(PathBuf),
    /// A BCoW file in S3.
    S3(S3Name),
    /// A directory with layers of images for containerd's erofs snapshotter.
    ContainerdCache(PathBuf),
}

impl Destination {
    /// The place that `name` means; `takes` are the forms that the command writes. `from` is the
    /// image that is read, whose blobs may be in the same registry.
    pub fn of(
        name: &Name,
        takes: &Takes,
        args: &RemoteArgs,
        from: &Name,
    ) -> Result<Self, CommandError> {
        let layout = |form, path: &Path, reference: &Option<String>| {
            Destination::Layout(LayoutPlace {
                form,
                path: path.to_owned(),
                reference: reference.clone(),
                replaces_index: false,
            })
        };
        Ok(match name.parts() {
            NameParts::File(path) | NameParts::Bcow(path) => Destination::File(path.clone()),
            NameParts::Layout {
                directory,
                reference,
            } => layout(LayoutForm::Directory, directory, reference),
            NameParts::OciArchive { file, reference } => {
                layout(LayoutForm::Archive, file, reference)
            }
            NameParts::Tar(file) => Destination::Tar(file.clone()),
            NameParts::Raw(path) => Destination::Raw(path.clone()),
            NameParts::Qcow2(path) => Destination::Qcow2(path.clone()),
            NameParts::ContainerdCache(path) => Destination::ContainerdCache(path.clone()),
            NameParts::Url(Url::S3(name)) => Destination::S3(name.clone()),
            NameParts::Url(Url::Registry(reference)) => {
                let form = LayoutForm::Registry(upload(reference, args, from.registry())?);
                layout(form, &remote::scratch(), &None)
            }
            _ => return Err(takes.refuse(name).into()),
        })
    }
}

/// A place in a registry, for writing. Fails if the registry takes no upload from this user.
fn upload(
    reference: &Reference,
    args: &RemoteArgs,
    from: Option<&Reference>,
) -> Result<Arc<dyn bcow_oci::Upload>, CommandError> {
    let name = reference.to_string();
    let client = remote::client(args, &name)?;
    let failed = |error: RemoteError| cannot_write(&name, &error);
    let keys = Arc::new(args.keys()?);
    let upload = Upload::new(&client, reference.clone(), keys, from).map_err(failed)?;
    // A conversion can take long: a missing right to write is reported before it.
    upload.require_access().map_err(failed)?;
    Ok(Arc::new(ToRepository(upload)))
}

/// A place for a file in S3.
pub struct ToS3 {
    name: S3Name,
    server: S3,
    client: Remote,
    upload: S3Upload,
    replace: Replace,
}

impl ToS3 {
    /// The place with this name. Fails if there is a file that is not to be replaced.
    pub fn new(name: S3Name, args: &RemoteArgs, replace: Replace) -> Result<Self, CommandError> {
        let client = remote::client(args, &name.to_string())?;
        let place = ToS3::at(name, s3::server()?, client, replace)?;
        if replace == Replace::Refused {
            let absent = place.upload.require_absent();
            absent.map_err(|error| place.cannot_write(&error))?;
        }
        Ok(place)
    }

    fn at(
        name: S3Name,
        server: S3,
        client: Remote,
        replace: Replace,
    ) -> Result<Self, CommandError> {
        let upload = S3Upload::new(&client, &server, &name);
        Ok(ToS3 {
            upload: upload.map_err(|error| cannot_write(&name.to_string(), &error))?,
            name,
            server,
            client,
            replace,
        })
    }

    /// The name, for messages.
    pub fn name(&self) -> String {
        self.name.to_string()
    }

    /// Writes a BCoW file with a Merkle tree, whose bytes the caller has checked. Returns the
    /// number of bytes that were sent.
    pub fn send(
        &self,
        file: &dyn Storage,
        progress: &dyn Progress,
        cancel: &AtomicBool,
    ) -> Result<u64, CommandError> {
        progress.phase("sending");
        progress.total(header_of(file).map(|header| header.file_bytes));
        self.with_content(file, cancel, |content| {
            self.write(content, progress, cancel)
        })
    }

    /// Writes an image: the layers that are not there yet, under the names of their digests, and
    /// then the stack, which is the last file. So the stack appears when all of the image is there.
    /// Returns the number of bytes that were sent of each file.
    pub fn send_image(
        &self,
        files: &[(Digest, CopyFile)],
        progress: &dyn Progress,
        cancel: &AtomicBool,
    ) -> Result<Vec<u64>, CommandError> {
        progress.total(Some(files.iter().map(|(_, file)| file.bytes).sum()));
        let mut sent = Vec::new();
        for (index, (digest, file)) in files.iter().enumerate() {
            progress.phase(&file.name);
            let check = || {
                file.check(digest, Some(cancel))
                    .map_err(|error| failure(&error))
            };
            if index + 1 == files.len() {
                check()?;
                sent.push(self.with_content(&*file.storage, cancel, |content| {
                    self.write(content, progress, cancel)
                })?);
                break;
            }
            if digest.sha256().is_none() {
                return Err(CommandError::new(format!("cannot write {}", self.name))
                    .caused_by_text(format!("{} has no SHA-256 digest", file.name)));
            }
            // A file of this name has this content. One that has not is a damaged one.
            let name = self.name.blob(&digest.hex());
            let (server, client) = (self.server.clone(), self.client.clone());
            let place = ToS3::at(name, server, client, Replace::Allowed)?;
            sent.push(place.with_content(&*file.storage, cancel, |content| {
                let found = place.upload.has(content);
                if found.map_err(|error| place.cannot_write(&error))? {
                    progress.advance(content.length);
                    return Ok(0);
                }
                check()?;
                place.write(content, progress, cancel)
            })?);
        }
        Ok(sent)
    }

    /// Calls `act` with the content of a file that can be read from a server.
    fn with_content<T>(
        &self,
        file: &dyn Storage,
        cancel: &AtomicBool,
        act: impl FnOnce(&S3Content<'_>) -> Result<T, CommandError>,
    ) -> Result<T, CommandError> {
        let header = header_of(file);
        let tree = header.as_ref().and_then(|header| header.merkle.as_ref());
        let (Some(header), Some(tree)) = (&header, tree) else {
            return Err(CommandError::new(format!("cannot write {}", self.name))
                .caused_by_text("the file has no Merkle tree, and could not be read there")
                .hint("`bcow seal` makes a disk immutable, with a Merkle tree"));
        };
        act(&S3Content {
            length: header.file_bytes,
            root: &Root(tree.root).to_string(),
            read_at: &|offset, bytes| {
                if cancel.load(Ordering::Relaxed) {
                    Err(io::ErrorKind::Interrupted.into())
                } else {
                    file.read_at(offset, bytes)
                }
            },
        })
    }

    fn write(
        &self,
        content: &S3Content<'_>,
        progress: &dyn Progress,
        cancel: &AtomicBool,
    ) -> Result<u64, CommandError> {
        let sent = |bytes| progress.advance(bytes);
        let written = self.upload.write(content, self.replace, &sent);
        written.map_err(|error| {
            if cancel.load(Ordering::Relaxed) {
                failure(&ConvertError::Interrupted)
            } else {
                self.cannot_write(&error)
            }
        })
    }

    fn cannot_write(&self, error: &RemoteError) -> CommandError {
        cannot_write(&self.name.to_string(), error)
    }
}

fn cannot_write(name: &str, error: &RemoteError) -> CommandError {
    let failure = CommandError::new(format!("cannot write {name}"));
    match error.problem {
        Problem::Exists => failure
            .caused_by_text(error.problem.to_string())
            .hint("--force replaces it"),
        _ => remote::explain(failure, name, error),
    }
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

    fn named(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.named()?)
    }

    fn store(&self, bytes: &[u8], media_type: &str, digest: &Digest) -> io::Result<()> {
        Ok(self.0.store(bytes, media_type, &digest.to_string())?)
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
