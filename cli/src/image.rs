//! Opening an image, and finding things in its tree, with messages that name both.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::chain::{ChainFile, Share};
use bcow::format::{FormatError, Use};
use bcow::{Error, Image, OpenOptions};
use bcow_erofs::overlay::TreeForm;
use bcow_erofs::reader::{ErofsError, Filesystem, Inode, Nid, Symlinks};
use bcow_oci::join::{JoinPart, Joined, join, joined_identity};
use bcow_oci::store::{self, Opened, Places, StoreError};
use bcow_oci::{ConvertError, ImageName};
use serde_json::{Map, Value, json};

use crate::disks::{self, OpenChain, Problem};
use crate::error::{CommandError, Context};
use crate::names;
use crate::place::Layout;
use crate::size::Count;
use crate::ui::Ui;

/// Directories in which the layers of an image are looked up, in addition to the layout of the
/// image.
#[derive(Debug, Default, clap::Args)]
pub struct StoreArgs {
    /// Also look for layers in this directory: an OCI layout, or files named by their digest
    /// (repeatable)
    #[arg(long = "store", value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    stores: Vec<PathBuf>,
    /// Also look for backing files in this directory (repeatable)
    #[arg(long = "backing-dir", value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    backing_dirs: Vec<PathBuf>,
    /// Read a disk without a lock, even while another process writes to the disk; reads may be
    /// inconsistent
    #[arg(short = 'U', long)]
    force_share: bool,
}

/// Layers on top of an image.
#[derive(Debug, Default, clap::Args)]
pub struct LayerArgs {
    /// Show the image with this layer on top, which `bcow commit --upper` made (repeatable, lowest
    /// first)
    #[arg(long = "layer", value_name = "LAYER", value_hint = clap::ValueHint::FilePath)]
    pub layers: Vec<PathBuf>,
}

/// Stores for every command, as in PATH.
const STORES: &str = "BCOW_STORE";

impl StoreArgs {
    /// The directories, those of the command line first.
    pub fn directories(&self) -> Result<Vec<PathBuf>, CommandError> {
        let variable = std::env::var_os(STORES).unwrap_or_default();
        let named = std::env::split_paths(&variable).filter(|path| !path.as_os_str().is_empty());
        let directories: Vec<PathBuf> = self.stores.iter().cloned().chain(named).collect();
        require_directories(&directories, "layers")?;
        Ok(directories)
    }

    /// Whether files that may change are locked while they are read.
    pub fn share(&self) -> Share {
        match self.force_share {
            true => Share::Force,
            false => Share::Lock,
        }
    }

    /// The directories in which referenced files may be opened, in addition to the directory of the
    /// file itself.
    pub fn backing_dirs(&self) -> Result<&[PathBuf], CommandError> {
        require_directories(&self.backing_dirs, "backings")?;
        Ok(&self.backing_dirs)
    }
}

/// A spelling mistake would else look like a missing file.
fn require_directories(directories: &[PathBuf], what: &str) -> Result<(), CommandError> {
    for directory in directories {
        let cannot = || format!("cannot look for {what} in {}", directory.display());
        if !std::fs::metadata(directory).context(cannot)?.is_dir() {
            return Err(CommandError::new(cannot()).caused_by_text("it is no directory"));
        }
    }
    Ok(())
}

/// An open image and the name the user gave it.
pub struct OpenImage {
    name: PathBuf,
    opened: Opened,
    /// The files below a disk, the nearest first.
    chain: Vec<ChainFile>,
    /// What is wrong with them.
    problems: Vec<Problem>,
    /// What it is put together of, if it was given with layers; the lowest first.
    parts: Vec<ImagePart>,
}

/// An image that is shown with others as one.
pub struct ImagePart {
    /// The byte of the whole address space where it begins.
    pub start: u64,
    /// The image.
    pub image: OpenImage,
}

impl OpenImage {
    /// Opens the image that the user calls `name`, with everything it is made of.
    pub fn open(name: &Path, stores: &StoreArgs) -> Result<Self, CommandError> {
        OpenImage::open_with(name, stores, &OpenOptions::default())
    }

