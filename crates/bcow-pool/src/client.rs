//! Requests to a pool.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bcow_images::error::{CommandError, Context};
use bcow_images::image::Messages;
use bcow_mounts::control::read_line;
use bcow_mounts::helper;
use bcow_mounts::mount::{self, Attempt};
use bcow_mounts::{MountArgs, PoolName};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::Value;

use crate::asked::Asked;
use crate::directory::Directory;
use crate::protocol::{self, Hello, MAX_ANSWER_BYTES, Request, View};
use crate::stats::Document;

/// How long a pool may take to say hello.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a request waits for the process that takes over at a restart.
const RESTARTS_WITHIN: Duration = Duration::from_secs(60);
/// Pause before the next attempt.
const PAUSE: Duration = Duration::from_millis(5);
/// How long the supervisor may take to end after the process of the pool.
const SUPERVISOR_ENDS_WITHIN: Timespec = Timespec {
    tv_sec: 5,
    tv_nsec: 0,
};

/// The pool behind a socket.
#[derive(Debug)]
pub enum PoolAtSocket {
    /// It answers.
    Running(Connection),
    /// Its process runs, but does not answer.
    Silent,
    /// Its process has ended without removing the socket.
    Dead,
    /// There is no socket.
    Missing,
}

/// A connection to a pool.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// What the pool has said of itself.
    pub hello: Hello,
}

/// Connects to the pool of this name.
pub fn find_named(name: &PoolName) -> Result<PoolAtSocket, CommandError> {
    match Directory::find()? {
        Some(directory) => find(&directory.socket(name)),
        None => Ok(PoolAtSocket::Missing),
    }
}

/// Connects to the pool with this socket.
pub fn find(socket: &Path) -> Result<PoolAtSocket, CommandError> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    loop {
        let found = find_once(socket)?;
        if !matches!(found, PoolAtSocket::Dead) {
            return Ok(found);
        }
        // Its process may have ended, and another one takes over. Only a socket that refuses
        // connections is dead.
        match connect(socket) {
            Ok(_) | Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Ok(_) | Err(Errno::AGAIN) => return Ok(PoolAtSocket::Silent),
            // The pool has ended, and has removed its socket.
            Err(Errno::NOENT) => return Ok(PoolAtSocket::Missing),
            Err(_) => return Ok(found),
        }
    }
}

fn find_once(socket: &Path) -> Result<PoolAtSocket, CommandError> {
    let cannot = || format!("cannot connect to {}", socket.display());
    let stream = match connect(socket) {
        Ok(stream) => stream,
        // A process that accepts no connections fills its queue.
        Err(Errno::AGAIN) => return Ok(PoolAtSocket::Silent),
        Err(Errno::CONNREFUSED) => return Ok(PoolAtSocket::Dead),
        Err(Errno::NOENT) => return Ok(PoolAtSocket::Missing),
        Err(errno) => return Err(CommandError::new(cannot()).caused_by(&io::Error::from(errno))),
    };
    let line = match read_line(&stream, MAX_ANSWER_BYTES, Some(ANSWER_TIMEOUT)) {
        Ok(line) => line,
        Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(PoolAtSocket::Silent),
        // The process has ended meanwhile.
        Err(error)
            if [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset]
                .contains(&error.kind()) =>
        {
            return Ok(PoolAtSocket::Dead);
        }
        Err(error) => return Err(CommandError::new(cannot()).caused_by(&error)),
    };
    let hello: Hello = serde_json::from_slice(&line).context(cannot)?;
    Ok(PoolAtSocket::Running(Connection { stream, hello }))
}

fn connect(socket: &Path) -> rustix::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connection =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&connection, &SocketAddrUnix::new(socket)?)?;
    rustix::io::ioctl_fionbio(&connection, false)?;
    Ok(connection.into())
}

/// Mounts in a pool.
///
/// The pool gets the command line of this process, and its working directory. It parses the command
/// line, opens the files, and mounts. So the request needs no fields for the options of a mount,
/// and the pool can open the files again after this process has ended.
pub fn mount(name: &PoolName, args: &MountArgs, ui: &dyn Messages) -> Result<(), CommandError> {
    let Attempt::Free(_turn) = mount::prepare(args, ui)? else {
        return Ok(());
    };
    let helper::Request::Run(arguments) = helper::command_line()? else {
        return Ok(());
    };
    let cannot = || format!("cannot mount in the pool {name}");
    let directory = std::env::current_dir().context(cannot)?;
    let request = Request::Mount {
        asked: Asked {
            arguments: arguments.iter().map(|one| (&**one).into()).collect(),
            directory: directory.as_os_str().into(),
        },
        view: View::own().context(cannot)?,
    };
    let deadline = Instant::now() + RESTARTS_WITHIN;
    loop {
        match require(name)?.ask_once(&request, ui)? {
            None if Instant::now() < deadline => std::thread::sleep(PAUSE),
            None => return Err(is_ending(name)),
            Some(_) => return Ok(()),
        }
    }
}

fn is_ending(name: &impl Display) -> CommandError {
    CommandError::new(format!("cannot use the pool {name}"))
        .caused_by_text("its process is ending")
        .passes_if(true)
}

/// The statistics of a pool.
pub fn statistics(name: &PoolName, ui: &dyn Messages) -> Result<Document, CommandError> {
    let answer = require(name)?.ask(&Request::Stats, ui)?;
    serde_json::from_value(answer)
        .context(|| format!("the statistics of the pool {name} are invalid"))
}

