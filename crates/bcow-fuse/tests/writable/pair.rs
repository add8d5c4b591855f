//! A mount and a plain directory, for the same scripts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use bcow_fuse::stats::{Document, STATS_XATTR};
use bcow_testkit::{has_program, lacks, noise};
use tempfile::TempDir;

use crate::support::{Mounted, Sample, lacks_mounts, open_the_way_to, set_xattr};

/// cap_net_raw=ep, as setcap writes it.
const CAPABILITY: [u8; 20] = [
    1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// A mount with an upper, and a plain directory that holds the same.
pub struct Pair {
    sample: Sample,
    upper: TempDir,
    mounted: Mounted,
}

impl Pair {
    /// `None` if this machine cannot mount.
    pub fn new(options: &str) -> Option<Self> {
        if lacks_mounts() {
            return None;
        }
        let sample = Sample::with(&[], |tree| {
            for name in ["file", "other", "d/inner"] {
                let path = tree.join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(&path, noise(1, 5000)).unwrap();
            }
            for (name, size) in [("capable", 9000), ("capable-and-large", 300_000)] {
                fs::write(tree.join(name), noise(2, size)).unwrap();
                set_xattr(&tree.join(name), "security.capability", &CAPABILITY);
            }
            fs::set_permissions(tree, fs::Permissions::from_mode(0o777)).unwrap();
        });
        let around = fs::Permissions::from_mode(0o755);
        fs::set_permissions(sample.directory(), around).unwrap();
        Some(Pair::mount(sample, TempDir::new().unwrap(), options))
    }

    /// With access for all users and with set-id bits. `None` also if this machine lacks what the
    /// scripts for that call.
    pub fn suid() -> Option<Self> {
        if lacks_tools() {
            return None;
        }
        Pair::new("allow_other,suid")
    }

    /// One without and one with the kernel's write-back cache, and the options of each.
    pub fn with_each_cache() -> impl Iterator<Item = (&'static str, Self)> {
        let both = ["", "writeback"].into_iter();
        both.filter_map(|options| Some((options, Pair::new(options)?)))
    }

    fn mount(sample: Sample, upper: TempDir, options: &str) -> Self {
        let mounted = Mounted::writable(sample.open(), upper.path(), options);
        open_the_way_to(mounted.path());
        Pair {
            sample,
            upper,
            mounted,
        }
    }

    /// Unmounts and mounts again. A process that another test is just starting has our open files
    /// until it executes its program, so the mount may be in use for a moment.
    pub fn again(self, options: &str) -> Self {
        let start = Instant::now();
        loop {
            match bcow_fuse::unmount(self.root(), bcow_fuse::WhenBusy::Fail) {
                Err(bcow_fuse::MountError::Busy(_))
                    if start.elapsed() < Duration::from_secs(60) =>
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
                unmounted => break unmounted.map(drop).unwrap(),
            }
        }
        self.mounted.ended().unwrap();
        Pair::mount(self.sample, self.upper, options)
    }

    /// Where it is mounted.
    pub fn root(&self) -> &Path {
        self.mounted.path()
    }

    /// A path in the mount.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    pub fn upper(&self) -> &Path {
        self.upper.path()
    }

    pub fn both(&self) -> [PathBuf; 2] {
        [self.sample.tree(), self.root().to_owned()]
    }

    /// Runs a script in both directories. Asserts that the outputs are equal and not empty.
    pub fn same(&self, script: &str) {
        let [plain, mounted] = self.both().map(|directory| run(script, &directory));
        assert_eq!(plain, mounted, "{script}");
        assert!(
            !plain.is_empty() && !plain.contains("Traceback"),
            "{script}: {plain}"
        );
    }

    pub fn statistics(&self) -> Document {
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::getxattr(self.root(), STATS_XATTR, &mut value).unwrap();
        serde_json::from_slice(&value[..length]).unwrap()
    }

    /// The statistics once they are as wanted: a request is counted shortly after it was answered.
    pub fn statistics_with(&self, wanted: impl Fn(&Document) -> bool) -> Document {
        let start = Instant::now();
        loop {
            let document = self.statistics();
            if wanted(&document) {
                return document;
            }
            assert!(start.elapsed().as_secs() < 10, "{document:?}");
        }
    }
}

/// The number of requests of a kind.
pub fn count(document: &Document, operation: &str) -> u64 {
    let mut all = document.operations.iter();
    let found = all.find(|one| one.operation == operation);
    found.map_or(0, |one| one.count)
}

/// Runs a shell script in a directory and returns its output. In the script, `as_user COMMAND` runs
/// a command as an ordinary user.
pub fn run(script: &str, directory: &Path) -> String {
    let prelude =
        "umask 022; as_user() { setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"; }\n";
    let output = Command::new("sh")
        .args(["-c", &format!("{prelude}{script}")])
        .current_dir(directory)
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    format!("{}{error}", String::from_utf8_lossy(&output.stdout))
}

/// Whether to skip a test that needs Python.
pub fn lacks_python() -> bool {
    lacks("python3", Path::new("/usr/bin/python3").exists())
}

/// Whether to skip a test that changes permissions as several users.
pub fn lacks_tools() -> bool {
    ["setpriv", "setfacl", "setfattr"]
        .iter()
        .any(|name| lacks(name, has_program(name)))
}
