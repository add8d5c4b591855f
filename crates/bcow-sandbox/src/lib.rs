//! Takes the rights from a process that it does not need, before it decodes what strangers wrote.
//!
//! ```no_run
//! use bcow_sandbox::{Access, Attributes, CapabilitySet, Sandbox, SandboxError, Sockets, When};
//!
//! fn enter() -> Result<Vec<String>, SandboxError> {
//!     let attributes = Attributes::Refused;
//!     let mut sandbox = Sandbox::begin(When::Require, attributes, Sockets::OfOpenOnes, Some(0))?;
//!     let readable = ("/srv/images".into(), Access::Read);
//!     sandbox.confine(&[readable], CapabilitySet::empty())?;
//!     sandbox.finish(attributes)?;
//!     Ok(sandbox.in_force())
//! }
//! ```
//!
//! A process enters the sandbox in steps, since it needs some rights to open its files and sockets:
//!
//! 1. [`Sandbox::begin`]: no new privileges, no core dumps, bounds for memory and descriptors, and
//!    no system call of [`calls`] any more; no sockets if the process needs no further ones.
//! 2. [`Sandbox::confine`]: only named files can be opened from now on, and only named capabilities
//!    stay. The process must have one thread: both belong to a thread, and later threads inherit
//!    them.
//! 3. [`Sandbox::finish`]: no further sockets, and no changes of attributes, if the first step has
//!    not refused them. Sockets that are open stay usable. Each filter of calls takes time.
//!
//! What is open stays open in each step.

#[cfg(test)]
mod alone;
mod calls;
mod files;
pub mod fork;
mod limits;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use landlock::RulesetError;
use rustix::io::Errno;
pub use rustix::thread::CapabilitySet;
use rustix::thread::{
    CapabilitySets, remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// When a process enters the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum When {
    /// As far as the kernel supports it.
    #[default]
    Auto,
    /// Fails if the kernel does not support all of it.
    Require,
    Off,
}

/// The option of a program that enters a sandbox, for a parser with clap.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct WhenArgs {
    /// Whether each process of this command gives up the rights that it never needs: as far as the
    /// kernel supports that (auto), completely or with an error (require), or not (off)
    #[arg(
        long,
        value_name = "WHEN",
        default_value = "auto",
        hide_possible_values = true,
        hide_short_help = true
    )]
    pub sandbox: When,
}

/// What may be done with the files of a directory, or with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Also create, replace and remove files, and create directories, but no other objects.
    Write,
    /// Also create, rename and link objects of all kinds.
    All,
    /// Remove only.
    Remove,
}

/// Which modes, owners and extended attributes of files a process may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attributes {
    /// None: new files have those that the system gives them.
    Refused,
    /// Those of files that it has open.
    OfOpenFiles,
    /// Those of all files that its user may change.
    OfAllFiles,
}

/// What a process does with sockets after the first step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sockets {
    /// It makes some, until [`Sandbox::finish`].
    UntilTheEnd,
    /// It uses those that are open, and makes none.
    OfOpenOnes,
    /// It also sends messages with descriptors. All of its sockets are connected to one other
    /// process.
    Messages,
}

/// A process that opens files, or makes connections, as long as it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// It mounts, and starts no programs. Another process makes connections for it.
    Mounts,
    /// It mounts, and starts programs, which are in its sandbox too.
    Programs,
    /// It detaches a device, by netlink.
    Devices,
    /// It makes connections, and starts the programs that have credentials for them, which are in
    /// its sandbox too.
    Connections,
}

/// What a file of an upper may need: its owner and mode, set-id bits, a device number, attributes
/// `security.*` and `trusted.*`, blocks that are reserved for root, and a backing of the kernel
/// (passthrough).
pub const OF_UPPER: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MAC_ADMIN)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_RESOURCE);

/// What a snapshot of a served disk needs: its new file gets the owner of the disk, and may use
/// blocks that are reserved for root.
pub const OF_DISK: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SYS_RESOURCE);

/// How long a thread that has done its work stays visible, at most: the kernel ends it a moment
/// later than another thread learns of it.
const LONGEST_END_OF_A_THREAD: Duration = Duration::from_secs(2);

