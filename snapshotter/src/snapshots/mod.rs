//! The snapshots, and the operations of containerd's contract on them.
//!
//! A committed snapshot is one BCoW layer, which `bcow` makes at the commit, or when the archive of
//! the layer is applied; it is durable before the commit returns. Or it is a layer of a BCoW image
//! in a registry, of which nothing is fetched here. An active snapshot without a parent is a plain
//! directory, into which containerd unpacks the lowest layer of an image. An active snapshot with a
//! parent is a mount of the parent's layers with an upper; for the unpacking of a layer, it is
//! overlayfs over a mount of the parent's layers. A view is a mount of layers. `bcow` makes each
//! mount once, at a directory of the snapshot, and containerd binds it. Other processes serve the
//! mounts, and the directory says whether a snapshot is mounted, so this process keeps no state of
//! mounts.

mod applying;
mod figures;
mod index;
mod mounting;
mod place;
mod unpacking;

use std::collections::HashSet;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use bcow_tool::{At, Tool};

pub use self::applying::ContentStore;
use self::figures::Counters;
#[cfg(feature = "testing")]
pub use self::index::Index as FuzzedIndex;
use self::index::{Chain, Index};
use self::mounting::Mounter;
use self::place::SnapshotterRoot;
#[cfg(feature = "testing")]
pub use self::place::id_of_files;
use crate::credentials::{Keyring, Pull};
use crate::error::Error;
use crate::filter::Filters;
use crate::mount::{self, Access};
use crate::protocol::{Auth, Mount};
use crate::record::{Kind, Labels, RemoteLayer, SnapshotRecord};
use crate::remote::{self, Remote, RemoteArgs};
use crate::repository::Repository;
use crate::tool;
use crate::usage::{self, Usage};

/// Pause before the next sweep, if a process still used the upper of a removed snapshot. Each sweep
/// that leaves files doubles it, up to the longest pause.
const SWEEP_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_SWEEP_PAUSE: Duration = Duration::from_secs(60);

/// All snapshots in one directory of the host.
pub struct Snapshots {
    place: SnapshotterRoot,
    tool: Tool,
    remote: Remote,
    keyring: Arc<Keyring>,
    /// Options of each mount of layers.
    mount_options: Vec<String>,
    /// containerd's content store, if archives of layers can be applied.
    content: Option<ContentStore>,
    counters: Counters,
    /// Whether overlayfs can be used below the directory, as soon as that is known.
    has_overlayfs: OnceLock<bool>,
    /// Protects the records in memory. An operation that changes a snapshot holds its name in the
    /// index while it works on the disk, and does not hold this lock then.
    index: Mutex<Index>,
    /// Signals that a name is no longer held.
    released: Condvar,
    /// Wakes the sweeper.
    removed: Sender<()>,
}

impl Snapshots {
    /// Opens the snapshots in `root`. Removes what a crash left there.
    pub fn open(
        root: &Path,
        tool: Tool,
        remote: &RemoteArgs,
        mount_options: Vec<String>,
        content: Option<ContentStore>,
    ) -> Result<Arc<Self>, Error> {
        let (place, found) = SnapshotterRoot::open(root)?;
        let keyring = Arc::new(Keyring::open(place.credentials()));
        let remote = Remote::new(remote, tool.clone(), keyring.clone(), &place.cache())?;
        let count = found.records.len();
        let index = Index::new(found.records, found.next);
        let (removed, wakes) = channel();
        let snapshots = Arc::new(Snapshots {
            has_overlayfs: OnceLock::new(),
            place,
            tool,
            remote,
            keyring,
            mount_options,
            content,
            counters: Counters::default(),
            index: Mutex::new(index),
            released: Condvar::new(),
            removed,
        });
        tracing::info!("{}: snapshots: {count}", root.display());
        let weak = Arc::downgrade(&snapshots);
        let sweep = move || sweep_when_removed(&weak, &wakes);
        let started = std::thread::Builder::new().spawn(sweep);
        started.at("start a thread for", root)?;
        // Sweeps the snapshots that an earlier process removed.
        let _ = snapshots.removed.send(());
        Ok(snapshots)
    }

