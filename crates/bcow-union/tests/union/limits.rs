//! Limits hold for every way to store data, and the account agrees with the host.

use bcow_erofs::reader::FileType;
use bcow_testkit::{Random, changed, lacks_reports_of_preallocated_space};
use bcow_union::fs::{Allocate, Changes, New, RenameMode, SetTime, SyncScope, UnionFs, XattrMode};
use bcow_union::{NodeId, UnionOptions};
use rustix::io::Errno;

use crate::fixture::{ROOT, Union, closed_on, open_with, open_with_blocks, with_limit};
use crate::host::{Stored, stored_in};
use crate::image;
use crate::random::{all, change};

const LIMIT: u64 = 1 << 20;
const INODES: u64 = 200;

/// Bytes that the host may store above the limit: the last change, and the extent records of files
/// that the host writes back.
const TOLERANCE: u64 = 64 << 10;

fn limits() -> UnionOptions {
    UnionOptions {
        inode_limit: Some(INODES),
        ..with_limit(LIMIT)
    }
}

fn limited() -> Option<Union> {
    open_with(limits())
}

/// On the image with many files.
fn crowded() -> Option<Union> {
    let mut union = closed_on(image::crowd, limits())?;
    union.open();
    Some(union)
}

/// Repeats `attempt` until there is no space, but at most `most` times. Returns the number of
/// successes.
fn until_full(most: u32, mut attempt: impl FnMut(u32) -> Result<(), Errno>) -> u32 {
    for index in 0..most {
        match attempt(index) {
            Ok(()) => {}
            Err(Errno::NOSPC) => return index,
            Err(errno) => panic!("attempt {index}: {errno}"),
        }
    }
    most
}

