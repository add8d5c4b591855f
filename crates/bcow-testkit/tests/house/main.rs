//! The rules of the house, each kept by a test: crates and modules depend downwards only, lines end
//! at column 100, and texts use the field's words.
//!
//! `known.txt` counts the places in older code that break a rule, per file. A number there may only
//! shrink: a test fails if a file has more such places than listed, or fewer.
//! `BCOW_HOUSE_WRITE=1` writes the list anew.

mod crates;
mod modules;
mod text;

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

/// Compares the places that break `rule` with those that `known.txt` allows.
fn expect_known(rule: &str, found: &Broken) {
    let list = root().join("crates/bcow-testkit/tests/house/known.txt");
    let text = std::fs::read_to_string(&list).expect("known.txt");
    let entries = text.lines().map(|line| {
        let [rule, count, file] = line.splitn(3, ' ').collect::<Vec<_>>()[..] else {
            panic!("known.txt: {line}");
        };
        (rule, count.parse::<usize>().expect("a number"), file)
    });
    let mut problems = Vec::new();
    let (here, others): (Vec<_>, Vec<_>) = entries.partition(|entry| entry.0 == rule);
    if std::env::var_os("BCOW_HOUSE_WRITE").is_some() {
        let mut lines: Vec<String> = others
            .iter()
            .map(|(r, n, f)| format!("{r} {n} {f}\n"))
            .collect();
        lines.extend(
            found
                .iter()
                .map(|(file, places)| format!("{rule} {} {file}\n", places.len())),
        );
        lines.sort();
        std::fs::write(&list, lines.concat()).expect("known.txt is written");
        return;
    }
    let mut allowed: BTreeMap<&str, usize> = here.iter().map(|(_, n, file)| (*file, *n)).collect();
    for (file, places) in found {
        let limit = allowed.remove(file.as_str()).unwrap_or(0);
        if places.len() > limit {
            problems.push(format!(
                "{file}: {} places, {limit} are known:",
                places.len()
            ));
            problems.extend(places.iter().map(|place| format!("  {place}")));
        } else if places.len() < limit {
            problems.push(format!(
                "{file}: lower {limit} in known.txt to {}",
                places.len()
            ));
        }
    }
    problems.extend(
        allowed
            .keys()
            .map(|file| format!("{file}: remove it from known.txt")),
    );
    assert!(problems.is_empty(), "{rule}:\n{}", problems.join("\n"));
}