    pub fn stat(&self, name: &str) -> Result<SnapshotRecord, Error> {
        self.index.lock().get(name).cloned()
    }

    /// The records that the filters select.
    pub fn list(&self, filters: &Filters) -> Vec<SnapshotRecord> {
        let index = self.index.lock();
        let selected = index.all().filter(|record| filters.select(record));
        selected.map(|record| index.shown(record)).collect()
    }

    /// Disk usage of a snapshot, without its parents.
    pub fn usage(&self, name: &str) -> Result<Usage, Error> {
        let record = self.stat(name)?;
        if let Some(remote) = &record.remote {
            // What is in the cache: of the layer, and of the stack with the uppermost one.
            let stack = remote.files.first().filter(|_| remote.is_whole());
            let files = remote.files.get(remote.layers).into_iter().chain(stack);
            return files.map(|root| usage::of(&self.place.cached(root))).sum();
        }
        match (record.kind, record.has_layer) {
            (_, true) => usage::of(&self.place.layer(record.id)),
            (Kind::Active, _) => usage::of(&self.place.files(&record)),
            _ => Ok(Usage::default()),
        }
    }

    /// The mounts that containerd makes for an active snapshot or a view.
    pub fn mounts(&self, name: &str) -> Result<Vec<Mount>, Error> {
        let ((record, chain), _hold) = self.hold(&[name], &[name], |index| {
            let record = index.get(name)?.clone();
            if record.kind == Kind::Committed {
                return Err(Error::State(format!(
                    "snapshot {name:?} is neither active nor a view"
                )));
            }
            if record.has_layer {
                return Err(Error::State(format!(
                    "the layer of snapshot {name:?} was applied: it can only be committed"
                )));
            }
            let chain = chain_below(index, &record)?;
            Ok((record, chain))
        })?;
        self.answer(&record, &chain)
    }

    /// Creates an active snapshot or a view, on a committed parent or without a parent. For a layer
    /// that is in a registry in BCoW form, creates the committed snapshot, and fails with
    /// [`Error::Exists`].
    pub fn create(
        &self,
        kind: Kind,
        key: &str,
        parent: Option<&str>,
        labels: Labels,
    ) -> Result<Vec<Mount>, Error> {
        require_name(key)?;
        if kind == Kind::Active
            && let Some(layer) = self.remote.find(&labels)?
        {
            return Err(match self.register(key, parent, labels, layer) {
                Ok(()) => Error::Exists(key.to_owned()),
                Err(error) => error,
            });
        }
        let settled = [key, parent.unwrap_or(key)];
        let ((record, chain), _hold) = self.hold(&[key], &settled, |index| {
            let record = index.begin(kind, key, parent, labels)?;
            let chain = chain_below(index, &record)?;
            Ok((record, chain))
        })?;
        self.place.create(&record)?;
        let mounts =
            self.answer(&record, &chain)
                .inspect_err(|_| match self.place.remove(&record) {
                    Ok(()) => self.wake_sweeper(),
                    Err(error) => tracing::warn!("{error}"),
                })?;
        self.index.lock().put(key, record);
        Ok(mounts)
    }

    /// Creates a committed snapshot of a layer in a registry, unless there is one. containerd finds
    /// it by its parent and by its label.
    fn register(
        &self,
        key: &str,
        parent: Option<&str>,
        labels: Labels,
        layer: RemoteLayer,
    ) -> Result<(), Error> {
        let settled = [key, parent.unwrap_or(key)];
        let (record, _hold) = self.hold(&[key], &settled, |index| {
            let is_same = |record: &SnapshotRecord| {
                record.remote.is_some()
                    && record.parent.as_deref() == parent
                    && record.labels.get(remote::REF) == labels.get(remote::REF)
            };
            if index.all().any(is_same) {
                return Ok(None);
            }
            let record = index.begin(Kind::Committed, key, parent, labels)?;
            Ok(Some(record.in_registry(layer)))
        })?;
        let Some(record) = record else {
            return Ok(());
        };
        self.place.create(&record)?;
        self.index.lock().put(key, record);
        Ok(())
    }

