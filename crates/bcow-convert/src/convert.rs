//! `bcow convert`: from the source and the destination to the way between them.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use bcow::format::Use;
use bcow_images::args::{CONVERT_FROM, CONVERT_TO};
use bcow_images::error::{CommandError, Context};
use bcow_images::foreign_format::{self, ForeignFormat};
use bcow_images::image::OpenImage;
use bcow_images::push::Destination;
use bcow_images::remote::{self, InRegistry, Pinned};
use bcow_images::replace::{self, Replacement};
use bcow_images::size::Human;
use bcow_images::{
    Apparent, Content, Name, NameForm, NameParts, Target, Way, apparent, no_way, registry_hint,
    spellings, way,
};
use bcow_oci::trace::MAX_TRACE_BYTES;
use bcow_oci::{
    Attestations, ConvertError, ConvertOptions, ImageIndex, IndexReport, LayoutOptions,
    LayoutPlace, LayoutReport, LeftOut, Platform, Platforms, Prefetch, Report, Source,
    convert_index,
};
use serde::Serialize;

use crate::containerd_cache::{self, CacheReport};
use crate::conversion::Conversion;
use crate::disk::{self, DiskReport};
use crate::options::{Compress, as_digest};
use crate::recode;
use crate::sending::Sending;
use crate::work::Work;

/// The result of a conversion.
#[derive(Debug, Serialize)]
pub struct Converted {
    /// The name of what was written.
    #[serde(skip)]
    pub name: String,
    /// What was written.
    #[serde(flatten)]
    pub report: ConvertReport,
}

/// What a conversion wrote.
#[derive(Debug, Serialize)]
#[serde(tag = "schema")]
pub enum ConvertReport {
    /// An image in one file.
    #[serde(rename = "bcow.convert/1")]
    Image(Box<Report>),
    /// An image in layers.
    #[serde(rename = "bcow.convert-layout/1")]
    Layout(Box<LayoutReport>),
    /// A disk.
    #[serde(rename = "bcow.convert-disk/1")]
    Disk(DiskReport),
    /// Images in layers, for several platforms.
    #[serde(rename = "bcow.convert-index/1")]
    Index(Box<IndexReport>),
    /// Layers for containerd.
    #[serde(rename = "bcow.convert-containerd-cache/1")]
    ContainerdCache(CacheReport),
}

impl ConvertReport {
    /// The parts of the source that the new image does not have.
    pub fn left_out(&self) -> Option<&LeftOut> {
        match self {
            ConvertReport::Image(report) => Some(&report.left_out),
            ConvertReport::Layout(report) => Some(&report.left_out),
            ConvertReport::Index(report) => Some(&report.left_out),
            ConvertReport::Disk(_) | ConvertReport::ContainerdCache(_) => None,
        }
    }
}

