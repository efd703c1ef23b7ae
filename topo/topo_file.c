/* Read a whole file that may be anything. SPDX-License-Identifier: Apache-2.0 */
#include "topo_read.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Its size is known; it must not change meanwhile. */
static int read_all(int fd, const char *path, char *text, size_t size, struct numoe_error *error)
{
    size_t used = 0;

    while (used < size) {
        ssize_t got = read(fd, text + used, size - used);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return numoe_error_set(error, -errno, path, "cannot read: %s", strerror(errno));
        if (got == 0)
            return numoe_error_set(error, -EINVAL, path, "the file shrank while it was read");
        used += (size_t)got;
    }
    text[size] = 0;
    return 0;
}

int topo_file_read(const char *path, size_t most, const char *what, char **text, size_t *bytes,
                   struct numoe_error *error)
{
    struct stat info;
    char *made = NULL;
    size_t size = 0;
    int fd, rc;

    /* a pipe without a writer must not hold up the open */
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return numoe_error_set(error, -errno, path, "cannot open: %s", strerror(errno));
    if (fstat(fd, &info)) {
        rc = numoe_error_set(error, -errno, path, "cannot open: %s", strerror(errno));
        goto out;
    }
    if (!S_ISREG(info.st_mode)) {
        rc = numoe_error_set(error, -EINVAL, path, "not a regular file");
        goto out;
    }
    if (info.st_size < 0 || (uint64_t)info.st_size > most) {
        rc = numoe_error_set(error, -E2BIG, path,
                             "%lld bytes are too many for a %s; %zu are allowed",
                             (long long)info.st_size, what, most);
        goto out;
    }
    size = (size_t)info.st_size;
    made = malloc(size + 1);
    rc = made ? read_all(fd, path, made, size, error)
              : numoe_error_set(error, -ENOMEM, path, "out of memory for %zu bytes", size);
out:
    close(fd);
    if (rc) {
        free(made);
    } else {
        *text = made;
        *bytes = size;
    }
    return rc;
}
