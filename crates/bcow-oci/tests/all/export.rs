//! Exported images convert to the same trees.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use bcow::{Image, OpenOptions};
use bcow_erofs::diff::{Change, Compare, DiffOptions, Differences, diff};
use bcow_erofs::reader::Filesystem;
use bcow_oci::export::{
    LayerCompression, Layers, LayoutExport, OciReport, TarForm, export_layout, export_tar,
};
use bcow_oci::{ConvertError, LayoutOptions, LayoutPlace, RunOptions, Source, convert_to_layout};
use bcow_testkit::{changed, run};
use proptest::prelude::*;
use serde_json::Value;
use tempfile::TempDir;

use crate::model::{archive, ops};
use crate::support::{
    Converted, Layout, convert_layers, convert_tar, convert_tar_with, convert_with, options,
};
use bcow_testkit::tar::{Header, Tar};

/// An image in a layout of one BCoW file per layer.
struct Stack {
    /// Holds the files.
    _layout: TempDir,
    layers: Vec<Filesystem>,
    config: Value,
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn blob(layout: &Path, descriptor: &Value) -> std::path::PathBuf {
    let digest = descriptor["digest"].as_str().unwrap();
    layout
        .join("blobs/sha256")
        .join(digest.strip_prefix("sha256:").unwrap())
}

fn manifest(layout: &Path) -> Value {
    json(&blob(
        layout,
        &json(&layout.join("index.json"))["manifests"][0],
    ))
}

fn stack(layers: &[Vec<u8>]) -> Result<Stack, ConvertError> {
    let layout = tempfile::tempdir().unwrap();
    let destination = LayoutOptions {
        place: LayoutPlace {
            path: layout.path().to_owned(),
            ..LayoutPlace::default()
        },
        ..LayoutOptions::default()
    };
    let source = Layout::of(layers);
    convert_to_layout(&source.source(None), &destination, &options(), &())?;
    let manifest = manifest(layout.path());
    let mut descriptors = manifest["layers"].as_array().unwrap().clone();
    // The last one is the stack.
    descriptors.pop();
    let layers = descriptors
        .iter()
        .map(|layer| {
            let path = blob(layout.path(), layer);
            let image: Arc<Image> = Image::open(&path, &OpenOptions::default()).unwrap();
            Filesystem::open(image).unwrap()
        })
        .collect();
    let config = json(&blob(layout.path(), &manifest["config"]));
    Ok(Stack {
        _layout: layout,
        layers,
        config,
    })
}

impl Stack {
    fn layers(&self) -> Layers<'_> {
        Layers::new(TarForm::Layer, &self.layers)
    }

    fn export(&self) -> Exported {
        exported(
            &self.layers(),
            Some(&self.config),
            1,
            LayerCompression::None,
        )
    }
}

struct Exported {
    layout: TempDir,
    report: OciReport,
}

impl Exported {
    fn convert(&self) -> Result<Converted, ConvertError> {
        let source = Source::Oci {
            directory: self.layout.path().to_owned(),
            reference: Some("new".into()),
        };
        convert_with(&source, &options())
    }

    /// The conversion of the exported image is the same tree.
    fn require_same(&self, expected: &Converted) {
        let found = self.convert().unwrap().filesystem();
        let differences = differences(&expected.filesystem(), &found, Compare::All);
        assert!(differences.is_empty(), "{differences:?}");
    }

    /// The list of GNU tar for a layer that is not compressed.
    fn list(&self, layer: usize) -> Vec<String> {
        let manifest = manifest(self.layout.path());
        list(&blob(self.layout.path(), &manifest["layers"][layer]))
    }

    /// The names in a layer that is not compressed.
    fn names(&self, layer: usize) -> Vec<String> {
        let path = blob(
            self.layout.path(),
            &manifest(self.layout.path())["layers"][layer],
        );
        let text = run(Command::new("tar").arg("-tf").arg(path));
        text.lines().map(str::to_owned).collect()
    }
}

