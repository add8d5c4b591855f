//! The differences of two trees, and the bytes that a comparison reads.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::convert::Infallible;

use crate::support::*;
use bcow_erofs::diff::{
    Change, Compare, ContentDifference, DiffOptions, DiffSummary, Differences, Side, Stopped, diff,
};
use bcow_erofs::reader::{ErofsError, Filesystem};
use bcow_erofs::tree::*;
use proptest::prelude::*;

/// One line per difference.
fn lines_with(
    a: &Filesystem,
    b: &Filesystem,
    options: &DiffOptions<'_>,
) -> Result<(Vec<String>, DiffSummary), Stopped<Infallible>> {
    let mut lines = Vec::new();
    let summary = diff(a, b, options, &mut |path, change| {
        let path = String::from_utf8_lossy(path).into_owned();
        lines.push(match change {
            Change::Added(_) => format!("A {path}"),
            Change::Removed(_) => format!("D {path}"),
            Change::Retyped(a, b) => format!("T {path} {:?} {:?}", a.kind, b.kind),
            Change::Changed(_, _, what) => format!("M {path} {}", words(what)),
        });
        Ok(())
    })?;
    Ok((lines, summary))
}

fn words(what: &Differences) -> String {
    let mut words = Vec::new();
    let flags = [
        (what.permissions, "mode"),
        (what.uid, "uid"),
        (what.gid, "gid"),
        (what.size, "size"),
        (what.mtime, "mtime"),
        (what.device, "device"),
        (what.target.is_some(), "target"),
        (what.links, "links"),
    ];
    words.extend(
        flags
            .iter()
            .filter(|(is, _)| *is)
            .map(|(_, w)| w.to_string()),
    );
    for (name, change) in &what.xattrs {
        words.push(format!("{}:{change:?}", String::from_utf8_lossy(name)));
    }
    match what.content {
        Some(ContentDifference::Length) => words.push("length".into()),
        Some(ContentDifference::At(at)) => words.push(format!("content@{at}")),
        None => {}
    }
    words.join(" ")
}

fn lines(a: &[u8], b: &[u8], compare: Compare) -> Vec<String> {
    let options = DiffOptions {
        compare,
        known_same: None,
    };
    lines_with(&open(a), &open(b), &options).unwrap().0
}

/// Two trees with a difference of every kind.
fn two_trees() -> [Vec<u8>; 2] {
    [0, 1].map(|which| {
        let mut space = Space::new(0);
        let mut layer = LayerTree::new();
        let is_b = which == 1;
        let mut file = |content: &[u8]| regular(space.file(content));
        let mut big = vec![7; 700_000];
        if is_b {
            big[600_001] = 8;
        }
        put(&mut layer, "same", file(b"same"));
        put(&mut layer, "big", file(&big));
        put(
            &mut layer,
            "longer",
            file(if is_b { b"longer" } else { b"long" }),
        );
        let mut owned = file(b"x");
        let mut times = file(b"x");
        if is_b {
            owned.attributes.permissions = 0o4755;
            owned.attributes.uid = 1;
            owned.attributes.gid = 2;
            times.attributes.mtime.nanoseconds = 1;
        }
        put(&mut layer, "owned", owned);
        put(&mut layer, "times", times);
        let mut with_xattrs = file(b"x");
        with_xattrs.attributes.xattrs = if !is_b {
            xattrs(&[(b"user.a", b"1"), (b"user.b", b"1"), (b"user.same", b"1")])
        } else {
            xattrs(&[(b"user.b", b"2"), (b"user.c", b"1"), (b"user.same", b"1")])
        };
        put(&mut layer, "xattrs", with_xattrs);
        put(&mut layer, "link", symlink(if is_b { b"b" } else { b"a" }));
        let number = DeviceNumber {
            major: 1,
            minor: 3 + which,
        };
        put(&mut layer, "null", node(NodeKind::CharDevice(number)));
        let gone = DeviceNumber { major: 0, minor: 0 };
        let hidden = if is_b { gone } else { number };
        put(&mut layer, "hidden", node(NodeKind::CharDevice(hidden)));
        // A name that sorts before the contents of the directory `dir`, because its next byte is
        // smaller than a slash.
        put(&mut layer, "dir.txt", file(b"x"));
        put(&mut layer, "dir", directory());
        let (mine, its) = if !is_b { ("dir/only-a", "kind") } else { ("dir/only-b", "dir/z") };
        put(&mut layer, mine, directory());
        put(&mut layer, &format!("{mine}/below"), file(b"x"));
        put(&mut layer, its, directory());
        put(&mut layer, &format!("{its}/child"), file(b"x"));
        if is_b {
            put(&mut layer, "kind", symlink(b"dir/z"));
        }
        let linked = put(&mut layer, "linked", file(b"shared"));
        if is_b {
            put(&mut layer, "linked2", file(b"shared"));
            link(&mut layer, "linked3", linked);
        } else {
            link(&mut layer, "linked2", linked);
            put(&mut layer, "linked3", file(b"shared"));
        }
        space.image(&layer.into_tree().unwrap())
    })
}

