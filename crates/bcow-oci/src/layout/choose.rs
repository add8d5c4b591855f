//! Selects the manifest of an image by its name and platform.

use super::{
    Descriptor, IMAGE, IndexDocument, MAX_INDEX_DEPTH, MAX_MANIFEST_BYTES, MAX_MANIFESTS,
    check_version, document, in_files, no_layout, parse,
};
use crate::archive::Files;
use crate::error::{ConvertError, LimitKind, Place, check_limit};
use crate::platform::Platform;

/// The form of the requested image. It counts only if no name is given.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Any,
    Bcow,
}

/// The name, if there is one, and the descriptor of the manifest for `reference` and `platform`.
pub(super) fn choose(
    files: &Files,
    reference: Option<&str>,
    platform: Option<&Platform>,
    form: Form,
) -> Result<(Option<String>, Descriptor), ConvertError> {
    check_version(files)?;
    let index: IndexDocument = match files.document("index.json", MAX_MANIFEST_BYTES)? {
        Some(bytes) => parse(&in_files(files, "index.json"), &bytes)?,
        None => return Err(no_layout(files, "it has no index.json")),
    };
    let mut manifests = index.manifests.unwrap_or_default();
    let is_bcow = |d: &Descriptor| d.artifact_type.as_deref() == Some(IMAGE);
    // Without a name, a request for a BCoW image must not select an ordinary image in the same
    // layout.
    if form == Form::Bcow && reference.is_none() && manifests.iter().any(is_bcow) {
        manifests.retain(is_bcow);
    }
    let named = choose_named(files, manifests, reference)?;
    let name = named.iter().find_map(|d| d.name()).map(str::to_owned);
    Ok((name, choose_platform(files, named, platform)?))
}

/// Selects a manifest for `platform` from an index of a registry. It prefers images in BCoW form.
/// The selected descriptor can be that of another index. `place` is the name of the index in
/// messages.
pub(crate) fn choose_in_index(
    place: &str,
    mut manifests: Vec<Descriptor>,
    platform: Option<&Platform>,
) -> Result<Descriptor, ConvertError> {
    check_limit(LimitKind::Manifests, manifests.len() as u64, MAX_MANIFESTS)
        .map_err(|exceeded| exceeded.at(Place::layer(place)))?;
    manifests.retain(|descriptor| !descriptor.is_attestation());
    let is_bcow = |d: &Descriptor| d.artifact_type.as_deref() == Some(IMAGE);
    if manifests.iter().any(is_bcow) {
        manifests.retain(is_bcow);
    }
    best_platform(place, &manifests, platform)
}

/// The descriptors that match the reference: one, or one per platform.
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
            return Err(ConvertError::NoSuchReference {
                place: files.name(),
                reference: reference.to_owned(),
                available,
            });
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
        _ => Err(ConvertError::AmbiguousReference {
            place: files.name(),
            reference: reference.map(str::to_owned),
            available,
        }),
    }
}

/// Selects the manifest for the platform; reads nested indexes.
fn choose_platform(
    files: &Files,
    descriptors: Vec<Descriptor>,
    platform: Option<&Platform>,
) -> Result<Descriptor, ConvertError> {
    let mut manifests = Vec::new();
    let mut level = descriptors;
    let mut depth = 0;
    let mut read_indexes = 0;
    while !level.is_empty() {
        let (indexes, found): (Vec<_>, Vec<_>) = level
            .into_iter()
            .filter(|d| !d.is_attestation())
            .partition(Descriptor::is_index);
        manifests.extend(found);
        depth += 1;
        let check = |kind, value: usize, allowed| {
            check_limit(kind, value as u64, allowed)
                .map_err(|exceeded| exceeded.at(Place::layer(files.name())))
        };
        check(LimitKind::IndexDepth, depth, MAX_INDEX_DEPTH)?;
        level = Vec::new();
        for index in &indexes {
            // An index without entries counts too: reading it takes time.
            read_indexes += 1;
            check(LimitKind::Manifests, read_indexes, MAX_MANIFESTS)?;
            let (place, bytes) = document(files, "index", index, MAX_MANIFEST_BYTES)?;
            let index: IndexDocument = parse(&place, &bytes)?;
            level.extend(index.manifests.unwrap_or_default());
            let count = manifests.len() + level.len();
            check(LimitKind::Manifests, count, MAX_MANIFESTS)?;
        }
    }
    best_platform(&files.name(), &manifests, platform)
}

/// Selects the manifest for the platform. If there is only one manifest, its platform does not
/// count.
fn best_platform(
    place: &str,
    manifests: &[Descriptor],
    platform: Option<&Platform>,
) -> Result<Descriptor, ConvertError> {
    if let [only] = manifests {
        return Ok(only.clone());
    }
    let host = Platform::host();
    let wanted = platform.unwrap_or(&host);
    let best = manifests
        .iter()
        .filter_map(|d| wanted.rank(&d.platform()?).map(|rank| (rank, d)))
        // Of equal ranks the first one wins; without `rev`, `max_by_key` returns the last one.
        .rev()
        .max_by_key(|&(rank, _)| rank);
    match best {
        Some((_, descriptor)) => Ok(descriptor.clone()),
        None => Err(ConvertError::NoSuchPlatform {
            place: place.to_owned(),
            wanted: wanted.clone().into(),
            available: manifests
                .iter()
                .filter_map(|d| d.platform().map(|p| p.to_string()))
                .collect(),
        }),
    }
}
