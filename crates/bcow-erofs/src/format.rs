//! On-disk mirrors.
