//! Requests of containerd and of a kubelet, and records on the disk, for a fuzzer: what this
//! program reads itself, behind the decoder of messages.

use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path};

use prost::Message;

use crate::credentials;
use crate::filter::Filters;
use crate::mount::{self, Access};
use crate::protocol::{self as wire, Auth, Descriptor};
use crate::record::{Id, Kind, Labels, SnapshotRecord};
use crate::repository::Repository;
use crate::service::relabel;
use crate::snapshots::{ContentStore, FuzzedIndex, id_of_files};

/// Reads `bytes` as what the first of them says. Errors are expected; only a panic, a hang, or a
/// property that does not hold, is a finding.
pub fn fuzz_request(bytes: &[u8]) {
    let Some((&what, bytes)) = bytes.split_first() else {
        return;
    };
    match what % 6 {
        0 => filter(bytes),
        1 => select_by_label(bytes),
        2 => read_records(bytes),
        3 => update(bytes),
        4 => apply(bytes),
        _ => pull(bytes),
    }
}

/// Texts that are separated by zero bytes.
fn texts(bytes: &[u8]) -> Vec<String> {
    let texts = bytes.split(|&byte| byte == 0);
    texts
        .map(|text| String::from_utf8_lossy(text).into_owned())
        .collect()
}

fn record(id: u64, name: &str, parent: Option<&str>, labels: Labels) -> SnapshotRecord {
    let (name, parent) = (name.to_owned(), parent.map(str::to_owned));
    SnapshotRecord::new(Id(id), Kind::Committed, name, parent, labels)
}

/// The filters of a request.
fn filter(bytes: &[u8]) {
    let texts = texts(bytes);
    let Ok(filters) = Filters::parse(&texts) else {
        return;
    };
    let labels = Labels::from([("containerd.io/gc.root".to_owned(), "a b".to_owned())]);
    let record = record(1, "k8s.io/1/sha256:ab", Some("p"), labels);
    // At least one of them must match.
    let mut alone = texts
        .iter()
        .map(|text| Filters::parse(std::slice::from_ref(text)));
    let selected = alone.any(|one| one.is_ok_and(|one| one.select(&record)));
    assert_eq!(filters.select(&record), selected);
}

/// A label and its value, in the form of Go.
fn select_by_label(bytes: &[u8]) {
    let texts = texts(bytes);
    let [name, value, ..] = texts.as_slice() else {
        return;
    };
    let quoted = |text: &str| {
        let mut quoted = String::from('"');
        for c in text.chars() {
            match c {
                '"' | '\\' => quoted.extend(['\\', c]),
                '\n' => quoted.push_str("\\n"),
                c if c.is_control() => quoted.push_str(&format!("\\U{:08x}", u32::from(c))),
                c => quoted.push(c),
            }
        }
        quoted + "\""
    };
    let selects = |operator: &str, record: &SnapshotRecord| {
        let filter = format!("labels.{} {operator} {}", quoted(name), quoted(value));
        match Filters::parse(std::slice::from_ref(&filter)) {
            Ok(filters) => filters.select(record),
            // A text that counts as several expressions.
            Err(_) if filter.contains("~=") => operator == "==",
            Err(error) => unreachable!("{filter}: {error}"),
        }
    };
    let labels = Labels::from([(name.clone(), value.clone())]);
    let with = record(1, "a", None, labels);
    assert!(selects("==", &with));
    assert!(!selects("!=", &with));
    let other = Labels::from([(name.clone(), format!("{value}x"))]);
    let other = record(1, "a", None, other);
    if !value.contains("~=") && !name.contains("~=") {
        assert!(!selects("==", &other));
        assert!(selects("!=", &other));
    }
}

/// Records, one in each line, as a start reads them.
fn read_records(bytes: &[u8]) {
    let mut records = Vec::new();
    let mut names = BTreeSet::new();
    for line in bytes.split(|&byte| byte == b'\n') {
        let Ok(record) = SnapshotRecord::decode(line) else {
            continue;
        };
        let again = record.encode().ok();
        let again = again.and_then(|line| SnapshotRecord::decode(&line).ok());
        assert_eq!(again.as_ref(), Some(&record));
        read_record(&record);
        if names.insert(record.name.clone()) {
            records.push(record);
        }
    }
    let count = records.len();
    let next = records.iter().map(|record| record.id.0).max().unwrap_or(0);
    let mut index = FuzzedIndex::new(records, next.saturating_add(1));
    for name in &names {
        if let Ok(chain) = index.chain(name) {
            assert!(chain.layers.len() <= count);
        }
        if let Ok(record) = index.get(name) {
            let shown = index.shown(record);
            assert!(shown.parent.is_none_or(|parent| names.contains(&parent)));
        }
        assert!(index.require_free(name).is_err());
        let _ = index.has_children(name);
    }
    if let Some(name) = names.first() {
        let begun = index.begin(Kind::Active, "a new one", Some(name), Labels::new());
        let is_committed = index.require_committed(name).is_ok();
        assert_eq!(begun.is_ok(), is_committed && !names.contains("a new one"));
    }
}

