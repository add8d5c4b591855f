//! Random changes with both kinds of partial files: later reports on the upper agree with what the
//! union showed.

use bcow_erofs::reader::FileType;
use bcow_erofs::tree::Timestamp;
use bcow_testkit::Random;
use bcow_union::fs::{Allocate, Attributes, Changes, New, RenameMode, SetTime};
use bcow_union::{NodeId, UnionOptions};

use crate::fixture::{ROOT, Union, closed_on};
use crate::image::{self, noise};
use crate::tree::{assert_same, tree_of};

/// A directory entry with its attributes.
pub type Found = (NodeId, Vec<u8>, Attributes);

/// All directories and all entries.
pub fn all(union: &Union) -> (Vec<NodeId>, Vec<Found>) {
    let (mut directories, mut files) = (Vec::new(), Vec::new());
    let mut todo = vec![NodeId::ROOT];
    while let Some(id) = todo.pop() {
        directories.push(id);
        for name in union.names_of(id) {
            let name = name.into_bytes();
            let child = union.lookup(id, &name).unwrap();
            if child.kind == FileType::Directory {
                todo.push(child.node);
            }
            files.push((id, name, child));
        }
    }
    (directories, files)
}

/// Makes one random change. The union may refuse it.
pub fn change(union: &Union, random: &mut Random) {
    let fs = union.fs();
    let (directories, files) = all(union);
    let new = format!("new{}", random.below(30)).into_bytes();
    let into = *random.pick(&directories);
    if files.is_empty() {
        let _ = fs.make(&ROOT, into, &new, 0o644, &New::File);
        return;
    }
    let (parent, name, found) = random.pick(&files).clone();
    let size = found.size;
    match random.below(14) {
        0 => {
            if let Ok(made) = fs.make(&ROOT, into, &new, 0o640, &New::File) {
                let data = noise(random.next_u64(), random.below(20_000) as usize);
                let at = random.below(3) * 5000;
                let _ = union.write_to(made.node, at, &data);
            }
        }
        1 => drop(fs.make(&ROOT, into, &new, 0o750, &New::Directory)),
        2 => drop(fs.unlink(parent, &name)),
        3 => drop(fs.remove_directory(parent, &name)),
        4 | 5 => {
            let how = *random.pick(&[
                RenameMode::Replace,
                RenameMode::NoReplace,
                RenameMode::Exchange,
            ]);
            let (to, to_name) = if random.one_in(2) {
                (into, new)
            } else {
                let (to, name, _) = random.pick(&files).clone();
                (to, name)
            };
            let _ = fs.rename(parent, &name, to, &to_name, how);
        }
        6 => drop(fs.link(found.node, into, &new)),
        7 => {
            let set = Changes {
                permissions: Some(random.below(0o1000) as u16),
                uid: Some(random.below(3) as u32),
                mtime: Some(SetTime::At(Timestamp {
                    seconds: random.below(1 << 31) as i64,
                    nanoseconds: random.below(1_000_000_000) as u32,
                })),
                ..Changes::default()
            };
            let _ = fs.set_attributes(found.node, &set);
        }
        8 if found.kind == FileType::Regular => {
            let set = Changes {
                size: Some(random.below(size * 2 + 5000)),
                ..Changes::default()
            };
            let _ = fs.set_attributes(found.node, &set);
        }
        9 if found.kind == FileType::Regular => {
            let how = *random.pick(&[Allocate::PunchHole, Allocate::ZeroExtend, Allocate::Extend]);
            let (at, length) = (random.below(size + 1), 1 + random.below(9000));
            let _ = fs.allocate(found.node, at, length, how);
        }
        10 => drop(fs.make(&ROOT, into, &new, 0o777, &New::Symlink(b"some/where"))),
        _ if found.kind == FileType::Regular => {
            for _ in 0..=random.below(4) {
                let data = noise(random.next_u64(), 1 + random.below(9000) as usize);
                let at = random.below(size + 9000);
                let _ = union.write_to(found.node, at, &data);
            }
        }
        _ => {}
    }
}

/// `BCOW_ROUNDS` sets the number of rounds.
#[test]
fn upper_reads_as_the_union_did() {
    let count = std::env::var("BCOW_ROUNDS").map_or(12, |count| count.parse().unwrap());
    for seed in 0..count {
        let Some(mut union) = closed_on(image::many, UnionOptions::default()) else {
            return;
        };
        let before = tree_of(&union.image().filesystem());
        let mut random = Random::new(seed);
        for _ in 0..3 {
            union.open();
            for _ in 0..1 + random.below(40) {
                change(&union, &mut random);
            }
            let shown = union.tree();
            union.close();
            let found = union.put_together();
            assert_same(&shown, &found, &format!("seed {seed}"));
            union.assert_sound();
            union.assert_touched(&before, &found);
        }
    }
}
