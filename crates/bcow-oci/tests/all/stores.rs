//! A stack opens with exactly its own layers, from the places that the user allows.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use bcow::chain::MAX_DEPTH;
use bcow::format::{BackingEntry, BackingName};
use bcow::{BlockDevice, ImageWriter, MemoryStorage, OpenOptions, Storage, Verify, WriterOptions};
use bcow_oci::store::{
    LayerProblem, Opened, Places, RecordedFile, RemoteFailure, RemoteFiles, StoreError, open,
    open_remote, recorded_backings,
};
use bcow_oci::{Digest, LocalImage};
use bcow_testkit::changed;
use serde_json::{Value, json};

use crate::support::{CONFIG, LAYER, Layout};

const BCOW_LAYER: &str = "application/vnd.bcow.layer.v1";
const BCOW_STACK: &str = "application/vnd.bcow.stack.v1";

/// A BCoW file and its description in the metadata of a stack.
#[derive(Clone)]
struct Made {
    bytes: Vec<u8>,
    digest: Digest,
    size: u64,
    facts: Value,
}

/// A file with this content, and a window onto each of the others. `facts` become its metadata.
fn make(content: &[u8], below: &[&Made], facts: &[Value]) -> Made {
    let storage = Arc::new(MemoryStorage::default());
    let options = changed(WriterOptions::default(), |new| new.metadata_first = true);
    let mut writer = ImageWriter::on_storage(storage.clone(), options).unwrap();
    writer.append(content).unwrap();
    for made in below {
        let backing = writer.add_backing(BackingEntry {
            name: BackingName::Digest(made.digest.sha256().unwrap()),
            size: made.size,
        });
        writer.append_window(backing, 0, made.size).unwrap();
    }
    let metadata = match facts {
        [] => json!({}),
        facts => json!({ "layers": facts }),
    };
    let written = writer.finish(b"", &metadata).unwrap();
    let bytes = storage.to_vec();
    let digest = Digest::of(&bytes);
    Made {
        size: written.size(),
        facts: json!({
            "digest": digest,
            "file_bytes": written.file_bytes(),
            "merkle_root": Digest::from_sha256(written.merkle_root()),
        }),
        digest,
        bytes,
    }
}

fn layer(content: &[u8]) -> Made {
    make(content, &[], &[])
}

fn stack(layers: &[&Made]) -> Made {
    let facts: Vec<Value> = layers.iter().map(|layer| layer.facts.clone()).collect();
    make(b"tree", layers, &facts)
}

/// A layout with the stack of these layers under the name `x`.
fn layout(layers: &[&Made]) -> (Layout, Made) {
    let stack = stack(layers);
    let mut layout = Layout::new();
    let mut blobs: Vec<Value> = layers
        .iter()
        .map(|layer| layout.blob(BCOW_LAYER, &layer.bytes))
        .collect();
    blobs.push(layout.blob(BCOW_STACK, &stack.bytes));
    let config = layout.blob(CONFIG, b"{}");
    let manifest = layout.manifest(config, blobs);
    layout.list(manifest, Some("x"));
    (layout, stack)
}

fn blob_path(layout: &Layout, digest: &Digest) -> PathBuf {
    layout.path().join("blobs/sha256").join(digest.hex())
}

/// The image with this reference, behind a colon, or the blob with this digest, behind an at sign.
fn name(layout: &Layout, end: &str) -> LocalImage {
    let directory = layout.path().to_owned();
    match end.strip_prefix('@') {
        Some(digest) => LocalImage::Blob {
            directory,
            digest: digest.parse().unwrap(),
        },
        None => LocalImage::Layout {
            directory,
            reference: end.strip_prefix(':').map(str::to_owned),
        },
    }
}

fn opened(name: &LocalImage, stores: &[&Path]) -> Result<Opened, StoreError> {
    let stores: Vec<PathBuf> = stores.iter().map(|path| path.to_path_buf()).collect();
    let places = changed(Places::default(), |new| new.stores = &stores);
    open(name, places, &OpenOptions::default())
}

/// The first bytes of the n-th window.
fn shown(opened: &Opened, window: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let at = (window << 22) + 4096;
    opened.image.read_at(at, &mut bytes).unwrap();
    bytes
}

