//! The system calls that a process cannot make (seccomp(2)). They fail with EPERM, and the process
//! continues.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp,
    SeccompCondition, SeccompFilter, SeccompRule, sock_filter,
};

use crate::{Attributes, Service};

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

/// Calls that start programs and processes, and choose their CPUs. Threads are possible.
const PROGRAMS: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_sched_setaffinity,
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
    libc::SYS_utimensat,
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

/// Calls that change the mode, the owner or the attributes of an open file, also of one that is
/// open for reading.
const ATTRIBUTES: &[c_long] = &[
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

/// Refuses [`DANGEROUS`], [`PROGRAMS`], [`MOUNTS`] and new namespaces; and [`OF_ALL_FILES`] if the
/// process needs none.
pub fn refuse_dangerous(attributes: Attributes) -> Result<(), Error> {
    let mut rules = dangerous()?;
    refuse_programs(&mut rules)?;
    rules.append(&mut always(MOUNTS));
    rules.append(&mut always(&[libc::SYS_unshare]));
    if attributes != Attributes::OfAllFiles {
        rules.append(&mut always(OF_ALL_FILES));
    }
    seccompiler::apply_filter(&program(rules)?)
}

/// Refuses [`DANGEROUS`] and new namespaces; and [`PROGRAMS`] if the service starts none.
pub fn refuse_to_service(service: Service) -> Result<(), Error> {
    let mut rules = dangerous()?;
    if service == Service::Mounts {
        refuse_programs(&mut rules)?;
    }
    // A thread can have a working directory of its own.
    let is_namespace = rule(0, SeccompCmpOp::Ne, libc::CLONE_FS as u64)?;
    rules.insert(libc::SYS_unshare, vec![is_namespace]);
    seccompiler::apply_filter(&program(rules)?)
}

/// [`DANGEROUS`], limits of other processes and [`REQUESTS`].
fn dangerous() -> Result<Rules, Error> {
    let mut rules = always(DANGEROUS);
    let is_other_process = rule(0, SeccompCmpOp::Ne, 0)?;
    rules.insert(libc::SYS_prlimit64, vec![is_other_process]);
    let requests = REQUESTS.map(|request| rule(1, SeccompCmpOp::Eq, request));
    let requests: Result<Vec<_>, _> = requests.into_iter().collect();
    rules.insert(libc::SYS_ioctl, requests?);
    Ok(rules)
}

/// Adds [`PROGRAMS`] and new processes.
fn refuse_programs(rules: &mut Rules) -> Result<(), Error> {
    rules.append(&mut always(PROGRAMS));
    let is_no_thread = SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64);
    rules.insert(libc::SYS_clone, vec![rule(0, is_no_thread, 0)?]);
    Ok(())
}

/// Refuses sockets of all families but Unix and the Internet, and those below TCP and UDP.
pub fn refuse_families() -> Result<(), Error> {
    /// The type of a socket, without its flags.
    const TYPE: SeccompCmpOp = SeccompCmpOp::MaskedEq(0xf);
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6].map(|family| {
        SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family as u64)
    });
    let families: Result<Vec<_>, _> = families.into_iter().collect();
    let is_raw = rule(1, TYPE, libc::SOCK_RAW as u64)?;
    let sockets = vec![SeccompRule::new(families?)?, is_raw];
    seccompiler::apply_filter(&program([(libc::SYS_socket, sockets)].into())?)
}

/// Refuses [`SOCKETS`], [`MESSAGES`] unless the process sends some, messages to other addresses,
/// and [`ATTRIBUTES`] if the process needs none, to all threads of the process.
pub fn refuse_sockets(attributes: Attributes, sends_messages: bool) -> Result<(), Error> {
    const ADDRESS: u8 = 4;
    let mut rules = always(SOCKETS);
    if !sends_messages {
        rules.append(&mut always(MESSAGES));
    }
    if attributes == Attributes::Refused {
        rules.append(&mut always(ATTRIBUTES));
    }
    let condition = SeccompCondition::new(ADDRESS, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?;
    let has_address = SeccompRule::new(vec![condition])?;
    rules.insert(libc::SYS_sendto, vec![has_address]);
    seccompiler::apply_filter_all_threads(&program(rules)?)
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn always(calls: &[c_long]) -> Rules {
    calls.iter().map(|&call| (call, Vec::new())).collect()
}

/// Applies if the lower half of an argument has this value.
fn rule(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?;
    SeccompRule::new(vec![condition])
}

fn program(rules: Rules) -> Result<BpfProgram, Error> {
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let target = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, target)?;
    let mut program = before();
    program.append(&mut BpfProgram::try_from(filter)?);
    Ok(program)
}

/// Instructions before those of the rules, which cannot say this: clone3(2) is missing, because its
/// flags are in memory, and the C library then calls clone(2). And no call has a number of x32,
/// the second numbering of x86-64.
fn before() -> BpfProgram {
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const JUMP_IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    const X32: u32 = 0x4000_0000;
    let instruction = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let errno = |errno: i32| libc::SECCOMP_RET_ERRNO | errno as u32;
    vec![
        // The number is the first field of `struct seccomp_data`.
        instruction(LOAD_NUMBER, 0, 0, 0),
        instruction(JUMP_IF_EQUAL, 0, 1, libc::SYS_clone3 as u32),
        instruction(RETURN, 0, 0, errno(libc::ENOSYS)),
        instruction(JUMP_IF_AT_LEAST, 0, 1, X32),
        instruction(RETURN, 0, 0, errno(libc::EPERM)),
    ]
}
