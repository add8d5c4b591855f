//! The rules of the house, each kept by a test: crates and modules depend downwards only, lines end
//! at column 100, texts use the field's words, and threads are started with a builder.

mod crates;
mod dependencies;
mod modules;
mod text;
mod threads;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The root of the repository.
fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest
        .ancestors()
        .nth(2)
        .expect("crates/ has a parent")
        .to_owned()
}

/// The project's files with one of these endings, each as a path below the root.
fn files(endings: &[&str]) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut pending = vec![root()];
    while let Some(directory) = pending.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory that can be read") {
            let entry = entry.expect("a directory that can be read");
            let name = entry.file_name();
            let name = name.to_str().expect("a name in UTF-8");
            let is_made = name == "target" || name.starts_with('.');
            if entry.file_type().expect("a type").is_dir() && !is_made {
                pending.push(entry.path());
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                let path = entry.path();
                files.push(
                    path.strip_prefix(root())
                        .expect("below the root")
                        .to_owned(),
                );
            }
        }
    }
    assert!(!files.is_empty(), "no file ends with {endings:?}");
    files
}

/// Places that break a rule, by file.
type Broken = BTreeMap<String, Vec<String>>;

/// Fails with a list of the places that break `rule`.
fn expect_none(rule: &str, found: &Broken) {
    let mut list = String::new();
    for (file, places) in found {
        list += &format!("{file}:\n");
        list.extend(places.iter().map(|place| format!("  {place}\n")));
    }
    assert!(list.is_empty(), "{rule}:\n{list}");
}
