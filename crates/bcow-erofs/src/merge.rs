//! Folds layers into one tree, as overlayfs would show them.

use crate::tree::{LayerTree, Tree, TreeError};

/// Why layers cannot be merged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MergeError {
    /// The merged tree is not valid.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// Merges `layers`, lowest first.
pub fn merge(_layers: Vec<LayerTree>) -> Result<Tree, MergeError> {
    todo!()
}
