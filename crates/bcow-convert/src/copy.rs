//! Copies of images in BCoW form, byte for byte.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::format::{BackingName, Use};
use bcow::{Image, OpenOptions, Storage};
use bcow_images::args::{COPY_FROM, COPY_TO};
use bcow_images::error::{CommandError, Context};
use bcow_images::image::{OpenImage, StoreArgs, cannot_open, refuse_what_is_no_file};
use bcow_images::push::{Destination, ToS3};
use bcow_images::remote::{self, Pinned};
use bcow_images::replace::{self, Replacement};
use bcow_images::{Name, NameParts, Url};
use bcow_oci::copy::{
    CopyFile, CopyImage, CopyIndex, FileReport, ImageReport, copy_file, copy_image, copy_index,
};
use bcow_oci::{
    ConvertError, Digest, LayoutForm, LayoutPlace, LeftOut, Platform, RunOptions, store,
};
use bcow_remote::{Replace, Root, S3Name};
use serde::Serialize;

use crate::options::as_digest;
use crate::work::Work;

/// A copy, as the user asks for it.
pub struct Copying<'a> {
    /// What to copy.
    pub source: &'a Name,
    /// Where to.
    pub destination: &'a Name,
    /// The platform to select from an index. Without one, a copy into a layout or a registry is of
    /// the whole index.
    pub platform: Option<&'a str>,
    /// Replace any file.
    pub force: bool,
    /// Threads that compare chunks, if the user chose their number.
    pub jobs: Option<usize>,
    /// Where files below the source are looked up.
    pub stores: &'a StoreArgs,
}

/// The result of a copy.
#[derive(Debug, Serialize)]
pub struct Copied {
    schema: &'static str,
    /// The name of the copy.
    #[serde(skip)]
    pub name: String,
    /// What was copied.
    #[serde(flatten)]
    pub report: CopyReport,
    /// The parts of the source that the copy does not have.
    pub left_out: LeftOut,
}

/// What was copied.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum CopyReport {
    /// One file.
    File(FileReport),
    /// An image with a manifest.
    Image(ImageReport),
    /// An image in S3.
    Sent {
        /// Root hash of the stack.
        merkle_root: String,
        /// The layers and the stack.
        blobs: Vec<SentFile>,
    },
}

/// A file of an image in S3.
#[derive(Debug, Serialize)]
pub struct SentFile {
    /// The digest of the file.
    pub digest: Digest,
    /// Its length in bytes.
    pub bytes: u64,
    /// Bytes that were sent; 0 if the file was there.
    pub copied_bytes: u64,
}

impl Copied {
    fn new(name: String, report: CopyReport, left_out: LeftOut) -> Self {
        Copied {
            schema: "bcow.copy/1",
            name,
            report,
            left_out,
        }
    }

    fn file(name: String, mut report: FileReport, left_out: LeftOut) -> Self {
        report.merkle_root = as_digest(&report.merkle_root);
        Copied::new(name, CopyReport::File(report), left_out)
    }
}

/// Threads without `--jobs`: several requests at a time hide the way to a server.
const THREADS: usize = 4;

