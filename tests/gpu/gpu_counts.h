/*
 * gpu_counts.h - facts and tests counted by programs that need a device and call no CUDA.
 */
#ifndef NUMOE_TESTS_GPU_COUNTS_H
#define NUMOE_TESTS_GPU_COUNTS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

static int passed, failed, skipped; /* tests */

__attribute__((format(printf, 2, 3))) static inline bool expect(bool fact, const char *format, ...)
{
    va_list args;

    if (fact)
        return true;
    va_start(args, format);
    printf("FAILED: ");
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    return false;
}

static inline void count(bool ok, const char *name)
{
    passed += ok;
    failed += !ok;
    printf("%s %s\n", ok ? "ok  " : "FAIL", name);
    fflush(stdout);
}

/* The last line, and the program's exit code. */
static inline int finish(void)
{
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}

#endif