/// The problems, without the directory of the layout.
fn problems(opened: &Opened, layout: &Layout) -> Vec<String> {
    opened
        .problems
        .iter()
        .map(|problem| {
            problem
                .to_string()
                .replace(&layout.path().display().to_string(), "LAYOUT")
        })
        .collect()
}

#[test]
fn a_stack_opens_by_each_of_its_names() {
    let (one, two) = (layer(b"first"), layer(b"second"));
    let (layout, stack) = layout(&[&one, &two]);
    let bare = LocalImage::File(blob_path(&layout, &stack.digest));
    for name in [
        name(&layout, ""),
        name(&layout, ":x"),
        name(&layout, &format!("@{}", stack.digest)),
        bare,
    ] {
        let opened = opened(&name, &[]).unwrap();
        opened.require_all().unwrap();
        assert!(opened.is_stack());
        assert_eq!(opened.layers.len(), 2);
        assert!(opened.layers.iter().all(|layer| layer.file.is_some()));
        assert_eq!(shown(&opened, 1, 5), b"first");
        assert_eq!(shown(&opened, 2, 6), b"second");
    }
    let alone = opened(&name(&layout, &format!("@{}", two.digest)), &[]).unwrap();
    assert!(!alone.is_stack());
    assert_eq!(shown(&alone, 0, 6), b"second");
}

#[test]
fn a_layer_that_is_listed_twice_is_opened_once() {
    let one = layer(b"first");
    let (layout, _) = layout(&[&one, &one]);
    let opened = opened(&name(&layout, ":x"), &[]).unwrap();
    opened.require_all().unwrap();
    assert_eq!((opened.layers.len(), opened.below.len()), (2, 1));
    assert_eq!(shown(&opened, 2, 5), b"first");
}

#[test]
fn a_missing_layer_is_named_and_can_come_from_a_store() {
    let (one, two) = (layer(b"first"), layer(b"second"));
    let (layout, _) = layout(&[&one, &two]);
    std::fs::remove_file(blob_path(&layout, &two.digest)).unwrap();
    let without = opened(&name(&layout, ":x"), &[]).unwrap();
    assert_eq!(
        problems(&without, &layout),
        [format!(
            "layer 2 of 2 ({}) is missing; searched in LAYOUT",
            two.digest
        )]
    );
    assert!(matches!(*without.problems[0], LayerProblem::Missing { .. }));
    let refused = without.require_all().unwrap_err();
    assert!(refused.hint().unwrap().contains("--store"));
    // The other layers are readable.
    assert_eq!(shown(&without, 1, 5), b"first");

    let hex = two.digest.hex();
    for path in [
        hex.clone(),
        format!("sha256/{hex}"),
        format!("blobs/sha256/{hex}"),
    ] {
        let store = tempfile::tempdir().unwrap();
        let path = store.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &two.bytes).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let found = opened(&name(&layout, ":x"), &[elsewhere.path(), store.path()]).unwrap();
        found.require_all().unwrap();
        assert_eq!(shown(&found, 2, 6), b"second");
    }
}

#[test]
fn a_wrong_file_with_the_name_of_a_layer_is_skipped_for_a_right_one() {
    let (one, two) = (layer(b"first"), layer(b"second"));
    let (layout, _) = layout(&[&one, &two]);
    let path = blob_path(&layout, &one.digest);
    let root = |made: &Made| made.facts["merkle_root"].as_str().unwrap().to_owned();
    let mut shorter = one.bytes.clone();
    shorter.pop();
    let longer = make(&[b"first".to_vec(), vec![0; 5000]].concat(), &[], &[]);
    for (bytes, why) in [
        (
            two.bytes.clone(),
            format!(
                "LAYOUT/blobs/sha256/{} is not layer 1 of 2 ({}): \
                 its Merkle tree's root is {}, not {}",
                one.digest.hex(),
                one.digest,
                root(&two),
                root(&one)
            ),
        ),
        (
            longer.bytes.clone(),
            format!("Merkle tree's root is {}", root(&longer)),
        ),
        (shorter, "it was cut short".into()),
        (b"not an image".to_vec(), "not a BCoW file".into()),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let wrong = opened(&name(&layout, ":x"), &[]).unwrap();
        let found = problems(&wrong, &layout);
        assert!(found.len() == 1 && found[0].contains(&why), "{found:?}");
        assert!(found[0].contains(&format!("layer 1 of 2 ({})", one.digest)));
        assert!(wrong.image.read_at(4 << 20, &mut [0]).is_err());
        assert_eq!(shown(&wrong, 2, 6), b"second");

        let store = tempfile::tempdir().unwrap();
        std::fs::write(store.path().join(one.digest.hex()), &one.bytes).unwrap();
        let right = opened(&name(&layout, ":x"), &[store.path()]).unwrap();
        right.require_all().unwrap();
        assert_eq!(shown(&right, 1, 5), b"first");
    }
}

