//! A first write that fails, for lack of space or because the host fails: the file still has the
//! image's content, also after a retry.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bcow_testkit::Random;
use bcow_union::testing::account::Account;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::host::HostFile;
use bcow_union::testing::partial::host::MarkedFile;
use bcow_union::testing::partial::{
    Durability, Lower, Partial, PartialError, PartialMark, Partials,
};
use bcow_union::testing::upper::{Metacopy, Namespace};
use rustix::io::Errno;

use crate::script::{partials, reopened, shown, write_all};
use crate::support::{Place, TestLower, on_host, quiet};
use crate::world::{Fault, World};

const B: u64 = BLOCK_BYTES;

fn create(
    partials: &Partials,
    world: &World,
    lower: &Arc<TestLower>,
) -> Result<Arc<Partial>, PartialError> {
    partials.create_on(world.host(), lower.clone())
}

/// A kill now, and a power cut at any moment, leave the content of the lower file.
fn assert_lower(world: &World, lower: &Arc<TestLower>, context: &str) {
    let mut random = Random::new(world.now() as u64);
    let mut left = vec![world.killed()];
    for _ in 0..10 {
        let moment = random.below(world.now() as u64 + 1) as usize;
        left.push(world.cut(moment, &mut random));
    }
    for world in left {
        let (_, bytes) = reopened(&world, lower).unwrap();
        assert!(bytes == lower.bytes, "{context}");
    }
}

fn assert_copy(world: &World, context: &str) {
    let marks = (world.mark(), world.metacopy());
    assert_eq!(marks, (None, Metacopy::Whole), "{context}");
}

/// The file can be written, and its other bytes are those of the lower file.
fn assert_writable(partials: &Partials, world: &World, lower: &Arc<TestLower>) {
    let partial = create(partials, world, lower).unwrap();
    write_all(&partial, B + 7, b"written").unwrap();
    partial.flush(Durability::Durable).unwrap();
    let mut expected = lower.bytes.clone();
    expected[B as usize + 7..][..7].copy_from_slice(b"written");
    assert!(shown(&partial).unwrap() == expected);
    assert!(reopened(&world.killed(), lower).unwrap().1 == expected);
}

#[test]
fn a_host_that_fails_leaves_a_metadata_copy() {
    let lower = Arc::new(TestLower::full(30 * B + 5));
    let mut failed = 0;
    for (errno, stays) in [(Errno::NOSPC, true), (Errno::IO, false)] {
        for after in 0.. {
            let world = World::new(lower.size());
            let partials = partials(&world, quiet());
            world.plan(Some(Fault {
                after,
                stays,
                errno: errno.raw_os_error(),
            }));
            let created = create(&partials, &world, &lower);
            let hits = world.calls().1;
            world.plan(None);
            let context = format!("{errno} after {after}");
            match created {
                Err(error) => assert_eq!(error.errno(), errno, "{context}"),
                Ok(_) if hits == 0 => break,
                // A failure to set the modification time is not reported.
                Ok(_) => continue,
            }
            failed += 1;
            assert_copy(&world, &context);
            assert_eq!(world.content(), vec![0; lower.bytes.len()], "{context}");
            assert_lower(&world, &lower, &context);
            assert_writable(&partials, &world, &lower);
        }
    }
    assert!(failed > 3, "{failed}");
}

/// A file of which some marks can be neither set nor taken back.
struct Unmarkable(Arc<dyn MarkedFile>);

impl MarkedFile for Unmarkable {
    fn content(&self) -> &dyn HostFile {
        self.0.content()
    }
    fn set_mark(&self, mark: &PartialMark) -> io::Result<()> {
        self.0.set_mark(mark)
    }
    fn set_reject_marks(&self) -> io::Result<()> {
        Err(Errno::IO.into())
    }
    fn restore_marks(&self) -> io::Result<()> {
        Err(Errno::IO.into())
    }
    fn remove_marks(&self) -> io::Result<()> {
        self.0.remove_marks()
    }
}

