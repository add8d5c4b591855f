//! The system calls that a process cannot make (seccomp(2)). They fail with EPERM, and the process
//! continues.

mod program;

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp,
    SeccompCondition, SeccompFilter, SeccompRule,
};

use crate::{Attributes, Service, Sockets};
use program::Decision;

/// Calls that change other processes or the machine, or reach much code of the kernel.
const DANGEROUS: &[c_long] = &[
    // Namespaces, and other rules for programs.
    libc::SYS_setns,
    libc::SYS_chroot,
    libc::SYS_personality,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    libc::SYS_setpriority,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_ioprio_set,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    // Memory, semaphores and queues of other processes, which have no path.
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    // Mounts.
    libc::SYS_pivot_root,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    OPEN_TREE_ATTR,
    // Files by other ways than a path.
    libc::SYS_open_by_handle_at,
    // Code of the kernel.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_fanotify_init,
    // Keys.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // The machine.
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    QUOTACTL_FD,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_kexec_file_load,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// Calls that start programs and processes, and choose their CPUs and limits. Threads are possible.
const PROGRAMS: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_sched_setaffinity,
    libc::SYS_setrlimit,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
];

/// Calls that mount and unmount.
const MOUNTS: &[c_long] = &[
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
];

/// Calls that change modes, owners, times and extended attributes of any file, or make a device:
/// Landlock does not refuse the former, and the owner needs no capability.
const OF_ALL_FILES: &[c_long] = &[
    libc::SYS_fchmodat,
    FCHMODAT2,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    SETXATTRAT,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    REMOVEXATTRAT,
    FILE_SETATTR,
    libc::SYS_mknodat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mknod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_futimesat,
];

// Calls without a constant in libc, at least for aarch64. New calls have one number on all
// architectures.
const QUOTACTL_FD: c_long = 443;
const FCHMODAT2: c_long = 452;
const SETXATTRAT: c_long = 463;
const REMOVEXATTRAT: c_long = 466;
const OPEN_TREE_ATTR: c_long = 467;
const FILE_SETATTR: c_long = 469;

/// Calls that change the mode, the owner, the times or the attributes of an open file, also of one
/// that is open for reading.
const OF_OPEN_FILES: &[c_long] = &[
    libc::SYS_utimensat,
    libc::SYS_fchmod,
    libc::SYS_fchown,
    libc::SYS_fsetxattr,
    libc::SYS_fremovexattr,
];

/// Calls that make a socket, or lead one elsewhere.
const SOCKETS: &[c_long] = &[
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
];

/// Calls that send messages, which can have an address of their own. It is in memory, where a
/// filter cannot look.
const MESSAGES: &[c_long] = &[libc::SYS_sendmsg, libc::SYS_sendmmsg];

/// The requests of ioctl(2) that write to a terminal as if a user typed, load a driver for it, or
/// set the flags of a file, also of one that is open for reading.
#[allow(
    clippy::unnecessary_cast,
    reason = "each C library has its own type for them"
)]
const REQUESTS: [u64; 5] = [
    libc::TIOCSTI as u64,
    libc::TIOCLINUX as u64,
    libc::TIOCSETD as u64,
    FS_IOC_SETFLAGS,
    FS_IOC_FSSETXATTR,
];
const FS_IOC_SETFLAGS: u64 = 0x4008_6602;
const FS_IOC_FSSETXATTR: u64 = 0x401c_5820;

