//! Tests that change their process.

use std::env;
use std::process::Command;

/// Runs the test of this name again, in a process of its own, where this variable has a value.
/// Returns whether this is that process.
pub(crate) fn is_alone(test: &str, marked: &str) -> bool {
    if env::var(marked).is_ok() {
        return true;
    }
    let mut again = Command::new(env::current_exe().unwrap());
    again.args([test, "--test-threads", "1"]);
    let done = again.env(marked, "a secret").status().unwrap();
    assert!(done.success());
    false
}
