//! Modules of a crate depend on each other without cycles.
//!
//! A module depends on the modules that its `use` declarations and its paths name. Names are
//! followed through re-exports to the module that defines them. A module may use its ancestors.
//! Code under `#[cfg(test)]` does not count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};

/// Names from the crate's root to a module; empty for the root.
type ModulePath = Vec<String>;

/// What a module declares, and which paths it names.
#[derive(Default)]
struct Module {
    children: BTreeSet<String>,
    items: BTreeSet<String>,
    /// Names that a `use` brings into scope, and the paths they stand for.
    imports: BTreeMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
    /// Paths in signatures, bodies and macro calls.
    paths: Vec<Vec<String>>,
}

type Modules = BTreeMap<ModulePath, Module>;
type Edges = BTreeMap<ModulePath, BTreeSet<ModulePath>>;

#[test]
fn modules_have_no_circles() {
    let mut found = super::Broken::new();
    for crate_root in crate_roots() {
        let edges = edges(&load_crate(&super::root().join(&crate_root)));
        let cycles = cycles(&edges);
        let places: Vec<String> = cycles
            .iter()
            .flat_map(|cycle| cycle.iter().map(|at| describe(at, &edges, cycle)))
            .collect();
        if !places.is_empty() {
            found.insert(crate_root.display().to_string(), places);
        }
    }
    super::expect_none("cycle", &found);
}

#[test]
fn a_circle_is_found() {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| {
        std::fs::write(directory.path().join(name), text).expect("written");
    };
    write("lib.rs", "mod a; mod b; mod c; pub use c::Shared;");
    write("a.rs", "use crate::b::two; pub fn one() { two() }");
    write(
        "b.rs",
        "pub fn two() { println!(\"{}\", super::a::ONE); crate::Shared; }",
    );
    write(
        "c.rs",
        "pub struct Shared; #[cfg(test)] mod tests { use crate::a::one; }",
    );
    let edges = edges(&load_crate(&directory.path().join("lib.rs")));
    let cycle = BTreeSet::from([vec!["a".to_owned()], vec!["b".to_owned()]]);
    assert_eq!(cycles(&edges), [cycle]);
}

/// `lib.rs`, or `main.rs`, of each crate of the workspace, below the root of the repository.
fn crate_roots() -> Vec<PathBuf> {
    let mut roots = super::files(&["lib.rs", "main.rs"]);
    roots.retain(|path| path.parent().is_some_and(|parent| parent.ends_with("src")));
    assert!(roots.len() >= 10, "{roots:?}");
    roots
}

fn load_crate(file: &Path) -> Modules {
    let mut modules = Modules::new();
    let directory = file.parent().expect("a directory");
    load(file, directory, Vec::new(), &mut modules);
    modules
}

/// Parses a module's file, and those of the modules that it declares, which are in `directory`.
fn load(file: &Path, directory: &Path, at: ModulePath, modules: &mut Modules) {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let mut module = Module::default();
    for item in &parsed.items {
        if let Some(name) = item_name(item) {
            module.items.insert(name.to_string());
        }
        let syn::Item::Mod(child) = item else {
            continue;
        };
        if child.content.is_some() || is_for_tests(&child.attrs) {
            continue;
        }
        let name = child.ident.to_string();
        let below = directory.join(&name);
        let candidates = [directory.join(format!("{name}.rs")), below.join("mod.rs")];
        let Some(found) = candidates.iter().find(|file| file.exists()) else {
            panic!("{}: no file of module {name}", file.display());
        };
        let mut path = at.clone();
        path.push(name.clone());
        module.children.insert(name);
        load(found, &below, path, modules);
    }
    Collector(&mut module).visit_file(&parsed);
    modules.insert(at, module);
}

fn item_name(item: &syn::Item) -> Option<&syn::Ident> {
    match item {
        syn::Item::Const(item) => Some(&item.ident),
        syn::Item::Enum(item) => Some(&item.ident),
        syn::Item::Fn(item) => Some(&item.sig.ident),
        syn::Item::Static(item) => Some(&item.ident),
        syn::Item::Struct(item) => Some(&item.ident),
        syn::Item::Trait(item) => Some(&item.ident),
        syn::Item::Type(item) => Some(&item.ident),
        _ => None,
    }
}

pub(crate) fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let mut for_tests = false;
        if attribute.path().is_ident("cfg") {
            // An attribute that is not a plain list (`feature = "x"`) is not `test`.
            let _ = attribute.parse_nested_meta(|meta| {
                for_tests |= meta.path.is_ident("test");
                Ok(())
            });
        }
        for_tests
    })
}

/// Collects the paths that a file names.
struct Collector<'m>(&'m mut Module);

