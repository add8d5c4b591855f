//! Layouts and streams that must be refused.

use bcow_oci::{ConvertError, ErrorKind, LayoutOptions, Source, convert_to_layout};
use serde_json::json;

use crate::support::{
    CONFIG, Converted, INDEX, LAYER, Layout, convert_layers, convert_tar, convert_tar_with,
    convert_with, gzip, message, options,
};
use crate::tarmaker::Tar;

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

/// Without the digests, which depend on the compressor that made the input.
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
    let refused = |media_type, bytes| masked(message(convert(&stored(media_type, bytes, tar()))));
    let gz = gzip(&tar());
    let zst = zstd::bulk::compress(&tar(), 3).unwrap();
    insta::assert_snapshot!(refused(GZIP, gz[..gz.len() / 2].to_vec()), @"Invalid: layer 1 of 1 (sha256:...): corrupt gzip stream: it ends too early");
    insta::assert_snapshot!(refused(GZIP, gz[..gz.len() - 3].to_vec()), @"Invalid: layer 1 of 1 (sha256:...): corrupt gzip stream: it ends too early");
    let mut crc = gz.clone();
    let at = crc.len() - 6;
    crc[at] ^= 1;
    insta::assert_snapshot!(refused(GZIP, crc), @"Invalid: layer 1 of 1 (sha256:...): corrupt gzip stream: it does not have a matching checksum");
    insta::assert_snapshot!(refused(GZIP, [&gz[..], b"garbage"].concat()), @"Invalid: layer 1 of 1 (sha256:...): corrupt gzip stream: there is something else behind its end");
    insta::assert_snapshot!(refused(ZSTD, zst[..zst.len() / 2].to_vec()), @"Invalid: layer 1 of 1 (sha256:...): corrupt zstd stream: it ends too early");
    let mut damaged = zst.clone();
    let middle = damaged.len() / 2;
    damaged[4..12].fill(0xff);
    damaged[middle] ^= 0xff;
    insta::assert_snapshot!(refused(ZSTD, damaged), @"Invalid: layer 1 of 1 (sha256:...): corrupt zstd stream: Unsupported frame parameter");
    insta::assert_snapshot!(refused(GZIP, tar()), @"Invalid: layer 1 of 1 (sha256:...): corrupt gzip stream: it is uncompressed (the media type is application/vnd.oci.image.layer.v1.tar+gzip)");
    insta::assert_snapshot!(refused(LAYER, gz.clone()), @"Invalid: layer 1 of 1 (sha256:...): corrupt uncompressed stream: it is gzip (the media type is application/vnd.oci.image.layer.v1.tar)");
    insta::assert_snapshot!(refused(LAYER, b"BZh91AY&SY".to_vec()), @"Unsupported: layer 1 of 1 (sha256:...): bzip2 compression is not supported");
}

