//! A mount's process: how it starts, how it ends, and what it leaves. Tested with the example
//! `mount_erofs`, which does what `bcow mount` does.

mod support;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use bcow_testkit::{has_program, lacks, make_erofs, noise};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};
use support::*;
use tempfile::TempDir;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum User {
    Root,
    Ordinary,
}

/// An image and a mountpoint of one user, removed at the end of the test.
struct Place {
    directory: TempDir,
    user: User,
}

impl Place {
    /// `None` where nothing can be mounted.
    fn root() -> Option<Self> {
        (!lacks_mounts()).then(|| Place::new(User::Root))
    }

    /// The place of an ordinary user.
    fn user() -> Option<Self> {
        (!lacks_user_mounts()).then(|| Place::new(User::Ordinary))
    }

    fn new(user: User) -> Self {
        let directory = TempDir::new().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let place = Place { directory, user };
        let tree = place.at("tree");
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("file"), noise(1, 1_000_000)).unwrap();
        make_erofs(&tree, &place.at("image"), &[]);
        fs::set_permissions(place.at("image"), fs::Permissions::from_mode(0o644)).unwrap();
        // Run a copy, because ordinary users may not reach the build directory. Another process
        // copies: if a thread of this process started a child while the copy is open for writing,
        // the child would keep it open, and the kernel would refuse to execute it (ETXTBSY).
        let copied = Command::new("cp")
            .arg(program())
            .arg(place.at("mount_erofs"))
            .status();
        assert!(copied.unwrap().success());
        fs::create_dir(place.mountpoint()).unwrap();
        if user == User::Ordinary {
            chown(place.mountpoint(), Some(ORDINARY_USER), Some(ORDINARY_USER)).unwrap();
        }
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn mountpoint(&self) -> PathBuf {
        self.at("mnt")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.at("mount_erofs"));
        command
            .current_dir(self.directory.path())
            .args(arguments)
            .stdin(Stdio::null());
        if self.user == User::Ordinary {
            command.uid(ORDINARY_USER).gid(ORDINARY_USER);
        }
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Mounts in the background; the process that serves it.
    fn mount(&self) -> Daemon {
        let output = self.run(&["image", "mnt"]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(stderr(&output), "");
        Daemon::of(&self.at("mount_erofs"))
    }

    fn is_mounted(&self) -> bool {
        let list = fs::read_to_string("/proc/self/mounts").unwrap();
        list.contains(self.mountpoint().to_str().unwrap())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.mountpoint(), UnmountFlags::DETACH);
    }
}

/// The example's program, which `cargo test` builds along with the tests.
fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let target = test.parent().and_then(Path::parent).unwrap();
    let program = target.join("examples/mount_erofs");
    assert!(
        program.exists(),
        "{program:?} is missing; `cargo test -p bcow-fuse` builds it"
    );
    program
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A background process.
struct Daemon(Pid);

impl Daemon {
    /// The one process that runs `program`.
    fn of(program: &Path) -> Self {
        let mut found = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<i32>().ok())
            .filter(|id| fs::read_link(format!("/proc/{id}/exe")).is_ok_and(|exe| exe == program));
        let id = found.next().expect("the daemon runs");
        assert_eq!(found.next(), None, "more than one process");
        Daemon(Pid::from_raw(id).unwrap())
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.0, signal).unwrap();
    }

    fn runs(&self) -> bool {
        // A zombie does not run.
        fs::read_to_string(format!("/proc/{}/stat", self.0))
            .is_ok_and(|stat| !stat.contains(") Z ") && !stat.contains(") X "))
    }

    fn has_ended(&self) -> bool {
        eventually(|| !self.runs())
    }

    fn link(&self, name: &str) -> PathBuf {
        fs::read_link(format!("/proc/{}/{name}", self.0)).unwrap()
    }
}

fn eventually(mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

fn lacks_user_mounts() -> bool {
    lacks_mounts() || lacks("fusermount3", has_program("fusermount3"))
}

#[test]
fn daemon_holds_neither_terminal_nor_directory_nor_callers_files() {
    let Some(place) = Place::root() else { return };
    // A file that is open in the caller and would be inherited, such as a lock.
    let held = File::create(place.at("lock")).unwrap();
    rustix::io::fcntl_setfd(&held, rustix::io::FdFlags::empty()).unwrap();
    let daemon = place.mount();
    assert_eq!(daemon.link("cwd"), Path::new("/"));
    assert!(eventually(|| daemon.link("fd/2") == Path::new("/dev/null")));
    for descriptor in ["fd/0", "fd/1"] {
        assert_eq!(daemon.link(descriptor), Path::new("/dev/null"));
    }
    for entry in fs::read_dir(format!("/proc/{}/fd", daemon.0)).unwrap() {
        match fs::read_link(entry.unwrap().path()) {
            Ok(to) => assert_ne!(to, place.at("lock")),
            // It was closed meanwhile.
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound),
        }
    }
    let name = fs::read_to_string(format!("/proc/{}/comm", daemon.0)).unwrap();
    assert_eq!(name, "bcow\n");
    let session = rustix::process::getsid(Some(daemon.0)).unwrap();
    assert_eq!(session, daemon.0);
}