    /// Commits the active snapshot `key` as `name`. The snapshot must not be mounted. A snapshot
    /// without a parent to which a layer was applied can get one: its layer does not depend on it.
    pub fn commit(
        &self,
        name: &str,
        key: &str,
        parent: Option<&str>,
        labels: Labels,
    ) -> Result<(), Error> {
        require_name(name)?;
        let held: Vec<&str> = [name, key].into_iter().chain(parent).collect();
        let ((active, chain), _hold) = self.hold(&held, &held, |index| {
            index.require_free(name)?;
            let active = index.get(key)?.clone();
            if active.kind != Kind::Active {
                return Err(Error::State(format!("snapshot {key:?} is not active")));
            }
            require_parent(index, &active, parent)?;
            let chain = chain_below(index, &active)?;
            Ok((active, chain))
        })?;
        let has_layer = match active.parent {
            _ if active.has_layer => true,
            None => true,
            Some(_) => {
                mounting::end(&self.place.mounted_root(&active))?;
                self.place.wait_for_unmount(&active)?;
                self.is_changed(&active, &chain)?
            }
        };
        if has_layer && !active.has_layer {
            self.place.unpacking(&active).finish()?;
            self.place
                .make_layer(active.id, |layer| self.write_layer(&active, &chain, layer))?;
        }
        let mut committed = active.committed(name.to_owned(), labels, has_layer);
        committed.parent = parent.map(str::to_owned).or(committed.parent);
        self.place.replace(&committed)?;
        self.index.lock().put(key, committed);
        self.place.drop_files(&active);
        self.wake_sweeper();
        Ok(())
    }

    /// Changes the labels of a snapshot.
    pub fn update(
        &self,
        name: &str,
        change: impl FnOnce(&Labels) -> Result<Labels, Error>,
    ) -> Result<SnapshotRecord, Error> {
        let (record, _hold) = self.hold(&[name], &[name], |index| {
            let record = index.get(name)?;
            Ok(record.relabelled(change(&record.labels)?))
        })?;
        self.place.replace(&record)?;
        self.index.lock().put(name, record.clone());
        Ok(record)
    }

