//! Registry of the bcow processes that serve images and disks.
//!
//! Each such process keeps a sealed memory file (memfd_create(2)) that describes the served images.
//! Other processes find that file among the descriptors in /proc. So there is no directory to clean
//! and no daemon to ask: the memory file disappears with its process, however the process ends. The
//! memory file of a stopped process is readable. Only the user of the process and root can read its
//! descriptors, in any container.

use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use bcow::lock::held_locks;
use bcow_mount::{CLOSING, HiddenName};
use rustix::fs::{AtFlags, MemfdFlags, Mode, OFlags, SealFlags, StatxFlags};
use rustix::io::DupFlags;
use serde::{Deserialize, Serialize};

/// The name of the memory file, and its link in /proc.
const NAME: &str = "bcow-services";
const LINK: &str = "/memfd:bcow-services (deleted)";
/// Where the lock of an upper is.
pub const LOCK_IN_UPPER: &str = ".bcow/lock";
/// The schema of the document. bcow does not read later schemas.
const SCHEMA: &str = "bcow.services/1";
/// Limit of the document in bytes: that of a pool has an entry for each mount.
const MAX_BYTES: u64 = 16 << 20;
/// How long a mount can have no process that serves it.
const LONGEST_WAIT_FOR_A_PROCESS: Duration = Duration::from_secs(10);
/// The name of the process that keeps the descriptors of a pool, which are many. It serves nothing.
pub const SUPERVISOR: &CStr = c"bcow-supervisor";

/// Something that a process serves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Service {
    /// `mount`, `serve` or `attach`.
    pub kind: String,
    /// The image or disk.
    pub image: String,
    /// The layers on top of an image, the lowest first.
    pub layers: Vec<String>,
    /// The name under which clients ask for it, if there are several.
    pub export: Option<String>,
    /// The directory that takes changes.
    pub upper: Option<String>,
    /// Where clients reach it: mountpoint, sockets and addresses, or device.
    pub at: Vec<String>,
    /// `ro`, `rw` or `snapshot`.
    pub mode: String,
    /// Start time in seconds since 1970.
    pub since: u64,
    /// For a mount: its device number, in the form of the kernel. The number is unique on the
    /// machine as long as the mount exists. Then the kernel gives it to another mount, even if this
    /// process has not ended yet.
    pub device: Option<String>,
    /// For a mount that maps owners: how.
    pub owners: Option<String>,
    /// For a mount with the kernel driver: the descriptor of the process through which root reads
    /// the statistics.
    pub descriptor: Option<i32>,
    /// For a mount in a pool: the name of the pool, whose process has other mounts too.
    pub pool: Option<String>,
    /// For a disk or an upper: the abstract Unix socket on which the process takes requests for it.
    pub control: Option<String>,
    /// For a mount that the command line of its process can make again: the working directory of
    /// that command.
    pub directory: Option<String>,
    /// The parts of the sandbox of the process.
    pub sandbox: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Document {
    schema: String,
    services: Vec<Service>,
}

/// The list of services of this process, which other processes can read while this exists.
#[derive(Debug)]
pub struct Published {
    file: OwnedFd,
}

impl Published {
    /// Publishes other services. The list keeps its descriptor: other processes find one of the two
    /// lists at any time, and do not search that of a pool behind the descriptors of all mounts.
    ///
    /// # Errors
    ///
    /// The host has no memory or no descriptor for a further list; the old one stays.
    pub fn replace(&mut self, services: Vec<Service>) -> io::Result<()> {
        let list = memory_file(services)?;
        Ok(rustix::io::dup3(&list, &mut self.file, DupFlags::CLOEXEC)?)
    }
}

/// A process that serves something.
#[derive(Debug, Clone)]
pub struct Server {
    /// Its number, as this process sees it.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    pub state: ProcessState,
    /// Whether the process is in another mount namespace than this process, so that its paths may
    /// mean other files here.
    pub is_in_other_namespace: bool,
    /// The images and disks that it serves.
    pub services: Vec<Service>,
}

