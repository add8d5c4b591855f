//! The vectors in `fixtures/vectors`: files to accept, with the map and the content that a reader
//! must find, and files to reject, with the code that a full check must report first. The second
//! reader, `spec/reader.py`, runs on the same files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::check::{CheckOptions, Report, Severity, check};
use bcow::format::{BackingEntry, BackingName, FormatError, Use};
use bcow::{
    BackingResolver, BlockDevice, Error, Image, Mapping, MemoryStorage, OpenOptions, ShownBy,
    Storage, Verify,
};
use bcow_testkit::changed;
use sha2::{Digest, Sha256};

/// The folder, or the file without its extension, of this name.
pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/vectors")
        .join(name)
}

/// All `.bcow` files of a folder.
pub fn vectors(name: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder(name))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "bcow"))
        .collect();
    found.sort();
    assert!(!found.is_empty());
    found
}

fn storage(path: &Path) -> Arc<dyn Storage> {
    Arc::new(MemoryStorage::new(fs::read(path).unwrap()))
}

fn full_check(path: &Path) -> Report {
    check(storage(path), &CheckOptions::FULL).unwrap()
}

/// Backings by digest from one folder; the digest of the whole file is checked.
struct Store(PathBuf);

impl BackingResolver for Store {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        let BackingName::Digest(digest) = &backing.name else {
            return Ok(None);
        };
        let path = self.0.join(backing.name.to_string().replace("sha256:", ""));
        let Ok(bytes) = fs::read(path) else {
            return Ok(None);
        };
        if Sha256::digest(&bytes)[..] != digest[..] {
            return Err(FormatError::BackingEntry {
                index: 0,
                problem: "another digest".into(),
            }
            .into());
        }
        let below = Arc::new(MemoryStorage::new(bytes));
        Ok(Some(Image::open_with_backings(
            below,
            &OpenOptions::default(),
            self,
        )?))
    }
}

/// The map in the text form that `fixtures/vectors/README.md` defines.
fn map_text(image: &Image, slot: char) -> String {
    let header = image.header();
    let purpose = match header.purpose {
        Use::Image => "image",
        Use::Disk => "disk",
        Use::Partial => "sketch",
    };
    let state = format!("{:?}", header.state).to_lowercase();
    let mut text = format!(
        "bcow-map-1 size={} region_shift={} regions={} file_bytes={} use={purpose} \
         state={state} slot={slot} \
         generation={} incompatible={} read_only_compatible={} compatible={} backings={}\n",
        header.size,
        header.region_shift,
        header.root.bytes / 16,
        header.file_bytes,
        header.generation,
        header.features.incompatible,
        header.features.read_only_compatible,
        header.features.compatible,
        header.backing_count,
    );
    for extent in image.extents() {
        let extent = extent.unwrap();
        let (kind, a, b, c) = match extent.mapping {
            Mapping::Hole => ("absent", 0, 0, None),
            Mapping::Zero => ("zero", 0, 0, None),
            Mapping::Raw { stored } => ("raw", stored.at.0, stored.bytes.into(), Some(stored.crc)),
            Mapping::Compressed { stored } => {
                ("zstd", stored.at.0, stored.bytes.into(), Some(stored.crc))
            }
            Mapping::Open { stored } => ("open", stored.at.0, stored.bytes.into(), Some(0)),
            Mapping::Backing {
                by,
                index,
                offset,
                bytes,
            } => match by {
                ShownBy::Absent => ("absent", 0, 0, None),
                ShownBy::Window => ("window", offset, bytes, Some(index)),
                ShownBy::Fragment => ("fragment", offset, bytes, Some(index)),
            },
        };
        let last = c.map_or(String::new(), |c| format!(" {c}"));
        text += &format!("{} {} {kind} {a} {b}{last}\n", extent.offset, extent.length);
    }
    text
}

