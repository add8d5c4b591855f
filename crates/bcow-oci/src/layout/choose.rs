//! Selects the manifest of an image by its name and platform, and lists all manifests of an index.

use std::rc::Rc;

use super::{
    Descriptor, IMAGE, IndexDocument, MAX_INDEX_DEPTH, MAX_MANIFEST_BYTES, MAX_MANIFESTS,
    check_version, in_files, manifest_bytes, no_layout, parse,
};
use crate::archive::Files;
use crate::error::{ConvertError, LimitKind, TarPlace, check_limit};
use crate::left_out::{Annotations, FromIndex};
use crate::platform::Platform;

/// The form of the requested image.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Any,
    /// Images in BCoW form are preferred to others.
    Bcow,
}

/// The manifest that was selected.
pub(super) struct Chosen {
    /// The name of the image, if it has one.
    pub name: Option<String>,
    pub descriptor: Descriptor,
    pub from_index: FromIndex,
}

/// A manifest of an index.
#[derive(Clone)]
pub(crate) struct Candidate {
    pub descriptor: Descriptor,
    path: IndexPath,
}

/// The annotations of the indexes on the way to a manifest, and of their descriptors, in this
/// order. The manifests of an index share them.
type IndexPath = Vec<Rc<Annotations>>;

/// The manifests that an index and its nested indexes list.
pub(crate) struct Manifests {
    pub images: Vec<Candidate>,
    /// Records of the build, and signatures.
    pub attestations: Vec<Candidate>,
    /// The indexes that were read, from the outermost on.
    pub indexes: Vec<Descriptor>,
    /// The annotations of the outermost index, and of its descriptor.
    pub annotations: Annotations,
}

impl Form {
    /// Leaves only the images in BCoW form, if there are such images.
    fn prefer<T>(self, all: &mut Vec<T>, descriptor: impl Fn(&T) -> &Descriptor) {
        let is_bcow = |one: &T| descriptor(one).artifact_type.as_deref() == Some(IMAGE);
        if self == Form::Bcow && all.iter().any(is_bcow) {
            all.retain(is_bcow);
        }
    }
}

impl Candidate {
    /// What the indexes say of this manifest.
    pub(crate) fn described(&self) -> FromIndex {
        let mut from_index = FromIndex::default();
        for found in &self.path {
            from_index.annotate(Some(found));
        }
        from_index.annotate(self.descriptor.annotations.as_ref());
        from_index
    }
}

/// Selects the manifest for `reference` and `platform`.
pub(super) fn choose(
    files: &Files,
    reference: Option<&str>,
    platform: Option<&Platform>,
    form: Form,
) -> Result<Chosen, ConvertError> {
    let named = named(files, reference, form)?;
    let name = named.iter().find_map(|d| d.name()).map(str::to_owned);
    let manifests = Manifests::of(files, named, None)?;
    let (descriptor, from_index) = manifests.choose(&files.name(), platform, form)?;
    Ok(Chosen {
        name,
        descriptor,
        from_index,
    })
}

/// The descriptors that match the reference: one, or one per platform.
pub(crate) fn named(
    files: &Files,
    reference: Option<&str>,
    form: Form,
) -> Result<Vec<Descriptor>, ConvertError> {
    check_version(files)?;
    let index: IndexDocument = match files.document("index.json", MAX_MANIFEST_BYTES)? {
        Some(bytes) => parse(&in_files(files, "index.json"), &bytes)?,
        None => return Err(no_layout(files, "it has no index.json")),
    };
    let mut manifests = index.manifests.unwrap_or_default();
    // Without a name, a request for a BCoW image must not select an ordinary image in the same
    // layout.
    if reference.is_none() {
        form.prefer(&mut manifests, |descriptor| descriptor);
    }
    choose_named(files, manifests, reference)
}

fn choose_named(
    files: &Files,
    manifests: Vec<Descriptor>,
    reference: Option<&str>,
) -> Result<Vec<Descriptor>, ConvertError> {
    let mut images: Vec<_> = manifests
        .into_iter()
        .filter(|d| !d.is_attestation())
        .collect();
    let mut available: Vec<_> = images.iter().map(Descriptor::label).collect();
    available.dedup();
    if let Some(reference) = reference {
        images.retain(|d| d.is_named(reference));
        if images.is_empty() {
            let (place, reference) = (files.name(), Some(reference));
            return Err(ConvertError::not_one(place, 0, reference, &available));
        }
    }
    let Some(first) = images.first() else {
        let place = in_files(files, "index.json");
        return Err(ConvertError::layout(place, "it lists no images"));
    };
    let same_digest = images.iter().all(|d| d.digest == first.digest);
    let per_platform = images
        .iter()
        .all(|d| d.platform.is_some() && d.name() == first.name());
    match images.len() {
        1 => Ok(images),
        _ if same_digest => Ok(images.into_iter().take(1).collect()),
        _ if per_platform => Ok(images),
        count => {
            let place = files.name();
            Err(ConvertError::not_one(place, count, reference, &available))
        }
    }
}