    /// As [`OpenImage::open`], with a cache and checks of the caller's choice.
    pub fn open_with(
        name: &Path,
        stores: &StoreArgs,
        options: &OpenOptions,
    ) -> Result<Self, CommandError> {
        OpenImage::find(name, &[], stores, options)?.complete()
    }

    /// The image, if nothing is missing of it.
    fn complete(self) -> Result<Self, CommandError> {
        let image = self;
        let name = &image.name;
        if let Some(problem) = image.problems.first() {
            return Err(problem.failure(name));
        }
        match image.opened.require_all() {
            Ok(()) => Ok(image),
            Err(error) => Err(cannot_open(name, &error)),
        }
    }

    /// Opens the image that the user calls `name`, with `layers` on top of it.
    pub fn open_with_layers(
        name: &Path,
        layers: &LayerArgs,
        stores: &StoreArgs,
    ) -> Result<Self, CommandError> {
        OpenImage::open_layered(name, &layers.layers, stores, &OpenOptions::default())
    }

    /// Opens an image with `layers` on top, of which only the tree and the tables are needed: layers
    /// of their stacks that are missing or do not match cause a warning.
    pub fn open_without_content(
        name: &Path,
        layers: &LayerArgs,
        stores: &StoreArgs,
        ui: &Ui,
    ) -> Result<Self, CommandError> {
        let options = OpenOptions::default();
        OpenImage::open_parts(name, &layers.layers, stores, &options, &|image| {
            image.warn_of_problems(ui);
            Ok(image)
        })
    }

    fn warn_of_problems(&self, ui: &Ui) {
        const MOST: usize = 10;
        for problem in self.problems.iter().take(MOST) {
            ui.warning(&problem.text);
        }
        let problems = &self.opened.problems;
        for problem in problems.iter().take(MOST) {
            ui.warning(problem);
        }
        if problems.len() > MOST {
            ui.warning(format_args!(
                "{} more layers are missing or wrong",
                Count((problems.len() - MOST) as u64)
            ));
        }
    }

    /// Opens the image that the user calls `name` with `layers` on top, the lowest first, as one
    /// image.
    pub fn open_layered(
        name: &Path,
        layers: &[PathBuf],
        stores: &StoreArgs,
        options: &OpenOptions,
    ) -> Result<Self, CommandError> {
        OpenImage::open_parts(name, layers, stores, options, &OpenImage::complete)
    }

    /// Opens an image with `layers` on top; `check` judges whether what is missing of each is
    /// needed.
    fn open_parts(
        name: &Path,
        layers: &[PathBuf],
        stores: &StoreArgs,
        options: &OpenOptions,
        check: &dyn Fn(OpenImage) -> Result<OpenImage, CommandError>,
    ) -> Result<Self, CommandError> {
        let base = check(OpenImage::find(name, &[], stores, options)?)?;
        if layers.is_empty() {
            return Ok(base);
        }
        let cannot = |layer: &Path| {
            CommandError::new(format!(
                "cannot put {} on top of {}",
                layer.display(),
                name.display()
            ))
        };
        if base.image().header().purpose != Use::Image {
            return Err(cannot(&layers[0])
                .caused_by_text(format!("{} is a disk, and has no layers", name.display())));
        }
        let mut parts = vec![base];
        for layer in layers {
            // What the layer shows of those below it, it finds there.
            let given: Vec<PathBuf> = parts.iter().flat_map(OpenImage::files).collect();
            let image = check(OpenImage::find(layer, &given, stores, options)?)?;
            let metadata = image.metadata()?;
            let Some(described) = metadata.get("layer") else {
                return Err(cannot(layer)
                    .caused_by_text("it is no layer, but an image of its own")
                    .hint("`bcow commit IMG --upper UPPER LAYER.bcow` makes a layer"));
            };
            let below = identity_of(&parts);
            if let Some(over) = described["over"].as_str()
                && over != hex(&below)
            {
                return Err(cannot(layer)
                    .caused_by_text(format!(
                        "it was made over another image ({}), not over what is below it here ({})",
                        over.chars().take(12).collect::<String>(),
                        &hex(&below)[..12]
                    ))
                    .hint("name the image that it was made over, and the layers between them in order"));
            }
            parts.push(image);
        }
        OpenImage::joined(parts, options)
            .map_err(|error| cannot(&layers[layers.len() - 1]).caused_by(&error))
    }

