/* Error record and log callback. SPDX-License-Identifier: Apache-2.0 */
#include "numoe_base.h"

#include <stdio.h>
#include <string.h>

int numoe_error_set(struct numoe_error *error, int code, const char *where, const char *format, ...)
{
    if (error) {
        va_list args;
        error->code = code;
        snprintf(error->where, sizeof error->where, "%s", where ? where : "");
        va_start(args, format);
        vsnprintf(error->message, sizeof error->message, format, args);
        va_end(args);
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
    log->fn(log->user, level, message);
}
