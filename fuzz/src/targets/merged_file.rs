//! The file with the merged metadata of layers, which a mount with `--merged FILE` finds.
//!
//! The first byte says what the file is: the input itself, or the file of the layers or of other
//! layers, with changes. A change has its place, its length and its bytes; a length of 0 truncates
//! the file there. Each file leads to an image with the layers at the same places; an unusable file
//! is replaced by the right one, and a file of another kind stays.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use bcow::{
    BlockDevice, Composer, Composition, Compression, Image, MemoryStorage, OpenOptions,
    UnreadBackings,
};
use bcow_erofs::overlay::TreeForm;
use bcow_erofs::reader::Filesystem;
use bcow_oci::join::{JoinPart, Joined, join};

/// Each file of a join has more bytes.
const SHORTEST: usize = 4096;

struct Subject {
    parts: [JoinPart; 2],
    /// The file of the parts, and that of others.
    files: [Vec<u8>; 2],
    in_memory: Joined,
    /// What an image shows at the places that are compared.
    shown: Vec<u8>,
}

fn part(name: &str, form: TreeForm, extra: &[u8]) -> JoinPart {
    let mut bytes = include_bytes!("../../../fixtures/erofs/tree.erofs").to_vec();
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    bytes.extend_from_slice(extra);
    let form_of_file = Composition {
        size: bytes.len() as u64,
        region_shift: 22,
        block_shift: 14,
        compression: Compression::None,
        backings: Vec::new(),
    };
    let storage = Arc::new(MemoryStorage::default());
    let mut composer = Composer::new(storage.clone(), form_of_file).expect("a file");
    composer.write_at(0, &bytes).expect("written");
    composer.finish(&serde_json::Value::Null).expect("a file");
    let image = Image::open_with_backings(storage, &OpenOptions::default(), &UnreadBackings);
    JoinPart {
        image: image.expect("an image"),
        name: name.to_owned(),
        form,
    }
}

fn path() -> PathBuf {
    std::env::temp_dir().join(format!("bcow-fuzz-{}.bcow", std::process::id()))
}

fn joined(parts: &[JoinPart], kept: bool) -> Joined {
    let path = path();
    let kept = kept.then_some(path.as_path());
    let joined = join(parts, serde_json::Map::new(), &OpenOptions::default(), kept);
    joined.expect("parts that can be joined")
}

/// Parts of the address space. `None` if one cannot be read.
fn shown(joined: &Joined) -> Option<Vec<u8>> {
    let places = [0].iter().chain(&joined.starts);
    let mut shown = Vec::new();
    for &at in places {
        let mut bytes = vec![0; (joined.image.size() - at).min(48 << 10) as usize];
        joined.image.read_at(at, &mut bytes).ok()?;
        shown.extend(bytes);
    }
    Some(shown)
}

static SUBJECT: LazyLock<Subject> = LazyLock::new(|| {
    let below = part("below", TreeForm::Whole, &[]);
    let parts = [7, 8].map(|byte| {
        let above = part("above", TreeForm::Layer, &[byte; 4096]);
        [below.clone(), above]
    });
    let files = [0, 1].map(|index| {
        let _ = fs::remove_file(path());
        joined(&parts[index], true);
        fs::read(path()).expect("a kept file")
    });
    let [parts, _] = parts;
    let in_memory = joined(&parts, false);
    Subject {
        shown: shown(&in_memory).expect("an image that can be read"),
        parts,
        files,
        in_memory,
    }
});

fn change(file: &mut Vec<u8>, mut changes: &[u8]) {
    while let [low, high, more, rest @ ..] = changes {
        let at = u32::from_le_bytes([*low, *high, more & 1, 0]) as usize;
        let length = usize::from(more >> 1).min(rest.len());
        let (bytes, after) = rest.split_at(length);
        if length == 0 {
            file.truncate(at);
        }
        let part = file.get_mut(at..).unwrap_or_default();
        let length = length.min(part.len());
        part[..length].copy_from_slice(&bytes[..length]);
        changes = after;
    }
}

pub fn fuzz(bytes: &[u8]) {
    let Some((&what, rest)) = bytes.split_first() else {
        return;
    };
    let subject = &*SUBJECT;
    let mut file = rest.to_vec();
    if let Some(kept) = subject.files.get(usize::from(what)) {
        file.clone_from(kept);
        change(&mut file, rest);
    }
    fs::write(path(), &file).expect("written");
    let found = joined(&subject.parts, true);
    assert_eq!(found.starts, subject.in_memory.starts);
    assert_eq!(found.image.size(), subject.in_memory.image.size());
    let now = fs::read(path()).expect("a file");
    let shown = shown(&found);
    if now == file && file.len() >= SHORTEST {
        // It is used, and wrong bytes in it pass. Or it is of another kind, and stays.
        let later = fs::read(path()).expect("a file");
        assert!(later == file || later == subject.files[0]);
    } else {
        assert!(
            now == file || now == subject.files[0],
            "another file is there"
        );
        assert!(shown.as_ref() == Some(&subject.shown));
    }
    let _ = Filesystem::open(found.image);
    let _ = fs::remove_file(path());
}