impl Service {
    fn is_at(&self, path: &Path) -> bool {
        self.at.iter().any(|at| Path::new(at) == path)
    }
}

impl Server {
    /// The mount at `path` with this device number, if the process serves it. A mount that ends
    /// may have lost the number to another mount, at another path.
    pub fn mount(&self, device: &str, path: &Path) -> Option<&Service> {
        let services = self.services.iter();
        let mut mounts = services.filter(|service| service.device.as_deref() == Some(device));
        match mounts.clone().find(|service| service.is_at(path)) {
            // The mount may have been moved.
            None if self.state != ProcessState::Ending => mounts.next(),
            found => found,
        }
    }

    /// Whether the process serves the mount at `path` with this device number.
    pub fn has_mount(&self, device: &str, path: &Path) -> bool {
        self.mount(device, path).is_some()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// It executes or waits for requests.
    Running,
    /// Its mount is gone, and it flushes its upper.
    Ending,
    /// A signal has stopped the process: the process does not answer.
    Stopped,
    /// It waits for a disk or another file system and cannot be interrupted.
    Blocked,
}

impl ProcessState {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            ProcessState::Running => "running",
            ProcessState::Ending => "ending",
            ProcessState::Stopped => "stopped",
            ProcessState::Blocked => "blocked",
        }
    }
}

/// A path that means the same to other processes.
pub fn absolute(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.to_string_lossy().into_owned()
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |elapsed| elapsed.as_secs())
}

/// Publishes the services of this process. Returns `None` if the host does not support it.
pub fn publish(services: Vec<Service>) -> Option<Published> {
    let file = memory_file(services).ok()?;
    Some(Published { file })
}

fn memory_file(services: Vec<Service>) -> io::Result<OwnedFd> {
    let document = Document {
        schema: SCHEMA.to_owned(),
        services,
    };
    let json = serde_json::to_vec(&document)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create(NAME, flags)?);
    file.write_all(&json)?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// All processes that serve something and that this user may look at, by their numbers.
pub fn servers() -> Vec<Server> {
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let Ok(device) = device_of_memory_files() else {
        return Vec::new();
    };
    let mut servers: Vec<Server> = processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| server(pid, device))
        .collect();
    servers.sort_by_key(|server| server.pid);
    servers
}

/// The process of this number, if it serves something and this user may look at it.
pub fn server_of(pid: u32) -> Option<Server> {
    server(pid, device_of_memory_files().ok()?)
}

/// The process that serves the mount with this device number at `path`.
pub fn server_of_mount(device: &str, path: &Path) -> Option<Server> {
    serving(servers(), device, path)
}

fn serving(servers: Vec<Server>, device: &str, path: &Path) -> Option<Server> {
    let mut servers: Vec<Server> = servers
        .into_iter()
        .filter(|server| server.has_mount(device, path))
        .collect();
    // A process may still list a mount that has ended, and whose number another mount has got.
    let has_path = |server: &Server| {
        server
            .mount(device, path)
            .is_some_and(|one| one.is_at(path))
    };
    let at = servers.iter().position(has_path).unwrap_or(0);
    (!servers.is_empty()).then(|| servers.swap_remove(at))
}

/// The state of the process with this number; `None` if no such process exists.
pub fn state(pid: u32) -> Option<ProcessState> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain any byte.
    let (before, behind) = stat.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    Some(match behind.trim_start().chars().next()? {
        'Z' | 'X' => return None,
        'T' | 't' => ProcessState::Stopped,
        _ if name.as_bytes() == CLOSING.to_bytes() => ProcessState::Ending,
        'D' => ProcessState::Blocked,
        _ => ProcessState::Running,
    })
}

/// Whether a thread of this process writes the remaining data of an unmounted mount to its upper.
/// In the process of a pool that is the thread of the mount.
pub fn has_closing_thread(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return false;
    };
    threads.flatten().any(|thread| {
        let name = std::fs::read(thread.path().join("comm"));
        name.is_ok_and(|name| name.trim_ascii_end() == CLOSING.to_bytes())
    })
}