#[test]
fn every_kind_of_difference_is_reported_in_order_of_names() {
    let [a, b] = two_trees();
    assert_eq!(
        lines(&a, &b, Compare::All),
        [
            "M /big content@600001",
            "D /dir/only-a",
            "D /dir/only-a/below",
            "A /dir/only-b",
            "A /dir/only-b/below",
            "A /dir/z",
            "A /dir/z/child",
            "T /hidden CharDevice CharDevice",
            "T /kind Directory Symlink",
            "D /kind/child",
            "M /link target",
            "M /linked2 links",
            "M /linked3 links",
            "M /longer size length",
            "M /null device",
            "M /owned mode uid gid",
            "M /times mtime",
            "M /xattrs user.a:Removed user.b:Changed user.c:Added",
        ]
    );
}

#[test]
fn metadata_and_content_divide_the_differences_between_them() {
    let [a, b] = two_trees();
    let of = |compare| lines(&a, &b, compare);
    let all = of(Compare::All);
    let metadata: Vec<String> = all
        .iter()
        .filter(|line| !line.contains("/big"))
        .map(|line| line.replace(" length", ""))
        .collect();
    assert_eq!(of(Compare::Metadata), metadata);
    let attributes = ["/linked", "/owned", "/times", "/xattrs"];
    let content: Vec<String> = all
        .iter()
        .filter(|line| !attributes.iter().any(|path| line.contains(path)))
        .map(|line| line.replace(" size", ""))
        .collect();
    assert_eq!(of(Compare::Content), content);
}

#[test]
fn swapped_sides_give_the_mirrored_differences() {
    let [a, b] = two_trees();
    let round = |letter: &str| match letter {
        "A" => "D".to_owned(),
        "D" => "A".to_owned(),
        other => other.to_owned(),
    };
    let paths = |lines: Vec<String>| -> Vec<(String, String)> {
        lines
            .iter()
            .map(|line| {
                let mut words = line.split(' ');
                let letter = words.next().unwrap().to_owned();
                (letter, words.next().unwrap().to_owned())
            })
            .collect()
    };
    let there = paths(lines(&a, &b, Compare::All));
    let back: Vec<_> = paths(lines(&b, &a, Compare::All))
        .into_iter()
        .map(|(letter, path)| (round(&letter), path))
        .collect();
    assert_eq!(there, back);
}

#[test]
fn a_tree_does_not_differ_from_itself() {
    let (tree, space) = everything();
    let image = space.image(&tree);
    let options = DiffOptions::default();
    let (lines, summary) = lines_with(&open(&image), &open(&image), &options).unwrap();
    assert_eq!(lines, [""; 0]);
    assert!(summary.is_same());
    assert!(summary.same > 40, "{summary:?}");
    assert!(summary.compared_bytes > 100_000, "{summary:?}");
}

#[test]
fn known_equal_content_is_not_read() {
    let (tree, space) = everything();
    let image = space.image(&tree);
    let asked = Cell::new(0);
    let known = |a: u64, b: u64, length: u64| {
        assert_eq!(a, b);
        asked.set(asked.get() + 1);
        // In pieces, as blocks end.
        length.min(5000)
    };
    let options = DiffOptions {
        compare: Compare::All,
        known_same: Some(&known),
    };
    let (lines, summary) = lines_with(&open(&image), &open(&image), &options).unwrap();
    assert_eq!(lines, [""; 0]);
    assert_eq!(summary.compared_bytes, 0);
    assert!(asked.get() > 20);
}

#[test]
fn content_of_a_file_with_many_names_is_read_once() {
    let image = |last: u8| {
        let mut space = Space::new(0);
        let mut layer = LayerTree::new();
        let mut content = vec![1; 100_000];
        content[99_999] = last;
        let id = put(&mut layer, "f0", regular(space.file(&content)));
        for i in 1..100 {
            link(&mut layer, &format!("f{i}"), id);
        }
        space.image(&layer.into_tree().unwrap())
    };
    for (last, changed) in [(1, 0), (2, 100)] {
        let (a, b) = (image(1), image(last));
        let (_, summary) = lines_with(&open(&a), &open(&b), &DiffOptions::default()).unwrap();
        assert_eq!(summary.compared_bytes, 100_000);
        assert_eq!(summary.changed, changed);
    }
}

