//! Each input that the fuzzers kept, in its target.

#[path = "../src/targets/mod.rs"]
mod targets;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The names in a directory.
fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).expect("a directory");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    names
        .map(|name| name.into_string().expect("UTF-8"))
        .collect()
}

#[test]
fn kept_inputs_cause_no_panic() {
    targets::prepare();
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("kept");
    let known = targets::TARGETS.map(|(name, _)| name.to_owned());
    assert_eq!(names(&kept), BTreeSet::from(known));
    for (name, fuzz) in targets::TARGETS {
        let inputs = names(&kept.join(name));
        assert!(!inputs.is_empty(), "{name} has no inputs");
        for input in inputs {
            // If the test fails, this is the last line.
            println!("{name}/{input}");
            fuzz(&fs::read(kept.join(name).join(input)).expect("an input"));
        }
    }
}