#[test]
fn daemon_ends_when_somebody_unmounts() {
    let Some(place) = Place::root() else { return };
    let daemon = place.mount();
    rustix::mount::unmount(place.mountpoint(), UnmountFlags::empty()).unwrap();
    assert!(daemon.has_ended());
}

#[test]
fn sigterm_and_sigint_unmount() {
    for signal in [Signal::TERM, Signal::INT] {
        let Some(place) = Place::root() else { return };
        let daemon = place.mount();
        daemon.signal(signal);
        assert!(daemon.has_ended());
        assert!(!place.is_mounted());
    }
}

#[test]
fn daemon_ignores_sighup() {
    let Some(place) = Place::root() else { return };
    let daemon = place.mount();
    daemon.signal(Signal::HUP);
    daemon.signal(Signal::HUP);
    assert!(fs::read(place.mountpoint().join("file")).is_ok());
    assert!(daemon.runs() && place.is_mounted());
}

#[test]
fn sigterm_lets_users_of_a_busy_mount_finish() {
    let Some(place) = Place::root() else { return };
    let daemon = place.mount();
    let mut file = File::open(place.mountpoint().join("file")).unwrap();
    daemon.signal(Signal::TERM);
    assert!(eventually(|| !place.is_mounted()));
    let mut content = Vec::new();
    file.read_to_end(&mut content).unwrap();
    assert_eq!(content, noise(1, 1_000_000));
    assert!(daemon.runs());
    drop(file);
    assert!(daemon.has_ended());
}

#[test]
fn second_sigterm_ends_a_busy_mount() {
    let Some(place) = Place::root() else { return };
    let daemon = place.mount();
    let file = File::open(place.mountpoint().join("file")).unwrap();
    daemon.signal(Signal::TERM);
    assert!(eventually(|| !place.is_mounted()));
    daemon.signal(Signal::TERM);
    assert!(daemon.has_ended());
    drop(file);
}

#[test]
fn ordinary_user_mounts_and_unmounts() {
    let Some(place) = Place::user() else { return };
    let daemon = place.mount();
    let output = Command::new("cat")
        .arg(place.mountpoint().join("file"))
        .uid(ORDINARY_USER)
        .gid(ORDINARY_USER)
        .output()
        .unwrap();
    assert_eq!(output.stdout, noise(1, 1_000_000));
    let status = Command::new("fusermount3")
        .arg("-u")
        .arg(place.mountpoint())
        .uid(ORDINARY_USER)
        .gid(ORDINARY_USER)
        .status()
        .unwrap();
    assert!(status.success());
    assert!(daemon.has_ended());

    let daemon = place.mount();
    daemon.signal(Signal::TERM);
    assert!(daemon.has_ended());
    assert!(!place.is_mounted());
}

#[test]
fn ordinary_user_is_told_why_not() {
    let Some(place) = Place::user() else { return };
    if !fs::read_to_string("/etc/fuse.conf")
        .is_ok_and(|text| text.lines().any(|line| line.trim() == "user_allow_other"))
    {
        let output = place.run(&["-o", "allow_other", "image", "mnt"]);
        assert!(stderr(&output).contains("user_allow_other"));
        assert_eq!(output.status.code(), Some(1));
    }
    for option in ["dev", "suid"] {
        let output = place.run(&["-o", option, "image", "mnt"]);
        assert!(stderr(&output).contains("RootOnly"), "{}", stderr(&output));
        assert_eq!(output.status.code(), Some(1));
    }
    let foreign = place.at("foreign");
    fs::create_dir(foreign).unwrap();
    let output = place.run(&["image", "foreign"]);
    assert!(
        stderr(&output).contains("no write access"),
        "{}",
        stderr(&output)
    );
    assert!(!place.is_mounted());
}

#[test]
fn mount_takes_the_place_of_one_whose_daemon_was_killed() {
    if lacks_user_mounts() {
        return;
    }
    for user in [User::Root, User::Ordinary] {
        let place = Place::new(user);
        let daemon = place.mount();
        daemon.signal(Signal::KILL);
        assert!(daemon.has_ended());
        let error = fs::read_dir(place.mountpoint()).err();
        assert!(error.is_some(), "the dead mount is in the way");
        let daemon = place.mount();
        daemon.signal(Signal::TERM);
        assert!(daemon.has_ended());
        assert!(!place.is_mounted());
    }
}