impl Conversion<'_> {
    /// Converts.
    pub fn run(&self, work: &Work<'_>) -> Result<Converted, CommandError> {
        refuse_destination_options(self)?;
        let remote = &self.stores.remote;
        let destination = Destination::of(self.destination, &CONVERT_TO, remote, self.source)?;
        let (destination, sending) = match destination {
            Destination::S3(name) => {
                let sending = Sending::new(name, self)?;
                (sending.destination(self.layers), Some(sending))
            }
            Destination::Layout(to) => {
                let to = LayoutPlace {
                    replaces_index: self.force,
                    ..to
                };
                (Destination::Layout(to), None)
            }
            destination => (destination, None),
        };
        let mut platform = None;
        match self.platform.map(str::parse::<Platforms>).transpose() {
            Err(error) => return Err(ConvertError::from(error).into()),
            Ok(None) => {}
            Ok(Some(Platforms::Named(named))) if named.len() == 1 => {
                platform = named.into_iter().next();
            }
            Ok(Some(several)) => {
                if let Some(converted) = self.several(&several, &destination, work)? {
                    return Ok(converted);
                }
            }
        }
        // The source is opened before the destination is examined, so an error of the source comes
        // first.
        let source = open(self, platform.as_ref())?;
        let way = self.way(&source)?;
        refuse_options(self, way, Images::One)?;
        let is_plain = self.plain || way == Way::SplitForContainerd;
        self.refuse_compressed(is_plain)?;
        let sending = sending.as_ref();
        if way == Way::Disk {
            let image = match source {
                Opened::Image(image) => Some(*image),
                _ => None,
            };
            return Ok(Converted {
                name: self.destination.to_string(),
                report: ConvertReport::Disk(disk::convert(
                    self,
                    &destination,
                    image,
                    sending,
                    work,
                )?),
            });
        }
        let _replaced = match &destination {
            Destination::File(path) => replace::check(path, Replacement::Image, self.force)?,
            Destination::Layout(to) => replace::check_archive(to, self.force)?,
            _ => None,
        };
        let options = &self.options(platform, is_plain, work)?;
        match (destination, source) {
            (Destination::File(path), source) => {
                self.to_file(&source, &path, options, sending, work)
            }
            (Destination::Layout(to), source) => {
                self.to_layout(&source, &to, options, sending, work)
            }
            (Destination::ContainerdCache(to), Opened::Files(source)) => {
                let (cache, progress) = (self.cache, work.progress);
                let report = containerd_cache::convert(&source, &to, cache, options, progress)?;
                Ok(Converted {
                    name: format!("containerd-cache:{}", to.display()),
                    report: ConvertReport::ContainerdCache(report),
                })
            }
            (_, source) => Err(self.no_way(&source)),
        }
    }

    /// Converts the images of an index for several platforms; `None` if the source is one image,
    /// which is all that it has.
    fn several(
        &self,
        platforms: &Platforms,
        destination: &Destination,
        work: &Work<'_>,
    ) -> Result<Option<Converted>, CommandError> {
        let (source, asked) = (self.source, self.platform.unwrap_or_default());
        let refused = |what: String| CommandError::usage(format!("--platform {asked} {what}"));
        let (Destination::Layout(to), false) =
            (destination, self.destination.form() == NameForm::S3)
        else {
            let what = format!("makes an image in layers, and not {}", self.destination);
            return Err(refused(what).hint(
                "write to oci:DIR[:REF], oci-archive:FILE[:REF] or docker://HOST/REPO[:TAG], or \
                 choose one platform",
            ));
        };
        if self.stores.remote.root_hash.is_some() {
            return Err(
                refused("is not for one image, which --root-hash names".to_owned())
                    .hint("docker://...@sha256:DIGEST names an index by its content"),
            );
        }
        if self.referrer {
            return Err(refused("is not for --referrer".to_owned())
                .hint("attach the image of each platform by itself: --platform OS/ARCH"));
        }
        let index = match (source.registry(), source.source()) {
            (Some(reference), _) => {
                let found = remote::index_in_registry(reference, &self.stores.remote)?;
                found.map(|(index, _)| index)
            }
            (None, Some(source @ (Source::Oci { .. } | Source::OciArchive { .. }))) => {
                require_there(self.source)?;
                let cancel = work.interrupt.flag();
                let scratch = remote::scratch();
                ImageIndex::of_layout(&source, &scratch, work.progress, Some(&cancel))?
            }
            _ => {
                let what = format!("is for an image of several platforms, and not for {source}");
                return Err(refused(what).hint(
                    "such images are in oci:DIR[:REF], oci-archive:FILE[:REF] and \
                     docker://HOST/REPO[:TAG]",
                ));
            }
        };
        let Some(index) = index else {
            return match platforms {
                Platforms::All => Ok(None),
                Platforms::Named(_) => {
                    Err(refused(format!("is for an index, and {source} is not"))
                        .hint("leave out --platform, or name one platform"))
                }
            };
        };
        refuse_options(self, Way::Split, Images::Several)?;
        self.refuse_compressed(self.plain)?;
        let _replaced = replace::check_archive(to, self.force)?;
        let layout = self.layout_options(to);
        let options = &self.options(None, self.plain, work)?;
        let attestations = self.attestations.unwrap_or(Attestations::Keep);
        let progress = work.progress;
        let report = convert_index(&index, platforms, attestations, &layout, options, progress)?;
        Ok(Some(Converted {
            name: to.shown(),
            report: ConvertReport::Index(report.into()),
        }))
    }

    /// The way from the source to the destination.
    fn way(&self, source: &Opened) -> Result<Way, CommandError> {
        let way = way(source.content(), self.target());
        if way != Way::None || self.source.form() == NameForm::Layout {
            require_there(self.source)?;
        }
        if way == Way::None { Err(self.no_way(source)) } else { Ok(way) }
    }

    fn target(&self) -> Target {
        match self.destination.form() {
            NameForm::Layout | NameForm::OciArchive | NameForm::Registry => Target::Layers,
            NameForm::S3 if self.layers => Target::Layers,
            NameForm::ContainerdCache => Target::ContainerdCache,
            NameForm::Raw | NameForm::Qcow2 => Target::Foreign,
            _ if self.as_layer => Target::Layer,
            _ => Target::File,
        }
    }

    fn refuse_compressed(&self, is_plain: bool) -> Result<(), CommandError> {
        if is_plain && matches!(self.encoding.compress, Some(Compress::Zstd { .. })) {
            return Err(CommandError::usage("a plain image is not compressed")
                .hint("leave out --plain or --compress"));
        }
        Ok(())
    }

    fn layout_options(&self, to: &LayoutPlace) -> LayoutOptions {
        LayoutOptions {
            place: to.clone(),
            is_referrer: self.referrer,
            cache: self.cache.map(Path::to_owned),
            dedup_lower: self.dedup_lower,
        }
    }

    fn no_way(&self, source: &Opened) -> CommandError {
        no_way(
            source.content(),
            self.target(),
            self.source,
            self.destination,
        )
        .into()
    }

    fn options(
        &self,
        platform: Option<Platform>,
        is_plain: bool,
        work: &Work<'_>,
    ) -> Result<ConvertOptions, CommandError> {
        Ok(ConvertOptions {
            platform,
            plain: is_plain,
            allow_truncated: self.allow_truncated,
            as_files: self.as_files,
            limits: self.limits.clone(),
            prefetch: self.prefetch.map(read_trace).transpose()?,
            ..self.encoding.convert_options(work)?
        })
    }

    fn to_file(
        &self,
        source: &Opened,
        path: &Path,
        options: &ConvertOptions,
        sending: Option<&Sending>,
        work: &Work<'_>,
    ) -> Result<Converted, CommandError> {
        let mut report = match source {
            Opened::Image(image) => recode::to_file(image, path, options, work.progress)?,
            Opened::Files(source) => {
                let convert =
                    if self.as_layer { bcow_oci::convert_layer } else { bcow_oci::convert };
                convert(source, path, options, work.progress)?
            }
            Opened::ForeignDisk => return Err(self.no_way(source)),
        };
        if let Some(sending) = sending {
            sending.send_file(path, work)?;
        }
        report.merkle_root = as_digest(&report.merkle_root);
        Ok(Converted {
            name: match sending {
                Some(sending) => sending.place.name(),
                None => path.display().to_string(),
            },
            report: ConvertReport::Image(report.into()),
        })
    }

    fn to_layout(
        &self,
        source: &Opened,
        to: &LayoutPlace,
        options: &ConvertOptions,
        sending: Option<&Sending>,
        work: &Work<'_>,
    ) -> Result<Converted, CommandError> {
        let layout = self.layout_options(to);
        let progress = work.progress;
        let mut report = match source {
            Opened::Image(image) => recode::to_layout(image, &layout, options, progress)?,
            Opened::Files(source) => {
                bcow_oci::convert_to_layout(source, &layout, options, progress)?
            }
            Opened::ForeignDisk => return Err(self.no_way(source)),
        };
        let name = match sending {
            Some(sending) => {
                report.left_out.annotations = sending.send_layout(to, work)?.annotations;
                sending.place.name()
            }
            None => to.shown(),
        };
        report.stack.merkle_root = as_digest(&report.stack.merkle_root);
        Ok(Converted {
            name,
            report: ConvertReport::Layout(report.into()),
        })
    }
}

