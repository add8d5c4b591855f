//! What the host does to the command: full disks, signals, standard output that cannot be written.

use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Sandbox, Tar, noise, show, snapshot};

/// Runs the command where `small` is a disk of 64 KiB of its own.
fn with_small_disk(sandbox: &Sandbox, args: &[&str]) -> Option<std::process::Output> {
    std::fs::create_dir_all(sandbox.path("small")).unwrap();
    let script = "mount -t tmpfs -o size=64k tmpfs small || exit 99; \
                  \"$@\"; code=$?; ls -A small; exit $code";
    sandbox.in_namespace(script, args)
}

#[test]
fn full_disk() {
    let sandbox = Sandbox::with_image();
    let mut shown = String::new();
    for args in [
        &["convert", "--compress=none", "sample.tar", "small/new.bcow"][..],
        &["export", "image.bcow", "--to=raw", "-o", "small/new.raw"],
        &["extract", "--no-xattrs", "image.bcow", "var", "small/new"],
    ] {
        let Some(output) = with_small_disk(&sandbox, args) else {
            return;
        };
        shown += &show(args, &output);
    }
    snapshot!(shown, @r"
    $ bcow convert --compress=none sample.tar small/new.bcow
    --- stderr
    error: cannot write small/new.bcow
      caused by: No space left on device
    hint: free space in small; the incomplete file was removed
    --- exit status 1
    $ bcow export image.bcow --to=raw -o small/new.raw
    --- stderr
    error: cannot write small/new.raw
      caused by: No space left on device
    --- exit status 1
    $ bcow extract --no-xattrs image.bcow var small/new
    --- stderr
    error: cannot write small/new/data
      caused by: No space left on device
    --- exit status 1
    ");
}

#[test]
fn disk_with_records_on_a_full_disk() {
    let sandbox = Sandbox::new();
    let vector = "../fixtures/vectors/valid/log-two-records.bcow";
    let vector = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(vector);
    sandbox.write("disk.bcow", &std::fs::read(vector).unwrap());
    std::fs::create_dir_all(sandbox.path("small")).unwrap();
    let script = "mount -t tmpfs -o size=64k tmpfs small || exit 99; \
                  cp disk.bcow small; cat /dev/zero > small/fill 2> fill.log; \"$@\"";
    let args = ["resize", "small/disk.bcow", "+1M"];
    if let Some(output) = sandbox.in_namespace(script, &args) {
        let shown = show(&args, &output);
        assert!(shown.contains("cannot open small/disk.bcow"), "{shown}");
        assert!(shown.contains("No space left on device"), "{shown}");
        assert!(
            shown.contains("hint: after a crash, a disk needs free space"),
            "{shown}"
        );
    }
    let args = ["map", "small/disk.bcow"];
    if let Some(output) = sandbox.in_namespace(script, &args) {
        assert!(output.status.success(), "{}", show(&args, &output));
    }
}

#[test]
fn standard_output_on_a_full_disk() {
    let sandbox = Sandbox::with_image();
    for args in [
        &["ls", "image.bcow"][..],
        &["cat", "image.bcow", "var/data"],
        &["inspect", "--json", "image.bcow"],
        &["map", "image.bcow"],
        &["version"],
        &["completions", "zsh"],
    ] {
        let full = std::fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let output = sandbox.command(args).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert_eq!(
            String::from_utf8_lossy(&output.stderr),
            "error: cannot write to standard output\n  caused by: No space left on device\n",
        );
    }
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = sandbox
        .command(&["fsck", "image.bcow"])
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(8));
}

#[test]
fn interrupted_convert_ends_soon_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let mut child = sandbox
        .command(&["convert", "tar:-", "image.bcow"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The pipe stays open and quiet: the converter waits for more. It is converting, as no pipe
    // holds as much as it was given.
    let mut stdin = child.stdin.take().unwrap();
    let archive = Tar::new().file("noise", &noise(4 << 20)).finish();
    stdin.write_all(&archive[..2 << 20]).unwrap();
    let begin = Instant::now();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    assert!(begin.elapsed() < Duration::from_secs(60));
    assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
}