/// The marks stay in this case, and say that no block is stored.
#[test]
fn a_host_that_also_fails_when_marks_are_taken_back_does_no_harm() {
    let lower = Arc::new(TestLower::full(30 * B + 5));
    let world = World::new(lower.size());
    let partials = partials(&world, quiet());
    let host = Arc::new(Unmarkable(world.host()));
    let error = partials.create_on(host, lower.clone()).unwrap_err();
    assert_eq!(error.errno(), Errno::IO);
    assert!(!world.mark().unwrap().map_exists);
    assert_lower(&world, &lower, "with a mark");
    assert_writable(&partials, &world, &lower);
}

#[test]
fn a_partial_whose_first_flush_failed_anywhere_is_not_taken_for_recorded() {
    let lower = Arc::new(TestLower::full(30 * B + 5));
    let mut failed = 0;
    for after in 0.. {
        let world = World::new(lower.size());
        let partials = partials(&world, quiet());
        let partial = create(&partials, &world, &lower).unwrap();
        write_all(&partial, B, &[7; B as usize]).unwrap();
        world.plan(Some(Fault {
            after,
            stays: true,
            errno: Errno::IO.raw_os_error(),
        }));
        let flushed = partial.flush(Durability::Durable);
        world.plan(None);
        if flushed.is_ok() {
            assert!(partial.is_recorded(), "after {after}");
            break;
        }
        failed += 1;
        assert!(!partial.is_recorded(), "after {after}");
    }
    assert!(failed > 3, "{failed}");
}

/// A program that only reads must not get ENOSPC.
#[test]
fn a_partial_that_was_never_flushed_is_read_without_room() {
    let lower = Arc::new(TestLower::full(30 * B + 5));
    let world = World::new(lower.size());
    let partial = create(&partials(&world, quiet()), &world, &lower).unwrap();
    write_all(&partial, 5, b"lost").unwrap();
    let world = world.killed();
    let account = Arc::new(Account::new(Some(B)));
    let store = Arc::new(world.clone());
    let partials = Partials::on(store, Namespace::Trusted, Arc::clone(&account), quiet());
    let host = world.host();
    let stored = || host.content().stored_bytes();
    account
        .measure(host.content().inode().unwrap(), stored)
        .unwrap();
    let mark = world.mark().unwrap();
    assert!(!mark.map_exists);
    let partial = partials
        .open_on(&mark, world.host(), lower.clone())
        .unwrap();
    assert!(shown(&partial).unwrap() == lower.bytes);
    // A block, and the one of the map that the next flush creates.
    assert_eq!(account.used(), 2 * B);
    let error = partial.write_at(5 * B, b"x").unwrap_err();
    assert_eq!(error.errno(), Errno::NOSPC);
}

#[test]
fn open_of_an_unflushed_partial_keeps_its_time() {
    let place = Place::new();
    let lower = Arc::new(TestLower::full(30 * B + 5));
    let partials = on_host(&place, quiet());
    let file = place.file(lower.size());
    drop(partials.create(file, lower.clone()).unwrap());
    let host = place.host();
    let then = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000);
    host.set_modified(then).unwrap();
    let mark = place.mark().unwrap();
    let partial = partials.open(mark, place.host(), lower.clone()).unwrap();
    assert!(shown(&partial).unwrap() == lower.bytes);
    assert_eq!(host.metadata().unwrap().modified().unwrap(), then);
}

#[test]
fn a_metadata_copy_may_have_any_size_on_the_host() {
    let lower = Arc::new(TestLower::full(30 * B + 5));
    for size in [0, B, 100 * B] {
        let world = World::new(size);
        let partials = partials(&world, quiet());
        let partial = create(&partials, &world, &lower).unwrap();
        assert!(shown(&partial).unwrap() == lower.bytes, "{size}");
        drop(partial);
        assert_lower(&world, &lower, &format!("{size}"));
        assert_writable(&partials, &world, &lower);
    }
}
