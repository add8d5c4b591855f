//! Single properties of partial files.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bcow_testkit::changed;
use bcow_union::Seek;
use bcow_union::testing::account::Account;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::host::HostFile;
use bcow_union::testing::partial::{
    Durability, KeepSize, Lower, Partial, PartialOptions, Partials,
};
use bcow_union::testing::upper::Namespace;
use rustix::io::Errno;

use crate::script::{partials, reopened, shown, write_all};
use crate::support::{Place, TestLower, on_host, quiet};
use crate::world::World;

const B: u64 = BLOCK_BYTES;

fn create(partials: &Partials, world: &World, lower: &Arc<TestLower>) -> Arc<Partial> {
    partials.create_on(world.host(), lower.clone()).unwrap()
}

/// A partial file of `blocks` blocks without holes.
fn setup(blocks: u64, options: PartialOptions) -> (Arc<Partial>, World, Arc<TestLower>, Partials) {
    let lower = Arc::new(TestLower::full(blocks * B));
    let world = World::new(lower.size());
    let partials = partials(&world, options);
    let partial = create(&partials, &world, &lower);
    (partial, world, lower, partials)
}

/// The first byte of a block of the lower file.
fn below(lower: &TestLower, block: u64) -> u8 {
    lower.bytes[(block * B) as usize]
}

fn reads(lower: &TestLower) -> usize {
    lower.reads.lock().unwrap().len()
}

#[test]
fn a_write_copies_nothing_until_the_rest_is_needed() {
    let (partial, _world, lower, partials) = setup(100, quiet());
    for block in 0..50 {
        write_all(&partial, block * B + 10, &[1; 400]).unwrap();
    }
    assert_eq!(
        (reads(&lower), partial.status().unwrap().incomplete),
        (0, 50)
    );
    let mut byte = [0];
    partial.read_at(20 * B, &mut byte).unwrap();
    assert_eq!((byte[0], reads(&lower)), (below(&lower, 20), 1));
    partial.flush(Durability::Durable).unwrap();
    assert_eq!(reads(&lower), 50);
    let statistics = partials.statistics();
    assert_eq!(statistics.fills.readers, 1);
    assert_eq!(statistics.fills.flushes, 49);
    assert_eq!(statistics.present_blocks, 50);
    assert_eq!(statistics.saved_bytes, 50 * B);
}

#[test]
fn whole_blocks_copy_nothing_at_all() {
    let (partial, _world, lower, _partials) = setup(100, quiet());
    write_all(&partial, 0, &vec![1; 40 * B as usize]).unwrap();
    // Two halves of one block, and four quarters of another one out of order.
    write_all(&partial, 50 * B, &[2; 2048]).unwrap();
    write_all(&partial, 50 * B + 2048, &[2; 2048]).unwrap();
    for quarter in [2, 0, 3, 1] {
        write_all(&partial, 60 * B + quarter * 1024, &[3; 1024]).unwrap();
    }
    partial.zero(70 * B, 10 * B, KeepSize::Keep).unwrap();
    partial.flush(Durability::Durable).unwrap();
    assert_eq!(reads(&lower), 0);
    let status = partial.status().unwrap();
    assert_eq!((status.present, status.incomplete), (52, 0));
}

#[test]
fn the_last_block_is_whole_when_it_was_written_to_the_end_of_the_file() {
    let lower = Arc::new(TestLower::full(10 * B + 100));
    let world = World::new(lower.size());
    let partials = partials(&world, quiet());
    let partial = create(&partials, &world, &lower);
    write_all(&partial, 10 * B, &[1; 100]).unwrap();
    assert_eq!(partial.status().unwrap().present, 1);
    write_all(&partial, 10 * B + 100, &[2; 50]).unwrap();
    assert_eq!(reads(&lower), 0);
    let end = &shown(&partial).unwrap()[10 * B as usize..];
    assert_eq!(end, [[1; 50], [1; 50], [2; 50]].concat());
}