#[test]
fn swapped_layers_are_refused() {
    let (one, two) = (layer(b"first"), layer(b"second"));
    let (layout, _) = layout(&[&one, &two]);
    std::fs::write(blob_path(&layout, &one.digest), &two.bytes).unwrap();
    std::fs::write(blob_path(&layout, &two.digest), &one.bytes).unwrap();
    let swapped = opened(&name(&layout, ":x"), &[]).unwrap();
    assert_eq!(swapped.problems.len(), 2);
    assert!(swapped.problems.iter().all(|p| p.code() == "backing-entry"));
}

#[test]
fn backing_files_of_layers_are_found_the_same_way() {
    let one = layer(b"first");
    let two = make(b"second", &[&one], &[]);
    let (layout, _) = layout(&[&one, &two]);
    let both = opened(&name(&layout, ":x"), &[]).unwrap();
    both.require_all().unwrap();
    assert_eq!(both.below.len(), 2);
    // The stack's second window shows the second layer, whose own window shows the first.
    let mut bytes = [0; 5];
    both.image.read_at((3 << 22) + 4096, &mut bytes).unwrap();
    assert_eq!(&bytes, b"first");

    // No metadata describes the files below a layer that is opened on its own, so they are hashed.
    let alone = name(&layout, &format!("@{}", two.digest));
    opened(&alone, &[]).unwrap().require_all().unwrap();
    let mut other = one.bytes.clone();
    other.push(0);
    std::fs::write(blob_path(&layout, &one.digest), other).unwrap();
    let wrong = opened(&alone, &[]).unwrap();
    let found = problems(&wrong, &layout);
    assert!(found[0].contains(&format!("is not backing {}: its digest is", one.digest)));
}

#[test]
fn chains_end_at_the_limit() {
    let most = MAX_DEPTH as usize;
    let mut layers = vec![layer(b"lowest")];
    for depth in 1..=most {
        let below = layers.last().unwrap().clone();
        layers.push(make(format!("{depth}").as_bytes(), &[&below], &[]));
    }
    for (count, works) in [(most, true), (most + 1, false)] {
        // The stack may name its layers in any order.
        for listed in [
            layers[..count].iter().collect::<Vec<_>>(),
            layers[..count].iter().rev().collect(),
        ] {
            let (layout, _) = layout(&listed);
            let opened = opened(&name(&layout, ":x"), &[]).unwrap();
            assert_eq!(opened.require_all().is_ok(), works, "{count}");
            if !works {
                let too_deep = |p: &Arc<LayerProblem>| matches!(**p, LayerProblem::TooDeep { .. });
                assert!(opened.problems.iter().any(too_deep));
            }
        }
    }
}

#[test]
fn a_file_below_itself_is_refused() {
    let one = layer(b"first");
    let two = make(b"second", &[&one], &[]);
    // The file with the name of the first layer has the second one below it. No metadata describes
    // either.
    let loops = make(b"third", &[&two], &[]);
    let top = make(b"tree", &[&two], &[]);
    let layout = Layout::new();
    layout.blob(BCOW_LAYER, &two.bytes);
    layout.blob(BCOW_STACK, &top.bytes);
    std::fs::write(blob_path(&layout, &one.digest), &loops.bytes).unwrap();
    let opened = opened(&name(&layout, &format!("@{}", top.digest)), &[]).unwrap();
    let found = problems(&opened, &layout);
    // Its digest differs, so the files below it are not looked up.
    assert!(found[0].contains("its digest is"), "{found:?}");
    opened.require_all().unwrap_err();
}

