//! The converter refuses invalid layouts and streams.

use std::path::Path;

use bcow_oci::{ConvertError, LayoutOptions, LayoutPlace, Source, TarInput, convert_to_layout};
use bcow_testkit::changed;
use serde_json::json;

use crate::support::{
    CONFIG, Converted, INDEX, LAYER, Layout, convert_layers, convert_tar, convert_tar_with,
    convert_with, docker_source, gzip, message, oci_archive, options,
};
use bcow_testkit::tar::Tar;

const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

fn convert(layout: &Layout) -> Result<Converted, ConvertError> {
    convert_with(&layout.source(None), &options())
}

fn tar() -> Vec<u8> {
    let noise: Vec<u8> = (0..50_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8)
        .collect();
    Tar::new().file("a", noise).done()
}

/// A layout of one layer stored as these bytes.
fn stored(media_type: &str, bytes: Vec<u8>, tar: Vec<u8>) -> Layout {
    let mut layout = Layout::new();
    let image = layout.image("linux/amd64", &[(media_type, bytes, tar)]);
    layout.list(image, None);
    layout
}

/// Masks the digests, which depend on the compressor that made the input.
fn masked(text: String) -> String {
    let mut parts = text.split("sha256:");
    let mut masked = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        masked.push_str("sha256:...");
        masked.push_str(part.trim_start_matches(|c: char| c.is_ascii_hexdigit()));
    }
    masked
}

