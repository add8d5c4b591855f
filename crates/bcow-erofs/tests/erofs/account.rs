//! The accounts of layers, compared with their merged tree.

use crate::support::*;
use bcow_erofs::account::{LayerAccount, account};
use bcow_erofs::reader::Filesystem;
use bcow_erofs::tree::*;

/// A file of `size` bytes. No test reads them.
fn file(size: u64) -> Node {
    regular(Content {
        size,
        blocks: Blocks::Chunked {
            chunk_shift: 31,
            runs: Box::default(),
        },
        tail: None,
    })
}

fn marked(opaque: bool, implicit: bool) -> Node {
    let mut node = directory();
    if let NodeKind::Directory(directory) = &mut node.kind {
        directory.opaque = opaque;
        directory.implicit = implicit;
    }
    node
}

fn whiteout() -> Node {
    node(NodeKind::Whiteout)
}

fn lower_link(target: &str) -> Node {
    node(NodeKind::LowerLink(target.as_bytes().into()))
}

fn layer(names: Vec<(&str, Node)>) -> LayerTree {
    let mut layer = LayerTree::new();
    for (path, node) in names {
        put(&mut layer, path, node);
    }
    layer
}

fn accounts(layers: Vec<LayerTree>) -> Vec<LayerAccount> {
    let systems: Vec<Filesystem> = layers
        .into_iter()
        .map(|layer| {
            let tree = layer.into_overlay().unwrap();
            open(&Space::new(2000).image(&tree))
        })
        .collect();
    let layers: Vec<&Filesystem> = systems.iter().collect();
    account(&layers).unwrap()
}

/// Added, hidden, hides: names and bytes each; whiteouts.
fn figures(account: &LayerAccount) -> [u64; 7] {
    [
        account.added_entries,
        account.added_bytes,
        account.hidden_entries,
        account.hidden_bytes,
        account.hides_entries,
        account.hides_bytes,
        account.whiteouts,
    ]
}

fn check(layers: Vec<LayerTree>, expected: &[[u64; 7]]) {
    let found: Vec<_> = accounts(layers).iter().map(figures).collect();
    assert_eq!(found, expected);
}

#[test]
fn one_layer_adds_all_it_has() {
    let names = vec![
        ("a", file(10)),
        ("d", directory()),
        ("d/b", file(100)),
        ("d/l", symlink(b"x")),
        ("gone", whiteout()),
    ];
    check(vec![layer(names)], &[[4, 110, 0, 0, 0, 0, 1]]);
    check(vec![layer(vec![])], &[[0; 7]]);
    assert_eq!(accounts(vec![]), []);
}

#[test]
fn deletions_and_replacements_are_attributed_to_their_layer() {
    check(
        vec![
            layer(vec![
                ("deleted", file(1)),
                ("replaced", file(20)),
                ("kept", file(300)),
                ("tree", directory()),
                ("tree/a", file(4000)),
                ("tree/b", directory()),
                ("tree/b/c", file(50000)),
            ]),
            layer(vec![
                ("replaced", file(7)),
                ("tree", directory()),
                ("tree/b", directory()),
                ("tree/b/c", file(8)),
            ]),
            layer(vec![
                ("deleted", whiteout()),
                ("nothing", whiteout()),
                ("tree", whiteout()),
            ]),
        ],
        &[
            // The directory tree/b belongs to the lowest layer; other layers list it too.
            [1, 300, 6, 54021, 0, 0, 0],
            [1, 7, 1, 8, 2, 50020, 0],
            [0, 0, 0, 0, 5, 4009, 3],
        ],
    );
}

#[test]
fn opaque_directories_hide_what_is_in_them_below() {
    check(
        vec![
            layer(vec![("d", directory()), ("d/a", file(10)), ("e", file(1))]),
            layer(vec![("d", marked(true, false)), ("d/b", file(200))]),
        ],
        &[[1, 1, 2, 10, 0, 0, 0], [2, 200, 0, 0, 2, 10, 0]],
    );
    // The root of a layer can be opaque too.
    let mut root = layer(vec![("b", file(200))]);
    if let NodeKind::Directory(directory) = &mut root.node_mut(LayerTree::ROOT).kind {
        directory.opaque = true;
    }
    check(
        vec![layer(vec![("d", directory()), ("d/a", file(10))]), root],
        &[[0, 0, 2, 10, 0, 0, 0], [1, 200, 0, 0, 2, 10, 0]],
    );
}