/// A way to store data: its name and its function.
type Operation = (&'static str, fn(&Union, u32) -> Result<(), Errno>);

const OPERATIONS: [Operation; 12] = [
    ("targets of symbolic links", |union, index| {
        let target = vec![b'x'; 4000];
        let name = format!("s{index}");
        let made = union.fs().make(
            &ROOT,
            NodeId::ROOT,
            name.as_bytes(),
            0o777,
            &New::Symlink(&target),
        );
        made.map(drop)
    }),
    ("symbolic links in the place of others", |union, index| {
        let fs = union.fs();
        let target = vec![b'x'; 3000];
        fs.make(&ROOT, NodeId::ROOT, b"next", 0o777, &New::Symlink(&target))?;
        let name = format!("r{}", index / 2);
        let how = RenameMode::Replace;
        fs.rename(NodeId::ROOT, b"next", NodeId::ROOT, name.as_bytes(), how)
    }),
    ("directories", |union, index| {
        let name = format!("d{index}");
        let made = union.make_directory(&name, 0o755);
        made.map(drop)
    }),
    ("empty files", |union, index| {
        union.create(&format!("e{index}"), 0o644).map(drop)
    }),
    ("attributes", |union, index| {
        let name = format!("a{}", index / 3);
        if union.get(&name).is_none() {
            union.create(&name, 0o644)?;
        }
        let (id, own) = (union.id(&name), format!("user.{}", index % 3));
        union
            .fs()
            .set_xattr(id, own.as_bytes(), &[7; 1000], XattrMode::Any)
    }),
    ("names", |union, index| {
        let id = match union.get("named") {
            Some(found) => found.node,
            None => union.create("named", 0o644)?.node,
        };
        let name = format!("{index:0255}");
        let linked = union.fs().link(id, NodeId::ROOT, name.as_bytes());
        linked.map(drop)
    }),
    ("copies of metadata", |union, index| {
        let Some(found) = union.get(&format!("f{index}")) else {
            return Ok(());
        };
        let changes = changed(Changes::default(), |new| new.mtime = Some(SetTime::Now));
        union.fs().set_attributes(found.node, &changes).map(drop)
    }),
    ("blocks of large files", |union, index| {
        let Some(found) = union.get(&format!("b{}", index % 40)) else {
            return Ok(());
        };
        let at = u64::from(index / 40) * 8192;
        union.write_to(found.node, at, b"x").map(drop)
    }),
    ("directories of the image that moved", |union, index| {
        let (from, to) = (format!("deep{index}"), format!("moved{index}"));
        match union.get(&from) {
            Some(_) => union.rename(&from, &to),
            None => Ok(()),
        }
    }),
    (
        "directories of the image in which something is removed",
        |union, index| {
            let path = format!("dir{index}/gone");
            match union.get(&path) {
                Some(_) => union.unlink(&path),
                None => Ok(()),
            }
        },
    ),
    ("space that is only reserved", |union, index| {
        let id = union.create(&format!("p{index}"), 0o644)?.node;
        union.fs().allocate(id, 0, 50_000, Allocate::KeepSize)
    }),
    ("bytes", |union, index| {
        let id = union.create(&format!("w{index}"), 0o644)?.node;
        let data = vec![7; 30_000];
        match union.write_to(id, 0, &data)? {
            30_000 => Ok(()),
            _ => Err(Errno::NOSPC),
        }
    }),
];

fn assert_within(union: &Union, empty: &Stored, way: &str) {
    let now = stored_in(&union.upper());
    assert!(now.bytes <= LIMIT + TOLERANCE, "{way}: {now:?}");
    assert!(now.inodes <= empty.inodes + INODES, "{way}: {now:?}");
}

#[test]
fn no_way_of_storing_something_gets_round_the_limits() {
    for (way, attempt) in OPERATIONS {
        let Some(mut union) = crowded() else { return };
        let empty = stored_in(&union.upper());
        let done = until_full(5000, |index| attempt(&union, index));
        let report = union.fs().report();
        // Some ways end because the image has no more files for them.
        assert!(
            report.stored_bytes.unwrap() > LIMIT * 3 / 4
                || report.stored_inodes.unwrap() > INODES * 3 / 4
                || done == 5000,
            "{way}: {done} times, {report:?}"
        );
        assert!(
            report.stored_bytes.unwrap() <= LIMIT + TOLERANCE,
            "{way}: {report:?}"
        );
        union.sync_all();
        assert_within(&union, &empty, way);
        let closed = union.take().close();
        assert!(
            matches!(closed, Ok(()) | Err(Errno::NOSPC)),
            "{way}: {closed:?}"
        );
        union.open();
        until_full(5000, |index| attempt(&union, index + 5000));
        union.sync_all();
        assert_within(&union, &empty, way);
    }
}

#[test]
fn all_ways_together_stay_within_the_limits() {
    let Some(mut union) = crowded() else { return };
    let empty = stored_in(&union.upper());
    for round in 0..4 {
        for (way, attempt) in OPERATIONS {
            until_full(300, |index| attempt(&union, round * 1000 + index));
            assert_within(&union, &empty, way);
        }
        // Free some space for the next ways.
        for name in union.names("").into_iter().step_by(2) {
            let found = union.get(&name).unwrap();
            let removed = union
                .unlink(&name)
                .or_else(|_| union.remove_directory(&name));
            union.fs().forget(found.node, 1000);
            if removed.is_err() {
                continue;
            }
        }
        union.reopen();
        assert_within(&union, &empty, "opened again");
    }
}

/// Asserts that the account agrees with the host, for an upper without removed files in use.
/// `expected` are maps that are counted and do not exist yet.
fn assert_counted(union: &Union, empty: &Stored, expected: u64, context: &str) {
    let report = union.fs().report();
    let host = stored_in(&union.upper());
    let host = (
        host.bytes + expected * 4096,
        host.inodes - empty.inodes + expected,
    );
    let counted = (report.stored_bytes.unwrap(), report.stored_inodes.unwrap());
    assert_eq!(counted, host, "{context}");
}

#[test]
fn removal_releases_all_space_of_an_object() {
    let Some(mut union) = limited() else { return };
    let empty = stored_in(&union.upper());
    let fs = union.fs();
    let figures = || {
        (
            fs.report().stored_bytes.unwrap(),
            fs.report().stored_inodes.unwrap(),
        )
    };
    let unused = figures();
    let is_exact = |context| assert_counted(&union, &empty, 0, context);
    is_exact("empty");
    let link = fs
        .make(
            &ROOT,
            NodeId::ROOT,
            b"l",
            0o777,
            &New::Symlink(&[b'x'; 4000]),
        )
        .unwrap();
    is_exact("a symbolic link");
    let directory = union.make_directory("d", 0o755).unwrap();
    is_exact("a directory");
    let before = figures();
    let file = union.create("d/f", 0o644).unwrap();
    union.set_xattr("d/f", "user.x", &[1; 2000]);
    is_exact("an attribute");
    // A removed file releases no space while it is in use.
    let with_file = figures();
    union.unlink("d/f").unwrap();
    assert_eq!(figures(), with_file);
    fs.set_xattr(file.node, b"user.y", &[1; 1500], XattrMode::Any)
        .unwrap();
    fs.forget(file.node, 1000);
    assert_eq!(figures(), before);
    union.remove_directory("d").unwrap();
    fs.forget(directory.node, 1000);
    is_exact("a removed directory");
    let other = fs
        .make(
            &ROOT,
            NodeId::ROOT,
            b"m",
            0o777,
            &New::Symlink(&[b'x'; 4000]),
        )
        .unwrap();
    union.rename("m", "l").unwrap();
    fs.forget(link.node, 1000);
    is_exact("a replaced link");
    union.unlink("l").unwrap();
    fs.forget(other.node, 1000);
    assert_eq!(figures(), unused);
    // A copy-up that then becomes a partial file, whose map is counted from the first write.
    union.write("big", 5000, b"x");
    assert_counted(&union, &empty, 1, "a partial file");
    union.sync("big");
    is_exact("its map");
    let big = union.id("big");
    union.unlink("big").unwrap();
    fs.forget(big, 1000);
    assert_eq!(figures(), unused);
    union.reopen();
    assert_counted(&union, &empty, 0, "opened again");
}

#[test]
fn a_change_without_room_changes_nothing() {
    for (blocks, inodes) in [(1000, 2), (3, 100)] {
        let Some(mut union) = open_with_blocks(blocks) else {
            return;
        };
        union.options.inode_limit = Some(inodes);
        union.reopen();
        until_full(10, |index| {
            union.make_directory(&format!("d{index}"), 0o755).map(drop)
        });
        let tree = union.tree();
        let before = union.fs().report();
        let small = union.id("small");
        let target = [b'x'; 4000];
        let set = |id| {
            let changes = changed(Changes::default(), |new| new.permissions = Some(0o600));
            union.fs().set_attributes(id, &changes).map(drop)
        };
        let results = [
            union.make_directory("more", 0o755).map(drop),
            union
                .fs()
                .make(&ROOT, NodeId::ROOT, b"more", 0o777, &New::Symlink(&target))
                .map(drop),
            set(small),
            union.write_to(union.id("big"), 0, b"x").map(drop),
            union.rename("small", "moved"),
            union.rename("dir", "moved"),
            union.fs().link(small, NodeId::ROOT, b"linked").map(drop),
            union.rename_how("small", "big", RenameMode::Exchange),
        ];
        assert_eq!(results, [Err(Errno::NOSPC); 8], "{blocks}, {inodes}");
        assert_eq!(union.tree(), tree);
        let after = union.fs().report();
        assert_eq!(after.stored_bytes, before.stored_bytes);
        assert_eq!(after.stored_inodes, before.stored_inodes);
        // A name that is only in the image can be removed without space.
        union.unlink("small").unwrap();
        union.reopen();
    }
}

#[test]
fn preallocated_space_is_writable_at_the_limit_after_a_remount() {
    if lacks_reports_of_preallocated_space() {
        return;
    }
    let Some(mut union) = limited() else { return };
    let empty = stored_in(&union.upper());
    let id = union.create("log", 0o644).unwrap().node;
    union.create("other", 0o644).unwrap();
    let fs = union.fs();
    let mut size = 0;
    until_full(1000, |_| {
        fs.allocate(id, size, 4096, Allocate::Extend)
            .map(|()| size += 4096)
    });
    union.reopen();
    let id = union.id("log");
    for at in (0..size).step_by(3 * 4096) {
        assert_eq!(union.write_to(id, at + 1, b"x"), Ok(1), "{at}");
    }
    assert_eq!(union.write_to(id, size, b"x"), Err(Errno::NOSPC));
    let again = union.fs().allocate(id, size, size, Allocate::Extend);
    assert_eq!(again, Err(Errno::NOSPC));
    let other = union.id("other");
    assert_eq!(union.write_to(other, 0, b"x"), Err(Errno::NOSPC));
    union.sync_all();
    assert_within(&union, &empty, "preallocated");
}

#[test]
fn statistics_show_the_limit_of_inodes() {
    let Some(union) = limited() else { return };
    let inodes = || {
        let figures = union.fs().statistics().unwrap();
        (figures.inodes, figures.inodes_free)
    };
    assert_eq!(inodes(), (INODES, INODES));
    union.create("new", 0o644).unwrap();
    assert_eq!(inodes(), (INODES, INODES - 1));
}

/// `BCOW_ROUNDS` sets the number of rounds.
#[test]
fn after_random_changes_the_account_agrees_with_the_host() {
    let rounds = std::env::var("BCOW_ROUNDS").map_or(12, |count| count.parse().unwrap());
    for seed in 0..rounds {
        // In every third round the limit is too small.
        let bytes = if seed % 3 == 0 { 200 << 10 } else { 1 << 30 };
        let options = UnionOptions {
            inode_limit: Some(if seed % 5 == 0 { 20 } else { 10_000 }),
            ..with_limit(bytes)
        };
        let Some(mut union) = closed_on(image::many, options) else {
            return;
        };
        union.open();
        let empty = stored_in(&union.upper());
        let mut random = Random::new(seed);
        for step in 0..3 {
            for _ in 0..1 + random.below(60) {
                change(&union, &mut random);
                attributes(&union, &mut random);
            }
            union.forget_all();
            for (_, _, found) in all(&union).1 {
                union.fs().sync(found.node, SyncScope::All).unwrap();
                if found.kind == FileType::Regular {
                    // Opens the partial file, whose map counts from then on.
                    union.read(found.node);
                }
            }
            let context = format!("seed {seed}, step {step}");
            let to_come = stored_in(&union.upper()).sparse - union.maps() as u64;
            assert_counted(&union, &empty, to_come, &context);
            let counted = union.fs().report().stored_bytes.unwrap();
            assert!(counted <= bytes + TOLERANCE, "{context}: {counted}");
            union.reopen();
            assert_counted(&union, &empty, 0, &format!("{context}, opened again"));
        }
    }
}

/// Changes random attributes of a random file.
fn attributes(union: &Union, random: &mut Random) {
    let names = union.names("");
    if names.is_empty() {
        return;
    }
    let name: &String = random.pick(&names);
    let id = union.id(name);
    let name = format!("trusted.{}", random.below(3));
    match random.below(4) {
        0 => drop(union.fs().remove_xattr(id, name.as_bytes())),
        1 => {
            let value = vec![1; random.below(1200) as usize];
            let _ = union
                .fs()
                .set_xattr(id, name.as_bytes(), &value, XattrMode::Any);
        }
        _ => {}
    }
}

#[test]
fn report_of_a_shortage_names_the_limit_or_the_host() {
    let Some(union) = limited() else { return };
    let root = NodeId::ROOT;
    let last_cause = |errno| {
        union.fs().request_failed(root, "create", errno);
        union.fs().errors().recent()[0].cause.clone()
    };
    let big = union.id("big");
    let write = |fs: &UnionFs| fs.allocate(big, 0, 2 * LIMIT, Allocate::Extend);
    assert_eq!(union.fs().with_room(write), Err(Errno::NOSPC));
    let cause = last_cause(Errno::NOSPC);
    let size = "the size limit of the upper is reached (1048576 bytes)";
    assert_eq!(cause, size);
    let full = until_full(10_000, |index| {
        let name = format!("f{index}");
        let create = |fs: &UnionFs| fs.make(&ROOT, root, name.as_bytes(), 0o644, &New::File);
        union.fs().with_room(create).map(drop)
    });
    assert!(full < 10_000);
    let inodes = "the inode limit of the upper is reached (200 inodes)";
    assert_eq!(last_cause(Errno::NOSPC), inodes);
    // The limit is not the cause of another failure.
    let cause = last_cause(Errno::NOSPC);
    let host = format!(
        "no space or no inode is left on the file system of {}",
        union.upper().display()
    );
    assert_eq!(cause, host);
}
