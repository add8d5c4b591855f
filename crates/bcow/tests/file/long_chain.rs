//! Chains of many files: how much a read of them reads, what it finds, and where it fails.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bcow::format::{BackingEntry, BackingName, State};
use bcow::operation::{RewriteOptions, rewrite};
use bcow::{
    BlockCache, BlockDevice, Content, CreateOptions, Disk, Error, Image, Keep, Layout, Mapping,
    MemoryStorage, OneBacking, OpenOptions, ShownBy, Space, Storage, UnreadBackings,
    WritableDevice,
};
use bcow_testkit::{Random, content};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// Bytes of a region of a disk, and of the map of a chain.
const REGION: u64 = 4 * MIB;

/// Storage that counts reads, together with all files of its chain.
struct Counted {
    content: MemoryStorage,
    reads: Arc<AtomicU64>,
}

impl Storage for Counted {
    fn len(&self) -> io::Result<u64> {
        self.content.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.content.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.content.write_at(offset, bytes)
    }
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.content.set_len(bytes)
    }
    fn sync(&self) -> io::Result<()> {
        self.content.sync()
    }
}

/// The files of a chain, the lowest first. File N has the name `file-N`.
#[derive(Default)]
struct Chain {
    files: Vec<Arc<Counted>>,
    reads: Arc<AtomicU64>,
}

impl Chain {
    fn new_file(&self) -> Arc<Counted> {
        Arc::new(Counted {
            content: MemoryStorage::default(),
            reads: self.reads.clone(),
        })
    }

    /// Adds a disk over the files so far.
    fn push(&mut self, options: &CreateOptions, fill: impl FnOnce(&Disk)) {
        let below = self.open(&OpenOptions::default()).map(|image| {
            let entry = entry(self.files.len() - 1, &image);
            (entry, image as Arc<dyn BlockDevice>)
        });
        let file = self.new_file();
        let disk = Disk::create(file.clone(), options, below, &OpenOptions::default()).unwrap();
        fill(&disk);
        disk.close().unwrap();
        self.files.push(file);
    }

    /// Makes the last file a sealed one with compressed blocks.
    fn seal(&mut self) {
        let image = self.open(&OpenOptions::default()).unwrap();
        let file = self.new_file();
        let form = RewriteOptions::sealed(&image, Keep::Own);
        rewrite(&*image, file.clone(), form, &()).unwrap();
        *self.files.last_mut().unwrap() = file;
    }

    fn open(&self, options: &OpenOptions) -> Option<Arc<Image>> {
        self.open_first(self.files.len(), options)
    }

    /// Opens the lowest files.
    fn open_first(&self, count: usize, options: &OpenOptions) -> Option<Arc<Image>> {
        self.files[..count].iter().fold(None, |below, file| {
            let below = OneBacking(below.map(|image: Arc<Image>| image as Arc<dyn BlockDevice>));
            Some(Image::open_with_backings(file.clone(), options, &below).unwrap())
        })
    }

    /// A new disk over all files.
    fn disk_over(&self, options: &OpenOptions) -> Disk {
        let below = self.open(options).unwrap();
        let create = small_blocks(below.size());
        let backing = (
            entry(self.files.len() - 1, &below),
            below as Arc<dyn BlockDevice>,
        );
        Disk::create(self.new_file(), &create, Some(backing), options).unwrap()
    }

    /// The number of reads of `work`.
    fn count(&self, work: impl FnOnce()) -> u64 {
        let before = self.reads.load(Ordering::Relaxed);
        work();
        self.reads.load(Ordering::Relaxed) - before
    }
}

fn entry(number: usize, image: &Image) -> BackingEntry {
    BackingEntry {
        name: BackingName::FileName {
            name: format!("file-{number}"),
            identity: Some(image.identity_hash()),
        },
        size: image.size(),
    }
}

/// With room for the map of a hundred regions, and for no table of 4 MiB of small blocks.
fn small_cache() -> OpenOptions {
    OpenOptions {
        cache: BlockCache::new(MIB),
        ..OpenOptions::default()
    }
}

fn small_blocks(size: u64) -> CreateOptions {
    CreateOptions {
        layout: Layout::Space,
        block_bytes: Some(BLOCK as u32),
        ..CreateOptions::disk(size)
    }
}

