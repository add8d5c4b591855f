//! Lines end at column 100, texts use the field's words, and lists are complete.

use std::collections::BTreeSet;
use std::fs;

/// Columns of a line of code or Markdown.
const WIDTH: usize = 100;

/// Words that stand where the actor or the object has a name of its own (CONTRIBUTING.md, "English").
const WORDS: [&str; 12] = [
    "nobody",
    "nobody's",
    "whoever",
    "whatever",
    "somebody",
    "somebody's",
    "told",
    "so many",
    "so much",
    "stands",
    "who flushes",
    "is none",
];

/// Endings of the files with texts of this project.
const ENDINGS: [&str; 3] = [".rs", ".md", ".py"];

/// This list of words, and texts that are not this project's own.
const EXEMPT: [&str; 1] = ["crates/bcow-testkit/tests/house/text.rs"];

/// Documents that name each file of a directory: the directory, how the names start, and the
/// document. It contains the name without its ending as a word.
const LISTS: [(&str, &str, &str); 4] = [
    ("tests/e2e", "test_", "docs/testing.md"),
    ("fuzz/kept", "", "fuzz/README.md"),
    ("docs/guide", "", "docs/guide/README.md"),
    ("crates", "", "docs/architecture.md"),
];

#[test]
fn lists_of_files_in_documents_are_complete() {
    let mut found = super::Broken::new();
    let mut lists: Vec<_> = LISTS
        .map(|(at, start, list)| (at.to_owned(), start, list))
        .into();
    // The test programs of each crate.
    for at in names("crates", "") {
        let tests = format!("crates/{at}/tests");
        if super::root().join(&tests).exists() {
            lists.push((tests, "", "docs/testing.md"));
        }
    }
    for (directory, start, list) in lists {
        let text = fs::read_to_string(super::root().join(list)).expect(list);
        let is_part = |c: char| c.is_alphanumeric() || "_-".contains(c);
        let words: BTreeSet<&str> = text.split(|c| !is_part(c)).collect();
        for name in names(&directory, start) {
            if !words.contains(&*name) && !list.ends_with(&format!("{directory}/{name}.md")) {
                let place = format!("{directory}/{name}");
                found.entry(list.to_owned()).or_default().push(place);
            }
        }
    }
    super::expect_none("missing in a list of all files", &found);
}

/// The names in a directory without their endings, which start with `start`.
fn names(directory: &str, start: &str) -> Vec<String> {
    let entries = fs::read_dir(super::root().join(directory)).expect(directory);
    let names = entries.map(|entry| entry.expect(directory).path());
    // Neither is a test program.
    let is_support = |name: &str| ["support", "common", "proptest-regressions"].contains(&name);
    names
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .filter(|name| name.starts_with(start) && !name.starts_with("__") && !is_support(name))
        .collect()
}

#[test]
fn lines_end_at_column_100() {
    super::expect_none("width", &lines_with(is_too_wide));
}

#[test]
fn texts_use_the_words_of_the_field() {
    super::expect_none("words", &lines_with(has_listed_word));
}

/// What a test prints for a machine that lacks something, and the variable that makes it fail there.
/// Only `lacks` uses them, so that no test passes in CI without having run.
const SKIPS: [&str; 3] = ["SKIPPED", "skipped: ", "\"CI\""];
const LACKS: &str = "crates/bcow-testkit/src/tools.rs";

#[test]
fn tests_are_skipped_by_lacks_alone() {
    let mut found = lines_with(is_skip);
    assert!(found.remove(LACKS).is_some(), "{LACKS} skips no test");
    found.retain(|file, _| file.ends_with(".rs") && file.contains("tests/"));
    super::expect_none("skips without `lacks`", &found);
}

fn is_skip(line: &str) -> bool {
    !line.trim_start().starts_with("//") && SKIPS.iter().any(|text| line.contains(text))
}

/// What end-to-end tests do not contain, except for the file that explains it: a signal alone stops a
/// process some time later (`support.stop` waits), and a test case's `fail` hides that of `unittest`.
const SLIPS: [&str; 2] = ["SIGSTOP", "def fail(self"];
const SUPPORT: &str = "tests/e2e/support.py";

#[test]
fn end_to_end_tests_do_not_repeat_known_mistakes() {
    let mut found = lines_with(|line| SLIPS.iter().any(|slip| line.contains(slip)));
    assert!(
        found.remove(SUPPORT).is_some(),
        "{SUPPORT} stops no process"
    );
    found.retain(|file, _| file.ends_with(".py"));
    super::expect_none("known mistakes of tests", &found);
}

#[test]
fn a_homely_word_and_a_long_line_are_found() {
    assert!(has_listed_word("/// Nobody's upper"));
    assert!(has_listed_word("what the host told us"));
    assert!(!has_listed_word("it outstands, foretold"));
    assert!(has_listed_word("the upper is none"));
    assert!(!has_listed_word("if upper is None:"));
    assert!(is_too_wide(&"x".repeat(101)));
    assert!(!is_too_wide(&"ü".repeat(100)));
}

/// The lines that `breaks` a rule, each with its number, by file.
fn lines_with(breaks: fn(&str) -> bool) -> super::Broken {
    let mut broken = super::Broken::new();
    for path in super::files(&ENDINGS) {
        let file = path.display().to_string();
        if EXEMPT.contains(&file.as_str()) {
            continue;
        }
        let text = fs::read_to_string(super::root().join(&path)).expect("a text");
        let lines = text.lines().enumerate().filter(|(_, line)| breaks(line));
        let lines: Vec<String> = lines
            .map(|(n, line)| format!("{}: {}", n + 1, line.trim()))
            .collect();
        if !lines.is_empty() {
            broken.insert(file, lines);
        }
    }
    broken
}

/// Rows of Markdown tables cannot be broken.
fn is_too_wide(line: &str) -> bool {
    line.chars().count() > WIDTH && !line.starts_with('|')
}

fn has_listed_word(line: &str) -> bool {
    // A comparison in Python, not a sentence.
    let line = line.replace("is None", "").to_lowercase();
    WORDS.iter().any(|word| {
        line.match_indices(word).any(|(at, _)| {
            let is_end = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
            is_end(line[..at].chars().next_back()) && is_end(line[at + word.len()..].chars().next())
        })
    })
}
