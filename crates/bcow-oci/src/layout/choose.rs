//! Selects the manifest of an image by its name and platform.

use std::rc::Rc;

use super::{
    Descriptor, IMAGE, IndexDocument, MAX_INDEX_DEPTH, MAX_MANIFEST_BYTES, MAX_MANIFESTS,
    check_version, document, in_files, no_layout, parse,
};
use crate::archive::Files;
use crate::error::{ConvertError, LimitKind, TarPlace, check_limit};
use crate::left_out::{Annotations, FromIndex};
use crate::platform::Platform;

/// The form of the requested image. It counts only if no name is given.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Any,
    Bcow,
}

/// The manifest that was selected.
pub(super) struct Chosen {
    /// The name of the image, if it has one.
    pub name: Option<String>,
    pub descriptor: Descriptor,
    pub from_index: FromIndex,
}

/// A manifest among which one is selected.
struct Candidate {
    descriptor: Descriptor,
    path: IndexPath,
}

/// The annotations of the indexes on the way to a manifest, and of their descriptors, in this
/// order. The manifests of an index share them.
type IndexPath = Vec<Rc<Annotations>>;

/// Selects the manifest for `reference` and `platform`.
pub(super) fn choose(
    files: &Files,
    reference: Option<&str>,
    platform: Option<&Platform>,
    form: Form,
) -> Result<Chosen, ConvertError> {
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
    let (descriptor, from_index) = choose_platform(files, named, platform)?;
    Ok(Chosen {
        name,
        descriptor,
        from_index,
    })
}

/// Selects a manifest for `platform` from an index of a registry. It prefers images in BCoW form.
/// The selected descriptor can be that of another index. `place` is the name of the index in
/// messages. Adds the annotations and the other entries of the
/// index to `from_index`.
pub(crate) fn choose_in_index(
    place: &str,
    mut manifests: Vec<Descriptor>,
    platform: Option<&Platform>,
    from_index: &mut FromIndex,
) -> Result<Descriptor, ConvertError> {
    check_limit(LimitKind::Manifests, manifests.len() as u64, MAX_MANIFESTS)
        .map_err(|exceeded| exceeded.at(TarPlace::layer(place)))?;
    let listed = manifests.len();
    manifests.retain(|descriptor| !descriptor.is_attestation());
    from_index.left_out.attestations += (listed - manifests.len()) as u64;
    let is_bcow = |d: &Descriptor| d.artifact_type.as_deref() == Some(IMAGE);
    if manifests.iter().any(is_bcow) {
        manifests.retain(is_bcow);
    }
    let best = best_platform(place, manifests.iter(), platform)?;
    let chosen = manifests.swap_remove(best);
    from_index.annotate(chosen.annotations.as_ref());
    leave_out(from_index, manifests.iter());
    Ok(chosen)
}

/// Adds images that were not selected.
fn leave_out<'d>(from_index: &mut FromIndex, others: impl Iterator<Item = &'d Descriptor>) {
    let platform = |other: &Descriptor| match &other.platform {
        Some(platform) => platform.to_string(),
        None => other.digest.clone(),
    };
    from_index.left_out.platforms.extend(others.map(platform));
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

/// Selects the manifest for the platform; reads nested indexes.
fn choose_platform(
    files: &Files,
    descriptors: Vec<Descriptor>,
    platform: Option<&Platform>,
) -> Result<(Descriptor, FromIndex), ConvertError> {
    let mut from_index = FromIndex::default();
    let mut manifests: Vec<Candidate> = Vec::new();
    let candidate = |descriptor: Descriptor, path: &IndexPath| Candidate {
        descriptor,
        path: path.clone(),
    };
    let mut level: Vec<_> = descriptors
        .into_iter()
        .map(|descriptor| candidate(descriptor, &Vec::new()))
        .collect();
    let mut depth = 0;
    let mut read_indexes = 0;
    while !level.is_empty() {
        let listed = level.len();
        level.retain(|candidate| !candidate.descriptor.is_attestation());
        from_index.left_out.attestations += (listed - level.len()) as u64;
        let (indexes, found): (Vec<_>, Vec<_>) = level
            .into_iter()
            .partition(|candidate| candidate.descriptor.is_index());
        manifests.extend(found);
        depth += 1;
        let check = |kind, value: usize, allowed| {
            check_limit(kind, value as u64, allowed)
                .map_err(|exceeded| exceeded.at(TarPlace::layer(files.name())))
        };
        check(LimitKind::IndexDepth, depth, MAX_INDEX_DEPTH)?;
        level = Vec::new();
        for Candidate { descriptor, path } in indexes {
            // An index without entries counts too: reading it takes time.
            read_indexes += 1;
            check(LimitKind::Manifests, read_indexes, MAX_MANIFESTS)?;
            let (place, bytes) = document(files, "index", &descriptor, MAX_MANIFEST_BYTES)?;
            let index: IndexDocument = parse(&place, &bytes)?;
            let annotations = [index.annotations, descriptor.annotations];
            let mut path = path;
            path.extend(annotations.into_iter().flatten().map(Rc::new));
            let entries = index.manifests.unwrap_or_default().into_iter();
            level.extend(entries.map(|entry| candidate(entry, &path)));
            let count = manifests.len() + level.len();
            check(LimitKind::Manifests, count, MAX_MANIFESTS)?;
        }
    }
    let all = manifests.iter().map(|candidate| &candidate.descriptor);
    let best = best_platform(&files.name(), all, platform)?;
    let Candidate { descriptor, path } = manifests.swap_remove(best);
    path.iter()
        .for_each(|found| from_index.annotate(Some(found)));
    from_index.annotate(descriptor.annotations.as_ref());
    leave_out(
        &mut from_index,
        manifests.iter().map(|other| &other.descriptor),
    );
    Ok((descriptor, from_index))
}

/// The position of the manifest for the platform. If there is only one manifest, its platform does
/// not count.
fn best_platform<'d>(
    place: &str,
    manifests: impl ExactSizeIterator<Item = &'d Descriptor> + DoubleEndedIterator + Clone,
    platform: Option<&Platform>,
) -> Result<usize, ConvertError> {
    if manifests.len() == 1 {
        return Ok(0);
    }
    let host = Platform::host();
    let wanted = platform.unwrap_or(&host);
    let best = manifests
        .clone()
        .enumerate()
        .filter_map(|(index, d)| Some((wanted.rank(d.platform.as_ref()?)?, index)))
        // Of equal ranks the first one wins; without `rev`, `max_by_key` returns the last one.
        .rev()
        .max_by_key(|&(rank, _)| rank);
    match best {
        Some((_, index)) => Ok(index),
        None => {
            let available = manifests.filter_map(|d| Some(d.platform.as_ref()?.to_string()));
            let available: Vec<String> = available.collect();
            Err(ConvertError::no_platform(place.into(), wanted, &available))
        }
    }
}