#[test]
fn damaged_compression_is_refused() {
    let mut messages = Vec::new();
    let refused = |media_type, bytes| masked(message(convert(&stored(media_type, bytes, tar()))));
    let gz = gzip(&tar());
    let zst = zstd::bulk::compress(&tar(), 3).unwrap();
    messages.push(refused(GZIP, gz[..gz.len() / 2].to_vec()));
    messages.push(refused(GZIP, gz[..gz.len() - 3].to_vec()));
    let mut crc = gz.clone();
    let at = crc.len() - 6;
    crc[at] ^= 1;
    messages.push(refused(GZIP, crc));
    messages.push(refused(GZIP, [&gz[..], b"garbage"].concat()));
    messages.push(refused(ZSTD, zst[..zst.len() / 2].to_vec()));
    let mut damaged = zst.clone();
    let middle = damaged.len() / 2;
    damaged[4..12].fill(0xff);
    damaged[middle] ^= 0xff;
    messages.push(refused(ZSTD, damaged));
    messages.push(refused(GZIP, tar()));
    messages.push(refused(LAYER, gz.clone()));
    messages.push(refused(LAYER, b"BZh91AY&SY".to_vec()));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn a_large_window_is_refused() {
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(28).unwrap();
    std::io::Write::write_all(&mut encoder, &tar()).unwrap();
    let bytes = encoder.finish().unwrap();
    let text = masked(message(convert(&stored(ZSTD, bytes, tar()))));
    insta::assert_snapshot!(text, @r"
    layer 1 of 1 (sha256:...): too many bytes of decompression window: the limit is 134217728
    hint: compress the layer with a window of at most 128 MiB (zstd --long=27)
    ");
}

#[test]
fn content_that_differs_from_the_manifest_is_refused() {
    let mut messages = Vec::new();
    // The same length, other bytes.
    let layout = Layout::of(&[tar()]);
    let digest = bcow_oci::Digest::of(&tar());
    let path = layout.path().join("blobs/sha256").join(digest.hex());
    let mut bytes = tar();
    bytes[600] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    messages.push(message(convert(&layout)));
    // The tar header is damaged too, but a digest error is more precise.
    bytes[3] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert!(matches!(
        convert(&layout),
        Err(ConvertError::Mismatch { what: "digest", .. })
    ));
    std::fs::write(&path, &bytes[..1024]).unwrap();
    messages.push(message(convert(&layout)));
    std::fs::remove_file(&path).unwrap();
    messages.push(message(convert(&layout)));
    // The converter does not wait for a writer of a FIFO.
    let status = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(status.is_ok_and(|status| status.success()));
    let text = message(convert(&layout));
    assert!(text.ends_with("not a regular file"), "{text}");
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn a_wrong_diff_id_is_refused() {
    let other = Tar::new().file("other", "").done();
    let layout = stored(GZIP, gzip(&tar()), other);
    insta::assert_snapshot!(message(convert(&layout)));
}

#[test]
fn unknown_media_types_are_named_in_the_error() {
    let mut messages = Vec::new();
    let refused = |media_type: &str| message(convert(&stored(media_type, tar(), tar())));
    messages.push(refused("application/vnd.oci.image.layer.v1.tar+encrypted"));
    messages.push(refused(""));
    let mut layout = Layout::new();
    let config = layout.blob("application/vnd.cncf.helm.config.v1+json", b"{}");
    let manifest = layout.manifest(config, vec![]);
    layout.list(manifest, None);
    messages.push(message(convert(&layout)));
    let mut layout = Layout::new();
    let manifest = layout.blob(
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
        b"{}",
    );
    layout.list(manifest, None);
    messages.push(message(convert(&layout)));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn digests_are_checked_before_they_name_a_file() {
    let mut messages = Vec::new();
    let mut layout = Layout::new();
    let diff_id = bcow_oci::Digest::of(b"").to_string();
    let config = json!({"rootfs": {"type": "layers", "diff_ids": [diff_id]}});
    let config = layout.blob(CONFIG, config.to_string().as_bytes());
    let layer =
        json!({"mediaType": LAYER, "digest": "sha256:../../../../../../etc/passwd", "size": 1});
    let manifest = layout.manifest(config, vec![layer]);
    layout.list(manifest, None);
    messages.push(message(convert(&layout)));
    let mut layout = Layout::new();
    layout.list(
        json!({"mediaType": INDEX, "digest": "../../secret", "size": 1}),
        None,
    );
    messages.push(message(convert(&layout)));
    let mut layout = Layout::new();
    let config = json!({"rootfs": {"type": "layers", "diff_ids": ["md5:00"]}});
    let config = layout.blob(CONFIG, config.to_string().as_bytes());
    let layer = layout.blob(LAYER, &tar());
    let manifest = layout.manifest(config, vec![layer]);
    layout.list(manifest, None);
    messages.push(message(convert(&layout)));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn a_missing_foreign_layer_is_reported_as_foreign() {
    let mut layout = Layout::new();
    let tar = tar();
    let digest = bcow_oci::Digest::of(&tar).to_string();
    let config = json!({"rootfs": {"type": "layers", "diff_ids": [digest]}});
    let config = layout.blob(CONFIG, config.to_string().as_bytes());
    let layer = json!({
        "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "digest": digest, "size": 1, "urls": ["https://example.test/layer"],
    });
    let manifest = layout.manifest(config, vec![layer]);
    layout.list(manifest, None);
    insta::assert_snapshot!(message(convert(&layout)));
}

#[test]
fn indexes_that_never_end_are_refused() {
    let mut layout = Layout::new();
    let mut inner = layout.blob(INDEX, br#"{"schemaVersion": 2, "manifests": []}"#);
    for _ in 0..10 {
        let index = json!({"schemaVersion": 2, "manifests": [inner]});
        inner = layout.blob(INDEX, index.to_string().as_bytes());
    }
    layout.list(inner, None);
    let expected = "TMP: too many nested image indexes: 5, the limit is 4";
    assert_eq!(message(convert(&layout)), expected);
}

#[test]
fn too_many_nested_indexes_are_refused() {
    let mut layout = Layout::new();
    let mut indexes = [" ", "  "].map(|space| {
        let text = format!(r#"{{"schemaVersion": 2,{space}"manifests": []}}"#);
        let mut index = layout.blob(INDEX, text.as_bytes());
        index["platform"] = json!({"os": "linux", "architecture": "amd64"});
        index
    });
    for _ in 0..1001 {
        layout.list(indexes[0].clone(), None);
        indexes.swap(0, 1);
    }
    let message = message(convert(&layout));
    let expected = "too many images in an index: 1001, the limit is 1000";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn invalid_documents_are_refused() {
    let mut messages = Vec::new();
    let layout = Layout::of(&[tar()]);
    let write = |name: &str, bytes: &str| std::fs::write(layout.path().join(name), bytes).unwrap();
    write("index.json", "{");
    messages.push(message(convert(&layout)));
    write("index.json", &" ".repeat((4 << 20) + 1));
    messages.push(message(convert(&layout)));
    write("index.json", "{}");
    messages.push(message(convert(&layout)));
    write("oci-layout", r#"{"imageLayoutVersion": "2.0.0"}"#);
    messages.push(message(convert(&layout)));
    std::fs::remove_file(layout.path().join("oci-layout")).unwrap();
    messages.push(message(convert(&layout)));
    insta::assert_snapshot!(messages.join("\n"), @r#"
    TMP/index.json: invalid document: EOF while parsing an object at line 1 column 1
    TMP/index.json: too many bytes of a JSON document: 4194305, the limit is 4194304
    TMP/index.json: it lists no images
    TMP: not a valid OCI image layout: its version is "2.0.0"
    TMP: not a valid OCI image layout: it has no file oci-layout
    "#);
}

#[test]
fn errors_of_unreadable_sources_name_them() {
    let mut messages = Vec::new();
    let text = |source: Source| message(convert_with(&source, &options()));
    let layout = |directory: &str| Source::Oci {
        directory: directory.into(),
        reference: None,
    };
    let tar = |file: &str| Source::Tar(TarInput::File(file.into()));
    messages.push(text(layout("/no/such/layout")));
    messages.push(text(oci_archive(Path::new("/no/such.tar"), None)));
    messages.push(text(tar("/no/such.tar")));
    messages.push(text(tar("/")));
    messages.push(text(Source::Directory("/no/such/directory".into())));
    messages.push(text(layout("/etc/passwd")));
    messages.push(text(docker_source(Path::new("/dev/null"), None)));
    insta::assert_snapshot!(messages.join("\n"), @r"
    cannot open /no/such/layout: No such file or directory (os error 2)
    cannot open /no/such.tar: No such file or directory (os error 2)
    cannot open /no/such.tar: No such file or directory (os error 2)
    /: it is a directory; for a root file system in a directory, use dir:
    cannot open /no/such/directory: No such file or directory (os error 2)
    /etc/passwd: not a directory; for an image layout in a tar archive, use oci-archive:
    /dev/null: not a regular file
    ");
}

#[test]
fn a_hardlink_to_nothing_names_layer_and_path() {
    let layers = [tar(), Tar::new().hardlink("b", "nothing").done()];
    let why = "hardlink to /nothing: neither this layer nor one below has such a file";
    let expected = format!("layer 2 of 2 (sha256:ef8653906191): /b: {why}");
    assert_eq!(message(convert(&Layout::of(&layers))), expected);
}

#[test]
fn a_conversion_can_be_stopped() {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    let options = bcow_oci::ConvertOptions {
        cancel: Some(Arc::new(AtomicBool::new(true))),
        ..options()
    };
    let layout = Layout::of(&[tar()]);
    let error = convert_with(&layout.source(None), &options).err().unwrap();
    assert!(matches!(error, ConvertError::Interrupted), "{error}");
}

/// The options of a conversion of the files as they are.
fn as_files() -> bcow_oci::ConvertOptions {
    changed(options(), |new| new.as_files = true)
}

#[test]
fn an_archive_that_holds_an_image_is_no_root_file_system() {
    let mut messages = Vec::new();
    let docker = Tar::new()
        .file("a.json", "{}")
        .file("a/layer.tar", Tar::new().done())
        .file(
            "manifest.json",
            r#"[{"Config":"a.json","RepoTags":null,"Layers":["a/layer.tar"]}]"#,
        )
        .done();
    let oci = Tar::new()
        .file("./blobs/sha256/a", "{}")
        .file("./index.json", "{}")
        .file("./oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#)
        .done();
    let text = |tar: &[u8]| message(convert_tar(tar)).replace("TMP/in.tar", "in.tar");
    messages.push(text(&docker));
    messages.push(text(&gzip(&oci)));
    for tar in [&docker, &oci] {
        assert!(convert_tar_with(tar, &as_files()).is_ok());
    }
    // Files of these names with other content, or in another directory.
    let other = Tar::new()
        .file("manifest.json", r#"{"name":"an app"}"#)
        .file("oci-layout", "of our office")
        .file("d/oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#)
        .done();
    assert!(convert_tar(&other).is_ok());
    // A layer may contain another image.
    assert!(convert_layers(&[docker, oci]).is_ok());
    insta::assert_snapshot!(messages.join("\n"), @r"
    in.tar contains a container image written by `docker save`, not a root file system
    hint: use docker-archive:in.tar, or --as-files to convert the files as they are
    in.tar contains container images in an OCI image layout, not a root file system
    hint: use oci-archive:in.tar, or --as-files to convert the files as they are
    ");
}

#[test]
fn a_directory_that_holds_an_image_is_no_root_file_system() {
    let mut messages = Vec::new();
    let layout = Layout::of(&[Tar::new().file("a", "").done()]);
    let source = Source::Directory(layout.path().to_owned());
    messages.push(message(convert_with(&source, &options())));
    let error = convert_to_layout(
        &source,
        &LayoutOptions {
            place: LayoutPlace {
                path: layout.path().join("out"),
                ..LayoutPlace::default()
            },
            ..LayoutOptions::default()
        },
        &options(),
        &(),
    );
    assert!(
        matches!(error, Err(ConvertError::HoldsImage { .. })),
        "{error:?}"
    );
    assert!(convert_with(&source, &as_files()).is_ok());
    let skopeo = tempfile::tempdir().unwrap();
    std::fs::write(
        skopeo.path().join("version"),
        "Directory Transport Version: 1.1\n",
    )
    .unwrap();
    let source = Source::Directory(skopeo.path().to_owned());
    messages.push(message(convert_with(&source, &options())));
    insta::assert_snapshot!(messages.join("\n"));
}