impl<'ast> Visit<'ast> for Collector<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string());
        self.0.paths.push(names.collect());
        visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_for_tests(&item.attrs) {
            import(&item.tree, Vec::new(), self.0);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if item.content.is_some() && !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        // The arguments are tokens: a path is what `::` joins.
        let text = call.tokens.to_string().replace(" :: ", "::");
        let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let words = text
            .split(|c| !is_name(c))
            .filter(|word| word.contains("::"));
        for word in words {
            let names = word.split("::").filter(|name| !name.is_empty());
            self.0.paths.push(names.map(str::to_owned).collect());
        }
        visit::visit_macro(self, call);
    }
}

fn import(tree: &syn::UseTree, mut path: Vec<String>, module: &mut Module) {
    match tree {
        syn::UseTree::Path(tree) => {
            path.push(tree.ident.to_string());
            import(&tree.tree, path, module);
        }
        syn::UseTree::Name(name) if name.ident == "self" => {
            let name = path.last().cloned().unwrap_or_default();
            module.imports.insert(name, path);
        }
        syn::UseTree::Name(name) => {
            path.push(name.ident.to_string());
            module.imports.insert(name.ident.to_string(), path);
        }
        syn::UseTree::Rename(rename) => {
            if rename.ident != "self" {
                path.push(rename.ident.to_string());
            }
            module.imports.insert(rename.rename.to_string(), path);
        }
        syn::UseTree::Glob(_) => module.globs.push(path),
        syn::UseTree::Group(group) => {
            for tree in &group.items {
                import(tree, path.clone(), module);
            }
        }
    }
}

/// Which modules each module depends on, without itself and its ancestors.
fn edges(modules: &Modules) -> Edges {
    let mut edges = Edges::new();
    for (at, module) in modules {
        let named = module
            .imports
            .values()
            .chain(&module.globs)
            .chain(&module.paths);
        let used = named.filter_map(|path| defining_module(modules, at, path, 0));
        let used = used.filter(|used| !at.starts_with(used) && modules.contains_key(used));
        edges.insert(at.clone(), used.collect());
    }
    edges
}

/// The module that defines what `path` means in the module `at`; none if it is not of this crate.
fn defining_module(
    modules: &Modules,
    at: &[String],
    path: &[String],
    depth: usize,
) -> Option<ModulePath> {
    if depth > 16 {
        return None;
    }
    let mut here = at.to_vec();
    let mut is_local = false;
    let mut names = path;
    while let [first, rest @ ..] = names {
        match first.as_str() {
            "crate" => here.clear(),
            "self" => {}
            "super" => {
                here.pop();
            }
            _ => break,
        }
        is_local = true;
        names = rest;
    }
    while let [name, rest @ ..] = names {
        let module = modules.get(&here)?;
        if module.children.contains(name) {
            here.push(name.clone());
            is_local = true;
            names = rest;
            continue;
        }
        if module.items.contains(name) {
            return Some(here);
        }
        if let Some(target) = module.imports.get(name) {
            let target = [target, rest].concat();
            let is_same = here == at && target == path;
            return (!is_same).then(|| defining_module(modules, &here, &target, depth + 1))?;
        }
        let through_glob = module.globs.iter().find_map(|glob| {
            let from = defining_module(modules, &here, glob, depth + 1)?;
            let other = modules.get(&from).filter(|_| from != here)?;
            let has_it = other.items.contains(name)
                || other.imports.contains_key(name)
                || other.children.contains(name);
            has_it.then(|| defining_module(modules, &from, names, depth + 1))?
        });
        return through_glob.or(is_local.then_some(here));
    }
    is_local.then_some(here)
}

/// The groups of modules each of which reaches all others of its group.
fn cycles(edges: &Edges) -> Vec<BTreeSet<ModulePath>> {
    let reached: BTreeMap<_, _> = edges.keys().map(|at| (at, reachable(edges, at))).collect();
    let mut cycles = Vec::new();
    let mut done = BTreeSet::new();
    for (at, from_here) in &reached {
        if !from_here.contains(*at) || done.contains(*at) {
            continue;
        }
        let cycle = from_here
            .iter()
            .filter(|other| reached[other].contains(*at));
        let cycle: BTreeSet<ModulePath> = cycle.cloned().collect();
        done.extend(cycle.iter().cloned());
        cycles.push(cycle);
    }
    cycles
}

fn reachable(edges: &Edges, from: &ModulePath) -> BTreeSet<ModulePath> {
    let mut seen = BTreeSet::new();
    let mut pending = vec![from];
    while let Some(at) = pending.pop() {
        for next in &edges[at] {
            if seen.insert(next.clone()) {
                pending.push(next);
            }
        }
    }
    seen
}

fn describe(at: &ModulePath, edges: &Edges, cycle: &BTreeSet<ModulePath>) -> String {
    let used: Vec<String> = edges[at]
        .intersection(cycle)
        .map(|path| path.join("::"))
        .collect();
    format!("{} uses {}", at.join("::"), used.join(", "))
}
