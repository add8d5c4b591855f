//! Warnings for the user, one for each kind and not one for each file.

use std::collections::BTreeMap;

use crate::options::Progress;
use crate::text::{plural, quoted};

/// Limit on distinct names; a hostile input has any number of them.
const MAX_NAMES: usize = 16;

/// Warnings collected during the conversion.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    dropped_xattrs: BTreeMap<Vec<u8>, u64>,
    other_xattrs: u64,
    skipped: BTreeMap<&'static str, u64>,
}

impl Warnings {
    /// Records an extended attribute that was left out.
    pub(crate) fn dropped_xattr(&mut self, name: &[u8]) {
        if let Some(count) = self.dropped_xattrs.get_mut(name) {
            *count += 1;
        } else if self.dropped_xattrs.len() < MAX_NAMES {
            self.dropped_xattrs.insert(name.to_vec(), 1);
        } else {
            self.other_xattrs += 1;
        }
    }

    /// Records an entry that was left out for the reason `why`.
    pub(crate) fn skipped(&mut self, why: &'static str) {
        *self.skipped.entry(why).or_default() += 1;
    }

    /// Reports all warnings.
    pub(crate) fn report(&self, progress: &dyn Progress) {
        for (name, count) in &self.dropped_xattrs {
            progress.warning(&format!(
                "extended attribute {} is not in a namespace that EROFS supports; left out {}",
                quoted(name),
                plural(*count, "time")
            ));
        }
        if self.other_xattrs > 0 {
            progress.warning(&format!(
                "extended attributes with other names left out {}",
                plural(self.other_xattrs, "time")
            ));
        }
        for (why, count) in &self.skipped {
            progress.warning(&format!("{why}: {count}"));
        }
    }
}
