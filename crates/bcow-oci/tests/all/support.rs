//! Sources, conversions and their results.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use bcow::format::BackingEntry;
use bcow::{BackingResolver, BlockDevice, Image, OpenOptions};
use bcow_erofs::debug::{DumpOptions, dump_to_string};
use bcow_erofs::reader::Filesystem;
use bcow_oci::{
    ConvertError, ConvertOptions, Digest, LayoutOptions, LayoutPlace, LayoutReport, Progress,
    Report, Source, TarInput, convert, convert_to_layout,
};
use serde_json::{Value, json};
use tempfile::TempDir;

pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// The image in an OCI layout in an archive.
pub fn oci_archive(file: &Path, reference: Option<&str>) -> Source {
    Source::OciArchive {
        file: file.to_owned(),
        reference: reference.map(str::to_owned),
    }
}

/// The image in an archive of `docker save`.
pub fn archive_source(file: &Path) -> Source {
    Source::Archive(TarInput::File(file.to_owned()))
}

pub fn docker_source(file: &Path, reference: Option<&str>) -> Source {
    Source::DockerArchive {
        file: file.to_owned(),
        reference: reference.map(str::to_owned),
    }
}

/// An OCI layout in a temporary directory.
pub struct Layout {
    pub dir: TempDir,
    manifests: Vec<Value>,
}

impl Layout {
    pub fn new() -> Layout {
        let layout = Layout {
            dir: tempfile::tempdir().unwrap(),
            manifests: Vec::new(),
        };
        std::fs::create_dir_all(layout.path().join("blobs/sha256")).unwrap();
        let version = json!({"imageLayoutVersion": "1.0.0"});
        std::fs::write(layout.path().join("oci-layout"), version.to_string()).unwrap();
        layout
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Stores a blob and returns its descriptor.
    pub fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = Digest::of(bytes);
        let path = self.path().join("blobs/sha256").join(digest.hex());
        std::fs::write(path, bytes).unwrap();
        json!({"mediaType": media_type, "digest": digest.to_string(), "size": bytes.len()})
    }

