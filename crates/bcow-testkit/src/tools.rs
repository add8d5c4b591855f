//! Checks for tools and features of the machine that a test needs.

use std::io::Write;
use std::path::Path;
use std::process::Command;

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

/// Whether to skip a test that makes images with owners and devices by mkfs.erofs.
pub fn lacks_mkfs() -> bool {
    lacks("root", rustix::process::geteuid().is_root())
        || lacks("mkfs.erofs", has_program("mkfs.erofs"))
}

/// Makes the EROFS image of a tree with mkfs.erofs, with extended attributes.
pub fn make_erofs(tree: &Path, image: &Path, arguments: &[&str]) {
    let output = Command::new("mkfs.erofs")
        .args(["--quiet", "-x1"])
        .args(arguments)
        .args([image, tree])
        .output()
        .expect("mkfs.erofs starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "mkfs.erofs: {errors}");
}