#[test]
fn holes_of_every_form_read_as_zeros() {
    let image = |stored: bool, last: u8| {
        let mut space = Space::new(0);
        let mut layer = LayerTree::new();
        let content = if stored {
            let mut bytes = vec![0; 1_000_000];
            bytes[999_999] = last;
            space.file(&bytes)
        } else {
            space.chunked(1_000_000, 0, &BTreeMap::new())
        };
        put(&mut layer, "f", regular(content));
        space.image(&layer.into_tree().unwrap())
    };
    let none = [""; 0];
    assert_eq!(lines(&image(true, 0), &image(false, 0), Compare::All), none);
    assert_eq!(lines(&image(false, 0), &image(true, 0), Compare::All), none);
    assert_eq!(
        lines(&image(false, 0), &image(true, 1), Compare::All),
        ["M /f content@999999"]
    );
}

#[test]
fn two_files_of_a_pebibyte_that_are_holes_take_no_time() {
    let mut space = Space::new(0);
    let mut layer = LayerTree::new();
    let content = space.chunked(1 << 50, 30, &BTreeMap::new());
    put(&mut layer, "hole", regular(content));
    let image = space.image(&layer.into_tree().unwrap());
    assert_eq!(lines(&image, &image, Compare::All), [""; 0]);
}

/// The offset of a name in an image that contains it once.
fn find(image: &[u8], name: &[u8]) -> usize {
    let mut found = image.windows(name.len()).enumerate();
    let at = found.find(|(_, window)| *window == name).unwrap().0;
    assert!(!found.any(|(_, window)| window == name));
    at
}

#[test]
fn an_unsorted_directory_is_reported_as_damage_of_its_side() {
    let [a, mut b] = two_trees();
    let at = find(&b, b"times");
    b[at] = b'a';
    let options = DiffOptions::default();
    match lines_with(&open(&a), &open(&b), &options) {
        Err(Stopped::Tree(error)) => {
            assert_eq!(error.side, Side::B);
            assert!(
                matches!(error.source, ErofsError::Unsorted { .. }),
                "{error:?}"
            );
        }
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The oracle compares two maps by path.
    #[test]
    fn random_trees_differ_where_two_maps_differ(
        a in prop::collection::btree_map("[ab/]{1,4}", 0u8..4, 0..12),
        b in prop::collection::btree_map("[ab/]{1,4}", 0u8..4, 0..12),
    ) {
        let build = |wanted: &BTreeMap<String, u8>| {
            let mut space = Space::new(0);
            let mut layer = LayerTree::new();
            let mut made = BTreeMap::new();
            for (path, &content) in wanted {
                let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
                let mut parent = String::new();
                for (depth, name) in names.iter().enumerate() {
                    let path = match depth {
                        0 => name.to_string(),
                        _ => format!("{parent}/{name}"),
                    };
                    let is_file = depth + 1 == names.len() && content > 0;
                    match made.get(&path) {
                        Some(0) => {}
                        Some(_) => break,
                        None if is_file => {
                            let kind = NodeKind::Regular(space.file(&vec![content; 5000]));
                            put(&mut layer, &path, node(kind));
                            made.insert(path.clone(), content);
                        }
                        None => {
                            put(&mut layer, &path, directory());
                            made.insert(path.clone(), 0);
                        }
                    }
                    parent = path;
                }
            }
            (space.image(&layer.into_tree().unwrap()), made)
        };
        let ((image_a, made_a), (image_b, made_b)) = (build(&a), build(&b));
        let mut expected = Vec::new();
        let mut paths: Vec<&String> = made_a.keys().chain(made_b.keys()).collect();
        paths.sort_by_key(|path| path.split('/').collect::<Vec<_>>());
        paths.dedup();
        for path in paths {
            match (made_a.get(path), made_b.get(path)) {
                (Some(_), None) => expected.push(format!("D /{path}")),
                (None, Some(_)) => expected.push(format!("A /{path}")),
                (Some(0), Some(1..)) => expected.push(format!("T /{path} Directory Regular")),
                (Some(1..), Some(0)) => expected.push(format!("T /{path} Regular Directory")),
                (Some(a), Some(b)) if a != b => expected.push(format!("M /{path} content@0")),
                _ => {}
            }
        }
        prop_assert_eq!(lines(&image_a, &image_b, Compare::All), expected);
    }
}
