/* Faults of the C library in one process, for LD_PRELOAD. FAULT_SHIM names a file of two int64: what is added to the wall
   clock [ns], and whether fsync fails. Another process changes them while this one runs. The kernel's clock stays, so waits
   until an instant of the wall clock are translated; one that has begun when the clock is set back takes longer, as with
   the real clock. (One that has begun when it is set ahead ends when it would have; with the real clock, at once.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *faults;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULT_SHIM");
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *memory = mmap(NULL, 2 * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (memory != MAP_FAILED) faults = memory;
    }
}

int clock_gettime(clockid_t id, struct timespec *out) {
    if (!real_gettime) real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real_gettime(id, out);
    if (result == 0 && faults && faults[0] && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        int64_t time = out->tv_sec * INT64_C(1000000000) + out->tv_nsec + faults[0];
        out->tv_sec = time / INT64_C(1000000000);
        out->tv_nsec = time % INT64_C(1000000000);
    }
    return result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

/* An instant for the kernel. Those of the steady clock, which counts from the start of the machine, are small. */
static const struct timespec *instant(const struct timespec *until, struct timespec *translated) {
    if (!until || !faults || until->tv_sec < 500000000) return until;
    int64_t time = until->tv_sec * INT64_C(1000000000) + until->tv_nsec - faults[0];
    translated->tv_sec = time / INT64_C(1000000000);
    translated->tv_nsec = time % INT64_C(1000000000);
    return translated;
}

/* Whether a wait that has ended goes on: the wall clock was set back meanwhile, and has not come to that instant. */
static int goes_on(const struct timespec *until) {
    struct timespec now;
    if (!until || !faults || until->tv_sec < 500000000) return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec < until->tv_sec || (now.tv_sec == until->tv_sec && now.tv_nsec < until->tv_nsec);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec translated;
    int result;
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");  /* dlsym may find the oldest */
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    do result = real(condition, mutex, instant(until, &translated));
    while (result == ETIMEDOUT && goes_on(until));
    return result;
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    struct timespec translated;
    int result;
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    do result = real(condition, mutex, clock, instant(until, &translated));
    while (result == ETIMEDOUT && goes_on(until));
    return result;
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*real)(pthread_mutex_t *, const struct timespec *);
    struct timespec translated;
    int result;
    if (!real) real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    do result = real(mutex, instant(until, &translated));
    while (result == ETIMEDOUT && goes_on(until));
    return result;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    struct timespec translated;
    int result;
    if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
    do result = real(semaphore, instant(until, &translated));
    while (result && errno == ETIMEDOUT && goes_on(until));
    return result;
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until) {
    static int (*real)(sem_t *, clockid_t, const struct timespec *);
    struct timespec translated;
    int result;
    if (!real) real = dlsym(RTLD_NEXT, "sem_clockwait");
    do result = real(semaphore, clock, instant(until, &translated));
    while (result && errno == ETIMEDOUT && goes_on(until));
    return result;
}

int fsync(int file) {
    if (faults && faults[1]) { errno = EIO; return -1; }
    return real_fsync(file);
}

int fdatasync(int file) {
    if (faults && faults[1]) { errno = EIO; return -1; }
    return real_fdatasync(file);
}
