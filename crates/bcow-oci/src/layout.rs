//! OCI image layouts: reads the manifest and the configuration of an image.

mod choose;
pub(crate) mod write;

use std::collections::HashSet;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::archive::Files;
pub(crate) use crate::archive::blob_path;
use crate::blob::{Blob, read_error};
use crate::digest::{DiffId, Digest};
use crate::error::{
    ConvertError, LimitKind, TarPlace, check_equal, check_limit, check_size, parse_digest,
};
use crate::image::{Image, ImageConfig, layer_name};
use crate::layer::LayerInput;
use crate::left_out::{Annotations, FULL_NAME, FromIndex, LeftOut, NAME};
use crate::name::LocalImage;
use crate::null::null_as_absent;
use crate::platform::Platform;
use choose::{Chosen, choose};

pub(crate) use choose::{Candidate, Form, Manifests, named, nearest};

/// Largest size of an index or manifest.
const MAX_MANIFEST_BYTES: u64 = 4 << 20;
/// Largest size of an image configuration, which can have a long history.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Largest depth of nested indexes. Usual images have one or two levels.
const MAX_INDEX_DEPTH: u64 = 4;
/// Largest number of manifests among which an image is selected.
const MAX_MANIFESTS: u64 = 1000;
/// Largest number of layers of one image. Container engines stop at about 127.
const MAX_LAYERS: u64 = 4096;

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// The media types of configurations. The last four are those of old images: registries and tools
/// have stored other types than that of the document, and the document is read anyway.
const CONFIGS: [&str; 6] = [
    OCI_CONFIG,
    "application/vnd.docker.container.image.v1+json",
    "application/octet-stream",
    "application/json",
    "text/html",
    "",
];
const LAYERS: [&str; 11] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
];
/// The artifact type in the manifest of an image in BCoW form.
pub(crate) const IMAGE: &str = "application/vnd.bcow.image.v1";
/// A BCoW file of one layer.
pub(crate) const LAYER: &str = "application/vnd.bcow.layer.v1";
/// A BCoW file that merges an image's layers into one tree; the last of the manifest's layers.
pub(crate) const STACK: &str = "application/vnd.bcow.stack.v1";
/// The annotation for the root of a BCoW file's Merkle tree, in hexadecimal.
pub(crate) const MERKLE_ROOT: &str = "io.bcow.merkle-root";

#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Descriptor {
    #[serde(rename = "mediaType", default, deserialize_with = "null_as_absent")]
    pub media_type: String,
    pub digest: String,
    pub size: u64,
    #[serde(default)]
    pub annotations: Option<Annotations>,
    #[serde(default)]
    pub platform: Option<Platform>,
    #[serde(default)]
    pub urls: Option<Vec<String>>,
    #[serde(rename = "artifactType", default)]
    pub artifact_type: Option<String>,
}

#[derive(Debug, Deserialize)]
struct IndexDocument {
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    annotations: Option<Annotations>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ManifestDocument {
    #[serde(rename = "mediaType", default)]
    media_type: Option<String>,
    pub config: Descriptor,
    #[serde(default, deserialize_with = "null_as_absent")]
    pub layers: Vec<Descriptor>,
    #[serde(default)]
    annotations: Option<Annotations>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct LayoutDocument {
    image_layout_version: String,
}

/// Whether the files are an image layout.
pub(crate) fn is_layout(files: &Files) -> Result<bool, ConvertError> {
    Ok(files.open("oci-layout")?.is_some())
}

/// The manifest of an image in BCoW form.
pub(crate) struct BcowManifest {
    pub bytes: Vec<u8>,
    /// Digest and length of the image's stack.
    pub stack: (Digest, u64),
    /// What its indexes have beside it.
    pub from_index: FromIndex,
}

/// Finds the image in BCoW form with the name or digest `reference`, for `platform` or for that of
/// this machine.
pub(crate) fn find_bcow(
    files: &Files,
    reference: Option<&str>,
    platform: Option<&Platform>,
) -> Result<BcowManifest, ConvertError> {
    let chosen = choose(files, reference, platform, Form::Bcow)?;
    let (_, place, bytes, manifest) = read_manifest(files, &chosen.descriptor)?;
    let Some(stack) = stack_of(&place, &manifest.layers)? else {
        return Err(ConvertError::refused(
            format!("{place} in {} is an ordinary OCI image", files.name()),
            "`bcow convert` makes a BCoW image of it; `skopeo copy` copies ordinary images",
        ));
    };
    Ok(BcowManifest {
        stack: (digest(files, &stack.digest)?, stack.size),
        bytes,
        from_index: chosen.from_index,
    })
}

/// The stack among the layers of a manifest, which is called `place` in messages.
pub(crate) fn stack_of<'d>(
    place: &str,
    layers: &'d [Descriptor],
) -> Result<Option<&'d Descriptor>, ConvertError> {
    let mut stacks = layers.iter().filter(|layer| layer.media_type == STACK);
    match (stacks.next(), stacks.next()) {
        (_, Some(_)) => Err(ConvertError::layout(place, "it has several stacks")),
        (stack, None) => Ok(stack),
    }
}

