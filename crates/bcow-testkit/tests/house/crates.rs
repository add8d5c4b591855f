//! Which crate may depend on which.

use std::collections::BTreeMap;
use std::process::Command;

/// Each crate and the crates of the workspace that it may use.
const MAY_USE: [(&str, &[&str]); 25] = [
    ("bcow-sandbox", &[]),
    ("bcow-listen", &[]),
    ("bcow-format", &[]),
    ("bcow", &["bcow-format"]),
    ("bcow-erofs", &["bcow", "bcow-format"]),
    ("bcow-ext4", &[]),
    (
        "bcow-view",
        &["bcow-erofs", "bcow-ext4", "bcow", "bcow-format"],
    ),
    ("bcow-oci", &["bcow-erofs", "bcow", "bcow-format"]),
    (
        "bcow-union",
        &[
            "bcow-view",
            "bcow-erofs",
            "bcow-ext4",
            "bcow",
            "bcow-format",
        ],
    ),
    ("bcow-mount", &[]),
    (
        "bcow-fuse",
        &[
            "bcow-union",
            "bcow-mount",
            "bcow-erofs",
            "bcow",
            "bcow-format",
            "bcow-listen",
            "bcow-sandbox",
        ],
    ),
    ("bcow-nbd", &["bcow", "bcow-listen"]),
    ("bcow-foreign", &["bcow"]),
    ("bcow-remote", &["bcow"]),
    (
        "bcow-images",
        &[
            "bcow-union",
            "bcow-mount",
            "bcow-oci",
            "bcow-remote",
            "bcow-view",
            "bcow-erofs",
            "bcow-ext4",
            "bcow",
            "bcow-sandbox",
        ],
    ),
    (
        "bcow-fsck",
        &[
            "bcow-images",
            "bcow-fuse",
            "bcow-union",
            "bcow-oci",
            "bcow-remote",
            "bcow-erofs",
            "bcow",
            "bcow-sandbox",
        ],
    ),
    (
        "bcow-convert",
        &[
            "bcow-images",
            "bcow-union",
            "bcow-oci",
            "bcow-foreign",
            "bcow-remote",
            "bcow-erofs",
            "bcow",
        ],
    ),
    (
        "bcow-mounts",
        &[
            "bcow-images",
            "bcow-oci",
            "bcow-fuse",
            "bcow-mount",
            "bcow-union",
            "bcow-nbd",
            "bcow-remote",
            "bcow-view",
            "bcow-erofs",
            "bcow",
            "bcow-listen",
            "bcow-sandbox",
        ],
    ),
    (
        "bcow-pool",
        &[
            "bcow-mounts",
            "bcow-images",
            "bcow-fuse",
            "bcow-mount",
            "bcow-union",
            "bcow",
            "bcow-sandbox",
        ],
    ),
    ("bcow-testkit", &["bcow"]),
    ("bcow-tool", &["bcow-listen", "bcow-sandbox"]),
    // They run the program `bcow`.
    ("bcow-snapshotter", &["bcow-tool"]),
    ("bcow-layer-store", &["bcow-tool"]),
    (
        "bcow-cli",
        &[
            "bcow-fsck",
            "bcow-convert",
            "bcow-pool",
            "bcow-mounts",
            "bcow-images",
            "bcow-oci",
            "bcow-fuse",
            "bcow-mount",
            "bcow-union",
            "bcow-nbd",
            "bcow-foreign",
            "bcow-remote",
            "bcow-view",
            "bcow-erofs",
            "bcow",
            "bcow-format",
            "bcow-sandbox",
        ],
    ),
    (
        "bcow-fuzz",
        &[
            "bcow-snapshotter",
            "bcow-pool",
            "bcow-fuse",
            "bcow-remote",
            "bcow-foreign",
            "bcow-oci",
            "bcow-nbd",
            "bcow-union",
            "bcow-view",
            "bcow-ext4",
            "bcow-erofs",
            "bcow",
            "bcow-format",
        ],
    ),
];

/// The packages of the workspace, as cargo describes them.
fn packages() -> Vec<serde_json::Value> {
    // Not that of the build, which another machine may have elsewhere.
    let output = Command::new("cargo")
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{output:?}");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

#[test]
fn the_documentation_of_each_library_has_an_example() {
    let mut libraries = 0;
    for package in packages() {
        for target in package["targets"].as_array().expect("targets") {
            if target["kind"][0] != "lib" {
                continue;
            }
            libraries += 1;
            let path = target["src_path"].as_str().expect("a path");
            let text = std::fs::read_to_string(path).expect("a file that can be read");
            let beginning = text.lines().take_while(|line| line.starts_with("//!"));
            let fences = beginning.filter_map(|line| line.strip_prefix("//! ```"));
            // Every second fence ends a block.
            let has_example = fences.step_by(2).any(|kind| matches!(kind, "" | "no_run"));
            assert!(
                has_example,
                "{path} begins without an example that cargo compiles"
            );
        }
    }
    assert!(libraries > 10, "only {libraries} libraries");
}

#[test]
fn crates_depend_only_downwards() {
    let rules = BTreeMap::from(MAY_USE);
    let mut seen = 0;
    for package in packages() {
        let name = package["name"].as_str().expect("a name");
        let allowed = rules
            .get(name)
            .unwrap_or_else(|| panic!("{name} is not in the house rules"));
        seen += 1;
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let used = dependency["name"].as_str().expect("a name");
            if !used.starts_with("bcow") {
                continue;
            }
            // A crate's tests may use the crate itself with more features.
            let for_tests = dependency["kind"] == "dev" && (used == "bcow-testkit" || used == name);
            assert!(
                allowed.contains(&used) || for_tests,
                "{name} must not use {used}"
            );
        }
        for (library, only) in [
            ("fuser", &["bcow-fuse", "bcow-layer-store"][..]),
            ("imago", &["bcow-foreign"]),
            // The only crate with asynchronous code.
            ("tokio", &["bcow-snapshotter"]),
            ("tonic", &["bcow-snapshotter"]),
        ] {
            let uses_it = package["dependencies"]
                .as_array()
                .expect("dependencies")
                .iter()
                .any(|dependency| dependency["name"] == library);
            assert!(
                only.contains(&name) || !uses_it,
                "only {only:?} know {library}, not {name}"
            );
        }
    }
    assert_eq!(seen, rules.len());
}
