/* Preloaded before the C library: counts the calls that touch a folder, and has one of them fail.

   What is to happen stands in memory that is shared with the process that forks: which call (its number among those
   of the main thread, or among those of the other threads), and what is to become of it. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, ERROR, FULL, SHORT, KILL, TORN };  /* FULL: ENOSPC from then on; TORN: half a write, then death */

struct plan {
    int kind, error, thread, struck;  /* thread: 0 the main one, 1 the others */
    long turn, calls[2];
    int dirty_count;
    unsigned long dirty[256], durable[256];  /* inodes of files with unsynchronised writes, and the bytes before them */
    long log_length;
    char folder[4096], log[1 << 18];
};

static struct plan *plan;

__attribute__((constructor)) static void start(void)
{
    plan = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

struct plan *faults(void) { return plan; }

#define REAL(name) \
    static typeof(&name) real; \
    if (!real) real = (typeof(&name))dlsym(RTLD_NEXT, #name)

/* Whether a path, or what a descriptor is open on, lies in the folder; `full` takes its name. */
static int inside(int directory, const char *path, char *full)
{
    full[0] = 0;
    if (!plan || !plan->folder[0]) return 0;
    if (!path || path[0] != '/') {
        char link[64];
        long length = 0;
        if (directory >= 0) {
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            length = syscall(SYS_readlinkat, AT_FDCWD, link, full, 4000);
            if (length < 0) length = 0;
        }
        full[length] = 0;
        if (path && path[0]) snprintf(full + length, 4096 - length, "/%s", path);
    } else
        snprintf(full, 4096, "%s", path);
    size_t length = strlen(plan->folder);
    return !strncmp(full, plan->folder, length) && (full[length] == '/' || !full[length]);
}

static void die(void)
{
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* Count a call; what is to become of it. */
static int next(const char *name, const char *full, int takes_room)
{
    int thread = syscall(SYS_gettid) != getpid();
    long number = __atomic_add_fetch(&plan->calls[thread], 1, __ATOMIC_SEQ_CST);
    char line[4400];
    long length = snprintf(line, sizeof line, "%d %s %s\n", thread, name, full);
    long from = __atomic_fetch_add(&plan->log_length, length, __ATOMIC_SEQ_CST);  /* a place of its own for each thread */
    if (from + length < (long)sizeof plan->log) memcpy(plan->log + from, line, length);
    if (plan->kind == FULL && takes_room && plan->struck) {
        errno = ENOSPC;
        return ERROR;
    }
    if (plan->kind == NOTHING || thread != plan->thread || number != plan->turn) return NOTHING;
    plan->struck = 1;
    if (plan->kind == FULL && !takes_room) return NOTHING;
    errno = plan->kind == FULL ? ENOSPC : plan->error;
    return plan->kind == FULL ? ERROR : plan->kind;
}

static void after(int what)
{
    if (what == KILL || what == TORN) die();
}

/* Bytes were added to a file, or (written < 0) it was synchronised. */
static void note(int descriptor, ssize_t written)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  /* TensorBoard writes in a thread of its own */
    struct stat status;
    if (syscall(SYS_fstat, descriptor, &status)) return;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < plan->dirty_count && plan->dirty[i] != status.st_ino) i++;
    if (written > 0 && i == plan->dirty_count && i < 256) {
        plan->dirty[i] = status.st_ino;
        plan->durable[i] = status.st_size - written;
        plan->dirty_count++;
    } else if (written < 0 && i < plan->dirty_count) {
        plan->dirty_count--;
        plan->dirty[i] = plan->dirty[plan->dirty_count];
        plan->durable[i] = plan->durable[plan->dirty_count];
    }
    pthread_mutex_unlock(&lock);
}

/* A call that touches the folder if `where` says so, and that fails as `failure` does. */
#define CALL(name, where, room, failure, type, call) \
    char full[4200]; \
    REAL(name); \
    if (!(where)) return call; \
    int what = next(#name, full, room); \
    if (what == ERROR) return failure; \
    type result = call; \
    int kept = errno; \
    after(what); \
    errno = kept; \
    return result

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        MODE \
        CALL(name, inside(-1, path, full), flags & O_CREAT, -1, int, real(path, flags, mode)); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int directory, const char *path, int flags, ...) \
    { \
        MODE \
        CALL(name, inside(directory, path, full), flags & O_CREAT, -1, int, real(directory, path, flags, mode)); \
    }
OPENAT(openat)
OPENAT(openat64)

int creat(const char *path, mode_t mode) { CALL(creat, inside(-1, path, full), 1, -1, int, real(path, mode)); }
int creat64(const char *path, mode_t mode) { CALL(creat64, inside(-1, path, full), 1, -1, int, real(path, mode)); }

#define READ(name, tail, ...) \
    ssize_t name(int descriptor, void *data, size_t count __VA_ARGS__) \
    { \
        char full[4200]; \
        REAL(name); \
        if (!inside(descriptor, NULL, full)) return real(descriptor, data, count tail); \
        int what = next(#name, full, 0); \
        if (what == ERROR) return -1; \
        if (what == SHORT && count > 1) count /= 2; \
        ssize_t result = real(descriptor, data, count tail); \
        after(what); \
        return result; \
    }
#define AT , at
READ(read, )
READ(pread, AT, , off_t at)
READ(pread64, AT, , off64_t at)

#define WRITE(name, tail, ...) \
    ssize_t name(int descriptor, const void *data, size_t count __VA_ARGS__) \
    { \
        char full[4200]; \
        REAL(name); \
        if (!inside(descriptor, NULL, full)) return real(descriptor, data, count tail); \
        int what = next(#name, full, 1); \
        if (what == ERROR) return -1; \
        if ((what == SHORT || what == TORN) && count > 1) count /= 2; \
        ssize_t result = real(descriptor, data, count tail); \
        if (result > 0) note(descriptor, result); \
        after(what); \
        return result; \
    }
WRITE(write, )
WRITE(pwrite, AT, , off_t at)
WRITE(pwrite64, AT, , off64_t at)

ssize_t readv(int descriptor, const struct iovec *parts, int count)
{
    CALL(readv, inside(descriptor, NULL, full), 0, -1, ssize_t, real(descriptor, parts, count));
}

ssize_t writev(int descriptor, const struct iovec *parts, int count)
{
    char full[4200];
    REAL(writev);
    if (!inside(descriptor, NULL, full)) return real(descriptor, parts, count);
    int what = next("writev", full, 1);
    if (what == ERROR) return -1;
    if ((what == SHORT || what == TORN) && count > 1) count /= 2;
    ssize_t result = real(descriptor, parts, count);
    if (result > 0) note(descriptor, result);
    after(what);
    return result;
}

#define SYNC(name) \
    int name(int descriptor) \
    { \
        char full[4200]; \
        REAL(name); \
        if (!inside(descriptor, NULL, full)) return real(descriptor); \
        int what = next(#name, full, 1); \
        if (what == ERROR) return -1; \
        int result = real(descriptor); \
        note(descriptor, -1); \
        after(what); \
        return result; \
    }
SYNC(fsync)
SYNC(fdatasync)

int close(int descriptor)
{
    char full[4200];
    REAL(close);
    if (!inside(descriptor, NULL, full)) return real(descriptor);
    int what = next("close", full, 0), error = errno, result = real(descriptor);
    after(what);
    if (what == ERROR) errno = error;
    return what == ERROR ? -1 : result;  /* as Linux does: closed, and told of what was not written */
}

#define TRUNCATE(name, offset) \
    int name(int descriptor, offset length) \
    { \
        CALL(name, inside(descriptor, NULL, full), 1, -1, int, real(descriptor, length)); \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

int rename(const char *old, const char *new)
{
    CALL(rename, inside(-1, old, full), 1, -1, int, real(old, new));
}

int renameat(int from, const char *old, int to, const char *new)
{
    CALL(renameat, inside(from, old, full), 1, -1, int, real(from, old, to, new));
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
    CALL(renameat2, inside(from, old, full), 1, -1, int, real(from, old, to, new, flags));
}

int mkdir(const char *path, mode_t mode) { CALL(mkdir, inside(-1, path, full), 1, -1, int, real(path, mode)); }

int mkdirat(int directory, const char *path, mode_t mode)
{
    CALL(mkdirat, inside(directory, path, full), 1, -1, int, real(directory, path, mode));
}

int unlink(const char *path) { CALL(unlink, inside(-1, path, full), 0, -1, int, real(path)); }
int rmdir(const char *path) { CALL(rmdir, inside(-1, path, full), 0, -1, int, real(path)); }

int unlinkat(int directory, const char *path, int flags)
{
    CALL(unlinkat, inside(directory, path, full), 0, -1, int, real(directory, path, flags));
}

DIR *opendir(const char *path) { CALL(opendir, inside(-1, path, full), 0, NULL, DIR *, real(path)); }

struct dirent *readdir(DIR *directory)
{
    CALL(readdir, inside(dirfd(directory), NULL, full), 0, NULL, struct dirent *, real(directory));
}

struct dirent64 *readdir64(DIR *directory)
{
    CALL(readdir64, inside(dirfd(directory), NULL, full), 0, NULL, struct dirent64 *, real(directory));
}

#define STAT(name, type) \
    int name(const char *path, struct type *status) \
    { \
        CALL(name, inside(-1, path, full), 0, -1, int, real(path, status)); \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

#define FSTAT(name, type) \
    int name(int descriptor, struct type *status) \
    { \
        CALL(name, inside(descriptor, NULL, full), 0, -1, int, real(descriptor, status)); \
    }
FSTAT(fstat, stat)
FSTAT(fstat64, stat64)

#define FSTATAT(name, type) \
    int name(int directory, const char *path, struct type *status, int flags) \
    { \
        CALL(name, inside(directory, path, full), 0, -1, int, real(directory, path, status, flags)); \
    }
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)

int statx(int directory, const char *path, int flags, unsigned mask, struct statx *status)
{
    CALL(statx, inside(directory, path, full), 0, -1, int, real(directory, path, flags, mask, status));
}

int access(const char *path, int mode) { CALL(access, inside(-1, path, full), 0, -1, int, real(path, mode)); }

#define MAP(name, offset) \
    void *name(void *at, size_t length, int protection, int flags, int descriptor, offset from) \
    { \
        CALL(name, descriptor >= 0 && inside(descriptor, NULL, full), 0, MAP_FAILED, void *, \
             real(at, length, protection, flags, descriptor, from)); \
    }
MAP(mmap, off_t)
MAP(mmap64, off64_t)