#[test]
fn the_merkle_tree_vouches_for_layers_and_the_manifest_for_the_stack() {
    let one = layer(b"first");
    let (layout, stack) = layout(&[&one]);
    let options = changed(OpenOptions::default(), |new| new.verify = Verify::Merkle);
    let good = open(&name(&layout, ":x"), Places::default(), &options).unwrap();
    good.require_all().unwrap();
    assert_eq!(shown(&good, 1, 5), b"first");
    let other = make(b"TREE", &[&one], std::slice::from_ref(&one.facts));
    std::fs::write(blob_path(&layout, &stack.digest), &other.bytes).unwrap();
    let error = open(&name(&layout, ":x"), Places::default(), &options)
        .err()
        .unwrap();
    assert!(error.to_string().contains("digest is"), "{error}");
}

#[test]
fn a_layout_without_the_requested_image_is_refused() {
    let mut ordinary = Layout::new();
    let image = ordinary.image("linux/amd64", &[(LAYER, b"tar".to_vec(), b"tar".to_vec())]);
    ordinary.list(image, Some("x"));
    let message = |name: &LocalImage| {
        let error = opened(name, &[]).err().unwrap();
        let hint = error.hint().unwrap_or_default();
        format!("{error} / {hint}").replace(&ordinary.path().display().to_string(), "LAYOUT")
    };
    let text = message(&name(&ordinary, ":x"));
    assert!(
        text.contains("in LAYOUT is an ordinary OCI image / `bcow convert`"),
        "{text}"
    );
    let text = message(&name(&ordinary, ":y"));
    assert!(text.contains("has no image \"y\" / available: x"), "{text}");
    let text = message(&name(&ordinary, &format!("@{}", Digest::of(b"nothing"))));
    assert!(text.contains("LAYOUT has no blob sha256:"), "{text}");
    let nowhere = LocalImage::Layout {
        directory: "nowhere".into(),
        reference: None,
    };
    assert!(message(&nowhere).contains("cannot open nowhere"));
}

#[test]
fn the_only_image_in_bcow_form_needs_no_name() {
    let one = layer(b"first");
    let (mut layout, _) = layout(&[&one]);
    let image = layout.image("linux/amd64", &[(LAYER, b"tar".to_vec(), b"tar".to_vec())]);
    layout.list(image, Some("ordinary"));
    assert!(opened(&name(&layout, ""), &[]).is_err());
    let mut index: Value =
        serde_json::from_slice(&std::fs::read(layout.path().join("index.json")).unwrap()).unwrap();
    index["manifests"][0]["artifactType"] = "application/vnd.bcow.image.v1".into();
    std::fs::write(layout.path().join("index.json"), index.to_string()).unwrap();
    opened(&name(&layout, ""), &[])
        .unwrap()
        .require_all()
        .unwrap();
}

#[test]
fn names_for_digests_are_single_names() {
    let named = |name: serde_json::Value| {
        let digest = Digest::of(b"x");
        let backing = json!({
            "digest": digest, "merkle_root": digest, "file_bytes": 1, "name": name,
        });
        let facts = recorded_backings(&json!({ "backings": [backing] }));
        facts[0].name.clone()
    };
    assert_eq!(named(json!("base.bcow")).as_deref(), Some("base.bcow"));
    for name in ["../base.bcow", "/etc/passwd", "a/b", "..", ".", "", "a\0b"] {
        assert_eq!(named(json!(name)), None, "{name:?}");
    }
    assert_eq!(named(json!("x".repeat(256))), None);
    assert_eq!(named(json!(7)), None);
    assert!(recorded_backings(&json!({ "backings": [{ "name": "base.bcow" }, 1] })).is_empty());
    assert!(recorded_backings(&json!({ "backings": 1 })).is_empty());
}

/// False metadata in a stack cannot make the reader search other directories.
#[test]
fn no_reference_in_a_file_leaves_the_stores() {
    let secret = layer(b"secret");
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("secret"), &secret.bytes).unwrap();
    let path = dir.path().join("secret").display().to_string();
    let facts = json!({
        "digest": path, "path": path, "file_bytes": secret.bytes.len(),
        "merkle_root": secret.facts["merkle_root"],
    });
    let top = make(b"tree", &[&secret], &[facts]);
    let layout = Layout::new();
    layout.blob(BCOW_STACK, &top.bytes);
    let opened = opened(&name(&layout, &format!("@{}", top.digest)), &[]).unwrap();
    assert_eq!(opened.problems.len(), 1);
    assert!(matches!(*opened.problems[0], LayerProblem::Missing { .. }));
}

