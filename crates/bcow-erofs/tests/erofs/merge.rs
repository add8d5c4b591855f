//! Layers merge as in overlayfs.

use crate::support::*;
use bcow_erofs::merge::{MergeError, merge};
use bcow_erofs::tree::*;

/// A layer from lines: `path/` a directory (with mode), `path=text` a link (for any file),
/// `path` with `!` behind a whiteout, `path>target` a link to a lower file, `path/*` an opaque
/// directory.
fn layer(lines: &[&str]) -> LayerTree {
    let mut layer = LayerTree::new();
    for line in lines {
        if let Some(path) = line.strip_suffix("/*") {
            parents(&mut layer, path);
            let mut node = directory();
            if let NodeKind::Directory(directory) = &mut node.kind {
                directory.opaque = true;
            }
            put(&mut layer, path, node);
        } else if let Some(path) = line.strip_suffix('/') {
            parents(&mut layer, path);
            put(&mut layer, path, directory());
        } else if let Some(path) = line.strip_suffix('!') {
            parents(&mut layer, path);
            put(&mut layer, path, node(NodeKind::Whiteout));
        } else if let Some((path, target)) = line.split_once('>') {
            parents(&mut layer, path);
            put(
                &mut layer,
                path,
                node(NodeKind::LowerLink(target.as_bytes().into())),
            );
        } else if let Some((path, text)) = line.split_once('=') {
            parents(&mut layer, path);
            put(&mut layer, path, symlink(text.as_bytes()));
        } else {
            panic!("{line}");
        }
    }
    layer
}

fn parents(layer: &mut LayerTree, path: &str) {
    let mut at = LayerTree::ROOT;
    let Some((dir, _)) = path.rsplit_once('/') else {
        return;
    };
    for part in dir.split('/') {
        at = match layer.child(at, part.as_bytes()) {
            Some(id) => id,
            None => {
                let mut node = directory();
                node.attributes.permissions = 0o700;
                if let NodeKind::Directory(directory) = &mut node.kind {
                    directory.implicit = true;
                }
                let id = layer.add(node);
                layer.insert(at, part.as_bytes(), id);
                id
            }
        };
    }
}

/// The tree in the same notation, sorted; hardlinks are shown as `path=text#first`.
fn show(tree: &Tree) -> Vec<String> {
    let mut lines = Vec::new();
    let mut first = std::collections::HashMap::new();
    let mut pending = vec![(String::new(), Tree::ROOT)];
    while let Some((path, id)) = pending.pop() {
        match &tree.node(id).kind {
            NodeKind::Directory(directory) => {
                if !path.is_empty() {
                    let mode = tree.node(id).attributes.permissions;
                    lines.push(match mode {
                        0o755 => format!("{path}/"),
                        _ => format!("{path}/{mode:o}"),
                    });
                }
                for (name, &child) in directory.children.iter().rev() {
                    let name = String::from_utf8_lossy(name);
                    let path =
                        if path.is_empty() { name.into_owned() } else { format!("{path}/{name}") };
                    pending.push((path, child));
                }
            }
            NodeKind::Symlink(target) => {
                let mut line = format!("{path}={}", String::from_utf8_lossy(target));
                match first.get(&id) {
                    Some(known) => line = format!("{line}#{known}"),
                    None => {
                        first.insert(id, path);
                    }
                }
                lines.push(line);
            }
            other => panic!("{other:?}"),
        }
    }
    lines
}

#[test]
fn no_layers_give_an_empty_root() {
    assert!(merge(vec![]).unwrap().is_empty());
}