impl Copying<'_> {
    /// Copies.
    pub fn run(&self, work: &Work<'_>) -> Result<Copied, CommandError> {
        let remote = &self.stores.remote;
        let destination = Destination::of(self.destination, &COPY_TO, remote, self.source)?;
        let from = open(self, &destination, work)?;
        if let Some(root) = remote.root_hash {
            require_root(&from, root)?;
        }
        if let From::Index(index) = from {
            return self.index(&index, &destination, work);
        }
        match (&destination, from) {
            (Destination::S3(name), from) => self.to_s3(&from, name, work),
            (Destination::File(path), From::File(file)) => {
                self.to_file(&file, path, LeftOut::default(), work)
            }
            (Destination::File(path), From::Image(image)) => match image.only_file() {
                Some(file) => self.to_file(file, path, image.left_out_of_files()?, work),
                None => Err(CommandError::new(format!(
                    "cannot copy {} to {}",
                    image.name,
                    path.display()
                ))
                .caused_by_text("the image has layers, and a file has none")
                .hint(
                    "copy it to oci:DIR[:REF] or oci-archive:FILE[:REF]; `bcow convert` makes one \
                     file",
                )),
            },
            (Destination::Layout(to), From::Image(image)) => self.to_layout(&image, to, work),
            _ => Err(COPY_TO.refuse(self.destination).into()),
        }
    }

    fn index(
        &self,
        index: &CopyIndex,
        destination: &Destination,
        work: &Work<'_>,
    ) -> Result<Copied, CommandError> {
        let Destination::Layout(to) = destination else {
            return Err(COPY_TO.refuse(self.destination).into());
        };
        let _replaced = self.replaced_archive(to)?;
        let report = copy_index(index, to, &self.options(work), work.progress)?;
        let left_out = index.left_out(to);
        Ok(Copied::new(to.shown(), CopyReport::Image(report), left_out))
    }

    /// The platform that the user chose; `None` for all, or that of this machine.
    fn wanted(&self) -> Result<Option<Platform>, CommandError> {
        let named = match self.platform {
            None | Some("all") => return Ok(None),
            Some(text) => text.parse::<Platform>(),
        };
        Ok(Some(named.map_err(ConvertError::from)?))
    }

    fn threads(&self) -> usize {
        self.jobs.unwrap_or(THREADS)
    }

    fn options(&self, work: &Work<'_>) -> RunOptions {
        RunOptions {
            threads: self.threads(),
            cancel: Some(work.interrupt.flag()),
        }
    }

    fn to_file(
        &self,
        file: &CopyFile,
        path: &Path,
        left_out: LeftOut,
        work: &Work<'_>,
    ) -> Result<Copied, CommandError> {
        refuse_same(file, path)?;
        let header = bcow::header_of(&*file.storage);
        let replacement = if header.is_some_and(|header| header.purpose == Use::Image) {
            Replacement::Image
        } else {
            Replacement::Disk
        };
        let _replaced = replace::check(path, replacement, self.force)?;
        let report = copy_file(file, path, &self.options(work), work.progress)?;
        Ok(Copied::file(path.display().to_string(), report, left_out))
    }

    fn to_s3(&self, from: &From, name: &S3Name, work: &Work<'_>) -> Result<Copied, CommandError> {
        let replace = if self.force { Replace::Allowed } else { Replace::Refused };
        let place = ToS3::new(name.clone(), &self.stores.remote, replace)?;
        let (progress, cancel) = (work.progress, work.interrupt.flag());
        let (file, left_out) = match from {
            From::Index(_) => return Err(COPY_TO.refuse(self.destination).into()),
            From::File(file) => (file, LeftOut::default()),
            From::Image(image) => {
                let left_out = image.left_out_of_files()?;
                match image.only_file() {
                    Some(file) => (file, left_out),
                    None => {
                        let sent = place.send_image(image.files(), progress, &cancel)?;
                        return Ok(Copied::new(
                            place.name(),
                            report_sent(image, &sent),
                            left_out,
                        ));
                    }
                }
            }
        };
        if !file.is_checked {
            progress.phase("checking");
            let options = CheckOptions {
                data: true,
                threads: self.threads(),
            };
            let cannot = || format!("cannot read {}", file.name);
            let report = check(Arc::clone(&file.storage), &options).context(cannot)?;
            if let Some(found) = report.findings.first().filter(|_| !report.is_sound()) {
                return Err(CommandError::new(format!("cannot copy {}", file.name))
                    .caused_by_text(format!("{}: {}", found.place, found.message))
                    .hint(format!("`bcow fsck --data {}` lists all damage", file.name)));
            }
        }
        let sent_bytes = place.send(&*file.storage, progress, &cancel)?;
        let report = FileReport::new(&file.merkle_root, file.bytes, sent_bytes);
        Ok(Copied::file(place.name(), report, left_out))
    }

    fn to_layout(
        &self,
        image: &CopyImage,
        to: &LayoutPlace,
        work: &Work<'_>,
    ) -> Result<Copied, CommandError> {
        let _replaced = self.replaced_archive(to)?;
        let to = &LayoutPlace {
            replaces_index: self.force,
            ..to.clone()
        };
        let report = copy_image(image, to, &self.options(work), work.progress)?;
        let left_out = match &to.form {
            LayoutForm::Registry(_) => image.left_out_of_registry(),
            _ => image.left_out().clone(),
        };
        Ok(Copied::new(to.shown(), CopyReport::Image(report), left_out))
    }

    /// Fails if the file in the place of an archive is the source, or may not be replaced.
    fn replaced_archive(&self, to: &LayoutPlace) -> Result<Option<File>, CommandError> {
        let replaced = replace::check_archive(to, self.force)?;
        let same = |path: &Path| path.canonicalize().ok();
        if let NameParts::OciArchive { file, .. } = self.source.parts()
            && same(file).is_some()
            && same(file) == same(&to.path)
        {
            return Err(CommandError::new(format!(
                "cannot write {}: it is the source",
                to.path.display()
            )));
        }
        Ok(replaced)
    }
}