/// Reads the image of a manifest in an index. The blobs of the image are in `files`.
pub(crate) fn of_index(files: &Files, manifest: &Candidate) -> Result<Image, ConvertError> {
    let descriptor = &manifest.descriptor;
    let (digest, _, bytes, _) = read_manifest(files, descriptor)?;
    let from_index = manifest.described();
    of_manifest(
        files,
        digest,
        &bytes,
        descriptor.platform.clone(),
        &from_index,
        None,
    )
}

/// Reads the image of a manifest. The blobs of the image are in `files`. `of_index` is the platform
/// in the index that names the manifest, and `from_index` is what else the indexes
/// have.
pub(crate) fn of_manifest(
    files: &Files,
    digest: Digest,
    bytes: &[u8],
    of_index: Option<Platform>,
    from_index: &FromIndex,
    wanted: Option<&Platform>,
) -> Result<Image, ConvertError> {
    let place = format!("manifest {}", digest.short());
    let manifest: ManifestDocument = parse(&format!("{place} in {}", files.name()), bytes)?;
    let media_type = manifest.media_type.clone();
    let media_type = media_type.unwrap_or_else(|| OCI_MANIFEST.to_owned());
    let mut image = load(files, digest, &place, manifest, of_index, from_index)?;
    image.manifest_form = Some((media_type, bytes.len() as u64));
    check_platform(&files.name(), image.platform.as_ref(), wanted)?;
    Ok(image)
}

/// The annotations of the image in BCoW form that `name` means, and the other parts of its indexes.
/// A file has none.
pub fn annotations_of(name: &LocalImage) -> Result<(Annotations, LeftOut), ConvertError> {
    let LocalImage::Layout {
        directory,
        reference,
    } = name
    else {
        return Ok(Default::default());
    };
    let files = Files::directory(directory)?;
    let found = find_bcow(&files, reference.as_deref(), None)?;
    let annotations = annotations(&files.name(), &found.bytes, &found.from_index)?;
    Ok((annotations, found.from_index.left_out))
}

/// The annotations of the image with this manifest. `place` is its name in messages.
pub fn annotations(
    place: &str,
    manifest: &[u8],
    from_index: &FromIndex,
) -> Result<Annotations, ConvertError> {
    let manifest: ManifestDocument = parse(place, manifest)?;
    Ok(from_index.with(manifest.annotations))
}

/// The configuration that a manifest names.
pub(crate) fn config_bytes(
    files: &Files,
    descriptor: &Descriptor,
) -> Result<Vec<u8>, ConvertError> {
    Ok(document(files, "config", descriptor, MAX_CONFIG_BYTES)?.1)
}

pub(crate) fn check_layer_count(place: &str, count: usize) -> Result<(), ConvertError> {
    check_limit(LimitKind::Layers, count as u64, MAX_LAYERS)
        .map_err(|exceeded| exceeded.at(TarPlace::layer(place)))
}

