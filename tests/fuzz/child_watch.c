/*
 * Forked children under a fuzzer.
 *
 * hwloc reads what is not trusted in a child process. What the child executes must count as
 * covered, or a fuzzer sees none of the ways in which a description is refused there; and a fault
 * there is no finding as long as it is hwloc's, while one of numoe's own must not pass for it.
 *
 * Coverage: before it does anything else, the child puts memory that both share under its counters,
 * and the parent adds those to its own afterwards. Faults: AddressSanitizer hands its report to a
 * function here. hwloc never calls back into numoe, so a stack with hwloc in it is hwloc's fault.
 * Without sanitizers nothing is known of the child, and both calls do next to nothing.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "fuzz.h"
#include "topo_load.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__clang__)
#define NOT_COVERED __attribute__((no_sanitize("coverage", "address", "undefined")))
#else
#define NOT_COVERED
#endif

/* One byte for each edge of instrumented code; null where it is built without. */
extern uint8_t __start___sancov_cntrs[] __attribute__((weak));
extern uint8_t __stop___sancov_cntrs[] __attribute__((weak));

void __asan_set_error_report_callback(void (*)(const char *)) __attribute__((weak));
void __sanitizer_set_death_callback(void (*)(void)) __attribute__((weak));
void __ubsan_on_report(void);
const char *__asan_default_options(void);

enum { REPORT_BYTES = 16384, PAGE = 4096 };

struct told {
    volatile bool asan, ubsan;
    char report[REPORT_BYTES];
};

static struct told *told; /* shared with children */
static pid_t parent;

/* Of whole pages from the one where counters begin to the one where they end. */
static int counters_fd = -1;
static uint8_t *counters_page;
static size_t counters_bytes;
static uint8_t *counters_shared;

/* A child sets its signals to their defaults; this way faults are reported all the same. */
const char *__asan_default_options(void)
{
    return "handle_segv=2:handle_sigbus=2:handle_sigfpe=2:handle_sigill=2";
}

static void asan_reports(const char *report)
{
    if (!told || getpid() == parent)
        return;
    strncpy(told->report, report, sizeof told->report - 1);
    told->asan = true;
}

/* The sanitizer's runtime calls it, if there is one. */
void __ubsan_on_report(void)
{
    if (told && getpid() != parent)
        told->ubsan = true;
}

static void died(void)
{
}

NOT_COVERED static void in_child(void)
{
    /* the fuzzer's own would store the input as one that crashed it */
    if (__sanitizer_set_death_callback)
        __sanitizer_set_death_callback(died);
    if (counters_fd < 0)
        return;
    if (pwrite(counters_fd, counters_page, counters_bytes, 0) != (ssize_t)counters_bytes ||
        mmap(counters_page, counters_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             counters_fd, 0) == MAP_FAILED)
        _exit(1);
}

static void share_counters(void)
{
    uint8_t *begin = __start___sancov_cntrs, *end = __stop___sancov_cntrs;
    uintptr_t first = (uintptr_t)begin & ~(uintptr_t)(PAGE - 1);
    uintptr_t last = ((uintptr_t)end + PAGE - 1) & ~(uintptr_t)(PAGE - 1);

    if (!begin || begin == end)
        return;
    counters_page = (uint8_t *)first;
    counters_bytes = last - first;
    counters_fd = memfd_create("counters", MFD_CLOEXEC);
    check_that(counters_fd >= 0 && !ftruncate(counters_fd, (off_t)counters_bytes));
    counters_shared =
        mmap(NULL, counters_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, counters_fd, 0);
    check_that(counters_shared != MAP_FAILED);
}

void fuzz_child_watch(void)
{
    if (told)
        return;
    parent = getpid();
    told = mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check_that(told != MAP_FAILED);
    share_counters();
    if (__asan_set_error_report_callback)
        __asan_set_error_report_callback(asan_reports);
    check_that(!pthread_atfork(NULL, NULL, in_child));
}

NOT_COVERED static void add_counters(void)
{
    size_t begin = (size_t)(__start___sancov_cntrs - counters_page);
    size_t end = (size_t)(__stop___sancov_cntrs - counters_page);

    for (size_t i = begin; i < end; i++)
        if (counters_shared[i] > counters_page[i])
            counters_page[i] = counters_shared[i];
    memset(counters_shared, 0, counters_bytes);
}

/* The stack of a report ends at an empty line; others may follow, of where memory came from. */
static bool of_hwloc(char *report)
{
    char *stack = strstr(report, "    #0 "), *end;

    if (!stack)
        return true; /* not even a stack is left: hwloc is not instrumented, numoe is */
    end = strstr(stack, "\n\n");
    if (end)
        *end = 0;
    return strstr(stack, "libhwloc") != NULL;
}

void fuzz_child_check(void)
{
    bool asan = told->asan;

    if (counters_fd >= 0)
        add_counters();
    told->asan = false;
    check_that(!told->ubsan, "undefined behaviour in a child");
    check_that(!asan || of_hwloc(told->report), "a fault of numoe in a child:\n%s", told->report);
}

static int load_here(const char *words, struct numoe_machine **machine, struct numoe_error *error)
{
    struct topo_source source;
    int rc = topo_source_open(words, &source, error);

    if (!rc)
        rc = source.kind == TOPO_SAVED ? topo_saved_read(&source, machine, error)
                                       : topo_machine_build(&source, machine, error);
    topo_source_close(&source);
    return rc;
}

int fuzz_load(const char *words, struct numoe_machine **machine, struct numoe_error *error)
{
    int rc;

    if (getenv("NUMOE_FUZZ_NO_CHILD") && !topo_capture_is(words))
        return load_here(words, machine, error);
    fuzz_child_watch();
    rc = numoe_machine_load(words, machine, error);
    fuzz_child_check();
    return rc;
}
