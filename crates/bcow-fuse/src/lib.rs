//! bcow-fuse
