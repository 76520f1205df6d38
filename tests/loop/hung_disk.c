/* Preloaded into a process: below the folder HUNG_DISK every call that a disk answers waits for as
 * long as the file HUNG_DISK_WHILE exists. "<HUNG_DISK_WHILE>.<call>" is made when one begins to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

static void answer(const char *call, const char *path)
{
    const char *disk = getenv("HUNG_DISK"), *hangs = getenv("HUNG_DISK_WHILE");
    char mark[PATH_MAX];
    if (!disk || !hangs || !path || strncmp(path, disk, strlen(disk)) || access(hangs, F_OK))
        return;
    snprintf(mark, sizeof mark, "%s.%s", hangs, call);
    close((int)syscall(SYS_openat, AT_FDCWD, mark, O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
    while (!access(hangs, F_OK))
        usleep(10000);
}

static void answer_fd(const char *call, int fd)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    answer(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int mkdir(const char *path, mode_t mode)
{
    answer("mkdir", path);
    return REAL(mkdir)(path, mode);
}

int rename(const char *from, const char *to)
{
    answer("rename", to);
    return REAL(rename)(from, to);
}

int unlink(const char *path)
{
    answer("unlink", path);
    return REAL(unlink)(path);
}

int fsync(int fd)
{
    answer_fd("fsync", fd);
    return REAL(fsync)(fd);
}

ssize_t write(int fd, const void *data, size_t size)
{
    answer_fd("write", fd);
    return REAL(write)(fd, data, size);
}

int fdatasync(int fd)
{
    answer_fd("fdatasync", fd);
    return REAL(fdatasync)(fd);
}

/* Each is there twice: programs with 64-bit file sizes call the second. */
#define PATH_CALL(name, type)                                                                      \
    int name(const char *path, type *found)                                                        \
    {                                                                                              \
        answer(#name, path);                                                                       \
        return REAL(name)(path, found);                                                            \
    }

PATH_CALL(stat, struct stat)
PATH_CALL(stat64, struct stat64)
PATH_CALL(statvfs, struct statvfs)
PATH_CALL(statvfs64, struct statvfs64)

static int open_mode(int flags, va_list more)
{
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;
}

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...)                                                     \
    {                                                                                              \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        int mode = open_mode(flags, more);                                                         \
        va_end(more);                                                                              \
        answer("open", path);                                                                      \
        return REAL(name)(path, flags, mode);                                                      \
    }

OPEN(open)
OPEN(open64)