#[test]
fn valid_vectors_have_their_map_and_content() {
    for path in vectors("valid") {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let report = full_check(&path);
        assert!(report.is_sound(), "{name}: {:?}", report.findings);

        let image = Image::open_with_backings(
            storage(&path),
            &OpenOptions::default(),
            &Store(folder("valid/store")),
        )
        .unwrap_or_else(|error| panic!("{name}: {error}"));
        let expected = fs::read_to_string(path.with_extension("map")).unwrap();
        let slot = if expected.contains("slot=A") { 'A' } else { 'B' };
        assert_eq!(map_text(&image, slot), expected, "{name}");

        let verify = match image.header().merkle {
            Some(_) => vec![Verify::Checksums, Verify::Merkle],
            None => vec![Verify::Checksums],
        };
        for verify in verify {
            let options = changed(OpenOptions::default(), |new| new.verify = verify);
            let image =
                Image::open_with_backings(storage(&path), &options, &Store(folder("valid/store")))
                    .unwrap();
            let mut hasher = Sha256::new();
            image
                .read_with(0, image.size(), &mut |bytes| hasher.update(bytes))
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            let found: String = hasher
                .finalize()
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            let expected = fs::read_to_string(path.with_extension("sha256")).unwrap();
            assert_eq!(found, expected.trim(), "{name}");
        }
    }
}

#[test]
fn invalid_vectors_are_rejected_with_their_code() {
    let mut wrong = Vec::new();
    for path in vectors("invalid") {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let report = full_check(&path);
        let first = report
            .findings
            .iter()
            .find(|finding| finding.severity == Severity::Error)
            .map_or("ok", |finding| finding.code);
        let expected = fs::read_to_string(path.with_extension("code")).unwrap();
        if first != expected.trim() {
            wrong.push(format!("{name}: {first}, expected {}", expected.trim()));
        }
    }
    assert_eq!(wrong, [""; 0]);
}

/// A file that the check rejects never reads without an error, except for damage that the read path
/// does not examine.
#[test]
fn invalid_vectors_are_never_read_in_full_with_the_merkle_tree_verified() {
    for path in vectors("invalid") {
        let name = path.file_name().unwrap().to_str().unwrap();
        let options = changed(OpenOptions::default(), |new| new.verify = Verify::Merkle);
        let Ok(image) = Image::open_storage(storage(&path), &options) else {
            continue;
        };
        let read = image.read_with(0, image.size(), &mut |_| ());
        assert!(
            read.is_err() || image.metadata().is_err() || name.starts_with("merkle-"),
            "{name}"
        );
    }
}

#[test]
fn refused_vectors_fail_only_when_their_backing_is_read() {
    for path in vectors("refused") {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let report = full_check(&path);
        assert!(report.is_sound(), "{name}: {:?}", report.findings);
        let code = Image::open_with_backings(
            storage(&path),
            &OpenOptions::default(),
            &Store(folder("refused/store")),
        )
        .and_then(|image| image.read_with(0, image.size(), &mut |_| ()))
        .expect_err(&name)
        .code();
        let expected = fs::read_to_string(path.with_extension("code")).unwrap();
        assert_eq!(code, Some(expected.trim()), "{name}");
    }
}

#[test]
fn a_check_of_a_writable_file_counts_what_is_free_and_what_leaks() {
    for (name, free_bytes, leaked_bytes) in [
        ("log-empty", 0, 0),
        ("free-list", 2 * 4096, 2 * 4096),
        ("free-list-leak", 4096, 7 * 4096),
        // The gap has three sectors: the record uses the first, the list has the second too, and
        // the third is leaked. The place of the replaced block is free now.
        ("free-list-used-by-record", 2 * 4096, 4096),
    ] {
        let path = folder("valid").join(format!("{name}.bcow"));
        let report = full_check(&path);
        let writable = report.writable.unwrap();
        let found = (writable.free_bytes, writable.leaked_bytes);
        assert_eq!(found, (free_bytes, leaked_bytes), "{name}");
        let leaks: Vec<_> = report.findings.iter().map(|f| f.code).collect();
        let expected = ["leak"];
        assert_eq!(leaks, expected[..usize::from(leaked_bytes > 0)], "{name}");
    }
    let report = full_check(&folder("valid").join("log-last-without-its-raw-block.bcow"));
    let writable = report.writable.unwrap();
    assert_eq!((writable.records, writable.dropped_record), (1, true));
    assert_eq!(report.findings, []);
}
