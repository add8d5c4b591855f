//! The start of a pool: its supervisor, and the process that a supervisor starts.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use bcow_fuse::daemon::{self, Readiness};
use bcow_fuse::session::abort_on_panic;
use bcow_fuse::signals::{Ground, Signals};
use bcow_fuse::starter;
use bcow_images::error::{CommandError, Context, exit};
use bcow_images::image::Messages;
use bcow_images::remote::Fetcher;
use bcow_images::running::{self, Published, SUPERVISOR};
use bcow_images::{remote, sandbox, size};
use bcow_mounts::cpus::{self, Cpus};
use bcow_mounts::metrics;
use bcow_mounts::mount::{in_background, log_to};
use bcow_mounts::{PoolName, failure, heap, limits};
use bcow_sandbox::{Sandbox, Service, When, WhenArgs};
use bcow_union::log::{self, Severity};

use crate::client::{self, PoolAtSocket};
use crate::directory::Directory;
use crate::given::Given;
use crate::link::Link;
use crate::opener;
use crate::server::{Pool, log_failure, start_thread};
use crate::supervisor::{self, Supervisor};

/// The options of a pool.
#[derive(Debug, clap::Args)]
pub struct StartArgs {
    /// The name of the pool: letters, digits, '.', '_' and '-'
    #[arg(value_name = "NAME")]
    name: PoolName,
    /// CPUs for the pool, in the form of taskset(1): 0,2-5 [default: all CPUs that the process may
    /// use]
    #[arg(long, value_name = "LIST", value_parser = cpus::parse)]
    cpus: Option<Cpus>,
    /// Size of the cache of decoded blocks of all mounts together
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = size::parse)]
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
    /// Serve Prometheus metrics of all mounts at http://ADDR:PORT/metrics, or at the Unix socket
    /// unix:PATH. Every client that can connect to a TCP address can read the metrics
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<String>,
    #[command(flatten)]
    when: WhenArgs,
}

/// Starts the pool; returns when it takes requests, or in the foreground when it has ended.
pub fn run(args: &StartArgs, ui: &dyn Messages) -> Result<u8, CommandError> {
    if let Some(link) = Link::of_this_process() {
        return serve(args, link).map(|()| exit::DONE);
    }
    let readiness = if args.foreground {
        None
    } else {
        match daemon::started_by_launch() {
            Some(readiness) => Some(readiness),
            None => return in_background(None),
        }
    };
    // The process of the pool has printed or logged the reason of a failure.
    keep(args, readiness, ui)
}

/// Keeps the process of the pool running. Returns the exit status of the pool.
fn keep(
    args: &StartArgs,
    readiness: Option<Readiness>,
    ui: &dyn Messages,
) -> Result<u8, CommandError> {
    let cannot = || format!("cannot start the pool {}", args.name);
    // Process lists show the two processes by their names.
    let _ = rustix::thread::set_name(SUPERVISOR);
    if let Some(path) = &args.log_file {
        log_to(path)?;
    }
    // Its children inherit this. While a process takes over, the kernel may need memory that
    // becomes free only when it has written to a mount with the kernel driver.
    serve_writeback();
    let log_file = args.log_file.as_deref().map(std::path::absolute);
    let (listener, _socket) = listen(&args.name)?;
    let metrics = args.metrics.as_deref().map(metrics::listen).transpose()?;
    if let Some(metrics) = &metrics {
        metrics::announce(metrics, ui);
    }
    // Its processes have it too.
    Sandbox::of_helper(args.when.sandbox).context(sandbox::cannot)?;
    let supervisor = Supervisor::new(supervisor::Settings {
        name: args.name.clone(),
        listener: &listener,
        metrics: metrics.as_ref(),
        log_file: log_file.transpose().context(cannot)?,
        ground: match readiness {
            Some(_) => Ground::Background,
            None => Ground::Foreground,
        },
    });
    let announce = || match readiness {
        Some(readiness) => readiness.announce().map_err(|error| failure(&error)),
        None => {
            ui.status(&format_args!("the pool {} takes requests", args.name));
            Ok(())
        }
    };
    // The name of the socket goes before the socket is closed: until then, it is that of this pool.
    supervisor.context(cannot)?.run(announce)
}