#[test]
fn background_completes_incomplete_blocks() {
    let options = PartialOptions {
        fillers: 1,
        fill_delay: Duration::from_millis(1),
        ..quiet()
    };
    let (partial, _world, _lower, partials) = setup(100, options);
    for block in 0..100 {
        write_all(&partial, block * B + 10, &[1; 400]).unwrap();
    }
    let start = Instant::now();
    while partial.status().unwrap().incomplete > 0 {
        assert!(start.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(1));
    }
    let statistics = partials.statistics();
    assert_eq!(statistics.fills.background, 100);
    assert_eq!(statistics.incomplete_blocks, 0);
    assert!(partial.is_complete());
}

#[test]
fn writer_completes_blocks_above_the_incomplete_limit() {
    let options = changed(quiet(), |new| new.most_incomplete = 8);
    let (partial, _world, _lower, partials) = setup(100, options);
    for block in 0..100 {
        write_all(&partial, block * B + 10, &[1; 400]).unwrap();
        assert!(partial.status().unwrap().incomplete <= 8);
    }
    assert_eq!(partials.statistics().fills.writers, 92);
}

#[test]
fn unreadable_lower_file_fails_only_operations_that_need_it() {
    let (partial, world, lower, _partials) = setup(10, quiet());
    write_all(&partial, 10, &[1; 400]).unwrap();
    write_all(&partial, 5 * B, &[2; B as usize]).unwrap();
    lower.broken.store(true, Ordering::Relaxed);
    let mut written = [0; 400];
    partial.read_at(10, &mut written).unwrap();
    assert_eq!(written, [1; 400]);
    let mut more = [0; 500];
    assert_eq!(
        partial.read_at(0, &mut more).unwrap_err().errno(),
        Errno::IO
    );
    assert_eq!(
        partial.flush(Durability::Durable).unwrap_err().errno(),
        Errno::IO
    );
    // The other block was flushed nevertheless.
    lower.broken.store(false, Ordering::Relaxed);
    let (_, bytes) = reopened(&world.killed(), &lower).unwrap();
    assert_eq!(bytes[5 * B as usize], 2);
    lower.broken.store(true, Ordering::Relaxed);
    write_all(&partial, 0, &[3; B as usize]).unwrap();
    partial.flush(Durability::Durable).unwrap();
}

#[test]
fn a_sync_of_blocks_that_are_mapped_is_one_barrier() {
    let (partial, world, _lower, _partials) = setup(100, quiet());
    write_all(&partial, 0, &[1; B as usize]).unwrap();
    let mut before = world.syncs();
    let mut barriers = || {
        partial.flush(Durability::Durable).unwrap();
        let now = world.syncs();
        std::mem::replace(&mut before, now).abs_diff(now)
    };
    // Syncs of the content, of the map with its name, and of the mark that refers to it.
    assert_eq!(barriers(), 3);
    write_all(&partial, 100, &[2; 10]).unwrap();
    assert_eq!(barriers(), 1);
    write_all(&partial, B, &[1; B as usize]).unwrap();
    assert_eq!(barriers(), 2);
    assert_eq!(barriers(), 1);
}

#[test]
fn a_map_is_written_anew_when_it_has_grown() {
    let (partial, world, lower, partials) = setup(4000, quiet());
    for block in (0..4000).step_by(2) {
        write_all(&partial, block * B, &[1; B as usize]).unwrap();
        if block % 10 == 0 {
            partial.flush(Durability::Durable).unwrap();
        }
    }
    partial.flush(Durability::Durable).unwrap();
    assert!(partials.statistics().maps_written > 1);
    assert!(world.map_bytes().unwrap() < 300 * 512);
    let expected = shown(&partial).unwrap();
    assert!(reopened(&world.killed(), &lower).unwrap().1 == expected);
}

