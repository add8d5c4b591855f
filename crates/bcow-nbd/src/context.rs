//! Metadata contexts: what a client can ask to be told of ranges.

use bcow::{Content, Status};

use crate::proto::allocation;

/// A metadata context that this server knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Context {
    /// Where data are, where zeros.
    Allocation,
    /// Which file of a chain says so.
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

    /// By which replies call it.
    pub(crate) fn id(self) -> u32 {
        match self {
            Context::Allocation => 1,
            Context::Depth => 2,
        }
    }

    /// What an extent's flags are.
    pub(crate) fn flags(self, status: &Status) -> u32 {
        match (self, status.content) {
            (Context::Allocation, Content::Data) => 0,
            // Zeros take no space either, whether somebody wrote them or not.
            (Context::Allocation, Content::Zero | Content::Hole) => {
                allocation::HOLE | allocation::ZERO
            }
            (Context::Depth, _) => status.depth,
        }
    }

    /// Those that a query of LIST_META_CONTEXT means: a whole name, or a namespace with nothing behind the colon.
    pub(crate) fn listed_by(query: &[u8]) -> impl Iterator<Item = Context> + '_ {
        Context::ALL.into_iter().filter(move |context| {
            let name = context.name().as_bytes();
            query == name || (query.ends_with(b":") && name.starts_with(query))
        })
    }
}

/// A set of contexts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Contexts {
    allocation: bool,
    depth: bool,
}

impl Contexts {
    pub(crate) fn insert(&mut self, context: Context) {
        *self.slot(context) = true;
    }

    fn slot(&mut self, context: Context) -> &mut bool {
        match context {
            Context::Allocation => &mut self.allocation,
            Context::Depth => &mut self.depth,
        }
    }

    pub(crate) fn iter(mut self) -> impl Iterator<Item = Context> {
        Context::ALL
            .into_iter()
            .filter(move |&context| *self.slot(context))
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