    /// Stores an image of these layers (media type, stored bytes, tar) and returns its descriptor.
    pub fn image(&self, platform: &str, layers: &[(&str, Vec<u8>, Vec<u8>)]) -> Value {
        let diff_ids: Vec<_> = layers
            .iter()
            .map(|(_, _, tar)| Digest::of(tar).to_string())
            .collect();
        let (os, architecture) = platform.split_once('/').unwrap();
        let config = json!({
            "os": os, "architecture": architecture, "config": {"Cmd": ["sh"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let layers: Vec<_> = layers
            .iter()
            .map(|(media_type, stored, _)| self.blob(media_type, stored))
            .collect();
        let config = self.blob(CONFIG, config.to_string().as_bytes());
        self.manifest(config, layers)
    }

    pub fn manifest(&self, config: Value, layers: Vec<Value>) -> Value {
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        self.blob(MANIFEST, manifest.to_string().as_bytes())
    }

    /// Adds a descriptor to index.json.
    pub fn list(&mut self, mut descriptor: Value, name: Option<&str>) {
        if let Some(name) = name {
            descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": name});
        }
        self.manifests.push(descriptor);
        let index = json!({"schemaVersion": 2, "manifests": self.manifests});
        std::fs::write(self.path().join("index.json"), index.to_string()).unwrap();
    }

    /// A layout of one image of uncompressed layers.
    pub fn of(layers: &[Vec<u8>]) -> Layout {
        let mut layout = Layout::new();
        let layers: Vec<_> = layers
            .iter()
            .map(|tar| (LAYER, tar.clone(), tar.clone()))
            .collect();
        let image = layout.image("linux/amd64", &layers);
        layout.list(image, Some("test"));
        layout
    }

    pub fn source(&self, reference: Option<&str>) -> Source {
        Source::Oci {
            directory: self.path().to_owned(),
            reference: reference.map(str::to_owned),
        }
    }
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A converted image and the directory it is in.
pub struct Converted {
    pub dir: TempDir,
    pub report: Report,
}

impl Converted {
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("image.bcow")
    }

    pub fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path()).unwrap()
    }

    pub fn image(&self) -> Arc<Image> {
        Image::open(&self.path(), &OpenOptions::default()).unwrap()
    }

    pub fn filesystem(&self) -> Filesystem {
        Filesystem::open(self.image()).unwrap()
    }

    pub fn metadata(&self) -> Value {
        self.image().metadata().unwrap()
    }

    /// The tree, one line per entry.
    pub fn dump(&self) -> String {
        dump_of(&self.filesystem())
    }

    /// The lines of the tree without that of the root.
    pub fn lines(&self) -> String {
        self.dump().lines().skip(1).collect::<Vec<_>>().join("\n")
    }

    pub fn read(&self, path: &str) -> Vec<u8> {
        let fs = self.filesystem();
        let nid = fs
            .resolve(path.as_bytes())
            .unwrap()
            .unwrap_or_else(|| panic!("no {path}"));
        let inode = fs.inode(nid).unwrap();
        let mut bytes = vec![0; inode.size as usize];
        assert_eq!(fs.read(&inode, 0, &mut bytes).unwrap(), bytes.len());
        bytes
    }
}

fn dump_of(fs: &Filesystem) -> String {
    // Some tests have holes of any size.
    let options = DumpOptions {
        max_content_bytes: 1 << 28,
        ..DumpOptions::default()
    };
    dump_to_string(fs, &options)
}

/// An image in a layout.
pub struct Layered {
    pub dir: TempDir,
    pub report: LayoutReport,
}

/// Resolves backings in the blobs of a layout.
struct Blobs(PathBuf);

impl BackingResolver for Blobs {
    fn resolve(&self, entry: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, bcow::Error> {
        let name = entry.name.to_string();
        let path = self.0.join(name.trim_start_matches("sha256:"));
        let file = Arc::new(std::fs::File::open(path).unwrap());
        let image = Image::open_with_backings(file, &OpenOptions::default(), self)?;
        Ok(Some(image))
    }
}

impl Layered {
    pub fn layout(&self) -> PathBuf {
        self.dir.path().join("layout")
    }

    pub fn blobs(&self) -> PathBuf {
        self.layout().join("blobs/sha256")
    }

    pub fn open(&self, digest: &Digest) -> Arc<Image> {
        let blobs = Blobs(self.blobs());
        let file = std::fs::File::open(blobs.0.join(digest.hex())).unwrap();
        Image::open_with_backings(Arc::new(file), &OpenOptions::default(), &blobs).unwrap()
    }

    pub fn stack(&self) -> Arc<Image> {
        self.open(&self.report.stack.digest)
    }

    /// The merged tree, one line per entry.
    pub fn dump(&self) -> String {
        dump_of(&Filesystem::open(self.stack()).unwrap())
    }

    /// Names and contents of all files in the layout.
    pub fn files(&self) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
        let mut files = std::collections::BTreeMap::new();
        let mut pending = vec![self.layout()];
        while let Some(path) = pending.pop() {
            if path.is_dir() {
                pending.extend(
                    std::fs::read_dir(&path)
                        .unwrap()
                        .map(|entry| entry.unwrap().path()),
                )
            } else {
                let name = path.strip_prefix(self.layout()).unwrap().to_owned();
                files.insert(name, std::fs::read(&path).unwrap());
            }
        }
        files
    }
}

/// Converts into a new layout; `change` sets layout options.
pub fn layered_with(
    source: &Source,
    options: &ConvertOptions,
    change: impl FnOnce(&mut LayoutOptions),
) -> Result<Layered, ConvertError> {
    // In memory, because each file of a layout is synced, and most tests write one.
    let in_memory = Path::new("/dev/shm");
    let dir = if in_memory.is_dir() {
        tempfile::tempdir_in(in_memory)
    } else {
        tempfile::tempdir()
    };
    let dir = dir.unwrap();
    let mut layout = LayoutOptions {
        place: LayoutPlace {
            path: dir.path().join("layout"),
            reference: Some("test".into()),
            ..LayoutPlace::default()
        },
        ..LayoutOptions::default()
    };
    change(&mut layout);
    match convert_to_layout(source, &layout, options, &()) {
        Ok(report) => Ok(Layered { dir, report }),
        Err(error) => {
            let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
            assert!(left.is_empty(), "{error} left {left:?}");
            Err(error)
        }
    }
}

/// Collects the warnings of a conversion.
#[derive(Default)]
pub struct Warnings(pub Mutex<Vec<String>>);

impl Progress for Warnings {
    fn warning(&self, message: &str) {
        self.0.lock().unwrap().push(message.to_owned());
    }
}

pub fn options() -> ConvertOptions {
    ConvertOptions {
        threads: 1,
        tool_version: "test".into(),
        platform: None,
        ..ConvertOptions::default()
    }
}

pub fn convert_with(source: &Source, options: &ConvertOptions) -> Result<Converted, ConvertError> {
    let dir = tempfile::tempdir().unwrap();
    let destination = dir.path().join("image.bcow");
    match convert(source, &destination, options, &()) {
        Ok(report) => {
            let converted = Converted { dir, report };
            same_in_layers(source, options, &converted);
            Ok(converted)
        }
        Err(error) => {
            let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
            assert!(left.is_empty(), "{error} left {left:?}");
            Err(error)
        }
    }
}

/// Layer by layer, the same source gives the same tree.
fn same_in_layers(source: &Source, options: &ConvertOptions, flattened: &Converted) {
    match source {
        Source::Tar(TarInput::Stdin) => return,
        // A pipe can be read once only.
        Source::Tar(TarInput::File(path)) | Source::Archive(TarInput::File(path))
            if !path.is_file() =>
        {
            return;
        }
        _ => {}
    }
    let layered = match layered_with(source, options, |_| {}) {
        Ok(layered) => layered,
        // No layer can have such a file.
        Err(error)
            if matches!(source, Source::Directory(_)) && flattened.dump().contains("/.wh.") =>
        {
            let cause = std::error::Error::source(&error).unwrap();
            assert!(
                cause.to_string().contains("makes a whiteout of it"),
                "{cause}"
            );
            return;
        }
        Err(error) => panic!("{error}"),
    };
    assert_eq!(layered.dump(), flattened.dump());
    if !options.plain {
        let above = layered_with(source, options, |layout| layout.dedup_lower = true).unwrap();
        assert_eq!(above.dump(), flattened.dump());
    }
}

pub fn convert_layers(layers: &[Vec<u8>]) -> Result<Converted, ConvertError> {
    convert_with(&Layout::of(layers).source(None), &options())
}

/// Converts one tar archive from a file.
pub fn convert_tar(tar: &[u8]) -> Result<Converted, ConvertError> {
    convert_tar_with(tar, &options())
}

pub fn convert_tar_with(tar: &[u8], options: &ConvertOptions) -> Result<Converted, ConvertError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.tar");
    std::fs::write(&path, tar).unwrap();
    convert_with(&Source::Tar(TarInput::File(path)), options)
}

/// The message of a failure, with TMP for temporary directories.
pub fn message(result: Result<Converted, ConvertError>) -> String {
    let error = match result {
        Ok(converted) => panic!("converted: {}", converted.dump()),
        Err(error) => error,
    };
    let mut text = error.to_string();
    let mut cause: &dyn std::error::Error = &error;
    while let Some(next) = cause.source() {
        text.push_str(&format!(": {next}"));
        cause = next;
    }
    if let Some(hint) = error.hint() {
        text.push_str(&format!("\nhint: {hint}"));
    }
    let temp = std::env::temp_dir().display().to_string();
    let mut clean = String::new();
    let mut rest = &text[..];
    while let Some(at) = rest.find(&format!("{temp}/.tmp")) {
        clean.push_str(&rest[..at]);
        clean.push_str("TMP");
        rest = &rest[at + temp.len() + 5 + 6..];
    }
    clean + rest
}