/// An open source.
enum Opened {
    /// An image or a disk in BCoW form.
    Image(Box<OpenImage>),
    /// An ordinary image, an archive or a directory, not opened yet.
    Files(Box<Source>),
    /// A disk in another form, not opened yet.
    ForeignDisk,
}

impl Opened {
    fn content(&self) -> Content {
        match self {
            Opened::Image(image) if image.image().header().purpose == Use::Image => Content::Image,
            Opened::Image(_) | Opened::ForeignDisk => Content::Disk,
            Opened::Files(source) => match **source {
                Source::Tar(_) | Source::Archive(_) => Content::Archive,
                Source::Directory(_) => Content::Directory,
                _ => Content::Ordinary,
            },
        }
    }
}

/// Opens the source. An image in a registry may be an ordinary one.
fn open(asked: &Conversion<'_>, platform: Option<&Platform>) -> Result<Opened, CommandError> {
    let (name, stores) = (asked.source, asked.stores);
    match (apparent(name), name.registry()) {
        (Apparent::Bcow, None) => {
            require_there(name)?;
            Ok(Opened::Image(OpenImage::open(name, &[], stores)?.into()))
        }
        (Apparent::Bcow, Some(reference)) => {
            let remote = &stores.remote;
            match remote::find_in_registry(reference, remote, Pinned::AsAsked, platform)? {
                InRegistry::Bcow(image) => {
                    Ok(Opened::Image(OpenImage::of_remote(image, stores)?.into()))
                }
                InRegistry::Ordinary(_) if remote.root_hash.is_some() => Err(CommandError::usage(
                    format!("--root-hash is for BCoW images, and {name} is an ordinary image"),
                )
                .hint("docker://...@sha256:DIGEST names an ordinary image by its content")),
                InRegistry::Ordinary(image) => Ok(Opened::Files(Source::Registry(image).into())),
            }
        }
        (Apparent::Files(source), _) => Ok(Opened::Files(source)),
        (Apparent::ForeignDisk, _) => Ok(Opened::ForeignDisk),
        (Apparent::NoForm, _) => Err(missing_transport(name)),
    }
}

