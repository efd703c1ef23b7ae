/* Error record and log callback. SPDX-License-Identifier: Apache-2.0 */
#include "numoe_base.h"

#include <stdio.h>

_Static_assert(sizeof(struct numoe_error) == 720, "part of the ABI: grow at the end only");

#define HOLDS(error, field)                                                                        \
    ((error)->size >= offsetof(struct numoe_error, field) + sizeof(error)->field)

/* Names and words from files may hold anything; a terminal must not act on it, nor one line become
 * two. */
static void make_printable(char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f)
            *text = '?';
}

int numoe_error_set(struct numoe_error *error, int code, const char *where, const char *format, ...)
{
    va_list args;

    if (!error)
        return code;
    if (HOLDS(error, code))
        error->code = code;
    if (HOLDS(error, where)) {
        snprintf(error->where, sizeof error->where, "%s", where ? where : "");
        make_printable(error->where);
    }
    if (HOLDS(error, message)) {
        va_start(args, format);
        vsnprintf(error->message, sizeof error->message, format, args);
        va_end(args);
        make_printable(error->message);
    }
    return code;
}

void numoe_log_write(const struct numoe_log *log, enum numoe_log_level level, const char *format,
                     ...)
{
    char message[1024];
    va_list args;

    if (!log || !log->fn)
        return;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    make_printable(message);
    log->fn(log->user, level, message);
}