/// The list of GNU tar, without the spaces that align the columns.
fn list(archive: &Path) -> Vec<String> {
    let text = run(Command::new("tar")
        .args(["--utc", "--numeric-owner", "-tvf"])
        .arg(archive));
    let columns = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    text.lines().map(columns).collect()
}

fn exported(
    layers: &Layers<'_>,
    config: Option<&Value>,
    threads: usize,
    compression: LayerCompression,
) -> Exported {
    let layout = tempfile::tempdir().unwrap();
    let report = export_to(layout.path(), layers, config, threads, compression).unwrap();
    Exported { layout, report }
}

fn export_to(
    directory: &Path,
    layers: &Layers<'_>,
    config: Option<&Value>,
    threads: usize,
    compression: LayerCompression,
) -> Result<OciReport, ConvertError> {
    let destination = LayoutExport {
        place: LayoutPlace {
            path: directory.to_owned(),
            reference: Some("new".into()),
            ..LayoutPlace::default()
        },
        compression,
        annotations: Default::default(),
    };
    let options = RunOptions {
        threads,
        cancel: None,
    };
    export_layout(layers, config, &destination, &options, &())
}

/// The differences of two trees.
fn differences(a: &Filesystem, b: &Filesystem, compare: Compare) -> Vec<String> {
    let options = DiffOptions {
        compare,
        known_same: None,
    };
    let mut lines = Vec::new();
    diff(a, b, &options, &mut |path, change| {
        let what: Option<&Differences> = match &change {
            Change::Changed(_, _, what) => Some(what),
            _ => None,
        };
        lines.push(format!("{} {what:?}", String::from_utf8_lossy(path)));
        Ok::<_, std::convert::Infallible>(())
    })
    .unwrap();
    lines
}

/// Layers with all cases that depend on the order of entries, or that overlayfs cannot represent.
fn hard_layers() -> Vec<Vec<u8>> {
    let mut device = Header::new("device", b'3');
    device.device = (0, 0);
    let lower = Tar::new()
        .dir("a/")
        .file("a/old", "moved")
        .file("a/replaced", "before")
        .dir("gone/")
        .file("gone/target", "kept by a link")
        .dir("opaque/")
        .file("opaque/hidden", "hidden")
        .file("opaque/renamed", "in an opaque directory")
        .dir("becomes-file/")
        .file("becomes-file/x", "x")
        .symlink("link", "a")
        .dir("opaque-too/")
        .dir("opaque-too/sub/")
        .dir("up/")
        .file("up/file", "takes the place of its directory")
        .file("z", "z");
    let upper = Tar::new()
        // Links to files that the same layer deletes.
        .hardlink("b-moved", "a/old")
        .hardlink("b-before", "a/replaced")
        .hardlink("b-kept", "gone/target")
        .hardlink("b-symlink", "link")
        .file("a/.wh.old", "")
        .file("a/replaced", "after")
        .file(".wh.gone", "")
        .dir("opaque/")
        .hardlink("opaque/new", "opaque/renamed")
        .file("opaque/.wh..wh..opq", "")
        .file("opaque/own", "own")
        .file("becomes-file", "now a file")
        .entry(&device, b"")
        .dir("deep/")
        .dir("deep/er/")
        .hardlink("deep/er/link", "z")
        .hardlink("up", "up/file")
        .hardlink("up-too", "up/file");
    let top = Tar::new()
        // Directories that this layer does not list.
        .file("deep/er/new", "new")
        .file("a/.wh.replaced", "")
        .file("opaque/own", "other")
        // And one that no layer has, one in the place of a file, and one in an opaque directory.
        .file("new/er/x", "x")
        .file("z/x", "x")
        .dir("opaque-too/")
        .file("opaque-too/.wh..wh..opq", "")
        .file("opaque-too/sub/y", "y");
    vec![lower.done(), upper.done(), top.done()]
}

