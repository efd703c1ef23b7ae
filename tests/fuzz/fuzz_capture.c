/*
 * A captured machine: a directory with sys/ and proc/ of another system, whose files hwloc reads in
 * a child, and numoe itself for what costs speed and for limits of cgroups. The input is text in
 * parts, each after a line that names a file:
 *
 *   ==proc/meminfo
 *   MemTotal: 12582912 kB
 *
 * Names are plain ones below sys/ and proc/; others are passed over.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "fuzz.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MOST_FILES = 256, MOST_NAME = 200 };

/* Letters, digits and a few signs, no part of which is "." or ".."; below sys/ or proc/. */
static bool plain(const char *name, size_t length)
{
    if (length >= MOST_NAME || (strncmp(name, "sys/", 4) != 0 && strncmp(name, "proc/", 5) != 0))
        return false;
    for (size_t i = 0; i < length; i++) {
        bool begins = i == 0 || name[i - 1] == '/';

        if (!isalnum((unsigned char)name[i]) && !strchr("_-:/.", name[i]))
            return false;
        if (begins && (name[i] == '.' || name[i] == '/'))
            return false;
    }
    return name[length - 1] != '/';
}

static void write_part(const char *name, size_t length, const char *text, size_t bytes)
{
    const char *root = fuzz_path("root");
    char path[512];
    struct stat info;

    if (!plain(name, length))
        return;
    snprintf(path, sizeof path, "%s/%.*s", root, (int)length, name);
    for (char *slash = path + strlen(root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        if (mkdir(path, 0777) && errno != EEXIST)
            return;
        if (stat(path, &info) || !S_ISDIR(info.st_mode)) /* a file of the input is in the way */
            return;
        *slash = '/';
    }
    if (stat(path, &info) || S_ISREG(info.st_mode))
        fuzz_write(path, text, bytes, 0);
}

static void write_parts(const char *text)
{
    for (int files = 0; text && files < MOST_FILES && !strncmp(text, "==", 2); files++) {
        const char *name = text + 2, *body = strchr(name, '\n'), *end;

        if (!body)
            return;
        body++;
        end = !strncmp(body, "==", 2) ? body : strstr(body, "\n==");
        if (end && *end == '\n')
            end++;
        write_part(name, (size_t)(body - 1 - name), body,
                   end ? (size_t)(end - body) : strlen(body));
        text = end;
    }
}

static void check_health(const struct numoe_machine *machine, const char *root, const char *input)
{
    struct numoe_warnings warnings;
    struct fuzz_print print;

    check_that(!numoe_machine_health(machine, root, &warnings));
    for (uint32_t i = 0; i < warnings.count; i++)
        check_that(*warnings.list[i].what && *warnings.list[i].message && *warnings.list[i].fix);
    fuzz_print_open(&print);
    numoe_warnings_print(&warnings, print.out);
    fuzz_check_text(fuzz_print_take(&print), input);
    free(print.text);
    numoe_warnings_free(&warnings);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct numoe_machine *plain_machine;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = NULL;
    char *text = fuzz_text(data, size);
    char root[256];
    int rc;

    if (!text)
        return -1;
    if (!plain_machine)
        check_that(!fuzz_load("pack:2 [numa(memory=8GB)] core:2 pu:1", &plain_machine, &error));
    snprintf(root, sizeof root, "%s", fuzz_path("root"));
    fuzz_remove(root);
    mkdir(root, 0777);
    write_parts(text);
    /* what is read for warnings does not depend on what hwloc makes of the rest */
    check_health(plain_machine, root, text);
    if (strstr(text, "==sys/devices/system/cpu/")) {
        rc = fuzz_load(root, &machine, &error);
        if (rc) {
            fuzz_check_error(rc, &error);
        } else {
            check_health(machine, root, text);
            fuzz_use_machine(machine, text);
        }
    }
    free(text);
    return 0;
}
