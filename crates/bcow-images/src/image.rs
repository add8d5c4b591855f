//! Opening an image, with the files that it needs and layers on top.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::name::{Name, NameParts};
use crate::url::Url;
use bcow::chain::ChainFile;
use bcow::format::{Use, hex};
use bcow::{BlockCache, BlockDevice, Image, OpenOptions, Verify};
use bcow_erofs::overlay::TreeForm;
use bcow_erofs::reader::Filesystem;
use bcow_oci::join::{JoinPart, Joined, join, joined_identity};
use bcow_oci::store::{self, Opened, Places};
use bcow_oci::{Annotations, LayoutForm, LayoutPlace, LeftOut};
use bcow_remote::Root;
use bcow_view::{ViewError, ViewedImage};
use serde_json::{Map, Value, json};

use crate::args::{IMAGE, NameParser};
use crate::disks::{self, Below, Problem, new_file_system_hint};
use crate::error::{CommandError, Context};
use crate::failure::failure;
use crate::given::{Given, OpenFiles};
use crate::remote::{self, Pinned, RemoteImage};
use crate::size::{Count, plural};

pub use crate::stores::{StoreArgs, cannot_open, cannot_open_file, refuse_what_is_no_file};
pub use crate::tree::{LastLink, Tree};

/// Takes the messages of an operation for its user.
pub trait Messages {
    /// Something that the user may want to know, such as the reason of a delay.
    fn status(&self, text: &dyn Display);

    /// A problem that does not end the operation.
    fn warning(&self, text: &dyn Display);

    /// A hint for the warning before it.
    fn hint(&self, text: &str);
}

/// Layers on top of an image.
#[derive(Debug, Default, clap::Args)]
pub struct LayerArgs {
    /// Stack this layer, which `bcow commit --upper` wrote, on top of the image (repeatable, the
    /// lowest first)
    #[arg(long = "layer", value_name = "LAYER", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    pub layers: Vec<Name>,
}

/// An open image, and its name in messages.
pub struct OpenImage {
    name: Name,
    opened: Opened,
    /// The files below a disk, the nearest first.
    chain: Vec<ChainFile>,
    /// Problems with files below a disk.
    problems: Vec<Problem>,
    /// The images that this one shows as one, the lowest first. Empty, unless this image was opened
    /// with layers or as the lowest layers of a stack (`#layers=N`).
    parts: Vec<ImagePart>,
    /// The remote image that was opened.
    remote: Option<RemoteImage>,
}

/// An image that is shown with others as one.
pub struct ImagePart {
    /// The byte of the joined address space at which this image begins.
    pub start: u64,
    pub image: OpenImage,
    /// The form of its file system.
    form: TreeForm,
}

impl OpenImage {
    /// Opens the image that the user calls `name` with `layers` on top, the lowest first, as one
    /// image. A file below one of them that is missing or wrong is an error.
    pub fn open(name: &Name, layers: &[Name], stores: &StoreArgs) -> Result<Self, CommandError> {
        OpenImage::open_with(name, layers, stores, &OpenOptions::default(), None)
    }

    /// As [`OpenImage::open`], with a cache and checks of the caller's choice. The merged metadata
    /// of the layers stays in the file `merged`, for the next call.
    pub fn open_with(
        name: &Name,
        layers: &[Name],
        stores: &StoreArgs,
        options: &OpenOptions,
        merged: Option<&Path>,
    ) -> Result<Self, CommandError> {
        let check = &OpenImage::require_complete;
        OpenImage::open_parts(name, layers, stores, options, merged, check)
    }

    /// As [`OpenImage::open`], for a second image, to which `--root-hash` does not apply.
    pub fn open_second(name: &Name, stores: &StoreArgs) -> Result<Self, CommandError> {
        let options = OpenOptions::default();
        OpenImage::open_pinned(name, &Given::default(), stores, Pinned::Never, &options)?
            .require_complete()
    }

    /// Returns the image, or an error if a file below it is missing or wrong.
    fn require_complete(self) -> Result<Self, CommandError> {
        if let Some(problem) = self.problems.first() {
            return Err(problem.failure(self.path()));
        }
        let complete = self.opened.require_all();
        complete.map_err(|error| cannot_open(self.path(), &error))?;
        Ok(self)
    }

    /// As [`OpenImage::open`], for a caller that needs only the trees and the tables. A file below
    /// the image or below a layer that is missing or wrong causes a warning, not an error.
    pub fn open_without_content(
        name: &Name,
        layers: &[Name],
        stores: &StoreArgs,
        warnings: &dyn Messages,
    ) -> Result<Self, CommandError> {
        let options = OpenOptions::default();
        let check = |image: OpenImage| {
            image.warn_of_problems(warnings);
            Ok(image)
        };
        OpenImage::open_parts(name, layers, stores, &options, None, &check)
    }

