//! Sequences of layers, compared with a slow model of paths.

use std::collections::{BTreeMap, BTreeSet};

use bcow_erofs::reader::{FileType, Filesystem, Inode};
use proptest::prelude::*;

use crate::support::convert_layers;
use bcow_testkit::tar::{Header, Tar};

/// One entry of a layer's archive. Paths are sequences of names.
#[derive(Debug, Clone)]
pub enum Op {
    File(Path, u8),
    Dir(Path, u32),
    Symlink(Path, Path),
    Link(Path, Path),
    Whiteout(Path),
    Opaque(Path),
}

type Path = Vec<&'static str>;

fn paths() -> impl Strategy<Value = Path> {
    proptest::collection::vec(prop_oneof![Just("a"), Just("b"), Just("c")], 1..4)
}

pub fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (paths(), any::<u8>()).prop_map(|(p, n)| Op::File(p, n)),
        3 => (paths(), 0u32..0o777).prop_map(|(p, m)| Op::Dir(p, m)),
        1 => (paths(), paths()).prop_map(|(p, t)| Op::Symlink(p, t)),
        2 => (paths(), paths()).prop_map(|(p, t)| Op::Link(p, t)),
        2 => paths().prop_map(Op::Whiteout),
        1 => paths().prop_map(Op::Opaque),
    ]
}

pub fn archive(layer: &[Op], number: usize) -> Vec<u8> {
    let mut tar = Tar::new();
    for (i, op) in layer.iter().enumerate() {
        tar = match op {
            Op::File(path, n) => tar.file(path.join("/"), content(number, i, *n)),
            Op::Dir(path, mode) => {
                let mut header = Header::new(path.join("/"), b'5');
                header.mode = *mode;
                tar.entry(&header, b"")
            }
            Op::Symlink(path, target) => {
                tar.symlink(path.join("/"), format!("/{}", target.join("/")))
            }
            Op::Link(path, target) => tar.hardlink(path.join("/"), target.join("/")),
            Op::Whiteout(path) => {
                let (last, parents) = path.split_last().unwrap();
                let name = format!(".wh.{last}");
                tar.file([parents, &[&name]].concat().join("/"), "")
            }
            Op::Opaque(path) => tar.file(format!("{}/.wh..wh..opq", path.join("/")), ""),
        };
    }
    tar.done()
}

/// Content with a block of its own that no other number has.
fn content(layer: usize, index: usize, n: u8) -> Vec<u8> {
    format!("{layer} {index} {n};")
        .repeat(1 + usize::from(n) * 8)
        .into_bytes()
}

#[derive(Debug, Clone, PartialEq)]
enum Node {
    /// Content; files with the same number are one file.
    File(u32, Vec<u8>),
    Dir {
        mode: u32,
        opaque: bool,
        implicit: bool,
    },
    Symlink(u32, String),
    Whiteout,
    LowerLink(String),
}

/// A tree as a flat list of paths.
type Flat = BTreeMap<String, Node>;

fn remove_tree(tree: &mut Flat, path: &str) {
    let below = format!("{path}/");
    tree.retain(|p, _| p != path && !p.starts_with(&below));
}

fn join(dir: &str, name: &str) -> String {
    match dir {
        "" => name.to_owned(),
        dir => format!("{dir}/{name}"),
    }
}

/// Resolves a path, following symlinks on the way; creates missing directories on request. `Err` if
/// a component on the way is not a directory; `Ok(None)` if the path does not exist.
fn walk(tree: &mut Flat, path: &[&str], make: bool) -> Result<Option<String>, ()> {
    let mut todo: Vec<String> = path.iter().rev().map(|n| n.to_string()).collect();
    let mut at = String::new();
    let mut hops = 0;
    while let Some(name) = todo.pop() {
        let next = join(&at, &name);
        match tree.get(&next).cloned() {
            Some(Node::Dir { .. }) => at = next,
            Some(Node::Symlink(_, target)) => {
                hops += 1;
                if hops > 40 {
                    return Err(());
                }
                at = String::new();
                todo.extend(
                    target
                        .trim_start_matches('/')
                        .rsplit('/')
                        .map(str::to_owned),
                );
            }
            None | Some(Node::Whiteout) if make => {
                let opaque = tree.contains_key(&next);
                let node = Node::Dir {
                    mode: 0o755,
                    opaque,
                    // A directory behind a whiteout is new.
                    implicit: !opaque,
                };
                tree.insert(next.clone(), node);
                at = next;
            }
            None => return Ok(None),
            Some(_) if make => return Err(()),
            Some(_) => return Ok(None),
        }
    }
    Ok(Some(at))
}

