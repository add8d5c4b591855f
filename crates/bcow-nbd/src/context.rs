//! Metadata contexts: the properties of ranges that clients can query.

use bcow::{Content, Status};

use crate::proto::allocation;

/// A metadata context that the server supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Context {
    /// Where data is and where zeros are.
    Allocation,
    /// Which file of the chain determines the content.
    Depth,
}

impl Context {
    pub(crate) const ALL: [Context; 2] = [Context::Allocation, Context::Depth];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Context::Allocation => "base:allocation",
            Context::Depth => "qemu:allocation-depth",
        }
    }

    /// The ID of the context in replies.
    pub(crate) fn id(self) -> u32 {
        match self {
            Context::Allocation => 1,
            Context::Depth => 2,
        }
    }

    /// The flags of an extent.
    pub(crate) fn flags(self, status: &Status) -> u32 {
        match (self, status.content) {
            (Context::Allocation, Content::Data) => 0,
            // Zeros take no space either, whether they were written or not.
            (Context::Allocation, Content::Zero | Content::Hole) => {
                allocation::HOLE | allocation::ZERO
            }
            (Context::Depth, _) => status.depth,
        }
    }

    /// The contexts that match a query of LIST_META_CONTEXT: a full name, or a namespace followed
    /// only by the colon.
    pub(crate) fn listed_by(query: &[u8]) -> impl Iterator<Item = Context> + '_ {
        Context::ALL.into_iter().filter(move |context| {
            let name = context.name().as_bytes();
            query == name || (query.ends_with(b":") && name.starts_with(query))
        })
    }
}

/// A set of contexts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Contexts([bool; 2]);

impl Contexts {
    pub(crate) fn insert(&mut self, context: Context) {
        self.0[context as usize] = true;
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = Context> {
        let is_in = move |context: &Context| self.0[*context as usize];
        Context::ALL.into_iter().filter(is_in)
    }

    pub(crate) fn is_empty(self) -> bool {
        self == Contexts::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_lists_all_that_is_in_it() {
        let listed =
            |query: &str| -> Vec<Context> { Context::listed_by(query.as_bytes()).collect() };
        assert_eq!(listed("base:"), [Context::Allocation]);
        assert_eq!(listed("qemu:"), [Context::Depth]);
        assert_eq!(listed("qemu:allocation-depth"), [Context::Depth]);
        assert_eq!(listed("qemu:dirty-bitmap:x"), []);
        assert_eq!(listed("base"), []);
        assert_eq!(listed(""), []);
    }
}