/// The processes that took a flock(2) lock on the file at `path`, as far as this process can see
/// them. One that has ended, and has left the lock to another process, is not among them.
pub fn lock_holders(path: &Path) -> Vec<u32> {
    let Ok(metadata) = path.metadata() else {
        return Vec::new();
    };
    let device = metadata.dev();
    let place = format!(
        "{:02x}:{:02x}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device),
        metadata.ino()
    );
    let locks = held_locks();
    let holders = locks.iter().filter(|lock| lock.file == place);
    let pids: BTreeSet<u32> = holders.map(|lock| lock.pid).collect();
    pids.into_iter()
        .filter(|&pid| state(pid).is_some())
        .collect()
}

/// One line for each process that uses the disk at `path`, or the upper whose lock file is at
/// `path`.
pub fn describe_lock_holders(path: &Path) -> Vec<String> {
    let mut pids = lock_holders(path);
    if pids.is_empty() {
        // The process that took the lock may have left it to another one. And some file systems
        // have another device number in /proc/locks than their files have.
        pids = servers()
            .into_iter()
            .filter(|server| server.services.iter().any(|service| uses(service, path)))
            .map(|server| server.pid)
            .collect();
    }
    pids.into_iter()
        .filter(|&pid| pid != std::process::id())
        .map(describe)
        .collect()
}

/// The service of the process that takes requests for the disk at `path`, or for the upper with
/// this lock, among the processes of users for which `is_trusted` returns `true`.
pub fn service_with_control(path: &Path, is_trusted: impl Fn(u32) -> bool) -> Option<Service> {
    let among = |servers: Vec<Server>| {
        let trusted = servers
            .into_iter()
            .filter(|server| !server.is_in_other_namespace && is_trusted(server.uid));
        let mut services = trusted.flat_map(|server| server.services);
        services.find(|service| service.control.is_some() && uses(service, path))
    };
    // The process has locked the file. A search of all processes takes the longer the more there
    // are.
    let holders = lock_holders(path).into_iter().filter_map(server_of);
    among(holders.collect()).or_else(|| among(servers()))
}

