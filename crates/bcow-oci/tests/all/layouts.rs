//! The selection of an image in a layout or archive.

use bcow_oci::{ConvertOptions, Digest, Limits, Platform};
use bcow_testkit::changed;
use serde_json::{Value, json};

use crate::support::{
    CONFIG, INDEX, LAYER, Layout, MANIFEST, archive_source, convert_with, docker_source, gzip,
    layered_with, message, oci_archive, options,
};
use bcow_testkit::tar::Tar;

fn layer(name: &str) -> Vec<u8> {
    Tar::new().file(name, "").done()
}

fn for_platform(platform: &str) -> ConvertOptions {
    ConvertOptions {
        platform: Some(platform.parse::<Platform>().unwrap()),
        ..options()
    }
}

/// A layout whose index leads to images for several platforms through another index.
fn multi_platform() -> Layout {
    let mut layout = Layout::new();
    let mut manifests = Vec::new();
    for (os, architecture, variant) in [
        ("linux", "amd64", None),
        ("linux", "arm64", Some("v8")),
        ("linux", "arm", Some("v6")),
        ("linux", "arm", Some("v7")),
        ("linux", "riscv64", None),
        ("unknown", "unknown", None),
    ] {
        let name = format!("{architecture}{}", variant.unwrap_or_default());
        let tar = layer(&name);
        let mut image = layout.image(
            &format!("{os}/{architecture}"),
            &[(LAYER, tar.clone(), tar)],
        );
        image["platform"] = json!({"os": os, "architecture": architecture});
        if let Some(variant) = variant {
            image["platform"]["variant"] = json!(variant);
        }
        manifests.push(image);
    }
    let index = json!({"schemaVersion": 2, "manifests": manifests});
    let index = layout.blob(INDEX, index.to_string().as_bytes());
    layout.list(index, Some("multi"));
    layout
}

#[test]
fn the_platform_picks_from_an_index() {
    let layout = multi_platform();
    for (platform, found) in [
        ("linux/amd64", "/amd64 "),
        ("linux/arm64", "/arm64v8 "),
        ("linux/arm64/v8", "/arm64v8 "),
        ("linux/aarch64", "/arm64v8 "),
        ("linux/arm/v6", "/armv6 "),
        ("linux/arm/v7", "/armv7 "),
        ("linux/arm/v8", "/armv7 "),
        ("linux/armhf", "/armv7 "),
        ("linux/arm", "/armv7 "),
    ] {
        let converted =
            convert_with(&layout.source(Some("multi")), &for_platform(platform)).unwrap();
        assert!(converted.lines().starts_with(found), "{platform}");
    }
    let failure = convert_with(&layout.source(None), &for_platform("linux/s390x"));
    insta::assert_snapshot!(message(failure));
}

