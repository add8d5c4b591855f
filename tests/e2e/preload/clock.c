/* Preloaded into bcow: the clock of the day jumps by years at each look, forwards and backwards.
   The monotonic clock does not: it cannot. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long calls;

static time_t jump(void)
{
    static const int years[] = {0, 10, -3, 70, -30, 1, -20};
    long call = __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
    return (time_t)years[call % (sizeof years / sizeof *years)] * 365 * 24 * 60 * 60;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = syscall(SYS_clock_gettime, clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    int result = syscall(SYS_gettimeofday, now, zone);
    if (!result)
        now->tv_sec += jump();
    return result;
}

time_t time(time_t *result)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}
