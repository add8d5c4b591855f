//! Damaged maps and marks: they are refused, and the error names the file and the place.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use bcow_testkit::lacks;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::partial::{
    Damage, Durability, Lower, PartialError, PartialMark, Partials,
};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::io::Errno;

use crate::script::{partials, reopened, write_all};
use crate::support::{Place, TestLower, on_host, quiet};
use crate::world::World;

const B: u64 = BLOCK_BYTES;

/// A partial file that was flushed twice, then killed or closed.
fn flushed(killed: bool) -> (World, Arc<TestLower>) {
    let lower = Arc::new(TestLower::new(5, 1000 * B));
    let world = World::new(lower.size());
    let partials = partials(&world, quiet());
    let partial = partials.create_on(world.host(), lower.clone()).unwrap();
    for flush in 0..2 {
        for block in (flush..900).step_by(3) {
            write_all(&partial, block * B, &[1; B as usize]).unwrap();
        }
        partial.flush(Durability::Durable).unwrap();
    }
    if killed {
        return (world.killed(), lower);
    }
    drop(partial);
    (world, lower)
}

#[test]
fn a_changed_byte_anywhere_in_a_map_is_found_and_named() {
    for killed in [false, true] {
        let (world, lower) = flushed(killed);
        let length = world.map_bytes().unwrap();
        assert!(length >= 3 * 512, "{length}");
        let (_, before) = reopened(&world, &lower).unwrap();
        for at in (0..length).step_by(11) {
            assert!(world.spoil_map(at, 4));
            let Err(PartialError::Damaged { file, offset, .. }) = reopened(&world, &lower) else {
                panic!("byte {at}");
            };
            assert_eq!(offset, (at / 512 * 512) as u64);
            assert!(file.starts_with("maps"));
            assert!(world.spoil_map(at, 4));
        }
        assert!(reopened(&world, &lower).unwrap().1 == before);
    }
}

#[test]
fn a_record_that_goes_missing_after_the_partial_was_closed_is_missed() {
    for (killed, is_missed) in [(false, true), (true, false)] {
        let (world, lower) = flushed(killed);
        let length = world.map_bytes().unwrap();
        world.cut_map(length - 512);
        match reopened(&world, &lower) {
            Err(PartialError::Damaged { damage, offset, .. }) if is_missed => {
                let expected = (length / 512 - 1) as u64;
                assert_eq!(damage, Damage::Cut { expected });
                assert_eq!(offset, (length - 512) as u64);
            }
            // After a crash, the record counts as never written.
            Ok(_) if !is_missed => {}
            other => panic!("{:?}", other.map(|(partial, _)| partial)),
        }
    }
}

#[test]
fn a_map_that_is_gone_is_named() {
    let (world, lower) = flushed(false);
    world.cut_map(0);
    let error = reopened(&world, &lower).unwrap_err();
    assert!(error.to_string().contains("not a map"), "{error}");
    world.remove_map();
    let error = reopened(&world, &lower).unwrap_err();
    let PartialError::Damaged { damage, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(*damage, Damage::Missing);
    assert_eq!(error.errno(), rustix::io::Errno::IO);
}

fn open(partials: &Partials, world: &World, mark: PartialMark, lower: u64) -> PartialError {
    let lower = Arc::new(TestLower::new(1, lower));
    partials.open_on(&mark, world.host(), lower).unwrap_err()
}

#[test]
fn marks_that_make_no_sense_are_refused() {
    let (world, _) = flushed(false);
    let partials = partials(&world, quiet());
    let mark = world.mark().unwrap();
    let shift = PartialMark {
        block_shift: 16,
        ..mark
    };
    let error = open(&partials, &world, shift, 1000 * B).to_string();
    assert!(error.contains("block size"), "{error}");
    let error = open(&partials, &world, mark, 999 * B).to_string();
    assert!(error.contains("bytes of a lower file of"), "{error}");
    let error = open(&partials, &world, mark, 1001 * B).to_string();
    assert!(
        error.contains("file of 1000 blocks, not of 1001"),
        "{error}"
    );
}

#[test]
fn a_torn_append_is_dropped_and_written_over() {
    let (world, lower) = flushed(true);
    let length = world.map_bytes().unwrap();
    world.cut_map(length - 100);
    let (partial, _) = reopened(&world, &lower).unwrap();
    let partial = partial.unwrap();
    write_all(&partial, 999 * B, &[9; B as usize]).unwrap();
    partial.flush(Durability::Durable).unwrap();
    let expected = crate::script::shown(&partial).unwrap();
    assert!(reopened(&world.killed(), &lower).unwrap().1 == expected);
    assert_eq!(world.map_bytes().unwrap() % 512, 0);
}

#[test]
fn object_with_a_maps_name_that_is_not_a_file_is_damage_and_does_not_block() {
    let node = |kind, device| {
        move |at: &Path| mknodat(CWD, at, kind, Mode::RUSR | Mode::WUSR, device).unwrap()
    };
    type Make = Box<dyn Fn(&Path)>;
    let mut kinds: Vec<(&str, Make)> = vec![
        (
            "a link to nothing",
            Box::new(|at| std::os::unix::fs::symlink("nothing", at).unwrap()),
        ),
        (
            "a link to a file",
            Box::new(|at| std::os::unix::fs::symlink("../../file", at).unwrap()),
        ),
        (
            "a directory",
            Box::new(|at| std::fs::create_dir(at).unwrap()),
        ),
        ("a pipe", Box::new(node(FileType::Fifo, 0))),
        ("a socket", Box::new(node(FileType::Socket, 0))),
    ];
    if !lacks("root", rustix::process::geteuid().is_root()) {
        let null = node(FileType::CharacterDevice, makedev(1, 3));
        let block = node(FileType::BlockDevice, makedev(7, 200));
        kinds.push(("a character device", Box::new(null)));
        kinds.push(("a block device", Box::new(block)));
    }
    for (what, make) in kinds {
        let place = Arc::new(Place::new());
        let lower = Arc::new(TestLower::full(20 * B));
        let partials = on_host(&place, quiet());
        let partial = partials
            .create(place.file(lower.size()), lower.clone())
            .unwrap();
        write_all(&partial, 0, &[1; B as usize]).unwrap();
        partial.flush(Durability::Durable).unwrap();
        let map = place.map(partial.id());
        drop((partial, partials));
        std::fs::remove_file(&map).unwrap();
        make(&map);
        let (sender, receiver) = mpsc::channel();
        let (there, below) = (Arc::clone(&place), lower.clone());
        thread::spawn(move || {
            let partials = on_host(&there, quiet());
            let opened = partials.open(there.mark().unwrap(), there.host(), below);
            let _ = sender.send(opened.map(drop));
        });
        let opened = receiver.recv_timeout(Duration::from_secs(60));
        let error = opened.expect("it waits").unwrap_err();
        assert_eq!(error.errno(), Errno::IO, "{what}: {error}");
        assert!(
            error.to_string().contains(map.to_str().unwrap()),
            "{what}: {error}"
        );
        // The file can still be removed, together with the object at the map's path.
        let partials = on_host(&place, quiet());
        partials.remove(&place.mark().unwrap()).unwrap();
        assert!(map.symlink_metadata().is_err(), "{what}");
    }
}