/// Refuses options that the form of the destination excludes.
fn refuse_destination_options(asked: &Conversion<'_>) -> Result<(), CommandError> {
    let (form, destination) = (asked.destination.form(), asked.destination);
    let refused = |what: &str| CommandError::usage(format!("{what}, and not for {destination}"));
    if asked.layers && form != NameForm::S3 {
        return Err(refused("--layers is only for s3://BUCKET/KEY")
            .hint("oci:, oci-archive: and docker: always have one file per layer"));
    }
    if asked.as_layer && !matches!(form, NameForm::File | NameForm::Bcow) {
        return Err(refused("--as-layer is only for a file")
            .hint("oci:, oci-archive: and docker: always have one file per layer"));
    }
    if asked.referrer && form != NameForm::Registry {
        return Err(refused("--referrer is only for an image in a registry")
            .hint("write to docker://HOST/REPO, the repository of the ordinary image"));
    }
    if asked.writable && form == NameForm::S3 {
        return Err(refused("--writable is only for a file")
            .hint("make a disk over a sealed one: `bcow create -b s3://BUCKET/KEY NEW.bcow`"));
    }
    Ok(())
}

/// The images that a conversion makes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Images {
    One,
    /// An index, with one for each platform.
    Several,
}

/// Refuses options that do not apply to a way.
fn refuse_options(asked: &Conversion<'_>, way: Way, images: Images) -> Result<(), CommandError> {
    let (source, destination) = (asked.source, asked.destination);
    let is_image = way != Way::Disk;
    let is_recoded = matches!(way, Way::Recode | Way::RecodeLayers);
    // Of an image in a registry, --platform has selected one of several.
    let has_platforms = matches!(way, Way::Flatten | Way::Split | Way::SplitForContainerd)
        || (is_recoded && source.form() == NameForm::Registry);
    let to_layout = matches!(way, Way::Split | Way::RecodeLayers);
    let to_layers = to_layout || way == Way::SplitForContainerd;
    // A layer has no prefetch list.
    let has_list = is_recoded || matches!(way, Way::Flatten | Way::Split);
    let platform = asked.platform.is_some();
    // The option, whether it is given, whether it applies, and what it applies to.
    let rules = [
        ("--platform", platform, has_platforms, "ordinary images"),
        (
            "--attestations",
            asked.attestations.is_some(),
            images == Images::Several,
            "an index (--platform all)",
        ),
        ("--writable", asked.writable, !is_image, "disks"),
        ("--cache", asked.cache.is_some(), to_layers, "layers"),
        (
            "--dedup-lower",
            asked.dedup_lower,
            to_layout,
            "layers in an OCI layout",
        ),
        ("--prefetch", asked.prefetch.is_some(), has_list, "images"),
        ("--plain", asked.plain, is_image, "images"),
        (
            "--allow-truncated",
            asked.allow_truncated,
            is_image,
            "images",
        ),
        ("--as-files", asked.as_files, is_image, "images"),
    ];
    for (option, is_given, applies, only) in rules {
        if is_given && !applies {
            return Err(CommandError::usage(format!(
                "{option} is only for {only}, and not for {source} to {destination}"
            ))
            .hint(format!(
                "leave out {option}; `bcow help convert` says what it is for"
            )));
        }
    }
    Ok(())
}