/// The report of an image that was sent to S3; `sent` are the bytes of each file that were sent.
fn report_sent(image: &CopyImage, sent: &[u64]) -> CopyReport {
    let files = image.files().iter().zip(sent);
    CopyReport::Sent {
        merkle_root: as_digest(&Root(image.merkle_root()).to_string()),
        blobs: files
            .map(|((digest, file), sent)| SentFile {
                digest: digest.clone(),
                bytes: file.bytes,
                copied_bytes: *sent,
            })
            .collect(),
    }
}

/// What is copied.
enum From {
    File(CopyFile),
    Image(Box<CopyImage>),
    Index(Box<CopyIndex>),
}

impl From {
    fn image(image: CopyImage) -> Self {
        From::Image(Box::new(image))
    }
}

/// Refuses a file, or an image with a stack, that has another root hash.
fn require_root(from: &From, expected: Root) -> Result<(), CommandError> {
    let (name, found) = match from {
        From::File(file) => (&file.name, file.merkle_root),
        From::Image(image) => (&image.name, image.merkle_root()),
        From::Index(index) => {
            return Err(CommandError::usage(format!(
                "--root-hash is for one image, and {} is an index",
                index.name()
            ))
            .hint("choose one with --platform OS/ARCH"));
        }
    };
    if found == expected.0 {
        Ok(())
    } else {
        Err(CommandError::new(format!("cannot copy {name}"))
            .caused_by_text(format!("its root hash is {}, not {expected}", Root(found))))
    }
}

