//! The tree inside an image: EROFS format, reader, writer, merge of layers.

pub mod tree;