/// The mount at `path`, whose links are resolved, and the number of its process, if that is of this
/// user or of root: any process can claim to have a mount. A mount is visible a moment before its
/// process says that it serves it, and so is a mount of a pool that gets its next process.
pub fn mount_at(path: &Path) -> Option<(u32, Service)> {
    let last_look = Instant::now() + LONGEST_WAIT_FOR_A_PROCESS;
    loop {
        let found = find_mount(path);
        if found.is_some() || Instant::now() > last_look || !is_mount_of_bcow(path) {
            return found;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a file system of bcow is mounted at `path`, with or without a process.
fn is_mount_of_bcow(path: &Path) -> bool {
    let device = |path: &Path| std::fs::metadata(path).map(|found| found.dev());
    let (Ok(number), Ok(mounts)) = (
        device(path),
        std::fs::read_to_string("/proc/self/mountinfo"),
    ) else {
        return false;
    };
    let is_below = |parent: &Path| device(parent).is_ok_and(|other| other != number);
    if !path.parent().is_some_and(is_below) {
        return false;
    }
    let number = format!(
        "{}:{}",
        rustix::fs::major(number),
        rustix::fs::minor(number)
    );
    mounts.lines().any(|mount| {
        let behind = mount.split_once(" - ").map(|(_, behind)| behind);
        let mut behind = behind.unwrap_or_default().split(' ');
        let (kind, source) = (behind.next(), behind.next().unwrap_or_default());
        mount.split(' ').nth(2) == Some(&number)
            && (kind == Some("fuse.bcow") || is_loop_device_of_bcow(source))
    })
}

/// Whether a loop device has a file of a hidden FUSE mount.
fn is_loop_device_of_bcow(device: &str) -> bool {
    let name = device.strip_prefix("/dev/").unwrap_or_default();
    let file = std::fs::read_to_string(format!("/sys/block/{name}/loop/backing_file"));
    file.is_ok_and(|file| HiddenName::parse(file.trim_end()).is_some())
}

fn find_mount(path: &Path) -> Option<(u32, Service)> {
    let own = rustix::process::geteuid().as_raw();
    let servers = servers().into_iter();
    let trusted =
        servers.filter(|server| !server.is_in_other_namespace && [own, 0].contains(&server.uid));
    let mut mounts = trusted.flat_map(|server| {
        let services = server.services.into_iter();
        services.map(move |service| (server.pid, service))
    });
    mounts.find(|(_, service)| service.kind == "mount" && service.is_at(path))
}

/// The command line of a process.
pub fn arguments(pid: u32) -> io::Result<Vec<OsString>> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline"))?;
    let line = line.strip_suffix(&[0]).unwrap_or(&line);
    let words = line.split(|&byte| byte == 0);
    Ok(words
        .map(|word| OsString::from_vec(word.to_vec()))
        .collect())
}

/// Whether the service uses this disk, or the upper with this lock file.
fn uses(service: &Service, path: &Path) -> bool {
    let Ok(path) = path.canonicalize() else {
        return false;
    };
    let is_at = |place: &Path| place.canonicalize().is_ok_and(|place| place == path);
    is_at(Path::new(&service.image))
        || service
            .upper
            .as_ref()
            .is_some_and(|upper| is_at(&Path::new(upper).join(LOCK_IN_UPPER)))
}

/// Describes a process: its number, command, services and state.
pub fn describe(pid: u32) -> String {
    let mut text = format!("process {pid}");
    let Some(state) = state(pid) else {
        return text + " has ended or is not visible";
    };
    if let Some(command) = command(pid) {
        text += &format!(" (`{command}`)");
    }
    let server = server_of(pid);
    let services = server.iter().flat_map(|server| &server.services);
    let mut parts: Vec<String> = services
        .map(|service| {
            let does = match service.kind.as_str() {
                "mount" => "mounts",
                "attach" => "attaches",
                _ => "serves",
            };
            format!("{does} {} at {}", service.image, service.at.join(", "))
        })
        .collect();
    match state {
        ProcessState::Running if parts.is_empty() => parts.push("uses it".to_owned()),
        ProcessState::Running => {}
        ProcessState::Ending => parts.push("is shutting down".to_owned()),
        ProcessState::Stopped => parts.push("is stopped by a signal".to_owned()),
        ProcessState::Blocked => parts.push("waits for a disk".to_owned()),
    }
    format!("{text} {}", parts.join(", and "))
}

/// The command line of a process, truncated if it is long.
pub fn command(pid: u32) -> Option<String> {
    const MAX: usize = 200;
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<_> = line
        .split(|&byte| byte == 0)
        .filter(|word| !word.is_empty())
        .map(String::from_utf8_lossy)
        .collect();
    let words: Vec<&str> = words
        .iter()
        .enumerate()
        .map(|(index, word)| match index {
            // Leave out the directory of the program.
            0 => word.rsplit('/').next().unwrap_or(word),
            _ => word,
        })
        .collect();
    if words.is_empty() {
        return None;
    }
    let text = words.join(" ");
    match text.char_indices().nth(MAX) {
        Some((end, _)) => Some(format!("{}...", &text[..end])),
        None => Some(text),
    }
}

/// The user's name, or the number if it has none here.
pub fn user_name(uid: u32) -> String {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    });
    name.unwrap_or_else(|| uid.to_string())
}