#[test]
fn layers_merge() {
    const LOWER: &[&str] = &["d/", "d/x=1", "d/e/y=1"];
    let cases: &[(&[&[&str]], &[&str])] = &[
        (&[&["a=1", "b=1"], &["a=2"]], &["a=2", "b=1"]),
        // Implicit directories take the lower attributes, if there is a directory below.
        (&[&["d/", "d/x=1"], &["d/y=2"]], &["d/", "d/x=1", "d/y=2"]),
        (&[&["e=1"], &["d/y=2"]], &["d/700", "d/y=2", "e=1"]),
        (&[&["d=1"], &["d/y=2"]], &["d/700", "d/y=2"]),
        // A whiteout hides lower layers and is dropped, also in a new directory.
        (&[&["a=1", "d/x=1"], &["a!", "d!"]], &[]),
        (&[&["a=1"], &["a!"], &["a=3"]], &["a=3"]),
        (&[&["b=1"], &["a!"]], &["b=1"]),
        (&[&["a!", "b=1"]], &["b=1"]),
        (
            &[&["b=1"], &["d/", "d/x!", "d/y=1"]],
            &["b=1", "d/", "d/y=1"],
        ),
        // An opaque directory hides what is below it.
        (&[LOWER, &["d/*", "d/z=2"]], &["d/", "d/z=2"]),
        (&[LOWER, &["d/*"], &["d/x=3"]], &["d/", "d/x=3"]),
        (&[LOWER, &["d/e/*"]], &["d/", "d/e/", "d/x=1"]),
        // Types change. Content that a file hid stays hidden below a new directory.
        (&[&["d/x=1"], &["d=2"]], &["d=2"]),
        (&[&["d=1"], &["d/", "d/x=2"]], &["d/", "d/x=2"]),
        (&[&["d/x=1"], &["d=2"], &["d/", "d/y=3"]], &["d/", "d/y=3"]),
        // A lower link that is a parent above becomes a directory.
        (
            &[&["real/", "real/x=1", "d=real"], &["d/y=2"]],
            &["d/700", "d/y=2", "real/", "real/x=1"],
        ),
        // Links to lower files are the same inode, also through a link and through two layers.
        (&[&["a=1"], &["b>a"]], &["a=1", "b=1#a"]),
        (
            &[&["d/a=1"], &["e/b>d/a"]],
            &["d/700", "d/a=1", "e/700", "e/b=1#d/a"],
        ),
        (
            &[&["bin=usr/bin", "usr/bin/x=1"], &["y>bin/x"]],
            &[
                "bin=usr/bin",
                "usr/700",
                "usr/bin/700",
                "usr/bin/x=1",
                "y=1#usr/bin/x",
            ],
        ),
        (&[&["a=1"], &["b>a"], &["c>b"]], &["a=1", "b=1#a", "c=1#a"]),
        // A link keeps a lower file that its own layer hides or replaces.
        (&[&["a=1"], &["b>a", "a!"]], &["b=1"]),
        (&[&["a=1"], &["b>a", "a=2"]], &["a=2", "b=1"]),
        // A link may name another link of its layer.
        (&[&["a=1"], &["c>b", "b>a"]], &["a=1", "b=1#a", "c=1#a"]),
        (&[&["z=1"], &["b>own", "own=2"]], &["b=2", "own=2#b", "z=1"]),
    ];
    for (layers, expected) in cases {
        let trees = layers.iter().map(|lines| layer(lines)).collect();
        assert_eq!(show(&merge(trees).unwrap()), *expected, "{layers:?}");
    }
}

#[test]
fn directories_merge_and_take_the_upper_attributes() {
    let mut upper = layer(&["d/", "d/y=2"]);
    let d = upper.child(LayerTree::ROOT, b"d").unwrap();
    upper.node_mut(d).attributes.permissions = 0o711;
    let tree = merge(vec![layer(&["d/", "d/x=1"]), upper]).unwrap();
    assert_eq!(show(&tree), ["d/711", "d/x=1", "d/y=2"]);
}

#[test]
fn the_root_keeps_its_attributes_unless_a_layer_names_it() {
    let mut lower = LayerTree::new();
    let root = lower.node_mut(LayerTree::ROOT);
    root.attributes.permissions = 0o751;
    if let NodeKind::Directory(directory) = &mut root.kind {
        directory.implicit = false;
    }
    let tree = merge(vec![lower, layer(&["a=1"])]).unwrap();
    assert_eq!(tree.node(Tree::ROOT).attributes.permissions, 0o751);
}

#[test]
fn the_other_names_of_a_lower_inode_stay_when_one_is_replaced() {
    let mut lower = layer(&["a=1"]);
    let a = lower.child(LayerTree::ROOT, b"a").unwrap();
    link(&mut lower, "b", a);
    link(&mut lower, "c", a);
    let tree = merge(vec![lower, layer(&["a=2", "b!"])]).unwrap();
    assert_eq!(show(&tree), ["a=2", "c=1"]);
}

#[test]
fn a_link_to_nothing_names_both_paths_and_the_layer() {
    let e = merge(vec![layer(&["a=1"]), layer(&["d/b>x/nothing"])]).unwrap_err();
    assert_eq!(
        e.to_string(),
        "layer 1 (the lowest is 0): /d/b: hardlink to /x/nothing: \
         neither this layer nor one below has such a file"
    );
    // To a directory, in a circle, through a circle of links.
    for lines in [&["b>d"][..], &["b>c", "c>b"], &["b>loop/x"]] {
        let layers = vec![layer(&["d/", "loop=loop"]), layer(lines)];
        assert!(matches!(
            merge(layers),
            Err(MergeError::Layer { layer: 1, .. })
        ));
    }
    let e = layer(&["b>a"]).into_tree().unwrap_err();
    assert!(e.to_string().contains("/b: hardlink to /a"), "{e}");
}

