//! Checks for tools and features of the machine that a test needs.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Whether to skip a test because the machine lacks `what`; `there` says whether it has it. If `CI`
/// is set, a lack is a failure.
pub fn lacks(what: &str, there: bool) -> bool {
    lacks_on(std::env::var_os("CI").is_some(), what, there)
}

/// The same on a machine of continuous integration, or on another one.
fn lacks_on(ci: bool, what: &str, there: bool) -> bool {
    if !there {
        assert!(!ci, "{what} is missing, and CI is set");
        // Not with `eprintln!`: the test harness captures its output unless a test fails.
        let _ = writeln!(std::io::stderr(), "SKIPPED: {what} is missing");
    }
    !there
}

/// Whether a program of this name is in the search path, or where Debian keeps those of root.
pub fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let root = ["/usr/sbin".into(), "/sbin".into()];
    std::env::split_paths(&path)
        .chain(root)
        .any(|directory| directory.join(name).is_file())
}

/// Whether to skip a test that makes images with owners and devices by mkfs.erofs.
pub fn lacks_mkfs() -> bool {
    lacks("root", rustix::process::geteuid().is_root())
        || lacks("mkfs.erofs", has_program("mkfs.erofs"))
}

/// Whether to skip a test because the file system of temporary files does not report preallocated
/// space as data after a read of it.
pub fn lacks_reports_of_preallocated_space() -> bool {
    const EXT4: i64 = 0xef53;
    const XFS: i64 = 0x5846_5342;
    let host = rustix::fs::statfs(std::env::temp_dir()).expect("the directory exists");
    lacks("ext4 or xfs", [EXT4, XFS].contains(&host.f_type))
}

/// Runs a program, which must succeed. Returns its standard output.
pub fn run(command: &mut Command) -> String {
    let output = command.output().expect("a program");
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Makes the EROFS image of a tree with mkfs.erofs, with extended attributes.
pub fn make_erofs(tree: &Path, image: &Path, arguments: &[&str]) {
    run(Command::new("mkfs.erofs")
        .args(["--quiet", "-x1"])
        .args(arguments)
        .args([image, tree]));
}

/// Unmounts what a test has mounted at `at`.
///
/// Between its fork and its exec, a program that another thread of the test starts has all files
/// that are open in the mount. So the command is repeated while the mount is busy.
pub fn umount(at: &Path) {
    let start = Instant::now();
    loop {
        let ended = Command::new("umount")
            .arg(at)
            .output()
            .expect("umount runs");
        let message = String::from_utf8_lossy(&ended.stderr);
        if ended.status.success() {
            return;
        }
        let may_pass = message.contains("busy") && start.elapsed() < Duration::from_secs(60);
        assert!(may_pass, "{}: {message}", at.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_a_skip_and_with_ci_a_failure() {
        let missing = has_program("no-program-has-this-name");
        assert!(lacks_on(false, "a tool, for the test of skips,", missing));
        assert!(!lacks_on(true, "a tool", has_program("sh")));
        let failure = std::panic::catch_unwind(|| lacks_on(true, "a tool", missing)).unwrap_err();
        let text = failure.downcast_ref::<String>().expect("a message");
        assert_eq!(text, "a tool is missing, and CI is set");
    }
}