#[test]
fn a_complete_partial_becomes_a_plain_file_and_goes_on() {
    let (partial, world, lower, partials) = setup(10, quiet());
    write_all(&partial, 100, &[1; 10]).unwrap();
    partial.flush(Durability::Durable).unwrap();
    assert!(!partial.promote().unwrap());
    write_all(&partial, 0, &vec![2; 10 * B as usize]).unwrap();
    assert!(partial.promote().unwrap());
    assert_eq!((world.mark(), world.map_bytes()), (None, None));
    write_all(&partial, 5, &[3; 5]).unwrap();
    partial.set_size(20 * B).unwrap();
    partial.flush(Durability::Durable).unwrap();
    let expected = shown(&partial).unwrap();
    assert_eq!(expected[..11], [2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 2]);
    assert!(reopened(&world.killed(), &lower).unwrap().1 == expected);
    assert_eq!(partials.statistics().promoted, 1);
    assert!(partial.promote().unwrap());
}

#[test]
fn a_file_that_is_cut_to_nothing_is_complete() {
    let (partial, world, _lower, _partials) = setup(10, quiet());
    partial.set_size(0).unwrap();
    assert!(partial.is_complete() && partial.promote().unwrap());
    partial.set_size(100).unwrap();
    assert_eq!(world.content(), [0; 100]);
}

#[test]
fn truncated_bytes_do_not_come_back() {
    for to in [0, 1, B - 1, B, 3 * B + 5] {
        let lower = Arc::new(TestLower::full(10 * B));
        let world = World::new(lower.size());
        let partials = partials(&world, quiet());
        let partial = create(&partials, &world, &lower);
        write_all(&partial, 3 * B + 1, &[1; 100]).unwrap();
        partial.set_size(to).unwrap();
        partial.set_size(10 * B).unwrap();
        let rest = &shown(&partial).unwrap()[to as usize..];
        assert!(rest.iter().all(|byte| *byte == 0), "{to}");
        partial.flush(Durability::Durable).unwrap();
        let bytes = reopened(&world.killed(), &lower).unwrap().1;
        assert!(bytes[to as usize..] == *rest, "{to}");
    }
}

#[test]
fn data_and_holes_are_found_in_both_files() {
    let mut lower = TestLower::full(10 * B);
    lower.bytes[4 * B as usize..6 * B as usize].fill(0);
    let lower = Arc::new(lower);
    let world = World::new(lower.size());
    let partials = partials(&world, quiet());
    let partial = create(&partials, &world, &lower);
    partial.zero(B, B, KeepSize::Keep).unwrap();
    write_all(&partial, 5 * B, &[1; 10]).unwrap();
    partial.set_size(20 * B).unwrap();
    write_all(&partial, 18 * B, &[1; B as usize]).unwrap();
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(data) = partial.seek(at, Seek::Data).unwrap() {
        at = partial.seek(data, Seek::Hole).unwrap().unwrap();
        found.push((data / B, at / B));
    }
    assert_eq!(found, [(0, 1), (2, 4), (5, 10), (18, 19)]);
    assert_eq!(partial.seek(20 * B, Seek::Hole).unwrap(), None);
    assert_eq!(partial.seek(19 * B, Seek::Data).unwrap(), None);
    assert_eq!(partial.seek(18 * B, Seek::Hole).unwrap(), Some(19 * B));
}

fn limited(blocks: u64) -> (Place, Partials, Arc<Account>) {
    let place = Place::new();
    let account = Arc::new(Account::new(Some(blocks * B)));
    let partials = place.partials(Arc::clone(&account), quiet());
    (place, partials, account)
}

/// The bytes that the host's file, the map and the directory of the maps take.
fn stored(place: &Place, map: u64) -> u64 {
    place.host().stored_bytes().unwrap() + map
}