#[test]
fn a_large_window_is_refused() {
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(28).unwrap();
    std::io::Write::write_all(&mut encoder, &tar()).unwrap();
    let bytes = encoder.finish().unwrap();
    let text = masked(message(convert(&stored(ZSTD, bytes, tar()))));
    insta::assert_snapshot!(text, @r"
    Limit: layer 1 of 1 (sha256:...): too many bytes of decompression window: at most 134217728 are allowed
    hint: compress the layer with a window of at most 128 MiB (zstd --long=27)
    ");
}

#[test]
fn bytes_that_are_not_what_the_manifest_says_are_refused() {
    // The same length, other bytes.
    let layout = Layout::of(&[tar()]);
    let digest = bcow_oci::Digest::of(&tar());
    let path = layout.path().join("blobs/sha256").join(digest.hex());
    let mut bytes = tar();
    bytes[600] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    insta::assert_snapshot!(message(convert(&layout)), @r"
    Invalid: layer 1 of 1 (sha256:f9b82bde10cb): digest is sha256:e813ad775951fc77696e3677d1aeefad35a38d9070b045de296ebff6c1f1fafc, expected sha256:f9b82bde10cb1f510fe3bb5b9b57c43ee0097bdbdcbb6915e4907695a6212667
    hint: the input was damaged or tampered with; copy the image again
    ");
    // A header that is damaged: the digest is the better thing to say.
    bytes[3] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert!(matches!(
        convert(&layout),
        Err(ConvertError::DigestMismatch { what: "digest", .. })
    ));
    std::fs::write(&path, &bytes[..1024]).unwrap();
    insta::assert_snapshot!(message(convert(&layout)), @r"
    Invalid: layer 1 of 1 (sha256:f9b82bde10cb): the manifest says 51712 bytes, there are 1024
    hint: the input was damaged or tampered with; copy the image again
    ");
    std::fs::remove_file(&path).unwrap();
    insta::assert_snapshot!(message(convert(&layout)), @r"
    Invalid: layer 1 of 1 (sha256:f9b82bde10cb): blob sha256:f9b82bde10cb1f510fe3bb5b9b57c43ee0097bdbdcbb6915e4907695a6212667 is missing
    hint: the layout is incomplete; copy the image again
    ");
    // A FIFO must not be waited for.
    let status = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(status.is_ok_and(|status| status.success()));
    let text = message(convert(&layout));
    assert!(text.ends_with("this is no regular file"), "{text}");
}

#[test]
fn a_wrong_diff_id_is_refused() {
    let other = Tar::new().file("other", "").done();
    let layout = stored(GZIP, gzip(&tar()), other);
    insta::assert_snapshot!(message(convert(&layout)), @r"
    Invalid: layer 1 of 1 (sha256:04052144f316): diffID is sha256:f9b82bde10cb1f510fe3bb5b9b57c43ee0097bdbdcbb6915e4907695a6212667, expected sha256:6019cfcbde89474b381c97b53c773e1b065ebef77bc1730c20f5e55fb6a59934
    hint: the input was damaged or tampered with; copy the image again
    ");
}

#[test]
fn media_types_are_named_when_they_are_unknown() {
    let refused = |media_type: &str| message(convert(&stored(media_type, tar(), tar())));
    insta::assert_snapshot!(refused("application/vnd.oci.image.layer.v1.tar+encrypted"), @r#"Unsupported: layer 1 of 1 (sha256:f9b82bde10cb): media type "application/vnd.oci.image.layer.v1.tar+encrypted" is not supported"#);
    insta::assert_snapshot!(refused(""), @r#"Unsupported: layer 1 of 1 (sha256:f9b82bde10cb): media type "" is not supported"#);
    let mut layout = Layout::new();
    let config = layout.blob("application/vnd.cncf.helm.config.v1+json", b"{}");
    let manifest = layout.manifest(config, vec![]);
    layout.list(manifest, None);
    insta::assert_snapshot!(message(convert(&layout)), @r#"Unsupported: config of manifest sha256:f44340393d8c: media type "application/vnd.cncf.helm.config.v1+json" is not supported"#);
    let mut layout = Layout::new();
    let manifest = layout.blob(
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
        b"{}",
    );
    layout.list(manifest, None);
    insta::assert_snapshot!(message(convert(&layout)), @r#"Unsupported: manifest sha256:44136fa355b3: media type "application/vnd.docker.distribution.manifest.v1+prettyjws" is not supported"#);
}

#[test]
fn digests_are_checked_before_they_name_a_file() {
    let mut layout = Layout::new();
    let diff_id = bcow_oci::Digest::of(b"").to_string();
    let config = json!({"rootfs": {"type": "layers", "diff_ids": [diff_id]}});
    let config = layout.blob(CONFIG, config.to_string().as_bytes());
    let layer =
        json!({"mediaType": LAYER, "digest": "sha256:../../../../../../etc/passwd", "size": 1});
    let manifest = layout.manifest(config, vec![layer]);
    layout.list(manifest, None);
    insta::assert_snapshot!(message(convert(&layout)), @r#"Invalid: TMP: "sha256:../../../../../../etc/passwd" is no digest: it has the wrong length"#);
    let mut layout = Layout::new();
    layout.list(
        json!({"mediaType": INDEX, "digest": "../../secret", "size": 1}),
        None,
    );
    insta::assert_snapshot!(message(convert(&layout)), @r#"Invalid: TMP: "../../secret" is no digest: there is no colon in it"#);
    let mut layout = Layout::new();
    let config = json!({"rootfs": {"type": "layers", "diff_ids": ["md5:00"]}});
    let config = layout.blob(CONFIG, config.to_string().as_bytes());
    let layer = layout.blob(LAYER, &tar());
    let manifest = layout.manifest(config, vec![layer]);
    layout.list(manifest, None);
    insta::assert_snapshot!(message(convert(&layout)), @r#"Invalid: config sha256:294f46585737 in TMP: "md5:00" is no digest: the algorithm is neither sha256 nor sha512"#);
}

#[test]
fn a_foreign_layer_that_is_not_there_is_named_as_one() {
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
    insta::assert_snapshot!(message(convert(&layout)), @r"
    Invalid: layer 1 of 1 (sha256:f9b82bde10cb): blob sha256:f9b82bde10cb1f510fe3bb5b9b57c43ee0097bdbdcbb6915e4907695a6212667 is missing
    hint: the layer is a foreign one, which its registry does not pass on; put the blob into the layout
    ");
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
    insta::assert_snapshot!(message(convert(&layout)), @"Limit: TMP: too many nested image indexes: 5, at most 4 are allowed");
}

#[test]
fn documents_that_are_none_are_refused() {
    let layout = Layout::of(&[tar()]);
    let write = |name: &str, bytes: &str| std::fs::write(layout.path().join(name), bytes).unwrap();
    write("index.json", "{");
    insta::assert_snapshot!(message(convert(&layout)), @"Invalid: TMP/index.json: not as it should be: EOF while parsing an object at line 1 column 1");
    write("index.json", &" ".repeat((4 << 20) + 1));
    insta::assert_snapshot!(message(convert(&layout)), @"Limit: TMP/index.json: too many bytes of a JSON document: 4194305, at most 4194304 are allowed");
    write("index.json", "{}");
    insta::assert_snapshot!(message(convert(&layout)), @"Invalid: TMP/index.json: it lists no image");
    write("oci-layout", r#"{"imageLayoutVersion": "2.0.0"}"#);
    insta::assert_snapshot!(message(convert(&layout)), @r#"Invalid: TMP: not a valid OCI image layout: its version is "2.0.0""#);
    std::fs::remove_file(layout.path().join("oci-layout")).unwrap();
    insta::assert_snapshot!(message(convert(&layout)), @"Invalid: TMP: not a valid OCI image layout: it has no file oci-layout");
}

#[test]
fn sources_that_cannot_be_read_say_so() {
    let text = |source: &str| message(convert_with(&source.parse::<Source>().unwrap(), &options()));
    insta::assert_snapshot!(text("oci:/no/such/layout"), @"Io: cannot open /no/such/layout: No such file or directory (os error 2)");
    insta::assert_snapshot!(text("oci-archive:/no/such.tar"), @"Io: cannot open /no/such.tar: No such file or directory (os error 2)");
    insta::assert_snapshot!(text("tar:/no/such.tar"), @"Io: cannot open /no/such.tar: No such file or directory (os error 2)");
    insta::assert_snapshot!(text("tar:/"), @"Io: cannot read /: Is a directory (os error 21)");
    insta::assert_snapshot!(text("dir:/no/such/directory"), @"Io: cannot open /no/such/directory: No such file or directory (os error 2)");
    insta::assert_snapshot!(text("oci:/etc/passwd"), @"Invalid: /etc/passwd: this is no directory; an image layout in one file is oci-archive:");
    insta::assert_snapshot!(text("docker-archive:/dev/null"), @"Invalid: /dev/null: this is no regular file");
}

#[test]
fn a_hardlink_to_nothing_names_layer_and_path() {
    let layers = [tar(), Tar::new().hardlink("b", "nothing").done()];
    let text = message(convert(&Layout::of(&layers)));
    insta::assert_snapshot!(text, @"Invalid: layer 2 of 2 (sha256:ef8653906191): /b: hardlink to /nothing: neither this layer nor one below has such a file");
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
    assert_eq!(error.kind(), ErrorKind::Interrupted);
}

/// The options of a user who means the files themselves.
fn as_files() -> bcow_oci::ConvertOptions {
    bcow_oci::ConvertOptions {
        as_files: true,
        ..options()
    }
}

#[test]
fn an_archive_that_holds_an_image_is_no_root_file_system() {
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
    insta::assert_snapshot!(text(&docker), @r#"
    Usage: in.tar: it holds a container image, as `docker save` writes it, and is no root file system itself
    hint: name it docker-archive:in.tar; with --as-files its files are taken as they are
    "#);
    insta::assert_snapshot!(text(&gzip(&oci)), @r#"
    Usage: in.tar: it holds container images, as an OCI image layout, and is no root file system itself
    hint: name it oci-archive:in.tar; with --as-files its files are taken as they are
    "#);
    for tar in [&docker, &oci] {
        assert!(convert_tar_with(tar, &as_files()).is_ok());
    }
    // Files of these names that are something else, or elsewhere.
    let other = Tar::new()
        .file("manifest.json", r#"{"name":"an app"}"#)
        .file("oci-layout", "of our office")
        .file("d/oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#)
        .done();
    assert!(convert_tar(&other).is_ok());
    // A layer of an image may hold another image.
    assert!(convert_layers(&[docker, oci]).is_ok());
}

#[test]
fn a_directory_that_holds_an_image_is_no_root_file_system() {
    let layout = Layout::of(&[Tar::new().file("a", "").done()]);
    let source = Source::Directory(layout.path().to_owned());
    insta::assert_snapshot!(message(convert_with(&source, &options())), @r#"
    Usage: TMP: it holds container images, as an OCI image layout, and is no root file system itself
    hint: name it oci:TMP; with --as-files its files are taken as they are
    "#);
    let error = convert_to_layout(
        &source,
        &LayoutOptions {
            directory: layout.path().join("out"),
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
    insta::assert_snapshot!(message(convert_with(&source, &options())), @r#"
    Usage: TMP: it holds a container image, as `skopeo copy` writes it to dir:, and is no root file system itself
    hint: make a layout of it with `skopeo copy dir:DIR oci:LAYOUT:TAG` and name that oci:LAYOUT:TAG; with --as-files its files are taken as they are
    "#);
}
