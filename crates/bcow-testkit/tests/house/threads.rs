//! What ships starts threads through `std::thread::Builder`, whose error it handles. The shorter
//! functions panic if the system refuses a thread, as it does at the limit of a cgroup, and a
//! process with mounts must not end because of that.

use syn::visit::{self, Visit};

use super::modules::is_for_tests;

/// Not shipped, or for explored executions, which have no limit.
const EXEMPT: [&str; 3] = ["crates/bcow-testkit/", "fuzz/", "crates/bcow/src/sync.rs"];

#[derive(Default)]
struct Spawns(Vec<String>);

impl<'ast> Visit<'ast> for Spawns {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|one| &one.ident).collect();
        if let [.., module, function] = names[..]
            && module == "thread"
            && function == "spawn"
        {
            self.0.push("thread::spawn".to_owned());
        }
        visit::visit_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if let syn::Expr::Path(receiver) = &*call.receiver
            && call.method == "spawn"
            && receiver.path.is_ident("scope")
        {
            self.0.push("scope.spawn".to_owned());
        }
        visit::visit_expr_method_call(self, call);
    }
}

fn spawns(text: &str) -> Vec<String> {
    let mut spawns = Spawns::default();
    spawns.visit_file(&syn::parse_file(text).expect("Rust"));
    spawns.0
}

#[test]
fn no_thread_is_started_that_could_be_refused() {
    let mut found = super::Broken::new();
    for path in super::files(&[".rs"]) {
        let name = path.to_string_lossy().into_owned();
        let ships = path.components().any(|part| part.as_os_str() == "src");
        if !ships
            || name.ends_with("/tests.rs")
            || EXEMPT.iter().any(|exempt| name.starts_with(exempt))
        {
            continue;
        }
        let text = std::fs::read_to_string(super::root().join(&path)).expect("a text");
        let spawns = spawns(&text);
        if !spawns.is_empty() {
            found.insert(name, spawns);
        }
    }
    super::expect_none("threads are started with thread::Builder", &found);
}

#[test]
fn threads_that_are_started_without_a_builder_are_found() {
    let found = spawns(
        "fn a() { std::thread::spawn(f); thread::scope(|scope| { scope.spawn(f); }); \
         command.spawn(); thread::Builder::new().spawn_scoped(scope, f); } \
         #[cfg(test)] mod tests { fn b() { thread::spawn(f); } }",
    );
    assert_eq!(found, ["thread::spawn", "scope.spawn"]);
}