    fn warn_of_problems(&self, warnings: &dyn Messages) {
        const MAX_WARNINGS: usize = 10;
        for problem in self.problems.iter().take(MAX_WARNINGS) {
            warnings.warning(&problem.text);
            if let Some(hint) = &problem.hint {
                warnings.hint(hint);
            }
        }
        let problems = &self.opened.problems;
        for problem in problems.iter().take(MAX_WARNINGS) {
            warnings.warning(problem);
        }
        if problems.len() > MAX_WARNINGS {
            warnings.warning(&format_args!(
                "{} more layers are missing or wrong",
                Count((problems.len() - MAX_WARNINGS) as u64)
            ));
        }
    }

    /// Opens an image with `layers` on top. `check` gets each image as it is opened, and decides
    /// whether the problems with files below it are an error.
    fn open_parts(
        name: &Name,
        layers: &[Name],
        stores: &StoreArgs,
        options: &OpenOptions,
        merged: Option<&Path>,
        check: &dyn Fn(OpenImage) -> Result<OpenImage, CommandError>,
    ) -> Result<Self, CommandError> {
        let base = check(OpenImage::open_pinned(
            name,
            &Given::default(),
            stores,
            Pinned::AsAsked,
            options,
        )?)?;
        if layers.is_empty() {
            return Ok(base);
        }
        let cannot =
            |layer: &Name| CommandError::new(format!("cannot put {layer} on top of {name}"));
        if base.image().header().purpose != Use::Image {
            return Err(
                cannot(&layers[0]).caused_by_text(format!("{name} is a disk, and has no layers"))
            );
        }
        let base_name = base.name.clone();
        let mut parts = if base.parts.is_empty() {
            vec![base]
        } else {
            base.parts.into_iter().map(|part| part.image).collect()
        };
        for layer in layers {
            // A layer refers to files of the images below it, which are looked up among these.
            let given = given(&parts);
            let image = check(OpenImage::open_pinned(
                layer,
                &given,
                stores,
                Pinned::Never,
                options,
            )?)?;
            let metadata = image.metadata()?;
            let Some(described) = metadata.get("layer") else {
                return Err(cannot(layer)
                    .caused_by_text("the file is a complete image, not a layer")
                    .hint("`bcow commit IMG --upper UPPER LAYER.bcow` makes a layer"));
            };
            let below = identity_of(parts.iter());
            if let Some(over) = described["over"].as_str()
                && over != hex(&below)
            {
                return Err(cannot(layer)
                    .caused_by_text(format!(
                        "it was made over another image ({}), not over what is below it here ({})",
                        over.chars().take(12).collect::<String>(),
                        &hex(&below)[..12]
                    ))
                    .hint(
                        "name the image that it was made over, and the layers between them in \
                         order",
                    ));
            }
            parts.push(image);
        }
        let top = &layers[layers.len() - 1];
        OpenImage::joined(&base_name, parts, options, merged, &|| cannot(top))
    }

    /// The `count` lowest layers of this stack as an image with this name.
    fn lowest(
        self,
        name: &Name,
        count: usize,
        options: &OpenOptions,
    ) -> Result<Self, CommandError> {
        let layers = &self.opened.layers;
        let cannot = || CommandError::new(format!("cannot open {name}"));
        if count > layers.len() {
            let has = plural(layers.len() as u64, "layer");
            return Err(cannot().caused_by_text(format!("the image has {has}")));
        }
        if count == layers.len() {
            return Ok(self);
        }
        let files = layers[..count].iter().map(|layer| {
            let file = layer.file.as_ref();
            let file = file.ok_or_else(|| match self.opened.require_all() {
                Err(error) => cannot().caused_by(&error),
                Ok(()) => cannot().caused_by_text("a layer is missing"),
            })?;
            let opened = opened_alone(file.image.clone(), file.path.clone());
            // The path of a layer on another machine is its URL.
            let name = Name::parse(file.path.as_os_str());
            let name = name.unwrap_or_else(|_| Name::file(&file.path));
            Ok(OpenImage::of(&name, opened))
        });
        let files = files.collect::<Result<Vec<_>, CommandError>>()?;
        OpenImage::joined(name, files, options, None, &cannot)
    }

