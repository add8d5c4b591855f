//! Indexes: images for several platforms, converted and copied together.

use std::path::Path;

use bcow_oci::copy::{CopyIndex, copy_index};
use bcow_oci::{
    Attestations, ConvertError, ImageIndex, IndexReport, LayerOrigin, LayoutOptions, LayoutPlace,
    Platforms, RunOptions, Source, convert_index, convert_to_layout,
};
use bcow_testkit::tar::Tar;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{CONFIG, INDEX, LAYER, Layout, MANIFEST, options};

const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const ATTESTED: &str = "vnd.docker.reference.digest";

/// A layout with an index `name`: images for amd64 and, in a nested index, for arm64 and Windows.
/// Those for Linux share a layer. amd64 and arm64 each have an attestation.
fn layout() -> Layout {
    let mut layout = Layout::new();
    let shared = Tar::new().file("shared", "both").done();
    let mut entries = Vec::new();
    for platform in ["linux/amd64", "linux/arm64", "windows/amd64"] {
        let own = Tar::new().file("own", platform).done();
        let layers = [
            (LAYER, shared.clone(), shared.clone()),
            (LAYER, own.clone(), own),
        ];
        let mut image = layout.image(platform, &layers);
        let (os, architecture) = platform.split_once('/').unwrap();
        image["platform"] = json!({"os": os, "architecture": architecture});
        image["annotations"] = json!({"org.example.entry": platform});
        entries.push(image);
    }
    let attestations = [0, 1].map(|index| {
        let statement = layout.blob(
            "application/vnd.in-toto+json",
            format!("{index}").as_bytes(),
        );
        let config = layout.blob(CONFIG, format!("{{\"of\": {index}}}").as_bytes());
        let mut attestation = layout.manifest(config, vec![statement]);
        attestation["platform"] = json!({"os": "unknown", "architecture": "unknown"});
        attestation["annotations"] = json!({
            "vnd.docker.reference.type": "attestation-manifest",
            ATTESTED: entries[index]["digest"],
        });
        attestation
    });
    let nested = json!({"schemaVersion": 2, "manifests": entries[1..]});
    let nested = layout.blob(INDEX, nested.to_string().as_bytes());
    let index = json!({
        "schemaVersion": 2, "mediaType": DOCKER_INDEX,
        "manifests": [entries[0], attestations[0], nested, attestations[1]],
        "annotations": {"org.example.index": "kept"},
    });
    let index = layout.blob(DOCKER_INDEX, index.to_string().as_bytes());
    layout.list(index, Some("name"));
    layout
}

fn index_of(source: &Source) -> Option<ImageIndex> {
    ImageIndex::of_layout(source, Path::new("/none"), &(), None).unwrap()
}

fn copied_index(source: &Source) -> Option<CopyIndex> {
    CopyIndex::of_layout(source, Path::new("/none"), &(), None).unwrap()
}

/// A new layout with the name `name`.
fn destination() -> (TempDir, LayoutOptions) {
    let dir = tempfile::tempdir().unwrap();
    let place = LayoutPlace {
        path: dir.path().join("layout"),
        reference: Some("name".to_owned()),
        ..LayoutPlace::default()
    };
    let layout = LayoutOptions {
        place,
        ..LayoutOptions::default()
    };
    (dir, layout)
}

fn convert(
    platforms: &str,
    attestations: Attestations,
    to: &LayoutOptions,
) -> Result<IndexReport, ConvertError> {
    let source = layout();
    let index = index_of(&source.source(Some("name"))).unwrap();
    let platforms: Platforms = platforms.parse()?;
    convert_index(&index, &platforms, attestations, to, &options(), &())
}

fn blob(layout: &Path, digest: &Value) -> Vec<u8> {
    let hex = digest.as_str().unwrap().strip_prefix("sha256:").unwrap();
    std::fs::read(layout.join("blobs/sha256").join(hex)).unwrap()
}

