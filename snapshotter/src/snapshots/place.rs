//! The snapshotter's directory on the disk.
//!
//! ```text
//! ROOT/lock              locked by the process that uses ROOT
//! ROOT/snapshots/ID/     one directory for each snapshot
//!     record.json        its record
//!     fs/                active or a view, without a parent: the files
//!     upper/             active, with a parent: the upper of its mount
//!     root/              active or a view, with a parent: mounted here, for containerd to bind
//!     lower/             active, for a layer: the layers below are mounted here
//!     work/              active, for a layer: the directory that overlayfs needs
//! ROOT/layers/ID.bcow    the layer of a committed snapshot
//! ROOT/merged/ID.bcow    the merged metadata of this layer and those below it; a mount makes it
//! ROOT/cache/            what mounts have read of layers in registries: the cache of `bcow`
//! ROOT/auth/             credentials for these registries, of pulls
//! ROOT/new/              what is being made; the next start empties it
//! ROOT/trash/            what is removed; a sweep empties it
//! ROOT/damaged/          entries of ROOT/snapshots that a start could not use
//! ```
//!
//! One rename is the moment at which a snapshot begins to exist, is changed, or ceases to exist.
//! Everything that it depends on is durable before, and the rename is durable before the operation
//! returns. So after a crash each record is complete, and a layer without a record is garbage.
//!
//! A start needs no free space, and does not depend on a single snapshot: it sets aside an entry
//! without a valid record, and keeps the layer of the same number. A removal needs no free space
//! either.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};

use super::mounting;
use super::unpacking::{self, Unpacking};
use crate::error::Error;
use crate::record::{BadRecord, Id, Kind, RemoteLayer, SnapshotRecord};
use bcow_tool::host::{entries, entries_if_any, lock, make_private, replace, sync, write_private};
use bcow_tool::{At, HostError};

/// How long the process of a mount may take to notice the unmount, on a busy machine.
const UNMOUNTS_WITHIN: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// The snapshotter's directory, locked.
pub struct SnapshotterRoot {
    root: PathBuf,
    /// Serializes sweeps.
    sweeping: parking_lot::Mutex<()>,
    lock: File,
}

/// What a start finds.
pub struct FoundSnapshots {
    pub records: Vec<SnapshotRecord>,
    /// A number above all numbers in use.
    pub next: u64,
}