#[test]
fn a_single_image_for_another_platform_is_used_unless_a_platform_is_given() {
    let mut layout = Layout::new();
    let image = layout.image("plan9/mips", &[(LAYER, layer("x"), layer("x"))]);
    layout.list(image, None);
    assert!(convert_with(&layout.source(None), &options()).is_ok());
    let failure = convert_with(&layout.source(None), &for_platform("linux/amd64"));
    insta::assert_snapshot!(message(failure), @r"
    TMP has no image for platform linux/amd64
    hint: choose one with --platform: plan9/mips
    ");
}

#[test]
fn a_name_or_digest_selects_an_image_without_guessing() {
    let mut messages = Vec::new();
    let mut layout = Layout::new();
    let mut digests = Vec::new();
    for name in ["one", "two"] {
        let image = layout.image("linux/amd64", &[(LAYER, layer(name), layer(name))]);
        digests.push(image["digest"].as_str().unwrap().to_owned());
        layout.list(image, Some(name));
    }
    let convert = |reference| convert_with(&layout.source(reference), &options());
    assert!(convert(Some("two")).unwrap().lines().starts_with("/two "));
    let by_digest = format!("@{}", digests[0]);
    assert!(
        convert(Some(&by_digest))
            .unwrap()
            .lines()
            .starts_with("/one ")
    );
    messages.push(message(convert(None)));
    messages.push(message(convert(Some("three"))));
    insta::assert_snapshot!(messages.join("\n"), @r#"
    TMP has several images
    hint: available: one, two
    TMP has no image "three"
    hint: available: one, two
    "#);
}

#[test]
fn one_image_under_two_names_is_not_ambiguous() {
    let mut layout = Layout::new();
    let image = layout.image("linux/amd64", &[(LAYER, layer("x"), layer("x"))]);
    layout.list(image.clone(), Some("1.0"));
    layout.list(image, Some("latest"));
    assert!(convert_with(&layout.source(None), &options()).is_ok());
}

#[test]
fn layers_may_be_compressed_in_any_known_way() {
    let mut layout = Layout::new();
    let (a, b, c) = (layer("a"), layer("b"), layer("c"));
    let zstd = zstd::bulk::compress(&b, 3).unwrap();
    let image = layout.image(
        "linux/amd64",
        &[
            (
                "application/vnd.docker.image.rootfs.diff.tar.gzip",
                gzip(&a),
                a,
            ),
            ("application/vnd.oci.image.layer.v1.tar+zstd", zstd, b),
            (
                "application/vnd.oci.image.layer.nondistributable.v1.tar",
                c.clone(),
                c,
            ),
        ],
    );
    layout.list(image, None);
    let converted = convert_with(&layout.source(None), &options()).unwrap();
    assert_eq!(converted.report.entries, 4);
    let layers = &converted.report.layers;
    assert_eq!(layers.len(), 3);
    assert_eq!(
        layers[1].media_type.as_deref(),
        Some("application/vnd.oci.image.layer.v1.tar+zstd")
    );
}

#[test]
fn sha512_digests_are_understood() {
    use sha2::Digest as _;
    let mut layout = Layout::new();
    let tar = layer("x");
    let hex: String = sha2::Sha512::digest(&tar)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    std::fs::create_dir(layout.path().join("blobs/sha512")).unwrap();
    std::fs::write(layout.path().join("blobs/sha512").join(&hex), &tar).unwrap();
    let digest = format!("sha512:{hex}");
    let config = json!({"rootfs": {"type": "layers", "diff_ids": [digest]}});
    let config = layout.blob(CONFIG, config.to_string().as_bytes());
    let descriptor = json!({"mediaType": LAYER, "digest": digest, "size": tar.len()});
    let manifest = layout.manifest(config, vec![descriptor]);
    layout.list(manifest, None);
    let converted = convert_with(&layout.source(None), &options()).unwrap();
    let found = converted.report.layers[0].digest.as_ref();
    assert_eq!(found.map(Digest::to_string), Some(digest));
}

#[test]
fn the_metadata_records_the_image_and_neither_its_place_nor_the_host() {
    let layout = Layout::of(&[layer("x")]);
    let options = changed(options(), |new| new.source_date_epoch = Some(1_700_000_000));
    let converted = convert_with(&layout.source(Some("test")), &options).unwrap();
    insta::assert_snapshot!(format!("{:#}", converted.metadata()));
}

/// All files of a layout in a tar archive.
fn archive(layout: &Layout, prefix: &str) -> Vec<u8> {
    let mut tar = Tar::new();
    let mut names = vec!["index.json".to_owned(), "oci-layout".to_owned()];
    for entry in std::fs::read_dir(layout.path().join("blobs/sha256")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        names.push(format!("blobs/sha256/{name}"));
    }
    for name in names {
        let bytes = std::fs::read(layout.path().join(&name)).unwrap();
        tar = tar.file(format!("{prefix}{name}"), bytes);
    }
    tar.done()
}

#[test]
fn a_layout_in_an_archive_gives_the_same_tree() {
    let layout = Layout::of(&[layer("x"), layer("y")]);
    let expected = convert_with(&layout.source(None), &options())
        .unwrap()
        .dump();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.tar");
    for prefix in ["", "./"] {
        std::fs::write(&file, archive(&layout, prefix)).unwrap();
        for source in [oci_archive, docker_source] {
            let source = source(&file, Some("test"));
            assert_eq!(convert_with(&source, &options()).unwrap().dump(), expected);
        }
    }
}

#[test]
fn compressed_archives_of_images_are_decompressed() {
    let layout = Layout::of(&[layer("x"), layer("y")]);
    let oci = archive(&layout, "");
    let expected = convert_with(&layout.source(None), &options())
        .unwrap()
        .dump();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.tar");
    let convert = |bytes: &[u8], options: &ConvertOptions| {
        std::fs::write(&file, bytes).unwrap();
        let source = oci_archive(&file, None);
        convert_with(&source, options)
    };
    let zstd = zstd::bulk::compress(&oci, 3).unwrap();
    for bytes in [&gzip(&oci), &zstd] {
        assert_eq!(convert(bytes, &options()).unwrap().dump(), expected);
    }
    let docker = docker_archive().done();
    std::fs::write(&file, gzip(&docker)).unwrap();
    let source = docker_source(&file, None);
    assert_eq!(convert_with(&source, &options()).unwrap().report.entries, 3);
    let mut messages = Vec::new();
    messages.push(message(convert(&gzip(&oci)[..500], &options())));
    let mut garbage = gzip(&oci);
    garbage.extend_from_slice(b"garbage");
    messages.push(message(convert(&garbage, &options())));
    let small = ConvertOptions {
        limits: Limits {
            max_bytes: oci.len() as u64 - 1,
            ..Limits::default()
        },
        ..options()
    };
    messages.push(message(convert(&gzip(&oci), &small)));
    messages.push(message(convert(b"\xfd7zXZ\0 and more", &options())));
    let nowhere = changed(options(), |new| new.scratch = "/no/such/directory".into());
    messages.push(message(convert(&gzip(&oci), &nowhere)));
    insta::assert_snapshot!(
        messages
            .join("\n")
            .replace(&oci.len().to_string(), "ALL")
            .replace(&(oci.len() - 1).to_string(), "LIMIT")
    );
}

/// A layout with the configuration and the layers of `other`, compressed, under another name.
fn compressed(other: &Layout, tars: &[Vec<u8>]) -> Layout {
    let mut layout = Layout::new();
    let config = std::fs::read(other.path().join("blobs/sha256").join(config_of(other))).unwrap();
    let config = layout.blob(CONFIG, &config);
    let layers = tars.iter().map(|tar| {
        let media_type = "application/vnd.oci.image.layer.v1.tar+gzip";
        layout.blob(media_type, &gzip(tar))
    });
    let manifest = layout.manifest(config, layers.collect());
    layout.list(manifest, Some("another:name"));
    layout
}

/// The file name of the configuration of the only image.
fn config_of(layout: &Layout) -> String {
    let read = |path: &str| -> Value {
        serde_json::from_slice(&std::fs::read(layout.path().join(path)).unwrap()).unwrap()
    };
    let hex = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap();
        digest.strip_prefix("sha256:").unwrap().to_owned()
    };
    let manifest = hex(&read("index.json")["manifests"][0]);
    hex(&read(&format!("blobs/sha256/{manifest}"))["config"])
}

#[test]
fn equal_images_give_equal_files() {
    let tars = [layer("x"), layer("y")];
    let layout = Layout::of(&tars);
    let other = compressed(&layout, &tars);
    let dir = tempfile::tempdir().unwrap();
    let oci = dir.path().join("oci.tar");
    std::fs::write(&oci, archive(&layout, "")).unwrap();
    let config = config_of(&layout);
    let manifest = json!([{
        "Config": format!("{config}.json"), "RepoTags": ["box:1"],
        "Layers": ["1/layer.tar", "2/layer.tar"],
    }]);
    let docker = dir.path().join("docker.tar");
    let config_bytes = std::fs::read(layout.path().join("blobs/sha256").join(&config)).unwrap();
    let saved = Tar::new()
        .file(format!("{config}.json"), config_bytes)
        .file("1/layer.tar", tars[0].clone())
        .file("2/layer.tar", tars[1].clone())
        .file("manifest.json", manifest.to_string());
    std::fs::write(&docker, saved.done()).unwrap();
    let expected = convert_with(&layout.source(None), &options()).unwrap();
    for source in [
        other.source(None),
        oci_archive(&oci, Some("test")),
        docker_source(&docker, None),
    ] {
        let converted = convert_with(&source, &options()).unwrap();
        assert!(converted.bytes() == expected.bytes(), "{source}");
        assert_eq!(converted.report.source, Some(source.to_string()));
    }
    // A stack also records the compressed layers, for an export.
    let expected = layered_with(&layout.source(None), &options(), |_| {}).unwrap();
    let source = oci_archive(&oci, Some("test"));
    let converted = layered_with(&source, &options(), |_| {}).unwrap();
    assert_eq!(converted.report.manifest, expected.report.manifest);
}

#[test]
fn annotations_stay_and_the_rest_of_an_index_is_reported() {
    let mut layout = Layout::new();
    let mut manifests = Vec::new();
    for architecture in ["amd64", "arm64"] {
        let tar = layer(architecture);
        let image = layout.image(
            &format!("linux/{architecture}"),
            &[(LAYER, tar.clone(), tar)],
        );
        let digest = image["digest"]
            .as_str()
            .unwrap()
            .replace("sha256:", "blobs/sha256/");
        let bytes = std::fs::read(layout.path().join(digest)).unwrap();
        let mut manifest: Value = serde_json::from_slice(&bytes).unwrap();
        manifest["annotations"] = json!({
            "org.example.of": "the manifest", "org.example.manifest": architecture,
            "io.bcow.merkle-root": "a claim",
        });
        let mut image = layout.blob(MANIFEST, manifest.to_string().as_bytes());
        image["platform"] = json!({"os": "linux", "architecture": architecture});
        image["annotations"] = json!({"org.example.of": "the entry", "org.example.entry": "1"});
        manifests.push(image);
    }
    let mut attestation = layout.manifest(layout.blob(CONFIG, b"{}"), Vec::new());
    attestation["platform"] = json!({"os": "unknown", "architecture": "unknown"});
    attestation["annotations"] = json!({"vnd.docker.reference.type": "attestation-manifest"});
    manifests.push(attestation);
    let index = json!({
        "schemaVersion": 2, "manifests": manifests,
        "annotations": {"org.example.of": "the index", "org.example.index": "1"},
    });
    let index = layout.blob(INDEX, index.to_string().as_bytes());
    layout.list(index, Some("name"));
    let options = for_platform("linux/amd64");
    let source = layout.source(Some("name"));
    let kept = ["entry", "index", "manifest", "of"].map(|name| format!("org.example.{name}"));

    let layered = layered_with(&source, &options, |_| {}).unwrap();
    let hex = layered.report.manifest.hex();
    let manifest = std::fs::read(layered.blobs().join(hex)).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let annotations = manifest["annotations"].as_object().unwrap();
    for (name, value) in kept.iter().zip(["1", "1", "amd64", "the manifest"]) {
        assert_eq!(annotations[name], json!(value), "{name}");
    }
    assert!(!annotations.contains_key("io.bcow.merkle-root"));
    let left_out = &layered.report.left_out;
    assert_eq!(left_out.platforms, ["linux/arm64"]);
    assert_eq!(left_out.attestations, 1);
    assert!(left_out.annotations.is_empty());

    // A file has no manifest.
    let flattened = convert_with(&source, &options).unwrap();
    assert_eq!(flattened.report.left_out.platforms, ["linux/arm64"]);
    assert_eq!(flattened.report.left_out.annotations, kept);
}

/// An archive of an old `docker save`, which stored a layer that occurs twice as a file and a link.
fn docker_archive() -> Tar {
    let tar = layer("x");
    let compressed = layer("y");
    let diff_ids = [&tar, &compressed, &tar].map(|tar| Digest::of(tar).to_string());
    let config = json!({
        "os": "linux", "architecture": "amd64",
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    })
    .to_string();
    let config_name = format!("{}.json", Digest::of(config.as_bytes()).hex());
    let manifest = json!([{
        "Config": config_name,
        "RepoTags": ["example.test/tools/box:latest", "box:1"],
        "Layers": ["1/layer.tar", "2/layer.tar", "3/layer.tar"],
    }]);
    Tar::new()
        .file(config_name, config)
        .dir("1")
        .file("1/layer.tar", tar)
        .file("2/layer.tar", gzip(&compressed))
        .symlink("3/layer.tar", "../1/layer.tar")
        .file("manifest.json", manifest.to_string())
}

#[test]
fn docker_archives_are_understood() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("saved.tar");
    std::fs::write(&file, docker_archive().done()).unwrap();
    let convert =
        |reference: Option<&str>| convert_with(&docker_source(&file, reference), &options());
    for reference in [
        None,
        Some("box:1"),
        Some("tools/box"),
        Some("example.test/tools/box:latest"),
        Some("@0"),
    ] {
        let converted = convert(reference).unwrap();
        assert_eq!(converted.report.entries, 3, "{reference:?}");
        assert_eq!(converted.report.layers.len(), 3);
    }
    for absent in ["nobox", "@1"] {
        let hint = "hint: available: example.test/tools/box:latest, box:1";
        let expected = format!("TMP/saved.tar has no image {absent:?}\n{hint}");
        assert_eq!(message(convert(Some(absent))), expected);
    }
}

