//! Random sequences of what the commands do with disks and their snapshots: writes, snapshots at
//! rest and in use, forks, rollbacks, removals and commits. A kill or a power cut ends a command at
//! any moment, and the sequence continues with what is left. Each disk then has its flushed or
//! later content, each snapshot has the content that it had, and a check has no findings.
//!
//! The files are in memory, and their names are in a directory of which a power cut keeps only what
//! was synced. The commands' steps with names are repeated here; `test_snapshots_model.py` runs the
//! commands themselves.
//!
//! `BCOW_SEQUENCES=N` runs that many sequences, and `BCOW_SEED=N` begins with another one.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bcow::check::{CheckOptions, check};
use bcow::format::{BackingEntry, BackingName};
use bcow::operation::{RewriteOptions, absorb_backing, record_identity, rewrite};
use bcow::{
    BackingResolver, BlockDevice, CreateOptions, Disk, Error, Image, Keep, Layout, MemoryStorage,
    OpenOptions, Space, Storage, UnreadBackings, WritableDevice,
};
use bcow_testkit::{Fate, History, PowerCut, Random, SECTOR_BYTES, Window, tagged, tags};

use super::operations::Ordered;

/// The number of the directory in the order of all operations.
const DIRECTORY: usize = usize::MAX;
const STEPS: u64 = 14;
const SECTORS: u64 = 512;
/// Sectors of a block.
const BLOCK: u64 = 8;
/// Where a snapshot has its mark, and a mark.
const MARK_AT: u64 = 2048;
const MARK: [u8; 264] = [7; 264];
/// Between the names of a disk and of its snapshot.
const SEPARATOR: char = '@';

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

fn options() -> OpenOptions {
    OpenOptions::default()
}

/// File names, and the numbers of the files.
type Names = BTreeMap<String, usize>;

/// Files with names, and all that was done with them.
struct Host {
    /// The number of the file of each operation.
    order: Arc<Mutex<Vec<usize>>>,
    files: Vec<Arc<Ordered>>,
    /// The names after each operation on the directory; `None` is a sync of it.
    directory: Vec<Option<Names>>,
}

impl Host {
    /// A host whose files are durable.
    fn new(contents: Vec<Vec<u8>>, names: Names) -> Self {
        let mut host = Host {
            order: Arc::default(),
            files: Vec::new(),
            directory: Vec::new(),
        };
        for content in contents {
            host.add(PowerCut::new(content));
        }
        host.set_names(names);
        host.sync_directory();
        host
    }

    /// Adds a file without a name; returns its number.
    fn add(&mut self, cut: PowerCut) -> usize {
        let number = self.files.len();
        let mut order = self.order.lock().unwrap();
        order.extend(vec![number; cut.operations()]);
        self.files.push(Arc::new(Ordered {
            cut,
            number,
            order: self.order.clone(),
        }));
        number
    }

    fn storage(&self, file: usize) -> Arc<dyn Storage> {
        self.files[file].clone()
    }

    fn names(&self) -> &Names {
        let last = self.directory.iter().rev().flatten().next();
        last.expect("the directory begins with names")
    }

    fn set_names(&mut self, names: Names) {
        self.order.lock().unwrap().push(DIRECTORY);
        self.directory.push(Some(names));
    }

    fn sync_directory(&mut self) {
        self.order.lock().unwrap().push(DIRECTORY);
        self.directory.push(None);
    }

    /// Gives a file a name, in the place of an earlier file of that name, and makes both durable.
    fn complete(&mut self, file: usize, name: &str) {
        self.files[file].sync().unwrap();
        let mut names = self.names().clone();
        names.insert(name.to_owned(), file);
        self.set_names(names);
        self.sync_directory();
    }

    fn remove(&mut self, name: &str) {
        let mut names = self.names().clone();
        names.remove(name).expect("it has the name");
        self.set_names(names);
        self.sync_directory();
    }

    /// The number of operations so far.
    fn moment(&self) -> usize {
        self.order.lock().unwrap().len()
    }

