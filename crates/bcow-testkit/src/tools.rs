//! Checks for tools and features of the machine that a test needs.

use std::io::Write;

/// Whether to skip a test because the machine lacks `what`; `there` says whether it has it. If `CI`
/// is set, a lack is a failure.
pub fn lacks(what: &str, there: bool) -> bool {
    if !there {
        assert!(
            std::env::var_os("CI").is_none(),
            "{what} is missing, and CI is set"
        );
        // Not with `eprintln!`: the test harness captures its output unless a test fails.
        let _ = writeln!(std::io::stderr(), "SKIPPED: {what} is missing");
    }
    !there
}

/// Whether a program of this name is in the search path.
pub fn has_program(name: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|directory| directory.join(name).exists())
    })
}