/// One layer on its own.
fn unpack(layer: &[Op], number: usize, inodes: &mut u32) -> Result<Flat, ()> {
    let mut tree = Flat::new();
    // Paths that had a whiteout, with any object there now.
    let mut whited = BTreeSet::new();
    for (i, op) in layer.iter().enumerate() {
        let path = match op {
            Op::File(p, _) | Op::Dir(p, _) | Op::Symlink(p, _) | Op::Link(p, _) => p,
            Op::Whiteout(p) => p,
            Op::Opaque(path) => {
                let dir = walk(&mut tree, path, true)?.unwrap();
                if let Some(Node::Dir { opaque, .. }) = tree.get_mut(&dir) {
                    *opaque = true;
                }
                continue;
            }
        };
        let (last, parents) = path.split_last().unwrap();
        let parent = walk(&mut tree, parents, true)?.unwrap();
        let path = join(&parent, last);
        *inodes += 1;
        if let Op::File(..) | Op::Symlink(..) | Op::Link(..) = op {
            let below = format!("{path}/");
            whited.retain(|p: &String| !p.starts_with(&below));
        }
        match op {
            Op::File(_, n) => {
                remove_tree(&mut tree, &path);
                tree.insert(path, Node::File(*inodes, content(number, i, *n)));
            }
            Op::Symlink(_, target) => {
                remove_tree(&mut tree, &path);
                tree.insert(
                    path,
                    Node::Symlink(*inodes, format!("/{}", target.join("/"))),
                );
            }
            Op::Dir(_, new_mode) => match tree.get_mut(&path) {
                Some(Node::Dir { mode, implicit, .. }) => (*mode, *implicit) = (*new_mode, false),
                _ => {
                    let opaque = whited.contains(&path);
                    tree.insert(
                        path,
                        Node::Dir {
                            mode: *new_mode,
                            opaque,
                            implicit: false,
                        },
                    );
                }
            },
            Op::Whiteout(_) => {
                whited.insert(path.clone());
                match tree.get_mut(&path) {
                    Some(Node::Dir {
                        opaque, implicit, ..
                    }) => (*opaque, *implicit) = (true, false),
                    Some(_) => {}
                    None => {
                        tree.insert(path, Node::Whiteout);
                    }
                }
            }
            Op::Link(_, target) => match find(&mut tree, target)? {
                Some((_, Node::Dir { .. })) => return Err(()),
                Some((_, node @ (Node::File(..) | Node::Symlink(..)))) => {
                    remove_tree(&mut tree, &path);
                    tree.insert(path, node);
                }
                other => {
                    // A link to a link has the same target.
                    let target = match other {
                        Some((_, Node::LowerLink(target))) => target,
                        _ => target.join("/"),
                    };
                    remove_tree(&mut tree, &path);
                    tree.insert(path, Node::LowerLink(target));
                }
            },
            Op::Opaque(_) => {}
        }
    }
    Ok(tree)
}

/// The object at a path; symlinks are followed on the way but not at the end.
fn find(tree: &mut Flat, path: &[&str]) -> Result<Option<(String, Node)>, ()> {
    let (last, parents) = path.split_last().unwrap();
    let Some(parent) = walk(tree, parents, false)? else {
        return Ok(None);
    };
    let place = join(&parent, last);
    Ok(tree.get(&place).cloned().map(|node| (place, node)))
}

/// Puts a layer on top of others.
fn stack(lower: Flat, layer: &Flat) -> Result<Flat, ()> {
    let mut merged = lower.clone();
    let mut open = Vec::new();
    for (path, node) in layer {
        match node {
            Node::Whiteout => remove_tree(&mut merged, path),
            Node::Dir {
                mode,
                opaque,
                implicit,
            } => {
                let before = merged.get(path).cloned();
                if *opaque || !matches!(before, Some(Node::Dir { .. })) {
                    remove_tree(&mut merged, path);
                }
                let mode = match before {
                    Some(Node::Dir { mode: lower, .. }) if *implicit => lower,
                    _ => *mode,
                };
                merged.insert(
                    path.clone(),
                    Node::Dir {
                        mode,
                        opaque: false,
                        implicit: false,
                    },
                );
            }
            Node::LowerLink(target) => {
                let target: Vec<&str> = target.split('/').collect();
                remove_tree(&mut merged, path);
                match linked(&lower, &target) {
                    Some(node) => {
                        merged.insert(path.clone(), node);
                    }
                    None => open.push((path, target)),
                }
            }
            other => {
                remove_tree(&mut merged, path);
                merged.insert(path.clone(), other.clone());
            }
        }
    }
    // The target may come later in the layer, or be such a link itself.
    while !open.is_empty() {
        let before = open.len();
        open.retain(|(path, target)| match linked(&merged, target) {
            Some(node) => {
                merged.insert((*path).clone(), node);
                false
            }
            None => true,
        });
        if open.len() == before {
            return Err(());
        }
    }
    Ok(merged)
}