fn read_record(record: &SnapshotRecord) {
    if let Ok(options) = mount::options_of_mapping(&record.labels) {
        assert!(
            options
                .iter()
                .all(|option| !option.contains([',', '"', '\\']))
        );
    }
    if let Some(remote) = &record.remote {
        assert!((1..remote.files.len()).contains(&remote.layers));
        // An image cannot bring options of its own.
        let layers = [remote.name(), remote.name()];
        let mount = mount::of_layers(&layers, Access::Read, None, &[]).unwrap_or_default();
        assert_eq!(mount.options.len(), 3);
        assert!(mount.options.iter().all(|option| !option.contains(',')));
        for root in &remote.files {
            assert!(Path::new(root).components().count() <= 1);
        }
    }
    let committed = record.committed("name".to_owned(), Labels::new(), false);
    assert!(
        committed
            .encode()
            .is_ok_and(|line| SnapshotRecord::decode(&line).is_ok())
    );
}

/// A request to change labels.
fn update(bytes: &[u8]) {
    let Ok(request) = wire::Update::decode(bytes) else {
        return;
    };
    let (info, paths) = (
        request.info.unwrap_or_default(),
        request.mask.unwrap_or_default().paths,
    );
    let new: Labels = info.labels.into_iter().collect();
    let old: Labels = ["a", "b", "c"]
        .map(|name| (name.to_owned(), "1".to_owned()))
        .into();
    let Ok(labels) = relabel(&old, new.clone(), &paths) else {
        let is_label = |path: &String| path == "labels" || path.starts_with("labels.");
        assert!(!paths.iter().all(is_label));
        return;
    };
    assert!(labels.values().all(|value| !value.is_empty()));
    let known = |(name, value): (&String, &String)| {
        [&old, &new]
            .iter()
            .any(|labels| labels.get(name) == Some(value))
    };
    assert!(labels.iter().all(known));
    // The second of two equal requests changes nothing.
    assert!(relabel(&labels, new, &paths).is_ok_and(|again| again == labels));
    let _ = mount::options_of_mapping(&labels);
}

/// A request to the differ.
fn apply(bytes: &[u8]) {
    let Ok(request) = wire::Apply::decode(bytes) else {
        return;
    };
    if let Some(blob) = &request.diff {
        find_archive(blob);
    }
    let root = Path::new("/r/snapshots");
    for mount in &request.mounts {
        let uppers = mount
            .options
            .iter()
            .filter_map(|option| option.strip_prefix("upper="));
        for path in uppers.chain([mount.source.as_str()]) {
            if let Some(id) = id_of_files(root, Path::new(path)) {
                let own = root.join(id.to_string());
                let names = ["fs", "upper", "root"].map(|name| own.join(name));
                assert!(names.iter().any(|name| name == Path::new(path)));
            }
        }
    }
}

/// No digest leads out of the store. Nothing in this directory has the name of a blob.
fn find_archive(blob: &Descriptor) {
    let Ok(store) = ContentStore::open(Path::new("/proc/self")) else {
        return;
    };
    if let Ok(path) = store.archive(blob) {
        unreachable!("{}", path.display());
    }
    let file = blob.digest.replacen(':', "/", 1);
    let is_plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    if let Err(crate::error::Error::Unsupported(text)) = store.archive(blob)
        && text.contains("without the file")
    {
        assert!(Path::new(&file).components().all(is_plain));
        assert_eq!(Path::new(&file).components().count(), 2);
    }
}

/// A pull with credentials.
fn pull(bytes: &[u8]) {
    let Ok(request) = wire::PullImage::decode(bytes) else {
        return;
    };
    let image = request.image.unwrap_or_default().image;
    let Some(repository) = Repository::of(&image) else {
        return;
    };
    let full = repository.to_string();
    assert_eq!(Repository::of(&full).as_ref(), Some(&repository));
    let file = format!("{}.json", repository.file_name());
    assert!(!file.starts_with('+') && !file.contains('/') && file.len() > ".json".len());
    let auth = request.auth.unwrap_or_default();
    check_credentials(&repository, &auth);
}

fn check_credentials(repository: &Repository, auth: &Auth) {
    let Some(document) = credentials::document(repository, auth) else {
        return;
    };
    type Auths = HashMap<String, HashMap<String, HashMap<String, String>>>;
    let Ok(read) = serde_json::from_str::<Auths>(&document) else {
        unreachable!("{document}");
    };
    let registries: Vec<_> = read.values().flat_map(HashMap::iter).collect();
    let [(registry, entry)] = registries.as_slice() else {
        unreachable!("{document}");
    };
    assert_eq!(*registry, repository.key());
    let given = [
        &auth.username,
        &auth.password,
        &auth.auth,
        &auth.identity_token,
    ];
    assert!(entry.values().all(|value| given.contains(&value)));
}