    /// What an end at this moment leaves.
    fn left(&self, end: End, moment: usize, random: &mut Random) -> Host {
        let order = self.order.lock().unwrap()[..moment].to_vec();
        let done = |number| order.iter().filter(|other| **other == number).count();
        let changes = &self.directory[..done(DIRECTORY)];
        let kept = match end {
            End::Kill => changes.len(),
            End::PowerCut => {
                let synced = changes.iter().rposition(Option::is_none).unwrap_or(0);
                synced + random.below((changes.len() - synced) as u64) as usize + 1
            }
        };
        let names = changes[..kept].iter().rev().flatten().next();
        let names = names.expect("the directory begins with names").clone();
        let mut contents = vec![Vec::new(); self.files.len()];
        for &file in names.values() {
            contents[file] = left_of(&self.files[file].cut, end, done(file), random);
        }
        Host::new(contents, names)
    }

    /// The backing that a disk names.
    fn backing(&self, file: usize) -> Option<BackingEntry> {
        let image = Image::open_with_backings(self.storage(file), &options(), &UnreadBackings);
        image.unwrap().disk_backing().cloned()
    }

    fn image(&self, file: usize) -> Arc<Image> {
        Image::open_with_backings(self.storage(file), &options(), self).unwrap()
    }

    fn disk(&self, file: usize) -> Disk {
        Disk::open(self.storage(file), &options(), self).unwrap()
    }

    /// The names of the files over the one with this name.
    fn over(&self, name: &str) -> Vec<String> {
        let is_over = |file| {
            self.backing(file)
                .is_some_and(|entry| file_name(&entry) == name)
        };
        let names = self.names().iter().filter(|(_, file)| is_over(**file));
        names.map(|(name, _)| name.clone()).collect()
    }
}

/// Finds backings by their names, as `bcow::chain` does.
impl BackingResolver for Host {
    fn resolve(&self, entry: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        let name = file_name(entry);
        let image = self.image(self.names()[name]);
        assert_eq!(image.size(), entry.size, "{name}");
        if let BackingName::FileName {
            identity: Some(identity),
            ..
        } = &entry.name
        {
            assert_eq!(*identity, image.identity_hash(), "{name} has changed");
        }
        Ok(Some(image))
    }
}

fn file_name(entry: &BackingEntry) -> &str {
    match &entry.name {
        BackingName::FileName { name, .. } => name,
        other => panic!("{other:?}"),
    }
}

/// An end of all commands.
#[derive(Clone, Copy, Debug)]
enum End {
    /// All operations so far are in the files.
    Kill,
    /// Of those that no sync followed, any are lost, or are torn.
    PowerCut,
}

/// What is left of a file with this many operations.
fn left_of(file: &PowerCut, end: End, operations: usize, random: &mut Random) -> Vec<u8> {
    let mut windows = file.windows().into_iter();
    let last = windows.rfind(|window| window.operations.start <= operations);
    let Range { start, end: before } = last.expect("the first one begins at 0").operations;
    let window = Window {
        operations: start..before.min(operations),
    };
    let fates = match end {
        End::Kill => vec![Fate::Kept; window.operations.len()],
        End::PowerCut => {
            let fates = file.fates(&window, 0, 3, random);
            random.pick(&fates).clone()
        }
    };
    let mut left = Vec::new();
    file.walk(|other, durable| {
        if other.operations.start == start {
            left = file.after(durable, &window, &fates);
        }
    });
    left
}

struct Sequence {
    host: Host,
    random: Random,
    create: CreateOptions,
    /// Number of sectors that change at once.
    unit: usize,
    /// What each file shows, over the files below it.
    shown: BTreeMap<usize, History>,
    next: u32,
    ends: [u64; 2],
}

