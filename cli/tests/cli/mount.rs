//! `bcow mount` and `bcow umount` on real mounts. What a mount promises in detail is tested in
//! `bcow-fuse`.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Sandbox, is_root, missing, noise, snapshot};

/// An image, and `mnt` to mount it on. Unmounts, however the test ends.
pub struct Place(pub Sandbox);

impl Place {
    /// `None` where nothing can be mounted.
    pub fn new() -> Option<Self> {
        if let Err(error) = fs::File::options().read(true).write(true).open("/dev/fuse") {
            missing("/dev/fuse", &error);
            return None;
        }
        let sandbox = Sandbox::with_own_image();
        fs::create_dir(sandbox.path("mnt")).unwrap();
        Some(Place(sandbox))
    }

    /// Makes `layer.bcow` with the file `new`, a layer over the image.
    pub fn commit_layer(&self) {
        fs::create_dir(self.0.path("changes")).unwrap();
        self.0.write("changes/new", b"new\n");
        let commit = ["commit", "image.bcow", "--upper=changes", "layer.bcow"];
        self.0.ok(&commit);
    }

    pub fn file(&self, name: &str) -> std::path::PathBuf {
        self.0.path("mnt").join(name)
    }

    /// Unmounts. A process that another test is just starting has our open files until it executes
    /// its program. So the mount may be in use for a moment: on a loaded machine, for longer than
    /// `bcow umount` tries.
    pub fn unmounted(&self) -> String {
        let start = Instant::now();
        loop {
            let shown = self.0.shown(&["umount", "mnt"]);
            if !shown.contains("is in use") || start.elapsed() > Duration::from_secs(60) {
                return shown;
            }
        }
    }

    fn foreground(&self) -> Child {
        let child = self
            .0
            .command(&["mount", "-f", "image.bcow", "mnt"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while !self.file("etc").exists() {
            assert!(start.elapsed() < Duration::from_secs(120), "not mounted");
            std::thread::sleep(Duration::from_millis(5));
        }
        child
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        if mounts.contains(self.0.path("mnt").to_str().unwrap()) {
            self.0.run(&["umount", "--lazy", "mnt"]);
        }
    }
}

#[test]
fn mounted_image_can_be_read_until_it_is_unmounted() {
    let Some(place) = Place::new() else { return };
    for options in ["--verify=checksums", "--verify=merkle"] {
        assert_eq!(
            place.0.shown(&["mount", options, "image.bcow", "mnt"]),
            format!("$ bcow mount {options} image.bcow mnt\n--- exit status 0\n")
        );
        assert_eq!(fs::read(place.file("etc/motd")).unwrap(), b"Welcome.\n");
        assert_eq!(fs::read(place.file("var/data")).unwrap(), noise(100_000));
        assert_eq!(fs::read(place.file("var/zeros")).unwrap(), vec![0; 300_000]);
        let su = fs::symlink_metadata(place.file("usr/bin/su")).unwrap();
        assert_eq!((su.mode(), su.gid(), su.nlink()), (0o104_755, 42, 2));
        assert_eq!(
            su.ino(),
            fs::symlink_metadata(place.file("bin/sudo")).unwrap().ino()
        );
        assert_eq!(place.unmounted(), "$ bcow umount mnt\n--- exit status 0\n");
        assert!(!place.file("etc").exists());
    }
}

#[test]
fn failed_mount_has_a_reason() {
    let Some(place) = Place::new() else { return };
    place.0.write("text", b"no image");
    let mut shown: Vec<_> = ["missing.bcow", "mnt", "text"]
        .map(|image| place.0.shown(&["mount", image, "mnt"]))
        .into();
    place.0.ok(&["mount", "image.bcow", "mnt"]);
    let others = [
        &["mount", "image.bcow", "missing"][..],
        &["mount", "image.bcow", "text"],
        &["mount", "image.bcow", "mnt"],
        &["mount", "-o", "ro,surprise", "image.bcow", "mnt"],
        &["mount", "-o", "rw", "image.bcow", "mnt"],
        &["mount", "-o", "subtype=other", "image.bcow", "mnt"],
        &["mount", "-o", "fsname=", "image.bcow", "mnt"],
        &["mount", "--threads=0", "image.bcow", "mnt"],
    ];
    shown.extend(others.iter().map(|args| place.0.shown(args)));
    snapshot!(shown.join("\n"));
}

#[test]
fn umount_touches_nothing_but_images() {
    let Some(place) = Place::new() else { return };
    place.0.write("file", b"");
    let shown: Vec<_> = [
        &["umount", "mnt"][..],
        &["umount", "file"],
        &["umount", "missing"],
        &["umount", "/proc"],
    ]
    .into_iter()
    .map(|args| place.0.shown(args))
    .collect();
    snapshot!(shown.join("\n"));
}

#[test]
fn busy_mount_is_left_alone_unless_lazy() {
    let Some(place) = Place::new() else { return };
    place.0.ok(&["mount", "image.bcow", "mnt"]);
    let mut file = fs::File::open(place.file("var/data")).unwrap();
    if is_root() {
        let refused = place.0.shown(&["umount", "mnt"]);
        let used = format!("process {} (", std::process::id());
        assert!(
            refused.contains(&used) && refused.contains("uses "),
            "{refused}"
        );
        let of_file = format!("uses {}\n", place.file("var/data").display());
        assert!(refused.contains(&of_file), "{refused}");
        // A mount inside it is named too, also one of the same file system.
        let inside = place.file("etc");
        rustix::mount::mount_bind(place.file("var"), &inside).unwrap();
        let again = place.0.shown(&["umount", "mnt"]);
        rustix::mount::unmount(&inside, rustix::mount::UnmountFlags::empty()).unwrap();
        let named = format!("another file system is mounted at {}\n", inside.display());
        assert!(again.contains(&named), "{again}");
        let lines = refused
            .lines()
            .filter(|line| !line.contains("caused by: process"));
        snapshot!(lines.collect::<Vec<_>>().join("\n"));
    }
    place.0.ok(&["umount", "--lazy", "mnt"]);
    assert!(!place.file("etc").exists());
    let mut content = Vec::new();
    file.read_to_end(&mut content).unwrap();
    assert_eq!(content, noise(100_000));
}

#[test]
fn foreground_ends_on_signal_and_on_umount() {
    let Some(place) = Place::new() else { return };
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut child = place.foreground();
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert!(child.wait().unwrap().success());
        assert!(!place.file("etc").exists());
    }
    let mut child = place.foreground();
    assert!(place.unmounted().ends_with("status 0\n"));
    assert!(child.wait().unwrap().success());
    let mut text = String::new();
    child.stderr.unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "image.bcow is mounted at mnt\n");
}

#[test]
fn mount_of_a_disk_over_an_image_says_how_to_make_a_writable_one() {
    let Some(place) = Place::new() else { return };
    place
        .0
        .ok(&["create", "-q", "-b", "image.bcow", "disk.bcow"]);
    let shown = place.0.shown(&["mount", "disk.bcow", "mnt"]);
    let hint = "hint: the mount is read-only: the disk shows an image. `bcow create -b IMG --fs";
    assert!(shown.contains(hint), "{shown}");
    let shown = place.unmounted();
    assert!(shown.ends_with("--- exit status 0\n"), "{shown}");
}