/// The object, except a directory, that a hardlink's target names in a merged tree.
fn linked(tree: &Flat, target: &[&str]) -> Option<Node> {
    match find(&mut tree.clone(), target) {
        Ok(Some((_, node @ (Node::File(..) | Node::Symlink(..))))) => Some(node),
        _ => None,
    }
}

/// One line per path: the object, and the first of its names.
fn described(entries: impl Iterator<Item = (String, String, Option<u64>)>) -> Vec<String> {
    let mut first = BTreeMap::new();
    entries
        .map(|(path, what, inode)| match inode {
            Some(inode) => {
                let first = first.entry(inode).or_insert_with(|| path.clone());
                format!("{path} {what} is {first}")
            }
            None => format!("{path} {what}"),
        })
        .collect()
}

fn describe_model(tree: &Flat) -> Vec<String> {
    described(tree.iter().map(|(path, node)| match node {
        Node::File(inode, bytes) => {
            let what = format!("file {}", String::from_utf8_lossy(bytes));
            (path.clone(), what, Some(u64::from(*inode)))
        }
        Node::Dir { mode, .. } => (path.clone(), format!("dir {mode:o}"), None),
        Node::Symlink(inode, target) => (
            path.clone(),
            format!("symlink {target}"),
            Some(u64::from(*inode)),
        ),
        Node::Whiteout | Node::LowerLink(_) => (path.clone(), "left over".into(), None),
    }))
}

fn describe_image(fs: &Filesystem) -> Vec<String> {
    let mut found = BTreeMap::new();
    let mut todo = vec![(String::new(), fs.inode(fs.root()).unwrap())];
    while let Some((path, inode)) = todo.pop() {
        if inode.kind == FileType::Directory {
            let mut below = Vec::new();
            fs.read_dir(&inode, 0, &mut |entry| {
                let name = String::from_utf8_lossy(entry.name).into_owned();
                if name != "." && name != ".." {
                    below.push((join(&path, &name), entry.nid));
                }
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
            todo.extend(
                below
                    .into_iter()
                    .map(|(path, nid)| (path, fs.inode(nid).unwrap())),
            );
        }
        if !path.is_empty() {
            found.insert(path, inode);
        }
    }
    described(found.into_iter().map(|(path, inode)| {
        let what = describe_inode(fs, &inode);
        let number = (inode.kind != FileType::Directory).then_some(inode.ino);
        (path, what, number)
    }))
}

fn describe_inode(fs: &Filesystem, inode: &Inode) -> String {
    match inode.kind {
        FileType::Directory => format!("dir {:o}", inode.permissions),
        FileType::Symlink => format!(
            "symlink {}",
            String::from_utf8_lossy(&fs.read_link(inode).unwrap())
        ),
        FileType::Regular => {
            let mut bytes = vec![0; inode.size as usize];
            fs.read(inode, 0, &mut bytes).unwrap();
            format!("file {}", String::from_utf8_lossy(&bytes))
        }
        other => format!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn layers_convert_to_what_the_model_says(
        layers in proptest::collection::vec(proptest::collection::vec(ops(), 0..8), 1..5)
    ) {
        let mut inodes = 0;
        let expected = layers
            .iter()
            .enumerate()
            .try_fold(Flat::new(), |lower, (i, layer)| {
                stack(lower, &unpack(layer, i, &mut inodes)?)
            });
        let archives: Vec<_> = layers.iter().enumerate().map(|(i, l)| archive(l, i)).collect();
        match (convert_layers(&archives), expected) {
            (Ok(converted), Ok(expected)) => {
                prop_assert_eq!(describe_image(&converted.filesystem()), describe_model(&expected));
            }
            (Err(_), Err(())) => {}
            (Ok(converted), Err(())) => {
                prop_assert!(false, "converted, but should not: {}", converted.dump());
            }
            (Err(error), Ok(_)) => prop_assert!(false, "refused: {error}"),
        }
    }
}
