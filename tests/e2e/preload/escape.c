/* Preloaded into bcow: does from inside what a sandbox refuses, and reports it.

   ESCAPE_AT names the function that begins: `write` to standard output, `pread64`, or `connect` to
   an Internet address. They wait for the file ESCAPE_GO, if it is set. ESCAPE_REPORT is the file for the report: lines of a name and
   an error number, or 0 without an error. ESCAPE_PATHS has paths, separated by colons, each after
   `r` or `w`. With ESCAPE_CHANGES_ATTRIBUTES, the process may change those of its open files; if it
   is `all`, those of all files. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static int report = -1;
static pid_t opener;
static int begun;

static void __attribute__((constructor)) open_report(void)
{
    const char *path = getenv("ESCAPE_REPORT");
    opener = getpid();
    if (path)
        report = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
}

/* A process that the one with the report has forked may have closed it. */
static void reopen_report(void)
{
    if (opener != getpid())
        open_report();
}

static void note(const char *name, long result)
{
    int error = result < 0 ? errno : 0;
    dprintf(report, "%s %d\n", name, error);
}

/* A call whose result is a descriptor, or nothing. */
static void opened(const char *name, long descriptor)
{
    note(name, descriptor);
    if (descriptor > 0)
        close(descriptor);
}

/* A call that returns in two processes. */
static void started(const char *name, long pid)
{
    if (pid == 0)
        _exit(0);
    note(name, pid);
    if (pid > 0)
        waitpid(pid, NULL, 0);
}

/* More memory than any machine has, which is not used. */
static void try_memory(void)
{
    const size_t bytes = (size_t)1 << 44;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    note("memory", memory == MAP_FAILED ? -1 : 0);
    if (memory != MAP_FAILED)
        munmap(memory, bytes);
}

/* The limits stay as they are. */
static void try_limits(void)
{
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    note("setrlimit", syscall(SYS_setrlimit, RLIMIT_NOFILE, &limit));
    note("set_own_limit", syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, &limit, NULL));
}

static void try_paths(void)
{
    char *paths = strdup(getenv("ESCAPE_PATHS") ?: "");
    for (char *path = strtok(paths, ":"); path; path = strtok(NULL, ":")) {
        int how = path[0] == 'w' ? O_WRONLY | O_CREAT | O_NONBLOCK : O_RDONLY | O_NONBLOCK;
        opened(path, open(path + 1, how, 0666));
    }
    free(paths);
}

