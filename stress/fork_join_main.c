/*
 * numoe-fork-join: what an empty fork and join costs, numoe's pool beside libgomp, pthreadpool and
 * a bare futex.
 *
 *     numoe-fork-join [--json] [--rounds N] [--warm N] [--parked N] [--idle-ms N] [WORKERS]...
 *
 * For each number of workers (default: 2, 4, 8 ... up to the cores) and each OMP_WAIT_POLICY (only
 * libgomp looks at it, once in its life: a process of its own for each) the ways are measured in
 * turns, in so many rounds (default 4). In a round each way starts its threads, is measured and
 * ends them, so that none spins while another is measured: warm    call after call parked  after so
 * many milliseconds of nothing (default 100) In every way thread i, the caller being the first, is
 * pinned to the CPU of worker i of this machine's plan; more workers than CPUs share them.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "fork_join.h"

#include "base/clock.h"
#include "bench.h"
#include "numoe_topo.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_WAYS = 8, MOST_COUNTS = 32, MOST_SAMPLES = 1000000, MOST_WORKERS = 4096 };
enum { WARM, PARKED, STATES };

static const char *const state_names[STATES] = {"warm", "parked"};
static const char *const policies[] = {"active", "passive"};

struct request {
    uint32_t rounds, samples[STATES], idle_ms;
    uint32_t counts[MOST_COUNTS], count_count;
    bool json;
};

/* Microseconds. What a measuring process hands to the one that prints. */
struct result {
    double median, p99, least;
};
struct results {
    struct result of[MOST_WAYS][STATES];
};

static int fail(const char *what, int code)
{
    fprintf(stderr, "numoe-fork-join: %s: %s\n", what, strerror(code < 0 ? -code : code));
    return 1;
}

/* ---- CPUs ------------------------------------------------------------------------------------ */

static int plan_cpus(uint32_t workers, struct numoe_plan **plan)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_machine *machine;
    int rc = numoe_machine_load(NULL, &machine, NULL);

    if (rc)
        return rc;
    request.workers = workers;
    rc = numoe_plan_create(machine, &request, plan, NULL);
    numoe_machine_free(machine);
    return rc;
}

static void pin(pid_t thread, uint32_t os_cpu)
{
    cpu_set_t mask;

    CPU_ZERO(&mask);
    if (os_cpu < CPU_SETSIZE) {
        CPU_SET(os_cpu, &mask);
        sched_setaffinity(thread, sizeof mask, &mask);
    }
}

static int by_number(const void *a, const void *b)
{
    const pid_t x = *(const pid_t *)a, y = *(const pid_t *)b;

    return (x > y) - (x < y);
}

/* Pin the caller and, in the order in which they were started, all other threads. */
static void pin_threads(const struct numoe_plan *plan)
{
    static pid_t threads[MOST_WORKERS];
    DIR *tasks = opendir("/proc/self/task");
    uint32_t count = 0;
    struct dirent *entry;

    while (tasks && (entry = readdir(tasks))) {
        const pid_t thread = atoi(entry->d_name);
        if (thread > 0 && thread != getpid() && count < MOST_WORKERS)
            threads[count++] = thread;
    }
    if (tasks)
        closedir(tasks);
    qsort(threads, count, sizeof *threads, by_number);
    for (uint32_t t = 0; t < count; t++)
        pin(threads[t], plan->workers[(t + 1) % plan->worker_count].os_cpu);
    pin(0, plan->workers[0].os_cpu);
}

/* ---- measuring ------------------------------------------------------------------------------- */

static void sleep_ms(uint32_t ms)
{
    struct timespec time = {ms / 1000, (long)(ms % 1000) * 1000000};

    nanosleep(&time, NULL);
}

static int check(uint32_t workers, uint64_t runs)
{
    for (uint32_t i = 0; i < workers; i++)
        if (fork_join_cells[i].runs != runs)
            return -EILSEQ;
    return 0;
}