    /// Removes a snapshot without children. Its files are removed in the background.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        let (record, _hold) = self.hold(&[name], &[name], |index| {
            let record = index.get(name)?.clone();
            if index.has_children(name) {
                Err(Error::State(format!(
                    "cannot remove snapshot {name:?}: it has children"
                )))
            } else {
                Ok(record)
            }
        })?;
        self.place.remove(&record)?;
        self.index.lock().remove(name);
        self.wake_sweeper();
        Ok(())
    }

    /// Notes the credentials of a pull from this repository, until the result is dropped. `None` if
    /// a mount could not use them.
    pub fn begin_pull(&self, from: Repository, auth: &Auth) -> Result<Option<Pull>, Error> {
        self.keyring.begin(from, auth)
    }

    /// Keeps the credentials of a pull that has succeeded, if layers of the repository are mounted
    /// from there.
    pub fn keep_credentials(&self, pull: &Pull) {
        if !self.repositories().contains(pull.repository()) {
            return;
        }
        if let Err(error) = pull.keep() {
            tracing::warn!("{}: {error}", pull.repository());
        }
    }

    /// The repositories with layers in the index.
    fn repositories(&self) -> HashSet<Repository> {
        let index = self.index.lock();
        let remote = index.all().filter_map(|record| record.remote.as_ref());
        remote
            .filter_map(|layer| Repository::of(&layer.image))
            .collect()
    }

    /// Removes the files of removed snapshots.
    pub fn clean_up(&self) -> Result<(), Error> {
        self.sweep().map(drop)
    }

    fn wake_sweeper(&self) {
        // The sweeper ends only when this is dropped.
        let _ = self.removed.send(());
    }

    /// Removes the files of removed snapshots, what the cache has of removed layers, and the
    /// credentials for them. Returns how many of the former are in use.
    fn sweep(&self) -> Result<usize, Error> {
        let left = self.place.sweep();
        let remote = |record: &SnapshotRecord| record.remote.clone();
        let used: Vec<RemoteLayer> = self.index.lock().all().filter_map(remote).collect();
        // Each releases space, also if another one fails.
        let cache = self.place.sweep_cache(&used);
        self.keyring.sweep(|| self.repositories())?;
        cache?;
        Ok(left?)
    }

    /// Whether an active snapshot with a parent has changes to it.
    fn is_changed(&self, active: &SnapshotRecord, chain: &Chain) -> Result<bool, Error> {
        if !self.place.has_no_file(active)? {
            return Ok(!self.place.is_untouched(active)?);
        }
        let (layers, options) = (self.layers(chain), self.command_options(chain));
        tool::is_changed(&self.tool, &layers, &options, &self.place.files(active))
    }

    fn write_layer(
        &self,
        active: &SnapshotRecord,
        chain: &Chain,
        layer: &Path,
    ) -> Result<(), Error> {
        let files = self.place.files(active);
        if active.parent.is_none() {
            return tool::convert(&self.tool, &files, layer);
        }
        let (layers, options) = (self.layers(chain), self.command_options(chain));
        tool::commit(&self.tool, &layers, &options, &files, layer)
    }

    /// The options of commands that read the layers.
    fn command_options(&self, chain: &Chain) -> Vec<String> {
        let remote = chain.remote.as_ref();
        remote.map_or_else(Vec::new, |remote| {
            self.remote.command_options(&remote.image)
        })
    }

    /// The names of the layers, from the lowest.
    fn layers(&self, chain: &Chain) -> Vec<String> {
        let remote = chain.remote.iter().map(RemoteLayer::name);
        let own = chain.layers.iter();
        let own = own.map(|&id| mount::text(&self.place.layer(id)));
        remote.chain(own).collect()
    }

    /// The mounts of a snapshot. Mounts its layers, if they are not mounted.
    fn answer(&self, record: &SnapshotRecord, chain: &Chain) -> Result<Vec<Mount>, Error> {
        let files = self.place.files(record);
        let is_writable = record.kind == Kind::Active;
        let mapping = mount::options_of_mapping(&record.labels).map_err(Error::Invalid)?;
        if record.parent.is_none() {
            if !mapping.is_empty() {
                return Err(Error::Unsupported(
                    "a user namespace for a snapshot without a parent".to_owned(),
                ));
            }
            return Ok(vec![mount::of_directory(&files, is_writable)]);
        }
        // containerd gives files away name by name. It takes a file with several names for several
        // files, as overlayfs shows them after the first change.
        let is_unpacking = is_writable && (is_unpacking(&record.name) || record.is_for_remap());
        // With the diff service, hardly a layer is unpacked, and the layers below are not mounted
        // in advance for that.
        let is_applied = self.content.is_some() && !record.is_for_remap();
        let by_overlayfs = is_unpacking && !is_applied && self.is_for_overlayfs(record)?;
        let access =
            if is_writable && !by_overlayfs { Access::Write(&files) } else { Access::Read };
        let mut options = self.mount_options.clone();
        if !chain.is_remapped {
            options.extend(mapping);
        }
        let image = chain.remote.as_ref().map(|remote| &*remote.image);
        if let Some(image) = image {
            options.extend(self.remote.mount_options(image));
        }
        // The mount for the unpacking of a layer is the only one with the layers below it.
        let merged = if is_unpacking {
            None
        } else {
            chain.layers.last().map(|&id| self.place.merged(id))
        };
        let layers = mount::of_layers(&self.layers(chain), access, merged.as_deref(), &options);
        let layers = layers.ok_or_else(|| {
            Error::State(format!("snapshot {:?} has no layer below", record.name))
        })?;
        let mounter = Mounter {
            tool: &self.tool,
            snapshot: &record.name,
            remote: image.map(|image| (image, self.remote.auth_file_of(image))),
            made_again: &self.counters.made_again,
        };
        if by_overlayfs {
            return self.place.unpacking(record).prepare(&mounter, &layers);
        }
        if is_unpacking && is_applied {
            // For the rare layer that the diff service leaves to containerd: a mount in advance
            // would read the layers below for nothing.
            return Ok(vec![layers]);
        }
        let root = self.place.mounted_root(record);
        mounter.ensure(&layers, &root)?;
        Ok(vec![mount::of_directory(&root, is_writable)])
    }

    /// Whether overlayfs unpacks a layer into this snapshot. A snapshot keeps the kind of mount
    /// that it had first.
    fn is_for_overlayfs(&self, record: &SnapshotRecord) -> Result<bool, Error> {
        if self.place.unpacking(record).is_prepared() {
            return Ok(true);
        }
        if !self.place.is_untouched(record)? {
            return Ok(false);
        }
        if let Some(&known) = self.has_overlayfs.get() {
            return Ok(known);
        }
        let found = self.place.has_overlayfs()?;
        Ok(*self.has_overlayfs.get_or_init(|| found))
    }

    /// Waits until no operation holds one of `settled`, and holds `names` if `check` succeeds.
    fn hold<T>(
        &self,
        names: &[&str],
        settled: &[&str],
        check: impl FnOnce(&mut Index) -> Result<T, Error>,
    ) -> Result<(T, Hold<'_>), Error> {
        let mut index = self.index.lock();
        while settled.iter().any(|name| index.is_held(name)) {
            self.released.wait(&mut index);
        }
        let checked = check(&mut index)?;
        for name in names {
            index.hold(name);
        }
        let hold = Hold {
            snapshots: self,
            names: names.iter().map(|&name| name.to_owned()).collect(),
        };
        Ok((checked, hold))
    }
}

