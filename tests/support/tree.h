/* Files of a directory that stands for another machine's. SPDX-License-Identifier: Apache-2.0 */
#ifndef TREE_H
#define TREE_H

#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* Write root/name, of which folders may be missing. */
__attribute__((format(printf, 3, 0))) static inline void
tree_vput(const char *root, const char *name, const char *format, va_list args)
{
    char path[512], *slash;
    FILE *file;

    snprintf(path, sizeof path, "%s/%s", root, name);
    for (slash = path + strlen(root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(path, 0777);
        *slash = '/';
    }
    file = fopen(path, "w");
    cr_assert_not_null(file, "%s", path);
    vfprintf(file, format, args);
    fclose(file);
}

__attribute__((format(printf, 3, 4))) static inline void
tree_put(const char *root, const char *name, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    tree_vput(root, name, format, args);
    va_end(args);
}

#endif