#[test]
fn an_archive_is_what_its_content_says() {
    let oci = archive(&Layout::of(&[layer("x")]), "./");
    // The files of a web site, and a root file system that begins with the name of a blob.
    let site = Tar::new().file("manifest.json", "{}").file("a", "");
    let root = Tar::new().file("blobs/a", "");
    let dir = tempfile::tempdir().unwrap();
    for (tar, entries, layers) in [
        (docker_archive().done(), 3, 3),
        (oci, 2, 1),
        (site.done(), 3, 1),
        (root.done(), 3, 1),
        (layer("etc"), 2, 1),
    ] {
        let zstd = zstd::encode_all(&tar[..], 3).unwrap();
        for (name, bytes) in [("gz", gzip(&tar)), ("zst", zstd), ("tar", tar)] {
            let file = dir.path().join(name);
            let _ = std::fs::remove_file(&file);
            std::fs::write(&file, &bytes).unwrap();
            let converted = convert_with(&archive_source(&file), &options()).unwrap();
            let report = &converted.report;
            assert_eq!((report.entries, report.layers.len()), (entries, layers));
            // The same through a pipe, which has to be stored.
            std::fs::remove_file(&file).unwrap();
            let made = std::process::Command::new("mkfifo").arg(&file).status();
            assert!(made.is_ok_and(|status| status.success()));
            let to = file.clone();
            let writer = std::thread::spawn(move || std::fs::write(to, bytes).unwrap());
            let piped = convert_with(&archive_source(&file), &options()).unwrap();
            writer.join().unwrap();
            assert!(piped.bytes() == converted.bytes());
        }
    }
}