/// A chain in which each file has `writes` blocks in each of `regions` regions. Returns the address
/// and the content of each block, by which file has it.
fn spread(files: usize, regions: u64, writes: u64) -> (Chain, Vec<(u64, u8)>) {
    let mut random = Random::new(32);
    let mut chain = Chain::default();
    let mut shown = vec![0; (regions * REGION / BLOCK) as usize];
    for file in 0..files {
        chain.push(&small_blocks(regions * REGION), |disk| {
            for region in 0..regions {
                for _ in 0..writes {
                    let block = region * REGION / BLOCK + random.below(REGION / BLOCK);
                    let byte = file as u8 + 1;
                    disk.write_at(block * BLOCK, &[byte; BLOCK as usize])
                        .unwrap();
                    shown[block as usize] = byte;
                }
            }
        });
    }
    let blocks = (0..).step_by(BLOCK as usize).zip(shown);
    (chain, blocks.filter(|(_, byte)| *byte != 0).collect())
}

fn assert_reads(device: &dyn BlockDevice, block: &(u64, u8)) {
    let mut found = [0; BLOCK as usize];
    device.read_at(block.0, &mut found).unwrap();
    assert!(found == [block.1; BLOCK as usize], "at {}", block.0);
}

#[test]
fn a_read_through_many_files_reads_one_table_and_one_block() {
    let (files, regions) = (40, 16);
    let (chain, blocks) = spread(files, regions, 4);
    let disk = chain.disk_over(&small_cache());
    let image = chain.open(&small_cache()).unwrap();
    // The image has a table of its own.
    for (device, each) in [(&disk as &dyn BlockDevice, 2), (&*image, 3)] {
        // The first reads search each table once.
        let first = chain.count(|| blocks.iter().for_each(|block| assert_reads(device, block)));
        let tables = files as u64 * regions;
        assert!(first <= tables + each * blocks.len() as u64, "{first}");
        let mut random = Random::new(1);
        let reads = 1000;
        let count = chain.count(|| {
            for _ in 0..reads {
                assert_reads(device, random.pick(&blocks));
            }
        });
        println!(
            "{files} files, {} blocks: {first} reads at first, then {count} for {reads} blocks",
            blocks.len()
        );
        assert!(count <= each * reads, "{count} reads for {reads} blocks");
    }
}

#[test]
fn blocks_of_many_files_are_found_without_a_table() {
    let (mut chain, mut blocks) = spread(40, 16, 4);
    blocks.retain(|block| block.0 > 0);
    // 640 tables of 24 KiB do not fit into the cache, but one for each region does.
    let mut disk = chain.disk_over(&OpenOptions::default());
    let mut random = Random::new(1);
    for number in 40..44 {
        blocks.iter().for_each(|block| assert_reads(&disk, block));
        let reads = 1000;
        let count = chain.count(|| {
            for _ in 0..reads {
                assert_reads(&disk, random.pick(&blocks));
            }
        });
        assert_eq!(count, reads);
        // The map of the next disk has the entries of this one.
        disk.write_zeroes(0, BLOCK, Space::Free).unwrap();
        disk.checkpoint().unwrap();
        chain.files.push(chain.new_file());
        let file = chain.files.last().expect("just added").clone();
        disk = disk
            .create_over(format!("file-{number}"), file, None)
            .unwrap();
        let count = chain.count(|| blocks.iter().for_each(|block| assert_reads(&disk, block)));
        // And the table of the one region that the snapshot changed.
        assert!(count <= blocks.len() as u64 + 1, "{count}");
    }
}

#[test]
fn the_first_read_of_a_region_searches_no_more_files_than_are_above_its_block() {
    let (chain, blocks) = spread(20, 16, 4);
    for region in 0..16 {
        let disk = chain.disk_over(&small_cache());
        let in_region = |block: &&(u64, u8)| block.0 / REGION == region;
        let nearest = blocks.iter().filter(in_region).max_by_key(|block| block.1);
        let nearest = nearest.expect("a block of the last file");
        // The tables of the files above and of this one, then its table again, and the block.
        let count = chain.count(|| assert_reads(&disk, nearest));
        assert!(count <= 21 - u64::from(nearest.1) + 2, "{count} reads");
    }
}

#[test]
fn a_snapshot_takes_the_map_over() {
    let regions = 16;
    let (mut chain, blocks) = spread(30, regions, 4);
    let mut disk = chain.disk_over(&small_cache());
    blocks.iter().for_each(|block| assert_reads(&disk, block));
    for number in 30..34 {
        // Without a read between two of the snapshots.
        for half in 0..2 {
            disk.write_at(number * BLOCK, &[number as u8; 1]).unwrap();
            disk.checkpoint().unwrap();
            chain.files.push(chain.new_file());
            let file = chain.files.last().expect("just added").clone();
            let name = format!("file-{number}-{half}");
            disk = disk.create_over(name, file, None).unwrap();
        }
        let old = blocks.iter().filter(|block| block.0 > 40 * BLOCK);
        let mut read = 0;
        let count = chain.count(|| {
            for block in old {
                assert_reads(&disk, block);
                read += 1;
            }
        });
        // The table and the block of each, and the tables of two new files, which have changed one
        // region.
        assert!(count <= 2 * read + 4, "{count} reads for {read} blocks");
    }
}

