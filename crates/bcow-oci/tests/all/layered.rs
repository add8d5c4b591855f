//! Images layer by layer: shared, cached and converted layers.

use std::path::{Path, PathBuf};

use bcow_oci::{
    ConvertOptions, LayerOrigin, LayoutOptions, LayoutPlace, LayoutReport, Source,
    convert_to_layout,
};
use bcow_testkit::{changed, noise};
use serde_json::Value;

use crate::support::{LAYER, Layered, Layout, Warnings, gzip, layered_with, options};
use bcow_testkit::tar::Tar;

fn base() -> Vec<u8> {
    let mut tar = Tar::new().dir("usr");
    for i in 0..40 {
        tar = tar.file(format!("usr/f{i}"), noise(i, 5000 * (i as usize + 1)));
    }
    tar.done()
}

fn upper(seed: u32) -> Vec<u8> {
    Tar::new()
        .file(
            format!("usr/own{seed}"),
            noise(1000 + u64::from(seed), 70_000),
        )
        // Content of the base, under another name and with a tail beside the inode.
        .file("usr/copy", noise(7, 5000 * 8))
        .file("usr/tail", &noise(3, 5000 * 4)[..4096 * 4 + 100])
        .file("usr/.wh.f3", "")
        .done()
}

fn image(seeds: &[u32]) -> Layout {
    let mut layers = vec![base()];
    layers.extend(seeds.iter().map(|&seed| upper(seed)));
    Layout::of(&layers)
}

/// The layers of `image(&[1])`, but each under the other's diffID.
fn swapped() -> Layout {
    let mut swapped = Layout::new();
    let (a, b) = (base(), upper(1));
    let layers = [(LAYER, a.clone(), b.clone()), (LAYER, b, a)];
    let descriptor = swapped.image("linux/amd64", &layers);
    swapped.list(descriptor, None);
    swapped
}

/// Options without the check of the source.
fn trusting() -> ConvertOptions {
    changed(options(), |new| new.verify = false)
}

/// Options for a layout that is there, or that becomes one.
fn into(directory: impl Into<PathBuf>, reference: Option<&str>) -> LayoutOptions {
    LayoutOptions {
        place: LayoutPlace {
            path: directory.into(),
            reference: reference.map(str::to_owned),
            ..LayoutPlace::default()
        },
        ..LayoutOptions::default()
    }
}

fn layered(source: &Source, change: impl FnOnce(&mut LayoutOptions)) -> Layered {
    layered_with(source, &options(), change).unwrap()
}

fn digests(layered: &Layered) -> Vec<String> {
    let layers = layered.report.layers.iter().map(|l| l.digest.to_string());
    layers
        .chain([layered.report.manifest.to_string()])
        .collect()
}

#[test]
fn the_same_input_gives_the_same_files_for_any_number_of_threads() {
    let image = image(&[1, 2, 3]);
    let source = image.source(None);
    let first = layered(&source, |_| {}).files();
    assert_eq!(
        first.len(),
        2 + 4 + 3,
        "index, layout; layers; stack, config, manifest"
    );
    for threads in [1, 2, 7] {
        let options = changed(options(), |new| new.threads = threads);
        assert!(layered_with(&source, &options, |_| {}).unwrap().files() == first);
    }
}

#[test]
fn images_on_one_base_share_its_file() {
    let (one, two) = (image(&[1]), image(&[2]));
    let one = layered(&one.source(None), |_| {});
    let two = layered(&two.source(None), |_| {});
    let shared = &one.report.layers[0].digest;
    assert_eq!(*shared, two.report.layers[0].digest);
    let name = Path::new("blobs/sha256").join(shared.hex());
    assert_eq!(one.files()[&name], two.files()[&name]);
    assert_ne!(one.report.layers[1].digest, two.report.layers[1].digest);
}