    fn joined(images: Vec<OpenImage>, options: &OpenOptions) -> Result<Self, ConvertError> {
        let parts: Vec<JoinPart> = images
            .iter()
            .map(|image| JoinPart {
                image: image.image().clone(),
                name: image.name.display().to_string(),
                form: image.form(),
            })
            .collect();
        let mut described = Map::new();
        let over = hex(&identity_of(&images));
        described.insert("commit".into(), json!({ "over": over }));
        if let Ok(metadata) = images[0].metadata()
            && let Some(config) = metadata.get("config")
        {
            described.insert("config".into(), config.clone());
        }
        let Joined { image, starts } = join(&parts, described, options)?;
        let name = images[0].name.clone();
        let path = images[0].opened.path.clone();
        let parts = starts.into_iter().zip(images);
        Ok(OpenImage {
            name,
            opened: Opened {
                image,
                path,
                layers: Vec::new(),
                below: Vec::new(),
                problems: Vec::new(),
            },
            chain: Vec::new(),
            problems: Vec::new(),
            parts: parts
                .map(|(start, image)| ImagePart { start, image })
                .collect(),
        })
    }

    /// What it is put together of, if it was given with layers; the lowest first.
    pub fn parts(&self) -> &[ImagePart] {
        &self.parts
    }

    /// What an upper recognises it by.
    pub fn identity(&self) -> [u8; 32] {
        match &self.parts[..] {
            [] => self.image().identity_hash(),
            parts => {
                let parts: Vec<_> = parts.iter().map(|part| part.image.identity()).collect();
                joined_identity(&parts)
            }
        }
    }

    /// What it says of itself.
    pub fn metadata(&self) -> Result<Value, CommandError> {
        self.image()
            .metadata()
            .context(|| format!("cannot read {}", self.name.display()))
    }

    /// What its file system holds.
    pub fn form(&self) -> TreeForm {
        match self.metadata() {
            Ok(metadata) if metadata.get("layer").is_some() => TreeForm::Layer,
            _ => TreeForm::Whole,
        }
    }

    fn find(
        name: &Path,
        given: &[PathBuf],
        stores: &StoreArgs,
        options: &OpenOptions,
    ) -> Result<Self, CommandError> {
        let begun = std::time::Instant::now();
        let image = OpenImage::look(name, given, stores, options)?;
        image.log(begun);
        Ok(image)
    }

    /// Logs what was opened.
    fn log(&self, begun: std::time::Instant) {
        let header = self.image().header();
        tracing::info!(
            "{}: opened {} in {} ms: an address space of {} bytes, {:?}, {} files below",
            self.name.display(),
            self.opened.path.display(),
            begun.elapsed().as_millis(),
            header.size,
            header.state,
            self.opened.below.len() + self.chain.len()
        );
        tracing::debug!(
            "{}: regions of 2^{} bytes, features {:?}",
            self.name.display(),
            header.region_shift,
            header.features
        );
        for below in &self.opened.below {
            tracing::debug!(
                "{}: {} is {}",
                self.name.display(),
                below.label,
                below.path.display()
            );
        }
        for below in &self.chain {
            let path = below.path.as_ref().map(|path| path.display().to_string());
            tracing::debug!("{}: over {}", self.name.display(), path.unwrap_or_default());
        }
    }

