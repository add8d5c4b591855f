//! The table of what converts to what, walked with the command itself.

use std::fs;

use bcow_images::{Content, Target, Way, way};

use crate::support::{Sandbox, sample};

/// Sources that exist, and what they have.
const SOURCES: [(&str, Content); 14] = [
    ("oci:layout:x", Content::Ordinary),
    ("oci-archive:oci.tar:x", Content::Ordinary),
    ("docker-archive:docker.tar", Content::Ordinary),
    ("tar:sample.tar", Content::Archive),
    ("sample.tar", Content::Archive),
    ("dir:root", Content::Directory),
    ("image.bcow", Content::Image),
    ("bcow:image.bcow", Content::Image),
    ("oci:stacks:x", Content::Image),
    ("disk.bcow", Content::Disk),
    ("raw:disk.raw", Content::Disk),
    ("qcow2:disk.qcow2", Content::Disk),
    ("bcow:disk.bcow", Content::Disk),
    ("./image.bcow", Content::Image),
];

/// Destinations, and the files or directories that they make.
const DESTINATIONS: [(&str, &str, Target); 9] = [
    ("new", "new", Target::File),
    ("bcow:new", "new", Target::File),
    ("oci:new", "new", Target::Layers),
    ("oci:new:y", "new", Target::Layers),
    ("oci-archive:new:y", "new", Target::Layers),
    ("containerd-cache:new", "new", Target::ContainerdCache),
    ("raw:new", "new", Target::Foreign),
    ("qcow2:new", "new", Target::Foreign),
    ("new.qcow2", "new.qcow2", Target::Foreign),
];

/// Names of sources that lead to nothing, with what the form of the name promises.
const MISSING: [(&str, Option<Content>); 10] = [
    ("missing", None),
    ("bcow:missing", None),
    ("oci:missing:x", None),
    ("oci-archive:missing:x", Some(Content::Ordinary)),
    ("docker-archive:missing", Some(Content::Ordinary)),
    ("tar:missing", Some(Content::Archive)),
    ("missing.tar", Some(Content::Archive)),
    ("dir:missing", Some(Content::Directory)),
    ("raw:missing", Some(Content::Disk)),
    ("qcow2:missing", Some(Content::Disk)),
];

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::with_image();
    sandbox.layout("layout", "x", &["sample.tar"]);
    fs::create_dir(sandbox.path("root")).unwrap();
    fs::write(sandbox.path("root/file"), b"content").unwrap();
    sandbox.write("disk.raw", &[7; 8192]);
    sandbox.ok(&["convert", "raw:disk.raw", "disk.bcow"]);
    sandbox.ok(&["convert", "raw:disk.raw", "qcow2:disk.qcow2"]);
    sandbox.ok(&["convert", "oci:layout:x", "oci:stacks:x"]);
    sandbox.ok(&["export", "image.bcow", "--to", "oci-archive:oci.tar:x"]);
    sandbox.write("docker.tar", &docker_archive());
    sandbox
}

/// The output of `docker save` for an image of [`sample`].
fn docker_archive() -> Vec<u8> {
    let layer = sample();
    let digest = bcow_oci::Digest::of(&layer).to_string();
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    });
    let manifest = serde_json::json!([{
        "Config": "config.json", "RepoTags": ["box:1"], "Layers": ["layer.tar"],
    }]);
    crate::support::Tar::new()
        .file("config.json", config.to_string().as_bytes())
        .file("layer.tar", &layer)
        .file("manifest.json", manifest.to_string().as_bytes())
        .finish()
}

fn remove(sandbox: &Sandbox, name: &str) {
    let path = sandbox.path(name);
    if path.is_dir() {
        fs::remove_dir_all(path).unwrap();
    } else if path.exists() {
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn every_source_becomes_every_destination_that_the_table_allows() {
    let sandbox = sandbox();
    let before = sandbox.names();
    for (source, content) in SOURCES {
        for (destination, made, target) in DESTINATIONS {
            let text = sandbox.shown(&["convert", source, destination]);
            if way(content, target) == Way::None {
                assert_refused(&text, source, destination);
                assert!(text.ends_with("--- exit status 2\n"), "{text}");
            } else {
                assert!(text.ends_with("--- exit status 0\n"), "{text}");
                assert!(sandbox.path(made).exists(), "{text}");
            }
            remove(&sandbox, made);
            assert_eq!(sandbox.names(), before, "{text}");
        }
    }
}

#[test]
fn every_missing_source_is_named_and_nothing_is_made() {
    let sandbox = sandbox();
    let before = sandbox.names();
    for (source, content) in MISSING {
        for (destination, _, target) in DESTINATIONS {
            let text = sandbox.shown(&["convert", source, destination]);
            assert_refused(&text, source, destination);
            let is_by_form = content.is_some_and(|content| way(content, target) == Way::None);
            assert_eq!(
                !text.contains("No such file or directory"),
                is_by_form,
                "{text}"
            );
            assert_eq!(sandbox.names(), before, "{text}");
        }
    }
}

#[test]
fn every_source_and_destination_on_an_unreachable_server_is_named() {
    let sandbox = sandbox();
    let before = sandbox.names();
    // Port 1 of this machine: no server answers.
    let remote = [
        "https://localhost:1/image.bcow",
        "docker://localhost:1/image:x",
    ];
    let run = |source: &str, destination: &str| {
        let text = sandbox.shown(&["convert", "--no-cache", source, destination]);
        assert!(
            text.contains(source) || text.contains(destination),
            "{text}"
        );
        assert!(!text.ends_with("--- exit status 0\n"), "{text}");
        assert_eq!(sandbox.names(), before, "{text}");
    };
    for name in remote {
        for (destination, _, _) in DESTINATIONS {
            run(name, destination);
        }
    }
    for (source, _) in SOURCES.into_iter().chain([("missing", Content::Disk)]) {
        run(source, "docker://localhost:1/new:x");
        // A web server takes no upload.
        let text = sandbox.shown(&["convert", source, "https://localhost:1/new"]);
        assert_refused(&text, source, "https://localhost:1/new");
    }
}

/// The error names the source or the destination as it was written, and leads on.
fn assert_refused(text: &str, source: &str, destination: &str) {
    let error = text.split_once("error: ").expect("an error").1;
    assert!(
        error.contains(source) || error.contains(destination),
        "{text}"
    );
    assert!(text.contains("hint: "), "{text}");
    assert!(!text.ends_with("--- exit status 0\n"), "{text}");
}
