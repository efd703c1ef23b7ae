/**
 * numoe_base.h - what every part of numoe reports with: the error record and the log callback.
 *
 * Part of the installed API (numoe.h includes it). C11 and C++.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_BASE_H
#define NUMOE_BASE_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define NUMOE_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#define NUMOE_PRINTF(fmt, first)
#endif

/**
 * What went wrong, in words. Optional everywhere it is taken: pass NULL to do without.
 * Written only when the call fails; untouched on success. Only fields that lie wholly within size
 * are written.
 */
struct numoe_error {
    size_t size;       /**< sizeof(struct numoe_error), set by NUMOE_ERROR_INIT */
    int code;          /**< negative errno, the same that the call returned */
    char where[192];   /**< file, tensor, node, option or call concerned; may be empty */
    char message[512]; /**< one sentence without a final newline */
};

#define NUMOE_ERROR_INIT                                                                           \
    {                                                                                              \
        sizeof(struct numoe_error), 0, {0},                                                        \
        {                                                                                          \
            0                                                                                      \
        }                                                                                          \
    }

enum numoe_log_level {
    NUMOE_LOG_ERROR,
    NUMOE_LOG_WARNING, /**< something costs speed or was done another way than asked */
    NUMOE_LOG_INFO,
    NUMOE_LOG_DEBUG
};

/**
 * Receives one message, without a final newline. May be called by any thread that is inside a
 * numoe call, also by several at once; must not call back into numoe.
 */
typedef void numoe_log_fn(void *user, enum numoe_log_level level, const char *message);

/** Where messages go. A NULL function drops them: the library itself never prints. */
struct numoe_log {
    numoe_log_fn *fn;
    void *user;
};

/**
 * Fill an error record. For numoe's own parts and for callbacks that the caller supplies. Control
 * characters in where and message become '?'.
 * @param error  NULL, or a record to fill
 * @param code   negative errno
 * @param where  NULL or what is concerned
 * @return code, so that `return numoe_error_set(...)` reads well
 */
int numoe_error_set(struct numoe_error *error, int code, const char *where, const char *format, ...)
    NUMOE_PRINTF(4, 5);

/** Send one formatted message, control characters as '?'; does nothing when log or its function is
 *  NULL. */
void numoe_log_write(const struct numoe_log *log, enum numoe_log_level level, const char *format,
                     ...) NUMOE_PRINTF(3, 4);

#ifdef __cplusplus
}
#endif

#endif