fn open(
    asked: &Copying<'_>,
    destination: &Destination,
    work: &Work<'_>,
) -> Result<From, CommandError> {
    let platform = asked.wanted()?;
    let is_whole = platform.is_none() && matches!(destination, Destination::Layout(_));
    if asked.platform == Some("all") && !is_whole {
        return Err(CommandError::usage(format!(
            "--platform all copies an index, and {} takes one image",
            asked.destination
        ))
        .hint("copy it to oci:DIR[:REF], oci-archive:FILE[:REF] or docker://HOST/REPO[:TAG]"));
    }
    refuse_what_is_no_file(asked.source)?;
    if let NameParts::Layout { .. } | NameParts::OciArchive { .. } = asked.source.parts()
        && let Some(source) = asked.source.source()
    {
        let (scratch, cancel, progress) = (remote::scratch(), work.interrupt.flag(), work.progress);
        let cancel = Some(&*cancel);
        if is_whole && let Some(index) = CopyIndex::of_layout(&source, &scratch, progress, cancel)?
        {
            return Ok(From::Index(index.into()));
        }
        let platform = platform.as_ref();
        let image = CopyImage::of_layout(&source, platform, &scratch, progress, cancel);
        return Ok(From::image(image?));
    }
    let file = match (asked.source.parts(), asked.source.local()) {
        (NameParts::Url(Url::Registry(image)), _) => {
            let remote = &asked.stores.remote;
            if is_whole
                && let Some((index, place)) = remote::index_in_registry(image, &remote.uncached())?
                && let Some(index) = CopyIndex::of_registry(index, place)?
            {
                return Ok(From::Index(index.into()));
            }
            let platform = platform.as_ref();
            let (image, place) = remote::bcow_in_registry(image, remote, platform)?;
            let image = CopyImage::of_registry(image, place.clone(), &*place, platform);
            return Ok(From::image(image?));
        }
        _ if platform.is_some() => {
            return Err(CommandError::usage(format!(
                "--platform is for an image in a layout or a registry, and not for {}",
                asked.source
            ))
            .hint("leave out --platform"));
        }
        (NameParts::Url(url), _) => {
            let found = remote::open(url, &asked.stores.remote.uncached(), Pinned::AsAsked)?;
            let shown = found.name.to_string();
            let file = CopyFile::new(shown, Arc::clone(&found.storage), true)?;
            return if is_copied_alone(&file, destination)? {
                Ok(From::File(file))
            } else {
                with_files_below(file, &OpenImage::of_remote(found, asked.stores)?)
            };
        }
        (_, None) => return Err(COPY_FROM.refuse(asked.source).into()),
        (_, Some(local)) => {
            let located = store::locate(&local);
            let located = located.map_err(|error| cannot_open(asked.source.shown(), &error))?;
            let shown = asked.source.to_string();
            CopyFile::new(shown, located.file as Arc<dyn Storage>, false)?
        }
    };
    if is_copied_alone(&file, destination)? {
        Ok(From::File(file))
    } else {
        with_files_below(file, &OpenImage::open(asked.source, &[], asked.stores)?)
    }
}

/// Whether the files below a file stay where they are. In S3, an image is useful with them only.
fn is_copied_alone(file: &CopyFile, destination: &Destination) -> Result<bool, CommandError> {
    match destination {
        Destination::File(_) => Ok(true),
        Destination::S3(_) => {
            let options = OpenOptions::default();
            let image = Image::open_storage(Arc::clone(&file.storage), &options);
            let image = image.context(|| format!("cannot read {}", file.name))?;
            let mut backings = image.backings();
            let has_files_below =
                backings.any(|backing| matches!(backing.name, BackingName::Digest(_)));
            if image.header().purpose != Use::Image || !has_files_below {
                return Ok(true);
            }
            // A layer on its own is used with the files that are below it in another place.
            let metadata = image.metadata();
            let metadata = metadata.context(|| format!("cannot read {}", file.name))?;
            Ok(metadata.get("layer").is_some())
        }
        _ => Ok(false),
    }
}

/// A file, and the files that it names by digest, as an image.
fn with_files_below(file: CopyFile, image: &OpenImage) -> Result<From, CommandError> {
    if image.image().header().purpose != Use::Image || !image.chain().is_empty() {
        return Err(CommandError::usage(format!("{} is a disk", file.name))
            .hint("a disk is copied to a file or to s3://BUCKET/KEY"));
    }
    let below = image
        .opened()
        .below
        .iter()
        .map(|below| {
            let is_local = below.storage.identity().is_some();
            let storage = Arc::clone(&below.storage);
            let part = CopyFile::new(below.name.clone(), storage, !is_local)?;
            Ok((below.digest.clone(), part))
        })
        .collect::<Result<Vec<_>, CommandError>>()?;
    Ok(From::image(CopyImage::of_files(file, below)?))
}

/// Refuses to copy a file over itself.
fn refuse_same(file: &CopyFile, path: &Path) -> Result<(), CommandError> {
    let Ok(other) = File::open(path) else {
        return Ok(());
    };
    let own = file.storage.identity();
    if own.is_some() && own == Storage::identity(&other) {
        Err(CommandError::new(format!(
            "cannot write {}: it is {}",
            path.display(),
            file.name
        )))
    } else {
        Ok(())
    }
}
