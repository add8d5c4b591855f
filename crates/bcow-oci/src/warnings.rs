//! Warnings of a conversion: one message for each kind of problem, with the number of entries.

use std::collections::BTreeMap;

use crate::options::Progress;
use crate::text::{plural, quoted};

/// Upper bound of the attribute names that are counted separately. It bounds the memory and the
/// number of messages for a hostile input.
const MAX_COUNTED_NAMES: usize = 16;

/// The warnings that a conversion has collected.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    /// Number of attributes that were left out, by name.
    dropped_xattrs: BTreeMap<Vec<u8>, u64>,
    /// Number of attributes that were left out and have other names.
    other_xattrs: u64,
    /// Number of entries that were left out, by reason.
    skipped: BTreeMap<&'static str, u64>,
}

impl Warnings {
    /// Records an extended attribute that was left out.
    pub(crate) fn dropped_xattr(&mut self, name: &[u8]) {
        if let Some(count) = self.dropped_xattrs.get_mut(name) {
            *count += 1;
        } else if self.dropped_xattrs.len() < MAX_COUNTED_NAMES {
            self.dropped_xattrs.insert(name.to_vec(), 1);
        } else {
            self.other_xattrs += 1;
        }
    }

    /// Records an entry that was left out. `reason` is the start of the message.
    pub(crate) fn skipped(&mut self, reason: &'static str) {
        *self.skipped.entry(reason).or_default() += 1;
    }

    /// Sends all warnings to `progress`.
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
        for (reason, count) in &self.skipped {
            progress.warning(&format!("{reason}: {count}"));
        }
    }
}
