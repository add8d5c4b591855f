//! What the machine must have for a test.

use std::io::Write;

/// Whether to skip a test because of something the machine lacks, `there` being false. Where tests must be complete (`CI` is set),
/// that is a failure.
pub fn lacks(what: &str, there: bool) -> bool {
    if !there {
        assert!(
            std::env::var_os("CI").is_none(),
            "{what} is missing, and CI is set"
        );
        // Not by `eprintln!`, whose output the test harness keeps to itself as long as nothing fails.
        let _ = writeln!(std::io::stderr(), "SKIPPED: {what} is missing");
    }
    !there
}

/// Whether a program of this name can be called.
pub fn has_program(name: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|directory| directory.join(name).exists())
    })
}