    fn look(
        name: &Path,
        given: &[PathBuf],
        stores: &StoreArgs,
        options: &OpenOptions,
    ) -> Result<Self, CommandError> {
        let directories = stores.directories()?;
        let parsed = parse_name(name)?;
        refuse_what_is_no_file(&parsed)?;
        let name = name.to_owned();
        if let ImageName::File(path) = &parsed
            && disks::is_disk(path)
        {
            let OpenChain {
                image,
                path,
                files,
                problems,
            } = disks::open_chain(&name, path, stores, options)?;
            return Ok(OpenImage {
                name,
                opened: Opened {
                    image,
                    path,
                    layers: Vec::new(),
                    below: Vec::new(),
                    problems: Vec::new(),
                },
                chain: files,
                problems,
                parts: Vec::new(),
            });
        }
        let places = Places {
            stores: &directories,
            named: stores.backing_dirs()?,
            files: given,
        };
        let opened =
            store::open(&parsed, places, options).map_err(|error| cannot_open(&name, &error))?;
        Ok(OpenImage {
            name,
            opened,
            chain: Vec::new(),
            problems: Vec::new(),
            parts: Vec::new(),
        })
    }

    /// The files below a disk that were found, the nearest first; none of an image.
    pub fn chain(&self) -> &[ChainFile] {
        &self.chain
    }

    /// What the user called it.
    pub fn path(&self) -> &Path {
        &self.name
    }

    /// The address space.
    pub fn image(&self) -> &Arc<Image> {
        &self.opened.image
    }

    /// The files it is made of.
    pub fn files(&self) -> Vec<PathBuf> {
        let below = self.opened.below.iter().map(|file| file.path.clone());
        let chain = self.chain.iter().filter_map(|file| file.path.clone());
        let parts = self.parts.iter().flat_map(|part| part.image.files());
        std::iter::once(self.opened.path.clone())
            .chain(below)
            .chain(chain)
            .chain(parts)
            .collect()
    }

    /// Refuses to give another image the name that this one has in its layout.
    pub fn refuse_own_reference(&self, layout: &Layout) -> Result<(), CommandError> {
        let ImageName::Layout {
            directory,
            reference,
        } = parse_name(&self.name)?
        else {
            return Ok(());
        };
        let is_same = match (directory.canonicalize(), layout.path.canonicalize()) {
            (Ok(own), Ok(other)) => own == other,
            _ => false,
        };
        match is_same && reference == layout.reference && reference.is_some() {
            true => Err(CommandError::new(format!(
                "cannot write {}: the new image would take the name of the one that it is made of",
                layout.shown()
            ))
            .hint("give it another name: oci:DIR:REF")),
            false => Ok(()),
        }
    }

    /// Refuses to write to a file that the image is made of: it would be gone.
    pub fn refuse_own_name(&self, path: &Path) -> Result<(), CommandError> {
        let same = |file: &PathBuf| match (file.canonicalize(), path.canonicalize()) {
            (Ok(file), Ok(path)) => file == path,
            _ => false,
        };
        match self.files().iter().any(same) {
            true => Err(
                CommandError::new(format!("cannot write {}", path.display()))
                    .caused_by_text(format!("{} is made of it", self.name.display())),
            ),
            false => Ok(()),
        }
    }

    /// The image with what is known of its layers.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// The file system in it.
    pub fn tree(&self) -> Result<Tree, CommandError> {
        let filesystem = Filesystem::open(self.image().clone())
            .context(|| format!("cannot read the file system in {}", self.name.display()))?;
        Ok(Tree::new(&self.name, filesystem))
    }
}

/// What images are recognised by that are shown as one.
fn identity_of(images: &[OpenImage]) -> [u8; 32] {
    match images {
        [image] => image.identity(),
        images => joined_identity(&images.iter().map(OpenImage::identity).collect::<Vec<_>>()),
    }
}