fn server(pid: u32, memory: (u32, u32)) -> Option<Server> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    // Threads that serve have other names, but each bcow process starts with this name, so other
    // processes need not be examined.
    let name = std::fs::read(process.join("comm")).ok()?;
    let is_of_bcow = name.starts_with(b"bcow") || name.starts_with(b"mount.bcow");
    if !is_of_bcow || name.trim_ascii_end() == SUPERVISOR.to_bytes() {
        return None;
    }
    let descriptors = std::fs::read_dir(process.join("fd")).ok()?;
    let services = descriptors
        .flatten()
        .filter(|entry| is_own_list(&entry.path()))
        .find_map(|entry| read(&entry.path(), memory).ok())?;
    let namespace = |process: &Path| std::fs::read_link(process.join("ns/mnt")).ok();
    Some(Server {
        pid,
        uid: std::fs::metadata(&process).ok()?.uid(),
        state: state(pid)?,
        is_in_other_namespace: namespace(&process) != namespace(Path::new("/proc/self")),
        services,
    })
}

/// Whether a descriptor in /proc/PID/fd is that by which a process has published its list. A
/// process that reads the list of another one has it open too, but for reading only. The mode of
/// the link shows that (proc_pid_fd(5)).
fn is_own_list(descriptor: &Path) -> bool {
    let is_list =
        std::fs::read_link(descriptor).is_ok_and(|link| link.as_os_str() == OsStr::new(LINK));
    let is_writable = |link: Metadata| link.mode() & 0o200 != 0;
    is_list && std::fs::symlink_metadata(descriptor).is_ok_and(is_writable)
}