#[test]
fn files_and_directories_replace_each_other() {
    check(
        vec![
            layer(vec![
                ("f", file(10)),
                ("d", directory()),
                ("d/x", file(100)),
            ]),
            layer(vec![("f", directory()), ("f/y", file(1)), ("d", file(2))]),
        ],
        &[[0, 0, 3, 110, 0, 0, 0], [3, 3, 0, 0, 3, 110, 0]],
    );
}

#[test]
fn bytes_count_once_for_files_with_many_names() {
    let mut lower = LayerTree::new();
    let id = put(&mut lower, "a", file(1000));
    link(&mut lower, "b", id);
    let id = put(&mut lower, "c", file(20));
    link(&mut lower, "d", id);
    check(
        vec![
            lower,
            layer(vec![("a", whiteout()), ("c", whiteout())]),
            layer(vec![("d", whiteout())]),
        ],
        &[
            [1, 1000, 3, 20, 0, 0, 0],
            // Two layers delete names of the file. The first one of the walk hides it.
            [0, 0, 0, 0, 2, 20, 1 + 1],
            [0, 0, 0, 0, 1, 0, 1],
        ],
    );
}

#[test]
fn a_link_in_an_upper_layer_keeps_a_deleted_file() {
    let lower = || {
        layer(vec![
            ("d", directory()),
            ("d/a", file(1000)),
            ("b", file(5)),
        ])
    };
    check(
        vec![
            lower(),
            layer(vec![
                ("link", lower_link("d/a")),
                ("again", lower_link("b")),
            ]),
            layer(vec![("d", whiteout())]),
        ],
        &[
            [1, 1005, 2, 0, 0, 0, 0],
            [2, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 2, 0, 1],
        ],
    );
    // Through two links, the first of which is deleted with the file.
    check(
        vec![
            lower(),
            layer(vec![("one", lower_link("d/a"))]),
            layer(vec![("two", lower_link("one"))]),
            layer(vec![("one", whiteout())]),
            layer(vec![("d", whiteout())]),
        ],
        &[
            [1, 1005, 2, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0, 0],
            [1, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 1, 0, 1],
            [0, 0, 0, 0, 2, 0, 1],
        ],
    );
    // Deleted together with the link.
    check(
        vec![
            lower(),
            layer(vec![("link", lower_link("d/a"))]),
            layer(vec![("d", whiteout()), ("link", whiteout())]),
        ],
        &[
            [1, 5, 2, 1000, 0, 0, 0],
            [0, 0, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 3, 1000, 2],
        ],
    );
}

#[test]
fn implicit_directories_belong_to_the_lowest_layer_that_has_them() {
    check(
        vec![
            layer(vec![("d", marked(false, true)), ("d/a", file(1))]),
            layer(vec![("d", directory()), ("d/b", file(2))]),
        ],
        &[[2, 1, 0, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0, 0]],
    );
}

#[test]
fn a_directory_that_is_its_own_child_ends_the_walk() {
    let mut tree = LayerTree::new();
    put(&mut tree, "d", directory());
    put(&mut tree, "d/x", directory());
    let mut image = Space::new(2000).image(&tree.into_overlay().unwrap());
    // The entry "x" names the root.
    let root = open(&image).root().0;
    let fs = open(&image);
    let d = fs.resolve(b"/d").unwrap().unwrap();
    let x = fs.resolve(b"/d/x").unwrap().unwrap();
    let places: Vec<usize> = (0..image.len() - 8)
        .filter(|&at| image[at..at + 8] == x.0.to_le_bytes())
        .collect();
    for at in places {
        image[at..at + 8].copy_from_slice(&root.to_le_bytes());
    }
    let fs = open(&image);
    assert_eq!(fs.resolve(b"/d").unwrap(), Some(d));
    let error = account(&[&fs]).unwrap_err();
    assert!(error.to_string().contains("more than once"), "{error}");
}
