//! A directory to work in, the command to run there, archives made byte by byte, and images of
//! them.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use bcow_testkit::tar;
use rustix::process::{getegid, geteuid};
use serde_json::json;

/// A directory of its own for one test. Commands run in it, so messages show bare file names.
pub struct Sandbox(tempfile::TempDir);

impl Sandbox {
    /// An empty one.
    pub fn new() -> Self {
        Sandbox(tempfile::tempdir().unwrap())
    }

    /// One with `image.bcow`, made of [`sample`] with stable block sizes.
    pub fn with_image() -> Self {
        Sandbox::with_image_of(&sample())
    }

    /// The same, and the files that belong to root in [`sample`] belong to the user who runs the
    /// tests. Only a file's owner may change it in a mount.
    pub fn with_own_image() -> Self {
        let owner = (geteuid().as_raw(), getegid().as_raw());
        Sandbox::with_image_of(&sample_of(owner))
    }

    fn with_image_of(archive: &[u8]) -> Self {
        let sandbox = Sandbox::new();
        sandbox.write("sample.tar", archive);
        sandbox.ok(&words(
            "convert --compress=none --block-size=4K tar:sample.tar image.bcow",
        ));
        sandbox
    }

    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// Names in the directory, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.0.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Opens the sandbox to other users, and puts a copy of the program into it, as the build
    /// directory may be closed to them. Another process copies: a child of another thread could
    /// inherit this process's descriptor of the copy, and a program that is open for writing
    /// cannot be executed.
    pub fn open_to_others(&self) {
        fs::set_permissions(self.path(""), fs::Permissions::from_mode(0o755)).unwrap();
        let copied = Command::new("cp")
            .args([env!("CARGO_BIN_EXE_bcow"), "bcow"])
            .current_dir(self.0.path())
            .status();
        assert!(copied.unwrap().success());
    }

    /// The program that [`Sandbox::open_to_others`] copied, run by another user.
    pub fn command_as<S: AsRef<OsStr>>(&self, user: u32, args: &[S]) -> Command {
        let mut command = Command::new("./bcow");
        command.args(args).current_dir(self.0.path());
        command.uid(user).gid(user).stdin(Stdio::null());
        command
    }

    /// The command, not yet started: nothing of the caller's environment shows in what it says.
    pub fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bcow"));
        command
            .args(args)
            .current_dir(self.0.path())
            .stdin(Stdio::null());
        for name in [
            "BCOW_LOG",
            "BCOW_STORE",
            "COLUMNS",
            "NO_COLOR",
            "SOURCE_DATE_EPOCH",
            "RUST_BACKTRACE",
        ] {
            command.env_remove(name);
        }
        command
    }

    pub fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs what must succeed; gives its standard output.
    pub fn ok<S: AsRef<OsStr>>(&self, args: &[S]) -> Vec<u8> {
        let output = self.run(args);
        assert!(
            output.status.success(),
            "{}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        output.stdout
    }

    pub fn all_shown(&self, commands: &[&[&str]]) -> String {
        let shown: Vec<String> = commands.iter().map(|args| self.shown(args)).collect();
        shown.join("\n")
    }

    /// The JSON document that a command prints.
    pub fn json(&self, args: &[&str]) -> serde_json::Value {
        serde_json::from_slice(&self.ok(args)).unwrap()
    }

    /// Runs, and shows all there is to see.
    pub fn shown(&self, args: &[&str]) -> String {
        show(args, &self.run(args))
    }

    /// Puts an image of these archives into the OCI layout `directory`.
    pub fn layout(&self, directory: &str, name: &str, archives: &[&str]) {
        let blobs = self.path(directory).join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let blob = |media_type: &str, bytes: &[u8]| {
            let digest = bcow_oci::Digest::of(bytes);
            fs::write(blobs.join(digest.hex()), bytes).unwrap();
            json!({"mediaType": media_type, "digest": digest.to_string(), "size": bytes.len()})
        };
        let layers: Vec<_> = archives
            .iter()
            .map(|archive| {
                blob(
                    "application/vnd.oci.image.layer.v1.tar",
                    &self.read(archive),
                )
            })
            .collect();
        let diff_ids: Vec<_> = layers.iter().map(|layer| &layer["digest"]).collect();
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = blob(
            "application/vnd.oci.image.config.v1+json",
            config.to_string().as_bytes(),
        );
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        let mut manifest = blob(
            "application/vnd.oci.image.manifest.v1+json",
            manifest.to_string().as_bytes(),
        );
        manifest["annotations"] = json!({"org.opencontainers.image.ref.name": name});
        let index = json!({"schemaVersion": 2, "manifests": [manifest]});
        self.write(
            &format!("{directory}/index.json"),
            index.to_string().as_bytes(),
        );
        self.write(
            &format!("{directory}/oci-layout"),
            br#"{"imageLayoutVersion":"1.0.0"}"#,
        );
    }

    /// Runs a shell script in a mount namespace of its own, with the command and `args` as its
    /// arguments. `None` if the host cannot do that, or if the script ends with status 99.
    pub fn in_namespace(&self, script: &str, args: &[&str]) -> Option<Output> {
        let mut unshare = Command::new("unshare");
        unshare.arg("--mount");
        if !is_root() {
            unshare.arg("--map-root-user");
        }
        let output = unshare
            .args(["sh", "-c", script, "sh", env!("CARGO_BIN_EXE_bcow")])
            .args(args)
            .current_dir(self.0.path())
            .output();
        let reason = match output {
            Ok(output) => {
                let error = String::from_utf8_lossy(&output.stderr).into_owned();
                match output.status.code() {
                    // unshare fails with status 1 too, but without a message of bcow.
                    Some(1) if !error.contains("error: ") => error,
                    Some(99) => error,
                    _ => return Some(output),
                }
            }
            Err(error) => error.to_string(),
        };
        missing("a mount namespace", &reason);
        None
    }

    /// Overwrites bytes of a file.
    pub fn patch(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = self.read(name);
        change(&mut bytes);
        self.write(name, &bytes);
    }

    /// Damages a byte of `usr/bin/su` of [`sample`], which is `usr/bin/sudo` too, in a file that
    /// stores blocks as they are.
    pub fn damage_su(&self, name: &str, offset: usize) {
        self.patch(name, |bytes| {
            let needle = &noise(10_000)[offset..offset + 64];
            let at = bytes.windows(64).position(|window| window == needle);
            bytes[at.unwrap()] ^= 0x40;
        });
    }
}