/// Refuses [`DANGEROUS`], [`PROGRAMS`], [`MOUNTS`] and new namespaces; changes of attributes: all,
/// or those of files that are not open; and [`SOCKETS`] and messages, unless the process makes
/// sockets.
pub fn refuse_dangerous(attributes: Attributes, sockets: Sockets) -> Result<(), Error> {
    let mut refused = Refused::dangerous()?;
    refused.programs()?;
    refused.always(MOUNTS);
    refused.namespaces(&[libc::CLONE_THREAD])?;
    match attributes {
        Attributes::Refused => {
            refused.always(OF_ALL_FILES);
            refused.always(OF_OPEN_FILES);
        }
        // Without a path, it is for an open file.
        Attributes::OfOpenFiles => {
            refused.always(OF_ALL_FILES);
            let path = SeccompCondition::new(1, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?;
            let has_path = SeccompRule::new(vec![path])?;
            refused.if_one_applies(libc::SYS_utimensat, vec![has_path]);
        }
        Attributes::OfAllFiles => {}
    }
    match sockets {
        Sockets::UntilTheEnd => {}
        Sockets::OfOpenOnes => refused.sockets()?,
        Sockets::Messages => {
            refused.sockets()?;
            for call in MESSAGES {
                refused.decisions.remove(&(*call as u32));
            }
        }
    }
    seccompiler::apply_filter(&refused.program()?)
}

/// Refuses [`DANGEROUS`] and new namespaces; [`PROGRAMS`] and [`MOUNTS`] if the service needs none;
/// sockets of all families but those that the service makes, and those below TCP and UDP.
pub fn refuse_to_service(service: Service) -> Result<(), Error> {
    let mut refused = Refused::dangerous()?;
    match service {
        Service::Mounts => refused.programs()?,
        Service::Programs => {}
        Service::Devices => {
            refused.programs()?;
            refused.always(MOUNTS);
        }
        Service::Connections => refused.always(MOUNTS),
    }
    // A thread can have a working directory of its own.
    refused.namespaces(&[libc::CLONE_FS, libc::CLONE_THREAD])?;
    refused.families(service)?;
    seccompiler::apply_filter(&refused.program()?)
}

/// Refuses sockets, or changes of attributes, or both, to all threads of the process.
pub fn refuse_more(has_sockets: bool, has_attributes: bool) -> Result<(), Error> {
    let mut refused = Refused::default();
    if !has_sockets {
        refused.sockets()?;
    }
    if !has_attributes {
        refused.always(OF_OPEN_FILES);
    }
    seccompiler::apply_filter_all_threads(&refused.program()?)
}

/// The calls that a filter refuses.
#[derive(Default)]
struct Refused {
    decisions: BTreeMap<u32, Decision>,
    if_one_applies: BTreeMap<i64, Vec<SeccompRule>>,
}

impl Refused {
    /// [`DANGEROUS`], limits of other processes and [`REQUESTS`].
    fn dangerous() -> Result<Self, Error> {
        let mut refused = Refused::default();
        refused.always(DANGEROUS);
        let is_other_process = rule(0, SeccompCmpOp::Ne, 0)?;
        refused.if_one_applies(libc::SYS_prlimit64, vec![is_other_process]);
        let requests = REQUESTS.map(|request| rule(1, SeccompCmpOp::Eq, request));
        let requests: Result<Vec<_>, _> = requests.into_iter().collect();
        refused.if_one_applies(libc::SYS_ioctl, requests?);
        Ok(refused)
    }

    /// [`PROGRAMS`], new processes and limits, also of this process: some keep the capability to
    /// raise limits.
    fn programs(&mut self) -> Result<(), Error> {
        self.always(PROGRAMS);
        let limits = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?;
        let is_other_process = rule(0, SeccompCmpOp::Ne, 0)?;
        let rules = vec![SeccompRule::new(vec![limits])?, is_other_process];
        self.if_one_applies(libc::SYS_prlimit64, rules);
        let is_no_thread = SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64);
        self.if_one_applies(libc::SYS_clone, vec![rule(0, is_no_thread, 0)?]);
        Ok(())
    }

    /// unshare(2), except with only one of these flags. `CLONE_THREAD` changes nothing, and is an
    /// error if the process has other threads.
    fn namespaces(&mut self, possible: &[i32]) -> Result<(), Error> {
        let others = possible.iter().map(|&flag| {
            SeccompCondition::new(0, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, flag as u64)
        });
        let is_other = SeccompRule::new(others.collect::<Result<_, _>>()?)?;
        self.if_one_applies(libc::SYS_unshare, vec![is_other]);
        Ok(())
    }

    /// Sockets of all families but those that the service makes, and those below TCP and UDP.
    fn families(&mut self, service: Service) -> Result<(), Error> {
        /// The type of a socket, without its flags.
        const TYPE: SeccompCmpOp = SeccompCmpOp::MaskedEq(0xf);
        let possible: &[_] = match service {
            Service::Mounts => &[libc::AF_UNIX],
            Service::Devices => &[libc::AF_NETLINK],
            _ => &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6],
        };
        let others = possible.iter().map(|&family| {
            SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family as u64)
        });
        let is_other = SeccompRule::new(others.collect::<Result<_, _>>()?)?;
        let is_raw = rule(1, TYPE, libc::SOCK_RAW as u64)?;
        self.if_one_applies(libc::SYS_socket, vec![is_other, is_raw]);
        Ok(())
    }

    /// [`SOCKETS`], [`MESSAGES`], and messages to other addresses.
    fn sockets(&mut self) -> Result<(), Error> {
        const ADDRESS: u8 = 4;
        self.always(SOCKETS);
        self.always(MESSAGES);
        let address = SeccompCondition::new(ADDRESS, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?;
        let has_address = SeccompRule::new(vec![address])?;
        self.if_one_applies(libc::SYS_sendto, vec![has_address]);
        Ok(())
    }

    fn always(&mut self, calls: &[c_long]) {
        let refused = |&call: &c_long| (call as u32, Decision::Refuse(libc::EPERM));
        self.decisions.extend(calls.iter().map(refused));
    }

    fn if_one_applies(&mut self, call: c_long, rules: Vec<SeccompRule>) {
        self.decisions.insert(call as u32, Decision::Examine);
        self.if_one_applies.insert(call, rules);
    }

    fn program(self) -> Result<BpfProgram, Error> {
        let refuse = SeccompAction::Errno(libc::EPERM as u32);
        let target = std::env::consts::ARCH.try_into()?;
        let rules = SeccompFilter::new(self.if_one_applies, SeccompAction::Allow, refuse, target)?;
        Ok(program::decide(&self.decisions, rules.try_into()?)?)
    }
}

/// Applies if the lower half of an argument has this value.
fn rule(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?;
    SeccompRule::new(vec![condition])
}