    /// Shows `images`, the lowest first, as one image with this name. `cannot` is the error of a
    /// merge that fails. `merged` is as in [`OpenImage::open_with`].
    fn joined(
        name: &Name,
        images: Vec<OpenImage>,
        options: &OpenOptions,
        merged: Option<&Path>,
        cannot: &dyn Fn() -> CommandError,
    ) -> Result<Self, CommandError> {
        let parts = images
            .iter()
            .map(|image| {
                Ok(JoinPart {
                    image: image.image().clone(),
                    name: image.name.display().to_string(),
                    form: image.form()?,
                })
            })
            .collect::<Result<Vec<_>, CommandError>>()?;
        let mut described = Map::new();
        let over = hex(&identity_of(images.iter()));
        described.insert("commit".into(), json!({ "over": over }));
        if let Some(config) = images[0].metadata()?.get("config") {
            described.insert("config".into(), config.clone());
        }
        let Joined { image, starts } =
            join(&parts, described, options, merged).map_err(|error| cannot().caused_by(&error))?;
        let opened = opened_alone(image, images[0].opened.path.clone());
        let mut joined = OpenImage::of(name, opened);
        let forms = parts.into_iter().map(|part| part.form);
        let parts = starts.into_iter().zip(images).zip(forms);
        joined.parts = parts
            .map(|((start, image), form)| ImagePart { start, image, form })
            .collect();
        Ok(joined)
    }

    fn of(name: &Name, opened: Opened) -> Self {
        OpenImage {
            name: name.to_owned(),
            opened,
            chain: Vec::new(),
            problems: Vec::new(),
            parts: Vec::new(),
            remote: None,
        }
    }

    /// The URL that a file may record as the name of this image: see
    /// [`RemoteImage::lasting_url`]. `None` for an image on this machine.
    pub fn lasting_url(&self) -> Option<&str> {
        self.remote.as_ref()?.lasting_url.as_deref()
    }

    /// The remote image that was opened. `None` for images that are shown as one, even if they come
    /// from another machine.
    pub fn remote(&self) -> Option<&RemoteImage> {
        self.remote.as_ref()
    }

    /// The images that this one shows as one, the lowest first. Empty, unless this image was opened
    /// with layers or as the lowest layers of a stack (`#layers=N`).
    pub fn parts(&self) -> &[ImagePart] {
        &self.parts
    }

    /// The layers whose trees this image merges, the lowest first. Empty for a flattened image.
    pub fn merged_layers(&self) -> Vec<Arc<Image>> {
        if self.parts.is_empty() {
            let files = self
                .opened
                .layers
                .iter()
                .filter_map(|layer| layer.file.as_ref());
            return files.map(|file| file.image.clone()).collect();
        }
        let parts = self.parts.iter().map(|part| &part.image);
        let layers = parts.flat_map(|image| match image.merged_layers() {
            none if none.is_empty() => vec![image.image().clone()],
            layers => layers,
        });
        layers.collect()
    }

    /// The identity that an upper records.
    pub fn identity(&self) -> [u8; 32] {
        match &self.parts[..] {
            [] => self.image().identity_hash(),
            parts => identity_of(parts.iter().map(|part| &part.image)),
        }
    }

    /// The metadata of the image.
    pub fn metadata(&self) -> Result<Value, CommandError> {
        self.image()
            .metadata()
            .context(|| format!("cannot read {}", self.name.display()))
    }

    /// The annotations of the image's manifest, and the other parts of the indexes that lead to it.
    /// Empty for an image without a manifest, and for images that are shown as one.
    pub fn annotations(&self) -> Result<(Annotations, LeftOut), CommandError> {
        if !self.parts.is_empty() {
            return Ok(Default::default());
        }
        let found = match &self.remote {
            None => self.name.local().as_ref().map(bcow_oci::annotations_of),
            Some(remote) => remote.manifest.as_ref().map(|manifest| {
                let place = remote.name.display().to_string();
                bcow_oci::annotations(&place, manifest, &remote.from_index)
                    .map(|annotations| (annotations, remote.from_index.left_out.clone()))
            }),
        };
        let found = found.transpose().map_err(|error| failure(&error))?;
        Ok(found.unwrap_or_default())
    }

    /// The form of its file system. Unreadable metadata is an error: the whiteouts of a layer would
    /// be devices in a whole image.
    pub fn form(&self) -> Result<TreeForm, CommandError> {
        Ok(match self.metadata()?.get("layer") {
            Some(_) => TreeForm::Layer,
            None => TreeForm::Whole,
        })
    }