/// Fails if the file or directory of a source is missing.
fn require_there(source: &Name) -> Result<(), CommandError> {
    let path = match source.parts() {
        NameParts::File(path) if path == Path::new("-") => return Ok(()),
        NameParts::Layout {
            directory: path, ..
        }
        | NameParts::OciArchive { file: path, .. }
        | NameParts::DockerArchive { file: path, .. }
        | NameParts::Tar(Some(path))
        | NameParts::Directory(path)
        | NameParts::Raw(path)
        | NameParts::Qcow2(path)
        | NameParts::File(path)
        | NameParts::Bcow(path) => path,
        _ => return Ok(()),
    };
    match std::fs::metadata(path) {
        Err(error) => Err(missing(source, &error)),
        Ok(_) => Ok(()),
    }
}

fn missing(source: &Name, error: &std::io::Error) -> CommandError {
    let failure = CommandError::new(format!("cannot open {source}")).caused_by(error);
    failure.hint(match source.form() {
        NameForm::File => registry_hint(source.shown())
            .unwrap_or_else(|| format!("sources are {}", spellings(CONVERT_FROM.forms))),
        _ => "`bcow help convert` lists the forms of sources".to_owned(),
    })
}

/// Reads a trace of `bcow mount --record`.
fn read_trace(path: &Path) -> Result<Prefetch, CommandError> {
    let cannot = || format!("cannot read {}", path.display());
    let mut text = Vec::new();
    let file = File::open(path).context(cannot)?;
    let limit = MAX_TRACE_BYTES + 1;
    file.take(limit).read_to_end(&mut text).context(cannot)?;
    if text.len() as u64 == limit {
        return Err(CommandError::new(cannot())
            .caused_by_text(format!("it is longer than {}", Human(MAX_TRACE_BYTES))));
    }
    Prefetch::parse(&text).context(cannot)
}

/// The error for a source without a transport. The guess of the form is only for the hint.
fn missing_transport(source: &Name) -> CommandError {
    let path = source.shown();
    let text = path.display();
    let meant = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            if path.join("oci-layout").is_file() {
                format!("oci:{text}")
            } else {
                format!("dir:{text}, or oci:{text} for an OCI layout")
            }
        }
        Ok(_) => match foreign_format::detect(path) {
            Some(ForeignFormat::Qcow2) => format!("qcow2:{text}"),
            Some(ForeignFormat::OtherDisk(format)) => {
                return CommandError::usage(format!("invalid source \"{text}\": a {format} disk"))
                    .hint(foreign_format::other_disk_hint(format, path));
            }
            _ => format!("raw:{text}"),
        },
        Err(error) => return missing(source, &error),
    };
    CommandError::usage(format!("invalid source \"{text}\": missing transport"))
        .hint(format!("did you mean {meant}?"))
}
