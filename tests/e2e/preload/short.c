/* Preloaded into bcow: makes one read or write short, as a host may.

   SHORT_CALL names the function (read, pread64, write, pwrite64), SHORT_AT the number of its call
   that is short, from 1 on. At the end, the file SHORT_COUNTS gets the number of calls of each
   function, one line each. Calls for one byte are not counted. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { READ, PREAD64, WRITE, PWRITE64, CALLS };
static const char *const names[CALLS] = {"read", "pread64", "write", "pwrite64"};
static long counts[CALLS];
static int report = -1;

static size_t shortened(int call, size_t length)
{
    if (length < 2)
        return length;
    long number = __atomic_add_fetch(&counts[call], 1, __ATOMIC_SEQ_CST);
    const char *name = getenv("SHORT_CALL"), *at = getenv("SHORT_AT");
    return name && at && !strcmp(name, names[call]) && number == atol(at) ? length / 2 : length;
}

/* Opened at the start: a process in a sandbox opens no file later. */
static void __attribute__((constructor)) open_report(void)
{
    const char *path = getenv("SHORT_COUNTS");
    if (path)
        report = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
}

static void __attribute__((destructor)) write_report(void)
{
    for (int call = 0; report >= 0 && call < CALLS; call++)
        dprintf(report, "%s %ld\n", names[call], counts[call]);
}

ssize_t read(int descriptor, void *bytes, size_t length)
{
    return syscall(SYS_read, descriptor, bytes, shortened(READ, length));
}

ssize_t pread64(int descriptor, void *bytes, size_t length, off64_t at)
{
    return syscall(SYS_pread64, descriptor, bytes, shortened(PREAD64, length), at);
}

ssize_t write(int descriptor, const void *bytes, size_t length)
{
    return syscall(SYS_write, descriptor, bytes, shortened(WRITE, length));
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t length, off64_t at)
{
    return syscall(SYS_pwrite64, descriptor, bytes, shortened(PWRITE64, length), at);
}