/// The root hash in the annotations of the descriptor of a BCoW file.
pub(crate) fn merkle_root(
    place: &str,
    file: &Descriptor,
) -> Result<Option<[u8; 32]>, ConvertError> {
    let Some(hex) = file.annotation(MERKLE_ROOT) else {
        return Ok(None);
    };
    let digest = format!("sha256:{hex}").parse::<Digest>().ok();
    match digest.and_then(|digest| digest.sha256()) {
        Some(root) => Ok(Some(root)),
        None => Err(ConvertError::layout(
            place,
            "the root hash of one of its files is invalid",
        )),
    }
}

/// Whether a media type is that of a manifest or an index that this crate reads.
pub(crate) fn is_manifest_or_index(media_type: &str) -> bool {
    [OCI_INDEX, OCI_MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST].contains(&media_type)
}

/// Finds the image with the name or digest `reference` for `platform`.
pub(crate) fn find(
    files: &Files,
    reference: Option<&str>,
    platform: Option<&Platform>,
) -> Result<Image, ConvertError> {
    let Chosen {
        name,
        descriptor,
        from_index,
    } = choose(files, reference, platform, Form::Any)?;
    let of_index = descriptor.platform.clone();
    let (digest, place, _, manifest) = read_manifest(files, &descriptor)?;
    let mut image = load(files, digest, &place, manifest, of_index, &from_index)?;
    image.manifest_form = Some((descriptor.media_type, descriptor.size));
    image.reference = name;
    check_platform(&files.name(), image.platform.as_ref(), platform)?;
    Ok(image)
}

/// Fails if the image in `place` does not run on the wanted platform.
pub(crate) fn check_platform(
    place: &str,
    found: Option<&Platform>,
    wanted: Option<&Platform>,
) -> Result<(), ConvertError> {
    match (wanted, found) {
        (Some(wanted), Some(found)) if !wanted.suits(found) => {
            let available = [found.to_string()];
            Err(ConvertError::no_platform(place.into(), wanted, &available))
        }
        _ => Ok(()),
    }
}

/// Calls `each` with the manifests in the index of the layout in `directory`; with none if there is
/// no layout. It leaves out a manifest that cannot be read, or that does not match its digest.
pub(crate) fn manifests_in(
    directory: &Path,
    mut each: impl FnMut(Vec<u8>),
) -> Result<(), ConvertError> {
    if !directory.join("index.json").exists() {
        return Ok(());
    }
    let files = Files::directory(directory)?;
    let index: IndexDocument = match files.document("index.json", MAX_MANIFEST_BYTES)? {
        Some(bytes) => parse(&in_files(&files, "index.json"), &bytes)?,
        None => return Ok(()),
    };
    let (indexes, mut images): (Vec<_>, Vec<_>) = index
        .manifests
        .unwrap_or_default()
        .into_iter()
        .partition(Descriptor::is_index);
    for index in indexes {
        let listed = Manifests::of(&files, vec![index], None);
        let listed = listed.map_or(Vec::new(), |manifests| manifests.images);
        images.extend(listed.into_iter().map(|listed| listed.descriptor));
    }
    let mut seen = HashSet::new();
    images
        .iter()
        .filter(|d| d.media_type == OCI_MANIFEST && seen.insert(&d.digest))
        .take(MAX_MANIFESTS as usize)
        .filter_map(|d| manifest_bytes(&files, "manifest", d).ok())
        .for_each(|(_, bytes)| each(bytes));
    Ok(())
}

pub(crate) fn check_version(files: &Files) -> Result<(), ConvertError> {
    let Some(bytes) = files.document("oci-layout", 4096)? else {
        let missing = "it has no file oci-layout";
        return Err(match files {
            Files::Archive(_) if files.open("manifest.json")?.is_some() => {
                let other = "for the output of `docker save`, use docker-archive:";
                no_layout(files, &format!("{missing}; {other}"))
            }
            Files::Archive(_) => {
                let other = "for a root file system in an archive, use tar:";
                no_layout(files, &format!("{missing}; {other}"))
            }
            _ => no_layout(files, missing),
        });
    };
    let layout: LayoutDocument = parse(&in_files(files, "oci-layout"), &bytes)?;
    match layout.image_layout_version.split('.').next() {
        Some("1") => Ok(()),
        _ => Err(no_layout(
            files,
            &format!("its version is {:?}", layout.image_layout_version),
        )),
    }
}