/// Serves the pool, as the process that a supervisor has started.
fn serve(args: &StartArgs, link: Link) -> Result<(), CommandError> {
    // The supervisor passes on the signals of its terminal.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"bcow");
    let sandbox = args.when.sandbox;
    // Before this process has the files of mounts.
    starter::start(sandbox, move |socket| opener::run(&socket.into(), sandbox))
        .map_err(|error| failure(&error))?;
    // A process without a sandbox makes the connections itself.
    let fetcher = match sandbox {
        When::Off => None,
        when => Some(remote::start_fetcher_of_all(when)?),
    };
    heap::use_one_arena();
    heap::map_large_buffers();
    abort_on_panic();
    let cannot = || format!("cannot start the pool {}", args.name);
    // Each command looks for this among the descriptors, the lowest ones first.
    let published = running::publish(Vec::new());
    let given = Given::receive(&link).context(cannot)?;
    match given.restarts {
        0 => serve_given(args, link, given, published, fetcher),
        _ => detach(args)
            .and_then(|()| serve_given(args, link, given, published, fetcher))
            .inspect_err(log_failure),
    }
}

fn serve_given(
    args: &StartArgs,
    link: Link,
    given: Given,
    published: Option<Published>,
    fetcher: Option<Arc<Fetcher>>,
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
    let sandbox =
        Sandbox::of_service(args.when.sandbox, Service::Mounts).context(sandbox::cannot)?;
    if let Some(fetcher) = fetcher {
        end_with(fetcher).context(cannot)?;
    }
    remote::share_clients();
    let threads = args.threads.map(usize::from);
    let sandbox = sandbox.in_force();
    let pool = Pool::new(
        args.name.clone(),
        args.memory,
        threads,
        &given,
        link,
        sandbox,
        published,
    );
    let pool = Arc::new(pool.context(cannot)?);
    pool.watch_rest();
    pool.unmount_at_signals(signals).context(cannot)?;
    pool.listen_to_supervisor().context(cannot)?;
    pool.take_over(given.mounts, given.shared)?;
    pool.accept(given.listener).context(cannot)?;
    if let Some(socket) = given.metrics {
        let pool = Arc::clone(&pool);
        metrics::answer_at(socket, move || pool.for_prometheus()).context(cannot)?;
    }
    if given.restarts == 0 {
        detach(args)?;
    }
    pool.report_ready();
    pool.wait_for_end();
    Ok(())
}

/// Ends this process when its fetcher ends: the next process of the pool, which continues with the
/// mounts, has another one.
fn end_with(fetcher: Arc<Fetcher>) -> io::Result<()> {
    let wait = move || {
        fetcher.wait_for_end();
        let message = "the process that makes the connections has ended; so does this one";
        log::log(Severity::Error, message);
        std::process::abort()
    };
    start_thread("fetcher", wait)
}

/// Declares that any thread of this process may be part of a write-back of the kernel to a mount
/// with the kernel driver. An ordinary user has no such mounts.
fn serve_writeback() {
    if rustix::process::geteuid().is_root() {
        let _ = bcow_mount::serve_writeback();
    }
}

fn detach(args: &StartArgs) -> Result<(), CommandError> {
    if args.foreground {
        Ok(())
    } else {
        daemon::detach().map_err(|error| failure(&error))
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
    let refused = |why: String| CommandError::new(cannot()).caused_by_text(why);
    match client::find(&path)? {
        PoolAtSocket::Running(connection) => {
            let pid = connection.hello.pid;
            return Err(refused(format!("process {pid} runs it already"))
                .hint(format!("`bcow pool stop {name}` ends it")));
        }
        PoolAtSocket::Silent => {
            return Err(refused("it runs already, but does not answer".to_owned()));
        }
        PoolAtSocket::Dead => std::fs::remove_file(&path).context(cannot)?,
        PoolAtSocket::Missing => {}
    }
    let listener = UnixListener::bind(&path)
        .map_err(|error| refused(format!("{}: {error}", path.display())))?;
    let private = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, private).context(cannot)?;
    rustix::io::ioctl_fionbio(listener.as_fd(), false)
        .map_err(io::Error::from)
        .context(cannot)?;
    let metadata = path.symlink_metadata().context(cannot)?;
    // Its end takes the lock too, so nothing may fail after this.
    let socket = Socket {
        directory,
        inode: (metadata.dev(), metadata.ino()),
        path,
    };
    Ok((listener, socket))
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