impl Sequence {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let (layout, block_bytes, unit) = *random.pick(&[
            (Layout::Space, None, 8),
            (Layout::Space, Some(16 << 10), 1),
            (Layout::Performance, Some(32 << 10), 1),
            (Layout::Auto, None, 1),
        ]);
        let create = CreateOptions {
            layout,
            block_bytes,
            log_bytes: 64 << 10,
            ..CreateOptions::disk(SECTORS * SECTOR_BYTES as u64)
        };
        let mut sequence = Sequence {
            host: Host::new(Vec::new(), Names::new()),
            random,
            create: create.clone(),
            unit,
            shown: BTreeMap::new(),
            next: 0,
            ends: [0; 2],
        };
        let file = sequence.host.add(PowerCut::default());
        let disk = Disk::create_alone(sequence.host.storage(file), &create).unwrap();
        disk.close().unwrap();
        sequence.host.complete(file, "disk");
        sequence.show(file, vec![0; SECTORS as usize]);
        sequence
    }

    fn run(&mut self) {
        for _ in 0..STEPS {
            let begun = self.host.moment();
            self.step();
            if self.random.one_in(2) {
                let operations = (self.host.moment() - begun) as u64;
                let moment = begun + self.random.below(operations + 1) as usize;
                let end = *self.random.pick(&[End::Kill, End::PowerCut]);
                self.ends[end as usize] += 1;
                self.host = self.host.left(end, moment, &mut self.random);
                self.recover(moment);
            }
        }
        self.recover(self.host.moment());
    }

    /// Does what one command or one user of a disk does.
    fn step(&mut self) {
        let name = self.pick(false).expect("there is a disk");
        match self.random.below(8) {
            0..3 => self.use_disk(&name),
            3 => self.snapshot_at_rest(&name),
            4 => self.fork(),
            5 => self.roll_back(&name),
            6 => self.remove_snapshot(),
            _ => self.commit(&name),
        }
    }

    /// The name of a snapshot or of a disk.
    fn pick(&mut self, is_snapshot: bool) -> Option<String> {
        let names = self.host.names().keys();
        let names: Vec<_> = names
            .filter(|name| name.contains(SEPARATOR) == is_snapshot)
            .collect();
        let some = (!names.is_empty()).then(|| self.random.pick(&names));
        some.map(|name| (*name).clone())
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// Begins the history of a file, which shows this.
    fn show(&mut self, file: usize, tags: Vec<u32>) {
        self.shown.insert(file, History::new(self.unit, tags));
    }

    fn now(&self, file: usize) -> Vec<u32> {
        self.shown[&file].now().to_vec()
    }

    fn note(&mut self, file: usize, begun: usize, durable: bool, tags: Vec<u32>) {
        let ended = self.host.moment();
        let history = self.shown.get_mut(&file).expect("it is known");
        history.step(begun, ended, durable, tags);
    }

    fn use_disk(&mut self, name: &str) {
        let mut file = self.host.names()[name];
        let mut disk = Arc::new(self.host.disk(file));
        self.change(&disk, file);
        while self.random.one_in(2) {
            (disk, file) = self.snapshot(disk, file, name);
            self.change(&disk, file);
        }
        if self.random.one_in(2) {
            let begun = self.host.moment();
            disk.flush().unwrap();
            self.note(file, begun, true, self.now(file));
            Arc::into_inner(disk).expect("the last").close().unwrap();
        } else {
            // A process ends between two operations, and the next one finds a part of its writes.
            drop(disk);
            let begun = self.host.moment();
            let found = tags(&self.host.disk(file));
            self.shown[&file].allows(begun, &found).unwrap();
            self.note(file, begun, true, found.into_iter().flatten().collect());
        }
    }

    fn change(&mut self, disk: &Disk, file: usize) {
        for _ in 0..1 + self.random.below(6) {
            let (begun, mut tags, mut durable) = (self.host.moment(), self.now(file), false);
            let whole = *self.random.pick(&[1, BLOCK]);
            let sectors = tags.len() as u64 / whole;
            let at = self.random.below(sectors) * whole;
            let most = *self.random.pick(&[4, 64]);
            let count = (1 + self.random.below(most)) * whole;
            let range = at as usize..(at + count).min(tags.len() as u64) as usize;
            let offset = at * SECTOR_BYTES as u64;
            match self.random.below(12) {
                0..6 => {
                    tags[range.clone()].fill(self.number());
                    let bytes =
                        &tagged(&tags)[range.start * SECTOR_BYTES..range.end * SECTOR_BYTES];
                    disk.write_at(offset, bytes).unwrap();
                }
                6 | 7 => {
                    let length = (range.len() * SECTOR_BYTES) as u64;
                    let space = *self.random.pick(&[Space::Free, Space::Keep]);
                    disk.write_zeroes(offset, length, space).unwrap();
                    tags[range].fill(0);
                }
                8 => {
                    let sectors = (1 + self.random.below(2 * SECTORS / BLOCK)) * BLOCK;
                    disk.resize(sectors * SECTOR_BYTES as u64).unwrap();
                    tags.resize(sectors as usize, 0);
                    durable = true;
                }
                9 => {
                    disk.checkpoint().unwrap();
                    durable = true;
                }
                _ => {
                    disk.flush().unwrap();
                    durable = true;
                }
            }
            self.note(file, begun, durable, tags);
        }
    }

    fn snapshot_at_rest(&mut self, name: &str) {
        let file = self.host.names()[name];
        let below = Arc::new(self.host.disk(file));
        let (over, _) = self.snapshot(below.clone(), file, name);
        drop(over);
        Arc::into_inner(below).expect("the last").close().unwrap();
    }

    /// Makes the file of an open disk its snapshot. Returns the new disk and its file.
    fn snapshot(&mut self, below: Arc<Disk>, file: usize, name: &str) -> (Arc<Disk>, usize) {
        let begun = self.host.moment();
        let snapshot = format!("{name}{SEPARATOR}{}", self.number());
        below.checkpoint().unwrap();
        let tags = self.now(file);
        self.note(file, begun, true, tags.clone());
        let storage = self.host.storage(file);
        storage.write_at(MARK_AT, &MARK).unwrap();
        storage.sync().unwrap();
        let new = self.host.add(PowerCut::default());
        let over = below.create_over(snapshot.clone(), self.host.storage(new), None);
        self.show(new, tags);
        self.host.complete(new, &snapshot);
        let mut names = self.host.names().clone();
        names.insert(name.to_owned(), new);
        names.insert(snapshot, file);
        self.host.set_names(names);
        self.host.sync_directory();
        (Arc::new(over.unwrap()), new)
    }

    fn fork(&mut self) {
        if let Some(snapshot) = self.pick(true) {
            let new = self.create_over(&snapshot);
            let name = format!("fork-{}", self.number());
            self.host.complete(new, &name);
        }
    }

    fn roll_back(&mut self, name: &str) {
        let own = format!("{name}{SEPARATOR}");
        let names = self.host.names().keys();
        let own: Vec<String> = names
            .filter(|name| name.starts_with(&own))
            .cloned()
            .collect();
        if own.is_empty() {
            return;
        }
        let snapshot = self.random.pick(&own);
        let new = self.create_over(snapshot);
        if self.random.one_in(2) {
            self.snapshot_at_rest(name);
        }
        self.host.complete(new, name);
    }

    /// Creates a disk over a snapshot. Returns its file, which has no name.
    fn create_over(&mut self, snapshot: &str) -> usize {
        let below = self.host.names()[snapshot];
        let image = self.host.image(below);
        let name = BackingName::FileName {
            name: snapshot.to_owned(),
            identity: Some(image.identity_hash()),
        };
        let (entry, tags) = (
            BackingEntry {
                name,
                size: image.size(),
            },
            self.now(below),
        );
        let create = CreateOptions {
            size: image.size(),
            ..self.create.clone()
        };
        let new = self.host.add(PowerCut::default());
        let backing = Some((entry, image as Arc<dyn BlockDevice>));
        let disk = Disk::create(self.host.storage(new), &create, backing, &options());
        disk.unwrap().close().unwrap();
        self.show(new, tags);
        new
    }

    /// The disk over a snapshot takes its data. Disks above record the new identity.
    fn remove_snapshot(&mut self) {
        let Some(snapshot) = self.pick(true) else {
            return;
        };
        let direct = self.host.over(&snapshot);
        if direct.len() > 1 {
            return;
        }
        // The files over it, each behind the one below it, with the number of that one.
        let mut tree: Vec<(usize, usize)> = Vec::new();
        let mut names = direct.clone();
        while let Some(name) = names.pop() {
            let below = self
                .host
                .backing(self.host.names()[&name])
                .expect("a backing");
            tree.push((
                self.host.names()[&name],
                self.host.names()[file_name(&below)],
            ));
            names.extend(self.host.over(&name));
        }
        for (file, _) in tree.iter().skip(1).rev() {
            record_identity(&self.host.storage(*file), &options(), None).unwrap();
        }
        if let Some((file, removed)) = tree.first() {
            let (disk, removed) = (self.host.disk(*file), self.host.image(*removed));
            let backing = removed.disk_backing().map(|entry| {
                let device = UnreadBackings.resolve(entry).unwrap();
                (entry.clone(), device.expect("a device"))
            });
            let below = backing.as_ref().map_or(0, |(entry, _)| entry.size);
            absorb_backing(&disk, removed.size(), below, &()).unwrap();
            disk.set_backing(backing).unwrap();
            disk.close().unwrap();
        }
        for (file, below) in tree.iter().skip(1) {
            let storage = self.host.storage(*below);
            let below = Image::open_with_backings(storage, &options(), &UnreadBackings).unwrap();
            let identity = Some(below.identity_hash());
            record_identity(&self.host.storage(*file), &options(), identity).unwrap();
        }
        self.host.remove(&snapshot);
    }

    /// Writes the content into a new sealed file, which is compared.
    fn commit(&mut self, name: &str) {
        let file = self.host.names()[name];
        let image = self.host.image(file);
        let storage = Arc::new(MemoryStorage::default());
        let form = RewriteOptions::sealed(&image, Keep::All);
        rewrite(&*image, storage.clone(), form, &()).unwrap();
        let sealed = Image::open_storage(storage, &options()).unwrap();
        let found: Vec<u32> = tags(&*sealed).into_iter().flatten().collect();
        assert!(found == self.now(file), "{name}");
    }

    /// Compares and checks all files. All operations ended at `moment`; what is found stays.
    fn recover(&mut self, moment: usize) {
        let shown = std::mem::take(&mut self.shown);
        for (name, file) in self.host.names().clone() {
            let is_snapshot = name.contains(SEPARATOR);
            // As `remove_unfinished` does.
            if is_snapshot
                && self
                    .host
                    .backing(file)
                    .is_some_and(|own| file_name(&own) == name)
            {
                self.host.remove(&name);
                continue;
            }
            let found = if is_snapshot {
                tags(&*self.host.image(file))
            } else {
                let disk = self.host.disk(file);
                let found = tags(&disk);
                disk.close().unwrap();
                found
            };
            let allowed = shown[&file].allows(moment, &found);
            allowed.unwrap_or_else(|problem| panic!("{name}: {problem}"));
            let report = check(self.host.storage(file), &CheckOptions::FULL).unwrap();
            let is_right = if is_snapshot { report.is_sound() } else { report.findings.is_empty() };
            assert!(is_right, "{name}: {:?}", report.findings);
            self.show(file, found.into_iter().flatten().collect());
        }
    }
}

#[test]
fn snapshots_and_disks_survive_kills_and_power_cuts() {
    let first = from_environment("BCOW_SEED", 1);
    let sequences = from_environment("BCOW_SEQUENCES", 40);
    let mut ends = [0; 2];
    let mut snapshots = BTreeSet::new();
    for seed in first..first + sequences {
        let mut sequence = Sequence::new(seed);
        let run = std::panic::AssertUnwindSafe(|| sequence.run());
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("in the sequence of BCOW_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
        ends = [0, 1].map(|end| ends[end] + sequence.ends[end]);
        let names = sequence.host.names().keys();
        snapshots.insert(names.filter(|name| name.contains(SEPARATOR)).count());
    }
    println!(
        "{sequences} sequences, {} kills, {} power cuts",
        ends[0], ends[1]
    );
    assert!(snapshots.len() > 2, "{snapshots:?}");
}