fn no_layout(files: &Files, reason: &str) -> ConvertError {
    ConvertError::layout(
        files.name(),
        format!("not a valid OCI image layout: {reason}"),
    )
}

fn in_files(files: &Files, path: &str) -> String {
    match files {
        Files::Directory(directory) => directory.join(path).display().to_string(),
        Files::Archive(_) | Files::Registry(_) => format!("{path} in {}", files.name()),
    }
}

pub(crate) fn parse<T: DeserializeOwned>(place: &str, bytes: &[u8]) -> Result<T, ConvertError> {
    serde_json::from_slice(bytes)
        .map_err(|error| ConvertError::layout(place, format!("invalid document: {error}")))
}

impl Descriptor {
    pub(crate) fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(key).map(String::as_str)
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.annotation(FULL_NAME).or_else(|| self.annotation(NAME))
    }

    fn is_named(&self, reference: &str) -> bool {
        [NAME, FULL_NAME]
            .iter()
            .any(|key| self.annotation(key) == Some(reference))
            || self.digest == reference.strip_prefix('@').unwrap_or(reference)
    }

    /// Whether the manifest is a build record or a signature and not an image.
    fn is_attestation(&self) -> bool {
        self.annotation("vnd.docker.reference.type") == Some("attestation-manifest")
            || self
                .platform
                .as_ref()
                .is_some_and(|p| p.os == "unknown" && p.architecture == "unknown")
    }

    pub(crate) fn is_index(&self) -> bool {
        matches!(&*self.media_type, OCI_INDEX | DOCKER_INDEX)
    }

    /// The platform for users, or else the digest.
    pub(crate) fn platform_name(&self) -> String {
        match &self.platform {
            Some(platform) => platform.to_string(),
            None => self.digest.clone(),
        }
    }

    fn label(&self) -> String {
        self.name().unwrap_or(&self.digest).to_owned()
    }
}

/// Reads the blob of a descriptor, and checks its size and digest. Returns the name of the blob in
/// messages, and the bytes. `kind` begins the name: "manifest", "index" or "config".
fn document(
    files: &Files,
    kind: &str,
    descriptor: &Descriptor,
    limit: u64,
) -> Result<(String, Vec<u8>), ConvertError> {
    let (place, digest, blob) = blob(files, kind, descriptor)?;
    let bytes = blob.document(limit, Some(&digest))?;
    check_size(&place, descriptor.size, bytes.len() as u64)?;
    Ok((place, bytes))
}

/// Finds the blob of a descriptor. Returns also its name in messages, and its digest.
fn blob(
    files: &Files,
    kind: &str,
    descriptor: &Descriptor,
) -> Result<(String, Digest, Blob), ConvertError> {
    let digest = digest(files, &descriptor.digest)?;
    let place = format!("{kind} {} in {}", digest.short(), files.name());
    match files.blob(&digest, descriptor.size)? {
        Some(blob) => Ok((place, digest, blob)),
        None => Err(ConvertError::missing_blob(&place, &digest)),
    }
}

/// The same of a manifest or an index, which registries store apart from blobs.
pub(crate) fn manifest_bytes(
    files: &Files,
    kind: &str,
    descriptor: &Descriptor,
) -> Result<(String, Vec<u8>), ConvertError> {
    let Files::Registry(repository) = files else {
        return document(files, kind, descriptor, MAX_MANIFEST_BYTES);
    };
    let expected = digest(files, &descriptor.digest)?;
    let place = format!("{kind} {} of {}", expected.short(), files.name());
    let bytes = repository
        .manifest(Some(&expected))
        .map_err(|source| read_error("read", &files.name(), source))?;
    let found = Digest::of_bytes(&bytes, expected.algorithm());
    check_equal(&place, "digest", &expected, &found)?;
    Ok((place, bytes))
}