/// The arguments of a command line, none of which has a space in it.
pub fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// Command line, outputs and exit status as one text.
pub fn show(args: &[&str], output: &Output) -> String {
    let mut text = format!("$ bcow {}\n", args.join(" "));
    text += &String::from_utf8_lossy(&output.stdout);
    if !output.stderr.is_empty() {
        text += "--- stderr\n";
        text += &String::from_utf8_lossy(&output.stderr);
    }
    match (output.status.code(), output.status.signal()) {
        (Some(code), _) => writeln!(text, "--- exit status {code}").unwrap(),
        (_, signal) => writeln!(text, "--- signal {signal:?}").unwrap(),
    }
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// Compares with a snapshot, with everything filtered out that may change.
macro_rules! snapshot {
    ($text:expr, @$expected:literal) => {
        $crate::support::settings().bind(|| insta::assert_snapshot!($text, @$expected))
    };
    ($text:expr) => {
        $crate::support::settings().bind(|| insta::assert_snapshot!($text))
    };
    ($name:expr, $text:expr) => {
        $crate::support::settings().bind(|| insta::assert_snapshot!($name, $text))
    };
}
pub(crate) use snapshot;

pub fn settings() -> insta::Settings {
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(true);
    settings.set_omit_expression(true);
    settings.add_filter(r"sha256:[0-9a-f]{64}", "sha256:[DIGEST]");
    settings.add_filter(r#""[0-9a-f]{64}""#, "\"[DIGEST]\"");
    settings.add_filter(
        r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        "[UUID]",
    );
    settings.add_filter(r#""crc32c":"[0-9a-f]{8}""#, "\"crc32c\":\"[CRC]\"");
    settings.add_filter(r"0x[0-9a-f]{8}", "[CRC]");
    settings.add_filter(r"\([0-9a-f]{12}\)", "([IDENTITY])");
    settings.add_filter(r"bcow \d+\.\d+\.\d+", "bcow [VERSION]");
    settings.add_filter(
        r#""version": "\d+\.\d+\.\d+""#,
        "\"version\": \"[VERSION]\"",
    );
    settings
}

/// A tar archive in the making.
#[derive(Default)]
pub struct Tar {
    tar: tar::Tar,
    /// Who has the entries of user or group 0.
    root: (u32, u32),
}

/// An entry's header.
#[derive(Clone, Copy)]
pub struct Entry<'a> {
    pub name: &'a [u8],
    pub kind: u8,
    pub mode: u32,
    pub owner: (u32, u32),
    pub time: &'a str,
    pub target: &'a [u8],
    pub device: (u32, u32),
    pub xattrs: &'a [(&'a str, &'a [u8])],
    pub data: &'a [u8],
}

impl Default for Entry<'_> {
    fn default() -> Self {
        Entry {
            name: b"",
            kind: b'0',
            mode: 0o644,
            owner: (0, 0),
            time: "1700000000.25",
            target: b"",
            device: (0, 0),
            xattrs: &[],
            data: b"",
        }
    }
}

impl Tar {
    pub fn new() -> Self {
        Tar::default()
    }

    pub fn add(mut self, entry: Entry<'_>) -> Self {
        let mut records = vec![("mtime".to_owned(), entry.time.as_bytes())];
        let xattrs = entry.xattrs.iter();
        records.extend(xattrs.map(|&(name, value)| (format!("SCHILY.xattr.{name}"), value)));
        let or_root = |id, root| u64::from(if id == 0 { root } else { id });
        let mut header = tar::Header::new(entry.name, entry.kind).link(entry.target);
        header.size = entry.data.len() as u64;
        header.mode = entry.mode;
        header.uid = or_root(entry.owner.0, self.root.0);
        header.gid = or_root(entry.owner.1, self.root.1);
        header.device = entry.device;
        self.tar = self.tar.pax(&records).entry(&header, entry.data);
        self
    }

    pub fn directory(self, name: &str) -> Self {
        self.add(Entry {
            name: name.as_bytes(),
            kind: b'5',
            mode: 0o755,
            ..Entry::default()
        })
    }

    pub fn file(self, name: &str, data: &[u8]) -> Self {
        self.add(Entry {
            name: name.as_bytes(),
            data,
            ..Entry::default()
        })
    }

    pub fn symlink(self, name: &str, target: &str) -> Self {
        self.add(Entry {
            name: name.as_bytes(),
            kind: b'2',
            mode: 0o777,
            target: target.as_bytes(),
            ..Entry::default()
        })
    }

    pub fn hardlink(self, name: &str, target: &str) -> Self {
        self.add(Entry {
            name: name.as_bytes(),
            kind: b'1',
            target: target.as_bytes(),
            ..Entry::default()
        })
    }

    /// A file whose name is too long for the header.
    pub fn long(mut self, name: &str, data: &[u8]) -> Self {
        self.tar = self.tar.pax(&[("path", name)]).file("long", data);
        self
    }

    /// A file in GNU tar's sparse format 1.0: `records` say so, `data` begins with the map.
    pub fn sparse(mut self, name: &str, records: &[(&str, &str)], data: &[u8]) -> Self {
        self.tar = self.tar.pax(records).file(name, data);
        self
    }

    pub fn finish(self) -> Vec<u8> {
        self.tar.done()
    }
}

/// Bytes that do not compress, the same each time.
pub fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

/// A small root file system with something of everything that needs no privilege to convert.
pub fn sample() -> Vec<u8> {
    sample_of((0, 0))
}

/// [`sample`], with root's entries given to another user and group.
fn sample_of(root: (u32, u32)) -> Vec<u8> {
    let archive = Tar {
        root,
        ..Tar::default()
    };
    archive
        .directory("./")
        .file(".hidden", b"hidden\n")
        .symlink("bin", "usr/bin")
        .directory("dev/")
        .add(Entry {
            name: b"dev/null",
            kind: b'3',
            mode: 0o666,
            device: (1, 3),
            ..Entry::default()
        })
        .directory("etc/")
        .file("etc/motd", b"Welcome.\n")
        .file("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
        .symlink("etc/outside", "../../../etc/motd")
        .symlink("etc/loop", "loop")
        .add(Entry {
            name: b"etc/odd \x1b[31m\nname\xff",
            data: b"odd\n",
            ..Entry::default()
        })
        .add(Entry {
            name: b"pipe",
            kind: b'6',
            mode: 0o600,
            ..Entry::default()
        })
        .directory("usr/")
        .directory("usr/bin/")
        .add(Entry {
            name: b"usr/bin/su",
            mode: 0o4755,
            owner: (0, 42),
            time: "1600000000.123456789",
            xattrs: &[("user.note", b"\x00\n\xff")],
            data: &noise(10_000),
            ..Entry::default()
        })
        .hardlink("usr/bin/sudo", "usr/bin/su")
        .directory("var/")
        .file("var/data", &noise(100_000))
        .file("var/same", &noise(100_000))
        .file("var/zeros", &[0; 300_000])
        .finish()
}

/// A requirement that is not there: a visible skip at home, a failure in CI, which must have it.
pub fn missing(what: &str, why: &dyn std::fmt::Display) {
    bcow_testkit::lacks(&format!("{what} ({why})"), false);
}

/// Whether the tests run as root.
pub fn is_root() -> bool {
    geteuid().is_root()
}
