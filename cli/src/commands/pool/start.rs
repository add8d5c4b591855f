//! `bcow pool start`

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use bcow_fuse::daemon::{self, Readiness};
use bcow_fuse::kernel::DiskFiles;
use bcow_fuse::session::abort_on_panic;
use bcow_fuse::signals::{Ground, Signals};
use bcow_mounts::cpus::{self, Cpus};
use bcow_mounts::mount::{in_background, log_to};
use bcow_mounts::{PoolName, failure};

use super::ParseMount;
use super::server::takeover::Kept;
use super::server::{Pool, Settings, log_failure};
use crate::error::{CommandError, Context, exit};
use crate::limits;
use crate::pool::Directory;
use crate::pool::client::{self, PoolAtSocket};
use crate::pool::link::{Link, Packet, Wait};
use crate::pool::supervisor::{self, Supervisor};
use crate::ui::Ui;
use crate::{heap, remote};

/// Start a pool
///
/// The command returns when the pool takes requests. The pool listens at a socket in a directory
/// that only its user can enter: /run/bcow/pools for root, $XDG_RUNTIME_DIR/bcow/pools or
/// /tmp/bcow-UID for other users, or $BCOW_POOLS. Other users cannot use the pool. The pool opens
/// the files of its mounts with its own rights, in its own mount namespace.
///
/// SIGTERM and SIGINT unmount all mounts and end the pool. If files are in use, their mounts are
/// detached, and the pool ends when the last open file is closed, or at a second signal.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The name of the pool: letters, digits, '.', '_' and '-'
    #[arg(value_name = "NAME")]
    name: PoolName,
    /// CPUs for the pool, in the form of taskset(1): 0,2-5 [default: all CPUs that the process may
    /// use]
    #[arg(long, value_name = "LIST", value_parser = cpus::parse)]
    cpus: Option<Cpus>,
    /// Size of the cache of decoded blocks of all mounts together
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = crate::size::parse)]
    memory: u64,
    /// Threads that answer the requests of one mount, unless the mount has --threads [default: as
    /// for `bcow mount`]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Run the pool in the foreground
    #[arg(short, long)]
    foreground: bool,
    /// Also append log messages to FILE, with the time: for machines without a system log
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    log_file: Option<PathBuf>,
}

/// Starts the pool; returns when it takes requests, or in the foreground when it has ended.
pub fn run(args: &Args, parse: ParseMount, ui: &Ui) -> Result<u8, CommandError> {
    if let Some(link) = Link::of_this_process() {
        return serve(args, parse, link).map(|()| exit::DONE);
    }
    let readiness = if args.foreground {
        None
    } else {
        match daemon::started_by_launch() {
            Some(readiness) => Some(readiness),
            None => return in_background(),
        }
    };
    // The process of the pool has printed or logged the reason of a failure.
    keep(args, readiness, ui)
}

/// Keeps the process of the pool running. Returns the exit status of the pool.
fn keep(args: &Args, readiness: Option<Readiness>, ui: &Ui) -> Result<u8, CommandError> {
    let cannot = || format!("cannot start the pool {}", args.name);
    // Process lists show the two processes by their names.
    let _ = rustix::thread::set_name(c"bcow-supervisor");
    if let Some(path) = &args.log_file {
        log_to(path)?;
    }
    // Its children inherit this. While a process takes over, the kernel may need memory that only a
    // write to a mount with the kernel driver sets free.
    serve_writeback();
    let log_file = args.log_file.as_deref().map(std::path::absolute);
    let (listener, _socket) = listen(&args.name)?;
    let supervisor = Supervisor::new(supervisor::Settings {
        name: args.name.clone(),
        listener: &listener,
        log_file: log_file.transpose().context(cannot)?,
        ground: match readiness {
            Some(_) => Ground::Background,
            None => Ground::Foreground,
        },
    });
    let announce = || match readiness {
        Some(readiness) => readiness.announce().map_err(|error| failure(&error)),
        None => {
            ui.status(format_args!("the pool {} takes requests", args.name));
            Ok(())
        }
    };
    // The name of the socket goes before the socket is closed: until then, it is that of this pool.
    supervisor.context(cannot)?.run(announce)
}

/// Serves the pool, as the process that a supervisor has started.
fn serve(args: &Args, parse: ParseMount, link: Link) -> Result<(), CommandError> {
    // The supervisor passes on the signals of its terminal.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"bcow");
    heap::use_one_arena();
    heap::map_large_buffers();
    abort_on_panic();
    let cannot = || format!("cannot start the pool {}", args.name);
    let given = Given::receive(&link).context(cannot)?;
    match given.restarts {
        0 => serve_given(args, parse, link, given),
        _ => detach(args)
            .and_then(|()| serve_given(args, parse, link, given))
            .inspect_err(log_failure),
    }
}