#[test]
fn a_docker_archive_that_contradicts_itself_is_refused() {
    let mut messages = Vec::new();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("saved.tar");
    let convert = |tar: Tar| {
        std::fs::write(&file, tar.done()).unwrap();
        let source = docker_source(&file, None);
        convert_with(&source, &options())
    };
    let other_layer = docker_archive().file("1/layer.tar", layer("evil"));
    messages.push(message(convert(other_layer)));
    let nothing = Tar::new().file("readme", "");
    messages.push(message(convert(nothing)));
    let bad = Tar::new().file("manifest.json", "[{}]");
    messages.push(message(convert(bad)));
    let empty = Tar::new().file("manifest.json", "[]");
    messages.push(message(convert(empty)));
    let escape = json!([{"Config": "../../etc/passwd", "Layers": []}]);
    let escape = Tar::new().file("manifest.json", escape.to_string());
    messages.push(message(convert(escape)));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn an_index_of_platforms_without_names_is_one_image() {
    let mut layout = Layout::new();
    for architecture in ["amd64", "arm64"] {
        let tar = layer(architecture);
        let mut image: Value = layout.image(
            &format!("linux/{architecture}"),
            &[(LAYER, tar.clone(), tar)],
        );
        image["platform"] = json!({"os": "linux", "architecture": architecture});
        layout.list(image, None);
    }
    let converted = convert_with(&layout.source(None), &for_platform("linux/arm64")).unwrap();
    assert!(converted.lines().starts_with("/arm64 "));
}