    /// Opens the image that the user calls `name`, and checks its root hash if `pinned` gives one.
    /// The result lists the files below the image that are missing or wrong; only for `#layers=N`
    /// they are an error.
    fn open_pinned(
        name: &Name,
        given: &Given,
        stores: &StoreArgs,
        pinned: Pinned,
        options: &OpenOptions,
    ) -> Result<Self, CommandError> {
        let begun = std::time::Instant::now();
        let mut options = options.clone();
        // A remote image opens only with its root, and each read is verified.
        let root = stores.remote.root_of(pinned);
        let root = root.filter(|_| !name.is_remote());
        if root.is_some() {
            // The root in a header proves nothing unless each read is verified against it.
            options.verify = Verify::Merkle;
        }
        let image = OpenImage::open_any(name, given, stores, pinned, &options)?;
        if let Some(root) = root {
            image.require_root(root)?;
        }
        image.log(begun);
        Ok(image)
    }

    /// Fails if the image has another root hash or none.
    fn require_root(&self, root: Root) -> Result<(), CommandError> {
        let found = self.image().header().merkle.as_ref();
        if found.is_some_and(|tree| tree.root == root.0) {
            Ok(())
        } else {
            Err(
                CommandError::new(format!("cannot open {}", self.name.display())).caused_by_text(
                    format!(
                        "its root hash is {}, not {root}",
                        found.map_or("missing".to_owned(), |tree| Root(tree.root).to_string())
                    ),
                ),
            )
        }
    }

    /// Logs the opened files.
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

    /// Opens an image or a disk, by any form of name. Checks a root hash only for an image on
    /// another machine.
    fn open_any(
        name: &Name,
        given: &Given,
        stores: &StoreArgs,
        pinned: Pinned,
        options: &OpenOptions,
    ) -> Result<Self, CommandError> {
        let directories = stores.directories()?;
        refuse_what_is_no_file(name)?;
        let remote = match name.parts() {
            NameParts::Url(url) => Some((url.clone(), None)),
            NameParts::Lowest { image, count } => {
                Some((Url::Registry(image.clone()), Some(*count)))
            }
            _ => None,
        };
        if let Some((url, lowest)) = remote {
            let remote = remote::open(&url, &stores.remote, pinned)?;
            let image = OpenImage::open_remote(remote, given, stores, options)?;
            return match lowest {
                None => Ok(image),
                Some(count) => image.lowest(name, count, options),
            };
        }
        if pinned == Pinned::AsAsked {
            stores.remote.refuse_unsigned(&name.to_string())?;
        }
        if let Some(path) = name.path()
            && disks::is_disk(path)
        {
            let disk = Below::new(stores, options)?.open_chain(name.shown(), path)?;
            return Ok(OpenImage {
                chain: disk.files,
                problems: disk.problems,
                ..OpenImage::of(name, opened_alone(disk.image, path.to_owned()))
            });
        }
        // Any other name is refused where it is parsed.
        let Some(local) = name.local() else {
            return Err(IMAGE.refuse(name).into());
        };
        let places = Places {
            stores: &directories,
            named: stores.backing_dirs()?,
            files: &given.files,
            remote: given.remote.as_ref(),
        };
        let opened = store::open(&local, places, options)
            .map_err(|error| cannot_open(name.shown(), &error))?;
        Ok(OpenImage::of(name, opened))
    }

    /// Opens a remote image that the caller has already found, with all its layers and backings.
    pub fn of_remote(remote: RemoteImage, stores: &StoreArgs) -> Result<Self, CommandError> {
        OpenImage::open_remote(remote, &Given::default(), stores, &OpenOptions::default())?
            .require_complete()
    }

    fn open_remote(
        remote: RemoteImage,
        given: &Given,
        stores: &StoreArgs,
        options: &OpenOptions,
    ) -> Result<Self, CommandError> {
        let opened = stores.open_remote(&remote, given, options)?;
        let mut image = OpenImage::of(&remote.name, opened);
        image.remote = Some(remote);
        Ok(image)
    }

    /// The files below a disk that were found, the nearest first. Empty for an image.
    pub fn chain(&self) -> &[ChainFile] {
        &self.chain
    }

    /// The name that the user gave.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// The name for messages: without the query of a URL.
    pub fn path(&self) -> &Path {
        self.name.shown()
    }

    /// The block device with the address space of the image.
    pub fn image(&self) -> &Arc<Image> {
        &self.opened.image
    }

    /// The paths of all files of the image. A file on another machine has its name for messages
    /// here.
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

    /// Refuses a layout in which the new image would replace this one.
    pub fn refuse_as_destination(&self, layout: &LayoutPlace) -> Result<(), CommandError> {
        match &layout.form {
            LayoutForm::Directory => self.refuse_own_reference(layout),
            LayoutForm::Archive => self.refuse_own_file(&layout.path),
            LayoutForm::Registry(_) => Ok(()),
        }
    }