/// Where a block is, asked file by file: the depth below the first file, and the content.
fn owner(files: &[Arc<Image>], at: u64) -> (u32, Content) {
    for (depth, image) in (1..).zip(files.iter().rev()) {
        if at >= image.size() {
            return (0, Content::Hole);
        }
        match image.map(at).unwrap().mapping {
            Mapping::Backing {
                by: ShownBy::Absent,
                ..
            } => {}
            Mapping::Hole => return (0, Content::Hole),
            Mapping::Zero => return (depth, Content::Zero),
            _ => return (depth, Content::Data),
        }
        let below = image.disk_backing().expect("a file below");
        if at >= below.size {
            return (0, Content::Hole);
        }
    }
    (0, Content::Hole)
}

/// Files of all sizes, layouts and kinds of entries.
#[test]
fn a_chain_shows_what_its_files_show_one_by_one() {
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let mut chain = Chain::default();
        let mut shown: Vec<u8> = Vec::new();
        for _ in 0..2 + random.below(9) {
            let size = (1 + random.below(3 * REGION / BLOCK)) * BLOCK;
            shown.resize(size as usize, 0);
            let (layout, block_bytes) = *random.pick(&[
                (Layout::Auto, None),
                (Layout::Space, None),
                (Layout::Space, Some(64 << 10)),
                (Layout::Performance, None),
                (Layout::Performance, Some(32 << 10)),
            ]);
            let options = CreateOptions {
                layout,
                block_bytes,
                ..CreateOptions::disk(size)
            };
            chain.push(&options, |disk| {
                for _ in 0..random.below(12) {
                    let at = random.below(size);
                    let most = *random.pick(&[5000, 300_000]);
                    let length = (1 + random.below(most)).min(size - at);
                    let range = at as usize..(at + length) as usize;
                    let byte = random.below(256) as u8;
                    if random.one_in(3) {
                        disk.write_zeroes(at, length, Space::Free).unwrap();
                        shown[range].fill(0);
                    } else {
                        disk.write_at(at, &vec![byte; length as usize]).unwrap();
                        shown[range].fill(byte);
                    }
                }
            });
            if random.one_in(3) {
                chain.seal();
            }
        }
        let options = if random.one_in(2) {
            OpenOptions::default()
        } else {
            OpenOptions {
                cache: BlockCache::new(0),
                ..OpenOptions::default()
            }
        };
        let image = chain.open(&options).unwrap();
        let alone: Vec<Arc<Image>> = chain
            .files
            .iter()
            .map(|file| Image::open_with_backings(file.clone(), &options, &UnreadBackings).unwrap())
            .collect();
        let size = shown.len() as u64;
        let mut at = 0;
        while at < size {
            let status = image.status(at, 1 + random.below(size - at)).unwrap();
            for at in (at..at + status.length).step_by(BLOCK as usize) {
                let found = (status.depth, status.content);
                assert_eq!(found, owner(&alone, at), "seed {seed}, at {at}");
            }
            // Between two questions, a read finds other blocks of the map.
            let start = random.below(size) as usize;
            let end = start + random.below((size as usize - start).min(100_000) as u64) as usize;
            let mut found = vec![1; end - start];
            image.read_at(start as u64, &mut found).unwrap();
            assert!(
                found == shown[start..end],
                "seed {seed}, from {start} to {end}"
            );
            at = (at + status.length).next_multiple_of(BLOCK);
        }
        assert!(content(&*image) == shown, "seed {seed}");
        let mut pieces = Vec::new();
        image
            .read_with(0, size, &mut |piece| pieces.extend_from_slice(piece))
            .unwrap();
        assert!(pieces == shown, "seed {seed}");
    }
}

#[test]
fn many_threads_find_the_same_blocks() {
    let (chain, blocks) = spread(20, 4, 16);
    for options in [OpenOptions::default(), small_cache()] {
        let image = chain.open(&options).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (image, blocks) = (&image, &blocks);
                scope.spawn(move || {
                    let mut random = Random::new(thread);
                    for _ in 0..500 {
                        assert_reads(&**image, random.pick(blocks));
                    }
                });
            }
        });
    }
}

/// The place of the table of a region in a file.
fn table_of(file: &Counted, region: u64) -> u64 {
    let bytes = file.content.to_vec();
    let is_table = |at: &usize| {
        bytes[*at..].starts_with(b"BCST") && bytes[at + 8..at + 16] == region.to_le_bytes()
    };
    let found: Vec<usize> = (0..bytes.len() - 16).step_by(16).filter(is_table).collect();
    // Earlier tables can be left in free space.
    *found.last().expect("a table") as u64
}