#[test]
fn compression_of_the_source_does_not_change_the_digest() {
    let plain = layered(&image(&[1]).source(None), |_| {});
    let mut other = Layout::new();
    let layers = [base(), upper(1)].map(|tar| (concat_gzip(), gzip(&tar), tar));
    let layers: Vec<_> = layers
        .iter()
        .map(|(media_type, blob, tar)| (media_type.as_str(), blob.clone(), tar.clone()))
        .collect();
    let descriptor = other.image("linux/amd64", &layers);
    other.list(descriptor, Some("x"));
    let compressed = layered(&other.source(None), |_| {});
    for (a, b) in plain.report.layers.iter().zip(&compressed.report.layers) {
        assert_eq!(a.digest, b.digest);
    }
}

fn concat_gzip() -> String {
    format!("{LAYER}+gzip")
}

#[test]
fn existing_layers_of_the_layout_are_not_converted_again() {
    let (one, two) = (image(&[1]), image(&[1, 2]));
    let layered = layered(&one.source(None), |_| {});
    let before = layered.files();
    let layout = into(layered.layout(), Some("two"));
    let report = convert_to_layout(&two.source(None), &layout, &options(), &()).unwrap();
    let made: Vec<LayerOrigin> = report.layers.iter().map(|l| l.made).collect();
    assert_eq!(
        made,
        [
            LayerOrigin::Layout,
            LayerOrigin::Layout,
            LayerOrigin::Converted
        ]
    );
    let after = layered.files();
    assert_eq!(
        after.len(),
        before.len() + 4,
        "a layer, a stack, a config, a manifest"
    );
    // The index lists both images.
    let index: Value = serde_json::from_slice(&after[Path::new("index.json")]).unwrap();
    let names: Vec<_> = index["manifests"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["annotations"]["org.opencontainers.image.ref.name"].as_str())
        .collect();
    assert_eq!(names, [Some("test"), Some("two")]);
    // Other options give other layers.
    let other = changed(options(), |new| new.block_bytes = Some(65536));
    let report = convert_to_layout(&one.source(None), &layout, &other, &()).unwrap();
    assert!(
        report
            .layers
            .iter()
            .all(|l| l.made == LayerOrigin::Converted)
    );
}