#[test]
fn the_limit_is_exact_and_space_comes_back() {
    let (place, partials, account) = limited(30);
    let lower = Arc::new(TestLower::full(1000 * B));
    let file = place.file(lower.size());
    let partial = partials.create(file, lower.clone()).unwrap();
    // Each touched block counts as one block, however few bytes were written.
    write_all(&partial, 7, &[1; 3]).unwrap();
    let first = account.used();
    assert_eq!(first, stored(&place, B));
    for block in 1..4 {
        write_all(&partial, block * 100 * B + 7, &[1; 3]).unwrap();
    }
    assert_eq!(account.used(), first + 3 * B);
    // A write that does not fit is cut at the end of a block.
    let left = account.left().unwrap();
    let data = vec![2; left as usize + 1];
    assert_eq!(
        partial.write_at(500 * B + 100, &data).unwrap() as u64,
        left - 100
    );
    assert_eq!(account.left(), Some(0));
    let error = partial.write_at(600 * B, &[2]).unwrap_err();
    assert_eq!(error.errno(), Errno::NOSPC);
    let mut byte = [0];
    partial.read_at(600 * B, &mut byte).unwrap();
    assert_eq!(byte[0], below(&lower, 600));
    // Stored blocks can be written again, read and flushed.
    write_all(&partial, 500 * B, &vec![3; left as usize]).unwrap();
    partial.flush(Durability::Durable).unwrap();
    assert_eq!(account.left(), Some(0));
    // The map, and its directory.
    assert_eq!(account.used(), stored(&place, 2 * B));
    partial.zero(500 * B, 10 * B, KeepSize::Keep).unwrap();
    assert_eq!(account.used(), stored(&place, 2 * B));
    write_all(&partial, 600 * B, &[2; 2]).unwrap();
    partial.set_size(300 * B).unwrap();
    assert_eq!(account.used(), stored(&place, 2 * B));
    // Removing the name releases all space once no program has the file open.
    partials.remove(&place.mark().unwrap()).unwrap();
    write_all(&partial, 10 * B, &[1; 2]).unwrap();
    assert_eq!(account.used(), stored(&place, B));
    drop(partial);
    // The directory of the maps stays.
    assert_eq!(account.used(), B);
}

#[test]
fn allocated_space_counts_once_until_truncation() {
    let (place, partials, account) = limited(100);
    let lower = Arc::new(TestLower::full(10 * B));
    let file = place.file(lower.size());
    let partial = partials.create(file, lower.clone()).unwrap();
    partial.allocate(0, 50 * B, KeepSize::Keep).unwrap();
    let used = account.used();
    assert_eq!(used, stored(&place, B));
    write_all(&partial, 3 * B, &[1; 100]).unwrap();
    assert_eq!(account.used(), used);
    partial.flush(Durability::Durable).unwrap();
    drop(partial);
    assert_eq!(account.used(), stored(&place, 2 * B));
    let mark = place.mark().unwrap();
    let partial = partials.open(mark, place.host(), lower.clone()).unwrap();
    partial.allocate(0, 50 * B, KeepSize::Keep).unwrap();
    write_all(&partial, 0, &[1; 10 * B as usize]).unwrap();
    assert!(partial.promote().unwrap());
    assert_eq!(account.used(), stored(&place, B));
    partial.set_size(0).unwrap();
    assert_eq!(account.used(), stored(&place, B));
    assert!(account.used() <= 2 * B);
}

#[test]
fn a_partial_at_the_limit_keeps_each_write_that_it_accepted() {
    const LIMIT: u64 = 75;
    let (place, partials, account) = limited(LIMIT);
    let lower = Arc::new(TestLower::full(3100 * B));
    let file = place.file(lower.size());
    let partial = partials.create(file, lower.clone()).unwrap();
    let mut written = 0;
    let used = loop {
        let used = account.used();
        match partial.write_at(written * 40 * B, b"XX") {
            Ok(_) => written += 1,
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC);
                break used;
            }
        }
    };
    assert_eq!(account.used(), used);
    assert!((70..LIMIT).contains(&written), "{written}");
    // Writes to blocks that are already there need no more space.
    for _ in 0..1000 {
        partial.write_at(0, b"XX").unwrap();
    }
    partial.flush(Durability::Durable).unwrap();
    partial.confirm().unwrap();
    drop(partial);
    let mark = place.mark().unwrap();
    let partial = partials.open(mark, place.host(), lower.clone()).unwrap();
    let bytes = shown(&partial).unwrap();
    for index in 0..written {
        assert_eq!(&bytes[(index * 40 * B) as usize..][..2], b"XX", "{index}");
    }
}