/* One round of one way: samples in microseconds are appended from `at`. */
static int measure_round(const struct fork_join_way *way, uint32_t asked,
                         const struct request *request, uint32_t round, double *samples[STATES])
{
    const uint32_t workers = way->workers ? way->workers : asked, warm_up = 200;
    struct numoe_plan *plan;
    uint64_t runs = warm_up;
    cpu_set_t mask;
    int rc;

    memset(fork_join_cells, 0, workers * sizeof *fork_join_cells);
    sched_getaffinity(0, sizeof mask, &mask);
    rc = plan_cpus(asked, &plan);
    if (rc)
        return rc;
    rc = way->create(workers);
    if (rc)
        goto out;
    way->fork_join(workers);
    pin_threads(plan);
    for (uint32_t i = 1; i < warm_up; i++)
        way->fork_join(workers);
    for (int state = 0; state < STATES; state++) {
        const uint32_t each = request->samples[state];

        for (uint32_t i = 0; i < each; i++) {
            uint64_t begin;

            if (state == PARKED)
                sleep_ms(request->idle_ms);
            begin = numoe_now_ns();
            way->fork_join(workers);
            samples[state][round * each + i] = 1e-3 * (double)(numoe_now_ns() - begin);
        }
        runs += each;
    }
    way->destroy();
    rc = check(workers, runs);
out:
    sched_setaffinity(0, sizeof mask, &mask);
    numoe_plan_free(plan);
    return rc;
}

static int measure(const struct request *request, uint32_t workers, struct results *results)
{
    double *samples[MOST_WAYS][STATES] = {0};
    int rc = 0;

    fork_join_cells =
        aligned_alloc(sizeof *fork_join_cells, (workers + 2) * sizeof *fork_join_cells);
    if (!fork_join_cells)
        return -ENOMEM;
    for (uint32_t w = 0; fork_join_ways[w].name; w++)
        for (int state = 0; state < STATES; state++) {
            samples[w][state] = calloc((size_t)request->rounds * request->samples[state] + 1,
                                       sizeof *samples[w][state]);
            if (!samples[w][state])
                return -ENOMEM;
        }
    for (uint32_t round = 0; round < request->rounds; round++)
        for (uint32_t w = 0; fork_join_ways[w].name; w++) {
            rc = measure_round(&fork_join_ways[w], workers, request, round, samples[w]);
            if (rc) {
                fail(fork_join_ways[w].name, rc);
                return rc;
            }
        }
    for (uint32_t w = 0; fork_join_ways[w].name; w++)
        for (int state = 0; state < STATES; state++) {
            const size_t count = (size_t)request->rounds * request->samples[state];
            struct result *result = &results->of[w][state];

            result->median = numoe_bench_quantile(samples[w][state], count, 0.5);
            result->p99 = numoe_bench_quantile(samples[w][state], count, 0.99);
            result->least = numoe_bench_quantile(samples[w][state], count, 0);
            free(samples[w][state]);
        }
    free(fork_join_cells);
    return 0;
}

/* Measure in a process that was started with the policy in its environment. */
static int measure_apart(int argc, char **argv, const char *policy, uint32_t workers,
                         struct results *results)
{
    char number[16], *arguments[64] = {argv[0], "--measure", number};
    size_t got = 0;
    ssize_t part;
    int ends[2], status;
    pid_t child;

    snprintf(number, sizeof number, "%u", workers);
    for (int i = 1; i < argc && i < 60; i++)
        arguments[i + 2] = argv[i];
    if (pipe(ends))
        return -errno;
    child = fork();
    if (child < 0)
        return -errno;
    if (child == 0) {
        setenv("OMP_WAIT_POLICY", policy, 1);
        setenv("OMP_DYNAMIC", "false", 1);
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        execv("/proc/self/exe", arguments);
        _exit(127);
    }
    close(ends[1]);
    while (got < sizeof *results &&
           (part = read(ends[0], (char *)results + got, sizeof *results - got)) > 0)
        got += (size_t)part;
    close(ends[0]);
    waitpid(child, &status, 0);
    return got == sizeof *results && WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -EIO;
}

/* ---- the answer ------------------------------------------------------------------------------ */

static void print_text(uint32_t workers, const char *policy, const struct results *results)
{
    printf("%u workers, OMP_WAIT_POLICY=%s; microseconds\n", workers, policy);
    printf("  %-12s %10s %10s %10s    %10s %10s %10s\n", "", "warm", "p99", "least", "parked",
           "p99", "least");
    for (uint32_t w = 0; fork_join_ways[w].name; w++) {
        printf("  %-12s", fork_join_ways[w].name);
        for (int state = 0; state < STATES; state++) {
            const struct result *result = &results->of[w][state];
            printf("%s %10.2f %10.2f %10.2f", state ? "   " : "", result->median, result->p99,
                   result->least);
        }
        putchar('\n');
    }
    putchar('\n');
    fflush(stdout);
}