/// Reads a memory file that a hostile process may have forged. It opens nothing else, so it cannot
/// block.
fn read(path: &Path, memory: (u32, u32)) -> io::Result<Vec<Service>> {
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    if device(&file)? != memory {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut json = Vec::new();
    File::open(path)?.take(MAX_BYTES).read_to_end(&mut json)?;
    let document: Document = serde_json::from_slice(&json)?;
    if document.schema == SCHEMA {
        Ok(document.services)
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

/// The device that all memory files of the machine are on.
fn device_of_memory_files() -> io::Result<(u32, u32)> {
    Ok(device(&rustix::fs::memfd_create(
        "bcow",
        MemfdFlags::CLOEXEC,
    )?)?)
}

fn device(file: &OwnedFd) -> rustix::io::Result<(u32, u32)> {
    // Do not send a request to a file system, which might hang.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(file, c"", flags, StatxFlags::TYPE)?;
    Ok((stat.stx_dev_major, stat.stx_dev_minor))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn service() -> Service {
        Service {
            kind: "mount".to_owned(),
            image: "/images/a.bcow".to_owned(),
            at: vec!["/mnt".to_owned()],
            mode: "ro".to_owned(),
            since: 7,
            device: Some("0:99".to_owned()),
            ..Service::default()
        }
    }

    /// The path by which other processes find a memory file of this process.
    fn place(published: &Published) -> PathBuf {
        let descriptor = published.file.as_raw_fd();
        format!("/proc/{}/fd/{descriptor}", std::process::id()).into()
    }

    #[test]
    fn a_process_that_reads_the_list_of_another_one_does_not_serve_it() {
        let published = publish(vec![service()]).unwrap();
        let place = place(&published);
        assert!(is_own_list(&place));
        let reader = File::open(&place).unwrap();
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let examiner = rustix::fs::open(&place, flags, Mode::empty()).unwrap();
        for descriptor in [reader.as_raw_fd(), examiner.as_raw_fd()] {
            let place = place.with_file_name(descriptor.to_string());
            assert_eq!(std::fs::read_link(&place).unwrap(), Path::new(LINK));
            assert!(!is_own_list(&place));
        }
    }

    #[test]
    fn a_process_that_replaces_its_list_is_found() {
        let is_over = AtomicBool::new(false);
        let mut published = publish(vec![service()]).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    published.replace(vec![service()]).unwrap();
                    std::thread::yield_now();
                }
            });
            let found = (0..300).filter(|_| server_of(std::process::id()).is_some());
            let count = found.count();
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(count, 300);
        });
    }

    #[test]
    fn the_list_of_a_large_pool_is_read() {
        let long = format!("/{}", "directory/".repeat(300));
        let services: Vec<Service> = (0..1000)
            .map(|number| Service {
                image: format!("{long}{number}"),
                ..service()
            })
            .collect();
        let mut published = publish(Vec::new()).unwrap();
        let descriptor = published.file.as_raw_fd();
        published.replace(services.clone()).unwrap();
        assert_eq!(published.file.as_raw_fd(), descriptor);
        let memory = device_of_memory_files().unwrap();
        assert!(read(&place(&published), memory).unwrap() == services);
    }

    #[test]
    fn published_services_are_found_among_the_descriptors_until_dropped() {
        let published = publish(vec![service()]).unwrap();
        let place = place(&published);
        assert_eq!(std::fs::read_link(&place).unwrap(), Path::new(LINK));
        let memory = device_of_memory_files().unwrap();
        assert_eq!(read(&place, memory).unwrap(), [service()]);
        // Readers cannot change it.
        File::options()
            .write(true)
            .open(&place)
            .map_or_else(drop, |mut file| {
                file.write_all(b"x").unwrap_err();
            });
        drop(published);
        read(&place, memory).unwrap_err();
    }

    #[test]
    fn only_memory_files_are_read() {
        let memory = device_of_memory_files().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{}").unwrap();
        let error = read(file.path(), memory).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn holder_of_a_lock_is_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(lock_holders(file.path()).is_empty());
        file.as_file().try_lock().unwrap();
        assert_eq!(lock_holders(file.path()), [std::process::id()]);
        let text = describe(std::process::id());
        assert!(
            text.starts_with(&format!("process {} (`", std::process::id())),
            "{text}"
        );
    }

    #[test]
    fn process_whose_mount_is_gone_does_not_serve_the_next_mount_of_that_number() {
        let mut server = Server {
            pid: 1,
            uid: 0,
            state: ProcessState::Stopped,
            is_in_other_namespace: false,
            services: vec![service()],
        };
        let (mnt, other) = (Path::new("/mnt"), Path::new("/other"));
        // The mount may have been moved.
        assert!(server.has_mount("0:99", other));
        assert!(!server.has_mount("0:9", mnt));
        server.state = ProcessState::Ending;
        assert!(server.has_mount("0:99", mnt));
        assert!(!server.has_mount("0:99", other));
    }

    #[test]
    fn process_of_a_mount_is_selected_by_path_before_one_with_a_mount_that_has_ended() {
        let server = |pid, place: &str| Server {
            pid,
            uid: 0,
            state: ProcessState::Running,
            is_in_other_namespace: false,
            services: vec![Service {
                at: vec![place.to_owned()],
                ..service()
            }],
        };
        let servers = vec![server(1, "/ended"), server(2, "/mnt"), server(3, "/other")];
        let pid = |path: &str| Some(serving(servers.clone(), "0:99", Path::new(path))?.pid);
        assert_eq!((pid("/mnt"), pid("/other")), (Some(2), Some(3)));
        // The mount was moved.
        assert_eq!(pid("/moved"), Some(1));
        assert!(serving(servers.clone(), "0:9", Path::new("/mnt")).is_none());
    }

    #[test]
    fn mount_of_a_process_is_selected_by_device_and_path() {
        let at = |place: &str, device: &str| Service {
            at: vec![place.to_owned()],
            device: Some(device.to_owned()),
            ..service()
        };
        let (first, second) = (at("/a", "0:1"), at("/b", "0:2"));
        // Its mount has ended, and the kernel has given the number to the next one.
        let ended = at("/c", "0:2");
        let server = Server {
            pid: 1,
            uid: 0,
            state: ProcessState::Stopped,
            is_in_other_namespace: false,
            services: vec![first.clone(), ended, second.clone()],
        };
        let mount = |device, path: &str| server.mount(device, Path::new(path));
        assert_eq!(mount("0:1", "/a"), Some(&first));
        assert_eq!(mount("0:2", "/b"), Some(&second));
        assert_eq!(mount("0:1", "/moved"), Some(&first));
        assert_eq!(mount("0:3", "/a"), None);
    }

    #[test]
    fn missing_process_has_no_state() {
        assert!(state(std::process::id()).is_some());
        assert_eq!(state(u32::MAX), None);
    }
}