/// An identity as metadata has it.
pub fn hex(identity: &[u8; 32]) -> String {
    identity.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of an image as the user wrote it.
pub fn parse_name(name: &Path) -> Result<ImageName, CommandError> {
    ImageName::parse(name.as_os_str())
        .map_err(|error| CommandError::usage(error.to_string()).hint(error.hint()))
}

/// Fails with a clear message if there is nothing that could be an image.
pub fn refuse_what_is_no_file(name: &ImageName) -> Result<(), CommandError> {
    let ImageName::File(path) = name else {
        return Ok(());
    };
    let metadata = std::fs::metadata(path).context(|| format!("cannot open {}", path.display()))?;
    if metadata.is_dir() {
        let failure =
            CommandError::new(format!("cannot open {}: it is a directory", path.display()));
        return Err(failure.hint(match path.join("oci-layout").exists() {
            true => format!(
                "it is an OCI image layout: name the image in it as oci:{}[:REF]",
                path.display()
            ),
            false => "`bcow convert` makes an image of a directory (dir:PATH) or of an OCI layout (oci:DIR)"
                .to_owned(),
        }));
    }
    Ok(())
}

/// What to say when the image that the user calls `name` does not open.
pub fn cannot_open(name: &Path, error: &StoreError) -> CommandError {
    let shown = name.display();
    let failure = CommandError::new(format!("cannot open {shown}"));
    let failure = match error {
        StoreError::Open { path, source } => return cannot_open_file(name, path, source),
        StoreError::Layout(inner) => match std::error::Error::source(inner) {
            // An error of the host, whose own text says less than what was being done.
            Some(source) => failure.caused_by_text(format!("{inner}: {source}")),
            None => failure.caused_by(inner),
        },
        other => failure.caused_by(other),
    };
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// The error for a file at `path`, part of the image that the user calls `name`, that does not open
/// as an image.
pub fn cannot_open_file(name: &Path, path: &Path, error: &Error) -> CommandError {
    let failure = CommandError::new(format!("cannot open {}", name.display()));
    let failure = match error {
        // "cannot open at byte 0" would not help the user.
        Error::Io {
            action: "open",
            source,
            ..
        } => failure.caused_by(source),
        _ if name == path => failure.caused_by(error),
        _ => failure.caused_by_text(format!("{}: {error}", path.display())),
    };
    match error {
        Error::Format(FormatError::NotBcow) => match guess(path) {
            Some(hint) => failure.hint(hint),
            None => failure,
        },
        // There is nothing to find in a file that this program does not know.
        Error::Format(FormatError::Version(_) | FormatError::UnknownFeature { .. }) => failure,
        Error::Format(FormatError::Truncated { .. }) => {
            failure.hint("copy it again from where it came, or convert its source again")
        }
        Error::Format(_) | Error::BadBlock { .. } | Error::Merkle { .. } => {
            failure.hint(format!("`bcow fsck {}` lists all damage", name.display()))
        }
        _ => failure,
    }
}

/// What a file seems to be, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Empty,
    /// A tar archive, or something compressed, which may be one.
    Archive,
    Qcow2,
    Erofs,
    Squashfs,
}

/// What the file seems to be. Nothing is done with it for that: a raw disk may begin with anything.
pub fn form(path: &Path) -> Option<Form> {
    let mut start = Vec::new();
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).ok()?;
    File::from(file).take(1028).read_to_end(&mut start).ok()?;
    let has = |offset: usize, magic: &[u8]| {
        start
            .get(offset..)
            .is_some_and(|rest| rest.starts_with(magic))
    };
    match () {
        () if start.is_empty() => Some(Form::Empty),
        () if has(257, b"ustar") || has(0, b"\x1f\x8b") || has(0, b"\x28\xb5\x2f\xfd") => {
            Some(Form::Archive)
        }
        () if has(0, b"QFI\xfb") => Some(Form::Qcow2),
        () if has(1024, b"\xe2\xe1\xf5\xe0") => Some(Form::Erofs),
        () if has(0, b"hsqs") => Some(Form::Squashfs),
        () => None,
    }
}

/// What the file probably is, and what to do with it then.
pub fn guess(path: &Path) -> Option<String> {
    let shown = path.display();
    Some(match form(path)? {
        Form::Empty => "the file is empty".to_owned(),
        Form::Archive => format!(
            "it looks like an archive; `bcow convert tar:{shown} IMAGE.bcow` makes an image of it"
        ),
        Form::Qcow2 => format!(
            "it is a qcow2 image; `bcow convert qcow2:{shown} DISK.bcow` makes a disk of it"
        ),
        Form::Erofs => {
            "it is an EROFS image without BCoW headers; the kernel can mount it".to_owned()
        }
        Form::Squashfs => "it is a squashfs image".to_owned(),
    })
}