fn json_of(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

/// The index that index.json lists first, and its descriptor.
fn written(to: &LayoutOptions) -> (Value, Value) {
    let path = &to.place.path;
    let list = json_of(&std::fs::read(path.join("index.json")).unwrap());
    let entry = list["manifests"][0].clone();
    assert_eq!(list["manifests"].as_array().unwrap().len(), 1);
    (json_of(&blob(path, &entry["digest"])), entry)
}

#[test]
fn images_of_all_platforms_become_an_index() {
    let (_dir, to) = destination();
    let report = convert("all", Attestations::Keep, &to).unwrap();
    assert_eq!(report.left_out.platforms, ["windows/amd64"]);
    assert_eq!((report.attestations, report.left_out.attestations), (2, 0));
    let (index, entry) = written(&to);
    assert_eq!(entry["mediaType"], INDEX);
    assert_eq!(entry["digest"], report.index.to_string());
    assert_eq!(
        entry["annotations"]["org.opencontainers.image.ref.name"],
        "name"
    );
    assert_eq!(index["annotations"]["org.example.index"], "kept");
    let entries = index["manifests"].as_array().unwrap();
    assert_eq!(entries.len(), 4);
    for (number, platform) in ["linux/amd64", "linux/arm64"].into_iter().enumerate() {
        let (image, report) = (&entries[number], &report.images[number]);
        assert_eq!(image["digest"], report.manifest.to_string());
        assert_eq!(report.platform.as_ref().unwrap().to_string(), platform);
        assert_eq!(
            image["platform"]["architecture"],
            platform["linux/".len()..]
        );
        assert_eq!(image["annotations"], json!({"org.example.entry": platform}));
        assert_eq!(image["artifactType"], "application/vnd.bcow.image.v1");
        // The same as alone.
        let (_dir, alone) = destination();
        let mut options = options();
        options.platform = Some(platform.parse().unwrap());
        let alone = convert_to_layout(&layout().source(Some("name")), &alone, &options, &());
        assert_eq!(alone.unwrap().manifest, report.manifest);
        // An attestation names the new image, and has the bytes that it had.
        let attestation = &entries[2 + number];
        assert_eq!(attestation["annotations"][ATTESTED], image["digest"]);
        assert_eq!(attestation["platform"]["os"], "unknown");
        let manifest = json_of(&blob(&to.place.path, &attestation["digest"]));
        let statement = blob(&to.place.path, &manifest["layers"][0]["digest"]);
        assert_eq!(statement, number.to_string().as_bytes());
        blob(&to.place.path, &manifest["config"]["digest"]);
    }
    let made: Vec<_> = report.images[1]
        .layers
        .iter()
        .map(|layer| layer.made)
        .collect();
    assert_eq!(made, [LayerOrigin::Layout, LayerOrigin::Converted]);
}

#[test]
fn listed_platforms_and_their_attestations_are_taken() {
    let (_dir, to) = destination();
    let report = convert("linux/arm64,linux/aarch64", Attestations::Keep, &to).unwrap();
    assert_eq!(report.left_out.platforms, ["linux/amd64", "windows/amd64"]);
    assert_eq!((report.attestations, report.left_out.attestations), (1, 1));
    assert_eq!(written(&to).0["manifests"].as_array().unwrap().len(), 2);
    let report = convert("linux/arm64,linux/amd64", Attestations::Drop, &to).unwrap();
    assert_eq!(report.left_out.attestations, 2);
    let (index, _) = written(&to);
    let (first, second) = (&index["manifests"][0], &index["manifests"][1]);
    assert_eq!(first["platform"]["architecture"], "amd64");
    assert_eq!(second["platform"]["architecture"], "arm64");
    // Both images have the layers that the layout has.
    let layers = report.images.iter().flat_map(|image| &image.layers);
    let converted = layers.filter(|layer| layer.made == LayerOrigin::Converted);
    assert_eq!(converted.count(), 1);
    let missing = convert("linux/amd64,linux/s390x", Attestations::Keep, &to);
    let missing = missing.unwrap_err().to_string();
    assert!(
        missing.ends_with("no image for platform linux/s390x"),
        "{missing}"
    );
    let (again, _) = written(&to);
    assert_eq!(again, index);
}

#[test]
fn an_image_does_not_replace_an_index_unasked() {
    let (_dir, mut to) = destination();
    convert("all", Attestations::Drop, &to).unwrap();
    let source = layout();
    let one = |to: &LayoutOptions| {
        convert_to_layout(&source.source(Some("name")), to, &options(), &()).map(drop)
    };
    let refused = one(&to).unwrap_err().to_string();
    assert!(refused.contains("is an index of 2 manifests"), "{refused}");
    assert_eq!(written(&to).1["mediaType"], INDEX);
    to.place.replaces_index = true;
    one(&to).unwrap();
    assert_eq!(written(&to).1["mediaType"], MANIFEST);
    to.place.replaces_index = false;
    one(&to).unwrap();
    convert("all", Attestations::Drop, &to).unwrap();
}

#[test]
fn an_index_is_copied_with_all_that_it_lists() {
    let (_dir, from) = destination();
    let report = convert("all", Attestations::Keep, &from).unwrap();
    let source = Source::Oci {
        directory: from.place.path.clone(),
        reference: None,
    };
    let archive = from.place.path.with_extension("tar");
    let (_second, to) = destination();
    let copy = |source: &Source, to: &LayoutPlace| {
        let index = copied_index(source).unwrap();
        copy_index(&index, to, &RunOptions::default(), &()).unwrap()
    };
    let packed = LayoutPlace {
        form: bcow_oci::LayoutForm::Archive,
        path: archive.clone(),
        ..from.place.clone()
    };
    copy(&source, &packed);
    let packed = Source::OciArchive {
        file: archive,
        reference: None,
    };
    let copied = copy(&packed, &to.place);
    assert_eq!(copied.manifest, report.index);
    assert_eq!(copied.images.len(), 4);
    assert_eq!(written(&to), written(&from));
    let names = |to: &LayoutOptions| {
        let entries = std::fs::read_dir(to.place.path.join("blobs/sha256")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&to), names(&from));
    // Of the configurations, each is written again.
    let again = copy(&packed, &to.place);
    let copied: u64 = again.blobs.iter().map(|blob| blob.copied_bytes).sum();
    assert!(copied < 2000, "{copied}");
    // An ordinary index is not one to copy.
    let ordinary = layout();
    assert!(index_of(&ordinary.source(None)).is_some());
    assert!(copied_index(&ordinary.source(None)).is_none());
}

#[test]
fn one_image_is_no_index() {
    let one = Layout::of(&[Tar::new().file("a", "").done()]);
    assert!(index_of(&one.source(None)).is_none());
}
