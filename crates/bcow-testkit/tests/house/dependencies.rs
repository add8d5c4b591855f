//! Where dependencies come from, under which licences, and which of them were looked at
//! (docs/supply-chain.md).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use serde_json::Value;

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Licences that a dependency can have.
const LICENCES: [&str; 11] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Crates with two versions, and the crate that needs the older one.
const TWICE: [(&str, &str); 6] = [
    ("base64", "docker_credential, tonic"),
    ("crypto-common", "digest 0.10"),
    ("digest", "crc-fast"),
    ("getrandom", "ring"),
    ("nix", "imago"),
    ("syn", "derive macros that are not of syn 3 yet"),
];

/// The crates of crates.io that the workspace uses on this platform.
fn dependencies() -> Vec<Value> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version=1", "--offline", "--locked"])
        .arg(format!("--filter-platform={}", platform()))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{output:?}");
    let mut metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let used = metadata["resolve"]["nodes"].as_array().expect("nodes");
    let used: BTreeSet<String> = used.iter().map(|node| text(&node["id"])).collect();
    let Value::Array(packages) = metadata["packages"].take() else {
        panic!("no packages");
    };
    let is_used = |package: &Value| used.contains(&text(&package["id"]));
    let foreign = |package: &Value| !package["source"].is_null() && is_used(package);
    packages.into_iter().filter(foreign).collect()
}

/// The platform of the compiler. Crates for others may not be on this machine.
fn platform() -> String {
    let output = Command::new("rustc")
        .arg("-vV")
        .output()
        .expect("rustc runs");
    let lines = String::from_utf8(output.stdout).expect("UTF-8");
    let host = lines.lines().find_map(|line| line.strip_prefix("host: "));
    host.expect("a host").to_owned()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[test]
fn dependencies_are_of_crates_io_and_have_known_licences() {
    let mut wrong = super::Broken::new();
    let dependencies = dependencies();
    assert!(dependencies.len() > 100);
    for package in &dependencies {
        let name = text(&package["name"]);
        if package["source"] != CRATES_IO {
            wrong
                .entry(name.clone())
                .or_default()
                .push(text(&package["source"]));
        }
        let licence = text(&package["license"]);
        if !permits(&licence) {
            wrong.entry(name).or_default().push(licence);
        }
    }
    super::expect_none("neither of crates.io nor of a known licence", &wrong);
}

/// Whether an expression of licences (SPDX) leaves a choice of known ones. Some crates separate
/// alternatives by a slash.
fn permits(expression: &str) -> bool {
    let expression = expression.trim();
    if let Some((one, other)) = split(expression, &[" OR ", "/"]) {
        return permits(one) || permits(other);
    }
    if let Some((one, other)) = split(expression, &[" AND "]) {
        return permits(one) && permits(other);
    }
    match expression
        .strip_prefix('(')
        .and_then(|rest| rest.strip_suffix(')'))
    {
        Some(inner) => permits(inner),
        None => LICENCES.contains(&expression),
    }
}

/// The parts around the first of these words that is not in parentheses.
fn split<'e>(expression: &'e str, words: &[&str]) -> Option<(&'e str, &'e str)> {
    let mut depth = 0;
    for (at, byte) in expression.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' => depth -= 1,
            _ if depth > 0 => {}
            _ => {
                let rest = &expression.as_bytes()[at..];
                if let Some(word) = words.iter().find(|word| rest.starts_with(word.as_bytes())) {
                    return Some((&expression[..at], &expression[at + word.len()..]));
                }
            }
        }
    }
    None
}

#[test]
fn expressions_of_licences_are_understood() {
    assert!(permits("MIT/Apache-2.0"));
    assert!(permits("GPL-3.0 OR MIT"));
    assert!(permits("(GPL-3.0 OR MIT) AND Unicode-3.0"));
    assert!(permits("Apache-2.0 WITH LLVM-exception OR GPL-3.0"));
    assert!(!permits("MIT AND GPL-3.0"));
    assert!(!permits("(MIT AND GPL-3.0) OR OpenSSL"));
    assert!(!permits(""));
}

#[test]
fn no_crate_has_two_versions() {
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in dependencies() {
        let version = text(&package["version"]);
        versions
            .entry(text(&package["name"]))
            .or_default()
            .insert(version);
    }
    versions.retain(|_, versions| versions.len() > 1);
    let twice: Vec<&str> = versions.keys().map(String::as_str).collect();
    let known: Vec<&str> = TWICE.iter().map(|(name, _)| *name).collect();
    assert_eq!(twice, known, "{versions:?}");
}

#[test]
fn dependencies_have_the_versions_that_were_looked_at() {
    let page = fs::read_to_string(super::root().join("docs/supply-chain.md")).expect("the page");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| "));
    let rows: BTreeMap<&str, &str> = rows
        .filter_map(|row| {
            let mut cells = row.split(" | ");
            Some((cells.next()?, cells.next()?.trim()))
        })
        .filter(|(_, version)| version.starts_with(|c: char| c.is_ascii_digit()))
        .collect();
    assert!(rows.len() > 20, "{rows:?}");
    let dependencies = dependencies();
    for (name, version) in rows {
        let mut found = dependencies
            .iter()
            .filter(|package| package["name"] == name);
        let is_same = found.any(|package| package["version"] == version);
        assert!(
            is_same,
            "docs/supply-chain.md: there is no {name} {version}"
        );
    }
}