fn entries(cache: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for directory in std::fs::read_dir(cache).unwrap() {
        for file in std::fs::read_dir(directory.unwrap().path()).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|ending| ending == "bcow") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

#[test]
fn the_cache_returns_what_was_stored() {
    let image = image(&[1, 2]);
    let source = image.source(None);
    let dir = tempfile::tempdir().unwrap();
    let cached = |layout: &mut LayoutOptions| layout.cache = Some(dir.path().to_owned());
    let first = layered(&source, cached);
    assert_eq!(entries(dir.path()).len(), 3);
    let second = layered(&source, cached);
    assert!(
        second
            .report
            .layers
            .iter()
            .all(|l| l.made == LayerOrigin::Cache)
    );
    assert_eq!(first.files(), second.files());
    assert_eq!(layered(&source, |_| {}).files(), second.files());
}

/// Converts an image into a layout of its own, with this cache.
fn convert_with_cache(source: &Source, cache: &Path, warnings: &Warnings) -> LayoutReport {
    let target = tempfile::tempdir().unwrap();
    let layout = LayoutOptions {
        cache: Some(cache.to_owned()),
        ..into(target.path().join("layout"), None)
    };
    convert_to_layout(source, &layout, &options(), warnings).unwrap()
}

/// Kinds of damage to a file: cut, longer, zeros, another layer, and a bit of the header, its copy,
/// the content, the tables and the end.
fn damages(whole: &[u8], other: &[u8]) -> Vec<Vec<u8>> {
    let size = whole.len();
    let cut = [0, 1, 700, size / 2, size - 1].map(|length| whole[..length].to_vec());
    let others = [[whole, &[0]].concat(), vec![0; size], other.to_vec()];
    let flipped = [8, 60, 520, size / 3, size * 9 / 10, size - 5].map(|at| {
        let mut bytes = whole.to_vec();
        bytes[at] ^= 0x40;
        bytes
    });
    cut.into_iter().chain(others).chain(flipped).collect()
}

#[test]
fn damaged_files_in_the_cache_are_reported_and_converted_again() {
    let image = image(&[1]);
    let source = image.source(None);
    let dir = tempfile::tempdir().unwrap();
    let convert = |warnings: &Warnings| convert_with_cache(&source, dir.path(), warnings);
    let good = convert(&Warnings::default());
    let whole: Vec<Vec<u8>> = entries(dir.path())
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect();
    let damages = [0, 1].map(|i| damages(&whole[i], &whole[1 - i]));
    for (one, two) in damages[0].iter().zip(&damages[1]) {
        let paths = entries(dir.path());
        assert_eq!(paths.len(), 2);
        std::fs::write(&paths[0], one).unwrap();
        std::fs::write(&paths[1], two).unwrap();
        let warnings = Warnings::default();
        let again = convert(&warnings);
        assert_eq!(again.manifest, good.manifest);
        assert!(
            again
                .layers
                .iter()
                .all(|l| l.made == LayerOrigin::Converted)
        );
        let warnings = warnings.0.into_inner().unwrap();
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(
            warnings.iter().all(|t| t.contains("it was removed")),
            "{warnings:?}"
        );
        let files = entries(dir.path());
        assert!(
            files
                .iter()
                .zip(&whole)
                .all(|(path, whole)| std::fs::read(path).unwrap() == *whole)
        );
    }
}

/// Converts an image twice, with a cache. `change` changes each entry in between. Returns how the
/// layers were made the second time, and the warnings.
fn convert_twice(change: impl Fn(&Path)) -> (Vec<LayerOrigin>, Vec<String>) {
    let image = image(&[1]);
    let dir = tempfile::tempdir().unwrap();
    let convert = |warnings: &Warnings| {
        let report = convert_with_cache(&image.source(None), dir.path(), warnings);
        report.layers.iter().map(|l| l.made).collect()
    };
    let _: Vec<LayerOrigin> = convert(&Warnings::default());
    entries(dir.path()).iter().for_each(|path| change(path));
    let warnings = Warnings::default();
    let made = convert(&warnings);
    (made, warnings.0.into_inner().unwrap())
}

#[test]
fn an_entry_that_cannot_be_opened_is_not_removed() {
    let (made, warnings) = convert_twice(|path| {
        std::fs::remove_file(path).unwrap();
        // A loop: to open it is an error, also for root.
        std::os::unix::fs::symlink(path, path).unwrap();
    });
    assert_eq!(made, [LayerOrigin::Converted; 2]);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(
        warnings.iter().all(|text| !text.contains("removed")),
        "{warnings:?}"
    );
}

#[test]
fn an_entry_that_another_process_removes_is_no_reason_for_a_warning() {
    let (made, warnings) = convert_twice(|path| {
        std::fs::remove_file(path).unwrap();
        std::os::unix::fs::symlink("removed", path).unwrap();
    });
    assert_eq!(made, [LayerOrigin::Converted; 2]);
    assert!(warnings.is_empty(), "{warnings:?}");
}

#[test]
fn entries_are_tried_in_the_order_of_their_names() {
    let (made, warnings) = convert_twice(|path| {
        for i in 0..100 {
            std::fs::write(path.with_file_name(format!("x{i}.bcow")), b"").unwrap();
        }
    });
    assert_eq!(made, [LayerOrigin::Cache; 2]);
    assert!(warnings.is_empty(), "{warnings:?}");
}

#[test]
fn a_contradiction_in_the_source_is_found_even_if_the_layer_exists() {
    let good = image(&[1]);
    let dir = tempfile::tempdir().unwrap();
    let cached = |layout: &mut LayoutOptions| layout.cache = Some(dir.path().to_owned());
    layered(&good.source(None), cached);
    let swapped = swapped();
    let source = swapped.source(None);
    for _ in 0..2 {
        let error = layered_with(&source, &options(), cached).err().unwrap();
        assert!(error.to_string().contains("diffID"), "{error}");
    }
    // Without verification, the contradiction is not found.
    assert!(layered_with(&source, &trusting(), cached).is_ok());
}

#[test]
fn a_source_that_was_not_checked_is_checked_later() {
    let layered = layered(&image(&[1]).source(None), |_| {});
    let into = |reference: &str| into(layered.layout(), Some(reference));
    let swapped = swapped();
    let source = swapped.source(None);
    convert_to_layout(&source, &into("trusted"), &trusting(), &()).unwrap();
    let Err(error) = convert_to_layout(&source, &into("checked"), &options(), &()) else {
        panic!("the contradiction is not found");
    };
    assert!(error.to_string().contains("diffID"), "{error}");
    // A source that was checked before keeps its annotation, with or without verification.
    let claims = |digest: &bcow_oci::Digest| {
        let manifest = std::fs::read(layered.blobs().join(digest.hex())).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let layers = manifest["layers"].as_array().unwrap().clone();
        let claim = |layer: &Value| layer["annotations"]["io.bcow.source.digest"].is_string();
        layers.iter().filter(|layer| claim(layer)).count()
    };
    let again = image(&[1]);
    let report = convert_to_layout(&again.source(None), &into("again"), &trusting(), &()).unwrap();
    assert_eq!(claims(&report.manifest), 2);
    let report = convert_to_layout(&source, &into("trusted"), &trusting(), &()).unwrap();
    assert_eq!(claims(&report.manifest), 0);
}

#[test]
fn an_image_does_not_replace_its_own_source() {
    let mut source = Layout::new();
    let tar = base();
    let descriptor = source.image("linux/amd64", &[(LAYER, tar.clone(), tar)]);
    source.list(descriptor, Some("name"));
    let convert = |from: Option<&str>, to: &str| {
        let layout = into(source.path(), Some(to));
        convert_to_layout(&source.source(from), &layout, &options(), &())
    };
    let error = convert(None, "name").unwrap_err();
    assert!(
        error
            .to_string()
            .contains("the new image would replace its source"),
        "{error}"
    );
    convert(None, "other").unwrap();
    // A BCoW image is not converted again.
    let error = convert(Some("other"), "third").unwrap_err();
    assert!(
        error.to_string().ends_with("is a BCoW image already"),
        "{error}"
    );
    convert(Some("name"), "other").unwrap();
}

#[test]
fn a_damaged_layer_in_the_layout_is_replaced() {
    let image = image(&[1]);
    let source = image.source(None);
    let layered = layered(&source, |_| {});
    let before = layered.files();
    let layers = &layered.report.layers;
    let blob = |layer: usize| layered.blobs().join(layers[layer].digest.hex());
    let [whole, other] = [0, 1].map(|layer| std::fs::read(blob(layer)).unwrap());
    let layout = into(layered.layout(), Some("test"));
    for damage in damages(&whole, &other) {
        std::fs::write(blob(0), damage).unwrap();
        let warnings = Warnings::default();
        convert_to_layout(&source, &layout, &options(), &warnings).unwrap();
        assert_eq!(warnings.0.into_inner().unwrap().len(), 1);
        assert!(layered.files() == before);
    }
}

#[test]
fn several_converters_share_a_cache_and_a_layout() {
    let images: Vec<Layout> = (0..4).map(|i| image(&[1, 10 + i])).collect();
    let dir = tempfile::tempdir().unwrap();
    let (cache, directory) = (dir.path().join("cache"), dir.path().join("layout"));
    let reports: Vec<_> = std::thread::scope(|scope| {
        let convert = |i: usize| {
            let layout = LayoutOptions {
                cache: Some(cache.clone()),
                ..into(&directory, Some(&format!("image{i}")))
            };
            convert_to_layout(&images[i].source(None), &layout, &options(), &()).unwrap()
        };
        let threads: Vec<_> = (0..4).map(|i| scope.spawn(move || convert(i))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(
        reports
            .windows(2)
            .all(|pair| pair[0].layers[0].digest == pair[1].layers[0].digest)
    );
    // Two layers of all images, and one of each image.
    assert_eq!(entries(&cache).len(), 2 + 4);
    let index = std::fs::read(directory.join("index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    assert_eq!(index["manifests"].as_array().unwrap().len(), 4);
}

#[test]
fn content_of_lower_layers_is_referenced_on_request() {
    let image = image(&[1, 2]);
    let source = image.source(None);
    let alone = layered(&source, |_| {});
    let tied = layered(&source, |layout| layout.dedup_lower = true);
    assert_eq!(alone.dump(), tied.dump());
    let lower: Vec<u64> = tied.report.layers.iter().map(|l| l.lower_bytes).collect();
    // The copy; and above the first of the two, also the blocks of the file with a tail.
    assert_eq!(lower, [0, 40_000, 40_000 + 4 * 4096]);
    assert!(tied.report.layers[1].file_bytes + 30_000 < alone.report.layers[1].file_bytes);
    // A layer refers only to the layers whose content it uses.
    let needs = |i: usize| tied.open(&tied.report.layers[i].digest).backings().count();
    assert_eq!([needs(0), needs(1), needs(2)], [0, 1, 2]);
    // Over the same lower layers, the layer is found; over others, it is converted again.
    let layout = LayoutOptions {
        dedup_lower: true,
        ..into(tied.layout(), None)
    };
    let again = convert_to_layout(&source, &layout, &options(), &()).unwrap();
    assert!(again.layers.iter().all(|l| l.made == LayerOrigin::Layout));
    let shorter = Layout::of(&[upper(9), upper(1)]);
    let other = convert_to_layout(&shorter.source(None), &layout, &options(), &()).unwrap();
    assert!(
        other
            .layers
            .iter()
            .all(|l| l.made == LayerOrigin::Converted)
    );
}

#[test]
fn odd_numbers_of_layers_are_images() {
    let none = layered(&Layout::of(&[]).source(None), |_| {});
    assert_eq!(none.dump().lines().count(), 1);
    let empty = Layout::of(&[Tar::new().done(), Tar::new().done()]);
    let empty = layered(&empty.source(None), |_| {});
    assert_eq!(empty.dump().lines().count(), 1);
    let many: Vec<Vec<u8>> = (0..300u32)
        .map(|i| {
            Tar::new()
                .file(format!("f{i}"), i.to_string())
                .file("same", i.to_string())
                .done()
        })
        .collect();
    let many = layered(&Layout::of(&many).source(None), |_| {});
    assert_eq!(many.dump().lines().count(), 302);
    assert_eq!(many.stack().backings().count(), 300);
    // The same layer twice, with another one in between.
    let twice = Layout::of(&[base(), upper(1), base()]);
    let twice = layered(&twice.source(None), |_| {});
    assert_eq!(digests(&twice)[0], digests(&twice)[2]);
    assert!(twice.dump().contains("/usr/f3 "));
}

#[test]
fn a_directory_that_is_not_a_layout_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("precious"), "x").unwrap();
    let image = image(&[]);
    let source = image.source(None);
    let to = |directory: PathBuf| {
        convert_to_layout(&source, &into(directory, None), &options(), &())
            .unwrap_err()
            .to_string()
    };
    let text = to(dir.path().to_owned());
    assert!(
        text.ends_with("it is neither an OCI image layout nor empty"),
        "{text}"
    );
    let text = to(dir.path().join("precious"));
    assert!(text.ends_with("it is not a directory"), "{text}");
    assert!(to(dir.path().join("no/such/parent")).starts_with("cannot create"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}
