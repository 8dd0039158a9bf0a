/* A disk that keeps only what was synced, for tests; loaded with LD_PRELOAD, used by powercut.py.

   fsync and fdatasync of whatever lies below POWERCUT_ROOT leave in POWERCUT_DISK, under the identity of the file or folder, what it held
   at that moment: bytes of a file, names of a folder. Nothing is synced for real. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Inode and time of birth, for the number alone is used again; "" if there is no such thing. */
static void key_of(int folder, const char *name, int flags, char *key, size_t size, int *is_folder) {
    struct statx found;
    *key = 0;
    if (statx(folder, name, flags | AT_SYMLINK_NOFOLLOW, STATX_INO | STATX_BTIME | STATX_TYPE, &found) == 0) {
        snprintf(key, size, "%llu-%lld-%u", (unsigned long long)found.stx_ino, (long long)found.stx_btime.tv_sec, found.stx_btime.tv_nsec);
        *is_folder = S_ISDIR(found.stx_mode);
    }
}

void powercut_key(const char *path, char *key, size_t size) {
    int is_folder;
    key_of(AT_FDCWD, path, 0, key, size, &is_folder);
}

static void note_names(int source, int target) {
    DIR *folder = fdopendir(source);
    struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
        char key[96], line[512];
        int is_folder = 0;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        key_of(dirfd(folder), entry->d_name, 0, key, sizeof key, &is_folder);
        if (*key) {
            int length = snprintf(line, sizeof line, "%s %c %s\n", key, is_folder ? 'd' : 'f', entry->d_name);
            if (write(target, line, length) != length)
                abort();
        }
    }
    if (folder)
        closedir(folder);
}

static void note_bytes(int source, int target) {
    char buffer[65536];
    ssize_t count;
    while ((count = read(source, buffer, sizeof buffer)) > 0)
        if (write(target, buffer, count) != count)
            abort();
    close(source);
}

/* Of two threads that sync one folder, the one that looked first must not note last what it has seen. */
static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;

static int note(int fd) {
    static long number;
    const char *disk = getenv("POWERCUT_DISK"), *root = getenv("POWERCUT_ROOT");
    char own[64], path[4096], key[96], part[4400], final[4400];
    int is_folder = 0;
    if (!disk || !root)
        return 0;
    snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(own, path, sizeof path - 1);
    if (length < 0)
        return -1;
    path[length] = 0;
    if (strncmp(path, root, strlen(root)) != 0)
        return 0;
    key_of(fd, "", AT_EMPTY_PATH, key, sizeof key, &is_folder);
    pthread_mutex_lock(&noting);
    snprintf(part, sizeof part, "%s/part-%d-%ld", disk, getpid(), number++);
    snprintf(final, sizeof final, "%s/%s", disk, key);
    int source = open(own, O_RDONLY | O_CLOEXEC), target = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (source < 0 || target < 0)
        abort();
    (is_folder ? note_names : note_bytes)(source, target);
    close(target);
    int renamed = rename(part, final); /* whole or not at all: the cut may come now */
    pthread_mutex_unlock(&noting);
    return renamed;
}

int fsync(int fd) { return note(fd); }
int fdatasync(int fd) { return note(fd); }