/// The file system in an image.
pub struct Tree {
    image: PathBuf,
    filesystem: Filesystem,
}

/// What to do if a path's last component is a symbolic link. Links on the way are followed, always
/// inside the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastLink {
    /// Take what it points to.
    Follow,
    /// Take the link.
    Keep,
}

impl Tree {
    /// The file system in the image that the user calls `image`.
    pub fn new(image: &Path, filesystem: Filesystem) -> Self {
        Tree {
            image: image.to_owned(),
            filesystem,
        }
    }

    /// The file system's reader.
    pub fn filesystem(&self) -> &Filesystem {
        &self.filesystem
    }

    /// What the user called the image.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Reads something; `path` is for the message.
    pub fn read<T>(
        &self,
        path: &[u8],
        read: impl FnOnce(&Filesystem) -> Result<T, ErofsError>,
    ) -> Result<T, CommandError> {
        read(&self.filesystem).context(|| self.cannot_read(path))
    }

    /// The file system's reader, for good.
    pub fn into_filesystem(self) -> Filesystem {
        self.filesystem
    }

    /// The inode that `path` names. Relative paths start at the root.
    pub fn find(&self, path: &[u8], last: LastLink) -> Result<Inode, CommandError> {
        let cannot = |error: ErofsError| self.cannot_look_up(path, &error);
        let nid = match (last, split_last(path)) {
            (LastLink::Keep, Some((parent, name))) => {
                match self
                    .filesystem
                    .resolve_with(parent, Symlinks::Follow)
                    .map_err(cannot)?
                {
                    Some(nid) => {
                        let parent = self.inode(nid, parent)?;
                        self.filesystem
                            .lookup(&parent, name)
                            .map_err(cannot)?
                            .map(|entry| entry.nid)
                    }
                    None => None,
                }
            }
            _ => self
                .filesystem
                .resolve_with(path, Symlinks::Follow)
                .map_err(cannot)?,
        };
        match nid {
            Some(nid) => self.inode(nid, path),
            None => Err(CommandError::new(format!(
                "there is no {} in {}",
                names::quoted(path),
                self.image.display()
            ))),
        }
    }

    fn cannot_look_up(&self, path: &[u8], error: &ErofsError) -> CommandError {
        let failure = CommandError::new(format!(
            "cannot look up {} in {}",
            names::quoted(path),
            self.image.display()
        ));
        match error {
            // The reader knows inodes, the user paths.
            ErofsError::WrongKind { .. } => failure.caused_by_text("a part of it is no directory"),
            _ => failure.caused_by(error),
        }
    }

    /// Reads an inode; `path` is for the message.
    pub fn inode(&self, nid: Nid, path: &[u8]) -> Result<Inode, CommandError> {
        self.read(path, |fs| fs.inode(nid))
    }

    /// "cannot read PATH in IMAGE"
    pub fn cannot_read(&self, path: &[u8]) -> String {
        format!(
            "cannot read {} in {}",
            names::quoted(path),
            self.image.display()
        )
    }
}

/// A path's parent and last component, unless it ends in a slash, `.` or `..` (which follow links
/// anyway) or names the root.
fn split_last(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let (parent, name) = match path.iter().rposition(|&b| b == b'/') {
        Some(slash) => (&path[..=slash], &path[slash + 1..]),
        None => (&b"/"[..], path),
    };
    (!matches!(name, b"" | b"." | b"..")).then_some((parent, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_proper_last_component_is_kept_apart() {
        assert_eq!(split_last(b"/a/b"), Some((&b"/a/"[..], &b"b"[..])));
        assert_eq!(split_last(b"a"), Some((&b"/"[..], &b"a"[..])));
        assert_eq!(split_last(b"/"), None);
        assert_eq!(split_last(b"/a/"), None);
        assert_eq!(split_last(b"/a/.."), None);
        assert_eq!(split_last(b""), None);
    }
}