/// The file of each of three blocks of one region, and of one of another region.
fn three_files() -> Chain {
    let mut chain = Chain::default();
    for (number, write) in [(1, 0), (2, 1), (3, 2)] {
        chain.push(&small_blocks(2 * REGION), |disk| {
            disk.write_at(write * BLOCK, &[number; BLOCK as usize])
                .unwrap();
            disk.write_at(REGION + write * BLOCK, &[number; BLOCK as usize])
                .unwrap();
        });
    }
    chain
}

#[test]
fn a_damaged_table_fails_only_what_it_may_have_and_by_its_name() {
    let chain = three_files();
    let at = table_of(&chain.files[1], 0);
    chain.files[1].write_at(at + 20, &[0xff]).unwrap();
    let image = chain.open(&OpenOptions::default()).unwrap();
    for _ in 0..2 {
        for block in [0, 1, 3] {
            let error = image
                .read_at(block * BLOCK, &mut [0; BLOCK as usize])
                .unwrap_err();
            assert_eq!(error.code(), Some("table-crc"));
            let Error::InBacking { name, source } = &error else {
                panic!("{error}");
            };
            assert_eq!(name, "file-1");
            assert!(matches!(**source, Error::Format(_)), "{error}");
            let status = image.status(block * BLOCK, BLOCK).unwrap_err();
            assert_eq!(status.to_string(), error.to_string());
        }
        assert_reads(&*image, &(2 * BLOCK, 3));
        assert_eq!(image.status(2 * BLOCK, BLOCK).unwrap().depth, 1);
        for (block, number) in [(0, 1), (1, 2), (2, 3)] {
            assert_reads(&*image, &(REGION + block * BLOCK, number));
        }
    }
    // The file was read by mistake only: what it has is found again.
    chain.files[1].write_at(at + 20, &[0]).unwrap();
    for (block, number) in [(0, 1), (1, 2), (2, 3)] {
        assert_reads(&*image, &(block * BLOCK, number));
    }
}

/// A block in the log is found, although the table that has the others cannot be read.
#[test]
fn a_table_that_cannot_be_read_hides_no_block_of_the_log() {
    let mut chain = three_files();
    chain.push(&small_blocks(2 * REGION), |disk| {
        disk.write_at(3 * BLOCK, &[4; BLOCK as usize]).unwrap();
    });
    // A record without a checkpoint.
    let file = chain.files.last().expect("just added").clone();
    let options = OpenOptions::default();
    let below = chain.open_first(3, &options).unwrap();
    let below = OneBacking(Some(below));
    let disk = Disk::open(file.clone(), &options, &below).unwrap();
    disk.write_at(4 * BLOCK, &[5; BLOCK as usize]).unwrap();
    disk.flush().unwrap();
    drop(disk);
    let nothing_cached = OpenOptions {
        cache: BlockCache::new(0),
        ..OpenOptions::default()
    };
    let disk = chain.disk_over(&nothing_cached);
    let at = table_of(&file, 0);
    file.write_at(at + 20, &[0xff]).unwrap();
    for _ in 0..2 {
        assert_reads(&disk, &(4 * BLOCK, 5));
        for block in [0, 3, 5] {
            let read = disk.read_at(block * BLOCK, &mut [0; BLOCK as usize]);
            assert_eq!(read.unwrap_err().code(), Some("table-crc"), "{block}");
        }
        assert_reads(&disk, &(REGION, 1));
    }
    file.write_at(at + 20, &[0]).unwrap();
    for (block, byte) in [(0, 1), (3, 4), (4, 5)] {
        assert_reads(&disk, &(block * BLOCK, byte));
    }
}

#[test]
fn a_damaged_block_is_named_with_all_files_that_lead_to_it() {
    let chain = three_files();
    let image = chain.open(&OpenOptions::default()).unwrap();
    let lowest = Image::open_storage(chain.files[0].clone(), &OpenOptions::default()).unwrap();
    let Mapping::Raw { stored } = lowest.map(0).unwrap().mapping else {
        panic!("a raw block");
    };
    assert_eq!(lowest.header().state, State::Writable);
    chain.files[0].write_at(stored.at.0 + 7, &[9]).unwrap();
    let error = image.read_at(0, &mut [0; BLOCK as usize]).unwrap_err();
    assert_eq!(error.code(), Some("block-crc"));
    let Error::InBacking { name, source } = &error else {
        panic!("{error}");
    };
    assert_eq!(name, "file-1");
    let Error::InBacking { name, source } = &**source else {
        panic!("{error}");
    };
    assert_eq!(name, "file-0");
    assert!(
        matches!(**source, Error::BadBlock { logical: 0, stored: at, .. } if at == stored.at.0),
        "{error}"
    );
    assert_reads(&*image, &(BLOCK, 2));
}
