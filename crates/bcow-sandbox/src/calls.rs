//! The system calls that a process cannot make (seccomp(2)). They fail with EPERM, and the process
//! continues.

use std::collections::{BTreeMap, BTreeSet};

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

/// Refuses [`DANGEROUS`], [`PROGRAMS`], [`MOUNTS`] and new namespaces; [`OF_ALL_FILES`] unless the
/// process changes those of all files; and then also utimensat(2), except without a path (for an
/// open file) if the process changes those of open files.
pub fn refuse_dangerous(attributes: Attributes) -> Result<(), Error> {
    let mut refused = Refused::dangerous()?;
    refused.programs()?;
    refused.always(MOUNTS);
    refused.always(&[libc::SYS_unshare]);
    if attributes != Attributes::OfAllFiles {
        refused.always(OF_ALL_FILES);
    }
    match attributes {
        Attributes::Refused => refused.always(&[libc::SYS_utimensat]),
        // Without a path, it is for an open file.
        Attributes::OfOpenFiles => {
            let path = SeccompCondition::new(1, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?;
            let has_path = SeccompRule::new(vec![path])?;
            refused.if_one_applies(libc::SYS_utimensat, vec![has_path]);
        }
        Attributes::OfAllFiles => {}
    }
    seccompiler::apply_filter(&refused.program()?)
}

/// Refuses [`DANGEROUS`] and new namespaces; and [`PROGRAMS`] and [`MOUNTS`] if the service needs
/// none.
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
    let is_namespace = rule(0, SeccompCmpOp::Ne, libc::CLONE_FS as u64)?;
    refused.if_one_applies(libc::SYS_unshare, vec![is_namespace]);
    seccompiler::apply_filter(&refused.program()?)
}

/// Refuses sockets of all families but those that the service makes, and those below TCP and UDP.
pub fn refuse_families(service: Service) -> Result<(), Error> {
    /// The type of a socket, without its flags.
    const TYPE: SeccompCmpOp = SeccompCmpOp::MaskedEq(0xf);
    let possible: &[_] = match service {
        Service::Mounts => &[libc::AF_UNIX],
        Service::Devices => &[libc::AF_NETLINK],
        _ => &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6],
    };
    let families = possible.iter().map(|&family| {
        SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family as u64)
    });
    let families: Result<Vec<_>, _> = families.collect();
    let is_raw = rule(1, TYPE, libc::SOCK_RAW as u64)?;
    let sockets = vec![SeccompRule::new(families?)?, is_raw];
    let mut refused = Refused::default();
    refused.if_one_applies(libc::SYS_socket, sockets);
    seccompiler::apply_filter(&refused.program()?)
}

/// Refuses [`SOCKETS`], [`MESSAGES`] unless the process sends some, messages to other addresses,
/// and [`ATTRIBUTES`] if the process needs none, to all threads of the process.
pub fn refuse_sockets(attributes: Attributes, sends_messages: bool) -> Result<(), Error> {
    const ADDRESS: u8 = 4;
    let mut refused = Refused::default();
    refused.always(SOCKETS);
    if !sends_messages {
        refused.always(MESSAGES);
    }
    if attributes == Attributes::Refused {
        refused.always(ATTRIBUTES);
    }
    let condition = SeccompCondition::new(ADDRESS, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?;
    let has_address = SeccompRule::new(vec![condition])?;
    refused.if_one_applies(libc::SYS_sendto, vec![has_address]);
    seccompiler::apply_filter_all_threads(&refused.program()?)
}

/// The calls that a filter refuses.
#[derive(Default)]
struct Refused {
    always: BTreeSet<u32>,
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

    /// [`PROGRAMS`] and new processes.
    fn programs(&mut self) -> Result<(), Error> {
        self.always(PROGRAMS);
        let is_no_thread = SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64);
        self.if_one_applies(libc::SYS_clone, vec![rule(0, is_no_thread, 0)?]);
        Ok(())
    }

    fn always(&mut self, calls: &[c_long]) {
        self.always.extend(calls.iter().map(|&call| call as u32));
    }

    fn if_one_applies(&mut self, call: c_long, rules: Vec<SeccompRule>) {
        self.if_one_applies.insert(call, rules);
    }

    fn program(self) -> Result<BpfProgram, Error> {
        let refuse = SeccompAction::Errno(libc::EPERM as u32);
        let target = std::env::consts::ARCH.try_into()?;
        let rules = SeccompFilter::new(self.if_one_applies, SeccompAction::Allow, refuse, target)?;
        let mut program = begin();
        program.append(&mut search(&Vec::from_iter(self.always)));
        program.append(&mut BpfProgram::try_from(rules)?);
        Ok(program)
    }
}