/// Names that an operation holds. Other operations on them wait until the hold is dropped.
struct Hold<'s> {
    snapshots: &'s Snapshots,
    names: Vec<String>,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let mut index = self.snapshots.index.lock();
        for name in &self.names {
            index.release(name);
        }
        self.snapshots.released.notify_all();
    }
}

/// The layers below a snapshot, lowest first.
fn chain_below(index: &Index, record: &SnapshotRecord) -> Result<Chain, Error> {
    match &record.parent {
        None => Ok(Chain::default()),
        Some(parent) => index.chain(parent),
    }
}

/// Whether containerd unpacks a layer of an image into this snapshot: its name, behind that of the
/// namespace, begins with `extract-` (containerd's snapshots.UnpackKeyPrefix).
fn is_unpacking(name: &str) -> bool {
    let own = name.rsplit('/').next().unwrap_or(name);
    own.starts_with("extract-")
}

fn require_name(name: &str) -> Result<(), Error> {
    if name.is_empty() {
        Err(Error::Invalid("the name of a snapshot is empty".to_owned()))
    } else {
        Ok(())
    }
}

/// Checks the parent that a commit names. containerd's capability `rebase` is the commit of a
/// snapshot without a parent onto one.
fn require_parent(
    index: &Index,
    active: &SnapshotRecord,
    parent: Option<&str>,
) -> Result<(), Error> {
    match (active.parent.as_deref(), parent) {
        (_, None) => Ok(()),
        (Some(own), Some(parent)) if own == parent => Ok(()),
        (None, Some(parent)) if active.has_layer => index.require_committed(parent),
        (Some(_), Some(_)) => Err(Error::Invalid(format!(
            "cannot change the parent of snapshot {:?}",
            active.name
        ))),
        (None, Some(_)) => Err(Error::Unsupported(
            "a commit of unpacked files onto a parent that was not prepared".to_owned(),
        )),
    }
}

/// Sweeps after each removal, and again while files are left.
fn sweep_when_removed(snapshots: &Weak<Snapshots>, wakes: &Receiver<()>) {
    let mut left = 0;
    let mut pause = SWEEP_PAUSE;
    loop {
        let woken = match left {
            0 => wakes.recv().map_err(|_| RecvTimeoutError::Disconnected),
            _ => wakes.recv_timeout(pause),
        };
        pause = match woken {
            Ok(()) => SWEEP_PAUSE,
            Err(RecvTimeoutError::Timeout) => (pause * 2).min(LONGEST_SWEEP_PAUSE),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let Some(snapshots) = snapshots.upgrade() else {
            return;
        };
        left = snapshots.sweep().unwrap_or_else(|error| {
            tracing::warn!("{error}");
            1
        });
    }
}
