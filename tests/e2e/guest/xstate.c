/* Lets User-Mode Linux run on processors whose extended state outgrew its buffer (AMX: 11 KB, the
   buffer has 2.7).

   The host takes the state of a traced process only as a whole. The content of the caller's buffer
   replaces the first part of the current state; the rest, which the caller never saw, stays with its
   process. Preloaded into the UML kernel. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

#define SETREGSET 0x4205
#define GETREGSET 0x4204
#define XSTATE 0x202

static long (*host)(int, int, void *, void *);
/* Static: the stacks of a UML kernel have 16 KB, and it traces from one thread. */
static unsigned char whole[64 << 10];

__attribute__((constructor)) static void find(void)
{
    host = (long (*)(int, int, void *, void *))dlsym(RTLD_NEXT, "ptrace");
}

long ptrace(enum __ptrace_request request, ...)
{
    va_list rest;
    va_start(rest, request);
    int pid = va_arg(rest, int);
    void *where = va_arg(rest, void *), *data = va_arg(rest, void *);
    va_end(rest);

    long result = host(request, pid, where, data);
    /* The error, EFAULT, is not checked: signal handlers of the UML kernel change errno at any
       moment. */
    if (result == 0 || request != SETREGSET || (long)where != XSTATE)
        return result;
    struct iovec *given = data, all = { whole, sizeof whole };
    if (host(GETREGSET, pid, where, &all) < 0 || given->iov_len > all.iov_len)
        return -1;
    /* Which components the state holds, at byte 512: AMX's two are the process's own. */
    unsigned long long before, after;
    memcpy(&before, whole + 512, 8);
    memcpy(whole, given->iov_base, given->iov_len);
    memcpy(&after, whole + 512, 8);
    after = (after & ~(3ULL << 17)) | (before & (3ULL << 17));
    memcpy(whole + 512, &after, 8);
    return host(SETREGSET, pid, where, &all);
}