/// The command line of the mount with this device number in a pool, and the directory to which its
/// paths are relative.
pub fn command_line(
    name: &PoolName,
    device: &str,
    ui: &dyn Messages,
) -> Result<(Vec<OsString>, PathBuf), CommandError> {
    let mut mounts = statistics(name, ui)?.mounts.into_iter();
    let mount = mounts.find(|mount| mount.device.as_deref() == Some(device));
    let asked = mount.and_then(|mount| mount.asked).ok_or_else(|| {
        CommandError::new(format!(
            "the pool {name} does not know the command line of the mount"
        ))
    })?;
    let arguments = asked.arguments.into_iter().map(OsString::from);
    Ok((arguments.collect(), OsString::from(asked.directory).into()))
}

/// The pools of this user that have a socket, by name. A killed pool may have left its socket.
pub fn pools() -> Result<Vec<(PoolName, PoolAtSocket)>, CommandError> {
    let Some(directory) = Directory::find()? else {
        return Ok(Vec::new());
    };
    let cannot = || format!("cannot read {}", directory.path().display());
    let mut pools = Vec::new();
    for name in directory.names().context(cannot)? {
        match find(&directory.socket(&name))? {
            // It has ended meanwhile.
            PoolAtSocket::Missing => {}
            found => pools.push((name, found)),
        }
    }
    Ok(pools)
}

/// Ends a pool. With `force`, first unmounts its mounts. Returns the number of mounts in use, with
/// which the pool ends; if none is, the pool has ended.
pub fn stop(name: &PoolName, force: bool, ui: &dyn Messages) -> Result<u64, CommandError> {
    let mut connection = require(name)?;
    let supervisor = connection.supervisor();
    let answer = connection.ask(&Request::Stop { force }, ui)?;
    let in_use = answer["in_use"].as_u64().unwrap_or(0);
    if in_use == 0 {
        connection.wait_for_end();
        wait_for_supervisor(supervisor);
    }
    Ok(in_use)
}

/// Waits until the process of a pool takes requests. Returns whether it does.
pub fn answers(name: &PoolName) -> bool {
    matches!(find_named(name), Ok(PoolAtSocket::Running(_)))
}

/// Connects to a pool that must run.
pub fn require(name: &PoolName) -> Result<Connection, CommandError> {
    let cannot = || CommandError::new(format!("cannot use the pool {name}"));
    match find_named(name)? {
        PoolAtSocket::Running(connection) => Ok(connection),
        PoolAtSocket::Silent => Err(cannot()
            .caused_by_text("its process does not answer")
            .hint("`bcow ps` shows the state of the process, if the pool has mounts")),
        PoolAtSocket::Dead => Err(cannot()
            .caused_by_text("its process has died")
            .hint(format!("`bcow pool start {name}` starts it again"))),
        PoolAtSocket::Missing => Err(cannot()
            .caused_by_text("it does not run")
            .hint(format!("`bcow pool start {name}` starts it"))),
    }
}

impl Connection {
    /// Sends a request, and waits for the answer. Shows the messages of the pool.
    pub fn ask(&mut self, request: &Request, ui: &dyn Messages) -> Result<Value, CommandError> {
        let answer = self.ask_once(request, ui)?;
        answer.ok_or_else(|| is_ending(&self.hello.pool))
    }

    /// The same; `None` if nothing was done, because another process is about to take over.
    fn ask_once(
        &mut self,
        request: &Request,
        ui: &dyn Messages,
    ) -> Result<Option<Value>, CommandError> {
        let cannot = || format!("cannot use the pool {}", self.hello.pool);
        let line = protocol::encode_request(request).context(cannot)?;
        if line.len() > protocol::MAX_REQUEST_BYTES {
            return Err(CommandError::new(cannot()).caused_by_text("the command line is too long"));
        }
        // If the pool refuses this client, it closes the connection before it reads the request.
        // The answer says why.
        let sent = self.stream.write_all(&line);
        let line = match (read_line(&self.stream, MAX_ANSWER_BYTES, None), sent) {
            (Ok(line), _) => line,
            // Its process has ended, and a part of the request was not read.
            (Err(_), Err(error)) if is_closed(&error) => return Ok(None),
            (Err(error), Ok(())) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Ok(None);
            }
            (Err(error), Ok(())) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let cause = "its process ended during the request";
                return Err(CommandError::new(cannot()).caused_by_text(cause));
            }
            (Err(_), Err(error)) | (Err(error), Ok(())) => {
                return Err(CommandError::new(cannot()).caused_by(&error));
            }
        };
        protocol::read_answer(&line, ui).context(cannot)?
    }

    /// The supervisor of the pool, to wait for its end.
    pub fn supervisor(&self) -> Option<OwnedFd> {
        let supervisor = Pid::from_raw(i32::try_from(self.hello.supervisor?).ok()?)?;
        // A kernel without such descriptors: the supervisor still ends soon after the process.
        pidfd_open(supervisor, PidfdFlags::empty()).ok()
    }

    /// Waits until the process of the pool has ended.
    pub fn wait_for_end(self) {
        // Any error means that the other end is gone.
        while read_line(&self.stream, MAX_ANSWER_BYTES, None).is_ok() {}
    }
}

fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

/// Waits until the supervisor has ended too, and the name of the pool is free.
pub fn wait_for_supervisor(supervisor: Option<OwnedFd>) {
    if let Some(supervisor) = supervisor {
        let mut supervisor = [PollFd::new(&supervisor, PollFlags::IN)];
        let _ = poll(&mut supervisor, Some(&SUPERVISOR_ENDS_WITHIN));
    }
}
