//! What a source has beside the image that is taken from it: annotations, images for other
//! platforms, attestations.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::text::{listed, plural};

/// The annotations of a manifest or an index.
pub type Annotations = BTreeMap<String, String>;

/// The annotations for the name of an image.
pub(crate) const NAME: &str = "org.opencontainers.image.ref.name";
pub(crate) const FULL_NAME: &str = "io.containerd.image.name";
/// The begin of the annotations with which bcow describes its own files.
const OWN: &str = "io.bcow.";
/// The begin of the annotations with which containerd records where it found a blob.
const FOUND_AT: &str = "containerd.io/distribution.source.";

/// The parts of a source that its image does not have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LeftOut {
    /// The platforms of the other images of the index.
    pub platforms: Vec<String>,
    /// Number of attestations in the index: records of the build, and signatures.
    pub attestations: u64,
    /// The names of the annotations that the destination cannot have.
    pub annotations: Vec<String>,
}

impl LeftOut {
    /// Whether nothing is left out.
    pub fn is_empty(&self) -> bool {
        self.platforms.is_empty() && self.attestations == 0 && self.annotations.is_empty()
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        let count = |list: &[String]| list.len() as u64;
        if !self.platforms.is_empty() {
            let images = plural(count(&self.platforms), "image");
            let platforms = listed(&self.platforms);
            parts.push(format!("{images} for other platforms ({platforms})"));
        }
        if self.attestations > 0 {
            parts.push(plural(self.attestations, "attestation"));
        }
        if !self.annotations.is_empty() {
            let annotations = plural(count(&self.annotations), "annotation");
            parts.push(format!("{annotations} ({})", listed(&self.annotations)));
        }
        f.write_str(&parts.join("; "))
    }
}

/// What the indexes that lead to a manifest say of it, and what else they list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FromIndex {
    /// The annotations of the indexes, and of the manifest's descriptor in them.
    pub annotations: Annotations,
    /// The other entries of the indexes.
    pub left_out: LeftOut,
}

impl FromIndex {
    /// Adds the annotations of the next index, or of the next descriptor, on the way to the
    /// manifest. They replace earlier ones of the same name.
    pub(crate) fn annotate(&mut self, annotations: Option<&Annotations>) {
        let named = |key: &str| key == NAME || key == FULL_NAME || key.starts_with(FOUND_AT);
        let kept = annotations.into_iter().flatten();
        let kept = kept.filter(|(key, _)| !named(key) && !key.starts_with(OWN));
        self.annotations
            .extend(kept.map(|(key, value)| (key.clone(), value.clone())));
    }

    /// The annotations of an image whose manifest has the annotations `own`. The descriptors of
    /// bcow's own files in them are left out.
    pub(crate) fn with(&self, own: Option<Annotations>) -> Annotations {
        let mut all = self.annotations.clone();
        let kept = own.into_iter().flatten();
        all.extend(kept.filter(|(key, _)| !key.starts_with(OWN)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_are_left_out_are_counted_and_named() {
        let mut left_out = LeftOut::default();
        assert!(left_out.is_empty());
        left_out.attestations = 1;
        assert_eq!(left_out.to_string(), "1 attestation");
        left_out.platforms = vec!["linux/arm64".to_owned(), "linux/386".to_owned()];
        left_out.annotations = vec!["a".to_owned()];
        assert_eq!(
            left_out.to_string(),
            "2 images for other platforms (linux/arm64, linux/386); 1 attestation; 1 annotation (a)"
        );
    }
}