#[test]
fn a_visible_file_whose_content_was_dropped_is_refused() {
    let dropped = |layer: &mut LayerTree, path: &str| {
        let content = Content {
            size: 5,
            blocks: Blocks::Dropped,
            tail: None,
        };
        put(layer, path, regular(content))
    };
    let mut lower = LayerTree::new();
    dropped(&mut lower, "a");
    assert!(merge(vec![lower.clone(), layer(&["a=2"])]).is_ok());
    let e = merge(vec![lower, layer(&["b=2"])]).unwrap_err();
    assert!(
        e.to_string().starts_with("/a: the content was dropped"),
        "{e}"
    );
}

#[test]
fn a_directory_with_two_names_is_refused() {
    for path in ["b", "a/self"] {
        let mut twice = layer(&["a/", "c/"]);
        let a = twice.child(LayerTree::ROOT, b"a").unwrap();
        link(&mut twice, path, a);
        let e = twice.clone().into_tree().unwrap_err();
        assert!(e.problem == TreeProblem::DirectoryLinkedTwice, "{e}");
        let e = merge(vec![layer(&["x=1"]), twice]).unwrap_err();
        assert!(matches!(e, MergeError::Layer { layer: 1, .. }), "{e}");
    }
    let mut root = LayerTree::new();
    root.insert(LayerTree::ROOT, b"root", LayerTree::ROOT);
    assert!(root.into_tree().is_err());
}

#[test]
fn impossible_names_and_targets_are_refused_with_their_path() {
    let long = vec![b'n'; 256];
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0b", &long] {
        let mut layer = layer(&["d/"]);
        let d = layer.child(LayerTree::ROOT, b"d").unwrap();
        let id = layer.add(symlink(b"x"));
        layer.insert(d, name, id);
        let e = layer.into_tree().unwrap_err();
        assert!(
            matches!(e.problem, TreeProblem::Name(_)) && e.path.starts_with(b"d/"),
            "{e}"
        );
    }
    for target in [&b""[..], b"a\0b", &[b't'; 4096]] {
        let mut layer = layer(&["d/"]);
        put(&mut layer, "d/link", symlink(target));
        let e = layer.into_tree().unwrap_err();
        assert!(
            matches!(e.problem, TreeProblem::Symlink(_)) && e.path == b"d/link",
            "{e}"
        );
    }
}

#[test]
fn contents_that_contradict_themselves_are_refused() {
    let flat = |start| Blocks::Flat { start };
    let tail = |length| Some(Tail { offset: 0, length });
    let run = |first, count, start| ChunkRun {
        first,
        count,
        start,
    };
    let chunked = |shift, runs: &[ChunkRun]| Blocks::Chunked {
        chunk_shift: shift,
        runs: runs.into(),
    };
    let bad = [
        (100, flat(1), tail(99)),
        (4096, flat(1), tail(0)),
        (u64::MAX, flat(1), None),
        (1 << 45, flat(1), None),
        (8192, flat(u32::MAX - 1), None),
        (8192, chunked(32, &[]), None),
        (8192, chunked(0, &[run(0, 3, 1)]), None),
        (8192, chunked(0, &[run(1, 1, 1), run(0, 1, 1)]), None),
        (8192, chunked(0, &[run(0, 2, 1), run(1, 1, 1)]), None),
        (8192, chunked(0, &[run(u64::MAX, 2, 1)]), None),
        (8192, chunked(0, &[run(0, 0, 1)]), None),
        (100, chunked(0, &[run(0, 1, 1)]), tail(100)),
    ];
    for (size, blocks, tail) in bad {
        let mut layer = LayerTree::new();
        let content = Content { size, blocks, tail };
        put(&mut layer, "f", regular(content.clone()));
        let e = layer.into_tree().map(|_| content).unwrap_err();
        assert!(matches!(e.problem, TreeProblem::Content(_)), "{e}");
    }
}

#[test]
fn a_path_of_two_thousand_components_is_read() {
    let deep = |name: &str| {
        let mut layer = LayerTree::new();
        let mut at = LayerTree::ROOT;
        for _ in 0..2000 {
            let id = layer.add(directory());
            layer.insert(at, b"d", id);
            at = id;
        }
        let id = layer.add(symlink(b"bottom"));
        layer.insert(at, name.as_bytes(), id);
        layer
    };
    let tree = merge(vec![deep("a"), deep("b")]).unwrap();
    assert_eq!(tree.len(), 1 + 2000 + 2);
    let space = Space::new(0);
    let image = space.image(&tree);
    check(&image);
    assert_eq!(dump(&image), expected_dump(&tree, &space));
    let path = "d/".repeat(2000) + "b";
    assert!(open(&image).resolve(path.as_bytes()).unwrap().is_some());
}