/// A store on another machine. Each opening waits for a second one.
struct Slow {
    layers: Vec<Made>,
    /// The digests whose opening has begun.
    begun: Mutex<Vec<Digest>>,
    changed: Condvar,
}

impl Slow {
    fn new(layers: &[&Made]) -> Arc<Self> {
        Arc::new(Slow {
            layers: layers.iter().map(|&layer| layer.clone()).collect(),
            begun: Mutex::default(),
            changed: Condvar::new(),
        })
    }
}

impl RemoteFiles for Slow {
    fn name(&self, digest: &Digest) -> PathBuf {
        format!("slow/{}", digest.short()).into()
    }

    fn open(
        &self,
        digest: &Digest,
        _: &RecordedFile,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure> {
        let mut begun = self.begun.lock().unwrap();
        begun.push(digest.clone());
        self.changed.notify_all();
        let limit = Duration::from_secs(60);
        let alone = |begun: &mut Vec<Digest>| begun.len() < 2;
        let (begun, waited) = self
            .changed
            .wait_timeout_while(begun, limit, alone)
            .unwrap();
        assert!(!waited.timed_out(), "one layer is opened after the other");
        drop(begun);
        let found = self.layers.iter().find(|layer| layer.digest == *digest);
        Ok(found.map(|layer| {
            let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new(layer.bytes.clone()));
            storage
        }))
    }
}

fn opened_remotely(stack: &Made, remote: &Arc<Slow>, stores: &[PathBuf]) -> Opened {
    let remote: Arc<dyn RemoteFiles> = remote.clone();
    let places = Places {
        stores,
        remote: Some(&remote),
        ..Places::default()
    };
    let storage = Arc::new(MemoryStorage::new(stack.bytes.clone()));
    open_remote("remote".into(), storage, places, &OpenOptions::default()).unwrap()
}

#[test]
fn layers_on_another_machine_are_opened_at_the_same_time() {
    let layers = [&b"first"[..], b"second", b"third"].map(layer);
    let layers: Vec<&Made> = layers.iter().collect();
    let remote = Slow::new(&layers);
    let opened = opened_remotely(&stack(&layers), &remote, &[]);
    opened.require_all().unwrap();
    assert_eq!(shown(&opened, 3, 5), b"third");
    // Each one once.
    assert_eq!(remote.begun.lock().unwrap().len(), 3);
}

#[test]
fn layers_that_are_here_are_not_looked_for_on_another_machine() {
    let layers = [&b"first"[..], b"second", b"third"].map(layer);
    let layers: Vec<&Made> = layers.iter().collect();
    let store = tempfile::tempdir().unwrap();
    let path = store.path().join(layers[1].digest.hex());
    std::fs::write(path, &layers[1].bytes).unwrap();
    let remote = Slow::new(&layers);
    let opened = opened_remotely(&stack(&layers), &remote, &[store.path().to_owned()]);
    opened.require_all().unwrap();
    let begun = remote.begun.lock().unwrap();
    assert_eq!(begun.len(), 2);
    assert!(!begun.contains(&layers[1].digest));
}

#[test]
fn layers_that_no_window_shows_are_not_requested() {
    let layers = [&b"first"[..], b"second", b"third"].map(layer);
    let layers: Vec<&Made> = layers.iter().collect();
    let listed: Vec<Value> = layers.iter().map(|layer| layer.facts.clone()).collect();
    let stack = make(b"tree", &layers[..2], &listed);
    let remote = Slow::new(&layers);
    let opened = opened_remotely(&stack, &remote, &[]);
    assert_eq!(opened.layers.len(), 3);
    assert!(!remote.begun.lock().unwrap().contains(&layers[2].digest));
}

#[test]
fn a_layer_that_no_machine_has_is_missing() {
    let layers = [&b"first"[..], b"second"].map(layer);
    let layers: Vec<&Made> = layers.iter().collect();
    let remote = Slow::new(&layers[..1]);
    let opened = opened_remotely(&stack(&layers), &remote, &[]);
    assert!(matches!(
        opened.problems.as_slice(),
        [problem] if matches!(**problem, LayerProblem::Missing { .. })
    ));
    assert_eq!(remote.begun.lock().unwrap().len(), 2);
}
