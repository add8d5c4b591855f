//! Images for several platforms: indexes as source, as destination, and as the image that a command
//! opens.

use serde_json::{Value, json};

use crate::support::{Sandbox, words};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

fn parse(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

/// A layout `multi` with an index `x`, which lists an image for amd64 and for arm64.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::with_image();
    sandbox.layout("multi", "x", &["sample.tar"]);
    let image = parse(&sandbox.read("multi/index.json"))["manifests"][0].clone();
    let entries = ["amd64", "arm64"].map(|architecture| {
        let mut entry = image.clone();
        entry["platform"] = json!({"os": "linux", "architecture": architecture});
        entry
    });
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).to_string();
    let digest = bcow_oci::Digest::of(index.as_bytes());
    let blob = format!("multi/blobs/sha256/{}", digest.hex());
    sandbox.write(&blob, index.as_bytes());
    let list = json!({"schemaVersion": 2, "manifests": [{
        "mediaType": INDEX, "digest": digest.to_string(), "size": index.len(),
        "annotations": {"org.opencontainers.image.ref.name": "x"},
    }]});
    sandbox.write("multi/index.json", list.to_string().as_bytes());
    sandbox
}

/// The digest that a layout lists under its only name.
fn listed(sandbox: &Sandbox, layout: &str) -> String {
    let index = parse(&sandbox.read(&format!("{layout}/index.json")));
    assert_eq!(index["manifests"].as_array().unwrap().len(), 1);
    index["manifests"][0]["digest"].as_str().unwrap().to_owned()
}

/// Runs what must fail; returns what it says.
fn refused(sandbox: &Sandbox, line: &str, status: i32) -> String {
    let output = sandbox.run(&words(line));
    assert_eq!(output.status.code(), Some(status), "{line}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn an_index_is_converted_shown_and_copied() {
    let sandbox = sandbox();
    let all = "convert --platform=all oci:multi:x";
    let said = sandbox.ok(&words(&format!("{all} oci:made:x")));
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("linux/arm64: 1 layer of "), "{said}");
    assert!(
        said.ends_with("oci:made:x: an index of 2 images\n"),
        "{said}"
    );
    let report = parse(&sandbox.ok(&words(&format!("{all} oci:made:x --json"))));
    assert_eq!(report["schema"], "bcow.convert-index/1");
    assert_eq!(report["index"], listed(&sandbox, "made"));
    // Commands open the image of this machine.
    sandbox.ok(&words("ls oci:made:x"));
    let facts = parse(&sandbox.ok(&words("inspect --json oci:made:x")));
    let others = facts["other_platforms"].as_array().unwrap();
    assert_eq!(others.len(), 1);
    let shown = String::from_utf8(sandbox.ok(&words("inspect oci:made:x"))).unwrap();
    let line = format!("other platforms  {}", others[0].as_str().unwrap());
    assert!(shown.contains(&line), "{shown}");
    // A copy is one of the whole index, and into a file, of one image.
    let said = String::from_utf8(sandbox.ok(&words("copy oci:made:x oci:copied:x"))).unwrap();
    assert!(said.starts_with("oci:copied:x: 2 manifests, "), "{said}");
    assert_eq!(listed(&sandbox, "copied"), listed(&sandbox, "made"));
    let report = parse(&sandbox.ok(&words("copy --json oci:made:x oci-archive:made.tar:x")));
    assert_eq!(report["images"].as_array().unwrap().len(), 2);
    let pinned = format!("copy --root-hash={} oci:made:x oci:pinned", "0".repeat(64));
    let said = refused(&sandbox, &pinned, 2);
    assert!(said.contains("--root-hash is for one image"), "{said}");
    assert!(!sandbox.path("pinned").exists());
    let one = words("copy --json --platform=linux/amd64 oci-archive:made.tar oci:one:x");
    let report = parse(&sandbox.ok(&one));
    assert_eq!(report["left_out"]["platforms"], json!(["linux/arm64"]));
    assert_eq!(report["manifest"], listed(&sandbox, "one"));
}

#[test]
fn an_index_is_replaced_by_one_image_only_by_force() {
    let sandbox = sandbox();
    sandbox.ok(&words(
        "convert --platform=linux/amd64,linux/arm64 oci:multi:x oci:made:x",
    ));
    sandbox.ok(&words(
        "convert --platform=linux/amd64 oci:multi:x oci:one:x",
    ));
    let index = listed(&sandbox, "made");
    for line in [
        "convert --platform=linux/amd64 oci:multi:x oci:made:x",
        "convert image.bcow oci:made:x",
        "copy oci:one:x oci:made:x",
        "export oci:one:x --to=oci:made:x",
    ] {
        let said = refused(&sandbox, line, 1);
        assert!(said.contains("is an index of 2 manifests"), "{said}");
        assert!(said.contains("hint: write to another name"), "{said}");
        assert_eq!(listed(&sandbox, "made"), index, "{line}");
    }
    sandbox.ok(&words("copy --force oci:one:x oci:made:x"));
    assert_eq!(listed(&sandbox, "made"), listed(&sandbox, "one"));
    // An index replaces anything.
    sandbox.ok(&words("convert --platform=all oci:multi:x oci:made:x"));
    assert_eq!(listed(&sandbox, "made"), index);
    sandbox.ok(&words(
        "convert --force --platform=linux/amd64 oci:multi:x oci:made:x",
    ));
}

#[test]
fn what_takes_one_image_refuses_several_platforms() {
    let sandbox = sandbox();
    for (line, part) in [
        (
            "convert --platform=all oci:multi:x x.bcow",
            "write to oci:DIR[:REF], oci-archive:",
        ),
        (
            "convert --platform=all tar:sample.tar oci:o",
            "not for tar:sample.tar",
        ),
        (
            "convert --platform=all image.bcow oci:o",
            "not for image.bcow",
        ),
        (
            "convert --attestations=drop oci:multi:x oci:o",
            "an index (--platform all)",
        ),
        (
            "convert --attestations=none oci:multi:x oci:o",
            "use keep or drop",
        ),
        ("copy --platform=all oci:multi:x x.bcow", "takes one image"),
        (
            "copy --platform=linux/amd64 image.bcow x.bcow",
            "not for image.bcow",
        ),
        (
            "copy --platform=linux image.bcow x.bcow",
            "invalid platform",
        ),
    ] {
        let said = refused(&sandbox, line, 2);
        assert!(said.contains(part), "{line}: {said}");
    }
    sandbox.layout("single", "x", &["sample.tar"]);
    let said = refused(
        &sandbox,
        "convert --platform=linux/amd64,linux/386 oci:single oci:o",
        2,
    );
    assert!(
        said.contains("is for an index, and oci:single is not"),
        "{said}"
    );
    // It is all that there is.
    sandbox.ok(&words("convert --platform=all oci:single oci:o"));
    let said = refused(&sandbox, "copy oci:multi:x oci:o", 1);
    assert!(said.contains("ordinary OCI image"), "{said}");
}