/// Applies if the lower half of an argument has this value.
fn rule(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?;
    SeccompRule::new(vec![condition])
}

/// Refuses calls of all architectures of the kernel: clone3(2) is missing, because its flags are in
/// memory, and the C library then calls clone(2). And no call has a number of x32, the second
/// numbering of x86-64. The number of the call is loaded.
fn begin() -> BpfProgram {
    const X32: u32 = 0x4000_0000;
    vec![
        // It is the first field of `struct seccomp_data`.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        jump(libc::BPF_JEQ, 0, 1, libc::SYS_clone3 as u32),
        refuse(libc::ENOSYS),
        jump(libc::BPF_JGE, 0, 1, X32),
        refuse(libc::EPERM),
    ]
}

/// Refuses the calls with these numbers, which ascend. The kernel runs a filter once for each
/// number of a call when a process gets it, so this is a binary search. `seccompiler` compares one
/// after the other, which took most of the time of the sandbox.
fn search(numbers: &[u32]) -> BpfProgram {
    // As many are compared one after the other, each comparison with the distance to the refusal.
    const FEW: u8 = 4;
    if numbers.len() <= usize::from(FEW) {
        let mut program: BpfProgram = (0..numbers.len() as u8)
            .rev()
            .zip(numbers)
            .map(|(distance, &number)| {
                jump(libc::BPF_JEQ, distance, u8::from(distance == 0), number)
            })
            .collect();
        program.extend((!numbers.is_empty()).then(|| refuse(libc::EPERM)));
        return program;
    }
    let (low, high) = numbers.split_at(numbers.len() / 2);
    let skip = |program: &BpfProgram| {
        instruction(libc::BPF_JMP | libc::BPF_JA, 0, 0, program.len() as u32)
    };
    let (mut lower, mut higher) = (search(low), search(high));
    lower.push(skip(&higher));
    let mut program = vec![jump(libc::BPF_JGE, 0, 1, high[0]), skip(&lower)];
    program.append(&mut lower);
    program.append(&mut higher);
    program
}

fn refuse(errno: i32) -> sock_filter {
    let action = libc::SECCOMP_RET_ERRNO | errno as u32;
    instruction(libc::BPF_RET | libc::BPF_K, 0, 0, action)
}

/// Skips `jt` instructions if the number of the call compares with `k` so, and `jf` otherwise.
fn jump(comparison: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    instruction(libc::BPF_JMP | comparison | libc::BPF_K, jt, jf, k)
}

fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a program decides for a number, without arguments; and after how many instructions.
    fn decide(program: &[sock_filter], number: u32) -> (Option<u32>, usize) {
        let mut at = 0;
        for steps in 1.. {
            let Some(one) = program.get(at) else {
                return (None, steps);
            };
            at += 1;
            let class = u32::from(one.code) & 0x07;
            let taken = |applies: bool| usize::from(if applies { one.jt } else { one.jf });
            match (class, u32::from(one.code) & 0xf0) {
                (libc::BPF_RET, _) => return (Some(one.k), steps),
                (libc::BPF_JMP, libc::BPF_JA) => at += one.k as usize,
                (libc::BPF_JMP, libc::BPF_JEQ) => at += taken(number == one.k),
                (libc::BPF_JMP, libc::BPF_JGE) => at += taken(number >= one.k),
                _ => assert_eq!(class, libc::BPF_LD),
            }
        }
        unreachable!("no program has so long a way")
    }

    #[test]
    fn the_search_finds_the_numbers_in_few_steps() {
        for count in 0..130 {
            let numbers: Vec<u32> = (0..count)
                .map(|number| number * number / 7 + number)
                .collect();
            let program = search(&numbers);
            for number in 0..numbers.last().map_or(10, |last| last + 10) {
                let (decision, steps) = decide(&program, number);
                let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
                let wanted = numbers.contains(&number).then_some(refused);
                assert_eq!(decision, wanted, "{number} of {numbers:?}");
                assert!(steps <= 24, "{steps} of {}", program.len());
            }
        }
    }

    #[test]
    fn numbers_of_x32_and_clone3_are_refused_first() {
        let program = begin();
        let error = |errno: i32| Some(libc::SECCOMP_RET_ERRNO | errno as u32);
        let clone3 = libc::SYS_clone3 as u32;
        for (number, wanted) in [
            (clone3 - 1, None),
            (clone3, error(libc::ENOSYS)),
            (clone3 + 1, None),
            (0x3fff_ffff, None),
            (0x4000_0000, error(libc::EPERM)),
            (u32::MAX, error(libc::EPERM)),
        ] {
            assert_eq!(decide(&program, number).0, wanted, "{number}");
        }
    }
}