    /// Refuses to give another image the name that this one has in its layout.
    fn refuse_own_reference(&self, layout: &LayoutPlace) -> Result<(), CommandError> {
        let NameParts::Layout {
            directory,
            reference,
        } = self.name.parts()
        else {
            return Ok(());
        };
        let is_same = is_same(directory, &layout.path);
        if is_same && *reference == layout.reference && reference.is_some() {
            Err(CommandError::new(format!(
                "cannot write {}: the new image would take the name of the one that it is made of",
                layout.shown()
            ))
            .hint("give it another name: oci:DIR:REF"))
        } else {
            Ok(())
        }
    }

    /// Refuses to write to a file that the image is made of, because that destroys the image.
    pub fn refuse_own_file(&self, path: &Path) -> Result<(), CommandError> {
        if self.files().iter().any(|file| is_same(file, path)) {
            Err(
                CommandError::new(format!("cannot write {}", path.display()))
                    .caused_by_text(format!("{} is made of it", self.name.display())),
            )
        } else {
            Ok(())
        }
    }

    /// The image and its layers.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// The file system in it.
    pub fn tree(&self) -> Result<Tree, CommandError> {
        self.tree_on(self.image().clone())
    }

    /// The file system in it, read through another device with the same bytes.
    pub fn tree_on(&self, device: Arc<dyn BlockDevice>) -> Result<Tree, CommandError> {
        let is_blank = self.image().header().purpose != Use::Image && is_blank(&*device);
        let filesystem = Filesystem::open(device)
            .context(|| format!("cannot read the file system in {}", self.name.display()))
            .map_err(|failure| {
                let hint = || {
                    format!(
                        "it begins with zeros; {}",
                        new_file_system_hint(self.path())
                    )
                };
                failure.hint_if(is_blank.then(hint))
            })?;
        Ok(Tree::new(self.path(), filesystem))
    }
}

/// Whether a device has zeros where file systems and partition tables have their superblocks.
fn is_blank(device: &dyn BlockDevice) -> bool {
    const SUPERBLOCKS: u64 = 128 << 10;
    let mut start = vec![0; device.size().min(SUPERBLOCKS) as usize];
    device.read_at(0, &mut start).is_ok() && start.iter().all(|&byte| byte == 0)
}

impl ViewedImage for OpenImage {
    fn image(&self) -> &Arc<Image> {
        &self.opened.image
    }

    fn identity(&self) -> [u8; 32] {
        OpenImage::identity(self)
    }

    fn name(&self) -> Option<String> {
        Some(self.name.absolute().to_string_lossy().into_owned())
    }

    fn verified(&self) -> Result<Arc<dyn BlockDevice>, ViewError> {
        if self.parts.is_empty() {
            return self.opened.image.verified();
        }
        let cache = BlockCache::new(16 << 20);
        let parts = self.parts.iter().map(|part| {
            let image = Image::verified(part.image.image(), &cache);
            Ok::<_, ViewError>(JoinPart {
                image: image.map_err(ViewError::Image)?,
                name: part.image.name.display().to_string(),
                form: part.form,
            })
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let options = OpenOptions {
            cache,
            ..OpenOptions::default()
        };
        let joined = join(&parts, Map::new(), &options, None);
        Ok(joined
            .map_err(|error| ViewError::Layers(error.into()))?
            .image)
    }
}

/// Whether both paths lead to one file or directory.
fn is_same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// The files of images, for a layer on top of them.
fn given(images: &[OpenImage]) -> Given {
    let mut open = OpenFiles::default();
    for remote in images.iter().filter_map(OpenImage::remote) {
        open.files.push(Arc::clone(&remote.storage));
        open.places.extend(remote.files.clone());
    }
    Given {
        files: images.iter().flat_map(OpenImage::files).collect(),
        remote: if open.files.is_empty() { None } else { Some(Arc::new(open)) },
    }
}

/// An image without layers and without a list of the files below it.
fn opened_alone(image: Arc<Image>, path: PathBuf) -> Opened {
    Opened {
        image,
        path,
        layers: Vec::new(),
        below: Vec::new(),
        problems: Vec::new(),
        height: 1,
    }
}

/// The identity of images that are shown as one.
fn identity_of<'i>(images: impl Iterator<Item = &'i OpenImage>) -> [u8; 32] {
    match &images.map(OpenImage::identity).collect::<Vec<_>>()[..] {
        [only] => *only,
        all => joined_identity(all),
    }
}