#[test]
fn a_stack_is_exported_layer_by_layer_and_is_the_same_image() {
    let layers = hard_layers();
    let expected = convert_layers(&layers).unwrap();
    let exported = stack(&layers).unwrap().export();
    exported.require_same(&expected);
    assert_eq!(exported.report.layers.len(), 3);
    assert_eq!(
        exported.names(1),
        [
            // Before the entries that delete or replace their targets.
            "b-before",
            "b-kept",
            "b-moved",
            "b-symlink",
            "deep/",
            "deep/er/",
            "deep/er/link",
            "opaque/",
            "opaque/new",
            // In the place of the directory that the other link needs.
            "up-too",
            "up",
            "a/.wh.old",
            "a/replaced",
            "becomes-file",
            "device",
            ".wh.gone",
            "opaque/.wh..wh..opq",
            "opaque/own",
        ]
    );
    // Without the directories of lower layers, which have the attributes.
    assert_eq!(
        exported.names(2),
        [
            "a/.wh.replaced",
            "deep/er/new",
            "new/",
            "new/er/",
            "new/er/x",
            "opaque/own",
            "opaque-too/",
            "opaque-too/.wh..wh..opq",
            "opaque-too/sub/",
            "opaque-too/sub/y",
            "z/",
            "z/x",
        ]
    );
}

#[test]
fn a_link_before_its_target_is_exported_behind_it() {
    let lower = Tar::new().file("f", "old").done();
    let upper = Tar::new()
        .hardlink("a", "b")
        .hardlink("b", "z")
        .hardlink("k", "f")
        .file("f", "new")
        .entry(
            &Header {
                mode: 0o4750,
                ..Header::new("z", b'0')
            },
            b"",
        )
        .done();
    let top = Tar::new().hardlink("t", "a").hardlink("u", "k").done();
    let layers = [lower, upper, top];
    let exported = stack(&layers).unwrap().export();
    assert_eq!(exported.names(1), ["k", "f", "z", "a", "b"]);
    assert!(exported.list(1)[3].starts_with("hrwsr-x--- "));
    assert!(exported.list(2)[0].starts_with("hrwsr-x--- "));
    exported.require_same(&convert_layers(&layers).unwrap());
}

/// podman refuses a layer with two entries of one name.
#[test]
fn directories_above_links_into_lower_layers_have_one_entry() {
    let lower = Tar::new()
        .dir("d/")
        .file("d/su", "su")
        .dir("x/")
        .dir("x/y/")
        .file("x/y/old", "old");
    let upper = Tar::new()
        .dir("x/")
        .file("x/.wh..wh..opq", "")
        .dir("x/y/")
        .hardlink("x/y/hl", "d/su")
        .file("x/y/new", "new");
    let layers = [lower.done(), upper.done()];
    let exported = stack(&layers).unwrap().export();
    assert_eq!(
        exported.names(1),
        [
            "x/",
            "x/y/",
            "x/y/hl",
            // Before the mark above, which would change the time of x/y.
            "x/y/.wh..wh..opq",
            "x/.wh..wh..opq",
            "x/y/new",
        ]
    );
    exported.require_same(&convert_layers(&layers).unwrap());
}

#[test]
fn a_link_into_a_lower_layer_has_the_attributes_of_its_file() {
    let header = |name: &str, kind, mode, uid, gid, mtime| Header {
        mode,
        uid,
        gid,
        mtime,
        ..Header::new(name, kind)
    };
    let file = header("d/su", b'0', 0o4750, 1000, 1001, 1_500_000_000);
    let lower = Tar::new()
        .dir("d/")
        .entry(&file, b"")
        .symlink("s", "d")
        .done();
    let link = |name, target| header(name, b'1', 0o640, 7, 8, 1).link(target);
    let middle = Tar::new().entry(&link("hl", "d/su"), b"").done();
    let top = Tar::new()
        .file(".wh.hl", "")
        .entry(&link("of-link", "hl"), b"")
        .entry(&link("through", "s/su"), b"")
        .done();
    let stacked = stack(&[lower, middle, top]).unwrap();
    let exported = stacked.export();
    let of_file = "hrwsr-x--- 1000/1001 0 2017-07-14 02:40";
    assert_eq!(exported.list(1), [format!("{of_file} hl link to d/su")]);
    assert_eq!(
        exported.list(2)[..2],
        [
            format!("{of_file} of-link link to hl"),
            format!("{of_file} through link to s/su")
        ]
    );
    // Without the layers below, those of the link's own header.
    let mut archive = tempfile::NamedTempFile::new().unwrap();
    let (fs, options) = (&stacked.layers[1], RunOptions::default());
    export_tar(fs, TarForm::Layer, &mut archive, &options, &()).unwrap();
    assert_eq!(
        list(archive.path()),
        ["hrw-r----- 7/8 0 1970-01-01 00:00 hl link to d/su"]
    );
}

