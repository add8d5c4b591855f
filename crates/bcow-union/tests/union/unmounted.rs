//! Reports on an upper without a mount: its changes, its combination with the image, and its check.

use std::sync::Arc;

use bcow_erofs::merge::merge;
use bcow_erofs::overlay::{ReadOptions, TreeForm, read_layer};
use bcow_erofs::tree::LayerTree;
use bcow_union::offline::check::{self, CheckedImage, Report};
use bcow_union::offline::{Changes, ChangesError, LOWER_START, Scope, Spliced, Store};
use bcow_union::{Instance, UpperError, UpperReader};

use crate::fixture::{Union, open_many};
use crate::image::noise;
use crate::tree::{Tree, tree_of};

const MAX_INODES: u64 = 1 << 20;

/// A closed union in which the start of `large` was written, so that it is a partial file.
pub fn partial() -> Option<Union> {
    let mut union = open_many()?;
    union.write("large", 0, &noise(5, 8192));
    union.close();
    Some(union)
}

/// Merges layers to a file system.
pub fn spliced(store: &Arc<Store>, layers: Vec<LayerTree>) -> Spliced {
    store.filesystem(&merge(layers).unwrap()).unwrap()
}

/// Requests on a closed union.
impl Union {
    /// Opens the upper for writing.
    pub fn instance(&self) -> Result<Instance, UpperError> {
        Instance::open_existing(&self.upper(), "a test")
    }

    pub fn reader(&self) -> UpperReader {
        UpperReader::open(&self.upper()).unwrap()
    }

    pub fn try_changes(&self, scope: Scope<'_>) -> Result<Changes, ChangesError> {
        let (fs, device) = (self.image().filesystem(), self.image().device());
        Changes::read(&self.reader(), fs, device, scope, MAX_INODES)
    }

    pub fn changes(&self, scope: Scope<'_>) -> Changes {
        self.try_changes(scope).unwrap()
    }

    /// The tree of the image with the upper.
    pub fn put_together(&self) -> Tree {
        let changes = self.changes(Scope::Layer);
        let options = ReadOptions {
            form: TreeForm::Layer,
            place: &|offset, _| u32::try_from((LOWER_START + offset) / 4096).ok(),
            tails: LOWER_START,
            max_inodes: MAX_INODES,
        };
        let lower = read_layer(&self.image().filesystem(), &options).unwrap();
        tree_of(&spliced(&changes.store, vec![lower, changes.layer]).filesystem)
    }

    /// Asserts that the trees of the scope `Touched` contain each path that differs, and that each
    /// path in them has its true state.
    pub fn assert_touched(&self, before: &Tree, after: &Tree) {
        let changes = self.changes(Scope::Touched);
        let lower = vec![changes.touched.clone()];
        let both = vec![changes.touched, changes.layer];
        let [a, b] =
            [lower, both].map(|layers| tree_of(&spliced(&changes.store, layers).filesystem));
        for (seen, whole) in [(&a, before), (&b, after)] {
            for (path, seen) in seen {
                assert_eq!(whole.get(path), Some(seen), "{path:?}");
            }
        }
        for path in before.keys().chain(after.keys()) {
            if before.get(path) != after.get(path) {
                let is_there = a.contains_key(path) || b.contains_key(path);
                assert!(is_there, "{path:?} is left out");
            }
        }
    }

    fn checked_image(&self) -> CheckedImage {
        CheckedImage {
            filesystem: self.image().filesystem(),
            device: self.image().device(),
        }
    }

    pub fn checked(&self) -> Report {
        check::check(&self.reader(), Some(&self.checked_image()), false).unwrap()
    }

    /// The codes of the findings of a check.
    pub fn found(&self) -> Vec<&'static str> {
        let findings = self.checked().findings;
        findings.iter().map(|found| found.code).collect()
    }

    pub fn assert_sound(&self) {
        let report = self.checked();
        assert!(report.is_sound(), "{:#?}", report.findings);
        assert!(report.findings.is_empty(), "{:#?}", report.findings);
    }

    /// Repairs the upper as `bcow fsck --repair` does.
    pub fn repair(&self) {
        let instance = self.instance().unwrap();
        let reader = UpperReader::of(&instance).unwrap();
        let report = check::check(&reader, Some(&self.checked_image()), false).unwrap();
        check::repair(&instance, &report).unwrap();
    }
}