fn digest(files: &Files, text: &str) -> Result<Digest, ConvertError> {
    parse_digest(&files.name(), text)
}

/// Refuses what is not a manifest of an image.
pub(crate) fn check_manifest_type(place: &str, manifest: &Descriptor) -> Result<(), ConvertError> {
    match &*manifest.media_type {
        OCI_MANIFEST | DOCKER_MANIFEST => Ok(()),
        other => Err(ConvertError::media_type(place, other)),
    }
}

/// Reads a manifest. Returns its digest, its name in messages, its bytes, and its content.
fn read_manifest(
    files: &Files,
    descriptor: &Descriptor,
) -> Result<(Digest, String, Vec<u8>, ManifestDocument), ConvertError> {
    let manifest_digest = digest(files, &descriptor.digest)?;
    let place = format!("manifest {}", manifest_digest.short());
    check_manifest_type(&place, descriptor)?;
    let (in_files, bytes) = manifest_bytes(files, "manifest", descriptor)?;
    let manifest = parse(&in_files, &bytes)?;
    Ok((manifest_digest, place, bytes, manifest))
}

/// Reads the configuration of a manifest, and finds the blobs of the layers. `place` is the name of
/// the manifest in messages.
fn load(
    files: &Files,
    digest: Digest,
    place: &str,
    manifest: ManifestDocument,
    of_index: Option<Platform>,
    from_index: &FromIndex,
) -> Result<Image, ConvertError> {
    if manifest
        .layers
        .iter()
        .any(|layer| layer.media_type == STACK)
    {
        return Err(ConvertError::refused(
            format!("{place} in {} is a BCoW image already", files.name()),
            "`bcow export --to oci:DIR` makes an ordinary image of it; copy an image in an archive \
             to oci:DIR with `bcow copy` first",
        ));
    }
    if !CONFIGS.contains(&&*manifest.config.media_type) {
        let place = format!("config of {place}");
        let media_type = &manifest.config.media_type;
        return Err(ConvertError::media_type(&place, media_type));
    }
    let (in_files, bytes) = document(files, "config", &manifest.config, MAX_CONFIG_BYTES)?;
    let config = ImageConfig::parse(&in_files, &bytes)?;
    config.check_layers(place, manifest.layers.len())?;
    let count = manifest.layers.len();
    check_layer_count(place, count)?;
    let layers = manifest
        .layers
        .iter()
        .zip(&config.diff_ids)
        .enumerate()
        .map(|(i, (layer, diff_id))| find_layer(files, layer, diff_id, i, count))
        .collect::<Result<_, _>>()?;
    Ok(Image {
        manifest: Some(digest),
        manifest_form: None,
        reference: None,
        platform: match (&config.platform, of_index) {
            // Many configurations omit the variant.
            (Some(own), Some(of_index)) if of_index.completes(own) => Some(of_index),
            (own, of_index) => own.clone().or(of_index),
        },
        config: Some(config),
        layers,
        annotations: from_index.with(manifest.annotations),
        left_out: from_index.left_out.clone(),
    })
}

fn find_layer(
    files: &Files,
    layer: &Descriptor,
    diff_id: &DiffId,
    index: usize,
    count: usize,
) -> Result<LayerInput, ConvertError> {
    let digest = digest(files, &layer.digest)?;
    let name = layer_name(index, count, Some(&digest));
    if !LAYERS.contains(&&*layer.media_type) {
        return Err(ConvertError::media_type(&name, &layer.media_type));
    }
    let Some(blob) = files.blob(&digest, layer.size)? else {
        return Err(match layer.urls.as_deref() {
            None | Some([]) => ConvertError::missing_blob(&name, &digest),
            // The descriptor of a foreign layer has addresses to download the blob from.
            Some(_) => ConvertError::refused(
                format!("{name}: blob {digest} is missing"),
                "registries do not distribute foreign layers; put the blob into the layout",
            ),
        });
    };
    Ok(LayerInput {
        name,
        blob,
        digest: Some(digest),
        size: Some(layer.size),
        diff_id: Some(diff_id.clone()),
        media_type: Some(layer.media_type.clone()),
    })
}