/* The calls fail in every process, or change nothing, except for the last one. */
static void try_all(void)
{
    const char *changes = getenv("ESCAPE_CHANGES_ATTRIBUTES") ?: "none";
    char *const arguments[] = {"/bin/true", NULL};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    note("ptrace", ptrace(PTRACE_PEEKDATA, 0, NULL, NULL));
    note("process_vm_readv", syscall(SYS_process_vm_readv, getpid(), NULL, 0, NULL, 0, 0));
    note("process_vm_writev", syscall(SYS_process_vm_writev, getpid(), NULL, 0, NULL, 0, 0));
    note("pidfd_getfd", syscall(SYS_pidfd_getfd, -1, 0, 0));
    note("mount", syscall(SYS_mount, NULL, "/no/place", NULL, 0, NULL));
    note("umount2", syscall(SYS_umount2, "/no/place", 0));
    note("pivot_root", syscall(SYS_pivot_root, "/no/place", "/no/place"));
    note("move_mount", syscall(SYS_move_mount, -1, "x", -1, "x", 0));
    note("fsopen", syscall(SYS_fsopen, NULL, 0));
    note("chroot", syscall(SYS_chroot, "/no/place"));
    note("unshare", syscall(SYS_unshare, 0));
    note("setns", syscall(SYS_setns, -1, 0));
    note("init_module", syscall(SYS_init_module, NULL, 0, "/"));
    note("finit_module", syscall(SYS_finit_module, -1, "", 0));
    note("bpf", syscall(SYS_bpf, 9999, NULL, 0));
    note("perf_event_open", syscall(SYS_perf_event_open, NULL, 0, -1, -1, 0));
    note("keyctl", syscall(SYS_keyctl, 9999));
    note("io_uring_setup", syscall(SYS_io_uring_setup, 0, NULL));
    note("userfaultfd", syscall(SYS_userfaultfd, -1));
    note("open_by_handle_at", syscall(SYS_open_by_handle_at, -1, NULL, 0));
    note("clock_settime", syscall(SYS_clock_settime, 9999, NULL));
    if (strcmp(changes, "all")) {
        note("chmod", syscall(SYS_fchmodat, AT_FDCWD, "/no/place", 0600));
        note("chown", syscall(SYS_fchownat, AT_FDCWD, "/no/place", 0, 0, 0));
        note("setxattr", syscall(SYS_setxattr, "/no/place", "user.x", "", 0, 0));
        note("utimensat", syscall(SYS_utimensat, AT_FDCWD, "/no/place", NULL, 0));
        note("mknod", syscall(SYS_mknodat, AT_FDCWD, "/no/place", S_IFIFO, 0));
    }
    note("shmget", syscall(SYS_shmget, IPC_PRIVATE, 0, 0));
    note("msgctl", syscall(SYS_msgctl, -1, IPC_STAT, NULL));
    note("semget", syscall(SYS_semget, IPC_PRIVATE, -1, 0));
    note("mq_open", syscall(SYS_mq_open, NULL, O_RDONLY, 0, NULL));
    note("prlimit", syscall(SYS_prlimit64, 1, 9999, NULL, NULL));
    try_limits();
    try_memory();
    note("setpriority", syscall(SYS_setpriority, 9999, 0, 0));
    note("sched_setattr", syscall(SYS_sched_setattr, -1, NULL, 0));
    if (!strcmp(changes, "none")) {
        note("fchmod", fchmod(-1, 0600));
        note("fchown", fchown(-1, 0, 0));
        note("fsetxattr", syscall(SYS_fsetxattr, -1, "user.x", "", 0, 0));
    }
    note("typing", ioctl(STDIN_FILENO, TIOCSTI, "x"));
    note("terminal_driver", ioctl(STDIN_FILENO, TIOCSETD, NULL));
    note("set_flags", ioctl(-1, FS_IOC_SETFLAGS, NULL));
    note("fssetxattr", ioctl(-1, FS_IOC_FSSETXATTR, NULL));
    opened("socket_tcp", socket(AF_INET, SOCK_STREAM, 0));
    opened("socket_unix", socket(AF_UNIX, SOCK_STREAM, 0));
    opened("socket_netlink", socket(AF_NETLINK, SOCK_DGRAM, 0));
    opened("socket_vsock", socket(AF_VSOCK, SOCK_STREAM, 0));
    note("connect", connect(-1, NULL, 0));
    note("listen", listen(-1, 0));
    note("sendto", sendto(-1, "x", 1, 0, (struct sockaddr *)&address, sizeof address));
    note("sendmsg", sendmsg(-1, NULL, 0));
    note("signal", kill(getppid(), 0));
#ifdef __x86_64__
    note("x32", syscall(0x40000000 | SYS_getpid));
#endif
    started("fork", syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL));
    try_paths();
    note("execve", syscall(SYS_execve, "/no/program", arguments, NULL));
    note("end", 0);
}

static void begin_at(const char *function)
{
    const char *at = getenv("ESCAPE_AT"), *go = getenv("ESCAPE_GO");
    if (report < 0 || !at || strcmp(at, function) || (go && access(go, F_OK)))
        return;
    if (!__atomic_exchange_n(&begun, 1, __ATOMIC_SEQ_CST)) {
        int error = errno;
        reopen_report();
        try_all();
        errno = error;
    }
}

ssize_t write(int descriptor, const void *bytes, size_t length)
{
    if (descriptor == STDOUT_FILENO)
        begin_at("write");
    return syscall(SYS_write, descriptor, bytes, length);
}

int connect(int descriptor, const struct sockaddr *address, socklen_t length)
{
    if (address && (address->sa_family == AF_INET || address->sa_family == AF_INET6))
        begin_at("connect");
    return syscall(SYS_connect, descriptor, address, length);
}

ssize_t pread64(int descriptor, void *bytes, size_t length, off64_t at)
{
    begin_at("pread64");
    return syscall(SYS_pread64, descriptor, bytes, length, at);
}