fn serve_given(
    args: &Args,
    parse: ParseMount,
    link: Link,
    given: Given,
) -> Result<(), CommandError> {
    let cannot = || format!("cannot start the pool {}", args.name);
    limits::adapt_for_service();
    // Before other threads exist.
    let signals = Signals::block(Ground::Background).map_err(|error| failure(&error))?;
    if let Some(path) = &given.log_file {
        log_to(path)?;
    }
    if let Some(cpus) = &args.cpus {
        cpus.confine()?;
    }
    // Before other threads exist.
    serve_writeback();
    remote::share_clients();
    let pool = Arc::new(Pool::new(
        Settings {
            name: args.name.clone(),
            memory_bytes: args.memory,
            threads: args.threads.map(usize::from),
            parse,
            since: given.since,
            restarts: given.restarts,
            supervisor: given.supervisor,
        },
        link,
    ));
    pool.watch_rest();
    pool.unmount_at_signals(signals).context(cannot)?;
    pool.listen_to_supervisor().context(cannot)?;
    pool.take_over(given.mounts);
    pool.accept(given.listener).context(cannot)?;
    if given.restarts == 0 {
        detach(args)?;
    }
    pool.report_ready();
    pool.wait_for_end();
    Ok(())
}

/// Declares that the kernel may write the pages of a mount with the kernel driver back through any
/// thread that another one waits for. An ordinary user has no such mounts.
fn serve_writeback() {
    if rustix::process::geteuid().is_root() {
        let _ = bcow_mount::serve_writeback();
    }
}

fn detach(args: &Args) -> Result<(), CommandError> {
    if args.foreground {
        Ok(())
    } else {
        daemon::detach().map_err(|error| failure(&error))
    }
}

/// What the supervisor gives to a new process.
struct Given {
    listener: UnixListener,
    since: u64,
    restarts: u64,
    supervisor: u32,
    log_file: Option<PathBuf>,
    mounts: BTreeMap<u64, Kept>,
}

impl Given {
    fn receive(link: &Link) -> io::Result<Self> {
        let mut given = None;
        let mut mounts = BTreeMap::new();
        loop {
            let (packet, descriptors) = link
                .receive(Wait::Yes)?
                .ok_or(io::ErrorKind::UnexpectedEof)?;
            let mut descriptors = descriptors.into_iter();
            let mut next = || -> io::Result<OwnedFd> {
                let none = || io::Error::other("a descriptor is missing");
                descriptors.next().ok_or_else(none)
            };
            match packet {
                Packet::Socket {
                    since,
                    restarts,
                    supervisor,
                    log_file,
                } => {
                    given = Some(Given {
                        listener: next()?.into(),
                        since,
                        restarts,
                        supervisor,
                        log_file: log_file.map(OsString::from).map(PathBuf::from),
                        mounts: BTreeMap::new(),
                    });
                }
                Packet::Mount {
                    number,
                    device,
                    is_disk,
                } => {
                    let kept = Kept {
                        connection: next()?,
                        record: next()?,
                        device,
                        is_disk,
                        companion: None,
                        disk: None,
                    };
                    mounts.insert(number, kept);
                }
                Packet::Companion { number } => {
                    let companion = next()?;
                    if let Some(kept) = mounts.get_mut(&number) {
                        kept.companion = Some(companion);
                    }
                }
                Packet::Disk { number } => {
                    let (file, ledger) = (next()?, next()?);
                    if let Some(kept) = mounts.get_mut(&number) {
                        kept.disk = Some(DiskFiles { file, ledger });
                    }
                }
                Packet::Begin => {
                    let given = given.ok_or_else(|| io::Error::other("the socket is missing"))?;
                    return Ok(Given { mounts, ..given });
                }
                _ => {}
            }
        }
    }
}

/// The socket of this pool, which is removed at the end.
struct Socket {
    directory: Directory,
    path: PathBuf,
    inode: (u64, u64),
}

/// Listens at the socket of a pool that does not run.
fn listen(name: &PoolName) -> Result<(UnixListener, Socket), CommandError> {
    let cannot = || format!("cannot start the pool {name}");
    let directory = Directory::make()?;
    let path = directory.socket(name);
    // Held until the socket takes connections: of two commands, one finds the pool of the other.
    let _lock = directory.lock().context(cannot)?;
    let running = |why: String| CommandError::new(cannot()).caused_by_text(why);
    match client::find(&path)? {
        PoolAtSocket::Running(connection) => {
            let pid = connection.hello.pid;
            return Err(running(format!("process {pid} runs it already"))
                .hint(format!("`bcow pool stop {name}` ends it")));
        }
        PoolAtSocket::Silent => {
            return Err(running("it runs already, but does not answer".to_owned()));
        }
        PoolAtSocket::Dead => std::fs::remove_file(&path).context(cannot)?,
        PoolAtSocket::Missing => {}
    }
    let listener = UnixListener::bind(&path)
        .map_err(|error| CommandError::new(cannot()).caused_by_text(at(&path, &error)))?;
    let private = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, private).context(cannot)?;
    let metadata = path.symlink_metadata().context(cannot)?;
    let socket = Socket {
        directory,
        inode: (metadata.dev(), metadata.ino()),
        path,
    };
    rustix::io::ioctl_fionbio(listener.as_fd(), false)
        .map_err(io::Error::from)
        .context(cannot)?;
    Ok((listener, socket))
}

fn at(path: &std::path::Path, error: &io::Error) -> String {
    format!("{}: {error}", path.display())
}

impl Drop for Socket {
    fn drop(&mut self) {
        let Ok(_lock) = self.directory.lock() else {
            return;
        };
        let is_own = self
            .path
            .symlink_metadata()
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.inode);
        if is_own {
            // The next start of the pool removes it otherwise.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