impl Manifests {
    /// The manifests of `descriptors`, and of the indexes among them. `annotations` are those of
    /// the index that has the descriptors.
    pub(crate) fn of(
        files: &Files,
        descriptors: Vec<Descriptor>,
        annotations: Option<Annotations>,
    ) -> Result<Self, ConvertError> {
        let (mut images, mut attestations, mut read) = (Vec::new(), Vec::new(), Vec::new());
        let mut of_root = FromIndex::default();
        of_root.annotate(annotations.as_ref());
        let has_root = descriptors.len() == 1;
        let candidate = |descriptor: Descriptor, path: &IndexPath| Candidate {
            descriptor,
            path: path.clone(),
        };
        let path: IndexPath = annotations.into_iter().map(Rc::new).collect();
        let mut level: Vec<_> = descriptors
            .into_iter()
            .map(|descriptor| candidate(descriptor, &path))
            .collect();
        let mut depth = 0;
        let check = |kind, value: usize, allowed| {
            check_limit(kind, value as u64, allowed)
                .map_err(|exceeded| exceeded.at(TarPlace::layer(files.name())))
        };
        check(LimitKind::Manifests, level.len(), MAX_MANIFESTS)?;
        while !level.is_empty() {
            let (others, found): (Vec<_>, Vec<_>) = level
                .into_iter()
                .partition(|candidate| candidate.descriptor.is_attestation());
            attestations.extend(others);
            let (indexes, found): (Vec<_>, Vec<_>) = found
                .into_iter()
                .partition(|candidate| candidate.descriptor.is_index());
            images.extend(found);
            depth += 1;
            check(LimitKind::IndexDepth, depth, MAX_INDEX_DEPTH)?;
            level = Vec::new();
            for Candidate { descriptor, path } in indexes {
                let (place, bytes) = manifest_bytes(files, "index", &descriptor)?;
                let index: IndexDocument = parse(&place, &bytes)?;
                let annotations = [index.annotations, descriptor.annotations.clone()];
                if has_root && depth == 1 {
                    for found in &annotations {
                        of_root.annotate(found.as_ref());
                    }
                }
                let mut path = path;
                path.extend(annotations.into_iter().flatten().map(Rc::new));
                let entries = index.manifests.unwrap_or_default().into_iter();
                level.extend(entries.map(|entry| candidate(entry, &path)));
                let count = images.len() + attestations.len() + level.len();
                check(LimitKind::Manifests, count, MAX_MANIFESTS)?;
                // An index without entries counts too: reading it takes time.
                read.push(descriptor);
                check(LimitKind::Manifests, read.len(), MAX_MANIFESTS)?;
            }
        }
        Ok(Manifests {
            images,
            attestations,
            indexes: read,
            annotations: of_root.annotations,
        })
    }

    /// Selects the manifest for the platform. `place` is the name of the index in messages. The
    /// annotations on the way to the manifest, and what was not selected, are returned too.
    pub(crate) fn choose(
        self,
        place: &str,
        platform: Option<&Platform>,
        form: Form,
    ) -> Result<(Descriptor, FromIndex), ConvertError> {
        let mut images = self.images;
        form.prefer(&mut images, |candidate| &candidate.descriptor);
        let best = best_platform(place, &images, platform)?;
        let chosen = images.swap_remove(best);
        let mut from_index = chosen.described();
        from_index.left_out.attestations = self.attestations.len() as u64;
        let others = images.iter().map(|other| other.descriptor.platform_name());
        from_index.left_out.platforms.extend(others);
        Ok((chosen.descriptor, from_index))
    }
}

/// The position of the manifest for the platform. If there is only one manifest, its platform does
/// not count.
fn best_platform(
    place: &str,
    manifests: &[Candidate],
    platform: Option<&Platform>,
) -> Result<usize, ConvertError> {
    if manifests.len() == 1 {
        return Ok(0);
    }
    let host = Platform::host();
    nearest(place, manifests, platform.unwrap_or(&host))
}

/// The position of the manifest that matches the platform best.
pub(crate) fn nearest(
    place: &str,
    manifests: &[Candidate],
    wanted: &Platform,
) -> Result<usize, ConvertError> {
    let platforms = manifests.iter().map(|one| one.descriptor.platform.as_ref());
    let best = platforms
        .clone()
        .enumerate()
        .filter_map(|(index, platform)| Some((wanted.rank(platform?)?, index)))
        // Of equal ranks the first one wins; without `rev`, `max_by_key` returns the last one.
        .rev()
        .max_by_key(|&(rank, _)| rank);
    match best {
        Some((_, index)) => Ok(index),
        None => {
            let available: Vec<String> = platforms.flatten().map(Platform::to_string).collect();
            Err(ConvertError::no_platform(place.into(), wanted, &available))
        }
    }
}