/// The capabilities of services of root: those for files of any owner and kind, with any
/// attributes; for mounts; for the limits of resources; and to find out from other processes which
/// uppers they use.
const OF_SERVICES: CapabilitySet = OF_UPPER
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::SYS_PTRACE);

/// What programs of a service need further: to become the owner of a mount, who alone may access
/// it, and to listen at a port for metrics.
const OF_PROGRAMS: CapabilitySet = CapabilitySet::SETUID
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::NET_BIND_SERVICE);

/// A process in the sandbox, or on its way into it.
#[derive(Debug, Clone)]
pub struct Sandbox {
    when: When,
    /// What the filter of the first step leaves to the process.
    sockets: Sockets,
    attributes: Attributes,
    in_force: Vec<String>,
}

/// A part of the sandbox that is missing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SandboxError {
    #[error("the process cannot give up new privileges: {0}")]
    Privileges(io::Error),
    #[error("the process cannot give up core dumps: {0}")]
    CoreDumps(io::Error),
    #[error("the process cannot lower its limits: {0}")]
    Limits(io::Error),
    #[error("the process cannot give up capabilities: {0}")]
    Capabilities(io::Error),
    #[error("system calls cannot be refused (seccomp)")]
    Calls(#[from] seccompiler::Error),
    #[error("files cannot be refused (Landlock)")]
    Files(#[from] RulesetError),
    #[error("the kernel has no Landlock")]
    Landlock,
    /// What the kernel has is in force.
    #[error("the kernel has only a part of Landlock; all of it needs Linux 6.12")]
    Partly,
    /// A bug of the caller: the other threads would stay outside.
    #[error("the process has other threads")]
    Threads,
}

impl Sandbox {
    /// No sandbox: the further steps do nothing.
    pub fn off() -> Self {
        Sandbox {
            when: When::Off,
            sockets: Sockets::UntilTheEnd,
            attributes: Attributes::OfAllFiles,
            in_force: Vec::new(),
        }
    }

    /// The first step. It concerns this thread and those that it starts, and the limits concern
    /// the process. `attributes` are those that the process changes from now on. `cache` is the
    /// size of its cache in bytes, for the limits. Without it there are none: for a process with
    /// threads for many mounts, whose stacks would count.
    pub fn begin(
        when: When,
        attributes: Attributes,
        sockets: Sockets,
        cache: Option<u64>,
    ) -> Result<Self, SandboxError> {
        let mut sandbox = Sandbox {
            when,
            ..Sandbox::off()
        };
        sandbox.give_up()?;
        if let Some(cache) = cache {
            sandbox.part("limits", || {
                limits::bound_memory(cache)?;
                match attributes {
                    // An upper can have many open files.
                    Attributes::OfAllFiles => Ok(()),
                    Attributes::Refused | Attributes::OfOpenFiles => limits::bound_descriptors(),
                }
            })?;
        }
        let refuse = || Ok(calls::refuse_dangerous(attributes, sockets)?);
        if sandbox.part("calls", refuse)? {
            (sandbox.sockets, sandbox.attributes) = (sockets, attributes);
        }
        Ok(sandbox)
    }

    /// The whole sandbox of a service, which loses only what it never needs: the further steps do
    /// nothing. The process must have one thread.
    pub fn of_service(when: When, service: Service) -> Result<Self, SandboxError> {
        let mut sandbox = Sandbox {
            when,
            ..Sandbox::off()
        };
        sandbox.give_up()?;
        match service {
            // The threads of many mounts have many stacks, and programs have caches of their own.
            Service::Mounts | Service::Programs => {}
            Service::Devices | Service::Connections => {
                sandbox.part("limits", || limits::bound_memory(0))?;
            }
        }
        let has_no_sockets = sandbox.part("calls-partly", || {
            require_one_thread()?;
            Ok(calls::refuse_to_service(service)?)
        })?;
        let kept = match service {
            Service::Mounts => OF_SERVICES,
            Service::Programs => OF_SERVICES.union(OF_PROGRAMS),
            Service::Devices => CapabilitySet::SYS_ADMIN,
            // The files with credentials may be those of another user.
            Service::Connections => CapabilitySet::DAC_READ_SEARCH,
        };
        sandbox.part("capabilities-partly", || {
            bound_capabilities(kept);
            keep_capabilities(kept)
        })?;
        if has_no_sockets {
            sandbox.part("sockets-partly", || Ok(()))?;
        }
        sandbox.when = When::Off;
        Ok(sandbox)
    }

    /// The sandbox of a process that decodes nothing, and does with the rights of its user what
    /// others cannot. It is that of [`Service::Programs`], for root only: an ordinary user needs
    /// fusermount3, which gets new privileges.
    pub fn of_helper(when: When) -> Result<Self, SandboxError> {
        match when {
            When::Auto | When::Require if rustix::process::geteuid().is_root() => {
                Sandbox::of_service(when, Service::Programs)
            }
            _ => Ok(Sandbox::off()),
        }
    }

    /// New privileges and core dumps.
    fn give_up(&mut self) -> Result<(), SandboxError> {
        self.part("no-new-privileges", || {
            set_no_new_privs(true).map_err(|errno| SandboxError::Privileges(errno.into()))
        })?;
        self.part("no-core-dumps", limits::refuse_core_dumps)
            .map(drop)
    }

    /// The second step.
    pub fn confine(
        &mut self,
        paths: &[(PathBuf, Access)],
        capabilities: CapabilitySet,
    ) -> Result<(), SandboxError> {
        self.part("capabilities", || {
            require_one_thread()?;
            keep_capabilities(capabilities)
        })?;
        self.part("files", || {
            require_one_thread()?;
            files::restrict(paths)
        })
        .map(drop)
    }

    /// Gives up more capabilities: those of this thread, and of the threads that it starts.
    pub fn keep_only(&self, capabilities: CapabilitySet) -> Result<(), SandboxError> {
        match self.when {
            When::Off => Ok(()),
            When::Auto | When::Require => keep_capabilities(capabilities),
        }
    }

    /// The last step, for all threads of the process.
    pub fn finish(&mut self, attributes: Attributes) -> Result<(), SandboxError> {
        let makes_sockets = self.sockets == Sockets::UntilTheEnd;
        let gives_up = attributes < self.attributes && attributes == Attributes::Refused;
        let refuse = || {
            if makes_sockets || gives_up {
                calls::refuse_more(!makes_sockets, !gives_up)?;
            }
            Ok(())
        };
        self.part("sockets", refuse).map(drop)
    }

    /// The names of the parts that are in force. A part that the kernel does not support completely
    /// has `-partly` after its name.
    pub fn in_force(&self) -> Vec<String> {
        self.in_force.clone()
    }

    /// Returns whether all of the part is in force.
    fn part(
        &mut self,
        name: &'static str,
        enforce: impl FnOnce() -> Result<(), SandboxError>,
    ) -> Result<bool, SandboxError> {
        if self.when == When::Off {
            return Ok(false);
        }
        match enforce() {
            Ok(()) => {
                self.in_force.push(name.to_owned());
                return Ok(true);
            }
            Err(error) if self.when == When::Require => return Err(error),
            Err(SandboxError::Partly) => self.in_force.push(format!("{name}-partly")),
            Err(error) => tracing::info!("no sandbox of {name}: {error:?}"),
        }
        Ok(false)
    }
}

/// Programs that this thread and later ones start get no other capabilities. They would not have
/// got any, without new privileges: this is for who looks at the process. It takes a call for each
/// capability.
fn bound_capabilities(kept: CapabilitySet) {
    for capability in kept.complement().iter() {
        // The process may be unable to decide it.
        if remove_capability_from_bounding_set(capability) == Err(Errno::PERM) {
            break;
        }
    }
}

/// Gives up all capabilities but these, for this thread and later ones.
fn keep_capabilities(kept: CapabilitySet) -> Result<(), SandboxError> {
    let permitted = kept & rustix::thread::capabilities(None)?.permitted;
    let sets = CapabilitySets {
        effective: permitted,
        permitted,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}

fn require_one_thread() -> Result<(), SandboxError> {
    let last_look = Instant::now() + LONGEST_END_OF_A_THREAD;
    while !fork::has_one_thread() {
        if Instant::now() > last_look {
            return Err(SandboxError::Threads);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

impl From<Errno> for SandboxError {
    fn from(errno: Errno) -> Self {
        SandboxError::Capabilities(errno.into())
    }
}
