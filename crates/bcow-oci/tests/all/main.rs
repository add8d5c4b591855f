//! Tests of the public API: archives and layouts in, images out.

mod bad_input;
mod bad_tar;
mod dialects;
mod directory;
mod export;
mod layered;
mod layers;
mod layouts;
mod makers;
mod model;
mod mutations;
mod output;
mod platforms;
mod stores;
mod support;