impl Drop for SnapshotterRoot {
    fn drop(&mut self) {
        // Closing the file would not do: a child that another thread has just forked keeps a copy
        // of the descriptor until its exec. If this fails, the lock ends with that copy.
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

impl SnapshotterRoot {
    /// Opens the directory, creates what is missing, and removes what a crash left. Reports the
    /// problems that do not concern all snapshots.
    pub fn open(root: &Path) -> Result<(Self, FoundSnapshots), Error> {
        require_plain(root)?;
        make_private(root)?;
        let lock = lock(root)?
            .ok_or_else(|| Error::State(format!("another process uses {}", root.display())))?;
        let place = SnapshotterRoot {
            root: root.to_owned(),
            sweeping: parking_lot::Mutex::new(()),
            lock,
        };
        make_private(&root.join("snapshots"))?;
        // Mounts would fail without the cache that their options name.
        for name in ["layers", "merged", "new", "trash", "cache", "auth"] {
            report(make_private(&root.join(name)));
        }
        report(sync(root));
        let found = place.recover()?;
        Ok((place, found))
    }

    fn recover(&self) -> Result<FoundSnapshots, Error> {
        report(mounting::end(&self.in_new("overlayfs/target")));
        for path in self.listed("new") {
            report(remove_all(&path));
        }
        let records = self.read_records()?;
        let of_files = ["trash", "layers", "snapshots", "damaged"].map(|name| self.listed(name));
        let numbers = of_files.iter().flatten().filter_map(|path| number(path));
        let next = numbers.max().map_or(1, |last| last + 1);

        let [_, layers, snapshots, damaged] = &of_files;
        let with_layer: HashSet<Id> = records
            .iter()
            .filter(|record| record.has_layer)
            .map(|record| record.id)
            .collect();
        // An entry whose record cannot be read may need its layer.
        let all: HashSet<Id> = records.iter().map(|record| record.id).collect();
        let unread = snapshots.iter().chain(damaged);
        let unread = unread.filter_map(|path| number(path).map(Id));
        let unread: HashSet<Id> = unread.filter(|id| !all.contains(id)).collect();
        for path in layers {
            let id = number(path).map(Id);
            let is_layer = id.is_some_and(|id| self.layer(id) == *path);
            let is_kept = id.is_some_and(|id| with_layer.contains(&id) || unread.contains(&id));
            if is_layer && !is_kept {
                report(remove_all(path));
            }
        }
        for path in self.listed("merged") {
            let id = number(&path).map(Id);
            if !id.is_some_and(|id| with_layer.contains(&id)) {
                report(remove_all(&path));
            }
        }
        for record in records.iter().filter(|record| record.has_layer) {
            let layer = self.layer(record.id);
            if !layer.is_file() {
                tracing::error!("the layer {} of {:?} is lost", layer.display(), record.name);
            }
        }
        Ok(FoundSnapshots { records, next })
    }

    /// The valid records. Sets aside the entries without one.
    fn read_records(&self) -> Result<Vec<SnapshotRecord>, Error> {
        let mut records = Vec::new();
        let mut names = HashSet::new();
        let mut paths = entries(&self.root.join("snapshots"))?;
        // Of two records with one name, the older one counts.
        paths.sort_by_key(|path| number(path));
        for path in paths {
            let record = self.read_record(&path).and_then(|record| {
                if names.insert(record.name.clone()) {
                    Ok(record)
                } else {
                    Err(BadRecord::Damaged(format!(
                        "there is another snapshot with its name, {:?}",
                        record.name
                    )))
                }
            });
            match record {
                Ok(record) => {
                    report(self.tidy(&path, &record));
                    records.push(record);
                }
                Err(problem) => self.set_aside(&path, &problem),
            }
        }
        Ok(records)
    }

    fn read_record(&self, directory: &Path) -> Result<SnapshotRecord, BadRecord> {
        let bytes = fs::read(directory.join("record.json"));
        let bytes = bytes.map_err(|error| BadRecord::Damaged(error.to_string()))?;
        let record = SnapshotRecord::decode(&bytes)?;
        if self.directory(record.id) == directory {
            Ok(record)
        } else {
            Err(BadRecord::Damaged(format!(
                "the record is of snapshot {}",
                record.id
            )))
        }
    }

    /// Moves an entry of the snapshots that cannot be used to where no start looks at it. The files
    /// may be of value. An entry of a later version stays, for this version.
    fn set_aside(&self, path: &Path, problem: &BadRecord) {
        let what = format!("cannot use {}: {problem}", path.display());
        if let BadRecord::Unsupported(_) = problem {
            tracing::error!("{what}; it is ignored");
            return;
        }
        let damaged = self.root.join("damaged");
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let numbered = (2..).map(|copy| damaged.join(format!("{name}-{copy}")));
        let mut free = std::iter::once(damaged.join(&*name)).chain(numbered);
        let free = free.find(|path| path.symlink_metadata().is_err());
        let moved = make_private(&damaged).and_then(|()| {
            mounting::end_in(path)?;
            let to = free.unwrap_or_else(|| damaged.clone());
            fs::rename(path, &to).at("set aside", path)?;
            sync(&damaged).map(|()| to)
        });
        match moved {
            Ok(to) => tracing::error!("{what}; it is set aside as {}", to.display()),
            Err(error) => tracing::error!("{what}; it is ignored: {error}"),
        }
    }

    /// The entries of a directory below ROOT. Reports a failure.
    fn listed(&self, name: &str) -> Vec<PathBuf> {
        entries_if_any(&self.root.join(name)).unwrap_or_else(|error| {
            tracing::error!("{error}");
            Vec::new()
        })
    }

    /// Removes what a crash left in the directory of a snapshot.
    fn tidy(&self, path: &Path, record: &SnapshotRecord) -> Result<(), HostError> {
        let unpacking = self.unpacking(record);
        if record.kind == Kind::Committed {
            mounting::end_in(path)?;
        }
        let of_mounts = [
            self.files(record),
            self.mounted_root(record),
            unpacking.lower,
            unpacking.work,
        ];
        for path in entries(path)? {
            let is_of_mount = of_mounts.contains(&path);
            let is_kept =
                path.ends_with("record.json") || (is_of_mount && record.kind != Kind::Committed);
            if !is_kept {
                remove_all(&path)?;
            }
        }
        Ok(())
    }

    /// The directory with the files of a snapshot without a parent, or the upper of one with a
    /// parent.
    pub fn files(&self, record: &SnapshotRecord) -> PathBuf {
        self.directory(record.id).join(match record.parent {
            None => "fs",
            Some(_) => "upper",
        })
    }

    /// The directory where the root of a snapshot with a parent is mounted.
    pub fn mounted_root(&self, record: &SnapshotRecord) -> PathBuf {
        self.directory(record.id).join(mounting::ROOT)
    }

    /// The number of the snapshot whose [`files`](Self::files) or root are at this path.
    pub fn id_of_files(&self, path: &Path) -> Option<Id> {
        id_of_files(&self.root.join("snapshots"), path)
    }

    /// The directories for the unpacking of a layer into an active snapshot.
    pub fn unpacking(&self, record: &SnapshotRecord) -> Unpacking {
        let directory = self.directory(record.id);
        Unpacking {
            lower: directory.join(mounting::LOWER),
            upper: self.files(record),
            work: directory.join("work"),
        }
    }

    /// Whether overlayfs can use directories in this one.
    pub fn has_overlayfs(&self) -> Result<bool, HostError> {
        let scratch = self.in_new("overlayfs");
        let is_supported =
            make_directory(&scratch, 0o700).and_then(|()| unpacking::is_supported(&scratch));
        report(remove_all(&scratch));
        is_supported
    }

    /// The layer of a committed snapshot.
    pub fn layer(&self, id: Id) -> PathBuf {
        self.root.join("layers").join(format!("{id}.bcow"))
    }

    /// The merged metadata of a layer and of those below it. A mount makes it.
    pub fn merged(&self, id: Id) -> PathBuf {
        self.root.join("merged").join(format!("{id}.bcow"))
    }

    /// The cache of the layers in registries.
    pub fn cache(&self) -> PathBuf {
        self.root.join("cache")
    }

    /// The credentials for them.
    pub fn credentials(&self) -> PathBuf {
        self.root.join("auth")
    }

    /// The part of a file of an image in a registry that is on the disk.
    pub fn cached(&self, root: &str) -> PathBuf {
        self.cache().join(format!("{root}.bcow"))
    }

    /// Removes from the cache what is of no layer in `used`. A mount that is ending keeps the files
    /// that it has open.
    pub fn sweep_cache(&self, used: &[RemoteLayer]) -> Result<(), Error> {
        let cache = self.cache();
        if !cache.is_dir() {
            return Ok(());
        }
        let files = used.iter().flat_map(|layer| &layer.files);
        let mut kept: HashSet<String> = files.map(|root| format!("{root}.bcow")).collect();
        let digests = used
            .iter()
            .filter_map(|layer| layer.image.rsplit_once("@sha256:"));
        kept.extend(digests.map(|(_, digits)| format!("sha256-{digits}.json")));
        for path in entries(&cache)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            // Other files are not of the cache.
            let is_cached = name.ends_with(".bcow") || name.ends_with(".json");
            if is_cached && !kept.contains(&*name) {
                remove_all(&path)?;
            }
        }
        Ok(())
    }

    fn directory(&self, id: Id) -> PathBuf {
        self.root.join("snapshots").join(id.to_string())
    }

    fn in_new(&self, name: &str) -> PathBuf {
        self.root.join("new").join(name)
    }

    /// Makes the directory of a new snapshot.
    pub fn create(&self, record: &SnapshotRecord) -> Result<(), Error> {
        let new = self.in_new(&record.id.to_string());
        let made = self.make(record, &new);
        if made.is_err()
            && let Err(error) = remove_all(&new)
        {
            tracing::warn!("{error}; the next start removes it");
        }
        made
    }

    fn make(&self, record: &SnapshotRecord, new: &Path) -> Result<(), Error> {
        make_directory(new, 0o700)?;
        match (&record.parent, record.kind) {
            (_, Kind::Committed) => {}
            // The container's root directory.
            (None, _) => make_directory(&new.join("fs"), 0o755)?,
            (Some(_), Kind::Active) => make_directory(&new.join("upper"), 0o700)?,
            (Some(_), _) => {}
        }
        let path = new.join("record.json");
        write_private(&path, &record.encode().at("write", &path)?)?;
        sync(new)?;
        let directory = self.directory(record.id);
        fs::rename(new, &directory).at("create", &directory)?;
        Ok(sync(&self.root.join("snapshots"))?)
    }

    pub fn replace(&self, record: &SnapshotRecord) -> Result<(), Error> {
        let directory = self.directory(record.id);
        let (new, path) = (
            directory.join("record.json.new"),
            directory.join("record.json"),
        );
        let line = record.encode().at("write", &path)?;
        Ok(replace(&path, &new, &line)?)
    }

    /// Lets `write` make the layer of a snapshot at the path that it gets, and keeps the layer.
    pub fn make_layer(
        &self,
        id: Id,
        write: impl FnOnce(&Path) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // A directory of its own: a `bcow` that survives this process cannot write after the next
        // start, as the directory is gone.
        let new = self.in_new(&format!("{id}-layer"));
        make_directory(&new, 0o700)?;
        let layer = new.join(format!("{id}.bcow"));
        let kept = write(&layer).and_then(|()| self.keep_layer(id, &layer));
        if let Err(error) = remove_all(&new) {
            tracing::warn!("{error}; the next start removes it");
        }
        kept
    }

    fn keep_layer(&self, id: Id, new: &Path) -> Result<(), Error> {
        sync(new)?;
        let layer = self.layer(id);
        fs::rename(new, &layer).at("create", &layer)?;
        Ok(sync(&self.root.join("layers"))?)
    }

    /// Waits until the process of a mount that has just ended no longer uses the upper. Fails if it
    /// still does after some seconds: the upper is mounted.
    pub fn wait_for_unmount(&self, record: &SnapshotRecord) -> Result<(), Error> {
        let end = Instant::now() + UNMOUNTS_WITHIN;
        let files = self.files(record);
        while lock_of(&files).is_err() {
            if Instant::now() >= end {
                let files = files.display();
                return Err(Error::State(format!(
                    "the snapshot is mounted: {files} is being written; `bcow ps` shows by which \
                     process"
                )));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Whether the upper of an active snapshot was never mounted.
    pub fn is_untouched(&self, record: &SnapshotRecord) -> Result<bool, Error> {
        let path = self.files(record);
        Ok(entries(&path)?.is_empty() && !self.unpacking(record).is_prepared())
    }

    /// Whether an upper of `bcow` has no file of the tree. The root can have other attributes.
    pub fn has_no_file(&self, record: &SnapshotRecord) -> Result<bool, Error> {
        let entries = entries(&self.files(record))?;
        let is_empty = matches!(&entries[..], [own] if own.ends_with(".bcow"));
        Ok(is_empty && !self.unpacking(record).is_prepared())
    }

    /// Removes the files of a snapshot that has been committed. If that fails, the next start
    /// does it.
    pub fn drop_files(&self, record: &SnapshotRecord) {
        let unpacking = self.unpacking(record);
        for (directory, name) in [(self.files(record), "files"), (unpacking.work, "work")] {
            report(self.throw_away(&directory, &format!("{}-{name}", record.id)));
        }
        for directory in [unpacking.lower, self.mounted_root(record)] {
            let _ = fs::remove_dir(directory);
        }
    }

    /// Ends the mounts of a snapshot, and removes it. A sweep removes its files.
    pub fn remove(&self, record: &SnapshotRecord) -> Result<(), Error> {
        let id = record.id;
        let directory = self.directory(id);
        mounting::end_in(&directory)?;
        self.throw_away(&directory, &id.to_string())?;
        sync(&self.root.join("snapshots"))?;
        for file in [self.layer(id), self.merged(id)] {
            report(remove_all(&file));
        }
        Ok(())
    }

    /// Moves a file or directory to the trash. Does nothing if it does not exist.
    fn throw_away(&self, path: &Path, name: &str) -> Result<(), HostError> {
        let trash = self.root.join("trash");
        let moved = || fs::rename(path, trash.join(name)).at("remove", path);
        match moved() {
            Err(_) if path.symlink_metadata().is_err() => Ok(()),
            // A rename can need a block of its directory. Space that is needed no more is released.
            Err(error) => {
                tracing::warn!("{error}; trying again after a sweep");
                report(self.sweep());
                report(make_private(&trash));
                moved()
            }
            Ok(()) => Ok(()),
        }
    }

    /// Removes the files of removed snapshots, but for uppers that a process uses: its mount is
    /// ending, or the container still runs. Returns how many are left.
    pub fn sweep(&self) -> Result<usize, HostError> {
        let _one = self.sweeping.lock();
        let mut left = 0;
        for path in entries(&self.root.join("trash"))? {
            // A `bcow` that outlived a killed snapshotter may have mounted just before the rename.
            // Its files would be removed through the mount.
            if let Err(error) = mounting::end_in(&path) {
                tracing::warn!("{error}");
                left += 1;
                continue;
            }
            let uppers = [path.join("upper"), path.clone()];
            let locks = uppers.each_ref().map(|upper| lock_of(upper));
            if locks.iter().any(Result::is_err) {
                left += 1;
                continue;
            }
            if let Err(error) = remove_all(&path) {
                tracing::warn!("{error}");
                left += 1;
            }
        }
        Ok(left)
    }
}

/// Locks an upper against mounts, if it is one. The error says that a process uses it, or may.
fn lock_of(upper: &Path) -> Result<Option<File>, ()> {
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(upper.join(".bcow/lock"));
    match opened {
        Ok(lock) => match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(lock)),
            Err(_) => Err(()),
        },
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            Ok(None)
        }
        // The upper may be in use; nothing must be removed for want of a descriptor.
        Err(_) => Err(()),
    }
}

/// Paths below ROOT are in options of mounts, where some characters have a meaning.
fn require_plain(root: &Path) -> Result<(), Error> {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+@:=".contains(c);
    match root.to_str() {
        Some(text) if root.is_absolute() && text.chars().all(is_plain) => Ok(()),
        _ => Err(Error::Invalid(format!(
            "{:?} is not an absolute path of letters, digits and /._-+@:=",
            root.display()
        ))),
    }
}

fn make_directory(path: &Path, mode: u32) -> Result<(), HostError> {
    fs::create_dir(path).at("create", path)?;
    // Independent of the umask.
    fs::set_permissions(path, Permissions::from_mode(mode)).at("create", path)
}

/// Logs a failure that does not prevent the rest.
fn report<T>(result: Result<T, HostError>) {
    if let Err(error) = result {
        tracing::error!("{error}");
    }
}

/// The number of the snapshot whose files or root are at this path, below the directory with the
/// directories of all snapshots.
pub fn id_of_files(snapshots: &Path, path: &Path) -> Option<Id> {
    let directory = path.parent()?;
    let is_files = ["fs", "upper", mounting::ROOT]
        .iter()
        .any(|name| path.ends_with(name));
    let id = number(directory).filter(|_| is_files).map(Id)?;
    (snapshots.join(id.to_string()) == directory).then_some(id)
}

/// The number at the begin of a name: `7`, `7.bcow` or `7-files`.
fn number(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let end = name.find(['.', '-']).unwrap_or(name.len());
    name[..end]
        .parse()
        .ok()
        .filter(|&number| number <= Id::MAX.0)
}

fn remove_all(path: &Path) -> Result<(), HostError> {
    // A process that is ending may still add names.
    const ATTEMPTS: usize = 20;
    let is_directory = path.symlink_metadata().is_ok_and(|found| found.is_dir());
    for attempt in 1.. {
        let removed = if is_directory { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        match removed {
            Err(error) if error.kind() == ErrorKind::NotFound => break,
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty && attempt < ATTEMPTS => {}
            removed => return removed.at("remove", path),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Labels;

    fn record(id: u64, parent: Option<&str>) -> SnapshotRecord {
        let parent = parent.map(str::to_owned);
        SnapshotRecord::new(
            Id(id),
            Kind::Active,
            format!("s{id}"),
            parent,
            Labels::new(),
        )
    }

    fn names(path: &Path) -> Vec<String> {
        let paths = entries(path).unwrap();
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        let mut names: Vec<String> = paths.iter().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn a_start_removes_everything_without_a_record() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let (place, _) = SnapshotterRoot::open(root).unwrap();
        let (committed, active) = (record(1, None), record(2, Some("s1")));
        for record in [&committed, &active] {
            place.create(record).unwrap();
        }
        place
            .make_layer(
                Id(1),
                |path| Ok(fs::write(path, "layer").at("write", path)?),
            )
            .unwrap();
        let committed = committed.committed("c".into(), Labels::new(), true);
        place.replace(&committed).unwrap();
        fs::create_dir_all(root.join("new/9/fs/d")).unwrap();
        fs::create_dir(root.join("trash/8")).unwrap();
        fs::write(root.join("layers/7.bcow"), "").unwrap();
        fs::write(root.join("layers/2.bcow"), "of an active snapshot").unwrap();
        for merged in ["1.bcow", "2.bcow", "7.bcow", ".bcow-x.part"] {
            fs::write(root.join("merged").join(merged), "").unwrap();
        }
        fs::write(root.join("snapshots/2/record.json.new"), "{").unwrap();
        for id in [1, 2] {
            fs::create_dir(root.join(format!("snapshots/{id}/root"))).unwrap();
        }
        drop(place);

        let (place, found) = SnapshotterRoot::open(root).unwrap();
        assert_eq!(found.next, 9);
        let mut records = found.records;
        records.sort_by_key(|record| record.id);
        assert_eq!(records, [committed, active]);
        assert_eq!(names(&root.join("layers")), ["1.bcow"]);
        assert_eq!(names(&root.join("merged")), ["1.bcow"]);
        assert_eq!(names(&root.join("new")), [""; 0]);
        assert_eq!(names(&root.join("snapshots/1")), ["record.json"]);
        let kept = ["record.json", "root", "upper"];
        assert_eq!(names(&root.join("snapshots/2")), kept);
        assert_eq!(place.sweep().unwrap(), 0);
        assert_eq!(names(&root.join("trash")), [""; 0]);
    }

    #[test]
    fn the_cache_keeps_what_a_layer_needs() {
        let directory = tempfile::tempdir().unwrap();
        let (place, _) = SnapshotterRoot::open(directory.path()).unwrap();
        let used = RemoteLayer {
            image: "docker://h/r@sha256:ab".to_owned(),
            layers: 1,
            files: vec!["1".into(), "2".into()],
        };
        place.sweep_cache(&[]).unwrap();
        for name in [
            "1.bcow",
            "2.bcow",
            "3.bcow",
            "sha256-ab.json",
            "name-c.json",
            "README",
        ] {
            fs::write(place.cache().join(name), "").unwrap();
        }
        place.sweep_cache(&[used]).unwrap();
        assert_eq!(
            names(&place.cache()),
            ["1.bcow", "2.bcow", "README", "sha256-ab.json"]
        );
        place.sweep_cache(&[]).unwrap();
        assert_eq!(names(&place.cache()), ["README"]);
    }

    #[test]
    fn a_failed_layer_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (place, _) = SnapshotterRoot::open(directory.path()).unwrap();
        let failed = place.make_layer(Id(3), |path| {
            fs::write(path, "half").at("write", path)?;
            Err(Error::State("no space".to_owned()))
        });
        assert_eq!(failed.unwrap_err().to_string(), "no space");
        assert_eq!(names(&directory.path().join("new")), [""; 0]);
        assert_eq!(names(&directory.path().join("layers")), [""; 0]);
    }

    #[test]
    fn an_upper_in_use_outlives_sweeps() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let (place, _) = SnapshotterRoot::open(root).unwrap();
        place.create(&record(1, Some("p"))).unwrap();
        fs::create_dir(root.join("snapshots/1/upper/.bcow")).unwrap();
        let lock = File::create(root.join("snapshots/1/upper/.bcow/lock")).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        place.remove(&record(1, Some("p"))).unwrap();
        assert_eq!(place.sweep().unwrap(), 1);
        assert_eq!(names(&root.join("trash/1")), ["record.json", "upper"]);
        // Not only closed, because a child of another test may have a copy of the descriptor.
        flock(&lock, FlockOperation::Unlock).unwrap();
        assert_eq!(place.sweep().unwrap(), 0);
        assert_eq!(names(&root.join("trash")), [""; 0]);
    }

    #[test]
    fn an_upper_whose_lock_cannot_be_opened_counts_as_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let (place, _) = SnapshotterRoot::open(root).unwrap();
        place.create(&record(1, Some("p"))).unwrap();
        let lock = root.join("snapshots/1/upper/.bcow/lock");
        fs::create_dir_all(&lock).unwrap();
        place.remove(&record(1, Some("p"))).unwrap();
        assert_eq!(place.sweep().unwrap(), 1);
        fs::remove_dir(root.join("trash/1/upper/.bcow/lock")).unwrap();
        assert_eq!(place.sweep().unwrap(), 0);
    }

    #[test]
    fn a_directory_has_one_user_and_a_plain_name() {
        let directory = tempfile::tempdir().unwrap();
        let place = SnapshotterRoot::open(directory.path()).unwrap();
        let error = SnapshotterRoot::open(directory.path()).err().unwrap();
        assert!(error.to_string().contains("another process"), "{error}");
        // The copy that a forked child has until its exec.
        let copy = place.0.lock.try_clone().unwrap();
        drop(place);
        drop(SnapshotterRoot::open(directory.path()).unwrap());
        drop(copy);
        for bad in ["relative", "/a,b", "/a b", "/a#b", "/a\"b"] {
            let error = SnapshotterRoot::open(Path::new(bad)).err().unwrap();
            assert!(matches!(error, Error::Invalid(_)), "{bad}: {error}");
        }
    }

    #[test]
    fn a_start_sets_aside_what_it_cannot_use() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let (place, _) = SnapshotterRoot::open(root).unwrap();
        for id in 1..=7 {
            place.create(&record(id, None)).unwrap();
            fs::write(place.layer(Id(id)), "layer").unwrap();
        }
        let path = |id: u64| root.join(format!("snapshots/{id}/record.json"));
        let line = |id: u64| String::from_utf8(fs::read(path(id)).unwrap()).unwrap();
        fs::write(path(1), "{").unwrap();
        fs::remove_file(path(2)).unwrap();
        fs::write(path(3), line(4)).unwrap();
        fs::write(path(5), line(5).replace("shot/1", "shot/9")).unwrap();
        fs::write(path(6), line(6).replace("s6", "s4")).unwrap();
        fs::write(root.join("snapshots/stray"), "").unwrap();
        fs::create_dir(root.join("snapshots/7.copy")).unwrap();
        fs::write(root.join("layers/stray"), "").unwrap();
        // Two starts: what was set aside stays so.
        drop(place);
        drop(SnapshotterRoot::open(root).unwrap());
        let (place, found) = SnapshotterRoot::open(root).unwrap();

        let kept: Vec<u64> = found.records.iter().map(|record| record.id.0).collect();
        assert_eq!(kept, [4, 7]);
        assert_eq!(found.next, 8);
        assert_eq!(names(&root.join("snapshots")), ["4", "5", "7"]);
        let set_aside = ["1", "2", "3", "6", "7.copy", "stray"];
        assert_eq!(names(&root.join("damaged")), set_aside);
        assert_eq!(names(&root.join("damaged/1")), ["fs", "record.json"]);
        // 4 and 7 are not committed, and have no layer.
        let layers = ["1.bcow", "2.bcow", "3.bcow", "5.bcow", "6.bcow", "stray"];
        assert_eq!(names(&root.join("layers")), layers);

        // Names that are taken there.
        fs::create_dir(root.join("snapshots/1")).unwrap();
        drop(place);
        let (_, found) = SnapshotterRoot::open(root).unwrap();
        assert_eq!(found.next, 8);
        assert!(root.join("damaged/1-2").is_dir());
    }

    #[test]
    fn a_removal_ends_although_the_files_are_gone() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let (place, _) = SnapshotterRoot::open(root).unwrap();
        for id in [1, 2] {
            place.create(&record(id, None)).unwrap();
        }
        fs::remove_dir_all(root.join("snapshots/1")).unwrap();
        fs::remove_dir(root.join("trash")).unwrap();
        for id in [1, 2] {
            place.remove(&record(id, None)).unwrap();
        }
        assert_eq!(names(&root.join("trash")), ["2"]);
    }
}