static void print_json(uint32_t workers, const char *policy, const struct results *results,
                       bool first)
{
    for (uint32_t w = 0; fork_join_ways[w].name; w++)
        for (int state = 0; state < STATES; state++) {
            const struct result *result = &results->of[w][state];
            printf(
                "%s\n  {\"workers\": %u, \"policy\": \"%s\", \"way\": \"%s\", \"state\": \"%s\", "
                "\"median_us\": %.3f, \"p99_us\": %.3f, \"least_us\": %.3f}",
                first && w == 0 && state == 0 ? "" : ",", workers, policy, fork_join_ways[w].name,
                state_names[state], result->median, result->p99, result->least);
        }
    fflush(stdout);
}

static int usage(void)
{
    fprintf(stderr, "Usage: numoe-fork-join [--json] [--rounds N] [--warm N] [--parked N] "
                    "[--idle-ms N] [WORKERS]...\n");
    return 2;
}

static bool number(const char *text, uint32_t most, uint32_t *value)
{
    char *end;
    const unsigned long long n = strtoull(text, &end, 10);

    if (*text < '0' || *text > '9' || *end || n < 1 || n > most)
        return false;
    *value = (uint32_t)n;
    return true;
}

static bool parse(int argc, char **argv, struct request *request)
{
    static const struct {
        const char *name;
        size_t place;
    } numbers[] = {
        {"--rounds", offsetof(struct request, rounds)},
        {"--warm", offsetof(struct request, samples[WARM])},
        {"--parked", offsetof(struct request, samples[PARKED])},
        {"--idle-ms", offsetof(struct request, idle_ms)},
    };

    for (int i = 1; i < argc; i++) {
        bool known = false;

        if (!strcmp(argv[i], "--json")) {
            request->json = true;
            continue;
        }
        for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
            if (!strcmp(argv[i], numbers[n].name)) {
                known = true;
                if (++i == argc ||
                    !number(argv[i], MOST_SAMPLES,
                            (uint32_t *)(void *)((char *)request + numbers[n].place)))
                    return false;
                break;
            }
        if (known)
            continue;
        if (request->count_count == MOST_COUNTS ||
            !number(argv[i], MOST_WORKERS, &request->counts[request->count_count++]))
            return false;
    }
    return true;
}

static int default_counts(struct request *request)
{
    struct numoe_plan *plan;
    int rc = plan_cpus(0, &plan);

    if (rc)
        return rc;
    for (uint32_t count = 2; request->count_count == 0 || count <= plan->worker_count; count *= 2)
        request->counts[request->count_count++] = count;
    numoe_plan_free(plan);
    return 0;
}

int main(int argc, char **argv)
{
    struct request request = {.rounds = 4, .samples = {5000, 10}, .idle_ms = 100};
    struct results results;
    bool first = true;
    int rc;

    if (argc > 2 && !strcmp(argv[1], "--measure")) {
        uint32_t workers;

        if (!number(argv[2], MOST_WORKERS, &workers) || !parse(argc - 2, argv + 2, &request))
            return usage();
        memset(&results, 0, sizeof results);
        rc = measure(&request, workers, &results);
        return rc || write(STDOUT_FILENO, &results, sizeof results) != sizeof results;
    }
    if (!parse(argc, argv, &request))
        return usage();
    if (request.count_count == 0 && (rc = default_counts(&request)))
        return fail("the machine", rc);
    if (request.json)
        printf("{\"rounds\": %u, \"warm\": %u, \"parked\": %u, \"idle_ms\": %u, \"results\": [",
               request.rounds, request.samples[WARM], request.samples[PARKED], request.idle_ms);
    for (uint32_t c = 0; c < request.count_count; c++)
        for (size_t p = 0; p < sizeof policies / sizeof *policies; p++) {
            rc = measure_apart(argc, argv, policies[p], request.counts[c], &results);
            if (rc)
                return fail("measuring", rc);
            if (request.json)
                print_json(request.counts[c], policies[p], &results, first);
            else
                print_text(request.counts[c], policies[p], &results);
            first = false;
        }
    if (request.json)
        printf("\n]}\n");
    return 0;
}