#[test]
fn a_second_export_has_the_same_digests() {
    let stacked = stack(&hard_layers()).unwrap();
    let gzip = LayerCompression::Gzip { level: 6 };
    let zstd = LayerCompression::Zstd { level: 3 };
    for compression in [LayerCompression::None, gzip, zstd] {
        let all = |threads| {
            let exported = exported(
                &stacked.layers(),
                Some(&stacked.config),
                threads,
                compression,
            );
            (exported.report.manifest.clone(), exported)
        };
        let (digest, first) = all(1);
        for threads in [2, 3, 8] {
            assert_eq!(all(threads).0, digest, "{compression:?}, {threads} threads");
        }
        // A conversion of the exported layers exports to the same digests.
        let layers: Vec<Vec<u8>> = manifest(first.layout.path())["layers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|layer| unpacked(&blob(first.layout.path(), layer)))
            .collect();
        let again = stack(&layers).unwrap();
        let again = exported(&again.layers(), Some(&stacked.config), 2, compression);
        assert_eq!(again.report.manifest, digest, "{compression:?}");
    }
}

fn unpacked(path: &Path) -> Vec<u8> {
    use std::io::Read;
    let bytes = std::fs::read(path).unwrap();
    let mut out = Vec::new();
    match bytes[..2] {
        [0x1f, 0x8b] => flate2::read::GzDecoder::new(&bytes[..])
            .read_to_end(&mut out)
            .unwrap(),
        [0x28, 0xb5] => return zstd::decode_all(&bytes[..]).unwrap(),
        _ => return bytes,
    };
    out
}

#[test]
fn the_form_of_an_image_does_not_change_its_export() {
    let noise: Vec<u8> = (0..3_000_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as u8)
        .collect();
    let tar = Tar::new()
        .file("noise", noise)
        .file("text", "some text".repeat(100_000))
        .done();
    let mut digests = Vec::new();
    for block_bytes in [None, Some(4096), Some(1 << 20)] {
        let options = changed(options(), |new| new.block_bytes = block_bytes);
        let converted = convert_tar_with(&tar, &options).unwrap();
        let fs = converted.filesystem();
        for threads in [1, 2] {
            let gzip = LayerCompression::default();
            let exported = exported(&Layers::new(TarForm::Flattened, [&fs]), None, threads, gzip);
            digests.push(exported.report.manifest);
        }
    }
    digests.dedup();
    assert_eq!(digests.len(), 1);
}

#[test]
fn a_flattened_image_is_exported_as_one_layer() {
    let expected = convert_layers(&hard_layers()).unwrap();
    let fs = expected.filesystem();
    let config = expected.metadata()["config"].clone();
    let exported = exported(
        &Layers::new(TarForm::Flattened, [&fs]),
        Some(&config),
        2,
        LayerCompression::default(),
    );
    exported.require_same(&expected);
    assert_eq!(exported.report.layers.len(), 1);
    let manifest = manifest(exported.layout.path());
    let written = json(&blob(exported.layout.path(), &manifest["config"]));
    assert_eq!(written["config"], config["config"]);
    assert_eq!(
        written["rootfs"]["diff_ids"],
        serde_json::json!([exported.report.layers[0].diff_id.to_string()])
    );
}

#[test]
fn other_images_in_the_layout_are_kept() {
    let converted = convert_tar(&Tar::new().file("a", "a").done()).unwrap();
    let mut layout = Layout::of(&[Tar::new().file("b", "b").done()]);
    let other = layout.image("linux/arm64", &[]);
    layout.list(other, Some("other"));
    let fs = converted.filesystem();
    let layers = Layers::new(TarForm::Flattened, [&fs]);
    let none = LayerCompression::None;
    for _ in 0..2 {
        export_to(layout.path(), &layers, None, 1, none).unwrap();
        let index = json(&layout.path().join("index.json"));
        let names: Vec<&str> = index["manifests"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| {
                entry["annotations"]["org.opencontainers.image.ref.name"]
                    .as_str()
                    .unwrap()
            })
            .collect();
        assert_eq!(names, ["test", "other", "new"]);
    }
}

#[test]
fn a_name_with_the_whiteout_prefix_is_refused_without_output() {
    let tree = tempfile::tempdir().unwrap();
    std::fs::write(tree.path().join(".wh.file"), "x").unwrap();
    let converted = convert_with(&Source::Directory(tree.path().to_owned()), &options()).unwrap();
    let fs = converted.filesystem();
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("layout");
    for threads in [1, 4] {
        let none = LayerCompression::None;
        let error = export_to(
            &directory,
            &Layers::new(TarForm::Flattened, [&fs]),
            None,
            threads,
            none,
        );
        assert_eq!(
            error.unwrap_err().to_string(),
            r#""/.wh.file": its name begins with .wh., which makes a whiteout of it in a layer"#
        );
        assert!(!directory.exists());
    }
}

#[test]
fn layers_store_small_holes_as_zeros_and_large_ones_as_holes() {
    let sparse = |name: &str, size: u64| {
        let map = format!("1\n{size}\n0\n");
        let mut data = map.into_bytes();
        data.resize(512, 0);
        let tar = Tar::new().pax(&[
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.name", name),
            ("GNU.sparse.realsize", &size.to_string()),
        ]);
        tar.file("x", data)
    };
    let tar = sparse("small", 1 << 20).raw(&sparse("great", 1 << 39).done());
    let converted = convert_tar(&tar.bytes).unwrap();
    let fs = converted.filesystem();
    let exported = exported(
        &Layers::new(TarForm::Flattened, [&fs]),
        None,
        1,
        LayerCompression::None,
    );
    let bytes = exported.report.layers[0].tar_bytes;
    assert!((1 << 20..2 << 20).contains(&bytes), "{bytes}");
    exported.require_same(&converted);
}

#[test]
fn write_failures_are_reported_as_such() {
    struct Full;
    impl std::io::Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let converted = convert_tar(&Tar::new().file("a", "a").done()).unwrap();
    let options = RunOptions::default();
    let error = export_tar(
        &converted.filesystem(),
        TarForm::Tree,
        &mut Full,
        &options,
        &(),
    )
    .unwrap_err();
    assert!(matches!(error, ConvertError::WriteArchive(_)), "{error:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// A stack of any layers is exported as the same image.
    #[test]
    fn exported_layers_convert_to_the_same_tree(
        layers in proptest::collection::vec(proptest::collection::vec(ops(), 0..8), 1..5)
    ) {
        let archives: Vec<Vec<u8>> = layers
            .iter()
            .enumerate()
            .map(|(number, layer)| archive(layer, number))
            .collect();
        // Some sequences are invalid, and the converter refuses them.
        let Ok(expected) = convert_layers(&archives) else { return Ok(()) };
        let exported = stack(&archives).unwrap().export();
        let found = exported.convert().map_err(|e| TestCaseError::fail(e.to_string()))?;
        let found = differences(&expected.filesystem(), &found.filesystem(), Compare::All);
        prop_assert!(found.is_empty(), "{found:?}");
    }
}