#[test]
fn a_flush_is_no_change_of_the_file() {
    let place = Place::new();
    let lower = Arc::new(TestLower::full(100 * B));
    let partials = on_host(&place, quiet());
    let file = place.file(lower.size());
    let host = place.host();
    let partial = partials.create(file, lower.clone()).unwrap();
    write_all(&partial, 5, b"some bytes").unwrap();
    partial.settle().unwrap();
    let then = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000);
    host.set_modified(then).unwrap();
    partial.flush(Durability::Durable).unwrap();
    let now = host.metadata().unwrap().modified().unwrap();
    assert_eq!(now, then);
}

#[test]
fn one_file_is_one_partial_however_often_it_is_opened() {
    let (partial, world, lower, partials) = setup(10, quiet());
    let mark = world.mark().unwrap();
    let again = partials
        .open_on(&mark, world.host(), lower.clone())
        .unwrap();
    assert!(Arc::ptr_eq(&partial, &again));
    assert_eq!(partials.statistics().open, 1);
    drop((partial, again));
    assert_eq!(partials.statistics().open, 0);
}

#[test]
fn no_file_is_longer_than_there_can_be() {
    let lower = Arc::new(TestLower::full(B));
    let world = World::new(lower.size());
    let store = Arc::new(world.clone());
    let partials = Partials::on(store, Namespace::Trusted, Arc::default(), quiet());
    let partial = create(&partials, &world, &lower);
    for result in [
        partial.write_at(u64::MAX - 2, &[1; 5]).map(drop),
        partial.write_at(i64::MAX as u64, &[1; 5]).map(drop),
        partial.set_size(u64::MAX),
        partial.zero(u64::MAX - 2, 5, KeepSize::Grow),
    ] {
        assert_eq!(result.unwrap_err().errno(), Errno::FBIG);
    }
    assert_eq!(partial.read_at(u64::MAX - 2, &mut [0; 5]).unwrap(), 0);
    assert_eq!(partial.size(), B);
}

#[test]
fn flushes_that_go_on_in_order_map_blocks_ahead() {
    let options = changed(quiet(), |new| new.ahead_blocks = 256);
    let (partial, world, lower, partials) = setup(1000, options);
    let mut expected = lower.bytes.clone();
    let mut flushed_for_nothing = 0;
    for step in 0..200 {
        let offset = 10 * B + step * B + 5;
        write_all(&partial, offset, &[step as u8; 100]).unwrap();
        expected[offset as usize..][..100].fill(step as u8);
        let before = partial.status().unwrap().present;
        partial.flush(Durability::Durable).unwrap();
        flushed_for_nothing += u64::from(partial.status().unwrap().present == before);
    }
    assert!(flushed_for_nothing > 150, "{flushed_for_nothing}");
    let present = partial.status().unwrap().present;
    assert!((255..=280).contains(&present), "{present}");
    assert_eq!(shown(&partial).unwrap(), expected);
    drop((partial, partials));
    assert_eq!(reopened(&world, &lower).unwrap().1, expected);
}

#[test]
fn concurrent_flushes_map_all_written_blocks() {
    let options = changed(quiet(), |new| new.ahead_blocks = 256);
    let (partial, _world, _lower, _partials) = setup(1000, options);
    for step in 0..100 {
        write_all(&partial, (step * 37 % 1000) * B, &[1; 4096]).unwrap();
        partial.flush(Durability::Durable).unwrap();
    }
    assert_eq!(partial.status().unwrap().present, 100);
}
